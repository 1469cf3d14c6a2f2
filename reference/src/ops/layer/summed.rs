//! Judges `y` by its bound, which follows from the case's `down`.

use super::carried::{self, Origin};
use super::{Best, Locate, REMEDY, Stage, Stages, expert, nearer, shared_output, with_expert};
use crate::Result;
use crate::judge::{Diagnosis, OutputReport};
use crate::moe::layer::bounds::of_tokens;
use crate::moe::sum::{bound_with, bounds_with, sum_bits_with};
use crate::moe::{Chain, narrow, widen};
use crate::num::array::{into_vec, rows_of};
use crate::num::interval::{Bound, Interval};
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::routing::stated_or_routed;

const CLASS: &str = "bound: f32 in any order and one rounding; for top_k 2, 3, 4 also the 16-bit \
                     type from the first slot to the last";

/// [`CLASS`] with a shared expert.
const SHARED_CLASS: &str = "bound: f32 in any order and one rounding, or `shared_output` added to the rounded sum; \
                            for top_k 2, 3, 4 also the 16-bit type from the first slot to the last";

/// Known mistakes with a shared expert: id and text.
pub(crate) const SHARED_MISSING: (&str, &str) =
    ("shared-output-missing", "`shared_output` was not added: `y` is the sum over the slots alone");
const SHARED_TWICE: (&str, &str) = (
    "shared-output-twice",
    "`shared_output` was added twice, as by each of two ranks before a reduction",
);

pub(crate) fn judge(
    case: &Case<'_>,
    c: &Stages,
    down: &[u16],
    values: &[u16],
) -> Result<OutputReport> {
    let locate: Locate = |stage, wrong, place| stage.pattern_or_place(wrong, place);
    let (report, _) = bounded(case, c, down, values, locate)?;
    Ok(report)
}

/// The verdict, and which values are outside their bounds.
pub(crate) fn bounded(
    case: &Case<'_>,
    c: &Stages,
    down: &[u16],
    values: &[u16],
    locate: Locate,
) -> Result<(OutputReport, Vec<usize>)> {
    let (ty, h, shape) = (c.dtype, c.hidden_size, [c.size_m, c.hidden_size]);
    let shared = shared_output(case, shape)?;
    let shared = shared.as_deref();
    let add = |chain| sum_bits_with((down, shared), ty, c.top_k, h, chain);
    let (expected, chain) = nearer(values, add(Chain::Canonical)?, Some(add(Chain::Upstream)?));
    let class = if shared.is_some() { SHARED_CLASS } else { CLASS }.into();
    let stage =
        Stage { name: "y", class, remedy: REMEDY, ty, found: values, shape, expected, chain };
    let terms = Terms {
        layer: c,
        down,
        shared,
        top_k: c.top_k,
        size_m: c.size_m,
        size_n: h,
        stage: &stage,
    };
    let (mut report, wrong) = stage.judge(|i| terms.bound(i, |j| Some((j, 1.0))));
    if let Some(&first) = wrong.first() {
        report.first_mismatch = Some(stage.mismatch(first, None));
        report.diagnosis = Some(
            stage
                .plain(&wrong)
                .or_else(|| diagnose(&terms, case, &wrong))
                .unwrap_or_else(|| locate(&stage, &wrong, &format!("token {}", first / h))),
        );
    }
    Ok((report, wrong))
}

/// Judges `y` of a case without `down`, by the bounds of `down`.
pub(crate) fn carried(
    case: &Case<'_>,
    c: &Stages,
    down: &[Bound],
    found: &[u16],
    origin: Origin<'_>,
) -> Result<OutputReport> {
    let (ty, h) = (c.dtype, c.hidden_size);
    let shared = shared_output(case, [c.size_m, h])?;
    let sums = |shared: Option<&[u16]>| {
        let down = of_tokens(rows_of("down", down, h)?, c.top_k)?;
        bounds_with(down, shared, ty).map(into_vec)
    };
    let bounds = sums(shared.as_deref())?;
    let known = |stage: &Stage<'_>, wrong: &[usize]| {
        let without = shared.as_ref().and_then(|_| sums(None).ok())?;
        let mut best = Best::new();
        best.offer(SHARED_MISSING.0, SHARED_MISSING.1, stage.compared(wrong, |i| without[i]));
        best.diagnosis
    };
    Ok(carried::judge_with(case, c, ("y", h), found, (&bounds, origin), &known))
}

