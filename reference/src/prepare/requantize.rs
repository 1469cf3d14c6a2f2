//! Requantizes w1 and w3, or any fused shards, to the largest of their scales.
//!
//! Source: vLLM 0.21.0 `process_fp8_weight_tensor_strategy_moe`, `requantize_with_max_scale`,
//! `per_tensor_dequantize` (`w8a8_utils.py`) and the operator `static_scaled_fp8_quant`.

use ndarray::{ArrayViewMut2, s};

use crate::num::scalar::{
    e4m3fn_to_f32, e4m3fn_to_f64, f16_to_f32, f32_to_e4m3fn_rne_saturating, f32_to_f16_rne,
    f64_to_e4m3fn_rne_saturating,
};

use crate::{Error, Result};

use super::fnuz::{e4m3fnuz_to_f32, f32_to_e4m3fnuz_rne_saturating};

/// Requantizes the shards of a fused matrix to the largest of their scales and returns it. `codes`
/// are `[sum of widths, K]`, the rows (output features) of one shard after another; a zero
/// width is skipped. With one scale nothing changes.
///
/// Experts' w13 has two shards; linear layers have those of QKV or gate and up
/// (`requantize_with_max_scale`; upstream recognizes an already fused file by scales that were
/// never loaded; here it has one scale).
///
/// # Errors
/// [`Error::Size`] if `codes`, `widths` and `scales` are inconsistent; [`Error::Value`] for a scale
/// that is not positive and finite.
pub fn merge_shards(
    name: &str,
    mut codes: ArrayViewMut2<'_, u8>,
    widths: &[usize],
    scales: &[f32],
    (rule, ty): (Requantize, Fp8Type),
) -> Result<f32> {
    if let Some(i) = scales.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
        return Err(Error::value(name, &[i], scales[i], "a positive finite scale"));
    }
    let rows = widths.iter().try_fold(0usize, |sum, &w| sum.checked_add(w));
    if rows != Some(codes.nrows()) {
        let found = format!("{} rows of codes", codes.nrows());
        return Err(Error::size(name, found, format!("the sum of {widths:?}")));
    }
    if scales.is_empty() || scales.len() > 1 && scales.len() != widths.len() {
        let expected = format!("one, or one for each of {widths:?}");
        return Err(Error::size(name, format!("{} scales", scales.len()), expected));
    }
    let largest = scales.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if scales.len() == 1 {
        return Ok(largest);
    }
    let mut start = 0;
    for (&width, &own) in widths.iter().zip(scales) {
        let table = rule.table(ty, own, largest);
        let mut shard = codes.slice_mut(s![start..start + width, ..]);
        shard.map_inplace(|code| *code = table[usize::from(*code)]);
        start += width;
    }
    Ok(largest)
}

/// How a code is requantized to another scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Requantize {
    /// The code nearest to code · own / other, rounded once, to even, limited to ±448. NaN stays
    /// NaN.
    #[default]
    Exact,
    /// Upstream on a GPU. The scale is rounded to f16 before the multiplication; the product is
    /// rounded to f16, multiplied by fl(1 / other) in f32, limited and rounded. A scale of at most
    /// 2⁻²⁵ therefore gives only zeros, a scale of 65520 or more turns zeros into NaN, and NaN
    /// becomes 448.
    UpstreamCuda,
    /// Upstream on a CPU: as on a GPU, but the scale keeps its 24 bits.
    UpstreamCpu,
}

/// FP8 type of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fp8Type {
    /// OCP's: NaN 0x7f and 0xff, largest 448.
    #[default]
    E4m3fn,
    /// AMD's on MI300: no negative zero, NaN 0x80, largest 240. Upstream's quantizer saturates at
    /// 224.
    E4m3fnuz,
}

impl Requantize {
    /// Maps each of the 256 codes under scale `own` to a code under scale `other`; both are
    /// positive and finite. Equal scales keep every number, but upstream's rules map NaN to 448.
    ///
    /// e4m3fnuz always follows upstream's rule, except that [`Requantize::Exact`] keeps the scale's
    /// 24 bits.
    pub fn table(self, ty: Fp8Type, own: f32, other: f32) -> [u8; 256] {
        let through_f16 = |code: f32, scale: f32| f16_to_f32(f32_to_f16_rne(code * scale));
        let scale = match self {
            Self::UpstreamCuda => f16_to_f32(f32_to_f16_rne(own)),
            Self::Exact | Self::UpstreamCpu => own,
        };
        // `min` and `max` drop a NaN, as the operator's `fminf` and `fmaxf` do.
        let limited = |x: f32, limit: f32| (x * (1.0 / other)).min(limit).max(-limit);
        std::array::from_fn(|code| {
            let code = code as u8;
            match (self, ty) {
                (Self::Exact, Fp8Type::E4m3fn) => {
                    // Exact product of 4 by 24 bits; the quotient's f64 cannot fall on a tie of
                    // e4m3 unless the quotient itself does.
                    let value = e4m3fn_to_f64(code) * f64::from(own) / f64::from(other);
                    if value.is_nan() { code } else { f64_to_e4m3fn_rne_saturating(value) }
                }
                (_, Fp8Type::E4m3fn) => f32_to_e4m3fn_rne_saturating(limited(
                    through_f16(e4m3fn_to_f32(code), scale),
                    448.0,
                )),
                (_, Fp8Type::E4m3fnuz) => f32_to_e4m3fnuz_rne_saturating(limited(
                    through_f16(e4m3fnuz_to_f32(code), scale),
                    224.0,
                )),
            }
        })
    }
}
