//! Steps that prepare floating-point weights and scales: exponent biases, e8m0 scales, and int4
//! codes rewritten for fp8 activations.

use super::Activations;
use super::scales::ScaleLayout;
use crate::num::scalar::{self, ScalarType};
use crate::weight::Table;
use crate::{Error, Result};
use ndarray::{Array2, ArrayView2};

/// Scales times 2^`exponent`, rounded to nearest even in their own type; overflow is infinity,
/// as in upstream's tensor product.
fn times_exp2(scales: &Table, exponent: i32) -> Result<Table> {
    let factor = f64::from(exponent).exp2();
    let ty = scales.ty();
    match ty {
        ScalarType::FLOAT16 => Ok(scales.map(ty, |bits| {
            scalar::f64_to_f16_rne(scalar::f16_to_f64(bits as u16) * factor).into()
        })),
        ScalarType::BFLOAT16 => Ok(scales.map(ty, |bits| {
            scalar::f64_to_bf16_rne(scalar::bf16_to_f64(bits as u16) * factor).into()
        })),
        _ => Err(Error::unsupported(format!("scales of {ty}"), "float16 or bfloat16 is expected")),
    }
}

/// Moves the exponent bias of e4m3 weights into their scales: × 2^8 (f16) or × 2^120 (bf16), the
/// difference between the activation type's exponent bias and e4m3's, since the kernel
/// dequantizes by shifting bits. Source: vLLM 0.21.0 `fp8_fused_exponent_bias_into_scales`.
pub fn fp8_exponent_bias(scales: &Table) -> Result<Table> {
    times_exp2(scales, if scales.ty() == ScalarType::FLOAT16 { 8 } else { 120 })
}

/// Scales of int4 weights for fp8 activations: × 512.
pub fn int4_to_fp8_scales(scales: &Table) -> Result<Table> {
    times_exp2(scales, 9)
}

/// A code with its sign in bit 3: the distance above its zero point, or 15 − code below it. The
/// kernel converts the result to e4m3 with bit shifts only.
const fn sign_magnitude(code: u32, zero: u32) -> u32 {
    if code >= zero { code - zero } else { 15 - code }
}

/// Rewrites packed `uint4b8` codes for fp8 activations: v ≥ 8 becomes v − 8, else 15 − v.
///
/// Works on any packing of eight codes to a word.
/// Source: vLLM 0.21.0 `marlin_int4_fp8_preprocess` without zero points.
pub fn int4_to_fp8_symmetric(words: &[u32]) -> Vec<u32> {
    words
        .iter()
        .map(|&word| {
            (0..32).step_by(4).map(|s| sign_magnitude(word >> s & 15, 8) << s).sum::<u32>()
        })
        .collect()
}

/// Rewrites packed `uint4` codes for fp8 activations: v ≥ z becomes v − z, else 15 − v.
///
/// `qweight` is `[size_k, words]`, `qzeros` `[groups, words]`, packed along N in the same order. Fails
/// unless the groups divide K.
/// Source: vLLM 0.21.0 `marlin_int4_fp8_preprocess` with zero points.
pub fn int4_to_fp8_asymmetric(
    qweight: ArrayView2<'_, u32>,
    qzeros: ArrayView2<'_, u32>,
) -> Result<Array2<u32>> {
    let ((size_k, words), (groups, columns)) = (qweight.dim(), qzeros.dim());
    if columns != words || groups == 0 || !size_k.is_multiple_of(groups) {
        let expected = format!("[a number of groups that divides {size_k}, {words}]");
        return Err(Error::shape("qzeros", &[groups, columns], expected));
    }
    let per = size_k / groups;
    Ok(Array2::from_shape_fn((size_k, words), |(k, n)| {
        let (w, z) = (qweight[[k, n]], qzeros[[k / per, n]]);
        (0..32).step_by(4).map(|s| sign_magnitude(w >> s & 15, z >> s & 15) << s).sum()
    }))
}

/// MX scales in kernel order: e8m0 `[groups, N]` to e8m0 `[groups, N]`.
///
/// Upstream converts them through the model's 16-bit type (`via`): bf16 loses nothing, while in f16
/// a scale above 2^15 becomes NaN and one below 2^−24 the smallest scale. With fp8 activations
/// (`fp8_activations`) the columns are not reordered in fours and 6 is added, the difference of the
/// exponent biases of e2m1 and e4m3; a byte above 249 is then refused. Source: vLLM 0.21.0
/// `mxfp4_marlin_process_scales`, `mxfp8_marlin_process_scales`.
pub fn e8m0_scales(
    scales: &Table,
    via: ScalarType,
    layout: ScaleLayout,
    fp8_activations: bool,
) -> Result<Table> {
    if scales.ty() != ScalarType::FLOAT8_E8M0FNU {
        return Err(Error::unsupported(format!("scales of {}", scales.ty()), "e8m0 is expected"));
    }
    let through: fn(f32) -> f32 = match via {
        ScalarType::FLOAT16 => |x| scalar::f16_to_f32(scalar::f32_to_f16_rne(x)),
        ScalarType::BFLOAT16 => |x| scalar::bf16_to_f32(scalar::f32_to_bf16_rne(x)),
        _ => return Err(Error::unsupported(format!("scales through {via}"), "a 16-bit type")),
    };
    let activations = if fp8_activations { Activations::Bits8 } else { Activations::Bits16 };
    let packed = layout.of_bytes(activations).pack(&scales.map(scales.ty(), |bits| {
        scalar::f32_to_e8m0_torch(through(scalar::e8m0_to_f32(bits as u8))).into()
    }))?;
    if !fp8_activations {
        return Ok(packed);
    }
    if let Some(i) = packed.iter_bits().position(|b| b > 249) {
        let (row, col) = (i / packed.cols(), i % packed.cols());
        return Err(Error::value("scales", &[row, col], packed.bits(row, col), "at most 249"));
    }
    Ok(packed.map(packed.ty(), |b| b + 6))
}
