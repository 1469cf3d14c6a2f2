//! The power of a verdict that an output may pass in several ways: by the bits of a schedule, or
//! within the bound of one of several classes and conventions.

use super::{Accepted, NEAR, Power, Rejects, both, percent, round_once, uniform_error, unit};
use crate::num::scalar::ScalarType;

/// A pass that leaves a larger uniform error unnoticed says so in every report.
const REMARKABLE: f64 = 0.01;

impl Power {
    /// Whether a bound of this power is a way to a pass: it excludes every trivial wrong answer and
    /// any uniform error above `limit`.
    pub(in crate::judge) fn is_way(&self, limit: f64) -> bool {
        self.is_enough() && self.uniform_error.is_some_and(|error| error <= limit)
    }

    /// Whether a uniform error of more than `limit` would pass.
    pub fn is_below(&self, limit: f64) -> bool {
        self.uniform_error.is_some_and(|error| error > limit)
    }

    /// The uniform error that would pass, if it is more than 1 %.
    pub fn remark(&self) -> Option<String> {
        let error = self.uniform_error.filter(|error| *error > REMARKABLE)?;
        Some(format!("a uniform error of up to {} would pass", percent(error)))
    }

    /// The power of a verdict that also passes in the `other` way.
    #[must_use]
    pub(in crate::judge) fn or(&self, other: &Self) -> Self {
        let (a, b) = (&self.rejects, &other.rejects);
        let error = match (self.uniform_error, other.uniform_error) {
            (Some(a), Some(b)) => Some(a.max(b)),
            _ => None,
        };
        Self {
            every_bit: self.every_bit && other.every_bit,
            rejects: Rejects {
                zeros: both(a.zeros, b.zeros),
                negated: both(a.negated, b.negated),
                halved: both(a.halved, b.halved),
                columns_permuted: both(a.columns_permuted, b.columns_permuted),
                half_k_missing: both(a.half_k_missing, b.half_k_missing),
            },
            uniform_error: error,
            output_truncated: both(self.output_truncated, other.output_truncated),
            split_k_16_bit: both(self.split_k_16_bit, other.split_k_16_bit),
            unbounded: self.unbounded.max(other.unbounded),
        }
    }

    /// The power of a verdict that also passes this output times 1 ± `error`.
    #[must_use]
    pub(in crate::judge) fn or_scaled(&self, error: Option<f64>) -> Self {
        match error {
            None => *self,
            Some(error) => Self {
                every_bit: false,
                uniform_error: self.uniform_error.map(|own| own.max(error)),
                ..*self
            },
        }
    }
}

/// The uniform error that would pass bounds of [`NEAR`] units around the exact results. Within these a value
/// is right, so that no bound has to exclude a smaller error: near zero, a unit is a large share of a value.
pub(crate) fn attainable(ty: ScalarType, elements: &[Accepted]) -> f64 {
    let near = |e: &Accepted| {
        let value = round_once(ty, e.exact);
        let width = NEAR * unit(ty, value.abs());
        Accepted { lo: value - width, hi: value + width, ..*e }
    };
    let near = elements.iter().filter(|e| e.exact.is_finite()).map(near);
    // Where each of these bounds contains zero, no error is excluded.
    uniform_error(ty, near.map(|e| (e, e))).unwrap_or(f64::INFINITY)
}

/// The largest e such that an output `y`, times 1 + e or 1 − e and rounded, is accepted in every
/// element; `None` if no multiple of it is. Each element has its value and what is accepted there.
pub(crate) fn reach(
    ty: ScalarType,
    elements: impl IntoIterator<Item = (f64, Accepted)>,
) -> Option<f64> {
    let (mut least, mut most) = (-1.0f64, f64::INFINITY);
    let mut scales = false;
    for (y, accepted) in elements {
        if y == 0.0 || !y.is_finite() {
            // No factor changes it.
            if !accepted.accepts(y) {
                return None;
            }
            continue;
        }
        if accepted.lo > accepted.hi {
            return None;
        }
        scales = true;
        let (lo, hi) = match y > 0.0 {
            true => (accepted.lo, accepted.hi),
            false => (-accepted.hi, -accepted.lo),
        };
        let y = y.abs();
        // What rounds to an accepted value.
        least = least.max((lo - unit(ty, lo) / 2.0) / y - 1.0);
        most = most.min((hi + unit(ty, hi) / 2.0) / y - 1.0);
        if least > most {
            return None;
        }
    }
    scales.then(|| least.abs().max(most.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::interval::round_once;

    const TY: ScalarType = ScalarType::BFLOAT16;

    #[test]
    fn a_scaled_output_reaches_what_its_factor_gives() {
        let y: Vec<f64> =
            (1..200).map(|i| round_once(TY, f64::from(i).sin() * f64::from(i))).collect();
        let pairs = |made: Vec<f64>| {
            y.clone().into_iter().zip(made.into_iter().map(|x| Accepted::only(x, x)))
        };
        for factor in [1.03, 0.97, 1.2] {
            let scaled = y.iter().map(|x| round_once(TY, x * factor)).collect();
            let reached = reach(TY, pairs(scaled)).expect("its own multiple");
            assert!((reached - f64::abs(factor - 1.0)).abs() < 0.002, "{factor}: {reached}");
        }
        // With another number in one element, the values are not a multiple.
        let mut other: Vec<f64> = y.iter().map(|x| round_once(TY, x * 1.03)).collect();
        other[70] *= 1.5;
        assert_eq!(reach(TY, pairs(other)), None);
        // A zero stays zero, and zeros alone cannot be scaled.
        assert_eq!(reach(TY, [(0.0, Accepted::only(1.0, 1.0))]), None);
        assert_eq!(reach(TY, [(0.0, Accepted::only(0.0, 0.0))]), None);
    }

    #[test]
    fn two_ways_are_as_weak_as_the_weaker_one() {
        let bits = Power::every_bit();
        let around = |radius: f64| {
            let one = |x: f64| Accepted { exact: x, lo: x - radius, hi: x + radius, nan: false };
            Power::of(&[1.0, 2.0, -3.0, 4.0].map(one), 4, ScalarType::FLOAT32)
        };
        let (narrow, wide) = (around(0.01), around(3.0));
        let both = bits.or(&narrow);
        assert_eq!(both.uniform_error, narrow.uniform_error);
        assert!(!both.every_bit && both.is_enough());
        assert_eq!(narrow.or(&wide).gaps(), wide.gaps());
        assert!(wide.is_below(0.02) && !narrow.is_below(0.02), "{wide:?} {narrow:?}");
        assert_eq!(bits.or_scaled(None), bits);
        assert_eq!(bits.or_scaled(Some(0.03)).uniform_error, Some(0.03));
        assert_eq!(bits.remark(), None);
        assert_eq!(
            bits.or_scaled(Some(0.03)).remark().as_deref(),
            Some("a uniform error of up to 3 % would pass")
        );
    }
}
