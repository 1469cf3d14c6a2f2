//! A second implementation of [`RoutingRule`], in f64 and expert by expert, that shares no code
//! with the first. `run --check` and case files compare routing with it.

use ndarray::ArrayView2;

use super::rule::{
    ChooseBy, GroupScore, Masked, Renormalize, RouterTensors, RoutingRule, Score, ZeroExpert,
};
use super::tokens::Tokens;
use crate::moe::layer::Routed;
use crate::num::array::row_major;
use crate::{Error, Result};

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Results below the smallest normal f32 may be flushed to zero.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;

/// The routing of one token in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Score of each expert.
    pub scores: Vec<f64>,
    /// Selection value of each expert; −∞ for experts that cannot be selected.
    pub choice: Vec<f64>,
    /// The selected experts, best first.
    pub ids: Vec<usize>,
    /// Largest error of each expert's selection value in an f32 implementation.
    pub slack: Vec<f64>,
    /// Whether f32 rounding may decide which groups are kept; then any expert is accepted.
    pub close_groups: bool,
}

/// Entries that an f32 implementation cannot have produced.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Differences {
    /// Wrong ids: index into `topk_ids`, and reason.
    pub ids: Vec<(usize, String)>,
    /// Wrong weights: index into `topk_weights`, and reason.
    pub weights: Vec<(usize, String)>,
}

impl Differences {
    /// Whether there are no differences.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.weights.is_empty()
    }
}

/// Errors of f32 steps, relative to a score: exponential, sum over the experts, quotient, root.
fn relative_error(rule: &RoutingRule, row: &[f32], x: f64) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let steps = match rule.scoring_func {
        Score::Softmax | Score::SparseMixer => {
            (f64::from(max) - x).abs().min(110.0) + row.len() as f64 + 16.0
        }
        // If it dominates the sum, an exponential of x has a relative error of |x| roundings.
        Score::Sigmoid | Score::SqrtSoftplus => 16.0 + 2.0 * x.abs().min(110.0),
    };
    steps * U
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Softmax weight of `me` among the experts of `kept`.
fn share(row: &[f32], kept: &[usize], me: usize) -> f64 {
    let of = |j: &usize| f64::from(row[*j]) - f64::from(row[me]);
    1.0 / kept.iter().map(|j| of(j).exp()).sum::<f64>()
}

/// The experts that SparseMixer's threshold keeps for its pass without `gone`, and the best one.
/// The comparison is in f32, as the rule states it.
fn mixer_pass(row: &[f32], gone: Option<usize>, jitter: f32) -> (Vec<usize>, usize) {
    let here: Vec<usize> = (0..row.len()).filter(|&e| Some(e) != gone).collect();
    let mut best = here[0];
    for &e in &here {
        if row[e] > row[best] {
            best = e;
        }
    }
    let top = row[best];
    let near = |e: &usize| {
        let scale = if row[*e].abs() > top { row[*e].abs() } else { top };
        let distance = (top - row[*e]) / scale;
        distance.is_nan() || distance <= 2.0 * jitter
    };
    (here.into_iter().filter(near).collect(), best)
}

/// The index of the largest value that is not taken; the first among equal ones.
fn largest(values: &[f64], taken: &[usize]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, v) in values.iter().enumerate() {
        if !taken.contains(&i) && best.is_none_or(|b| *v > values[b]) {
            best = Some(i);
        }
    }
    best
}

impl RoutingRule {
    /// The score of a logit, by a function of this logit alone.
    fn define_score(&self, x: f64) -> f64 {
        match self.scoring_func {
            Score::SqrtSoftplus => softplus(x).sqrt(),
            _ => 1.0 / (1.0 + (-x).exp()),
        }
    }

    /// The experts that a token's id chooses.
    fn define_chosen(&self, scores: Vec<f64>, chosen: &[i32]) -> Token {
        let ids: Vec<usize> = chosen.iter().map(|&id| id as usize).collect();
        let of = |e: usize| if ids.contains(&e) { 0.0 } else { f64::NEG_INFINITY };
        let choice = (0..scores.len()).map(of).collect();
        let slack = vec![0.0; scores.len()];
        Token { scores, choice, ids, slack, close_groups: false }
    }

