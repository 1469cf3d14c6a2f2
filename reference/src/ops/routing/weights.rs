//! Judges router weights by their intervals.

use super::{Context, mismatch, passing, picture};
use crate::Result;
use crate::judge::mistake::{self, Comparison};
use crate::judge::power::{Accepted, Power};
use crate::judge::{Diagnosis, OutputReport, Verdict, plain};
use crate::moe::ScoringFunc;
use crate::moe::bound::{Bounds, Roundings};
use crate::moe::router::Router;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;

/// The class of operations that the bound allows, as printed in the report.
const CLASS: &str = "bound: f32 with sums in any order; expf to 2 ulp, __expf to 2 + 1.173|x| ulp, \
                     tanhf to 2 ulp; results below 2^-126 may be zero";

/// The result of comparing all weights.
struct Outcome {
    wrong: Vec<usize>,
    max_ratio: f64,
    max_ulp: f64,
    equal: usize,
}

/// Distance in units in the last place of f32 at `exact`.
fn ulps(exact: f64, found: f32) -> f64 {
    let exponent = (exact.abs().max(f64::from(f32::MIN_POSITIVE)).to_bits() >> 52) as i32 - 1023;
    let error = (f64::from(found) - exact).abs() / 2f64.powi(exponent - 23);
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Compares the weights of the chosen `ids` under `router`, row by row.
fn compare(
    c: &Context<'_>,
    router: &Router<'_>,
    bounds: &[Bounds],
    ids: &[usize],
    found: &[f32],
) -> Outcome {
    let k = c.router.top_k;
    let mut out = Outcome { wrong: Vec::new(), max_ratio: 0.0, max_ulp: 0.0, equal: 0 };
    for (t, bound) in bounds.iter().enumerate() {
        let row = &ids[t * k..][..k];
        let expected = expected(c, router, t, row);
        for (j, wanted) in expected.iter().enumerate() {
            let i = t * k + j;
            let (exact, interval) = bound.weight(router, row, j);
            let ratio = interval.ratio(exact, found[i]);
            if ratio > 1.0 {
                out.wrong.push(i);
            }
            out.max_ratio = out.max_ratio.max(ratio);
            out.max_ulp = out.max_ulp.max(ulps(exact, found[i]));
            out.equal += usize::from(wanted.to_bits() == found[i].to_bits());
        }
    }
    out
}

/// Compares the weights under the [`Roundings`] that leave the fewest wrong, which `c` keeps.
fn compare_rounded(c: &mut Context<'_>, ids: &[usize], found: &[f32]) -> Outcome {
    let mut best: Option<(Roundings, Outcome)> = None;
    for roundings in Roundings::of(&c.router) {
        c.round(roundings);
        let outcome = compare(c, &c.router, &c.bounds, ids, found);
        if best.as_ref().is_none_or(|(_, b)| outcome.wrong.len() < b.wrong.len()) {
            best = Some((roundings, outcome));
        }
        if best.as_ref().is_some_and(|(_, b)| b.wrong.is_empty()) {
            break;
        }
    }
    let (roundings, outcome) = best.expect("one at least");
    c.round(roundings);
    outcome
}

/// The reference's own weights of token `t`.
fn expected(c: &Context<'_>, router: &Router<'_>, t: usize, ids: &[usize]) -> Vec<f32> {
    router.weights(&router.scores(&c.logits[t * c.experts..][..c.experts]), ids)
}

/// Judges the weights for the ids of the case. If those are wrong and the weights belong to the
/// right ids, only the ids fail.
pub(crate) fn judge(
    c: &mut Context<'_>,
    found: &Tensor<'_>,
    ids: Option<&Tensor<'_>>,
    ids_fail: bool,
) -> Result<OutputReport> {
    found.expect_shape(&[c.rows(), c.router.top_k])?;
    let values = found.elements::<f32>();
    let mut right: Vec<usize> = c.routing.topk_ids.iter().map(|&id| id as usize).collect();
    let own = ids.and_then(|t| own_ids(&t.elements::<i32>(), c.experts));
    let mut report = passing("topk_weights", values.len());
    let mut note = CLASS.to_owned();
    let mut outcome = compare_rounded(c, own.as_ref().unwrap_or(&right), &values);
    if ids_fail && (own.is_none() || !outcome.wrong.is_empty()) {
        let other = compare_rounded(c, &right, &values);
        if own.is_none() || other.wrong.len() < outcome.wrong.len() {
            outcome = other;
            note = format!("judged for the expected topk_ids, since the case's are wrong; {note}");
        } else if let Some(own) = own {
            right = own;
        }
    } else if let Some(own) = own {
        right = own;
    }
    report.equal_bits = Some(outcome.equal as f64 / values.len().max(1) as f64);
    report.max_ulp = Some(outcome.max_ulp);
    report.max_error_over_bound = Some(outcome.max_ratio);
    report.note = Some(note);
    let k = c.router.top_k;
    let accepted: Vec<Accepted> = (0..values.len())
        .map(|i| {
            let (exact, interval) =
                c.bounds[i / k].weight(&c.router, &right[i / k * k..][..k], i % k);
            Accepted { exact, lo: interval.lo, hi: interval.hi, nan: false }
        })
        .collect();
    report
        .settle(Power::of(&accepted, k, ScalarType::FLOAT32), "its weights are too small to tell");
    let Some(&first) = outcome.wrong.first() else { return Ok(report) };
    let (t, j) = (first / k, first % k);
    let wanted = expected(c, &c.router, t, &right[t * k..][..k])[j];
    report.verdict = Verdict::Fail;
    report.mismatches = outcome.wrong.len();
    let expert = Some(right[first]);
    report.first_mismatch =
        Some(mismatch(vec![t, j], expert, wanted.to_bits(), values[first].to_bits()));
    report.diagnosis = Some(diagnose(c, &right, &values, &outcome.wrong, wanted));
    report.picture = Some(picture("token", c.rows(), k, &outcome.wrong));
    Ok(report)
}

/// The ids of the case, if they are valid.
fn own_ids(ids: &[i32], experts: usize) -> Option<Vec<usize>> {
    ids.iter().map(|&id| usize::try_from(id).ok().filter(|&id| id < experts)).collect()
}

/// Known mistakes in routers.
fn variants<'a>(r: &Router<'a>) -> Vec<(&'static str, &'static str, Router<'a>)> {
    let with = |f: &dyn Fn(&mut Router<'a>)| {
        let mut changed = r.clone();
        f(&mut changed);
        changed
    };
    let mut all = Vec::new();
    all.push(match r.renormalize {
        true => (
            "renormalize-forgotten",
            "the weights were not divided by their sum",
            with(&|v| v.renormalize = false),
        ),
        false => (
            "renormalized",
            "the weights were divided by their sum, which the config does not ask for",
            with(&|v| v.renormalize = true),
        ),
    });
    if r.routed_scaling_factor != 1.0 {
        if r.renormalize {
            all.push((
                "factor-before-renormalize",
                "the routed scaling factor is lost: it was applied before the weights were \
                 divided by their sum, or not at all",
                with(&|v| v.routed_scaling_factor = 1.0),
            ));
        } else {
            all.push((
                "factor-forgotten",
                "the routed scaling factor was not applied",
                with(&|v| v.routed_scaling_factor = 1.0),
            ));
        }
        all.push((
            "factor-twice",
            "the routed scaling factor was applied twice",
            with(&|v| v.routed_scaling_factor *= v.routed_scaling_factor),
        ));
    }
    all.push(match r.scoring_func {
        ScoringFunc::Sigmoid => (
            "softmax-weights",
            "the weights are a softmax of the logits, the config asks for a sigmoid",
            with(&|v| v.scoring_func = ScoringFunc::Softmax),
        ),
        ScoringFunc::Softmax => (
            "sigmoid-weights",
            "the weights are a sigmoid of the logits, the config asks for a softmax",
            with(&|v| v.scoring_func = ScoringFunc::Sigmoid),
        ),
    });
    all
}

