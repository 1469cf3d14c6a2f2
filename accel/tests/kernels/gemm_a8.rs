//! Products with 8-bit activations on a GPU against the reference's execution of the canonical
//! schedule.

use crate::common;

use crate::common::{Experts, Float, HALVES, Law, Random, compare_layers, float_weight, weight};
use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::layer::{Layer, input_global_scale};
use marlinspike::moe::to_slots;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, Stack};
use marlinspike::weight::{Groups, Weight};
use marlinspike_accel::{
    AccelError, Device,
    ops::MarlinLayer,
    ops::align::{Runs, align_on_device},
    ops::gemm::{MarlinWeight, Routed, marlin_gemm},
    ops::gemm_a8::{RowsA8, marlin_gemm_a8, moe_marlin_gemm_a8},
};

const INT8: ScalarType = ScalarType::INT8;
const FP8: ScalarType = ScalarType::FLOAT8_E4M3FN;
const NOT_WRITTEN: u16 = 0xabcd;

/// A weight of one of the forms that `input` takes, by number.
fn any_weight(
    random: &mut Random,
    input: ScalarType,
    form: usize,
    dtype: ScalarType,
    shape: Shape,
) -> Weight<'static> {
    let bias = random.below(2) == 0;
    if form == 8 {
        assert_eq!(input, FP8);
        return float_weight(random, Float::Mxfp4(128), dtype, shape, bias);
    }
    let ty = [ScalarType::UINT4B8, ScalarType::UINT4][form / 4];
    let groups = [-1, 32, 64, 128][form % 4];
    weight(random, ty, dtype, shape, GroupSize::from_config(groups).unwrap(), bias)
}

/// Forms of weights under `input`.
fn forms(input: ScalarType) -> usize {
    if input == FP8 { 9 } else { 8 }
}

/// Any codes in some rows, moderate ones (e4m3: up to 2) in most; and a scale for each row, some of
/// them NaN.
fn rows(
    random: &mut Random,
    input: ScalarType,
    size_m: usize,
    size_k: usize,
) -> (Vec<u8>, Vec<f32>) {
    let mut codes: Vec<u8> = (0..size_m * size_k).map(|_| random.next() as u8).collect();
    if input == FP8 {
        for row in codes.chunks_exact_mut(size_k) {
            match random.below(12) {
                // Most likely contains a NaN.
                3 => {}
                4 => row.iter_mut().for_each(|c| *c = if *c & 0x7f == 0x7f { 0x7e } else { *c }),
                _ => row.iter_mut().for_each(|c| *c &= 0xbf),
            }
        }
    }
    let scale = |_| match random.below(40) {
        7 => f32::NAN,
        _ => (random.normal() * 0.02) as f32,
    };
    let scales = (0..size_m).map(scale).collect();
    (codes, scales)
}

/// The products of these rows with a stack's weights, by the canonical schedule.
fn times(scales: &[f32], weights: &[Weight<'_>], input: ScalarType) -> Vec<f32> {
    let factor = if input == INT8 { input_global_scale(weights) } else { 1.0 };
    scales.iter().map(|scale| scale * factor).collect()
}

fn compare(
    law: &mut Law,
    device: &Device,
    random: &mut Random,
    w: &Weight<'_>,
    (dtype, input): (ScalarType, ScalarType),
    size_m: usize,
) {
    let Shape { size_k, size_n } = w.shape();
    let (codes, scales) = rows(random, input, size_m, size_k);
    let schedule = Schedule::canonical(w, dtype, input).unwrap();
    let x: Vec<u32> = codes.iter().map(|&code| code.into()).collect();
    let of_rows = times(&scales, std::slice::from_ref(w), input);
    let extras = Extras { activation_scales: Some(&of_rows), ..Extras::default() };
    let wanted = schedule.execute(rows_of("x", &x, size_k).unwrap(), w, extras).unwrap();
    let wanted: Vec<u16> = wanted.into_iter().map(|bits| bits as u16).collect();
    let packed = MarlinWeight::for_8_bit(device, std::slice::from_ref(w), dtype, input).unwrap();
    let (codes, scales) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
    let mut y = device.upload(&vec![NOT_WRITTEN; size_m * size_n]).unwrap();
    let x = RowsA8 { codes: &codes, scales: &scales };
    marlin_gemm_a8(device, x, &packed, &mut y).unwrap();
    let groups = w.groups.group_size();
    let context = format!("{dtype}, {}, {}, groups of {groups}, M {size_m}", w.ty, w.shape());
    law.equal(&context, &device.download(&y).unwrap(), &wanted);
}

fn law(name: &'static str, seed: u64, input: ScalarType) {
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(seed));
    for dtype in HALVES {
        for form in (0..forms(input)).filter(|&form| form < 8 || dtype == ScalarType::BFLOAT16) {
            // Several chunks, the last one shorter; blocks of 64 rows and a part of one.
            for (size_k, size_n, size_m) in [(1408, 128, 70), (2048, 320, 33), (4352, 64, 13)] {
                let w = any_weight(&mut random, input, form, dtype, Shape::new(size_k, size_n));
                compare(&mut law, &device, &mut random, &w, (dtype, input), size_m);
            }
            for _ in 0..60 {
                let size_k = 128 * (1 + random.below(8));
                let shape = Shape::new(size_k, 64 * (1 + random.below(3)));
                let w = any_weight(&mut random, input, form, dtype, shape);
                let size_m = 1 + random.below(20);
                compare(&mut law, &device, &mut random, &w, (dtype, input), size_m);
            }
        }
    }
    law.held();
}

