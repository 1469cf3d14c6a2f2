//! The mistakes that a verdict excludes.
//!
//! A pass says something only if wrong answers fail. [`Power`] is computed from the interval that the
//! verdict accepts for each element: which trivial wrong answers it rejects, and the smallest
//! relative error, the same in every element, that it rejects.
//!
//! Any answer inside the intervals is right. A wrong answer derived from it (−y, y/2, permuted
//! columns) is also an interval; it is rejected for certain if the two intervals are disjoint.
//!
//! Zeros, −y and y/2 must be rejected in every row, since a kernel may be wrong in only a few rows;
//! permuted columns and a missing half of k must be rejected somewhere. An alternative counts if it
//! differs from the exact result by more than two units in the last place. If it differs nowhere,
//! it is not applicable: zeros in place of zeros are not an error.

mod ways;

use serde::Serialize;
pub(crate) use ways::{attainable, reach};

use crate::num::interval::{Bound, FLUSH, round_once};
use crate::num::scalar::ScalarType;
use crate::products::Bounded;

/// A bound need not reject an alternative within this many units in the last place of the right
/// result.
const NEAR: f64 = 2.0;

/// The interval that a verdict accepts for one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accepted {
    /// The exact result; NaN if it is not a number.
    pub exact: f64,
    /// Smallest accepted number.
    pub lo: f64,
    /// Largest accepted number; below `lo` if no number is accepted.
    pub hi: f64,
    /// Whether NaN is accepted.
    pub nan: bool,
}

impl Accepted {
    /// Whether the verdict accepts `x`.
    pub fn accepts(&self, x: f64) -> bool {
        if x.is_nan() { self.nan } else { self.lo <= x && x <= self.hi }
    }

    /// Whether a wrong answer somewhere in `other` is rejected for certain.
    fn excludes(&self, other: &Self) -> bool {
        let meet = self.lo.max(other.lo) <= self.hi.min(other.hi);
        !(meet || self.nan && other.nan)
    }

    /// The image of the interval under a monotonic function.
    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let (a, b) = (f(self.lo), f(self.hi));
        let is_empty = self.lo > self.hi;
        let (lo, hi) = if is_empty { (self.lo, self.hi) } else { (a.min(b), a.max(b)) };
        Self { exact: f(self.exact), lo, hi, nan: self.nan }
    }

    /// Whether every number is accepted.
    pub fn is_unbounded(&self) -> bool {
        self.lo == f64::NEG_INFINITY && self.hi == f64::INFINITY
    }

    /// The interval of a result that must be one value of the type, or NaN.
    pub const fn only(exact: f64, value: f64) -> Self {
        match value.is_nan() {
            true => Self { exact, lo: f64::INFINITY, hi: f64::NEG_INFINITY, nan: true },
            false => Self { exact, lo: value, hi: value, nan: false },
        }
    }
}

impl From<&Bounded> for Accepted {
    fn from(b: &Bounded) -> Self {
        if b.exact.is_nan() {
            return Self::only(b.exact, f64::NAN);
        }
        Self { exact: b.exact, lo: b.lo, hi: b.hi, nan: b.is_unbounded() }
    }
}

impl From<&Bound> for Accepted {
    fn from(b: &Bound) -> Self {
        Self { exact: b.exact, lo: b.interval.lo, hi: b.interval.hi, nan: b.nan }
    }
}

/// The wrong answers that a verdict rejects; `None` if one is not applicable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Rejects {
    /// All zeros.
    pub zeros: Option<bool>,
    /// −y.
    pub negated: Option<bool>,
    /// y/2.
    pub halved: Option<bool>,
    /// Columns rotated by one, and neighbours swapped.
    pub columns_permuted: Option<bool>,
    /// A product without the first half of k, on a sample of rows and columns.
    pub half_k_missing: Option<bool>,
}

impl Rejects {
    /// Each wrong answer with its name in texts.
    fn named(&self) -> [(&'static str, Option<bool>); 5] {
        [
            ("zeros", self.zeros),
            ("-y", self.negated),
            ("y/2", self.halved),
            ("permuted columns", self.columns_permuted),
            ("a missing half of k", self.half_k_missing),
        ]
    }
}

/// The mistakes that a verdict excludes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Power {
    /// Whether only the bits of a schedule pass: of the declared one, or of a known one where no
    /// bound is a way to a pass. Then every other change is rejected.
    pub every_bit: bool,
    /// Trivial wrong answers.
    pub rejects: Rejects,
    /// Every relative error above this one, if it is the same in every element, is rejected in both
    /// directions; `None` if no such error is rejected.
    pub uniform_error: Option<f64>,
    /// Whether an output that is truncated instead of rounded is rejected. Not required of a pass.
    pub output_truncated: Option<bool>,
    /// Whether a product in two parts of k, each rounded to the output's type, is rejected, on a
    /// sample of rows and columns. Not required of a pass.
    pub split_k_16_bit: Option<bool>,
    /// Number of elements for which every value is accepted.
    pub unbounded: usize,
}

