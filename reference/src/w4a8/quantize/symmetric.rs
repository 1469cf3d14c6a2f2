//! Activations to int8 codes with one scale per row and no zero point, as upstream's operators for W8A8-int8.
//!
//! | rule | operator | scale | code |
//! | --- | --- | --- | --- |
//! | half_even | `dynamic_scaled_int8_quant`, linear layers | max / 127 | x · (127 / max), ties to even; 0 under max = 0 |
//! | half_away | `per_token_quant_int8`, experts | max' / 127, max' = max(max, 1e-10) | x · (127 / max'), ties away from zero |
//!
//! max is the largest magnitude of the row. Codes saturate, and a product that is NaN (0 times an
//! overflow) has the code 0. A row with NaN or an infinity has the scale NaN, so its results are NaN.

use super::{ActivationRounding, RowScale};
use crate::w4a8::Values;
use crate::{Error, Result};

/// What the largest magnitude of a row of experts counts as at least.
const LEAST: f32 = 1e-10;
/// Bits of infinity; those of NaN are above.
const INFINITE: u32 = 0x7f80_0000;
/// Adding it moves an integer below 2^22 to the lowest bits.
const MAGIC: f32 = 12_582_912.0;

/// Rows of codes with a scale each.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTokens {
    /// K.
    pub size_k: usize,
    /// `[M, K]`.
    pub codes: Vec<i8>,
    /// `[M]`.
    pub scales: Vec<f32>,
}

/// Quantizes the rows of `x`, `[M, size_k]`, each alone.
///
/// # Errors
/// [`Error::Shape`] unless `x` is a whole number of nonempty rows.
pub fn quantize_tokens(
    x: &Values,
    size_k: usize,
    rounding: ActivationRounding,
) -> Result<QuantizedTokens> {
    if size_k == 0 || !x.len().is_multiple_of(size_k) {
        return Err(Error::shape("x", &[x.len()], format!("[M, {size_k}], K 1 or more")));
    }
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.to_f32().chunks_exact(size_k) {
        let max = row.iter().fold(0f32, |max, x| max.max(x.abs()));
        if !row.iter().all(|x| x.is_finite()) {
            scales.push(f32::NAN);
            codes.extend(vec![0; size_k]);
            continue;
        }
        let (max, factor) = factor(max, rounding);
        scales.push(max / 127.0);
        // A cast saturates, and makes 0 of NaN.
        codes.extend(row.iter().map(|x| match rounding {
            ActivationRounding::HalfAway => (x * factor).round() as i8,
            ActivationRounding::HalfEven => (x * factor).round_ties_even() as i8,
        }));
    }
    Ok(QuantizedTokens { size_k, codes, scales })
}

/// The magnitude that gives the scale, and what activations are multiplied by.
#[inline(always)]
fn factor(max: f32, rounding: ActivationRounding) -> (f32, f32) {
    match rounding {
        ActivationRounding::HalfAway => (max.max(LEAST), 127.0 / max.max(LEAST)),
        ActivationRounding::HalfEven if max == 0.0 => (0.0, 0.0),
        ActivationRounding::HalfEven => (max, 127.0 / max),
    }
}

/// A row's scale, for loops that compilers vectorize.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Symmetric {
    factor: f32,
    scale: f32,
    half_away: bool,
}

impl Symmetric {
    /// Of a row in segments.
    #[inline(always)]
    pub(in crate::w4a8) fn of<'t, T: Copy + 't>(
        segments: impl Iterator<Item = &'t [T]>,
        value: impl Fn(T) -> f32,
        rounding: ActivationRounding,
    ) -> Self {
        // The bits of magnitudes have the order of their values.
        let mut largest = 0;
        for segment in segments {
            for &x in segment {
                largest = largest.max(value(x).to_bits() & 0x7fff_ffff);
            }
        }
        let half_away = rounding == ActivationRounding::HalfAway;
        if largest >= INFINITE {
            return Self { factor: 0.0, scale: f32::NAN, half_away };
        }
        let (max, factor) = factor(f32::from_bits(largest), rounding);
        Self { factor, scale: max / 127.0, half_away }
    }

    /// What codes are multiplied by.
    pub(in crate::w4a8) fn scale(&self) -> f32 {
        self.scale
    }
}

impl RowScale for Symmetric {
    /// Zeros fill the rest of `codes`.
    #[inline(always)]
    fn codes<T: Copy>(&self, activations: &[T], value: impl Fn(T) -> f32, codes: &mut [u8]) {
        let (codes, rest) = codes.split_at_mut(activations.len());
        rest.fill(0);
        let pairs = codes.iter_mut().zip(activations);
        if self.half_away {
            for (code, &x) in pairs {
                *code = saturated((value(x) * self.factor).round());
            }
        } else {
            for (code, &x) in pairs {
                *code = saturated((value(x) * self.factor).round_ties_even());
            }
        }
    }
}

/// An integral value as int8: saturated, 0 for NaN.
#[inline(always)]
fn saturated(x: f32) -> u8 {
    let x = if x.is_nan() { 0.0 } else { x };
    let x = if x > -128.0 { x } else { -128.0 };
    let x = if x < 127.0 { x } else { 127.0 };
    (x + MAGIC).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ties, rows of zeros, infinities and NaN, and every magnitude of bf16.
    #[test]
    fn fast_codes_are_those_of_the_definition() {
        let mut rows = vec![vec![0.0f32; 9], vec![-0.0; 9], vec![3.0; 9]];
        rows.push((0..9).map(|i| i as f32 - 4.5).chain([-127.0]).collect());
        for special in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            rows.push(vec![1.0, 0.0, special, -2.0]);
        }
        for bits in (0..0x7f80u32).step_by(3) {
            let top = f32::from_bits(bits << 16 | bits & 0xffff);
            let sign = |i: i32| if i % 2 == 0 { 1.0 } else { -1.0 };
            rows.push((0..32).map(|i| top * (i as f32 / 31.0) * sign(i)).collect());
        }
        for row in rows {
            for rounding in [ActivationRounding::HalfAway, ActivationRounding::HalfEven] {
                let x = Values::F32(row.clone());
                let expected = quantize_tokens(&x, row.len(), rounding).unwrap();
                let fast = Symmetric::of(row.chunks(3), |x| x, rounding);
                let mut codes = vec![7; row.len() + 5];
                fast.codes(&row, |x| x, &mut codes);
                let signed: Vec<i8> = codes[..row.len()].iter().map(|&c| c as i8).collect();
                assert_eq!(signed, expected.codes, "{row:?}");
                assert_eq!(codes[row.len()..], [0; 5]);
                assert_eq!(fast.scale().to_bits(), expected.scales[0].to_bits(), "{row:?}");
            }
        }
    }

    #[test]
    fn sizes_are_checked() {
        for (len, size_k) in [(3, 0), (33, 32)] {
            let x = Values::F32(vec![0.0; len]);
            let error = quantize_tokens(&x, size_k, ActivationRounding::HalfEven).unwrap_err();
            assert!(error.to_string().contains(&format!("[M, {size_k}]")), "{error}");
        }
    }
}