#[test]
fn int8_products() {
    law("marlin_gemm, int8 activations", 0x5EED_1001_1234_5678, INT8);
}

#[test]
fn fp8_products() {
    law("marlin_gemm, float8_e4m3fn activations", 0x5EED_1002_1234_5678, FP8);
}

#[test]
fn products_with_experts() {
    let name = "moe_wna16_marlin_gemm, 8-bit activations";
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(0x5EED_1003_1234_5678));
    let (experts, top_k, shape) = (5, 2, Shape::new(384, 128));
    for (dtype, input) in HALVES.map(|d| (d, INT8)).into_iter().chain(HALVES.map(|d| (d, FP8))) {
        for form in 0..8 {
            let mut stack = || any_weight(&mut random, input, form, dtype, shape);
            let mut weights: Vec<Weight<'static>> = (0..experts).map(|_| stack()).collect();
            // All have a bias or none.
            let bias = weights[0].bias.clone();
            weights.iter_mut().for_each(|w| w.bias.clone_from(&bias));
            let packed = MarlinWeight::for_8_bit(&device, &weights, dtype, input).unwrap();
            let align = Align {
                block_size: 1,
                num_experts: experts,
                expert_map: None,
                absent: Absent::Ignore,
            };
            let runs = Runs::new(&device, &align).unwrap();
            for tokens in [1, 6, 50] {
                let entries = tokens * top_k;
                let (codes, scales) = rows(&mut random, input, tokens, shape.size_k);
                let ids: Vec<i32> =
                    (0..entries).map(|_| random.below(experts + 1) as i32 - 1).collect();
                let router: Vec<f32> = ids.iter().map(|_| random.normal() as f32).collect();
                let block_size = packed.block_size(&device, entries.div_ceil(experts)).unwrap();
                let mut blocks = runs.room(&device, entries, block_size).unwrap();
                align_on_device(&device, &runs, &device.upload(&ids).unwrap(), &mut blocks)
                    .unwrap();
                let (c, s) = (device.upload(&codes).unwrap(), device.upload(&scales).unwrap());
                let weights_there = device.upload(&router).unwrap();
                let mut y = device.upload(&vec![NOT_WRITTEN; entries * shape.size_n]).unwrap();
                let routed = Routed { blocks: &blocks, top_k, topk_weights: Some(&weights_there) };
                let x = RowsA8 { codes: &c, scales: &s };
                moe_marlin_gemm_a8(&device, x, &packed, &mut y, routed).unwrap();

                let repeated: Vec<u32> = to_slots(&codes, shape.size_k, top_k)
                    .into_iter()
                    .map(|code| code.into())
                    .collect();
                let of_rows = to_slots(&times(&scales, &weights, input), 1, top_k);
                let expert_of: Vec<Option<usize>> =
                    ids.iter().map(|&id| usize::try_from(id).ok()).collect();
                let stack =
                    Stack { weights: &weights, expert_of: &expert_of, orders: None, places: None };
                let extras = Extras {
                    activation_scales: Some(&of_rows),
                    router_weights: Some(&router),
                    order: None,
                };
                let schedule = Schedule::canonical(&weights[0], dtype, input).unwrap();
                let repeated = rows_of("x", &repeated, shape.size_k).unwrap();
                let wanted = schedule.execute_stack(repeated, stack, extras).unwrap();
                let wanted: Vec<u16> = wanted
                    .into_iter()
                    .enumerate()
                    .map(|(i, bits)| match expert_of[i / shape.size_n] {
                        Some(_) => bits as u16,
                        None => NOT_WRITTEN,
                    })
                    .collect();
                let context = format!("{dtype}, {input}, form {form}, {tokens} tokens");
                law.equal(&context, &device.download(&y).unwrap(), &wanted);
            }
        }
    }
    law.held();
}

