//! Sets of numbers that an implementation may produce, followed through its operations.
//!
//! An end is a f64. Ends that f64 arithmetic computed are widened by [`WIDEN`] of their size, far
//! more than the error of f64 operations and far less than the unit roundoff of f32; rounding
//! keeps the order of numbers, so an interval is rounded by rounding its ends.

use crate::num::scalar::{self, ScalarType, f64_to_f32_rne};

/// Unit roundoff of f32: the relative error of one correctly rounded operation.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;
/// Widening of ends that were computed in f64.
pub const WIDEN: f64 = 1.0 / (1u64 << 40) as f64;
/// Smallest normal f32: what a flush to zero may take.
pub const FLUSH: f64 = f32::MIN_POSITIVE as f64;
/// Smallest subnormal f32: twice the absolute error of a rounding below [`FLUSH`].
const SUBNORMAL: f64 = FLUSH / (1u64 << 23) as f64;

/// The numbers that an implementation of the class may produce, ends included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Smallest.
    pub lo: f64,
    /// Largest.
    pub hi: f64,
}

/// `value` rounded once to `ty` (FLOAT16, BFLOAT16 or FLOAT32), to nearest even.
pub(crate) fn round_once(ty: ScalarType, value: f64) -> f64 {
    match ty {
        ScalarType::FLOAT16 => scalar::f16_to_f64(scalar::f64_to_f16_rne(value)),
        ScalarType::BFLOAT16 => scalar::bf16_to_f64(scalar::f64_to_bf16_rne(value)),
        _ => f64::from(f64_to_f32_rne(value)),
    }
}

impl Interval {
    /// No number at all.
    pub const EMPTY: Self = Self { lo: f64::INFINITY, hi: f64::NEG_INFINITY };

    /// One number.
    pub const fn point(x: f64) -> Self {
        Self { lo: x, hi: x }
    }

    /// Whether this is one number.
    pub fn is_point(self) -> bool {
        self.lo == self.hi
    }

    /// Whether there is no number inside.
    pub fn is_empty(self) -> bool {
        self.lo > self.hi
    }

    /// Whether `x` is inside.
    pub fn contains(self, x: f64) -> bool {
        self.lo <= x && x <= self.hi
    }

    /// Largest absolute value.
    pub fn magnitude(self) -> f64 {
        self.lo.abs().max(self.hi.abs())
    }

    /// `exact` within a relative error, and a flush to zero.
    pub fn around(exact: f64, relative: f64) -> Self {
        let error = exact.abs() * (relative + WIDEN) + FLUSH;
        Self { lo: exact - error, hi: exact + error }
    }

    /// After operations of relative error `relative` on a number that is not negative.
    pub fn scaled(self, relative: f64) -> Self {
        let r = relative + WIDEN;
        Self { lo: (self.lo * (1.0 - r) - FLUSH).max(0.0), hi: self.hi * (1.0 + r) + FLUSH }
    }

    /// Smallest interval with both.
    pub fn hull(self, other: Self) -> Self {
        Self { lo: self.lo.min(other.lo), hi: self.hi.max(other.hi) }
    }

    /// Without its negative numbers.
    pub fn at_least_zero(self) -> Self {
        Self { lo: self.lo.max(0.0), ..self }
    }

    /// None above `limit`.
    pub fn at_most(self, limit: f64) -> Self {
        Self { lo: self.lo.min(limit), hi: self.hi.min(limit) }
    }

    /// None below `limit`.
    pub fn at_least(self, limit: f64) -> Self {
        Self { lo: self.lo.max(limit), hi: self.hi.max(limit) }
    }

    /// After f32 operations whose relative errors sum up to `relative`: results below 2^-126 lose
    /// digits or are flushed to zero, results above the largest f32 may be infinite.
    pub fn after_f32(self, relative: f64) -> Self {
        let r = relative + WIDEN;
        // A rounding keeps zeros and signs; widening an infinity would give NaN.
        let widened = |x: f64, outward: f64| match x {
            0.0 | f64::INFINITY | f64::NEG_INFINITY => x,
            _ => {
                let moved = x + outward * (x.abs() * r + SUBNORMAL);
                // Not by their product, which may underflow.
                if moved.is_sign_negative() == x.is_sign_negative() { moved } else { 0.0 }
            }
        };
        let mut out = Self { lo: widened(self.lo, -1.0), hi: widened(self.hi, 1.0) };
        if out.lo > 0.0 && out.lo < FLUSH {
            out.lo = 0.0;
        }
        if out.hi < 0.0 && out.hi > -FLUSH {
            out.hi = 0.0;
        }
        if out.hi > f64::from(f32::MAX) {
            out.hi = f64::INFINITY;
        }
        if out.lo < -f64::from(f32::MAX) {
            out.lo = f64::NEG_INFINITY;
        }
        out
    }

