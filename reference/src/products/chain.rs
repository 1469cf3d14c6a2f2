//! The epilogue of a sum: scales, bias, router weight, and their roundings.
//!
//! A [`Chain`] is a list of steps. It has three interpretations: the exact result without roundings
//! ([`Chain::exact`]), the result of a device ([`Chain::run`]), and the interval of results for an
//! interval of sums ([`Chain::interval`]). Every step is monotone in the sum, so the ends of the
//! interval follow from the previous ends.

use super::Wide;
use super::columns::round_half;
use crate::num::scalar::ScalarType;

/// The operation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// value · operand.
    Multiply,
    /// value + operand.
    Add,
    /// value · operand + addend: [`Chain::run`] rounds once, and [`Chain::interval`] also admits a
    /// device that rounds the product before.
    MultiplyAdd,
    /// A rounding only.
    Round,
    /// No operation, but the device may have multiplied by the previous scales in any order, and
    /// [`Chain::interval`] admits every order. The operand is the largest error by underflow.
    AnyOrder,
}

/// One step: the value, the operand, and the type that the result is rounded to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Product, sum, or only a rounding.
    pub action: Action,
    /// The operand, as the exact number.
    pub operand: f64,
    /// The operand on the device, which may be rounded to a narrower type first.
    pub rounded_operand: f64,
    /// The addend of [`Action::MultiplyAdd`], a value of the type `to`; otherwise 0.
    pub addend: f64,
    /// Type of the result: float32, float16 or bfloat16.
    pub to: ScalarType,
}

impl Step {
    /// value · x, rounded to `to`.
    pub const fn multiply(x: f64, to: ScalarType) -> Self {
        Self { action: Action::Multiply, operand: x, rounded_operand: x, addend: 0.0, to }
    }

    /// value · x + addend, rounded once to `to`.
    pub const fn multiply_add(x: f64, addend: f64, to: ScalarType) -> Self {
        Self { action: Action::MultiplyAdd, operand: x, rounded_operand: x, addend, to }
    }

    /// value + x, rounded to `to`.
    pub const fn add(x: f64, to: ScalarType) -> Self {
        Self { action: Action::Add, operand: x, rounded_operand: x, addend: 0.0, to }
    }

    /// A rounding to `to`.
    pub const fn round(to: ScalarType) -> Self {
        Self { action: Action::Round, operand: 0.0, rounded_operand: 0.0, addend: 0.0, to }
    }

    /// Up to three f32 products before this step may have any order. Each rounds by at most 2^-24
    /// of its result on the device and in this chain: 6·2^-24 is less than 2^-21. Below the normal
    /// range a rounding errs by up to 2^-150, which later factors enlarge; `operands` are the
    /// scales.
    pub fn any_order(operands: impl IntoIterator<Item = f64>) -> Self {
        let enlarged = operands.into_iter().fold(1.0, |all, x| all * x.abs().max(1.0));
        let operand = f64::from_bits((1023 - 147) << 52) * enlarged;
        let (rounded_operand, addend, to) = (operand, 0.0, ScalarType::FLOAT32);
        Self { action: Action::AnyOrder, operand, rounded_operand, addend, to }
    }

    /// This step with an operand that the device rounded to `ty`.
    pub fn with_operand_in(self, ty: ScalarType) -> Self {
        Self { rounded_operand: round_half(ty, self.operand), ..self }
    }

    /// The result of the step before its rounding, in f64.
    fn value(&self, value: f64) -> f64 {
        match self.action {
            Action::Multiply => value * self.rounded_operand,
            Action::Add => value + self.rounded_operand,
            Action::MultiplyAdd => value * self.rounded_operand + self.addend,
            Action::Round | Action::AnyOrder => value,
        }
    }

    /// The step split into two rounded steps, if a device may do so.
    fn apart(&self) -> Option<[Self; 2]> {
        (self.action == Action::MultiplyAdd)
            .then(|| [Self { action: Action::Multiply, ..*self }, Self::add(self.addend, self.to)])
    }

    /// Applies the step to a device's value.
    fn apply(&self, value: f64) -> f64 {
        let x = self.rounded_operand;
        // Values and operands have at most 24 significant bits, so the product is exact in f64. The
        // sum may round in f64; `round_sum` corrects that.
        match self.action {
            Action::Multiply => round_half(self.to, value * x),
            Action::Add => round_sum(self.to, value, x),
            Action::MultiplyAdd => round_sum(self.to, value * x, self.addend),
            Action::Round => round_half(self.to, value),
            Action::AnyOrder => value,
        }
    }
}

/// x + y rounded once to `ty`.
pub(super) fn round_sum(ty: ScalarType, x: f64, y: f64) -> f64 {
    let (sum, error) = two_sum(x, y);
    if sum.is_finite() { round_half(ty, to_odd(sum, error)) } else { round_half(ty, sum) }
}

