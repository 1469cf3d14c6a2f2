//! The exact result of one element, and the interval of results that kernels of a class may give.

use super::rows::two_to;
use crate::num::scalar::ScalarType;

/// The exact result and the bounds of one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    /// The exact result, to within f64's precision.
    pub exact: f64,
    /// Bits of the exact result rounded once to the output's type.
    pub rounded: u32,
    /// Reference point of errors: the exact result or, for a class with a fixed order of k, the
    /// result of that order, which truncation may move far from the exact one.
    pub centre: f64,
    /// Smallest result of a kernel of the class, a value of the output's type.
    pub lo: f64,
    /// Largest result of a kernel of the class.
    pub hi: f64,
    /// How far below the centre a kernel of the class may be: the error of its sum and of all
    /// roundings.
    pub below: f64,
    /// How far above the centre a kernel of the class may be.
    pub above: f64,
}

impl Bounded {
    /// A result that is zero in every kernel.
    pub const ZERO: Self =
        Self { exact: 0.0, rounded: 0, centre: 0.0, lo: 0.0, hi: 0.0, below: 0.0, above: 0.0 };

    /// The error of `found` over its bound: above 1 exactly where no kernel of the class computes
    /// `found`. NaN in place of a number gives infinity, unless partial sums may overflow to
    /// opposite infinities. If the exact result is NaN, only NaN passes.
    pub fn ratio(&self, found: f64) -> f64 {
        if self.exact.is_nan() {
            return if found.is_nan() { 0.0 } else { f64::INFINITY };
        }
        if found == self.centre || self.is_unbounded() {
            return 0.0;
        }
        if found.is_nan() {
            return f64::INFINITY;
        }
        let (error, bound) = if found >= self.centre {
            (found - self.centre, self.above)
        } else {
            (self.centre - found, self.below)
        };
        let ratio = error / bound;
        if (self.lo..=self.hi).contains(&found) {
            // NaN if both are infinite.
            return ratio.min(1.0);
        }
        if ratio.is_nan() { f64::INFINITY } else { ratio.max(1.0f64.next_up()) }
    }

    /// Whether there is no bound because partial sums may overflow.
    pub fn is_unbounded(&self) -> bool {
        self.lo == f64::NEG_INFINITY && self.hi == f64::INFINITY
    }

    /// Error of `found` in units in the last place of `ty` at the exact result.
    pub fn ulps(&self, ty: ScalarType, found: f64) -> f64 {
        if self.exact == found || self.exact.is_nan() && found.is_nan() {
            return 0.0;
        }
        let error = (found - self.exact).abs() / unit(ty, self.exact);
        if error.is_nan() { f64::INFINITY } else { error }
    }
}

/// One unit in the last place of `ty` at `x`.
pub(super) fn unit(ty: ScalarType, x: f64) -> f64 {
    let (mantissa, least) = match ty {
        ScalarType::FLOAT16 => (10, -14),
        ScalarType::BFLOAT16 => (7, -126),
        _ => (23, -126),
    };
    let exponent = ((x.to_bits() >> 52) as i32 & 0x7ff) - 1023;
    two_to(exponent.max(least) - mantissa)
}
