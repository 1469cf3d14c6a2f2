//! The definition of a rule's result in f32.

use super::rule::{ChooseBy, GroupScore, Masked, Renormalize, RouterTensors, RoutingRule, Score};
use crate::Result;
use crate::moe::math;
use crate::moe::router::{self, Routing};

impl RoutingRule {
    /// Routes every row of `logits`, row-major `[M, experts]`, `experts` with the zero experts.
    /// Among equal experts the lower id comes first.
    ///
    /// # Errors
    /// As [`RoutingRule::validate`].
    pub fn route(
        &self,
        logits: &[f32],
        experts: usize,
        tensors: RouterTensors<'_>,
    ) -> Result<Routing> {
        self.validate(logits, experts, tensors)?;
        let rows = logits.len() / experts;
        let mut topk_ids = Vec::with_capacity(rows * self.top_k);
        let mut topk_weights = Vec::with_capacity(rows * self.top_k);
        for row in logits.chunks_exact(experts) {
            let (ids, mut weights) = match self.scoring_func {
                Score::SparseMixer => sparse_mixer(row, self.jitter),
                _ => self.best(row, tensors.correction_bias),
            };
            self.finish(&mut weights);
            for (w, &id) in weights.iter_mut().zip(&ids) {
                // A zero expert has no separate factor.
                *w *= tensors.expert_scale.and_then(|s| s.get(id)).copied().unwrap_or(1.0);
            }
            topk_ids.extend(ids.iter().map(|&id| id as i32));
            topk_weights.extend(weights);
        }
        let token_expert_indices = router::token_expert_indices(rows, self.top_k);
        Ok(Routing { topk_weights, topk_ids, token_expert_indices })
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

    /// Renormalizes, the sum in the order of the ids, and multiplies by the factor.
    fn finish(&self, weights: &mut [f32]) {
        let sum: f32 = weights.iter().sum();
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
