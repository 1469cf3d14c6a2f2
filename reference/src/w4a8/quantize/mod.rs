//! Activations to int8 codes with a zero point and a scale per row.
//!
//! | step | for a row |
//! | --- | --- |
//! | range | rmin = min(0, x…), rmax = max(0, x…) |
//! | scale | 1 where rmin = rmax, else 255 / (rmax − rmin): 0 if the range overflows, infinite if it is tiny |
//! | reciprocal | 1 / scale, or 0 for scale 0; not (rmax − rmin) / 255 |
//! | zero point | −128 − rmin·scale if (−128 + rmin·scale) + (127 + rmax·scale) > 0, else 127 − rmax·scale; limited to −128 … 127, where NaN becomes −128; rounded, ties to even |
//! | code | x·scale rounded to int32, which saturates and makes 0 of NaN; saturated to int16; the zero point added in int16, which wraps; limited to −128 … 127 |
//!
//! From k = 8·⌊K/8⌋ to Kp the source index is limited to K − 1, halves are rounded away from zero
//! with every rule, and the zero point is added in int32. Padding therefore repeats the last
//! activation.
//!
//! f32 activations round halves away from zero in KleidiAI 1.22 and later, and to even before; bf16
//! activations always round to even. A NaN below k = 8·⌊K/8⌋ makes the scale NaN and every code −128;
//! a later one does not enter the range.

mod groups;
mod row;
mod symmetric;

pub(super) use groups::group_codes;
pub use groups::{GROUP, QuantizedGroups, quantize_groups};
pub(super) use row::Extremes;
pub(super) use symmetric::Symmetric;
pub use symmetric::{QuantizedTokens, quantize_tokens};

use super::Values;
use crate::named::named;
use crate::w4a8::packed::{PIECE, QuantizedRows, padded_k};
use crate::{Error, Result};

named! {
    /// Rounding of halves in the dynamic quantization.
    ActivationRounding {
        /// Away from zero.
        HalfAway "half_away",
        /// To even.
        HalfEven "half_even",
    }
}

/// The scale of a row. A trait and not a closure: vector loops do not inline closures, which are then compiled for
/// the baseline, where `round` is a function call.
pub(super) trait RowScale {
    /// The codes of `activations`, as bytes. `codes` holds whole chunks.
    fn codes<T: Copy>(&self, activations: &[T], value: impl Fn(T) -> f32, codes: &mut [u8]);
}

/// Quantizes the rows of `x`, `[M, size_k]`.
///
/// # Errors
/// [`Error::Shape`] unless `x` is a whole number of nonempty rows.
pub fn quantize(x: &Values, size_k: usize, rounding: ActivationRounding) -> Result<QuantizedRows> {
    quantize_with(x, size_k, Steps { rounding, by_reciprocal: false, range_over_255: false })
}

/// Known mistakes of implementations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) rounding: ActivationRounding,
    /// Uses x / reciprocal instead of x · scale.
    pub(crate) by_reciprocal: bool,
    /// Uses (rmax − rmin) / 255 as the reciprocal.
    pub(crate) range_over_255: bool,
}

pub(crate) fn quantize_with(x: &Values, size_k: usize, steps: Steps) -> Result<QuantizedRows> {
    if size_k == 0 || !x.len().is_multiple_of(size_k) {
        return Err(Error::shape("x", &[x.len()], format!("[M, {size_k}], K 1 or more")));
    }
    let size_m = x.len() / size_k;
    let mut rows = QuantizedRows {
        size_m,
        size_k,
        codes: Vec::with_capacity(size_m * padded_k(size_k)),
        negated_zero_points: Vec::with_capacity(size_m),
        reciprocals: Vec::with_capacity(size_m),
    };
    for row in x.to_f32().chunks_exact(size_k) {
        let mut range = Range::of(row);
        if steps.range_over_255 && range.scale != 1.0 {
            range.reciprocal = range.width / 255.0;
        }
        let scaled = |x: f32| match steps.by_reciprocal {
            true => x / range.reciprocal,
            false => x * range.scale,
        };
        let whole = size_k / PIECE * PIECE;
        rows.codes.extend(row[..whole].iter().map(|&x| {
            let q = match steps.rounding {
                ActivationRounding::HalfAway => scaled(x).round(),
                ActivationRounding::HalfEven => scaled(x).round_ties_even(),
            };
            let q = (q as i32).clamp(i16::MIN.into(), i16::MAX.into()) as i16;
            q.wrapping_add(range.zero_point as i16).clamp(-128, 127) as i8
        }));
        rows.codes.extend((whole..padded_k(size_k)).map(|k| {
            let q = scaled(row[k.min(size_k - 1)]).round() as i32;
            q.wrapping_add(range.zero_point).clamp(-128, 127) as i8
        }));
        rows.negated_zero_points.push(-range.zero_point);
        rows.reciprocals.push(range.reciprocal);
    }
    Ok(rows)
}

/// A row's range, scale and zero point.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    width: f32,
    scale: f32,
    reciprocal: f32,
    zero_point: i32,
}

impl Range {
    fn of(row: &[f32]) -> Self {
        let (vector, tail) = row.split_at(row.len() / PIECE * PIECE);
        let (mut low, mut high) = (f32::MAX, f32::MIN);
        // `f32::min` and `max` drop a NaN, which is right only for the tail.
        for &x in vector {
            low = if x.is_nan() || low.is_nan() { f32::NAN } else { low.min(x) };
            high = if x.is_nan() || high.is_nan() { f32::NAN } else { high.max(x) };
        }
        for &x in tail {
            low = if x < low { x } else { low };
            high = if x > high { x } else { high };
        }
        Self::between(low, high)
    }

    /// From the smallest and largest activation, or from two NaN.
    fn between(low: f32, high: f32) -> Self {
        // These comparisons keep a NaN on the right-hand side.
        let rmin = if 0.0 < low { 0.0 } else { low };
        let rmax = if 0.0 > high { 0.0 } else { high };
        let scale = if rmin == rmax { 1.0 } else { 255.0 / (rmax - rmin) };
        let reciprocal = if scale != 0.0 { 1.0 / scale } else { 0.0 };
        let (low, high) = (rmin * scale, rmax * scale);
        let zero_point =
            if (-128.0 + low) + (127.0 + high) > 0.0 { -128.0 - low } else { 127.0 - high };
        // A NaN becomes the limit.
        let zero_point = if zero_point > -128.0 { zero_point } else { -128.0 };
        let zero_point = if zero_point < 127.0 { zero_point } else { 127.0 };
        Self {
            width: rmax - rmin,
            scale,
            reciprocal,
            zero_point: zero_point.round_ties_even() as i32,
        }
    }
}
