//! Activations with one scale per token or per tensor.

use super::{absmax, expect_rows};
use crate::num::scalar::f32_to_e4m3fn_rne_saturating;
use crate::{Error, Result};

/// Codes in the order of the input, and their scales.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized<C> {
    /// One code per value.
    pub codes: Vec<C>,
    /// One scale per token, per block or for all.
    pub scales: Vec<f32>,
}

/// How [`per_token_int8`] divides and rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int8Rule {
    /// q = x / scale, halves to even, with scale = max · fl(1/127) (a tensor divided by a constant
    /// on a GPU is multiplied by the rounded reciprocal). The golden cases use this rule for `a_q`
    /// and `a_scales`.
    Quotient,
    /// The source text of vLLM 0.21.0's `per_token_quant_int8`, every operation correctly rounded:
    /// scale = max / 127, q = x · (127 / max), halves away from zero. (A compiled kernel may divide
    /// with an error of 2 ulp, which moves codes at halves.)
    Product,
}

/// Symmetric int8 with one scale per row of `cols` values; the largest magnitude of a row counts
/// as at least 1e-10. Upstream: `per_token_quant_int8`.
///
/// Kernels of the Marlin family take these scales times `input_global_scale`.
///
/// # Errors
/// [`Error::Size`] or [`Error::Shape`] unless x is rows of `cols`; [`Error::Value`] for a value
/// that is not finite.
pub fn per_token_int8(x: &[f32], cols: usize, rule: Int8Rule) -> Result<Quantized<i8>> {
    expect_rows(x, cols, 1)?;
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.chunks_exact(cols) {
        let max = absmax(row).max(1e-10);
        let code = |v: f32| v.clamp(-128.0, 127.0) as i8;
        match rule {
            Int8Rule::Quotient => {
                let scale = max * (1.0 / 127.0);
                codes.extend(row.iter().map(|v| code((v / scale).round_ties_even())));
                scales.push(scale);
            }
            Int8Rule::Product => {
                let factor = 127.0 / max;
                codes.extend(row.iter().map(|v| code((v * factor).round())));
                scales.push(max / 127.0);
            }
        }
    }
    Ok(Quantized { codes, scales })
}

/// e4m3fn's largest value.
const E4M3_MAX: f32 = 448.0;

/// e4m3fn codes with one scale per row: scale = max(min(max, `upper`) / 448, 1 / (448 · 512)),
/// q = x / scale, saturating, to nearest even. Upstream: `dynamic_per_token_scaled_fp8_quant`.
///
/// # Errors
/// As [`per_token_int8`]; [`Error::Size`] for an upper bound that is not positive.
pub fn per_token_fp8(x: &[f32], cols: usize, upper: Option<f32>) -> Result<Quantized<u8>> {
    expect_rows(x, cols, 1)?;
    if let Some(u) = upper.filter(|u| u.is_nan() || *u <= 0.0) {
        return Err(Error::size("upper bound of the scale", u, "a positive number"));
    }
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.chunks_exact(cols) {
        let max = upper.map_or(absmax(row), |u| absmax(row).min(u));
        let scale = (max / E4M3_MAX).max(1.0 / (E4M3_MAX * 512.0));
        codes.extend(row.iter().map(|v| f32_to_e4m3fn_rne_saturating(v / scale)));
        scales.push(scale);
    }
    Ok(Quantized { codes, scales })
}

/// e4m3fn codes with one scale: `scale`, or max / 448 if it is `None`; q = x · fl(1 / scale),
/// saturating, to nearest even. Upstream: `static_scaled_fp8_quant`, `dynamic_scaled_fp8_quant`.
///
/// A given scale comes from the checkpoint, so values may be out of range: infinities become ±448
/// and NaN becomes 448, as in the operator's `fmax(-448, fmin(v, 448))` (`scaled_fp8_conversion` in
/// `csrc/quantization/w8a8/fp8/common.cuh`).
///
/// If all values are zero, the scale and the codes are zero (upstream multiplies by infinity).
///
/// # Errors
/// Without a given scale as [`per_token_int8`]; [`Error::Size`] for one that is not positive and finite.
pub fn per_tensor_fp8(x: &[f32], scale: Option<f32>) -> Result<Quantized<u8>> {
    let scale = match scale {
        Some(s) if s.is_finite() && s > 0.0 => s,
        Some(s) => return Err(Error::size("scale", s, "a positive finite number")),
        None => {
            expect_rows(x, x.len().max(1), 1)?;
            absmax(x) / E4M3_MAX
        }
    };
    let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    // A subnormal scale has an infinite reciprocal; zeros stay zeros.
    let scaled = |&v: &f32| match v {
        _ if v == 0.0 => v,
        _ if v.is_nan() => E4M3_MAX,
        _ => v * reciprocal,
    };
    let codes = x.iter().map(|v| f32_to_e4m3fn_rne_saturating(scaled(v))).collect();
    Ok(Quantized { codes, scales: vec![scale] })
}
