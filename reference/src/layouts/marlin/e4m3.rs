//! e4m3 block scales in Marlin's unsigned 8-bit format with five exponent bits.
//!
//! The kernel expects the top bit of every nonzero scale to be set, so that dequantization needs no
//! exponent correction: the high byte of the e4m3 scale times 2^7 as f16, shifted left by one,
//! which drops the sign. Source: vLLM 0.21.0 `marlin_utils_fp4.py`.

use super::scales::ScaleLayout;
use crate::num::scalar::{self, ScalarType};
use crate::weight::Table;
use crate::{Error, Result};

/// The power of two, at least 1, that scales the largest scale to 448 · 2^7 or just below; always 1
/// with f16 activations. The global scale is divided by it.
///
/// `scales` are e4m3 bits of all experts that share the factor.
pub fn e4m3_scale_factor(scales: impl IntoIterator<Item = u8>, dtype: ScalarType) -> f32 {
    if dtype == ScalarType::FLOAT16 {
        return 1.0;
    }
    let largest =
        scales.into_iter().map(scalar::e4m3fn_to_f32).filter(|s| *s > 0.0).fold(0.0f32, f32::max);
    let ratio = 448.0 / largest;
    if !ratio.is_finite() || ratio <= 1.0 {
        return 1.0;
    }
    // ⌊log2⌋ of a normal number is its exponent field.
    f32::from_bits(ratio.to_bits() & 0x7f80_0000)
}

/// Converts e4m3 block scales `[groups, N]` to kernel bytes `[groups, N]`, which keep the type e4m3
/// as in upstream.
///
/// `layout` is the plain scale layout (the reordering in fours is added here). A scale that is
/// negative, or below 2^−6 after the factor, is flushed to zero as in upstream.
pub fn e4m3_scales(scales: &Table, layout: ScaleLayout, scale_factor: f32) -> Result<Table> {
    if scales.ty() != ScalarType::FLOAT8_E4M3FN {
        return Err(Error::unsupported(format!("scales of {}", scales.ty()), "e4m3 is expected"));
    }
    layout.with_quads().pack(&scales.map(scales.ty(), |bits| {
        let half = scalar::f32_to_f16_rne(scalar::e4m3fn_to_f32(bits as u8));
        let scaled = if scale_factor > 1.0 {
            scalar::f32_to_f16_rne(scalar::f16_to_f32(half) * scale_factor)
        } else {
            half
        };
        let value = scalar::f16_to_f32(scaled) * 128.0;
        let half = if value < 2.0 { 0 } else { scalar::f32_to_f16_rne(value) };
        u32::from(half << 1 >> 8)
    }))
}

/// The inverse of [`e4m3_scales`], except for flushed scales: e4m3 `[groups, N]`.
pub fn e4m3_scales_inverse(
    packed: &Table,
    layout: ScaleLayout,
    scale_factor: f32,
) -> Result<Table> {
    let scales = layout.with_quads().unpack(packed)?;
    Ok(scales.map(ScalarType::FLOAT8_E4M3FN, |byte| {
        let value = scalar::f16_to_f32((byte as u16) << 7) / 128.0 / scale_factor;
        scalar::f32_to_e4m3fn_rne_saturating(value).into()
    }))
}

/// The global scale for the kernel: × 2^(14 − 7) (f16) or × 2^(126 − 7) (bf16), the exponent bias
/// of e2m1 in the activation type less the scales' 2^7, divided by the scale factor.
pub fn kernel_global_scale(global_scale: f32, dtype: ScalarType, scale_factor: f32) -> f32 {
    let exponent = if dtype == ScalarType::FLOAT16 { 7 } else { 119 };
    global_scale * 2f32.powi(exponent) / scale_factor
}
