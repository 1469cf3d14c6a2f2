//! The same codes, row by row into the caller's memory, in loops that compilers vectorize.
//!
//! A row may be passed in segments (multiples of [`CHUNK`] activations, except the last): first all of
//! them to [`Extremes`], then all of them to [`Scaled`].

use super::{Range, RowScale};
use crate::w4a8::packed::{CHUNK, PIECE};
use crate::w4a8::quantize::ActivationRounding;

/// The lanes of a chunk.
type Lanes<T> = [T; CHUNK];

/// The extremes of a row's activations.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Extremes {
    low: Lanes<f32>,
    high: Lanes<f32>,
    /// Largest magnitude bits of the activations where a NaN counts.
    magnitude: Lanes<u32>,
}

impl Extremes {
    /// Of no activations.
    #[inline(always)]
    pub(in crate::w4a8) fn new() -> Self {
        Self { low: [f32::MAX; CHUNK], high: [f32::MIN; CHUNK], magnitude: [0; CHUNK] }
    }

    /// Adds the next segment; `value` returns an element's activation.
    #[inline(always)]
    pub(in crate::w4a8) fn add<T: Copy>(&mut self, segment: &[T], value: impl Fn(T) -> f32) {
        let chunks = segment.chunks_exact(CHUNK);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (j, &x) in chunk.iter().enumerate() {
                self.take(j, value(x));
                self.magnitude[j] = self.magnitude[j].max(value(x).to_bits() & 0x7fff_ffff);
            }
        }
        let whole = rest.len() / PIECE * PIECE;
        for (j, &x) in rest.iter().enumerate() {
            self.take(j, value(x));
            if j < whole {
                self.magnitude[j] = self.magnitude[j].max(value(x).to_bits() & 0x7fff_ffff);
            }
        }
    }

    /// Drops a NaN.
    #[inline(always)]
    fn take(&mut self, j: usize, x: f32) {
        self.low[j] = if x < self.low[j] { x } else { self.low[j] };
        self.high[j] = if x > self.high[j] { x } else { self.high[j] };
    }

    /// The row's scale and zero point.
    #[inline(always)]
    pub(in crate::w4a8) fn scaled(&self, rounding: ActivationRounding) -> Scaled {
        let infinity = f32::INFINITY.to_bits();
        let range = match self.magnitude.iter().any(|&m| m > infinity) {
            true => Range::between(f32::NAN, f32::NAN),
            false => {
                let low = self.low.iter().fold(f32::MAX, |a, &b| if b < a { b } else { a });
                let high = self.high.iter().fold(f32::MIN, |a, &b| if b > a { b } else { a });
                Range::between(low, high)
            }
        };
        Scaled { range, half_away: rounding == ActivationRounding::HalfAway }
    }
}

/// A row's scale and zero point.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Scaled {
    range: Range,
    half_away: bool,
}

impl Scaled {
    /// −zero point.
    pub(in crate::w4a8) fn negated_zero_point(&self) -> i32 {
        -self.range.zero_point
    }

    /// 1 / scale.
    pub(in crate::w4a8) fn reciprocal(&self) -> f32 {
        self.range.reciprocal
    }

    /// The code of a rounded value in a whole piece.
    #[inline(always)]
    fn code(&self, rounded: f32) -> u8 {
        // The shifts wrap the sum to 16 bits.
        let q = (saturated(rounded) + self.range.zero_point) << 16 >> 16;
        q.clamp(-128, 127) as i8 as u8
    }
}

impl RowScale for Scaled {
    /// At the end of a row, the last activation is repeated to fill the last chunk.
    #[inline(always)]
    fn codes<T: Copy>(&self, activations: &[T], value: impl Fn(T) -> f32, codes: &mut [u8]) {
        let whole = activations.len() / PIECE * PIECE;
        let (vector, tail) = activations.split_at(whole);
        let (codes, padded) = codes.split_at_mut(whole);
        // Loops of variable length: the compiler would unroll fixed ones before it vectorizes.
        let pairs = codes.iter_mut().zip(vector);
        if self.half_away {
            for (code, &x) in pairs {
                *code = self.code((value(x) * self.range.scale).round());
            }
        } else {
            for (code, &x) in pairs {
                *code = self.code((value(x) * self.range.scale).round_ties_even());
            }
        }
        let Some(&last) = activations.last() else { return };
        for (k, code) in padded.iter_mut().enumerate() {
            let x = *tail.get(k).unwrap_or(&last);
            let q = (value(x) * self.range.scale).round() as i32;
            *code = q.wrapping_add(self.range.zero_point).clamp(-128, 127) as i8 as u8;
        }
    }
}

/// An integral value as int16: saturated, 0 for NaN.
///
/// A cast does the same, but compilers do not vectorize it, because vector conversions do not saturate
/// to i32. Here the value is clamped first, and adding 1.5 · 2^23, whose ULP is 1, converts it.
#[inline(always)]
fn saturated(x: f32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    let x = if x.is_nan() { 0.0 } else { x };
    let x = if x > -32_768.0 { x } else { -32_768.0 };
    let x = if x < 32_767.0 { x } else { 32_767.0 };
    (x + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32
}
