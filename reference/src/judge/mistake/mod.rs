//! Known mistakes, and the evidence that an output was computed with one of them.
//!
//! A mistake is the cause only if it predicts every wrong value and keeps every right value right.
//! It must also be specific: given the number of mistakes tried, a match by chance must be
//! improbable. See [`Comparison::outcome`].

mod bounds;
pub(crate) mod choice;

use serde::Serialize;

use super::Diagnosis;
pub(crate) use bounds::{holds, near};

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
    /// Of a comparison with bounds: how much nearer the found numbers, right ones included, are to the
    /// prediction than to the right results, in bits.
    pub(crate) nearer: Option<f64>,
    /// Values that the mistake changes visibly.
    pub(crate) changed: usize,
    /// Changed values that a kernel with the mistake would hardly give, since they lie far from the
    /// prediction in a wide bound; and those near it.
    pub(crate) loose: usize,
    pub(crate) close: usize,
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
    /// Evidence less the cost of the mistake's description, in bits. The highest score wins.
    pub(crate) score: f64,
    /// Whether a better mistake is possible.
    by_bounds: bool,
}

/// Bits by which the evidence must exceed the logarithm of the number of mistakes tried;
/// corresponds to one in twenty.
pub(crate) const MARGIN: f64 = 4.3;
/// The remark on a prediction that values match only approximately.
pub(crate) const NEARLY: &str = "to within a few units in the last place";
/// Number of explained values that is reported even if each of them is hardly outside its bound, as
/// after another order of roundings; for mistakes from a list, which are described by few bits.
const MANY: usize = 32;
/// The largest cost of a mistake from a list.
const LISTED: f64 = 16.0;

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

    /// The evidence by which mistakes are ranked, in bits.
    fn gain(&self) -> f64 {
        self.nearer.unwrap_or(self.evidence)
    }

    /// Whether more than a quarter of the changed values lie far from their prediction. Bounds cover
    /// the worst case; the numbers of a kernel with the mistake would be much closer.
    pub(crate) fn is_loose(&self) -> bool {
        let all = self.loose + self.close;
        all >= 4 && self.loose * 4 > all
    }

    /// The outcome if 2^`cost` mistakes were tried. A mistake is rejected if it leaves more than a
    /// tenth of the wrong values unexplained, contradicts a right value, or may fit by chance.
    pub(crate) fn outcome(&self, cost: f64) -> Option<Outcome> {
        self.outcome_of(cost, 0.0)
    }

    /// The outcome if it takes further `choice` bits to say to which values the mistake was confined.
    pub(crate) fn outcome_of(&self, cost: f64, choice: f64) -> Option<Outcome> {
        let (listed, cost) = (cost <= LISTED, cost + choice);
        let wrong = self.explained + self.unexplained;
        if self.is_loose() {
            return None;
        }
        let fits = self.broken == 0 && self.explained > 0 && self.unexplained * 10 <= wrong;
        let evidence = self.gain().max(self.evidence) + self.localized();
        let specific = evidence >= cost + MARGIN;
        let strength = match self.unexplained {
            0 if specific => Strength::Explains,
            // The bounds are so wide that they also contain right values.
            _ if specific || self.explained >= MANY && listed => Strength::Consistent,
            _ => return self.nearly(cost),
        };
        let (unexplained, by_bounds) = (self.unexplained, self.nearer.is_some());
        let score = self.gain() - cost;
        let outcome = Outcome { strength, unexplained, near: false, score, by_bounds };
        if fits { Some(outcome) } else { self.nearly(cost) }
    }

    /// The outcome if values within a few units in the last place count as predicted: the mistake
    /// combined with an unknown rounding.
    fn nearly(&self, cost: f64) -> Option<Outcome> {
        let (wrong, left) = (self.explained + self.unexplained, self.unexplained - self.near);
        let fits = self.broken == self.near_broken
            && self.explained + self.near >= MANY
            && left * 10 <= wrong
            && self.evidence + self.near_evidence >= cost + 4.0 * MARGIN
            && self.nearer.is_none_or(|gain| gain >= cost + 4.0 * MARGIN);
        let (strength, unexplained) = (Strength::Consistent, left);
        let (score, by_bounds) = (self.gain() - cost, self.nearer.is_some());
        fits.then_some(Outcome { strength, unexplained, near: true, score, by_bounds })
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

    /// Whether this outcome is nearer to the found values than the other, with less to describe.
    pub(crate) fn beats(self, other: Option<Self>) -> bool {
        other.is_none_or(|other| match (self.near, other.near) {
            (false, true) => true,
            (true, false) => false,
            _ => self.score > other.score,
        })
    }

    /// Whether no other outcome can explain more: every bit is predicted.
    pub(crate) fn is_final(self) -> bool {
        self.strength == Strength::Explains && !self.by_bounds
    }
}

/// The mistake with the highest score; the first of equal ones. `compare` returns `None` for a
/// mistake that does not apply or changes nothing.
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
        let short = |o: Outcome| (o.strength, o.unexplained, o.near);
        assert_eq!(all.outcome(5.0).map(short), Some((Strength::Explains, 0, false)));
        // A right value that the mistake would change.
        assert_eq!(compared(&[(1, 2, 2), (5, 6, 6), (7, 8, 7)], 16).outcome(5.0), None);
        // Nine of ten wrong values are enough, eight are not.
        let mut values = vec![(1, 2, 2); 9];
        values.push((1, 2, 3));
        let some = Some((Strength::Consistent, 1, false));
        assert_eq!(compared(&values, 16).outcome(5.0).map(short), some);
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
