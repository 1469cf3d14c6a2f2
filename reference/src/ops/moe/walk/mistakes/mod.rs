//! Known mistakes of the stages that a case lacks: each is carried into the next stage that it has.

mod list;
mod slots;
mod work;

use super::{NAMES, Walk};
use crate::Result;
use crate::judge::mistake::{Comparison, search};
use crate::judge::{Declared, Diagnosis, OutputReport, Strength, plain};
use crate::moe::layer::Routed;
use crate::moe::layer::bounds::Int8Layer;
use crate::num::interval::Bound;
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::layer::carried::{Values, rounded};
use crate::ops::moe::MoeConfig;
use crate::ops::moe::source::Source;
use crate::products::{Bounded, Convention};
use list::{Changed, Mistake, mistakes};
use work::Budget;

/// What a report says of an output that no mistake of an unrecorded stage explains.
const ADVICE: &str = "to name the stage, add out.gate_up, out.activated and out.down to the case";

/// An element's bound as that of a product.
fn bounded(ty: ScalarType, bound: &Bound) -> Bounded {
    let exact = bound.exact;
    let rounded = rounded(ty, exact).into();
    let Some((lo, hi)) = finite(bound) else {
        let (lo, hi) = (f64::NEG_INFINITY, f64::INFINITY);
        return Bounded { exact, rounded, centre: exact, lo, hi, below: hi, above: hi };
    };
    Bounded { exact, rounded, centre: exact, lo, hi, below: exact - lo, above: hi - exact }
}

fn finite(bound: &Bound) -> Option<(f64, f64)> {
    let (lo, hi) = (bound.interval.lo, bound.interval.hi);
    (!bound.nan && !bound.interval.is_empty() && lo.is_finite() && hi.is_finite())
        .then_some((lo, hi))
}

/// Names the mistake of an unrecorded stage that explains a failed output. Every mistake is tried under
/// the first of `choices`, the one that leaves the fewest values wrong, on a token; those that explain
/// it are compared with all values, under the other choices as well.
///
/// # Errors
/// Returns an error for inputs that the operation refuses.
pub(super) fn explain(
    case: &Case<'_>,
    config: &MoeConfig,
    declared: &Declared,
    (choices, report): (&[(Convention, Int8Layer)], &mut OutputReport),
) -> Result<()> {
    let Some(stage) = NAMES.iter().position(|name| *name == report.name) else { return Ok(()) };
    let Some(found) = case.output(NAMES[stage]) else { return Ok(()) };
    let found = found.elements::<u16>();
    let recorded = NAMES[..stage].iter().rposition(|name| case.output(name).is_some());
    let start = recorded.map_or(0, |at| at + 1);
    let before = match recorded {
        Some(at) => case.output(NAMES[at]),
        None => case.inputs.get("x"),
    };
    let Some(before) = before else { return Ok(()) };
    let before = before.elements::<u16>();
    let source = Source::new(case, config)?;
    let is_plain = |d: &Diagnosis| plain::NAMES.contains(&d.id.as_str());
    if report.diagnosis.as_ref().is_some_and(is_plain) {
        return Ok(());
    }
    let right = Changed::right(&source);
    let all_mistakes = mistakes(&right.layer);
    let mut tried: Vec<bool> = vec![true; all_mistakes.len()];
    let mut budget: Option<Budget> = None;
    let mut best: Option<Diagnosis> = None;
    for &(convention, rule) in choices {
        let one = Declared { convention: Some(convention), ..declared.clone() };
        let walk = Walk::new(case, config, &one, rule)?;
        let carried = Carried { stage, start, before: &before, found: &found };
        let is_first = budget.is_none();
        let budget = budget.get_or_insert_with(|| Budget::of(&carried, &right, choices.len()));
        let Some(search) = Search::new(&walk, carried, &right, budget) else { continue };
        if is_first {
            tried = all_mistakes.iter().map(|m| search.may_explain(m)).collect();
        }
        let mut made = search.listed(&all_mistakes, &tried);
        if made.is_none() && is_first {
            made = search.one_slot();
        }
        let rank = |d: &Diagnosis| (d.strength as u8, d.unexplained);
        if let Some(made) = made
            && best.as_ref().is_none_or(|b| rank(&made) < rank(b))
        {
            best = Some(made);
        }
        let explained = best.as_ref().is_some_and(|b| b.strength == Strength::Explains);
        if explained || !tried.contains(&true) {
            break;
        }
    }
    match (best, &mut report.diagnosis) {
        (Some(best), _) => report.diagnosis = Some(best),
        (None, Some(place)) if place.strength == Strength::Place => {
            place.text += &format!("; {ADVICE}");
        }
        _ => {}
    }
    Ok(())
}

