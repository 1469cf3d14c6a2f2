//! NVFP4 weights and activations: the quantizer of a GPU, w13's two global scales, Blackwell's
//! block-scaled units compared with MMA-Sim's, and the exact and the bounded product.

use crate::blackwell::facts;
use bytemuck::{allocation::cast_vec, cast_slice};
use marlinspike::Error;
use marlinspike::formats::global_scale::{GlobalScale, ShardMismatch, W13Scale, w13_global_scales};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::tensor_core::{
    Architecture, BLOCK_SCALED_UNITS, BlockScaledUnit, Instruction, find_block_scaled,
};
use marlinspike::products::{BlockScaledProduct, BlockScaledRows};
use marlinspike::quantize::scaled_fp4::{self, KernelDifference};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use serde_json::Value;

const BF16: ScalarType = ScalarType::BFLOAT16;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const E2M1: ScalarType = ScalarType::FLOAT4_E2M1F;

/// 2 · value of an e2m1 code.
fn halves(code: u8) -> i128 {
    let magnitude = [0, 1, 2, 3, 4, 6, 8, 12][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// 2^9 · value of a positive e4m3 code.
fn scale_units(code: u8) -> i128 {
    let (field, mantissa) = (code >> 3, i128::from(code & 7));
    if field == 0 { mantissa } else { (mantissa + 8) << (field - 1) }
}

fn nvfp4_unit() -> &'static BlockScaledUnit {
    find_block_scaled(Architecture::Blackwell, E4M3, 16).expect("tcgen05 with NVFP4")
}

#[test]
fn units_are_mma_sims() {
    let facts: Value =
        serde_json::from_str(include_str!("../data/block_scaled_units.json")).unwrap();
    let hex = |v: &Value| -> Vec<u8> {
        let text = v.as_str().expect("hex");
        (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..][..2], 16).unwrap()).collect()
    };
    let codes = |v: &Value| -> Vec<u8> {
        hex(v).into_iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
    };
    let bits = |v: &Value| v.as_u64().expect("bits") as u32;
    let mut used = vec![0; BLOCK_SCALED_UNITS.len()];
    for row in facts["rows"].as_array().expect("rows") {
        let ty = ScalarType::from_name(row[0].as_str().expect("a name")).expect("a type");
        let block = row[1].as_u64().expect("k per scale") as usize;
        for (unit, used) in BLOCK_SCALED_UNITS.iter().zip(&mut used) {
            if (unit.scales, unit.block) != (ty, block) {
                continue;
            }
            let (a, b, sa, sb) = (codes(&row[2]), codes(&row[3]), hex(&row[4]), hex(&row[5]));
            let d = unit.accumulate([&a, &b], [&sa, &sb], bits(&row[6]));
            assert_eq!(d, bits(&row[7]), "{unit:?}: {row}");
            *used += 1;
        }
    }
    assert!(used.iter().all(|&rows| rows == 60), "{used:?}");
}

#[test]
fn the_documents_table_is_the_table() {
    let page = include_str!("../../../docs/src/internals/tensor-cores.md");
    let section = page.split_once("## Block scales").expect("the section").1;
    let table = section.split_once("\n## ").expect("another section").0;
    let rows = table.lines().filter(|l| l.starts_with("| ")).skip(2);
    let mut found = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        found.extend(
            cells[3].split(", ").map(|block| [cells[0], cells[1], cells[2], block].join(" ")),
        );
    }
    let row = |unit: &BlockScaledUnit| {
        let instruction =
            if unit.instruction == Instruction::Mma { "mma.sync" } else { "tcgen05.mma" };
        format!("{:?} {instruction} {} {}", unit.architecture, unit.scales.name(), unit.block)
    };
    assert_eq!(found, BLOCK_SCALED_UNITS.iter().map(row).collect::<Vec<_>>());
    assert!(BLOCK_SCALED_UNITS.iter().all(|u| u.evidence.starts_with("reported")));
}

