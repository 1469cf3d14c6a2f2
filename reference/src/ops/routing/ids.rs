//! Judges the chosen experts exactly, except where rounding decides.

use std::collections::BTreeSet;

use super::{Context, mismatch, passing, picture};
use crate::Result;
use crate::judge::mistake::Comparison;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::ScoringFunc;
use crate::moe::bound::Bounds;
use crate::moe::router::{Router, Ties};
use crate::num::interval::Interval;
use crate::num::tensor::Tensor;

/// A wrong entry with its reason.
struct Wrong {
    index: usize,
    text: String,
}

/// Judges `topk_ids`. Entry j must be a best expert among those that earlier entries left. If the
/// bounds cannot order two experts, either is accepted; of experts with equal logit and bias, the
/// lower id comes first.
pub(crate) fn judge(c: &Context<'_>, found: &Tensor<'_>) -> Result<OutputReport> {
    let k = c.router.top_k;
    found.expect_shape(&[c.rows(), k])?;
    let ids = found.elements::<i32>();
    let expected = c.routing.topk_ids.as_slice().unwrap_or_default();
    let mut report = passing("topk_ids", ids.len());
    let (mut wrong, mut exchanged) = (Vec::<Wrong>::new(), 0);
    for t in 0..c.rows() {
        let row = &ids[t * k..][..k];
        if row == &expected[t * k..][..k] {
            continue;
        }
        let before = wrong.len();
        token(c, t, row, &mut wrong);
        if wrong.len() == before {
            exchanged += row.iter().zip(&expected[t * k..]).filter(|(a, b)| a != b).count();
        }
    }
    let same = ids.iter().zip(expected).filter(|(a, b)| a == b).count();
    report.equal_bits = Some(same as f64 / ids.len().max(1) as f64);
    if exchanged > 0 {
        report.note = Some(format!(
            "{exchanged} ids differ where the experts' scores are closer than their bounds: accepted"
        ));
    }
    let Some(first) = wrong.first() else { return Ok(report) };
    report.verdict = Verdict::Fail;
    report.mismatches = wrong.len();
    let at = vec![first.index / k, first.index % k];
    let (e, f) = (expected[first.index], ids[first.index]);
    report.first_mismatch = Some(mismatch(at, usize::try_from(f).ok(), e as u32, f as u32));
    report.diagnosis = Some(diagnose(c, &ids, &wrong));
    let places: Vec<usize> = wrong.iter().map(|w| w.index).collect();
    report.picture = Some(picture("token", c.rows(), k, &places));
    Ok(report)
}

/// The groups that a correct selection may or must keep.
struct Reachable {
    /// Groups that it may keep.
    possible: Vec<bool>,
    /// Groups that it must keep.
    certain: Vec<bool>,
    per: usize,
    keep: usize,
}

/// Whether `a`, of id `i`, may come before `b`, of id `j`.
fn may_precede(a: Interval, i: usize, b: Interval, j: usize, same: bool) -> bool {
    if same { i < j } else { a.hi > b.lo || (a.hi == b.lo && i < j) }
}

impl Reachable {
    fn new(router: &Router<'_>, row: &[f32], bounds: &Bounds) -> Self {
        let Some(groups) = router.groups else {
            return Self { possible: vec![true], certain: vec![true], per: row.len(), keep: 1 };
        };
        let (n, keep) = (groups.num_expert_group, groups.topk_group);
        let per = row.len() / n;
        let scores = bounds.groups(router, groups);
        let part = |g: usize| g * per..(g + 1) * per;
        let same = |g: usize, h: usize| {
            row[part(g)] == row[part(h)] && router.bias.is_none_or(|b| b[part(g)] == b[part(h)])
        };
        let others = |g: usize| (0..n).filter(move |&h| h != g);
        let precedes = |g: usize, h: usize| may_precede(scores[g], g, scores[h], h, same(g, h));
        let possible = |g| others(g).filter(|&h| !precedes(g, h)).count() < keep;
        let certain = |g| others(g).filter(|&h| precedes(h, g)).count() < keep;
        Self {
            possible: (0..n).map(possible).collect(),
            certain: (0..n).map(certain).collect(),
            per,
            keep,
        }
    }
}

