//! Known mistakes, and the evidence that an output was computed with one of them.
//!
//! A mistake is the cause only if it predicts every wrong value and keeps every right value right.
//! It must also be specific: given the number of mistakes tried, a match by chance must be
//! improbable. See [`Comparison::outcome`].

use serde::Serialize;

use super::Diagnosis;
use crate::num::scalar::ScalarType;
use crate::products::Bounded;

/// The certainty of a diagnosis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Strength {
    /// The cause predicts every wrong value and keeps every right value right.
    Explains,
    /// The cause fits, but some wrong values remain, or not all values were compared.
    Consistent,
    /// No cause was found; the diagnosis states the location of the wrong values.
    Place,
}

/// A wrong computation that is known to occur.
pub(crate) struct KnownMistake<'m, A, T> {
    /// Short name, stable across versions.
    pub(crate) id: &'static str,
    /// What happened, as a clause without a full stop.
    pub(crate) text: String,
    /// Computes the result for an argument with the mistake; `None` if the mistake does not apply.
    pub(crate) make: Box<dyn Fn(A) -> Option<T> + 'm>,
}

impl<'m, A, T> KnownMistake<'m, A, T> {
    pub(crate) fn new(
        id: &'static str,
        text: impl Into<String>,
        make: impl Fn(A) -> Option<T> + 'm,
    ) -> Self {
        Self { id, text: text.into(), make: Box::new(make) }
    }
}

impl<'m, T> KnownMistake<'m, (), T> {
    /// A mistake of one computation, without an argument.
    pub(crate) fn of(
        id: &'static str,
        text: impl Into<String>,
        make: impl Fn() -> Option<T> + 'm,
    ) -> Self {
        Self::new(id, text, move |()| make())
    }
}

/// A value-by-value comparison of a predicted output with the found one.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Comparison {
    /// Wrong values that the mistake predicts.
    pub(crate) explained: usize,
    /// Wrong values that it does not predict.
    pub(crate) unexplained: usize,
    /// Right values that the mistake would have changed visibly.
    pub(crate) broken: usize,
    /// Unexplained values within a few units in the last place of the prediction.
    pub(crate) near: usize,
    /// Broken values within a few units in the last place of the prediction.
    pub(crate) near_broken: usize,
    /// Evidence from near values, in bits.
    pub(crate) near_evidence: f64,
    /// Evidence against a match by chance, in bits.
    pub(crate) evidence: f64,
    /// Values that the mistake changes visibly.
    pub(crate) changed: usize,
    /// Number of all values if the mistake itself predicts which values are wrong, so that their
    /// location is evidence. 0 if the wrong values were used to choose the mistake's location.
    pub(crate) total: usize,
}

/// The conclusion of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) strength: Strength,
    pub(crate) unexplained: usize,
    /// Whether values differ from the prediction by a few units in the last place.
    pub(crate) near: bool,
}

/// Bits by which the evidence must exceed the logarithm of the number of mistakes tried;
/// corresponds to one in twenty.
const MARGIN: f64 = 4.3;
/// The remark on a prediction that values match only approximately.
pub(crate) const NEARLY: &str = "to within a few units in the last place";
/// A value is near a prediction within this many units in the last place.
const NEAR: f64 = 4.0;
/// Number of explained values that is reported even if the mistake is not specific.
const MANY: usize = 32;

impl Comparison {
    /// Counts one value of `width` bits that is compared bit for bit.
    pub(crate) fn exact(&mut self, expected: u32, made: u32, found: u32, width: u32) {
        self.changed += usize::from(made != expected);
        if found == expected {
            self.broken += usize::from(made != expected);
        } else if made == found {
            self.explained += 1;
            // The values of a tensor are not uniform; a few are frequent.
            self.evidence += f64::from(width) * 0.75;
        } else {
            self.unexplained += 1;
        }
    }

    /// Counts one wrong id among `count` that the mistake predicts, or not.
    pub(crate) fn id(&mut self, predicted: bool, count: usize) {
        if predicted {
            self.explained += 1;
            self.evidence += (count.max(1) as f64).log2();
        } else {
            self.unexplained += 1;
        }
    }

    /// Counts a wrong float whose prediction is `residual` away from the right result, with bounds
    /// of `radius` around it.
    pub(crate) fn explained_float(&mut self, residual: f64, radius: f64) {
        self.explained += 1;
        let bits = (residual.abs() / radius).log2();
        self.evidence += if bits.is_nan() { 0.0 } else { bits.clamp(0.0, 10.0) };
    }