#[test]
fn units_and_what_is_no_number() {
    let unit = nvfp4_unit();
    let (ones, zeros) = ([2u8; 64], [0u8; 64]);
    let one = |s: &[u8; 4]| unit.accumulate([&ones, &ones], [s, &[0x38; 4]], 0);
    assert_eq!(f32::from_bits(one(&[0x38; 4])), 64.0);
    assert_eq!(f32::from_bits(one(&[0xb8; 4])), 64.0, "the sign of a scale is not read");
    assert_eq!(one(&[0x38, 0x38, 0x38, 0x7f]), 0x7fff_ffff);
    let from = |codes: &[u8; 64], c| unit.accumulate([codes, &ones], [&[0x7e; 4], &[0x7e; 4]], c);
    assert_eq!(from(&ones, f32::NAN.to_bits()), 0x7fff_ffff);
    assert_eq!(from(&ones, f32::NEG_INFINITY.to_bits()), f32::NEG_INFINITY.to_bits());
    // A group of zeros does not affect the alignment, and an empty sum is +0.
    assert_eq!(from(&zeros, 1), 1);
    assert_eq!(from(&zeros, 0x8000_0000), 0);
    // 2^-40 is below 2^(E - 35) where E is that of the largest scales, 8 + 8.
    assert_eq!(from(&ones, (2f32.powi(-40)).to_bits()), from(&ones, 0));
    assert_eq!(f32::from_bits(from(&ones, 0)), 64.0 * 448.0 * 448.0);
    assert_eq!((unit.scale_exponent(0), unit.scale_exponent(1)), (None, Some(-6)));
}

/// Activations and a weight at random; scales of e4m3 codes in `scales`, zeros among the codes.
fn operands(
    rng: &mut Rng,
    [size_m, size_k, size_n]: [usize; 3],
    scales: std::ops::Range<u8>,
    alpha: f32,
) -> (BlockScaledRows, Weight<'static>) {
    let scale = |rng: &mut Rng| scales.start + rng.below(scales.len()) as u8;
    let mut codes: Vec<u8> = (0..size_m * size_k).map(|_| rng.below(16) as u8).collect();
    let row_scales: Vec<u8> = (0..size_m * size_k / 16).map(|_| scale(rng)).collect();
    // A block of zeros under whatever scale it has.
    codes[..16].fill(0);
    let shape = Shape::new(size_k, size_n);
    let bits = (0..size_k / 16 * size_n).map(|_| scale(rng)).collect();
    let weight = Weight {
        name: "w".into(),
        ty: E2M1,
        codes: Codes::from_fn(4, shape, |_, _| rng.below(16) as u8).unwrap(),
        scales: Table::new(E4M3, size_k / 16, size_n, TableData::B8(bits)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(16)),
        global_scale: Some(alpha),
        bias: None,
    };
    (BlockScaledRows::new(size_k, codes, row_scales, 0.5).unwrap(), weight)
}

/// The same numbers from the same seed, in units of 2^-20.
fn exact_sums(
    rng: &mut Rng,
    [size_m, size_k, size_n]: [usize; 3],
    scales: std::ops::Range<u8>,
) -> Vec<i128> {
    let scale = |rng: &mut Rng| scale_units(scales.start + rng.below(scales.len()) as u8);
    let mut a: Vec<i128> = (0..size_m * size_k).map(|_| halves(rng.below(16) as u8)).collect();
    let sa: Vec<i128> = (0..size_m * size_k / 16).map(|_| scale(rng)).collect();
    a[..16].fill(0);
    let sw: Vec<i128> = (0..size_k / 16 * size_n).map(|_| scale(rng)).collect();
    let w: Vec<i128> = (0..size_k * size_n).map(|_| halves(rng.below(16) as u8)).collect();
    let mut out = Vec::new();
    for m in 0..size_m {
        for n in 0..size_n {
            let term = |k: usize| {
                a[m * size_k + k]
                    * sa[(m * size_k + k) / 16]
                    * w[k * size_n + n]
                    * sw[k / 16 * size_n + n]
            };
            out.push((0..size_k).map(term).sum());
        }
    }
    out
}

