//! The same codes, row by row into the caller's memory, in loops that compilers vectorize.
//!
//! A row may come in segments (multiples of [`CHUNK`] activations, but for the last): first all go
//! through [`Extremes`], then all through [`Scaled`].

use super::Range;
use crate::case::ActivationRounding;
use crate::layout::kleidi::{CHUNK, PIECE};

/// Lanes that run side by side: a chunk.
type Lanes<T> = [T; CHUNK];

/// The extremes of a row's activations.
#[derive(Debug, Clone, Copy)]
pub(in crate::w4a8) struct Extremes {
    low: Lanes<f32>,
    high: Lanes<f32>,
    /// The largest bits without their sign among those whose NaN counts.
    magnitude: Lanes<u32>,
}

impl Extremes {
    /// Of nothing.
    #[inline(always)]
    pub(in crate::w4a8) fn new() -> Self {
        Self { low: [f32::MAX; CHUNK], high: [f32::MIN; CHUNK], magnitude: [0; CHUNK] }
    }

    /// Takes the next segment; `value` says an element's activation.
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

    /// Comparisons that drop a NaN.
    #[inline(always)]
    fn take(&mut self, j: usize, x: f32) {
        self.low[j] = if x < self.low[j] { x } else { self.low[j] };
        self.high[j] = if x > self.high[j] { x } else { self.high[j] };
    }

    /// What the row is quantized with.
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

    /// The codes of up to [`CHUNK`] activations. Fewer, at the end of a row, are filled up by
    /// repeating the last one.
    #[inline(always)]
    pub(in crate::w4a8) fn chunk<T: Copy>(
        &self,
        activations: &[T],
        value: impl Fn(T) -> f32,
    ) -> Lanes<i8> {
        let mut scaled = [0.0; CHUNK];
        if let Ok(chunk) = <&[T; CHUNK]>::try_from(activations) {
            for (scaled, &x) in scaled.iter_mut().zip(chunk) {
                *scaled = value(x) * self.range.scale;
            }
            return self.vector(&scaled);
        }
        let mut last = 0.0;
        for (k, scaled) in scaled.iter_mut().enumerate() {
            last = activations.get(k).map_or(last, |&x| value(x) * self.range.scale);
            *scaled = last;
        }
        let mut codes = self.vector(&scaled);
        for k in activations.len() / PIECE * PIECE..CHUNK {
            let q = scaled[k].round() as i32;
            codes[k] = q.wrapping_add(self.range.zero_point).clamp(-128, 127) as i8;
        }
        codes
    }

    /// Codes of whole pieces.
    #[inline(always)]
    fn vector(&self, scaled: &Lanes<f32>) -> Lanes<i8> {
        let mut rounded = [0.0; CHUNK];
        if self.half_away {
            for (rounded, scaled) in rounded.iter_mut().zip(scaled) {
                *rounded = scaled.round();
            }
        } else {
            for (rounded, scaled) in rounded.iter_mut().zip(scaled) {
                *rounded = scaled.round_ties_even();
            }
        }
        let mut codes = [0; CHUNK];
        for (code, rounded) in codes.iter_mut().zip(rounded) {
            let q = (rounded as i32).clamp(i16::MIN.into(), i16::MAX.into());
            // The shifts wrap the sum to 16 bits.
            let q = (q + self.range.zero_point) << 16 >> 16;
            *code = q.clamp(-128, 127) as i8;
        }
        codes
    }
}