fn token(c: &Context<'_>, t: usize, ids: &[i32], wrong: &mut Vec<Wrong>) {
    let k = c.router.top_k;
    let row = &c.logits[t * c.experts..][..c.experts];
    let bounds = &c.bounds[t];
    let reachable = Reachable::new(&c.router, row, bounds);
    let same = |a: usize, b: usize| row[a] == row[b] && c.router.bias.is_none_or(|s| s[a] == s[b]);
    let mut taken = vec![false; c.experts];
    let mut used = BTreeSet::new();
    for (j, &id) in ids.iter().enumerate() {
        let index = t * k + j;
        let mut bad = |text: String| {
            wrong.push(Wrong { index, text: format!("token {t}, entry {j}: {text}") });
        };
        let Some(me) = usize::try_from(id).ok().filter(|&id| id < c.experts) else {
            bad(format!("{id} is no expert of {}", c.experts));
            continue;
        };
        if std::mem::replace(&mut taken[me], true) {
            bad(format!("expert {me} was chosen before"));
            continue;
        }
        let group = me / reachable.per;
        if !reachable.possible[group] {
            bad(format!("expert {me} is in group {group}, which is not among the best"));
            continue;
        }
        used.insert(group);
        if used.len() > reachable.keep {
            bad(format!("expert {me} is in one group more than topk_group"));
            continue;
        }
        let choice = bounds.choice();
        let better = (0..c.experts).find(|&e| {
            let group = e / reachable.per;
            !taken[e]
                && (reachable.certain[group] || used.contains(&group))
                && !may_precede(choice[me], me, choice[e], e, same(me, e))
        });
        if let Some(e) = better {
            let why = if same(me, e) { "ties with it and is lower" } else { "has a higher score" };
            bad(format!("expert {me} chosen, expert {e} {why}"));
        }
    }
}

fn diagnose(c: &Context<'_>, ids: &[i32], wrong: &[Wrong]) -> Diagnosis {
    let made = |router: &Router<'_>, ties| {
        router
            .route_with(c.logits, c.experts, ties)
            .map(|r| r.topk_ids.into_raw_vec_and_offset().0)
            .ok()
    };
    let with = |f: &dyn Fn(&mut Router<'_>)| {
        let mut router = c.router.clone();
        f(&mut router);
        made(&router, Ties::Lower)
    };
    let mut variants = vec![(
        "ties-to-higher-id",
        "of experts with equal scores the higher id was taken",
        made(&c.router, Ties::Higher),
    )];
    if c.router.bias.is_some() {
        let text = "the selection leaves out the correction bias";
        variants.push(("bias-left-out", text, with(&|r| r.bias = None)));
        let other = match c.router.scoring_func {
            ScoringFunc::Sigmoid => ScoringFunc::Softmax,
            ScoringFunc::Softmax => ScoringFunc::Sigmoid,
        };
        let text = "the selection uses the other scoring function";
        variants.push(("other-scoring", text, with(&move |r| r.scoring_func = other)));
    }
    if c.router.groups.is_some() {
        let text = "the selection ignores the groups";
        variants.push(("groups-ignored", text, with(&|r| r.groups = None)));
        variants.push(other_group_score(c));
    }
    let k = c.router.top_k;
    let expected = c.routing.topk_ids.as_slice().unwrap_or_default();
    for (id, text, made) in variants {
        let Some(made) = made.filter(|m| m != expected) else { continue };
        // Accepted rows need no explanation.
        let mut all = Comparison::default();
        let mut of_wrong = wrong.iter().map(|w| w.index).peekable();
        for i in 0..ids.len() {
            if of_wrong.next_if_eq(&i).is_some() {
                all.id(made[i] == ids[i], c.experts);
            } else if ids[i] == expected[i] {
                all.broken += usize::from(made[i] != ids[i]);
            }
        }
        if let Some(outcome) = all.outcome(2.0) {
            return outcome.named(id, text);
        }
    }
    let sorted = |v: &[i32]| {
        let mut v = v.to_vec();
        v.sort_unstable();
        v
    };
    let same_set = |of: &[Wrong]| {
        let row = of[0].index / k * k;
        sorted(&ids[row..row + k]) == sorted(&expected[row..row + k])
    };
    let first = &wrong[0].text;
    if wrong.chunk_by(|a, b| a.index / k == b.index / k).all(same_set) {
        let text = format!("the right experts in another order; {first}");
        return Diagnosis::explains("ids-in-another-order", text);
    }
    let text = format!("{} wrong ids; {first}", wrong.len());
    Diagnosis::place("wrong-experts", text, wrong.len())
}

/// The ids if groups were chosen by the other rule: by their best expert with a correction bias, by
/// their two best without.
fn other_group_score(c: &Context<'_>) -> (&'static str, &'static str, Option<Vec<i32>>) {
    let best = |choice: &[f32]| choice.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let with_second = |choice: &[f32]| {
        let mut sorted = choice.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted.iter().take(2).sum()
    };
    let biased = c.router.bias.is_some();
    let ids = c.logits.chunks_exact(c.experts).flat_map(|row| {
        let scores = c.router.scores(row);
        let score = |choice: &[f32]| if biased { best(choice) } else { with_second(choice) };
        c.router.select_by(&scores, Ties::Lower, score)
    });
    let ids = Some(ids.map(|id| id as i32).collect());
    match biased {
        true => ("group-score-best", "groups were chosen by their best expert, not their two", ids),
        false => ("group-score-two", "groups were chosen by their two best experts, not one", ids),
    }
}
