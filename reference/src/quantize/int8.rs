//! Activations to int8 with one scale for each token or for all of them, with or without zero points.

use ndarray::Array2;

use super::{Int8Rule, absmax, expect_blocks, finite_rows, matrix, per_token_int8};
use crate::num::array::FloatView2;
use crate::{Error, Result};

/// An operator that quantizes rows to int8. With zero points (upstream's azp), the value of a code is
/// (code − azp) · scale.
///
/// Conversions saturate and round to nearest even, as `cvt.rni.sat` does; NaN becomes 0.
///
/// Source: `scaled_quant.cu` and `int8_utils.py` of vLLM 0.21.0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Int8Quantizer {
    /// `dynamic_scaled_int8_quant`: scale = max / 127, q = x · (127 / max); zeros under the scale 0.
    Token,
    /// `dynamic_scaled_int8_quant` with azp: scale = (largest − smallest) / 255, azp = −128 − smallest
    /// / scale rounded, q = round(x · (1 / scale)) + azp. A row of one value v has the scale 0; its azp
    /// is −2³¹ for v > 0, 2³¹ − 1 for v < 0, and 0 for zeros.
    TokenAzp,
    /// `static_scaled_int8_quant`: q = x / scale.
    Tensor(f32),
    /// `static_scaled_int8_quant` with azp: q = round(x · (1 / scale)) + azp.
    TensorAzp(f32, i32),
    /// `per_token_quant_int8`, which experts use: [`Int8Rule::Product`].
    Expert,
}

/// Rows quantized by an [`Int8Quantizer`].
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Quantized {
    /// `[M, K]`.
    pub codes: Array2<i8>,
    /// `[M]`: a static scale is repeated.
    pub scales: Vec<f32>,
    /// `[M]` zero points of asymmetric quantization.
    pub zeros: Option<Vec<i32>>,
}

/// A code with a zero point: `cvt.rni.sat.s32.f32`, an addition modulo 2^32, `cvt.sat.s8.s32`.
fn code_with_zero(v: f32, zero: i32) -> i8 {
    let moved = (v.round_ties_even() as i32).wrapping_add(zero);
    moved.clamp(i8::MIN.into(), i8::MAX.into()) as i8
}

impl Int8Quantizer {
    /// Whether codes have zero points.
    pub const fn has_zeros(self) -> bool {
        matches!(self, Self::TokenAzp | Self::TensorAzp(..))
    }

    /// Quantizes `x` `[M, K]`.
    ///
    /// # Errors
    /// [`Error::Size`] for no columns and for a static scale that is not positive and finite;
    /// [`Error::Value`] for a value that is not finite, except under a static scale.
    pub fn quantize<'a>(self, x: impl Into<FloatView2<'a>>) -> Result<Int8Quantized> {
        let x = x.into();
        let rows = x.shape()[0];
        if let Self::Tensor(scale) | Self::TensorAzp(scale, _) = self {
            if !(scale.is_finite() && scale > 0.0) {
                return Err(Error::size("scale", scale, "a positive finite number"));
            }
            expect_blocks(&x, 1)?;
            let inverse = 1.0 / scale;
            let code = |&v: &f32| match self {
                Self::TensorAzp(_, zero) => code_with_zero(v * inverse, zero),
                _ => (v / scale).round_ties_even() as i8,
            };
            let zeros = match self {
                Self::TensorAzp(_, zero) => Some(vec![zero; rows]),
                _ => None,
            };
            let codes = matrix(rows, x.widened().iter().map(code).collect());
            return Ok(Int8Quantized { codes, scales: vec![scale; rows], zeros });
        }
        if self == Self::Expert {
            let quantized = per_token_int8(x, Int8Rule::Product)?;
            let (codes, scales) = (quantized.codes, quantized.scales.into_raw_vec_and_offset().0);
            return Ok(Int8Quantized { codes, scales, zeros: None });
        }
        let (x, cols) = finite_rows(&x, 1)?;
        let (mut codes, mut scales, mut zeros) = (Vec::with_capacity(x.len()), vec![], vec![]);
        for row in x.chunks_exact(cols) {
            if self == Self::Token {
                let max = absmax(row);
                let factor = if max == 0.0 { 0.0 } else { 127.0 / max };
                codes.extend(row.iter().map(|v| (v * factor).round_ties_even() as i8));
                scales.push(max / 127.0);
                continue;
            }
            let least = row.iter().copied().fold(f32::MAX, f32::min);
            let largest = row.iter().copied().fold(f32::MIN, f32::max);
            let scale = (largest - least) / 255.0;
            let zero = (-128.0 - least / scale).round_ties_even() as i32;
            let inverse = 1.0 / scale;
            codes.extend(row.iter().map(|v| code_with_zero(v * inverse, zero)));
            scales.push(scale);
            zeros.push(zero);
        }
        let zeros = self.has_zeros().then_some(zeros);
        Ok(Int8Quantized { codes: matrix(rows, codes), scales, zeros })
    }
}