    /// The products of two intervals' numbers, and whether 0 · ∞ is among them.
    pub fn times(self, other: Self) -> (Self, bool) {
        let mut out = Self::EMPTY;
        let mut nan = false;
        for a in [self.lo, self.hi] {
            for b in [other.lo, other.hi] {
                let p = a * b;
                if p.is_nan() {
                    nan = true;
                } else {
                    out = out.hull(Self::point(p));
                }
            }
        }
        // A zero or an infinity between the ends.
        let zero = |i: Self| i.contains(0.0);
        let infinite = |i: Self| i.magnitude() == f64::INFINITY;
        let finite = |i: Self| i.lo < f64::INFINITY && i.hi > f64::NEG_INFINITY;
        if zero(self) && finite(other) || finite(self) && zero(other) {
            // Both ends of 0 · [−∞, ∞] are NaN, but not the numbers between them.
            out = out.hull(Self::point(0.0));
        }
        (out, nan || zero(self) && infinite(other) || infinite(self) && zero(other))
    }

    /// After one rounding to `ty`, directly or by way of f32.
    pub fn rounded(self, ty: ScalarType) -> Self {
        let lo = self.lo - if self.lo.is_finite() { self.lo.abs() * WIDEN } else { 0.0 };
        let hi = self.hi + if self.hi.is_finite() { self.hi.abs() * WIDEN } else { 0.0 };
        let by_f32 = |x: f64| round_once(ty, f64::from(f64_to_f32_rne(x)));
        Self { lo: round_once(ty, lo).min(by_f32(lo)), hi: round_once(ty, hi).max(by_f32(hi)) }
    }

    /// After one rounding to `ty` of numbers whose ends are exact.
    pub fn rounded_once(self, ty: ScalarType) -> Self {
        Self { lo: round_once(ty, self.lo), hi: round_once(ty, self.hi) }
    }

    /// How far `found` is from `exact` in units of the interval's half on that side: above 1 it is
    /// outside. NaN is infinitely far.
    pub fn ratio(self, exact: f64, found: f32) -> f64 {
        let found = f64::from(found);
        let (error, bound) = if found >= exact {
            (found - exact, self.hi - exact)
        } else {
            (exact - found, exact - self.lo)
        };
        if found.is_nan() {
            f64::INFINITY
        } else if found == exact {
            0.0
        } else if self.contains(found) {
            match error / bound {
                // An end that is infinite: on it, or before it.
                _ if error == f64::INFINITY => 1.0,
                r if bound > 0.0 => r.min(1.0),
                _ => 1.0,
            }
        } else if bound > 0.0 {
            (error / bound).max(1.0 + f64::EPSILON)
        } else {
            f64::INFINITY
        }
    }
}

/// What an implementation may make of one element: exact result, interval, and whether NaN is a
/// result of its operations (0 · ∞, ∞ − ∞, or a NaN that came in).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// The exact result; NaN where the operations have none.
    pub exact: f64,
    /// The numbers allowed; [`Interval::EMPTY`] where only NaN is.
    pub interval: Interval,
    /// Whether NaN is allowed.
    pub nan: bool,
}

impl Bound {
    /// Only NaN.
    pub const NAN: Self = Self { exact: f64::NAN, interval: Interval::EMPTY, nan: true };

    /// The exact number `x`, nothing else; NaN is NaN.
    pub const fn exactly(x: f64) -> Self {
        match x.is_nan() {
            true => Self::NAN,
            false => Self { exact: x, interval: Interval::point(x), nan: false },
        }
    }

    /// The error of `found` over its bound, as [`Interval::ratio`]; 0 for a NaN that is allowed,
    /// infinite for a number where only NaN is.
    pub fn ratio(&self, found: f32) -> f64 {
        if found.is_nan() {
            return if self.nan { 0.0 } else { f64::INFINITY };
        }
        if self.exact.is_nan() {
            let inside = self.interval.contains(f64::from(found));
            return if inside { 0.0 } else { f64::INFINITY };
        }
        self.interval.ratio(self.exact, found)
    }

    /// Whether `found` is allowed.
    pub fn allows(&self, found: f32) -> bool {
        self.ratio(found) <= 1.0
    }
}
