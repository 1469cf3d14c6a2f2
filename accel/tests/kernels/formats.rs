//! Products with weights of floats on a GPU against the reference's execution of the canonical
//! schedule, and the steps of their dequantization on the CPU, over all codes and scales.

use crate::common;

use crate::common::{Experts, Float, HALVES, Law, Random, compare_layers, float_weight, forward};
use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::weight::{Table, TableData, Weight};
use marlinspike_accel::{
    AccelError, Device,
    ops::MarlinLayer,
    ops::gemm::{MarlinWeight, marlin_gemm},
};

const BF16: ScalarType = ScalarType::BFLOAT16;

/// Rows of moderate values, among them one of any finite numbers and one of zeros.
fn activations(random: &mut Random, dtype: ScalarType, size_m: usize, size_k: usize) -> Vec<u16> {
    let mut x = random.halves(dtype, size_m * size_k, 1.0);
    for row in x.chunks_exact_mut(size_k) {
        match random.below(16) {
            3 => row.copy_from_slice(&random.any_finite(dtype, size_k)),
            5 => row.fill(0),
            _ => {}
        }
    }
    x
}

fn compare(
    law: &mut Law,
    device: &Device,
    random: &mut Random,
    weight: &Weight<'_>,
    dtype: ScalarType,
    size_m: usize,
) {
    let Shape { size_k, size_n } = weight.shape();
    let x = activations(random, dtype, size_m, size_k);
    let schedule = Schedule::canonical(weight, dtype, dtype).unwrap();
    let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
    let codes = rows_of("x", &codes, size_k).unwrap();
    let wanted = schedule.execute(codes, weight, Extras::default()).unwrap();
    let wanted: Vec<u16> = wanted.into_iter().map(|bits| bits as u16).collect();
    let packed = MarlinWeight::new(device, std::slice::from_ref(weight), dtype).unwrap();
    let x = device.upload(&x).unwrap();
    // Not zeros, so that an output that is not written is noticed.
    let mut y = device.upload(&vec![0xabcd; size_m * size_n]).unwrap();
    marlin_gemm(device, &x, &packed, &mut y).unwrap();
    let found = device.download(&y).unwrap();
    let context = format!(
        "{dtype}, {} with {}, M {size_m}, {}",
        weight.ty,
        weight.scales.ty(),
        weight.shape()
    );
    law.equal(&context, &found, &wanted);
}

/// Random products of these weights, with every type of activations that they have.
fn law(name: &'static str, seed: u64, floats: &[Float]) {
    let Some(device) = common::device_or_skip(name) else { return };
    let mut law = Law::new(name);
    let mut random = Random(seed);
    for dtype in HALVES {
        for float in floats.iter().copied().filter(|float| float.takes(dtype)) {
            // Several chunks, the last one shorter; N beyond one thread block.
            for (size_k, size_n, size_m) in [(1408, 128, 64), (2048, 320, 33), (4352, 64, 13)] {
                let w = float_weight(&mut random, float, dtype, Shape::new(size_k, size_n), true);
                compare(&mut law, &device, &mut random, &w, dtype, size_m);
            }
            for _ in 0..200 {
                let size_k = 128 * (1 + random.below(4));
                let shape = Shape::new(size_k, 64 * (1 + random.below(3)));
                let (size_m, bias) = (1 + random.below(20), random.below(2) == 0);
                let mut w = float_weight(&mut random, float, dtype, shape, bias);
                if random.below(4) == 0 {
                    w.global_scale = None;
                }
                compare(&mut law, &device, &mut random, &w, dtype, size_m);
            }
        }
    }
    law.held();
}

#[test]
fn fp8() {
    let floats = [GroupSize::Channel, GroupSize::Of(128), GroupSize::Of(64)].map(Float::Fp8);
    law("marlin_gemm, float8_e4m3fn", 0x5EED_0001_1234_5678, &floats);
}

#[test]
fn mxfp8() {
    let floats = [134, 253].map(Float::Mxfp8);
    law("marlin_gemm, MXFP8", 0x5EED_0002_1234_5678, &floats);
}

#[test]
fn mxfp4() {
    let floats = [128, 253].map(Float::Mxfp4);
    law("marlin_gemm, MXFP4", 0x5EED_0003_1234_5678, &floats);
}

#[test]
fn nvfp4() {
    law("marlin_gemm, NVFP4", 0x5EED_0004_1234_5678, &[Float::Nvfp4]);
}