#[test]
fn products_are_exact_and_every_units_result_is_in_bounds() {
    let unit = nvfp4_unit();
    for (seed, size_k) in [16, 48, 64, 80, 256, 1024].into_iter().enumerate() {
        for scales in [0x30..0x41, 1..0x7f, 0..4] {
            let sizes = [3, size_k, 9];
            let what = format!("K {size_k} scales {scales:?}");
            let (rows, weight) =
                operands(&mut Rng::new(seed as u64), sizes, scales.clone(), 2f32.powi(-6));
            let sums = exact_sums(&mut Rng::new(seed as u64), sizes, scales);
            let product = BlockScaledProduct::new(&rows, &weight, BF16).unwrap();
            assert_eq!(product.alpha(), 2f32.powi(-7), "a power of two, so that nothing is lost");
            let class = product.class(unit).unwrap();
            let bounds = product.bounds(&class).unwrap();
            let found = product.in_order(unit).unwrap();
            assert_eq!((bounds.len(), found.len()), (27, 27));
            for ((bound, &found), sum) in bounds.iter().zip(&found).zip(&sums) {
                // 2^-20 for the units, 2^-7 for alpha; the sum has fewer than 53 bits.
                assert_eq!(bound.exact, *sum as f64 * 2f64.powi(-27), "{what}");
                assert_eq!(bound.rounded, BF16.encode_rne(bound.exact), "{what}");
                let found = BF16.to_f64(found);
                assert!(bound.ratio(found) <= 1.0, "{what}: {found} of {bound:?}");
                // Two units further exceed the bound, so the bound is tight.
                let beyond = BF16.to_f64(BF16.encode_rne(bound.hi.abs().max(bound.lo.abs())) + 2);
                assert!(*sum == 0 || bound.ratio(beyond) > 1.0, "{what}: {beyond} of {bound:?}");
            }
            // f16 overflows where bf16 does not; the results stay consistent.
            let product = BlockScaledProduct::new(&rows, &weight, ScalarType::FLOAT16).unwrap();
            let bounds = product.bounds(&class).unwrap();
            for (bound, bits) in bounds.iter().zip(product.in_order(unit).unwrap()) {
                let found = ScalarType::FLOAT16.to_f64(bits);
                assert!(bound.ratio(found) <= 1.0, "{what}: {found} of {bound:?}");
            }
        }
    }
}

#[test]
fn products_that_do_not_fit_are_errors() {
    let sizes = [2, 32, 8];
    let (rows, weight) = operands(&mut Rng::new(1), sizes, 0x30..0x40, 1.0);
    let refused = |change: &dyn Fn(&mut Weight<'static>)| {
        let mut weight = weight.clone();
        change(&mut weight);
        BlockScaledProduct::new(&rows, &weight, BF16).unwrap_err()
    };
    assert!(matches!(refused(&|w| w.global_scale = None), Error::Missing { .. }));
    assert!(matches!(refused(&|w| w.global_scale = Some(f32::MIN_POSITIVE)), Error::Size { .. }));
    assert!(matches!(refused(&|w| w.ty = ScalarType::UINT4B8), Error::Unsupported { .. }));
    for bad in [0x7f, 0x80, 0xb8] {
        let error = refused(&|w| w.scales = w.scales.map(E4M3, |b| if b < 0x38 { bad } else { b }));
        assert!(matches!(error, Error::Value { .. }), "{error}");
    }
    let longer = operands(&mut Rng::new(1), [2, 48, 8], 0x30..0x40, 1.0).1;
    assert!(matches!(BlockScaledProduct::new(&rows, &longer, BF16), Err(Error::Size { .. })));
    let f32 = BlockScaledProduct::new(&rows, &weight, ScalarType::FLOAT32);
    assert!(matches!(f32, Err(Error::Unsupported { .. })));
    let mxfp4 = find_block_scaled(Architecture::Blackwell, ScalarType::FLOAT8_E8M0FNU, 32).unwrap();
    let product = BlockScaledProduct::new(&rows, &weight, BF16).unwrap();
    assert!(matches!(product.in_order(mxfp4), Err(Error::Unsupported { .. })));
    let new =
        |k, codes: Vec<u8>, scales: Vec<u8>, global| BlockScaledRows::new(k, codes, scales, global);
    assert!(matches!(new(24, vec![0; 24], vec![0; 1], 1.0), Err(Error::Size { .. })));
    assert!(matches!(new(16, vec![0; 32], vec![0; 1], 1.0), Err(Error::Shape { .. })));
    assert!(matches!(new(16, vec![16; 16], vec![0; 1], 1.0), Err(Error::Value { .. })));
    assert!(matches!(new(16, vec![0; 16], vec![0x7f; 1], 1.0), Err(Error::Value { .. })));
    assert!(matches!(new(16, vec![0; 16], vec![0x80; 1], 1.0), Err(Error::Value { .. })));
    assert!(matches!(new(16, vec![0; 16], vec![0; 1], 0.0), Err(Error::Size { .. })));
}