impl Power {
    /// The power of a comparison bit for bit.
    pub const fn every_bit() -> Self {
        let all = Some(true);
        Self {
            every_bit: true,
            rejects: Rejects {
                zeros: all,
                negated: all,
                halved: all,
                columns_permuted: all,
                half_k_missing: all,
            },
            uniform_error: Some(0.0),
            output_truncated: all,
            split_k_16_bit: all,
            unbounded: 0,
        }
    }

    /// The power of a verdict that accepts the intervals `elements` `[rows, cols]` of the type
    /// `ty`.
    pub fn of(elements: &[Accepted], cols: usize, ty: ScalarType) -> Self {
        let cols = cols.max(1);
        let whole = Scan { elements, ty, cols: elements.len().max(1) };
        let by_row = Scan { elements, ty, cols };
        let next = |i: usize| if (i + 1).is_multiple_of(cols) { i + 1 - cols } else { i + 1 };
        let neighbour = |i: usize| match (i % cols) ^ 1 {
            n if n < cols => i - i % cols + n,
            _ => i,
        };
        Self {
            every_bit: false,
            rejects: Rejects {
                zeros: by_row.rejects(|_| Accepted::only(0.0, 0.0)),
                negated: by_row.rejects(|i| elements[i].map(|x| -x)),
                halved: by_row.rejects(|i| halved(elements[i], ty)),
                columns_permuted: both(
                    whole.rejects(|i| elements[next(i)]),
                    whole.rejects(|i| elements[neighbour(i)]),
                ),
                half_k_missing: None,
            },
            uniform_error: uniform_error(ty, elements.iter().map(|e| (*e, *e))),
            output_truncated: rejects_truncated(elements, ty),
            split_k_16_bit: None,
            unbounded: elements.iter().filter(|e| e.is_unbounded()).count(),
        }
    }

    /// Whether every trivial wrong answer is rejected.
    pub fn is_enough(&self) -> bool {
        self.gaps().is_empty()
    }

    /// Known faults of kernels that are not excluded. A pass does not depend on them.
    pub fn not_excluded(&self) -> Vec<&'static str> {
        let known = [
            ("truncation of the output", self.output_truncated),
            ("split-K through 16 bits", self.split_k_16_bit),
        ];
        known.iter().filter(|(_, r)| *r == Some(false)).map(|(name, _)| *name).collect()
    }

    /// The trivial wrong answers that are accepted.
    pub fn gaps(&self) -> Vec<&'static str> {
        let named = self.rejects.named();
        named.iter().filter(|(_, r)| *r == Some(false)).map(|(name, _)| *name).collect()
    }

    /// What is rejected, as a clause without a full stop.
    pub fn text(&self) -> String {
        if self.every_bit {
            return "every bit".to_owned();
        }
        let list = |wanted: Option<bool>| -> Vec<&str> {
            let named = self.rejects.named();
            named.iter().filter(|(_, r)| *r == wanted).map(|(name, _)| *name).collect()
        };
        let mut rejected: Vec<String> = list(Some(true)).into_iter().map(str::to_owned).collect();
        if let Some(error) = self.uniform_error {
            rejected.push(format!("any uniform error above {}", percent(error)));
        }
        let mut text = match rejected.split_last() {
            None => "rejects no trivial wrong answer".to_owned(),
            Some((last, [])) => format!("rejects {last}"),
            Some((last, rest)) => format!("rejects {} and {last}", rest.join(", ")),
        };
        let accepted = list(Some(false));
        if !accepted.is_empty() {
            text += &format!("; accepts {}", accepted.join(", "));
        }
        let none = list(None);
        if !none.is_empty() {
            text += &format!("; not applicable: {}", none.join(", "));
        }
        text
    }
}

/// Half of an element; half of infinity is infinity.
fn halved(element: Accepted, ty: ScalarType) -> Accepted {
    match round_once(ty, element.exact).is_infinite() {
        true => element,
        false => element.map(|x| round_once(ty, x / 2.0)),
    }
}

/// A share in percent, rounded up to two digits.
pub(in crate::judge) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent == 0.0 || !percent.is_finite() {
        return format!("{percent} %");
    }
    let digits = (1 - percent.log10().floor() as i32).clamp(0, 12);
    let scale = 10f64.powi(digits);
    format!("{} %", (percent * scale).ceil() / scale)
}

/// Both alternatives must be rejected, or one alternative in both of two ways.
fn both(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a && b),
        (a, b) => a.or(b),
    }
}

/// Elements in rows, each of which is examined separately.
struct Scan<'e> {
    elements: &'e [Accepted],
    ty: ScalarType,
    cols: usize,
}

impl Scan<'_> {
    /// Whether every row in which `alternative` is an error rejects it; `None` if there is no such
    /// row.
    fn rejects(&self, alternative: impl Fn(usize) -> Accepted) -> Option<bool> {
        let mut rejected = None;
        for (row, elements) in self.elements.chunks(self.cols).enumerate() {
            let pairs = elements.iter().enumerate();
            let pairs = pairs.map(|(j, e)| (alternative(row * self.cols + j), *e));
            match rejects_sample(self.ty, pairs) {
                Some(false) => return Some(false),
                outcome => rejected = rejected.or(outcome),
            }
        }
        rejected
    }
}