/// sum + error rounded to odd, where `error` is less than one unit in the last place of the sum. A
/// later rounding to fewer bits then gives the result of a single rounding.
pub(super) fn to_odd(sum: f64, error: f64) -> f64 {
    match (error == 0.0, sum.to_bits() & 1 == 0, (error > 0.0) == (sum > 0.0)) {
        (true, ..) | (_, false, _) => sum,
        (_, true, true) => f64::from_bits(sum.to_bits() + 1),
        (_, true, false) => f64::from_bits(sum.to_bits() - 1),
    }
}

/// The least magnitude that [`Chain::exact_pair`] supports.
const LEAST_EXACT: f64 = 1e-100;

/// x + y as an f64 and its rounding error.
fn two_sum(x: f64, y: f64) -> (f64, f64) {
    let sum = x + y;
    let part = sum - x;
    (sum, (x - (sum - part)) + (y - part))
}

/// The steps after a sum, for one element.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chain {
    /// In order. The last one rounds to the output's type.
    pub steps: Vec<Step>,
}

impl Chain {
    /// The exact result for the exact `sum`.
    pub fn exact(&self, sum: &Wide) -> Wide {
        let mut value = sum.clone();
        for step in &self.steps {
            match step.action {
                Action::Multiply if step.operand == 1.0 => {}
                Action::Multiply | Action::MultiplyAdd => {
                    let mut product = Wide::new();
                    value.add_scaled_to(step.operand, &mut product);
                    value = product;
                    value.add(step.addend);
                }
                Action::Add => value.add(step.operand),
                Action::Round | Action::AnyOrder => {}
            }
        }
        value
    }

    /// The exact result for a sum given as a pair, as an f64 and a remainder; `None` if two f64
    /// cannot represent it.
    pub(super) fn exact_pair(&self, [high, low]: [f64; 2]) -> Option<[f64; 2]> {
        let (mut value, mut rest) = two_sum(high, low);
        for step in &self.steps {
            let (factor, addend) = match step.action {
                Action::Multiply | Action::MultiplyAdd => (step.operand, step.addend),
                Action::Add => (1.0, step.operand),
                Action::Round | Action::AnyOrder => continue,
            };
            if factor != 1.0 {
                if rest != 0.0 {
                    return None;
                }
                let product = value * factor;
                (value, rest) = (product, value.mul_add(factor, -product));
            }
            if addend != 0.0 {
                if rest != 0.0 {
                    return None;
                }
                (value, rest) = two_sum(value, addend);
            }
        }
        if value == 0.0 {
            return Some([0.0; 2]);
        }
        // Far from underflow in f64, so the remainder is exact.
        let normal = (LEAST_EXACT..f64::from(f32::MAX)).contains(&value.abs());
        normal.then_some([value, rest])
    }

    /// What a device computes from the f32 `sum`.
    pub fn run(&self, sum: f64) -> f64 {
        self.steps.iter().fold(sum, |value, step| step.apply(value))
    }

    /// The interval of results for sums in `lo..=hi` (f32 values).
    pub fn interval(&self, lo: f64, hi: f64) -> Interval {
        let start = Interval { lo, hi, before: (lo, hi) };
        self.steps.iter().fold(start, |ends, step| {
            if step.action == Action::AnyOrder {
                return ends.widened(step.operand);
            }
            let once = ends.through(step);
            match step.apart() {
                None => once,
                Some([first, second]) => once.or(ends.through(&first).through(&second)),
            }
        })
    }
}

/// The interval of results that a device may compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Smallest result.
    pub lo: f64,
    /// Largest result.
    pub hi: f64,
    /// Both before the last rounding.
    pub before: (f64, f64),
}

impl Interval {
    fn through(self, step: &Step) -> Self {
        let (a, b) = (step.apply(self.lo), step.apply(self.hi));
        let before = (step.value(self.lo), step.value(self.hi));
        // A negative factor exchanges the ends.
        if a <= b {
            Self { lo: a, hi: b, before }
        } else {
            Self { lo: b, hi: a, before: (before.1, before.0) }
        }
    }

    /// Wider by 2^-21 of either end and by `least`.
    fn widened(self, least: f64) -> Self {
        let more = |x: f64| x.abs() / f64::from(1 << 21) + least;
        Self { lo: self.lo - more(self.lo), hi: self.hi + more(self.hi), ..self }
    }

    /// The union of both intervals.
    fn or(self, other: Self) -> Self {
        let before = (self.before.0.min(other.before.0), self.before.1.max(other.before.1));
        Self { lo: self.lo.min(other.lo), hi: self.hi.max(other.hi), before }
    }
}