/// The bounds of `router` on the logits of `c`.
fn bounds_of(c: &Context<'_>, router: &Router<'_>, roundings: Roundings) -> Vec<Bounds> {
    let bound = |row| {
        let mut bound = Bounds::new(router, row);
        bound.set_roundings(roundings);
        bound
    };
    c.logits.chunks_exact(c.experts).map(bound).collect()
}

fn diagnose(
    c: &Context<'_>,
    ids: &[usize],
    found: &[f32],
    wrong: &[usize],
    wanted: f32,
) -> Diagnosis {
    let right = |i: usize| {
        f64::from(expected(c, &c.router, i / c.router.top_k, ids_of(c, ids, i))[i % c.router.top_k])
    };
    let pairs: Vec<(f64, f64)> = wrong.iter().map(|&i| (f64::from(found[i]), right(i))).collect();
    let mut best: Option<(mistake::Outcome, Diagnosis)> = None;
    // `left`: the weights that the mistake does not explain.
    let mut offer = |id: &str, text: &str, left: &[usize]| {
        let mut all = Comparison::default();
        all.broken = left.iter().filter(|i| wrong.binary_search(i).is_err()).count();
        all.unexplained = left.len() - all.broken;
        all.explained = wrong.len() - all.unexplained;
        // The bounds are a few units in the last place of f32.
        all.evidence = 8.0 * all.explained as f64;
        if let Some(outcome) = all.outcome(3.0)
            && outcome.beats(best.as_ref().map(|b| b.0))
        {
            best = Some((outcome, outcome.named(id, text)));
        }
        best.as_ref().is_some_and(|b| b.0.is_final())
    };
    let all_zero = found.iter().all(|x| *x == 0.0);
    if let (Some(bias), false) = (c.router.bias, all_zero) {
        let bounds: Vec<Bounds> = c.bounds.iter().map(|b| b.less_bias(bias)).collect();
        // Before zeros: small scores become zero by this mistake.
        let is_cause = offer(
            "weights-less-bias",
            "the weights were recovered by subtracting the correction bias from the rounded sum of \
             score and bias",
            &compare(c, &c.router, &bounds, ids, found).wrong,
        );
        if is_cause {
            return best.expect("a cause").1;
        }
    }
    if wrong.len() > 1
        && let Some((id, text)) = plain::floats(&pairs, all_zero)
    {
        return Diagnosis::explains(id, text);
    }
    for (id, text, router) in variants(&c.router) {
        for roundings in Roundings::of(&router) {
            let bounds = bounds_of(c, &router, roundings);
            offer(id, text, &compare(c, &router, &bounds, ids, found).wrong);
        }
    }
    if c.router.bias.is_some() {
        offer(
            "biased-weights",
            "the correction bias is in the weights; it is for the selection only",
            &biased(c, ids, found),
        );
    }
    offer(
        "weights-in-another-order",
        "a token's weights are right but belong to other entries of its topk_ids",
        &not_exchanged(c, ids, found, wrong),
    );
    let k = c.router.top_k;
    if let Some((_, best)) = best {
        return best;
    }
    let (t, j) = (wrong[0] / k, wrong[0] % k);
    let text = format!(
        "{} of {} weights; first token {t}, entry {j} (expert {}): {} where {wanted} belongs",
        wrong.len(),
        found.len(),
        ids[wrong[0]],
        found[wrong[0]],
    );
    Diagnosis::place("outside-bound", text, wrong.len())
}

