//! Variants of kernels that a CPU may not choose by itself.

use super::{Avx512Vnni, Kernel};
use crate::case::ActivationRounding;
use crate::layouts::kleidi::{Columns, RhsLayout};
use crate::num::dims::{GroupSize, LogicalK, Shape};
use crate::vectors::Rng;
use crate::w4a8::scalar::Scalar;
use crate::w4a8::{Linear, LinearWorkspace};
use ndarray::Array2;

/// The bits of a product by `kernel`, on the engine.
pub(super) fn product(
    kernel: Box<dyn Kernel>,
    [size_m, size_k, size_n]: [usize; 3],
    group: GroupSize,
) -> Vec<u32> {
    let mut rng = Rng::new((size_m * 7 + size_k * 3 + size_n) as u64);
    let shape = Shape::new(size_k, size_n);
    let codes = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
    let groups = group.groups(LogicalK(size_k)).expect("groups");
    // Every finite scale, subnormal ones too.
    let scales: Vec<u16> = (0..size_n * groups)
        .map(|_| rng.below(0x7f80) as u16 | (rng.below(2) << 15) as u16)
        .collect();
    let bias: Vec<f32> = (0..size_n).map(|_| rng.below(999) as f32 / 37.0).collect();
    let columns = match group {
        GroupSize::Channel => {
            let scales: Vec<f32> = (0..size_n).map(|_| rng.below(999) as f32 / 4096.0).collect();
            Columns::channel_wise(shape, codes, &scales, Some(&bias))
        }
        GroupSize::Of(g) => Columns::group_wise(shape, g, codes, scales, Some(&bias)),
    };
    let layout = RhsLayout::new(shape, group, 8).expect("a layout");
    let packed = layout.pack(&columns.expect("columns")).expect("packed");
    let layer = Linear::new(packed, ActivationRounding::HalfAway).with_kernel(kernel);
    let x = Array2::from_shape_simple_fn((size_m, size_k), || rng.below(2001) as f32 / 500.0 - 2.0);
    let mut y = Array2::<f32>::zeros((size_m, size_n));
    layer.forward(x.view(), &mut LinearWorkspace::default(), y.view_mut()).expect("a result");
    y.iter().map(|y| y.to_bits()).collect()
}

/// One and two rows, with blocks read one by one and four at a time, whole groups of four and not.
#[test]
fn orders_of_reading_give_the_same_bits() {
    let Some(kernel) = Avx512Vnni::new() else { return };
    for (size_k, group) in [(64, 32), (2112, 32), (2240, 64), (512, 256)] {
        for size_n in [1, 8, 9, 31, 32, 33, 64, 71, 200] {
            for size_m in [1, 2] {
                let (sizes, group) = ([size_m, size_k, size_n], GroupSize::Of(group));
                let expected = product(Box::new(Scalar), sizes, group);
                for four in [false, true] {
                    let found = product(Box::new(kernel.with_streams(four)), sizes, group);
                    assert!(found == expected, "M, K, N {sizes:?}, group {group}, four {four}");
                }
            }
        }
    }
}
