//! Rows in groups of 128.

use crate::common::{self, HALVES, Law, Random};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use marlinspike::quantize::{Fp8GroupRule, per_group_fp8_with};
use marlinspike_accel::{AccelError, Device, ops::per_token_group_quant_fp8, registry::mutants};

/// Rows of several magnitudes, one of zeros, one of any finite numbers, one of subnormals.
fn rows(random: &mut Random, dtype: ScalarType, count: usize, size_k: usize) -> Vec<u16> {
    (0..count)
        .flat_map(|row| match row % 5 {
            0 => vec![0; size_k],
            1 => random.any_finite(dtype, size_k),
            2 => (0..size_k).map(|_| (random.next() & 0x807f) as u16).collect(),
            3 => random.halves(dtype, size_k, 1.0),
            _ => random.halves(dtype, size_k, 1e-3),
        })
        .collect()
}

/// Codes, and bits of scales, of the groups of rows: the device's and the reference's.
fn quantized(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    ue8m0: bool,
) -> [(Vec<u8>, Vec<u32>); 2] {
    let widened: Vec<f32> = x.iter().map(|&bits| dtype.to_f64(bits.into()) as f32).collect();
    let wide = rows_of("x", &widened, size_k).unwrap();
    let wanted = per_group_fp8_with(wide, 128, Fp8GroupRule::Quotient, ue8m0).unwrap();
    let found = per_token_group_quant_fp8(device, x, dtype, size_k, ue8m0).unwrap();
    [found, wanted].map(|q| {
        let (codes, scales) = q.into_vecs();
        (
            codes.into_iter().map(|code| code.to_bits()).collect(),
            scales.into_iter().map(f32::to_bits).collect(),
        )
    })
}

#[test]
fn fp8_groups_are_quantized_as_the_reference_does() {
    let test = "fp8_groups_are_quantized_as_the_reference_does";
    let Some(device) = common::device_or_skip(test) else { return };
    let mut law = Law::new("per_token_group_quant_fp8");
    let mut random = Random(0xF8F8_0004_89AB_CDEF);
    for dtype in HALVES {
        for (count, size_k) in [(5, 128), (10, 384), (41, 1024), (5, 7168)] {
            for ue8m0 in [false, true] {
                let x = rows(&mut random, dtype, count, size_k);
                let [found, wanted] = quantized(&device, &x, dtype, size_k, ue8m0);
                let context = format!("{dtype}, [{count}, {size_k}], UE8M0 {ue8m0}");
                law.equal(&context, &found.0, &wanted.0);
                law.equal(&context, &found.1, &wanted.1);
            }
        }
    }
    law.held();
    let error = per_token_group_quant_fp8(&device, &[0; 64], HALVES[1], 64, false).unwrap_err();
    assert!(matches!(error, AccelError::Argument { what: "size_k", .. }), "{error:?}");
    let error = per_token_group_quant_fp8(&device, &[0x7f80; 128], HALVES[1], 128, false);
    assert!(matches!(error, Err(AccelError::Argument { what: "x", .. })), "{error:?}");
    let x = rows(&mut random, HALVES[1], 40, 1024);
    for (row, mutant) in mutants().filter(|(row, _)| row.source == "per_token_group_quant_fp8") {
        let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
        let [found, wanted] = quantized(&device, &x, HALVES[1], 1024, false);
        assert_ne!(found, wanted, "{} passed", mutant.name);
        common::say(&format!("MUTANT {}: {} rejected", row.source, mutant.name));
    }
}
