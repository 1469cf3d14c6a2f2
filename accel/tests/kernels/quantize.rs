//! Quantization of activations on a GPU, against the reference.

use crate::common;

use crate::common::{HALVES, Law, Random};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::{Int8Rule, per_token_fp8, per_token_int8};
use marlinspike_accel::{
    AccelError,
    ops::{per_token_quant_fp8, per_token_quant_int8},
};

/// Rows of several magnitudes, one of zeros, one of any finite numbers, one of subnormals.
fn rows(random: &mut Random, dtype: ScalarType, count: usize, size_k: usize) -> Vec<u16> {
    let mut x = Vec::new();
    for row in 0..count {
        match row % 5 {
            0 => x.extend(vec![0; size_k]),
            1 => x.extend(random.any_finite(dtype, size_k)),
            2 => x.extend((0..size_k).map(|_| (random.next() & 0x807f) as u16)),
            3 => x.extend(random.halves(dtype, size_k, 1.0)),
            _ => x.extend(random.halves(dtype, size_k, 1e-3)),
        }
    }
    x
}

const SHAPES: [(usize, usize); 4] = [(5, 1), (10, 257), (40, 1000), (5, 7168)];

fn widened(x: &[u16], dtype: ScalarType) -> Vec<f32> {
    x.iter().map(|&bits| dtype.to_f64(bits.into()) as f32).collect()
}

fn bits(scales: &[f32]) -> Vec<u32> {
    scales.iter().map(|s| s.to_bits()).collect()
}

#[test]
fn int8_codes_and_scales_equal_the_reference() {
    let Some(device) = common::device_or_skip("int8_codes_and_scales_equal_the_reference") else {
        return;
    };
    let mut law = Law::new("per_token_quant_int8");
    let mut random = Random(0x51DE_0001_2345_6789);
    for dtype in HALVES {
        for (count, size_k) in SHAPES {
            for rule in [Int8Rule::Quotient, Int8Rule::Product] {
                let x = rows(&mut random, dtype, count, size_k);
                let wanted =
                    per_token_int8(rows_of("x", &widened(&x, dtype), size_k).unwrap(), rule)
                        .unwrap();
                let found = per_token_quant_int8(&device, &x, dtype, size_k, rule).unwrap();
                let context = format!("{dtype}, [{count}, {size_k}], {rule:?}");
                law.equal(
                    &context,
                    &bits(found.scales.as_slice().unwrap()),
                    &bits(wanted.scales.as_slice().unwrap()),
                );
                law.equal(
                    &context,
                    found.codes.as_slice().unwrap(),
                    wanted.codes.as_slice().unwrap(),
                );
            }
        }
    }
    law.held();
}

#[test]
fn fp8_codes_and_scales_equal_the_reference() {
    let Some(device) = common::device_or_skip("fp8_codes_and_scales_equal_the_reference") else {
        return;
    };
    let mut law = Law::new("per_token_quant_fp8");
    let mut random = Random(0x51DE_0002_2345_6789);
    for dtype in HALVES {
        for (count, size_k) in SHAPES {
            for upper in [None, Some(0.5), Some(1e-4)] {
                let x = rows(&mut random, dtype, count, size_k);
                let wanted =
                    per_token_fp8(rows_of("x", &widened(&x, dtype), size_k).unwrap(), upper)
                        .unwrap();
                let found = per_token_quant_fp8(&device, &x, dtype, size_k, upper).unwrap();
                let context = format!("{dtype}, [{count}, {size_k}], bound {upper:?}");
                law.equal(
                    &context,
                    &bits(found.scales.as_slice().unwrap()),
                    &bits(wanted.scales.as_slice().unwrap()),
                );
                law.equal(
                    &context,
                    found.codes.as_slice().unwrap(),
                    wanted.codes.as_slice().unwrap(),
                );
            }
        }
    }
    // Every finite f16, in rows whose scale is the least one, so that quotients span all codes.
    let all: Vec<u16> = (0..=u16::MAX).filter(|b| b & 0x7c00 != 0x7c00).collect();
    let wanted =
        per_token_fp8(rows_of("x", &widened(&all, HALVES[0]), 1024).unwrap(), Some(1e-3)).unwrap();
    let found = per_token_quant_fp8(&device, &all, HALVES[0], 1024, Some(1e-3)).unwrap();
    law.equal(
        "every finite f16",
        found.codes.as_slice().unwrap(),
        wanted.codes.as_slice().unwrap(),
    );
    law.held();
}

#[test]
fn numbers_that_are_not_finite_are_refused() {
    let test = "numbers_that_are_not_finite_are_refused";
    let Some(device) = common::device_or_skip(test) else { return };
    let error = per_token_quant_fp8(&device, &[0, 0x7c00], HALVES[0], 2, None).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "x", .. }), "{error:?}");
    // The same bits are a finite bf16.
    assert!(per_token_quant_fp8(&device, &[0, 0x7c00], HALVES[1], 2, None).is_ok());
}