/// The sum's terms.
struct Terms<'c> {
    layer: &'c Stages,
    down: &'c [u16],
    shared: Option<&'c [u16]>,
    top_k: usize,
    size_m: usize,
    size_n: usize,
    stage: &'c Stage<'c>,
}

impl Terms<'_> {
    /// The term of slot `j` of output `i`.
    fn term(&self, i: usize, j: usize) -> u16 {
        self.down[(i / self.size_n * self.top_k + j) * self.size_n + i % self.size_n]
    }

    fn terms(&self, i: usize) -> impl DoubleEndedIterator<Item = f32> {
        (0..self.top_k).map(move |j| widen(self.stage.ty, self.term(i, j)))
    }

    /// A bound whose terms were rounded to the type before they were added.
    fn rounded(&self, bound: Bound) -> Bound {
        let unit = bound.exact.abs().max(bound.interval.magnitude())
            * if self.stage.ty == ScalarType::FLOAT16 { 2f64.powi(-10) } else { 2f64.powi(-7) };
        let interval = Interval { lo: bound.interval.lo - unit, hi: bound.interval.hi + unit };
        Bound { interval, ..bound }
    }

    /// The bound of output `i` when slot j adds the term of slot `change(j).0`, times a factor.
    fn bound(&self, i: usize, change: impl Fn(usize) -> Option<(usize, f64)>) -> Bound {
        let term =
            |(j, factor)| Bound::exactly(f64::from(widen(self.stage.ty, self.term(i, j))) * factor);
        let slots: Vec<Bound> = (0..self.top_k).filter_map(change).map(term).collect();
        bound_with(&slots, self.shared(i, 1.0), self.stage.ty)
    }

    /// The term of the shared expert in output `i`, times a factor.
    fn shared(&self, i: usize, factor: f64) -> Option<Bound> {
        let own = widen(self.stage.ty, *self.shared?.get(i)?);
        Some(Bound::exactly(f64::from(own) * factor))
    }

    /// A rounded sum of the slots of output `i`, and the term of the shared expert added to it.
    fn and_shared(&self, i: usize, sum: u16) -> u16 {
        let ty = self.stage.ty;
        match self.shared {
            Some(all) => narrow(ty, widen(ty, sum) + widen(ty, all[i])),
            None => sum,
        }
    }

    /// The bound of output `i` with the shared expert's term times `factor`; 0: without it.
    fn with_shared_times(&self, i: usize, factor: f64) -> Bound {
        let slots: Vec<Bound> = self.terms(i).map(|x| Bound::exactly(x.into())).collect();
        let shared = self.shared(i, factor).filter(|_| factor != 0.0);
        bound_with(&slots, shared, self.stage.ty)
    }
}