/// A quantizer whose reciprocals are `steps` units of the last place off.
fn like_a_kernel(x: &[f32], global: f32, steps: [i32; 3]) -> (Vec<u8>, Vec<u8>) {
    // Of multiples of an eighth of a power of two the instruction is correctly rounded.
    let off = |x: f32, step: i32| {
        let step = if x.to_bits() & 0xfffff == 0 { 0 } else { step };
        f32::from_bits((1.0 / x).to_bits().wrapping_add_signed(step))
    };
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks_exact(16) {
        let max = block.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scale = E4M3.encode_rne_saturating((global * (max * off(6.0, steps[0]))).into());
        let value = E4M3.to_f64(scale) as f32;
        let factor = if max == 0.0 { 0.0 } else { off(value * off(global, steps[1]), steps[2]) };
        codes.extend(block.iter().map(|v| E2M1.encode_rne_saturating((v * factor).into()) as u8));
        scales.push(scale as u8);
    }
    (codes, scales)
}

fn difference(
    x: &[f32],
    cols: usize,
    global: f32,
    codes: &[u8],
    scales: &[u8],
) -> marlinspike::Result<Option<KernelDifference>> {
    let codes = rows_of("codes", cast_slice(codes), cols)?;
    let scales = rows_of("scales", cast_slice(scales), cols / 16)?;
    scaled_fp4::kernel_difference(rows_of("x", x, cols)?, global, codes, scales)
}

#[test]
fn gpu_quantizers_are_held_to_what_they_can_give() {
    let mut rng = Rng::new(5);
    let (mut changed, mut refused) = (0, 0);
    for global in [1.0, 448.0 * 6.0 / 3.3, 1e-3, 3e4] {
        let scale = 6.0 / global;
        let x: Vec<f32> = (0..512)
            .map(|_| {
                let bf16 = rng.next_u32() & 0xffff_0000 & !(0xff << 23);
                f32::from_bits(bf16 | (120 + rng.below(8) as u32) << 23) * scale
            })
            .map(|v| f32::from_bits(v.to_bits() & 0xffff_0000))
            .collect();
        let found =
            |codes: &[u8], scales: &[u8]| difference(&x, 64, global, codes, scales).unwrap();
        let (codes, scales) =
            scaled_fp4::quantize(rows_of("x", &x, 64).unwrap(), global).unwrap().into_vecs();
        let (codes, scales) = (cast_vec::<_, u8>(codes), cast_vec::<_, u8>(scales));
        assert_eq!(found(&codes, &scales), None, "the reference, {global}");
        for steps in [[0, 0, 0], [1, 1, 1], [-1, -1, -1], [1, -1, 0], [-1, 1, -1], [0, -1, 1]] {
            let (codes, scales) = like_a_kernel(&x, global, steps);
            assert_eq!(found(&codes, &scales), None, "{steps:?} {global}");
        }
        for i in 0..x.len() {
            let mut wrong = codes.clone();
            wrong[i] ^= 1;
            changed += 1;
            if let Some(d) = found(&wrong, &scales) {
                assert_eq!((d.is_scale, d.row, d.col, d.found), (false, i / 64, i % 64, wrong[i]));
                refused += 1;
            }
        }
        let mut wrong = scales.clone();
        wrong[9] += 2;
        let d = found(&codes, &wrong).expect("two units off");
        assert_eq!((d.is_scale, d.row, d.col), (true, 2, 16));
        assert!(d.to_string().starts_with("scale at [2, 16]"), "{d}");
    }
    // A value between two codes, so near their middle that kernels may differ, is rare.
    assert!(refused * 50 > changed * 49, "{refused} of {changed}");
    let zeros = difference(&[0.0; 16], 16, 1.0, &[7; 16], &[0]).unwrap();
    assert!(zeros.is_some_and(|d| !d.is_scale && d.found == 7), "codes under a scale of zero");
    let short = difference(&[0.0; 16], 16, 1.0, &[7; 15], &[0]);
    assert!(matches!(short, Err(Error::Shape { .. })));
    let global = difference(&[0.0; 16], 16, -1.0, &[7; 16], &[0]);
    assert!(matches!(global, Err(Error::Size { .. })));
}

