//! One product of the int4 path by one kernel, on weights and activations of one value: the
//! executed instructions depend only on the shape.
//!
//! Arguments: kernel, M, N, K, group (K: channel-wise), nr.

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::layouts::kleidi::{Columns, QuantizedRows, RhsLayout, padded_k};
use marlinspike::w4a8::{MAX_ROWS, PanelRows, Run, kernels};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, sizes @ ..] = &arguments[..] else { panic!("no kernel") };
    let sizes: Vec<usize> = sizes.iter().map(|s| s.parse().expect("a size")).collect();
    let [size_m, size_n, size_k, group, nr] = sizes[..] else { panic!("five sizes") };
    let shape = Shape::new(size_k, size_n);
    let (codes, channel) = (vec![1i8; shape.len()], group == size_k);
    let columns = match channel {
        true => Columns::channel_wise(shape, codes, &vec![1.0; size_n], None),
        false => {
            let scales = vec![0x3f80; size_n * (size_k / group)];
            Columns::group_wise(shape, group, codes, scales, None)
        }
    };
    let group = if channel { GroupSize::Channel } else { GroupSize::Of(group) };
    let layout = RhsLayout::new(shape, group, nr).expect("a layout");
    let rhs = layout.pack(&columns.expect("columns")).expect("packed columns");
    let rows = QuantizedRows {
        size_m,
        size_k,
        codes: vec![1; size_m * padded_k(size_k)],
        negated_zero_points: vec![0; size_m],
        reciprocals: vec![1.0; size_m],
    };
    let kernel = kernels().into_iter().find(|k| k.name() == name).expect("a kernel of this CPU");
    let mut y = vec![0.0; size_m * size_n];
    let run = Run { layout, bytes: rhs.bytes(), columns: size_n };
    for (i, y) in y.chunks_mut(2 * MAX_ROWS * size_n).enumerate() {
        let count = y.len() / size_n;
        let panel = |first: usize| {
            let count = (count - first).min(MAX_ROWS);
            PanelRows::from_rows(&rows, 2 * MAX_ROWS * i + first, count, layout)
        };
        if count <= MAX_ROWS {
            kernel.run(panel(0).panel(), run, y, size_n);
        } else {
            let panels = [panel(0), panel(MAX_ROWS)];
            kernel.run_pair([panels[0].panel(), panels[1].panel()], run, y, size_n);
        }
    }
    assert!(y.iter().all(|&y| y == size_k as f32), "a wrong product");
}