    /// Compares a predicted product with the found one. `predicted` are the elements that the
    /// mistake changes, without duplicates; `wrong` are the indices out of bound, ascending.
    ///
    /// A right element may lie within both bounds. Then distances decide: with the mistake, found
    /// numbers would lie near its exact results and not near the right ones.
    pub(crate) fn of_bounds(
        right: &[Bounded],
        predicted: impl IntoIterator<Item = (usize, Bounded)>,
        found: &[f64],
        wrong: &[usize],
        ty: ScalarType,
    ) -> Self {
        let mut all = Self::default();
        let mut ratio = Likelihood::default();
        for (i, made) in predicted {
            let (x, own) = (found[i], &right[i]);
            let holds = holds(&made, x);
            let size = made.exact.abs().max(x.abs());
            let near = x.is_finite() && near(&made, x, size, ty);
            all.changed += usize::from(!(own.lo..=own.hi).contains(&made.exact));
            if wrong.binary_search(&i).is_err() {
                // An element without a bound carries no evidence.
                let broken = !holds && !made.is_unbounded() && !own.is_unbounded();
                all.broken += usize::from(broken);
                all.near_broken += usize::from(broken && near);
                ratio.add(own, &made, x, ty);
            } else if holds {
                let radius = made.below.max(made.above);
                all.explained_float(x - own.exact, radius);
            } else if near {
                all.near += 1;
                let radius = reach(size, ty) + made.below.max(made.above);
                let bits = ((x - own.exact).abs() / radius).log2();
                all.near_evidence += if bits.is_nan() { 0.0 } else { bits.clamp(0.0, 10.0) };
            }
        }
        all.unexplained = wrong.len() - all.explained;
        all.broken += usize::from(ratio.contradicts());
        all
    }

    /// The outcome if 2^`cost` mistakes were tried. A mistake is rejected if it leaves more than a
    /// tenth of the wrong values unexplained, contradicts a right value, or may fit by chance.
    pub(crate) fn outcome(&self, cost: f64) -> Option<Outcome> {
        let wrong = self.explained + self.unexplained;
        let fits = self.broken == 0 && self.explained > 0 && self.unexplained * 10 <= wrong;
        let specific = self.evidence + self.localized() >= cost + MARGIN;
        let strength = match self.unexplained {
            0 if specific => Strength::Explains,
            // The bounds are so wide that they also contain right values.
            _ if specific || self.explained >= MANY => Strength::Consistent,
            _ => return self.nearly(cost),
        };
        let outcome = Outcome { strength, unexplained: self.unexplained, near: false };
        if fits { Some(outcome) } else { self.nearly(cost) }
    }

    /// The outcome if values within a few units in the last place count as predicted: the mistake
    /// combined with an unknown rounding.
    fn nearly(&self, cost: f64) -> Option<Outcome> {
        let (wrong, left) = (self.explained + self.unexplained, self.unexplained - self.near);
        let fits = self.broken == self.near_broken
            && self.explained + self.near >= MANY
            && left * 10 <= wrong
            && self.evidence + self.near_evidence >= cost + 4.0 * MARGIN;
        let (strength, unexplained) = (Strength::Consistent, left);
        fits.then_some(Outcome { strength, unexplained, near: true })
    }

    /// Evidence, in bits, from the wrong values being exactly those that the mistake changes.
    fn localized(&self) -> f64 {
        let says_where = (self.explained / 2..=2 * self.explained).contains(&self.changed);
        if self.explained == 0 || self.changed == 0 || !says_where || self.total == 0 {
            return 0.0;
        }
        let count = self.explained as f64;
        (count * (self.total as f64 / count).log2()).clamp(0.0, 64.0)
    }
}

/// Whether a kernel of the class that `bounded` describes may produce `found`.
pub(crate) fn holds(bounded: &Bounded, found: f64) -> bool {
    !bounded.is_unbounded() && bounded.ratio(found) <= 1.0
}

/// Half a unit in the last place, relative to the value.
fn roundoff(ty: ScalarType) -> f64 {
    if ty == ScalarType::FLOAT16 { 2f64.powi(-11) } else { 2f64.powi(-8) }
}

/// [`NEAR`] units in the last place at the magnitude `size`.
fn reach(size: f64, ty: ScalarType) -> f64 {
    NEAR * 2.0 * roundoff(ty) * size
}

/// Whether `found` is within its bound plus a few units in the last place.
pub(crate) fn near(made: &Bounded, found: f64, size: f64, ty: ScalarType) -> bool {
    (found - made.exact).abs() <= reach(size, ty) + made.below.max(made.above)
}

/// Distances of right elements from two predictions, beyond rounding errors.
#[derive(Debug, Clone, Copy, Default)]
struct Likelihood {
    /// Squared distances from the right results.
    right: f64,
    /// Squared distances from the results of the mistake.
    made: f64,
}

