//! Known mistakes of the stages that a case lacks: each is carried into the next stage that it has.

mod list;

use super::{NAMES, Walk};
use crate::Result;
use crate::judge::mistake::{Comparison, search};
use crate::judge::product::DEQUANTIZING;
use crate::judge::{Declared, Diagnosis, OutputReport, Strength, plain};
use crate::moe::layer::Routed;
use crate::moe::layer::bounds::Int8Layer;
use crate::num::interval::Bound;
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::layer::carried::{Values, rounded};
use crate::ops::moe::MoeConfig;
use crate::ops::moe::source::Source;
use crate::products::Bounded;
use list::{Changed, mistakes};

/// What a report says of an output that no mistake of an unrecorded stage explains.
const ADVICE: &str = "to name the stage, add out.gate_up, out.activated and out.down to the case";

/// One slot of a token with another expert.
#[derive(Clone)]
struct SlotChange {
    /// The sum of the values' errors over their bounds.
    distance: f64,
    slot: usize,
    /// -1 is none.
    expert: i32,
    /// The token's values.
    made: Vec<Bounded>,
}

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

/// Names the mistake of an unrecorded stage that explains a failed output, under any convention that
/// the kernel may follow.
///
/// # Errors
/// Returns an error for inputs that the operation refuses.
pub(super) fn explain(
    case: &Case<'_>,
    config: &MoeConfig,
    declared: &Declared,
    (rules, report): (&[Int8Layer], &mut OutputReport),
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
    let conventions = match declared.convention {
        Some(convention) => vec![convention],
        None => DEQUANTIZING.to_vec(),
    };
    let is_plain = |d: &Diagnosis| plain::NAMES.contains(&d.id.as_str());
    if report.diagnosis.as_ref().is_some_and(is_plain) {
        return Ok(());
    }
    let mut best: Option<Diagnosis> = None;
    let choices = rules.iter().flat_map(|rule| conventions.iter().map(move |c| (*c, *rule)));
    for (convention, rule) in choices {
        let one = Declared { convention: Some(convention), ..declared.clone() };
        let walk = Walk::new(case, config, &one, rule);
        let carried = Carried { stage, start, before: &before, found: &found };
        let Some(made) = walk.explain_carried(carried, &source) else { continue };
        let rank = |d: &Diagnosis| (d.strength as u8, d.unexplained);
        if best.as_ref().is_none_or(|b| rank(&made) < rank(b)) {
            best = Some(made);
        }
        if best.as_ref().is_some_and(|b| b.strength == Strength::Explains) {
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

impl Carried<'_> {
    fn cols(&self, all: usize, tokens: usize) -> usize {
        all / tokens.max(1)
    }

    /// The values of some tokens among `values` of all.
    fn of_tokens<T: Copy>(&self, values: &[T], which: &[usize], tokens: usize) -> Vec<T> {
        let per = self.cols(values.len(), tokens);
        which.iter().flat_map(|t| values[t * per..][..per].iter().copied()).collect()
    }
}

/// Tokens on which a mistake is tried first, wrong and right ones.
const SAMPLE: [usize; 2] = [4, 2];
/// Most wrong tokens, and experts, of which each slot is tried with another expert.
const SLOTS_TRIED: [usize; 2] = [8, 32];
/// Most products with one weight that these tries take.
const MOST_WORK: usize = 1 << 28;

impl Walk<'_> {
    /// The bounds of some tokens of a stage under a mistake.
    fn carry(
        &self,
        c: &Carried<'_>,
        changed: &Changed<'_>,
        which: &[usize],
    ) -> Option<Vec<Bounded>> {
        let tokens = self.config.size_m;
        let (layer, all) = changed.layer();
        let routed = Routed {
            top_k: all.top_k,
            topk_ids: &c.of_tokens(all.topk_ids, which, tokens),
            topk_weights: &c.of_tokens(all.topk_weights, which, tokens),
        };
        let mut known = Values::Bits(c.of_tokens(c.before, which, tokens).into());
        for stage in c.start..=c.stage {
            known = Values::Bounds(self.bounds_of(stage, &known, (layer, routed)).ok()?);
        }
        let ty = self.config.quant.dtype;
        Some(known.bounds(ty).iter().map(|b| bounded(ty, b)).collect())
    }

    /// The mistake of a stage from `start` on that explains the wrong values.
    fn explain_carried(&self, c: Carried<'_>, source: &Source<'_>) -> Option<Diagnosis> {
        let (layer, routed) = (source.layer(), source.routed());
        let right = Changed {
            layer,
            top_k: routed.top_k,
            ids: routed.topk_ids.into(),
            weights: routed.topk_weights.into(),
            matrices: [None, None],
        };
        let tokens: Vec<usize> = (0..self.config.size_m).collect();
        let own = self.carry(&c, &right, &tokens)?;
        let found = self.values(&c);
        let wrong: Vec<usize> = (0..own.len()).filter(|&i| own[i].ratio(found[i]) > 1.0).collect();
        let judged = Judged { own, found, wrong };
        self.listed(&c, &right, &judged).or_else(|| self.one_slot(&c, &right, &judged))
    }

    fn values(&self, c: &Carried<'_>) -> Vec<f64> {
        let ty = self.config.quant.dtype;
        c.found.iter().map(|&b| ty.to_f64(b.into())).collect()
    }

    /// A mistake of the whole layer.
    fn listed(&self, c: &Carried<'_>, right: &Changed<'_>, judged: &Judged) -> Option<Diagnosis> {
        let tokens = self.config.size_m;
        let per = c.cols(c.found.len(), tokens);
        let (mut wrong, mut sample) = (vec![false; tokens], Vec::new());
        judged.wrong.iter().for_each(|i| wrong[i / per] = true);
        for (is_wrong, count) in [true, false].into_iter().zip(SAMPLE) {
            sample.extend((0..tokens).filter(|&t| wrong[t] == is_wrong).take(count));
        }
        sample.sort_unstable();
        let all: Vec<usize> = (0..tokens).collect();
        let places = || sample.iter().flat_map(|t| t * per..(t + 1) * per);
        let all_mistakes = mistakes(&right.layer);
        search(all_mistakes.iter(), |mistake| {
            let changed = (mistake.make)(right.clone())?;
            let made = self.carry(c, &changed, &sample)?;
            let (mut left, mut count) = (0, 0);
            for (i, b) in places().zip(&made) {
                let holds = b.ratio(judged.found[i]) <= 1.0;
                left += usize::from(!holds);
                count += usize::from(judged.wrong.binary_search(&i).is_ok());
            }
            if left * 8 > count {
                return None;
            }
            let made = self.carry(c, &changed, &all)?;
            if made.iter().zip(&judged.own).all(|(a, b)| a.exact == b.exact) {
                return None;
            }
            let all = judged.compared(made.into_iter().enumerate(), self.config.quant.dtype);
            Some(Comparison { total: c.found.len(), ..all })
        })
    }

    /// One slot of each wrong token with another expert, or without one.
    fn one_slot(&self, c: &Carried<'_>, right: &Changed<'_>, judged: &Judged) -> Option<Diagnosis> {
        let (tokens, top_k) = (self.config.size_m, right.top_k.max(1));
        let per = c.cols(c.found.len(), tokens);
        // A few wrong values of a token may have another cause.
        let mut counts = vec![0usize; tokens];
        judged.wrong.iter().for_each(|i| counts[i / per] += 1);
        let most = counts.iter().copied().max().unwrap_or(0);
        let bad: Vec<usize> =
            (0..tokens).filter(|&t| counts[t] > 0 && counts[t] * 4 >= most).collect();
        let experts = right.layer.num_experts;
        let matrix = right.layer.hidden_size() * right.layer.intermediate_size();
        let products = (bad.len() * top_k * top_k * (experts + 1)).saturating_mul(matrix);
        let many = bad.len() > SLOTS_TRIED[0] || experts > SLOTS_TRIED[1] || products > MOST_WORK;
        if c.stage < 3 || many {
            return None;
        }
        let ty = self.config.quant.dtype;
        let found = |i: usize| judged.found[i];
        let mut best: Vec<Option<SlotChange>> = vec![None; bad.len()];
        for slot in 0..top_k {
            // -1 is none.
            for expert in -1..experts as i32 {
                let mut ids = right.ids.to_vec();
                bad.iter().for_each(|t| ids[t * top_k + slot] = expert);
                let changed = Changed { ids: ids.into(), ..right.clone() };
                let made = self.carry(c, &changed, &bad)?;
                for ((best, t), made) in best.iter_mut().zip(&bad).zip(made.chunks_exact(per)) {
                    if right.ids[t * top_k + slot] == expert {
                        continue;
                    }
                    let ratio = |(n, b): (usize, &Bounded)| b.ratio(found(t * per + n)).min(1e3);
                    let distance: f64 = made.iter().enumerate().map(ratio).sum();
                    if best.as_ref().is_none_or(|b| distance < b.distance) {
                        *best = Some(SlotChange { distance, slot, expert, made: made.to_vec() });
                    }
                }
            }
        }
        let (mut texts, mut made, mut dropped) = (Vec::new(), Vec::new(), 0);
        for (t, best) in bad.iter().zip(best) {
            let SlotChange { slot, expert, made: bounds, .. } = best?;
            let own = right.ids[t * top_k + slot];
            dropped += usize::from(expert < 0);
            texts.push(match expert {
                -1 => format!("token {t}, slot {slot} (expert {own}) is missing"),
                _ => format!("token {t}, slot {slot} by expert {expert} instead of {own}"),
            });
            made.extend(bounds.into_iter().enumerate().map(|(n, b)| (t * per + n, b)));
        }
        let choices = ((top_k * (experts + 1)) as f64).log2();
        let outcome = judged.compared(made, ty).outcome(choices * bad.len() as f64)?;
        let all_dropped = dropped == texts.len();
        texts.truncate(3);
        let texts = texts.join(", ");
        let (id, text) = match all_dropped {
            true => ("slot-dropped", format!("terms of the sum are missing: {texts}")),
            false => ("wrong-expert", format!("slots were computed by another expert: {texts}")),
        };
        Some(outcome.named(id, &text))
    }
}