/// Whether a sample of alternatives, each with the interval accepted in its place, is rejected;
/// `None` if no alternative is an error.
pub(crate) fn rejects_sample(
    ty: ScalarType,
    sample: impl IntoIterator<Item = (Accepted, Accepted)>,
) -> Option<bool> {
    // Two results that overflow to the same infinity give the same output.
    let output = |x: f64| if x.is_nan() { x } else { round_once(ty, x) };
    let mut is_error = false;
    for (alternative, element) in sample {
        if element.excludes(&alternative) {
            return Some(true);
        }
        is_error |= differs(ty, output(alternative.exact), output(element.exact), NEAR);
    }
    is_error.then_some(false)
}

/// Whether single values, each with the interval accepted in its place, are rejected; `None` if all
/// are the exact results rounded once.
pub(in crate::judge) fn rejects_values(
    ty: ScalarType,
    values: impl IntoIterator<Item = (f64, Accepted)>,
) -> Option<bool> {
    let mut is_error = false;
    for (value, element) in values {
        if !element.accepts(value) {
            return Some(true);
        }
        is_error |= differs(ty, value, round_once(ty, element.exact), 0.0);
    }
    is_error.then_some(false)
}

/// Whether an output that is truncated instead of rounded is rejected; `None` if truncation changes
/// nothing.
fn rejects_truncated(elements: &[Accepted], ty: ScalarType) -> Option<bool> {
    rejects_values(ty, elements.iter().map(|e| (truncated(ty, e.exact), *e)))
}

/// Whether `value` is more than `near` units in the last place from the `right` one.
fn differs(ty: ScalarType, value: f64, right: f64, near: f64) -> bool {
    if value == right || value.is_nan() && right.is_nan() {
        return false;
    }
    let distance = (value - right).abs();
    // f32 units flush subnormal numbers.
    let flushed = if ty == ScalarType::FLOAT32 { FLUSH } else { 0.0 };
    let enough = (near * unit(ty, value.abs().max(right.abs()))).max(flushed);
    !distance.is_finite() || distance > enough
}

/// The smallest e such that y · (1 ± f), rounded, is rejected for every f above e and every
/// accepted y. Each element has the interval accepted for y and that for the scaled y.
pub(in crate::judge) fn uniform_error(
    ty: ScalarType,
    elements: impl IntoIterator<Item = (Accepted, Accepted)>,
) -> Option<f64> {
    let (mut up, mut down) = (f64::INFINITY, f64::INFINITY);
    for (y, scaled) in elements {
        let [y, scaled] = match y.lo > 0.0 {
            true => [(y.lo, y.hi), (scaled.lo, scaled.hi)],
            false => [(-y.hi, -y.lo), (-scaled.hi, -scaled.lo)],
        };
        if y.0 <= 0.0 || !y.1.is_finite() || !scaled.1.is_finite() {
            continue;
        }
        // A value that rounds to the next number of the type is outside.
        if scaled.1 / y.0 - 1.0 < up {
            up = up.min((scaled.1 + unit(ty, scaled.1) / 2.0) / y.0 - 1.0);
        }
        if scaled.0 > 0.0 && 1.0 - scaled.0 / y.1 < down {
            down = down.min(1.0 - (scaled.0 - unit(ty, scaled.0) / 2.0) / y.1);
        }
    }
    let error = up.max(down);
    error.is_finite().then_some(error)
}

/// `x` rounded toward zero to `ty`.
fn truncated(ty: ScalarType, x: f64) -> f64 {
    let rounded = round_once(ty, x);
    if !rounded.is_finite() && !x.is_finite() || rounded.abs() <= x.abs() {
        return rounded;
    }
    if rounded.is_infinite() {
        let (mantissa, exponent) = match ty {
            ScalarType::FLOAT16 => (10, 15),
            ScalarType::BFLOAT16 => (7, 127),
            _ => (23, 127),
        };
        return ((2.0 - f64::from(-mantissa).exp2()) * f64::from(exponent).exp2()).copysign(x);
    }
    // The unit below a power of two is half of the one above.
    let next = rounded.abs() - unit(ty, rounded.abs().next_down());
    next.copysign(x)
}

/// One unit in the last place of `ty` at `x`.
pub(in crate::judge) fn unit(ty: ScalarType, x: f64) -> f64 {
    let (mantissa, least) = match ty {
        ScalarType::FLOAT16 => (10, -14),
        ScalarType::BFLOAT16 => (7, -126),
        _ => (23, -126),
    };
    let exponent = ((x.to_bits() >> 52) as i32 & 0x7ff) - 1023;
    f64::from(exponent.max(least) - mantissa).exp2()
}

#[cfg(test)]
mod tests;