/// The wrong weights of tokens whose weights are not right in another order.
fn not_exchanged(c: &Context<'_>, ids: &[usize], found: &[f32], wrong: &[usize]) -> Vec<usize> {
    let k = c.router.top_k;
    let moved = |t: usize| {
        let row = &ids[t * k..][..k];
        let weights: Vec<_> = (0..k).map(|j| c.bounds[t].weight(&c.router, row, j)).collect();
        let mut free: Vec<usize> = (0..k).collect();
        (0..k).all(|j| {
            let fits = |&p: &usize| weights[p].1.ratio(weights[p].0, found[t * k + j]) <= 1.0;
            free.iter().position(fits).map(|p| free.swap_remove(p)).is_some()
        })
    };
    // Count once per token, since a token may have as many weights as experts.
    let of_tokens = wrong.chunk_by(|a, b| a / k == b / k).filter(|of| !moved(of[0] / k));
    of_tokens.flatten().copied().collect()
}

/// The chosen experts of the token of weight `i`.
fn ids_of<'i>(c: &Context<'_>, ids: &'i [usize], i: usize) -> &'i [usize] {
    &ids[i / c.router.top_k * c.router.top_k..][..c.router.top_k]
}

/// Weights that differ from those of biased scores by more than sixteen units in the last place
/// (for a diagnosis, not for a verdict).
fn biased(c: &Context<'_>, ids: &[usize], found: &[f32]) -> Vec<usize> {
    let k = c.router.top_k;
    let rows = c.logits.chunks_exact(c.experts).zip(ids.chunks_exact(k));
    let made: Vec<f32> = rows
        .flat_map(|(row, ids)| {
            let mut scores = c.router.scores(row);
            scores.scores.clone_from(&scores.choice);
            c.router.weights(&scores, ids)
        })
        .collect();
    (0..found.len()).filter(|&i| ulps(f64::from(made[i]), found[i]) > 16.0).collect()
}
