//! The int4 path's product by each kernel: `cargo bench -p marlinspike --bench w4a8`. Items are
//! multiply-accumulates.

use divan::Bencher;
use divan::counter::ItemsCount;
use marlinspike::case::ActivationRounding;
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layout::kleidi::{Columns, LhsLayout, PackedLhs, PackedRhs, RhsLayout};
use marlinspike::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::{Values, kernels, multiply, quantize};

const SIZE_K: usize = 2048;
const SIZE_N: usize = 512;

fn main() {
    divan::main();
}

fn sides(size_m: usize, group: i64) -> (PackedLhs<'static>, PackedRhs<'static>) {
    let (mut rng, shape) = (Rng::new(1), Shape::new(SIZE_K, SIZE_N));
    let x = (0..size_m * SIZE_K).map(|_| rng.below(2001) as f32 / 500.0 - 2.0).collect();
    let rows = quantize(&Values::F32(x), SIZE_K, ActivationRounding::HalfAway).expect("rows");
    let codes = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
    let columns = match group {
        -1 => Columns::channel_wise(shape, codes, &[0.01; SIZE_N], None),
        g => {
            let scales = vec![0x3c23; SIZE_N * SIZE_K / g as usize];
            Columns::group_wise(shape, g as usize, codes, scales, None)
        }
    };
    let group = GroupSize::from_config(group).expect("a group size");
    let lhs = LhsLayout::new(size_m, SIZE_K, if size_m == 1 { 1 } else { 4 }).expect("a layout");
    let rhs = RhsLayout::new(shape, group, 8).expect("a layout");
    let columns = columns.expect("columns");
    (lhs.pack(&rows).expect("packed"), rhs.pack(&columns).expect("packed"))
}

fn names() -> Vec<&'static str> {
    kernels().iter().map(|k| k.name()).collect()
}

fn product(bencher: Bencher<'_, '_>, name: &str, size_m: usize, group: i64) {
    let kernel = kernels().into_iter().find(|k| k.name() == name).expect("a kernel");
    let (lhs, rhs) = sides(size_m, group);
    bencher
        .counter(ItemsCount::new(size_m * SIZE_K * SIZE_N))
        .bench(|| multiply(kernel.as_ref(), &lhs, &rhs, ScalarType::FLOAT32));
}

#[divan::bench(args = names(), sample_count = 10)]
fn group_32_m_16(bencher: Bencher<'_, '_>, name: &str) {
    product(bencher, name, 16, 32);
}

#[divan::bench(args = names(), sample_count = 10)]
fn group_128_m_16(bencher: Bencher<'_, '_>, name: &str) {
    product(bencher, name, 16, 128);
}

#[divan::bench(args = names(), sample_count = 10)]
fn channel_m_16(bencher: Bencher<'_, '_>, name: &str) {
    product(bencher, name, 16, -1);
}

#[divan::bench(args = names(), sample_count = 10)]
fn group_32_m_1(bencher: Bencher<'_, '_>, name: &str) {
    product(bencher, name, 1, 32);
}
