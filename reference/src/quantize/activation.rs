//! Activations with one scale per token or per tensor.

use ndarray::Array2;

use super::{absmax, expect_blocks, finite_rows, matrix};
use crate::num::array::FloatView2;
use crate::num::element::E4m3fn;
use crate::{Error, Result};

/// Codes and their scales.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized<C, S = f32> {
    /// One code per value, in the shape of the input.
    pub codes: Array2<C>,
    /// `[rows, scales of a row]`: one per token, or one per block of a row. `[1, 1]` where all rows
    /// share one.
    pub scales: Array2<S>,
}

impl<C, S> Quantized<C, S> {
    /// Codes and scales of `rows` rows, row-major; not copied.
    ///
    /// # Errors
    /// [`Error::Shape`] if they do not fill `rows` rows.
    pub fn from_rows(rows: usize, codes: Vec<C>, scales: Vec<S>) -> Result<Self> {
        for (name, len) in [("codes", codes.len()), ("scales", scales.len())] {
            let whole = if rows == 0 { len == 0 } else { len.is_multiple_of(rows) };
            if !whole {
                return Err(Error::shape(name, &[len], format!("{rows} rows")));
            }
        }
        Ok(Self { codes: matrix(rows, codes), scales: matrix(rows, scales) })
    }

    /// Codes and scales, row-major; not copied.
    pub fn into_vecs(self) -> (Vec<C>, Vec<S>) {
        (self.codes.into_raw_vec_and_offset().0, self.scales.into_raw_vec_and_offset().0)
    }
}

/// How [`per_token_int8`] divides and rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Int8Rule {
    /// q = x / scale, halves to even, with scale = max · fl(1/127) (a tensor divided by a constant
    /// on a GPU is multiplied by the rounded reciprocal). The golden cases use this rule for `a_q`
    /// and `a_scales`.
    #[default]
    Quotient,
    /// The source text of vLLM 0.21.0's `per_token_quant_int8`, every operation correctly rounded:
    /// scale = max / 127, q = x · (127 / max), halves away from zero. (A compiled kernel may divide
    /// with an error of 2 ulp, which moves codes at halves.)
    Product,
}

/// Symmetric int8 with one scale per row; the largest magnitude of a row counts
/// as at least 1e-10. Upstream: `per_token_quant_int8`.
///
/// Kernels of the Marlin family take these scales times `input_global_scale`.
///
/// # Errors
/// [`Error::Size`] for no columns; [`Error::Value`] for a value that is not finite.
pub fn per_token_int8<'a>(x: impl Into<FloatView2<'a>>, rule: Int8Rule) -> Result<Quantized<i8>> {
    let x = x.into();
    let (rows, (x, cols)) = (x.shape()[0], finite_rows(&x, 1)?);
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
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}

/// `fmaxf(-448, fminf(v, 448))` as e4m3fn, which gives 448 for NaN.
pub(super) fn fp8_code(v: f32) -> E4m3fn {
    E4m3fn::from_f32_rne_saturating(if v.is_nan() { E4M3_MAX } else { v })
}

/// e4m3fn's largest value.
const E4M3_MAX: f32 = 448.0;

/// e4m3fn codes with one scale per row: scale = max(min(max, `upper`) / 448, 1 / (448 · 512)),
/// q = x / scale, saturating, to nearest even. Upstream: `dynamic_per_token_scaled_fp8_quant`.
///
/// As in the operator's `fmaxf` and `fminf`, a NaN does not count for the maximum and becomes the code of
/// 448. An infinity makes the scale infinite: finite values become ±0, and ±∞ / ∞ the code of 448.
///
/// # Errors
/// [`Error::Size`] for no columns, and for an upper bound that is not positive.
pub fn per_token_fp8<'a>(
    x: impl Into<FloatView2<'a>>,
    upper: Option<f32>,
) -> Result<Quantized<E4m3fn>> {
    let x = x.into();
    let (rows, cols) = (x.shape()[0], expect_blocks(&x, 1)?);
    let x = x.widened();
    if let Some(u) = upper.filter(|u| u.is_nan() || *u <= 0.0) {
        return Err(Error::size("upper bound of the scale", u, "a positive number"));
    }
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.chunks_exact(cols) {
        let max = upper.map_or(absmax(row), |u| absmax(row).min(u));
        let scale = (max / E4M3_MAX).max(1.0 / (E4M3_MAX * 512.0));
        codes.extend(row.iter().map(|v| fp8_code(v / scale)));
        scales.push(scale);
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
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
pub fn per_tensor_fp8<'a>(
    x: impl Into<FloatView2<'a>>,
    scale: Option<f32>,
) -> Result<Quantized<E4m3fn>> {
    let x = x.into();
    let scale = match scale {
        Some(s) if s.is_finite() && s > 0.0 => s,
        Some(s) => return Err(Error::size("scale", s, "a positive finite number")),
        None => absmax(&finite_rows(&x, 1)?.0) / E4M3_MAX,
    };
    let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    // A subnormal scale has an infinite reciprocal; zeros stay zeros.
    let scaled = |&v: &f32| match v {
        _ if v == 0.0 => v,
        _ if v.is_nan() => E4M3_MAX,
        _ => v * reciprocal,
    };
    let code = |v: &f32| E4m3fn::from_f32_rne_saturating(scaled(v));
    let codes = x.widened().iter().map(code).collect();
    Ok(Quantized { codes: matrix(x.shape()[0], codes), scales: matrix(1, vec![scale]) })
}