#[test]
fn rows_that_fill_a_gpu() {
    let name = "marlin_gemm, floats, N of many thread blocks";
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(0x5EED_0005_1234_5678));
    for float in
        [Float::Fp8(GroupSize::Of(128)), Float::Mxfp4(128), Float::Mxfp8(134), Float::Nvfp4]
    {
        for size_m in [5, 13, 24, 40, 130] {
            let size_n = if size_m > 100 { 256 } else { 20480 };
            let w = float_weight(&mut random, float, BF16, Shape::new(256, size_n), true);
            compare(&mut law, &device, &mut random, &w, BF16, size_m);
        }
    }
    law.held();
}

#[test]
fn layers() {
    let name = "expert layer, weights of floats";
    let Some(device) = common::device_or_skip(name) else { return };
    let (mut law, mut random) = (Law::new(name), Random(0x5EED_0006_1234_5678));
    let floats = [
        (Float::Fp8(GroupSize::Of(128)), Activation::Silu),
        (Float::Fp8(GroupSize::Channel), Activation::Gelu),
        (Float::Mxfp8(134), Activation::Silu),
        (Float::Mxfp4(128), Activation::SwigluOai),
        (Float::Mxfp4(253), Activation::Silu),
        (Float::Nvfp4, Activation::SiluNoMul),
    ];
    let (experts, h, size_i) = (6, 512, 384);
    for dtype in HALVES {
        for (float, kind) in floats.into_iter().filter(|(float, _)| float.takes(dtype)) {
            let activation = Definition::new(kind);
            let parts = Experts::new([h, size_i], activation, dtype, |shape| {
                (0..experts).map(|_| float_weight(&mut random, float, dtype, shape, true)).collect()
            });
            let layer = parts.layer();
            let on_device = MarlinLayer::new(&device, &layer).unwrap();
            for tokens in [1, 20, 150] {
                let context = format!("{dtype}, {float:?}, {kind:?}");
                let run = |x: &[u16], ids: &[i32], weights: &[f32]| {
                    forward(&device, &on_device, x, 3, ids, weights)
                };
                compare_layers(&mut law, &context, &mut random, &layer, (tokens, 3), run);
            }
        }
    }
    law.held();
}

/// The number of a placed float, times a scale as the kernel holds it, by the kernel's own steps: each
/// product is rounded once to `dtype`.
fn dequantized(dtype: ScalarType, placed: u16, steps: &[u16]) -> u16 {
    steps.iter().fold(placed, |v, &factor| {
        dtype.encode_rne(dtype.to_f64(v.into()) * dtype.to_f64(factor.into())) as u16
    })
}

/// Bits of 2^exponent in f16 or bf16.
fn power(dtype: ScalarType, exponent: i32) -> u16 {
    dtype.encode_rne(2f64.powi(exponent)) as u16
}

/// `place` of dequantize.cuh on one half of a word.
fn place(dtype: ScalarType, bits: u32, code: u32) -> u16 {
    let q = code << (16 - bits);
    let sign = q & 0x8000;
    let magnitude = match (bits, dtype == BF16) {
        (8, true) => q >> 4 & 0x07f0,
        (8, false) => q >> 1 & 0x3f80,
        (_, true) => q >> 6 & 0x01c0,
        (_, false) => q >> 3 & 0x0e00,
    };
    (sign | magnitude) as u16
}

#[test]
fn moved_bits_times_a_scale_are_the_number_rounded_once() {
    let e4m3 = ScalarType::FLOAT8_E4M3FN;
    let e2m1 = ScalarType::FLOAT4_E2M1F;
    let e8m0 = ScalarType::FLOAT8_E8M0FNU;
    let mut compared = 0u32;
    let mut check = |dtype: ScalarType, ty: ScalarType, code: u32, scale: f64, steps: &[u16]| {
        let wanted = dtype.encode_rne(ty.to_f64(code) * scale) as u16;
        let found = dequantized(dtype, place(dtype, ty.size_bits(), code), steps);
        // A zero times an infinite step would be a NaN, which compares as unequal bits.
        assert_eq!(
            found, wanted,
            "{dtype}, {ty}: code {code:#x} times {scale:e}, steps {steps:x?}"
        );
        compared += 1;
    };
    let finite = |&code: &u32| code & 0x7f != 0x7f;
    for code in (0..256).filter(finite) {
        // FP8: 16-bit scales with the difference of the exponents' biases.
        for (dtype, bias) in [(ScalarType::FLOAT16, 8), (BF16, 120)] {
            for scale in (0..0x8000).step_by(7) {
                let value = dtype.to_f64(scale);
                let folded = dtype.encode_rne(value * 2f64.powi(bias)) as u16;
                if dtype.to_f64(folded.into()).is_finite() {
                    check(dtype, e4m3, code, value, &[folded]);
                }
            }
        }
        // MXFP8.
        for b in 0..=253u16 {
            let scale = e8m0.to_f64(b.into());
            if b <= 134 {
                check(BF16, e4m3, code, scale, &[(b << 7) + 0x3c00]);
            }
            check(BF16, e4m3, code, scale, &[power(BF16, 119), (b << 7) + 0x80]);
        }
    }
    for code in 0..16 {
        for b in 0..=253u16 {
            let scale = e8m0.to_f64(b.into());
            if b <= 128 {
                check(BF16, e2m1, code, scale, &[(b << 7) + 0x3f00]);
            }
            check(BF16, e2m1, code, scale, &[power(BF16, 125), (b << 7) + 0x80]);
        }
        for (dtype, shift, of_scale, of_code) in
            [(ScalarType::FLOAT16, 7, 8, 14), (BF16, 4, 120, 126)]
        {
            for b in 0..0x7fu16 {
                let scale = dequantized(dtype, b << shift, &[power(dtype, of_scale)]);
                let steps = [power(dtype, of_code), scale];
                check(dtype, e2m1, code, e4m3.to_f64(b.into()), &steps);
            }
        }
        // The multiplied code of a bf16 fragment is the placed one.
        let placed = place(BF16, 4, code);
        assert_eq!(((code * 0x1040) & 0x81c0) as u16, placed);
        assert_eq!((((code << 4) * 0x0104) & 0x81c0) as u16, placed);
    }
    assert!(compared > 1_500_000, "{compared}");
}

