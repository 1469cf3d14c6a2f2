//! Outputs that have the bits of one schedule in most values and are far off in a few: wrong in
//! these few, whatever the class of the kernel.
//!
//! Let d be the distance of a value from that schedule's, over the radius B of the class's bound,
//! which makes the values of an output comparable. If most values have every bit, d is below u / B
//! there, u being a unit in the last place; the median of u / B over these values is a typical limit
//! on d. A right kernel that adds in another order is more than 32 times as far off nowhere. Kernels
//! that compute a few tiles in another order, such as split tails, are at most as far off as known
//! schedules are from each other; four times that distance is admitted.

use super::known::Known;
use super::readings::Chosen;
use super::stage::Stage;
use super::verdict::measure;
use crate::judge::pattern::Values;
use crate::judge::power::{Power, unit};
use crate::judge::{OutputReport, Verdict};
use crate::num::scalar::ScalarType;
use crate::products::Bounded;

/// The least share of values that have every bit.
const MOST: f64 = 0.5;
/// The least number of such values.
const LEAST: usize = 32;
/// How many times the typical limit, and how many times the distance of known schedules, a right
/// value may be off.
const TYPICAL: f64 = 32.0;
const KNOWN: f64 = 4.0;
/// Units in the last place that a right value may always be off.
const UNITS: f64 = 4.0;

/// A schedule that most values follow, and what the others may be.
pub(super) struct MostBits {
    /// The schedule.
    text: String,
    /// Values that have its bits.
    equal: usize,
    bounded: Vec<Bounded>,
}

impl Stage<'_> {
    /// The schedule that gives most values bit for bit, if some of the others are too far from it to
    /// be right. Only values that the chosen bound accepts are in question.
    pub(super) fn most_bits(
        &self,
        known: Option<&Known<'_>>,
        chosen: &Chosen,
        found: &[f64],
        bits: &[u32],
    ) -> Option<MostBits> {
        if chosen.fits.is_empty() {
            return None;
        }
        let exact: Vec<u32> = chosen.bounded.iter().map(|b| b.rounded).collect();
        let exact = ("the exact result rounded once".to_owned(), exact);
        let nearest = known.iter().flat_map(|known| known.nearest());
        let nearest = nearest.map(|(text, made)| (text.to_owned(), made));
        let share = |made: &[u32]| equal(self.dtype, bits, made);
        let all =
            std::iter::once(exact).chain(nearest).map(|(text, made)| (share(&made), text, made));
        let ((count, of), text, made) = all.max_by_key(|((count, _), ..)| *count)?;
        if count < LEAST || (count as f64) < MOST * of as f64 {
            return None;
        }
        let limits = self.limits(known, chosen, bits, &made)?;
        let bounded: Vec<Bounded> = (limits.iter().zip(&made).zip(&chosen.bounded))
            .map(|((&limit, &made), bound)| around(self.dtype, made, limit, bound))
            .collect();
        let is_far = bounded.iter().zip(found).any(|(b, &x)| b.ratio(x) > 1.0);
        is_far.then_some(MostBits { text, equal: count, bounded })
    }

    /// How far each value may be from that of the schedule, which gives `made`.
    fn limits(
        &self,
        known: Option<&Known<'_>>,
        chosen: &Chosen,
        bits: &[u32],
        made: &[u32],
    ) -> Option<Vec<f64>> {
        let radius = |i: usize| {
            let Bounded { lo, hi, .. } = chosen.bounded[i];
            Some((hi - lo) / 2.0).filter(|r| r.is_finite() && *r > 0.0)
        };
        let value = |b: u32| self.dtype.to_f64(b);
        let ulp = |i: usize| unit(self.dtype, value(made[i]));
        let same = (0..made.len()).filter(|&i| made[i] == bits[i] && value(made[i]) != 0.0);
        let mut typical: Vec<f64> = same.filter_map(|i| Some(ulp(i) / radius(i)?)).collect();
        typical.sort_by(f64::total_cmp);
        let typical = *typical.get(typical.len() / 2)?;
        let spread = known.iter().flat_map(|known| &known.spread);
        let spread = spread.filter_map(|&(i, spread)| Some(spread / radius(i)?));
        let spread = spread.filter(|s| s.is_finite()).fold(0.0, f64::max);
        let share = (TYPICAL * typical).max(KNOWN * spread);
        let limit = |i| radius(i).map_or(f64::INFINITY, |r| (r * share).max(UNITS * ulp(i)));
        Some((0..made.len()).map(limit).collect())
    }

    /// The verdict on an output that is wrong where it is far from the schedule that it follows
    /// elsewhere.
    pub(super) fn judge_by_most_bits(
        &self,
        most: &MostBits,
        found: &[f64],
        bits: &[u32],
    ) -> OutputReport {
        let MostBits { text, equal, bounded } = most;
        let (mut report, wrong) = measure((self.name, self.dtype), "", bounded, found, bits);
        report.verdict = Verdict::Fail;
        report.note = Some(format!(
            "{equal} of {} values have every bit of {text}, and the order of additions cannot move \
             the others as far from it as {} found",
            bits.len(),
            if wrong.len() == 1 { "one is".to_owned() } else { format!("{} are", wrong.len()) }
        ));
        report.power =
            Some(Power::of(&super::readings::accepted(bounded), self.size_n(), self.dtype));
        let expected: Vec<u32> = bounded.iter().map(|b| b.rounded).collect();
        let (ty, cols) = (self.dtype, self.size_n());
        let values = Values { ty, cols, found: bits, expected: &expected, wrong: &wrong };
        report.diagnosis = values.explain();
        report.first_mismatch = wrong.first().map(|&first| self.mismatch(first, bounded, bits));
        report
    }
}

/// The number of values with equal bits, and of those compared: numbers other than zero.
fn equal(ty: ScalarType, bits: &[u32], made: &[u32]) -> (usize, usize) {
    let says = |b: u32| ty.to_f64(b) != 0.0 && ty.to_f64(b).is_finite();
    let pairs = bits.iter().zip(made).filter(|(_, made)| says(**made));
    pairs.fold((0, 0), |(same, all), (a, b)| (same + usize::from(a == b), all + 1))
}

/// What is accepted within `limit` of the value `made`; a value that is no number, or has no limit,
/// keeps its bound.
fn around(ty: ScalarType, made: u32, limit: f64, bound: &Bounded) -> Bounded {
    let value = ty.to_f64(made);
    if !value.is_finite() || !limit.is_finite() {
        return *bound;
    }
    let (lo, hi) = (value - limit, value + limit);
    Bounded { exact: value, rounded: made, centre: value, lo, hi, below: limit, above: limit }
}