/// A failed stage whose bounds were carried over stages that the case lacks.
struct Carried<'f> {
    stage: usize,
    /// The first stage that the case lacks, and the values before it.
    start: usize,
    before: &'f [u16],
    found: &'f [u16],
}

/// The elements of such a stage under one convention.
struct Judged {
    own: Vec<Bounded>,
    found: Vec<f64>,
    /// Values outside their bounds, ascending.
    wrong: Vec<usize>,
    /// Number of wrong values of each token.
    counts: Vec<usize>,
}

impl Judged {
    fn compared(
        &self,
        made: impl IntoIterator<Item = (usize, Bounded)>,
        ty: ScalarType,
    ) -> Comparison {
        Comparison::of_bounds(&self.own, made, &self.found, &self.wrong, ty)
    }
}

/// The values of some tokens among `values` of all.
fn of_tokens<T: Copy>(values: &[T], which: &[usize], tokens: usize) -> Vec<T> {
    let per = values.len() / tokens.max(1);
    which.iter().flat_map(|t| values[t * per..][..per].iter().copied()).collect()
}

/// Tokens with which a mistake that explains the worst token is compared first, wrong and right ones.
const SAMPLE: [usize; 2] = [4, 2];

/// A search for the mistake, under one convention.
struct Search<'w, 'l> {
    walk: &'w Walk<'w>,
    c: Carried<'w>,
    right: &'w Changed<'l>,
    /// The right bounds of each stage from `c.start` on.
    stages: Vec<Vec<Bound>>,
    judged: Judged,
    budget: &'w Budget,
}

impl<'w, 'l> Search<'w, 'l> {
    /// `None` if the budget does not allow it, or the stages have no bounds.
    fn new(
        walk: &'w Walk<'w>,
        c: Carried<'w>,
        right: &'w Changed<'l>,
        budget: &'w Budget,
    ) -> Option<Self> {
        let (ty, tokens) = (walk.config.quant.dtype, walk.config.size_m);
        let all: Vec<usize> = (0..tokens).collect();
        let judged =
            Judged { own: Vec::new(), found: Vec::new(), wrong: Vec::new(), counts: Vec::new() };
        let mut search = Self { walk, c, right, stages: Vec::new(), judged, budget };
        search.stages = search.stages_of(right, &all, search.c.start)?;
        let own: Vec<Bounded> =
            search.stages.last()?.iter().map(|bound| bounded(ty, bound)).collect();
        let found: Vec<f64> = search.c.found.iter().map(|&b| ty.to_f64(b.into())).collect();
        let wrong: Vec<usize> = (0..own.len()).filter(|&i| own[i].ratio(found[i]) > 1.0).collect();
        let mut counts = vec![0; tokens];
        let per = search.per();
        wrong.iter().for_each(|i| counts[i / per] += 1);
        search.judged = Judged { own, found, wrong, counts };
        Some(search)
    }

    /// Values of each token.
    fn per(&self) -> usize {
        (self.c.found.len() / self.walk.config.size_m.max(1)).max(1)
    }

