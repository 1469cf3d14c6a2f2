//! Activations as a layer's products take them.

use crate::moe::{to_slots, widen};
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::quantize::{Int8Rule, clear_broken, per_token_fp8, per_token_int8};
use crate::weight::Weight;
use crate::{Error, Result};

/// Quantizes activations `[rows, cols]`, bits of `dtype`, for a product; scales of int8 activations
/// are multiplied by `factor`, the [`input_global_scale`] of the matrices.
///
/// A quantized row with an infinity or NaN gets the scale NaN, so all of its products are NaN.
///
/// # Errors
/// As the functions of [`crate::quantize`]; [`Error::Unsupported`] for another `input_dtype`.
pub fn quantize_rows(
    x: &[u16],
    dtype: ScalarType,
    input_dtype: Option<ScalarType>,
    cols: usize,
    factor: f32,
) -> Result<Rows> {
    quantize_rows_by(x, dtype, (input_dtype, Int8Rule::Quotient), cols, factor)
}

/// [`quantize_rows`] with another rule for int8.
pub(crate) fn quantize_rows_by(
    x: &[u16],
    dtype: ScalarType,
    (input_dtype, int8): (Option<ScalarType>, Int8Rule),
    cols: usize,
    factor: f32,
) -> Result<Rows> {
    let Some(input) = input_dtype else {
        return Ok(Rows { codes: x.iter().map(|&b| b.into()).collect(), scales: None });
    };
    let mut values: Vec<f32> = x.iter().map(|&b| widen(dtype, b)).collect();
    let broken = clear_broken(&mut values, cols);
    let rows = rows_of("activations", &values, cols)?;
    let scaled = |scales: Vec<f32>, factor: f32| {
        let mut scales: Vec<f32> = scales.into_iter().map(|s| s * factor).collect();
        broken.iter().for_each(|&row| scales[row] = f32::NAN);
        Some(scales)
    };
    match input {
        ScalarType::INT8 => {
            let (codes, scales) = per_token_int8(rows, int8)?.into_vecs();
            let codes = codes.iter().map(|&c| u32::from(c as u8)).collect();
            Ok(Rows { codes, scales: scaled(scales, factor) })
        }
        ScalarType::FLOAT8_E4M3FN => {
            let (codes, scales) = per_token_fp8(rows, None)?.into_vecs();
            let codes = codes.iter().map(|c| c.to_bits().into()).collect();
            Ok(Rows { codes, scales: scaled(scales, 1.0) })
        }
        other => Err(Error::unsupported(other, "int8 or float8_e4m3fn activations")),
    }
}

/// The factor of int8 activation scales for integer group scales: the largest scale of all experts
/// over 4096, or 1 if there is one group.
pub fn input_global_scale(weights: &[Weight<'_>]) -> f32 {
    if weights.first().is_none_or(|w| w.scales.rows() <= 1) {
        return 1.0;
    }
    let scales = weights.iter().flat_map(|w| {
        let ty = w.scales.ty();
        w.scales.iter_bits().map(move |b| ty.to_f64(b) as f32)
    });
    (1.0 / 4096.0) * scales.fold(f32::NEG_INFINITY, f32::max)
}

/// Rows that enter a product.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Codes of the type that enters the unit, zero-extended.
    pub codes: Vec<u32>,
    /// Scales of the rows of 8-bit activations.
    pub scales: Option<Vec<f32>>,
}

impl Rows {
    /// Repeats rows of tokens as rows of slots.
    pub(crate) fn to_slots(&self, cols: usize, top_k: usize) -> Self {
        let scales = self.scales.as_ref();
        Self {
            codes: to_slots(&self.codes, cols, top_k),
            scales: scales.map(|s| to_slots(s, 1, top_k)),
        }
    }
}