#[test]
fn layers() {
    let name = "expert layer, 8-bit activations";
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(0x5EED_1004_1234_5678));
    let (experts, h, size_i, top_k) = (6, 512, 384, 3);
    for (input, dtype, form, kind) in [
        (INT8, HALVES[0], 1, Activation::Silu),
        (INT8, HALVES[1], 3, Activation::SwigluOai),
        (INT8, HALVES[1], 4, Activation::SiluNoMul),
        (INT8, HALVES[0], 6, Activation::Gelu),
        (FP8, HALVES[0], 3, Activation::Silu),
        (FP8, HALVES[1], 5, Activation::Silu),
        (FP8, HALVES[1], 8, Activation::SwigluOai),
    ] {
        let activation = Definition::new(kind);
        let parts = Experts::new([h, size_i], activation, dtype, |shape| {
            let one = |_| any_weight(&mut random, input, form, dtype, shape);
            let mut all: Vec<_> = (0..experts).map(one).collect();
            let bias = all[0].bias.clone();
            all.iter_mut().for_each(|w| w.bias.clone_from(&bias));
            all
        });
        for router_weight_on_input in [false, true] {
            let input_dtype = Some(input);
            let layer = Layer { input_dtype, router_weight_on_input, ..parts.layer() };
            let on_device = MarlinLayer::new(&device, &layer).unwrap();
            for tokens in [1, 20, 150] {
                let run = |x: &[u16], ids: &[i32], weights: &[f32]| {
                    let mut work = on_device.workspace(&device, tokens, top_k).unwrap();
                    let mut y = device.upload(&vec![NOT_WRITTEN; x.len()]).unwrap();
                    let (x, ids) = (device.upload(x).unwrap(), device.upload(ids).unwrap());
                    let weights = device.upload(weights).unwrap();
                    on_device.forward(&device, &x, &ids, &weights, &mut work, &mut y).unwrap();
                    device.download(&y).unwrap()
                };
                let context = format!("{dtype}, {input}, form {form}, {kind:?}");
                compare_layers(&mut law, &context, &mut random, &layer, (tokens, top_k), run);
            }
        }
    }
    law.held();
}