    /// The bounds of some tokens in the stages from `from` on, under a mistake.
    fn stages_of(
        &self,
        changed: &Changed<'_>,
        which: &[usize],
        from: usize,
    ) -> Option<Vec<Vec<Bound>>> {
        let c = &self.c;
        let tokens = self.walk.config.size_m;
        let (layer, all) = changed.layer();
        let routed = Routed {
            top_k: all.top_k,
            topk_ids: &of_tokens(all.topk_ids, which, tokens),
            topk_weights: &of_tokens(all.topk_weights, which, tokens),
        };
        if !self.budget.allows((&layer, routed), from..=c.stage) {
            return None;
        }
        let mut known = match from - c.start {
            0 => Values::Bits(of_tokens(c.before, which, tokens).into()),
            at => Values::Bounds(of_tokens(&self.stages[at - 1], which, tokens)),
        };
        let shared = self.walk.shared.as_deref().filter(|_| changed.adds_shared);
        let shared = shared.map(|all| of_tokens(all, which, tokens));
        let mut all = Vec::new();
        for stage in from..=c.stage {
            let parts = (layer, routed);
            let made = self.walk.bounds_of(stage, &known, parts, shared.as_deref()).ok()?;
            known = Values::Bounds(made.clone());
            all.push(made);
        }
        Some(all)
    }

    /// The bounds of some tokens under a mistake; `None` if it changes none of the stages.
    fn carry(&self, changed: &Changed<'_>, which: &[usize]) -> Option<Vec<Bounded>> {
        let from = changed.first_stage(self.right).max(self.c.start);
        if from > self.c.stage {
            return None;
        }
        let ty = self.walk.config.quant.dtype;
        let made = self.stages_of(changed, which, from)?.pop()?;
        Some(made.iter().map(|bound| bounded(ty, bound)).collect())
    }

    /// Wrong values of some tokens, and values that a mistake leaves outside their bounds.
    fn left(&self, made: &[Bounded], which: &[usize]) -> (usize, usize) {
        let per = self.per();
        let places = which.iter().flat_map(|t| t * per..(t + 1) * per);
        let left = places.zip(made).filter(|(i, b)| b.ratio(self.judged.found[*i]) > 1.0).count();
        (which.iter().map(|&t| self.judged.counts[t]).sum(), left)
    }

    /// The token with the most wrong values.
    fn worst(&self) -> Option<usize> {
        let counts = &self.judged.counts;
        (0..counts.len()).max_by_key(|&t| (counts[t], std::cmp::Reverse(t)))
    }

    /// Whether a mistake explains half of the worst token's wrong values, under any convention perhaps
    /// all of them.
    fn may_explain(&self, mistake: &Mistake<'l>) -> bool {
        let made = || {
            let worst = [self.worst()?];
            let changed = (mistake.make)(self.right.clone())?;
            let (wrong, left) = self.left(&self.carry(&changed, &worst)?, &worst);
            Some(left * 2 <= wrong)
        };
        made().unwrap_or(false)
    }

    /// The best of those mistakes of the whole layer that are `tried`.
    fn listed(&self, all_mistakes: &[Mistake<'l>], tried: &[bool]) -> Option<Diagnosis> {
        let tokens = self.walk.config.size_m;
        let mut sample = Vec::new();
        for (is_wrong, count) in [true, false].into_iter().zip(SAMPLE) {
            let of_kind = (0..tokens).filter(|&t| (self.judged.counts[t] > 0) == is_wrong);
            sample.extend(of_kind.take(count));
        }
        sample.sort_unstable();
        let all: Vec<usize> = (0..tokens).collect();
        search(all_mistakes.iter(), |mistake| {
            let at = all_mistakes.iter().position(|m| std::ptr::eq(m, mistake))?;
            if !tried[at] {
                return None;
            }
            let changed = (mistake.make)(self.right.clone())?;
            if sample.len() < tokens {
                let (wrong, left) = self.left(&self.carry(&changed, &sample)?, &sample);
                if left * 8 > wrong {
                    return None;
                }
            }
            let made = self.carry(&changed, &all)?;
            if made.iter().zip(&self.judged.own).all(|(a, b)| a.exact == b.exact) {
                return None;
            }
            let ty = self.walk.config.quant.dtype;
            let all = self.judged.compared(made.into_iter().enumerate(), ty);
            Some(Comparison { total: self.c.found.len(), ..all })
        })
    }
}