    /// Routes one token. `row` must be valid by [`RoutingRule::validate`], and `tokens` hold this
    /// token alone.
    pub fn define(&self, row: &[f32], tensors: RouterTensors<'_>, tokens: Tokens<'_>) -> Token {
        let n = row.len();
        let all: Vec<usize> = (0..n).collect();
        if self.scoring_func == Score::SparseMixer {
            return self.define_mixer(row);
        }
        let scores: Vec<f64> = (0..n)
            .map(|e| match self.scoring_func {
                Score::Sigmoid | Score::SqrtSoftplus => self.define_score(f64::from(row[e])),
                _ => share(row, &all, e),
            })
            .collect();
        if let Some(chosen) = tokens.experts {
            return self.define_chosen(scores, chosen);
        }
        let biases = tensors.correction_bias.map(|b| tokens.part(self, b));
        let mut choice = Vec::with_capacity(n);
        let mut slack = Vec::with_capacity(n);
        for (e, (&x, &score)) in row.iter().zip(&scores).enumerate() {
            let x = f64::from(x);
            let bias = biases.map_or(0.0, |b| f64::from(b[e]));
            let (value, error) = match self.choose_by {
                ChooseBy::Logit => (x, 0.0),
                ChooseBy::Score => (score, score * relative_error(self, row, x) + FLUSH),
            };
            choice.push(value + bias);
            slack.push(error + (value + bias).abs() * U);
        }
        let mut close_groups = false;
        if let Some(g) = self.groups {
            let per = n / g.n_group;
            let values: Vec<f64> = (0..g.n_group)
                .map(|group| {
                    let own = &choice[group * per..(group + 1) * per];
                    let first = largest(own, &[]).unwrap_or(0);
                    match (g.group_score, largest(own, &[first])) {
                        (GroupScore::TopTwo, Some(second)) => own[first] + own[second],
                        _ => own[first],
                    }
                })
                .collect();
            let mut kept = Vec::new();
            while kept.len() < g.topk_group {
                kept.extend(largest(&values, &kept));
            }
            if let (Some(&last), Some(next)) = (kept.last(), largest(&values, &kept)) {
                let slack = slack.iter().fold(0.0, |a: f64, &s| a.max(s));
                close_groups = values[last] - values[next] <= 8.0 * slack;
            }
            for e in (0..n).filter(|e| !kept.contains(&(e / per))) {
                choice[e] = if g.masked == Masked::Zero { 0.0 } else { f64::NEG_INFINITY };
            }
        }
        let mut ids = Vec::with_capacity(self.top_k);
        while ids.len() < self.top_k {
            ids.extend(largest(&choice, &ids));
        }
        Token { scores, choice, ids, slack, close_groups }
    }

    fn define_mixer(&self, row: &[f32]) -> Token {
        let (near, first) = mixer_pass(row, None, self.jitter);
        let (rest, second) = mixer_pass(row, Some(first), self.jitter);
        let mut scores = vec![0.0; row.len()];
        scores[first] = share(row, &near, first);
        scores[second] = share(row, &rest, second);
        let choice = row.iter().map(|&x| f64::from(x)).collect();
        let slack = vec![0.0; row.len()];
        Token { scores, choice, ids: vec![first, second], slack, close_groups: false }
    }

    /// Exact weights of `ids` and then of the shared experts, and the largest errors of an f32
    /// implementation.
    pub fn define_weights(
        &self,
        row: &[f32],
        token: &Token,
        ids: &[usize],
        tensors: RouterTensors<'_>,
        tokens: Tokens<'_>,
    ) -> Vec<(f64, f64)> {
        let shared = tokens.shared_logits.unwrap_or_default();
        let errors = tokens.shared_errors.unwrap_or_default();
        let worst = ids.iter().map(|&id| relative_error(self, row, f64::from(row[id])));
        // An error of a logit is at most this relative error of its score.
        let worst = worst.chain(shared.iter().enumerate().map(|(j, &x)| {
            relative_error(self, row, x) + errors.get(j).map_or(0.0, |e| e.exp_m1())
        }));
        let worst = worst.fold(0.0, f64::max);
        let mut chosen: Vec<f64> = ids.iter().map(|&id| token.scores[id]).collect();
        chosen.extend(shared.iter().map(|&x| self.define_score(x)));
        let mut total = 0.0;
        chosen.iter().for_each(|w| total += w);
        let divisor = match self.renormalize {
            Renormalize::Never => 1.0,
            Renormalize::SumPlus(e) => total + f64::from(e),
            Renormalize::SumAtLeast(floor) => f64::max(total, f64::from(floor)),
            Renormalize::Norm(p) => {
                let p = f64::from(p);
                chosen.iter().map(|w| w.powf(p)).sum::<f64>().powf(1.0 / p)
            }
        };
        let divisor = if divisor == 0.0 { 1.0 } else { divisor };
        let error = 2.0 * worst + (chosen.len() + 6) as f64 * U;
        let of = |(j, w): (usize, &f64)| {
            let own = match (tensors.expert_scale, ids.get(j)) {
                (Some([all]), _) => f64::from(*all),
                (Some(s), Some(&id)) => tokens.part(self, s).get(id).map_or(1.0, |&s| f64::from(s)),
                _ => 1.0,
            };
            let factor = f64::from(self.routed_scaling_factor) * own / divisor;
            // Each score of the sum, and the result, may have been flushed.
            let flushed = FLUSH * ((chosen.len() + 1) as f64 * factor.abs() + 1.0);
            (w * factor, (w * factor).abs() * error + flushed)
        };
        chosen.iter().enumerate().map(of).collect()
    }

