//! What is known of one element: its exact result, and what a kernel of a class may give.

use super::rows::two_to;
use crate::num::scalar::ScalarType;

/// What is known of one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    /// The exact result, to within f64's precision.
    pub exact: f64,
    /// Bits of the exact result rounded once to the output's type.
    pub rounded: u32,
    /// What errors are measured from: the exact result; of a class that fixes the order of k, the
    /// result of that order, which truncation may take far from the exact one.
    pub centre: f64,
    /// Least result of a kernel of the class, a number of the output's type.
    pub lo: f64,
    /// Greatest result of a kernel of the class.
    pub hi: f64,
    /// How far below the centre a kernel of the class may be: by its sum's error and the roundings
    /// up to the last, and half a unit in the last place for that.
    pub below: f64,
    /// How far above.
    pub above: f64,
}

impl Bounded {
    /// A result that is zero in every kernel.
    pub const ZERO: Self =
        Self { exact: 0.0, rounded: 0, centre: 0.0, lo: 0.0, hi: 0.0, below: 0.0, above: 0.0 };

    /// The error of `found` over its bound: above 1 exactly where no kernel of the class computes
    /// `found`. NaN in the place of a number is infinitely far, but where partial sums may overflow
    /// to infinities that meet; where the exact result is NaN, only NaN will do.
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
            // Not a number where both are infinite.
            return ratio.min(1.0);
        }
        if ratio.is_nan() { f64::INFINITY } else { ratio.max(1.0f64.next_up()) }
    }

    /// Whether nothing is promised: partial sums may overflow.
    pub fn is_unbounded(&self) -> bool {
        self.lo == f64::NEG_INFINITY && self.hi == f64::INFINITY
    }

    /// Error of `found` in units of the last place that `ty` has at the exact result.
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