/// The kernel's steps for four codes at once, in the low halves of a word's bytes, against the number
/// that each code represents.
#[test]
fn codes_become_numbers_four_at_a_time() {
    let every = |zero: u32| (0..16u32).map(move |q| (q, f64::from(q) - f64::from(zero)));
    // Neighbours differ, so that what one byte leaves in the next is seen.
    let word = |c: u32| c | (15 - c) << 8 | c << 16 | (c ^ 5) << 24;
    let byte = |w: u32, i: usize| w.to_le_bytes()[i];
    for zero in 0..16 {
        let zeros = zero * 0x0101_0101;
        let stored = |q: u32| if q >= zero { q - zero } else { 15 - q };
        for (q, value) in every(zero) {
            let c = word(q);
            let int8 = (c | 0x8080_8080).wrapping_sub(zeros) ^ 0x8080_8080;
            assert_eq!(f64::from(byte(int8, 0).cast_signed()), value);
            assert_eq!(byte(int8, 2), byte(int8, 0));
            let c = word(stored(q));
            let negative = (c + zeros) >> 4 & 0x0101_0101;
            let fp8 = c.wrapping_add(negative.wrapping_mul(0x71 + zero));
            assert_eq!(FP8.to_f64(byte(fp8, 0).into()) * 512.0, value, "{q} - {zero}");
            assert_eq!(byte(fp8, 2), byte(fp8, 0));
        }
    }
    for (q, value) in every(8) {
        let sixteens = (word(q) << 4 & 0xf0f0_f0f0) ^ 0x8080_8080;
        assert_eq!(f64::from(byte(sixteens, 0).cast_signed()), 16.0 * value);
        let e2m1 = (word(q) << 4 & 0x8080_8080) | (word(q) << 2 & 0x1c1c_1c1c);
        let value = ScalarType::FLOAT4_E2M1F.to_f64(q);
        assert_eq!(FP8.to_f64(byte(e2m1, 0).into()) * 64.0, value);
        assert_eq!(
            FP8.to_f64(byte(e2m1, 1).into()) * 64.0,
            ScalarType::FLOAT4_E2M1F.to_f64(15 - q)
        );
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let Some(device) = common::device_or_skip("arguments_that_do_not_fit_are_refused") else {
        return;
    };
    let mut random = Random(5);
    let (shape, dtype) = (Shape::new(256, 64), ScalarType::BFLOAT16);
    let w = any_weight(&mut random, INT8, 1, dtype, shape);
    let refused = |w: &Weight<'_>, input| match MarlinWeight::for_8_bit(
        &device,
        std::slice::from_ref(w),
        dtype,
        input,
    ) {
        Err(AccelError::Argument { what, .. }) => Some(what),
        Ok(_) => None,
        Err(error) => panic!("{error}"),
    };
    assert_eq!(refused(&w, INT8), None);
    assert_eq!(refused(&w, FP8), None);
    assert_eq!(refused(&w, dtype), Some("input"));
    assert_eq!(
        refused(&any_weight(&mut random, INT8, 0, dtype, Shape::new(192, 64)), INT8),
        Some("size_k")
    );
    let mxfp4 = any_weight(&mut random, FP8, 8, dtype, shape);
    assert_eq!((refused(&mxfp4, FP8), refused(&mxfp4, INT8)), (None, Some("weight")));
    let half = MarlinWeight::for_8_bit(&device, &[mxfp4], ScalarType::FLOAT16, FP8).unwrap_err();
    assert!(matches!(half, AccelError::Argument { what: "dtype", .. }), "{half:?}");
    let g_idx = (0..256).map(|k| k / 32).collect();
    let ordered =
        Weight { groups: Groups::Indexed { g_idx, group_size: GroupSize::Of(32) }, ..w.clone() };
    assert_eq!(refused(&ordered, INT8), Some("g_idx"));
    let mut large = any_weight(&mut random, FP8, 0, ScalarType::FLOAT16, shape);
    // 128 times 512 is not in the range of float16.
    large.scales = large.scales.map(ScalarType::FLOAT16, |_| 0x5800);
    let error = MarlinWeight::for_8_bit(&device, &[large], ScalarType::FLOAT16, FP8).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "scales", .. }), "{error:?}");

    let packed = MarlinWeight::for_8_bit(&device, std::slice::from_ref(&w), dtype, INT8).unwrap();
    let complaint = |codes: usize, scales: usize, y: usize| {
        let (codes, scales) = (device.zeroed(codes).unwrap(), device.zeroed(scales).unwrap());
        let x = RowsA8 { codes: &codes, scales: &scales };
        match marlin_gemm_a8(&device, x, &packed, &mut device.zeroed(y).unwrap()) {
            Err(AccelError::Argument { what, .. }) => Some(what),
            Ok(()) => None,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(complaint(512, 2, 128), None);
    assert_eq!(complaint(0, 0, 0), None);
    assert_eq!(complaint(512, 3, 192), Some("x"));
    assert_eq!(complaint(511, 2, 128), Some("x"));
    assert_eq!(complaint(512, 2, 127), Some("y"));

    // A weight is packed for activations of one width.
    let of_16_bits = MarlinWeight::new(&device, std::slice::from_ref(&w), dtype).unwrap();
    let (codes, scales) = (device.zeroed(512).unwrap(), device.zeroed(2).unwrap());
    let x = RowsA8 { codes: &codes, scales: &scales };
    let mut y = device.zeroed(128).unwrap();
    let x_16 = device.zeroed(512).unwrap();
    for error in [
        marlin_gemm_a8(&device, x, &of_16_bits, &mut y).unwrap_err(),
        marlin_gemm(&device, &x_16, &packed, &mut y).unwrap_err(),
        of_16_bits.block_size(&device, 2).map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, AccelError::Argument { what: "weight", .. }), "{error:?}");
    }
}
