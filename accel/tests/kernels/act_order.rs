//! Weights with act-order on a GPU: slices of k whose groups are of several sizes, and experts.

use crate::common;

use crate::common::{Experts, HALVES, Law, Random, compare_layers, forward, weight};
use marlinspike::act_order;
use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::weight::{Groups, Weight};
use marlinspike_accel::{
    AccelError,
    ops::MarlinLayer,
    ops::gemm::{MarlinWeight, marlin_gemm},
    ops::permute_cols,
};

/// The first `size_k` rows, in random order, of a weight that is three times as long: its groups
/// have any number of rows, some none.
fn slice(
    random: &mut Random,
    ty: ScalarType,
    dtype: ScalarType,
    shape: Shape,
    group_size: usize,
    bias: bool,
) -> Weight<'static> {
    let whole = Shape::new(3 * shape.size_k, shape.size_n);
    let group = GroupSize::Of(group_size);
    let scales = weight(random, ty, dtype, whole, group, bias).scales;
    let order = random.permutation(whole.size_k);
    let g_idx = order[..shape.size_k].iter().map(|&k| k / group_size as u32).collect();
    let groups = Groups::Indexed { g_idx, group_size: group };
    Weight { scales, groups, ..weight(random, ty, dtype, shape, group, bias) }
}

/// A whole weight in random order.
fn whole(
    random: &mut Random,
    ty: ScalarType,
    dtype: ScalarType,
    shape: Shape,
    group_size: usize,
) -> Weight<'static> {
    let group = GroupSize::Of(group_size);
    let order = random.permutation(shape.size_k);
    let g_idx = order.iter().map(|&k| k / group_size as u32).collect();
    let groups = Groups::Indexed { g_idx, group_size: group };
    Weight { groups, ..weight(random, ty, dtype, shape, group, false) }
}

const TYPES: [ScalarType; 2] = [ScalarType::UINT4B8, ScalarType::UINT8B128];

#[test]
fn slices_of_k() {
    let name = "marlin_gemm, slices of k with act-order";
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(0x0AC7_0001_89AB_CDEF));
    for case in 0..120 {
        let (dtype, ty) = (HALVES[case % 2], TYPES[case / 2 % 2]);
        let group_size = [32, 64, 128][random.below(3)];
        // A group of the configuration may be as long as the slice.
        let size_k = if case < 100 { 128 * (1 + random.below(6)) } else { 1408 };
        let shape = Shape::new(size_k, 64 * (1 + random.below(4)));
        let size_m = 1 + random.below(if case < 100 { 20 } else { 80 });
        let w = slice(&mut random, ty, dtype, shape, group_size, case % 3 == 0);
        let packed = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
        let x = random.halves(dtype, size_m * size_k, 1.0);
        let schedule = Schedule::canonical(&w, dtype, dtype).unwrap();
        let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
        let codes = rows_of("x", &codes, size_k).unwrap();
        let wanted = schedule.execute(codes, &w, Extras::default()).unwrap();
        let wanted: Vec<u16> = wanted.into_iter().map(|bits| bits as u16).collect();
        let gathered = permute_cols(&device, &x, packed.perm(0).unwrap()).unwrap();
        let mut y = device.upload(&vec![0xabcd; wanted.len()]).unwrap();
        marlin_gemm(&device, &device.upload(&gathered).unwrap(), &packed, &mut y).unwrap();
        let context = format!("{dtype}, {ty}, {shape}, groups of {group_size}, M {size_m}");
        law.equal(&context, &device.download(&y).unwrap(), &wanted);
    }
    law.held();
}

#[test]
fn experts() {
    let name = "expert layer, act-order";
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(0x0AC7_0002_89AB_CDEF));
    let (experts, h, size_i) = (5, 384, 256);
    for dtype in HALVES {
        for (ty, group_size) in [(TYPES[0], 32), (TYPES[0], 128), (TYPES[1], 64)] {
            for kind in [Activation::Silu, Activation::SwigluOai] {
                let activation = Definition::new(kind);
                let shape13 = Shape::new(h, activation.width_in(size_i));
                let shape2 = Shape::new(size_i, h);
                let mut of_w13 = |_| whole(&mut random, ty, dtype, shape13, group_size);
                let w13: Vec<_> = (0..experts).map(&mut of_w13).collect();
                // Of a rank: all scales, and a slice of the rows.
                let mut of_w2 = |_| slice(&mut random, ty, dtype, shape2, group_size, true);
                let w2 = (0..experts).map(&mut of_w2).collect();
                let parts = Experts { w13, w2, activation, dtype };
                // Another order of rows of one group is another sum.
                let reversed: Vec<Vec<u32>> = parts.w13.iter().map(descending_in_groups).collect();
                for orders in [[None, None], [Some(reversed.as_slice()), None]] {
                    let layer = Layer { orders, ..parts.layer() };
                    let on_device = MarlinLayer::new(&device, &layer).unwrap();
                    for tokens in [1, 9, 140] {
                        let context = format!(
                            "{dtype}, {ty}, groups of {group_size}, {kind:?}, orders {}",
                            orders[0].is_some()
                        );
                        let run = |x: &[u16], ids: &[i32], weights: &[f32]| {
                            forward(&device, &on_device, x, 2, ids, weights)
                        };
                        compare_layers(&mut law, &context, &mut random, &layer, (tokens, 2), run);
                    }
                }
            }
        }
    }
    law.held();
}

/// A permutation that sorts the weight's rows by group, the last row of a group first.
fn descending_in_groups(weight: &Weight<'_>) -> Vec<u32> {
    let Groups::Indexed { g_idx, .. } = &weight.groups else { panic!("no g_idx") };
    let backwards: Vec<u32> = g_idx.iter().rev().copied().collect();
    let last = g_idx.len() as u32 - 1;
    act_order::sort(&backwards).perm.iter().map(|&k| last - k).collect()
}

#[test]
fn slices_of_other_types_are_refused() {
    let Some(device) = common::device_or_skip("slices_of_other_types_are_refused") else { return };
    let mut random = Random(7);
    let (shape, dtype) = (Shape::new(256, 64), ScalarType::FLOAT16);
    let w = slice(&mut random, ScalarType::UINT4, dtype, shape, 32, false);
    // As many zero points as scales.
    let whole = Shape::new(3 * shape.size_k, shape.size_n);
    let zeros =
        weight(&mut random, ScalarType::UINT4, dtype, whole, GroupSize::Of(32), false).zeros;
    let error = MarlinWeight::new(&device, &[Weight { zeros, ..w }], dtype).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "group_size", .. }), "{error:?}");
}
