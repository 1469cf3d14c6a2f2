//! The definition of a rule's result in f32.

use ndarray::ArrayView2;

use super::rule::{
    ChooseBy, GroupScore, Masked, Renormalize, RouterTensors, RoutingRule, Score, ZeroExpert,
};
use super::tokens::Tokens;
use crate::Result;
use crate::moe::math;
use crate::moe::router::Routing;
use crate::num::array::row_major;

impl RoutingRule {
    /// Routes every row of `logits` `[M, experts]`, `experts` with the zero experts.
    /// Among equal experts the lower id comes first.
    ///
    /// # Errors
    /// As [`RoutingRule::validate`].
    pub fn route(
        &self,
        logits: ArrayView2<'_, f32>,
        tensors: RouterTensors<'_>,
    ) -> Result<Routing> {
        self.route_tokens(logits, tensors, Tokens::default())
    }

    /// [`RoutingRule::route`] of a rule that also depends on the tokens.
    ///
    /// # Errors
    /// As [`RoutingRule::validate`]; [`Error`](crate::Error) naming the entry of `tokens` that is
    /// missing, has another length or a value out of range.
    pub fn route_tokens(
        &self,
        logits: ArrayView2<'_, f32>,
        tensors: RouterTensors<'_>,
        tokens: Tokens<'_>,
    ) -> Result<Routing> {
        self.validate(logits, tensors)?;
        let ((rows, experts), logits) = (logits.dim(), row_major(logits));
        tokens.validate(self, rows, experts)?;
        let mut topk_ids = Vec::with_capacity(rows * self.top_k);
        let mut topk_weights = Vec::with_capacity(rows * self.top_k);
        for (t, row) in logits.chunks_exact(experts).enumerate() {
            let (ids, weights) = self.route_row(row, tensors, tokens.of(self, t));
            topk_ids.extend(ids.iter().map(|&id| id as i32));
            topk_weights.extend(weights);
        }
        Ok(Routing::of_rows(rows, self.top_k, topk_weights, topk_ids))
    }

    /// The experts and weights of one token, whose `logits`, `tensors` and `token` the rule has
    /// accepted.
    pub(crate) fn route_row(
        &self,
        logits: &[f32],
        tensors: RouterTensors<'_>,
        token: Tokens<'_>,
    ) -> (Vec<usize>, Vec<f32>) {
        let bias = tensors.correction_bias.map(|b| token.part(self, b));
        let (mut ids, mut weights) = match (self.scoring_func, token.experts) {
            (Score::SparseMixer, _) => sparse_mixer(logits, self.jitter),
            (_, None) => self.best(logits, bias),
            (_, Some(chosen)) => {
                let scores = self.scores(logits);
                let ids: Vec<usize> = chosen.iter().map(|&id| id as usize).collect();
                let weights = ids.iter().map(|&id| scores[id]).collect();
                (ids, weights)
            }
        };
        let shared: Vec<f32> =
            token.shared_logits.unwrap_or_default().iter().map(|&x| x as f32).collect();
        let shared: f32 = self.scores(&shared).iter().sum();
        self.finish(&mut weights, shared);
        let scale = tensors.expert_scale.map(|s| match s.len() {
            1 => s,
            _ => token.part(self, s),
        });
        let skipped = |id: usize| {
            self.zero_expert_type == ZeroExpert::Skip && id >= logits.len() - self.zero_experts
        };
        for (w, id) in weights.iter_mut().zip(&mut ids) {
            // A zero expert has no separate factor.
            let of = |s: &[f32]| if s.len() == 1 { Some(s[0]) } else { s.get(*id).copied() };
            *w *= scale.and_then(of).unwrap_or(1.0);
            if skipped(*id) {
                (*w, *id) = (0.0, 0);
            }
        }
        (ids, weights)
    }

    /// Scores of one token. Softmax: eᵢ = exp(xᵢ − max), added from the first expert on, times 1/Σ.
    fn scores(&self, row: &[f32]) -> Vec<f32> {
        match self.scoring_func {
            Score::Sigmoid => row.iter().map(|&x| math::sigmoid(x)).collect(),
            Score::SqrtSoftplus => row.iter().map(|&x| sqrt_softplus(x)).collect(),
            _ => softmax(row),
        }
    }