    /// The class of an entry: a skipped token has id 0 and weight 0.
    fn class(&self, token: &Token, id: i32, weight: f32) -> i32 {
        let first = token.scores.len() - self.zero_experts;
        let skips = self.zero_expert_type == ZeroExpert::Skip && self.zero_experts > 0;
        match skips && id == 0 && weight == 0.0 && token.scores[0] > FLUSH {
            true => first as i32,
            false => id,
        }
    }

    /// Exact weights of the shared experts of token t of `tokens`, and the largest errors of an f32
    /// implementation, for the chosen `ids`.
    pub fn define_shared_weights(
        &self,
        row: &[f32],
        ids: &[usize],
        tensors: RouterTensors<'_>,
        (tokens, t): (Tokens<'_>, usize),
    ) -> Vec<(f64, f64)> {
        let tokens = tokens.of(self, t);
        let token = self.define(row, tensors, tokens);
        self.define_weights(row, &token, ids, tensors, tokens).split_off(ids.len())
    }

    /// Compares ids and weights of every row of `logits` with the second implementation. Of experts
    /// closer than f32 rounding can tell apart, either may be chosen.
    ///
    /// # Errors
    /// As [`RoutingRule::validate`]; [`Error::Shape`] where ids or weights have another length.
    pub fn compare(
        &self,
        logits: ArrayView2<'_, f32>,
        tensors: RouterTensors<'_>,
        found: Routed<'_>,
    ) -> Result<Differences> {
        self.compare_tokens(logits, tensors, Tokens::default(), found)
    }

    /// [`RoutingRule::compare`] of a rule that also depends on the tokens.
    ///
    /// # Errors
    /// As [`RoutingRule::compare`] and [`RoutingRule::route_tokens`].
    pub fn compare_tokens(
        &self,
        logits: ArrayView2<'_, f32>,
        tensors: RouterTensors<'_>,
        tokens: Tokens<'_>,
        found: Routed<'_>,
    ) -> Result<Differences> {
        self.validate(logits, tensors)?;
        let ((rows, experts), logits) = (logits.dim(), row_major(logits));
        tokens.validate(self, rows, experts)?;
        let (shape, ids, weights) = (found.topk_ids().dim(), found.ids(), found.weights());
        if shape != (rows, self.top_k) {
            let expected = format!("[{rows}, {}]", self.top_k);
            return Err(Error::shape("topk_ids", &[shape.0, shape.1], expected));
        }
        let mut wrong = Differences::default();
        for (t, row) in logits.chunks_exact(experts).enumerate() {
            let own = tokens.of(self, t);
            let token = self.define(row, tensors, own);
            let here = t * self.top_k..(t + 1) * self.top_k;
            let before = wrong.ids.len();
            let classes = here.clone().map(|s| self.class(&token, ids[s], weights[s]));
            let classes: Vec<i32> = classes.collect();
            let found = compare_ids(&token, &classes, here.start, &mut wrong.ids);
            if wrong.ids.len() > before {
                continue;
            }
            let mut exact = self.define_weights(row, &token, &found, tensors, own);
            for (entry, &id) in exact.iter_mut().zip(&found) {
                let skips = self.zero_expert_type == ZeroExpert::Skip;
                if skips && id >= experts - self.zero_experts {
                    *entry = (0.0, 0.0);
                }
            }
            for ((j, (exact, bound)), &w) in exact.into_iter().enumerate().zip(&weights[here]) {
                let index = t * self.top_k + j;
                let off = (f64::from(w) - exact).abs();
                if off.is_nan() || off > bound {
                    let text = format!("token {t}, entry {j}: found {w}, exact {exact:.9}");
                    wrong.weights.push((index, text));
                }
            }
        }
        Ok(wrong)
    }
}

/// Compares the ids of one token. In the order of their selection values, each must be a best one
/// of the remaining experts: producers order ids by selection value, by weight or not at all.
fn compare_ids(
    token: &Token,
    found: &[i32],
    start: usize,
    wrong: &mut Vec<(usize, String)>,
) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(found.len());
    for (j, &id) in found.iter().enumerate() {
        let known = usize::try_from(id).ok().filter(|&id| id < token.choice.len());
        let Some(id) = known.filter(|id| !chosen.contains(id)) else {
            let at = start + j;
            wrong.push((at, format!("entry {at}: {id} is no expert, or was chosen before")));
            return chosen;
        };
        chosen.push(id);
    }
    let mut order: Vec<usize> = (0..chosen.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (chosen[a], chosen[b]);
        token.choice[b].total_cmp(&token.choice[a]).then(a.cmp(&b))
    });
    let mut taken: Vec<usize> = Vec::with_capacity(found.len());
    for j in order {
        let id = chosen[j];
        let mut refuse = |text: String| {
            wrong.push((start + j, format!("entry {}: {text}", start + j)));
        };
        let best = largest(&token.choice, &taken).unwrap_or(id);
        let (mine, other) = (token.choice[id], token.choice[best]);
        let decided = !token.close_groups && id != best;
        if decided && other - mine > token.slack[id] + token.slack[best] {
            refuse(format!("expert {id} chosen, expert {best} has a higher score"));
        }
        taken.push(id);
    }
    chosen
}