impl Likelihood {
    /// Counts distances above one unit in the last place plus an eighth of the bound. Bounds cover
    /// the worst case; actual sums are much closer.
    fn add(&mut self, right: &Bounded, made: &Bounded, found: f64, ty: ScalarType) {
        let width = right.below.max(right.above);
        let unit = (2.0 * roundoff(ty) * right.exact.abs()).max(width / 8.0);
        let excess = |exact: f64| ((found - exact).abs() / unit - 1.0).max(0.0).powi(2);
        let (own, other) = (excess(right.exact), excess(made.exact));
        if own.is_finite() && other.is_finite() {
            self.right += own;
            self.made += other;
        }
    }

    /// Whether the right elements contradict the mistake.
    fn contradicts(&self) -> bool {
        self.made > 4.0 * self.right + 4.0
    }
}

impl Outcome {
    /// The diagnosis that names the mistake.
    pub(crate) fn named(self, id: &str, text: &str) -> Diagnosis {
        match self.strength {
            Strength::Explains => Diagnosis::explains(id, text),
            _ if self.near => {
                let text = format!("{text}, {NEARLY}");
                Diagnosis::consistent(id, text, self.unexplained)
            }
            _ => Diagnosis::consistent(id, text, self.unexplained),
        }
    }

    /// Whether this outcome explains more than the other.
    pub(crate) fn beats(self, other: Option<Self>) -> bool {
        other.is_none_or(|other| (self.near, self.unexplained) < (other.near, other.unexplained))
    }

    /// Whether no other outcome can explain more.
    pub(crate) fn is_final(self) -> bool {
        self.strength == Strength::Explains
    }
}

/// The first mistake that is the cause, otherwise the one that leaves the fewest values
/// unexplained. `compare` returns `None` for a mistake that does not apply or changes nothing.
pub(crate) fn search<'k, 'm: 'k, A: 'm, T: 'm>(
    mistakes: impl ExactSizeIterator<Item = &'k KnownMistake<'m, A, T>>,
    compare: impl Fn(&KnownMistake<'m, A, T>) -> Option<Comparison>,
) -> Option<Diagnosis> {
    let cost = (mistakes.len().max(1) as f64).log2();
    let mut best: Option<(Outcome, &KnownMistake<'m, A, T>)> = None;
    for mistake in mistakes {
        let Some(outcome) = compare(mistake).and_then(|c| c.outcome(cost)) else { continue };
        if outcome.beats(best.map(|b| b.0)) {
            best = Some((outcome, mistake));
        }
        if outcome.is_final() {
            break;
        }
    }
    best.map(|(outcome, mistake)| outcome.named(mistake.id, &mistake.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The location of the values is also evidence.
    #[test]
    fn a_cause_that_says_where_is_specific() {
        let mut one = compared(&[(1, 2, 2)], 4);
        assert_eq!(one.outcome(4.3), None);
        one.total = 30_000;
        assert!(one.outcome(4.3).is_some());
        one.changed = 100;
        assert_eq!(one.outcome(4.3), None);
    }

    fn compared(values: &[(u32, u32, u32)], width: u32) -> Comparison {
        let mut all = Comparison::default();
        values.iter().for_each(|&(e, m, f)| all.exact(e, m, f, width));
        all
    }

    #[test]
    fn a_cause_predicts_all_that_is_wrong_and_nothing_else() {
        let all = compared(&[(1, 2, 2), (5, 6, 6), (7, 7, 7)], 16);
        let explains = Outcome { strength: Strength::Explains, unexplained: 0, near: false };
        assert_eq!(all.outcome(5.0), Some(explains));
        // A right value that the mistake would change.
        assert_eq!(compared(&[(1, 2, 2), (5, 6, 6), (7, 8, 7)], 16).outcome(5.0), None);
        // Nine of ten wrong values are enough, eight are not.
        let mut values = vec![(1, 2, 2); 9];
        values.push((1, 2, 3));
        let some = Outcome { strength: Strength::Consistent, unexplained: 1, near: false };
        assert_eq!(compared(&values, 16).outcome(5.0), Some(some));
        values[0].2 = 4;
        assert_eq!(compared(&values, 16).outcome(5.0), None);
    }

    #[test]
    fn a_cause_that_fits_by_chance_is_none() {
        // One nibble is no evidence among twenty mistakes; one 16-bit value is.
        assert_eq!(compared(&[(1, 2, 2)], 4).outcome(4.3), None);
        assert!(compared(&[(1, 2, 2)], 16).outcome(4.3).is_some());
        let mut float = Comparison::default();
        float.explained_float(1.2, 1.0);
        assert_eq!(float.outcome(0.0), None);
        float.explained_float(f64::INFINITY, 1.0);
        assert!(float.outcome(5.0).is_some());
    }
}