    /// The best experts of one token and their scores.
    fn best(&self, row: &[f32], bias: Option<&[f32]>) -> (Vec<usize>, Vec<f32>) {
        let scores = self.scores(row);
        let mut choice = match self.choose_by {
            ChooseBy::Score => scores.clone(),
            ChooseBy::Logit => row.to_vec(),
        };
        for (c, b) in choice.iter_mut().zip(bias.unwrap_or_default()) {
            *c += b;
        }
        let mut ids: Vec<usize> = (0..row.len()).collect();
        if let Some(g) = self.groups {
            let per = row.len() / g.n_group;
            let values: Vec<f32> =
                choice.chunks_exact(per).map(|c| group_score(c, g.group_score)).collect();
            let mut groups: Vec<usize> = (0..g.n_group).collect();
            sort(&mut groups, &values);
            groups.truncate(g.topk_group);
            match g.masked {
                Masked::Excluded => ids.retain(|id| groups.contains(&(id / per))),
                Masked::Zero => {
                    let others = (0..row.len()).filter(|id| !groups.contains(&(id / per)));
                    others.for_each(|id| choice[id] = 0.0);
                }
            }
        }
        sort(&mut ids, &choice);
        ids.truncate(self.top_k);
        let weights = ids.iter().map(|&id| scores[id]).collect();
        (ids, weights)
    }

    /// Renormalizes, the sum in the order of the ids and then the shared experts', and multiplies
    /// by the factor.
    fn finish(&self, weights: &mut [f32], shared: f32) {
        let sum: f32 = weights.iter().sum::<f32>() + shared;
        let divisor = match self.renormalize {
            Renormalize::Never => 1.0,
            Renormalize::SumPlus(epsilon) => sum + epsilon,
            Renormalize::SumAtLeast(floor) => sum.max(floor),
            Renormalize::Norm(p) => norm(weights, p),
        };
        let divisor = if divisor > 0.0 { divisor } else { 1.0 };
        if self.renormalize != Renormalize::Never {
            weights.iter_mut().for_each(|w| *w /= divisor);
        }
        weights.iter_mut().for_each(|w| *w *= self.routed_scaling_factor);
    }
}

fn softmax(row: &[f32]) -> Vec<f32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f32> = row.iter().map(|&x| math::exp(x - max)).collect();
    let reciprocal = 1.0 / e.iter().sum::<f32>();
    e.iter().map(|e| e * reciprocal).collect()
}

/// In f64, rounded once: the same bits on every machine.
fn sqrt_softplus(x: f32) -> f32 {
    let x = f64::from(x);
    let softplus = if x > 20.0 { x } else { libm::log1p(libm::exp(x)) };
    softplus.sqrt() as f32
}

fn norm(weights: &[f32], p: f32) -> f32 {
    if p == 1.0 {
        return weights.iter().sum();
    }
    let p = f64::from(p);
    let sum: f64 = weights.iter().map(|&w| libm::pow(f64::from(w), p)).sum();
    libm::pow(sum, 1.0 / p) as f32
}

fn group_score(choice: &[f32], rule: GroupScore) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &c in choice {
        if c > first {
            (first, second) = (c, first);
        } else if c > second {
            second = c;
        }
    }
    if rule == GroupScore::Max { first } else { first + second }
}

/// The two experts of one token; each weight is a softmax over the experts that the threshold
/// keeps, the second without the first expert.
fn sparse_mixer(row: &[f32], jitter: f32) -> (Vec<usize>, Vec<f32>) {
    let mut left: Vec<f32> = row.to_vec();
    let (mut ids, mut weights) = (Vec::with_capacity(2), Vec::with_capacity(2));
    for _ in 0..2 {
        let max = left.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let keep = |(&l, &x): (&f32, &f32)| {
            // 0 / 0 is not above the threshold.
            let dropped = (max - x) / x.abs().max(max) > 2.0 * jitter;
            if dropped { f32::NEG_INFINITY } else { l }
        };
        let kept: Vec<f32> = left.iter().zip(row).map(keep).collect();
        let best = kept.iter().position(|&x| x == max).unwrap_or(0);
        weights.push(softmax(&kept)[best]);
        ids.push(best);
        left[best] = f32::NEG_INFINITY;
    }
    (ids, weights)
}

/// Sorts ids by falling value; equal values keep the order of the ids.
fn sort(ids: &mut [usize], values: &[f32]) {
    ids.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap_or(std::cmp::Ordering::Equal));
}