#[test]
fn weights_that_have_no_bits_are_refused_by_name() {
    let Some(device) = common::device_or_skip("weights_that_have_no_bits_are_refused_by_name")
    else {
        return;
    };
    let mut random = Random(3);
    let shape = Shape::new(128, 64);
    let complaint =
        |w: &Weight<'_>, dtype| match MarlinWeight::new(&device, std::slice::from_ref(w), dtype) {
            Err(AccelError::Argument { what, found, .. }) => Some((what, found)),
            Ok(_) => None,
            Err(error) => panic!("{error}"),
        };
    let table = |ty, rows, data| Table::new(ty, rows, 64, data).unwrap();
    let fp8 = float_weight(&mut random, Float::Fp8(GroupSize::Channel), BF16, shape, false);
    assert_eq!(complaint(&fp8, BF16), None);
    let mut words = fp8.codes.words().to_vec();
    words[2 * 64 + 5] = 0x00ff_0000;
    let codes = marlinspike::weight::Codes::from_words(8, shape, words).unwrap();
    let (what, found) = complaint(&Weight { codes, ..fp8.clone() }, BF16).unwrap();
    assert_eq!((what, found.as_str()), ("codes", "weight: NaN at [10, 5]"));
    for (dtype, of_256) in [(BF16, 0x4380), (ScalarType::FLOAT16, 0x5c00)] {
        let mut data = vec![0x1234; 64];
        data[7] = of_256;
        let scales = table(dtype, 1, TableData::B16(data));
        let (what, found) = complaint(&Weight { scales, ..fp8.clone() }, dtype).unwrap();
        assert_eq!((what, found.as_str()), ("scales", "weight: 256 at [0, 7]"));
    }
    let mxfp4 = float_weight(&mut random, Float::Mxfp4(128), BF16, shape, false);
    assert_eq!(complaint(&mxfp4, BF16), None);
    assert_eq!(complaint(&mxfp4, ScalarType::FLOAT16).unwrap().0, "dtype");
    for bad in [254, 255] {
        let mut data = vec![127; 256];
        data[65] = bad;
        let scales = table(ScalarType::FLOAT8_E8M0FNU, 4, TableData::B8(data));
        let (what, found) = complaint(&Weight { scales, ..mxfp4.clone() }, BF16).unwrap();
        assert!(what == "scales" && found.ends_with("at [1, 1]"), "{what}: {found}");
    }
    // An expert with scales of another type.
    let grouped = float_weight(&mut random, Float::Fp8(GroupSize::Of(32)), BF16, shape, false);
    let mxfp8 = float_weight(&mut random, Float::Mxfp8(134), BF16, shape, false);
    let error = MarlinWeight::new(&device, &[mxfp8, grouped], BF16).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "scales", .. }), "{error:?}");
    let nvfp4 = float_weight(&mut random, Float::Nvfp4, BF16, shape, false);
    assert_eq!(complaint(&nvfp4, BF16), None);
    for bad in [0x7f, 0x80, 0xb8] {
        let mut data = vec![0x38; 512];
        data[511] = bad;
        let scales = table(ScalarType::FLOAT8_E4M3FN, 8, TableData::B8(data));
        let (what, found) = complaint(&Weight { scales, ..nvfp4.clone() }, BF16).unwrap();
        assert!(what == "scales" && found.ends_with("at [7, 63]"), "{what}: {found}");
    }
}