fn stored(values: &[f32]) -> Tensor<'static> {
    let shape = vec![values.len() / 2, 2];
    Tensor::from_vec("experts.w13_weight_global_scale", DType::F32, shape, values.to_vec()).unwrap()
}

#[test]
fn differing_shards_are_named_and_resolved_by_policy() {
    let tensor = stored(&[4.0, 4.0, 2.0, 8.0, 1.0, 1.000001]);
    let first = w13_global_scales(&tensor, GlobalScale::Divisor, W13Scale::First).unwrap();
    assert_eq!(first.multipliers, [[0.25, 0.25], [0.5, 0.5], [1.0, 1.0]]);
    let own = w13_global_scales(&tensor, GlobalScale::Divisor, W13Scale::Own).unwrap();
    assert_eq!(own.multipliers[1], [0.5, 0.125]);
    assert_eq!(own.mismatches, first.mismatches, "a policy does not hide what differs");
    let [far, near] = &own.mismatches[..] else { panic!("{:?}", own.mismatches) };
    assert_eq!((far.expert, far.w1, far.w3, far.upstream_warns()), (1, 2.0, 8.0, true));
    assert_eq!(
        (near.expert, near.upstream_warns()),
        (2, false),
        "named although upstream is silent"
    );
    assert!(far.to_string().contains("w13_weight_global_scale` at [1]: w1 has 2, w3 has 8"));
    let multiplier = w13_global_scales(&tensor, GlobalScale::Multiplier, W13Scale::Own).unwrap();
    assert_eq!(multiplier.multipliers[1], [2.0, 8.0]);
}

#[test]
fn upstreams_limit_is_torchs() {
    for row in facts()["shards"].as_array().expect("pairs") {
        let value = |i: usize| f32::from_bits(row[i].as_u64().expect("bits") as u32);
        let pair = ShardMismatch { tensor: "t".into(), expert: 0, w1: value(0), w3: value(1) };
        assert_eq!(Some(pair.upstream_warns()), row[2].as_bool(), "{} {}", pair.w1, pair.w3);
    }
}

#[test]
fn shards_that_are_no_scales_are_errors() {
    let read = |tensor: &Tensor<'_>| w13_global_scales(tensor, GlobalScale::Divisor, W13Scale::Own);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
        let Err(Error::Value { index, .. }) = read(&stored(&[1.0, 1.0, 1.0, bad])) else {
            panic!("{bad} is taken");
        };
        assert_eq!(index, [1, 1]);
    }
    let three = Tensor::from_vec("t", DType::F32, vec![1, 3], vec![1.0f32; 3]).unwrap();
    assert!(matches!(read(&three), Err(Error::Shape { .. })));
    let flat = Tensor::from_vec("t", DType::F32, vec![2], vec![1.0f32; 2]).unwrap();
    assert!(matches!(read(&flat), Err(Error::Shape { .. })));
    let halves = Tensor::from_vec("t", DType::F16, vec![1, 2], vec![0x3c00u16; 2]).unwrap();
    assert!(matches!(read(&halves), Err(Error::Dtype { .. })));
}
