//! [`Router::route`] into the caller's memory.

use crate::moe::ScoringFunc;
use crate::moe::families::Tokens;
use crate::moe::math;
use crate::moe::router::{Groups, Router};
use crate::num::scalar::round_to;
use crate::w4a8::FamilyRouting;
use crate::w4a8::wide::{Loop, wide};

/// The choice of one token.
pub(super) struct Choice<'a> {
    /// `[top_k]`.
    pub(super) topk_ids: &'a mut [i32],
    /// `[top_k]`.
    pub(super) topk_weights: &'a mut [f32],
    /// `[2 · experts]`, overwritten.
    pub(super) scratch: &'a mut [f32],
}

impl Choice<'_> {
    /// Routes the token of `logits`, which the rule has accepted.
    pub(super) fn by_family(self, routing: &FamilyRouting, logits: &[f32]) {
        let (ids, weights) = routing.rule().route_row(logits, routing.tensors(), Tokens::default());
        for (found, id) in self.topk_ids.iter_mut().zip(ids) {
            *found = id as i32;
        }
        self.topk_weights.copy_from_slice(&weights);
    }
}

/// Routes the token of `logits`, which [`Router::validate`] has accepted.
pub(super) fn route(router: &Router<'_>, logits: &[f32], choice: Choice<'_>) {
    let (scores, biased) = choice.scratch.split_at_mut(logits.len());
    wide(Score { function: router.scoring_func, logits, scores });
    let ty = router.score_type();
    scores.iter_mut().for_each(|s| *s = round_to(ty, *s));
    biased.copy_from_slice(scores);
    for (choice, &bias) in biased.iter_mut().zip(router.bias.unwrap_or_default()) {
        *choice = round_to(ty, *choice + round_to(ty, bias));
    }
    select(router, biased, choice.topk_ids);
    weigh(router, scores, choice.topk_ids, choice.topk_weights);
}

/// Scores of one token, in f32.
struct Score<'a> {
    function: ScoringFunc,
    logits: &'a [f32],
    scores: &'a mut [f32],
}

impl Loop for Score<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { function, logits, scores } = self;
        if function == ScoringFunc::Sigmoid {
            for (s, &x) in scores.iter_mut().zip(logits) {
                *s = math::sigmoid(x);
            }
            return;
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (s, &x) in scores.iter_mut().zip(logits) {
            *s = math::exp(x - max);
        }
        let reciprocal = 1.0 / scores.iter().sum::<f32>();
        for s in scores {
            *s *= reciprocal;
        }
    }
}

/// The best experts, best first; ties go to the lower id.
fn select(router: &Router<'_>, choice: &[f32], ids: &mut [i32]) {
    let mut found = 0;
    for (expert, &value) in choice.iter().enumerate() {
        if router.groups.is_some_and(|groups| !keeps(router, groups, choice, expert)) {
            continue;
        }
        let at = ids[..found].iter().rposition(|&id| choice[id as usize] >= value);
        let at = at.map_or(0, |i| i + 1);
        if at < ids.len() {
            found = (found + 1).min(ids.len());
            ids.copy_within(at..found - 1, at + 1);
            ids[at] = expert as i32;
        }
    }
}

/// Whether the group of `expert` is kept: fewer groups are better than the number kept.
fn keeps(router: &Router<'_>, groups: Groups, choice: &[f32], expert: usize) -> bool {
    let per = choice.len() / groups.num_expert_group;
    let (own, values) = (expert / per, choice.chunks_exact(per).map(|c| router.group_score(c)));
    let value = router.group_score(&choice[own * per..][..per]);
    let before = values.enumerate().filter(|&(i, v)| v > value || v == value && i < own).count();
    before < groups.topk_group
}

/// The router weights: divided by their sum if it is positive, then multiplied by the factor.
fn weigh(router: &Router<'_>, scores: &[f32], ids: &[i32], weights: &mut [f32]) {
    for (weight, &id) in weights.iter_mut().zip(ids) {
        *weight = scores[id as usize];
    }
    if router.renormalize {
        let sum: f32 = weights.iter().sum();
        let sum = if sum > 0.0 { sum } else { 1.0 };
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= router.routed_scaling_factor);
}