fn diagnose(t: &Terms<'_>, case: &Case<'_>, wrong: &[usize]) -> Option<Diagnosis> {
    let mut best = Best::new();
    let ty = t.stage.ty;
    let half = |x: f32| widen(ty, narrow(ty, x));
    if t.top_k > 2 {
        let forward = |i| t.and_shared(i, narrow(ty, t.terms(i).fold(0.0, |a, x| half(a + x))));
        let text =
            "every addition was rounded to the 16-bit type; for this top_k the sum is in f32";
        best.offer("sum-in-activation-type", text, t.stage.compared_bits(wrong, 0.0, forward));
        let backward =
            |i| t.and_shared(i, narrow(ty, t.terms(i).rev().fold(0.0, |a, x| half(a + x))));
        let text = "every addition was rounded to the 16-bit type, from the last slot to the first";
        best.offer("sum-in-another-order", text, t.stage.compared_bits(wrong, 0.0, backward));
    }
    if t.top_k > 1 {
        let factor = 1.0 / t.top_k as f64;
        // A mean is rounded once more than the sum, so a neighbouring value of the type is also
        // possible.
        let mean = |i| {
            let sum: f64 = t.terms(i).map(f64::from).sum();
            t.and_shared(i, narrow(ty, (sum * factor) as f32))
        };
        let text = "the sum over the slots was divided by top_k";
        best.offer("mean-of-slots", text, t.stage.compared_bits(wrong, 1.0, mean));
        let transposed = |i: usize| {
            let (token, n) = (i / t.size_n, i % t.size_n);
            let row = |j: usize| (j * t.size_m + token) * t.size_n + n;
            let slots: Vec<Bound> = (0..t.top_k)
                .map(|j| Bound::exactly(f64::from(widen(ty, t.down[row(j)]))))
                .collect();
            bound_with(&slots, t.shared(i, 1.0), ty)
        };
        let text = "the rows were taken slot by slot; they are stored token by token";
        best.offer("slots-transposed", text, t.stage.compared(wrong, transposed));
    }
    if let Some((router, num_experts)) = &t.layer.router
        && let Ok((_, weights)) = stated_or_routed(case, router, *num_experts)
        && weights.iter().any(|w| *w != 1.0)
    {
        let weighted = |i: usize| {
            let weight = |j: usize| f64::from(weights[i / t.size_n * t.top_k + j]);
            t.bound(i, |j| Some((j, weight(j))))
        };
        let text = "the sum multiplied each slot with its router weight; `down` is multiplied with it \
                    already: router weights were applied twice";
        best.offer(
            "router-weight-twice",
            text,
            t.stage.compared(wrong, |i| t.rounded(weighted(i))),
        );
    }
    if t.shared.is_some() {
        let without = t.stage.compared(wrong, |i| t.with_shared_times(i, 0.0));
        best.offer(SHARED_MISSING.0, SHARED_MISSING.1, without);
        let twice = t.stage.compared(wrong, |i| t.rounded(t.with_shared_times(i, 2.0)));
        best.offer(SHARED_TWICE.0, SHARED_TWICE.1, twice);
    }
    if best.done() {
        return best.diagnosis;
    }
    // A change of one slot, which may differ between tokens.
    for (id, what, factor) in [
        ("slot-dropped", "is missing", None),
        ("slot-doubled", "was added twice", Some(2.0)),
        ("slot-subtracted", "was subtracted", Some(-1.0)),
    ] {
        let slot_changed = |i: usize, slot: usize| {
            t.bound(i, |j| match factor {
                _ if j != slot => Some((j, 1.0)),
                None => None,
                Some(f) => Some((j, f)),
            })
        };
        // The changed slot of each token with wrong values; the other tokens are right.
        let mut slots: Vec<Option<usize>> = vec![None; t.size_m];
        for of_token in wrong.chunk_by(|a, b| a / t.size_n == b / t.size_n) {
            let outside = |slot: usize| {
                let holds =
                    |i: &&usize| slot_changed(**i, slot).allows(t.stage.value(t.stage.found[**i]));
                of_token.len() - of_token.iter().filter(holds).count()
            };
            slots[of_token[0] / t.size_n] = (0..t.top_k).min_by_key(|&slot| outside(slot));
        }
        let made = |i: usize| match slots[i / t.size_n] {
            Some(slot) => slot_changed(i, slot),
            None => t.bound(i, |j| Some((j, 1.0))),
        };
        let tokens: Vec<(usize, usize)> =
            slots.iter().enumerate().filter_map(|(token, slot)| Some((token, (*slot)?))).collect();
        let &(token, slot) = tokens.first()?;
        let text = format!(
            "the term of one slot {what} in {} tokens; first in token {token}: slot {slot}{}",
            tokens.len(),
            with_expert(expert(case, token * t.top_k + slot)),
        );
        let mut comparison = t.stage.compared(wrong, made);
        comparison.total = 0;
        comparison.evidence -= tokens.len() as f64 * (t.top_k as f64).log2();
        best.offer(id, &text, comparison);
    }
    best.diagnosis
}
