//! A value with the largest error of an implementation.

use crate::num::interval::Interval;
use crate::num::scalar::ScalarType;

/// Unit roundoff of f32.
pub(super) const U: f64 = 1.0 / (1u64 << 24) as f64;
/// f32 products and sums below the smallest normal number may be flushed to zero.
pub(super) const FLUSH: f64 = f32::MIN_POSITIVE as f64;

/// An exact value, and the largest distance of an implementation's result from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Near {
    /// The value.
    pub exact: f64,
    /// The distance; infinite where a stage may overflow.
    pub error: f64,
}

impl Near {
    /// A number that every implementation has.
    pub const fn point(exact: f64) -> Self {
        Self { exact, error: 0.0 }
    }

    /// Largest magnitude.
    pub(super) fn magnitude(self) -> f64 {
        self.exact.abs() + self.error
    }

    /// With a further relative error of the result.
    pub(super) fn within(self, relative: f64) -> Self {
        Self { exact: self.exact, error: self.error + relative * self.magnitude() + FLUSH }
    }

    /// Rounded to `ty`.
    pub(super) fn rounded(self, ty: ScalarType) -> Self {
        let (half_ulp, smallest, largest) = spacing(ty);
        if self.magnitude() * (1.0 + half_ulp) > largest {
            return Self { exact: self.exact, error: f64::INFINITY };
        }
        Self { exact: self.exact, error: self.error + half_ulp * self.magnitude() + smallest }
    }

    /// Times a number with its own error.
    pub(super) fn times(self, other: Self) -> Self {
        let error = self.error * other.magnitude() + self.exact.abs() * other.error;
        Self { exact: self.exact * other.exact, error }
    }

    /// Plus a number with its own error.
    pub(super) fn plus(self, other: Self) -> Self {
        Self { exact: self.exact + other.exact, error: self.error + other.error }
    }

    /// Half of it.
    pub fn halved(self) -> Self {
        Self { exact: self.exact / 2.0, error: self.error / 2.0 + FLUSH }
    }

    /// At most `limit`; a limit brings values no further apart.
    pub(super) fn at_most(self, limit: Option<f32>) -> Self {
        let cut = limit.map_or(self.exact, |l| self.exact.min(f64::from(l)));
        Self { exact: cut, ..self }
    }

    /// At least minus `limit`.
    pub(super) fn at_least_minus(self, limit: Option<f32>) -> Self {
        let cut = limit.map_or(self.exact, |l| self.exact.max(-f64::from(l)));
        Self { exact: cut, ..self }
    }

    /// The values that an implementation may have.
    pub fn interval(self) -> Interval {
        Interval { lo: self.exact - self.error, hi: self.exact + self.error }
    }
}

/// Relative half unit in the last place of `ty`, its largest absolute rounding error near zero, and
/// its largest number.
fn spacing(ty: ScalarType) -> (f64, f64, f64) {
    match ty {
        ScalarType::FLOAT16 => (2f64.powi(-11), 2f64.powi(-25), 65504.0),
        ScalarType::BFLOAT16 => (2f64.powi(-8), FLUSH, 3.38e38),
        _ => (U, FLUSH, f64::from(f32::MAX)),
    }
}
