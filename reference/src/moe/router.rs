//! Router logits to expert ids and weights.
//!
//! Facts: vLLM 0.21.0, `fused_moe/router/` and the operators `topk_softmax`, `topk_sigmoid` and
//! `grouped_topk`. Experts are selected by score plus correction bias and weighted by score; among
//! equal experts the lower id comes first. Grouped top-k keeps the `topk_group` best groups (by the
//! sum of their two best biased scores, or by the best score without a bias) and selects experts in
//! them. In grouped top-k, scores of 16-bit logits are 16-bit values; otherwise everything is f32.
//!
//! A logit of −∞ masks its expert: its score is 0, and it is chosen after every expert of a larger
//! (biased) score. The softmax of a token whose experts are all masked is NaN, and refused.

use ndarray::{Array2, ArrayView2};

use super::ScoringFunc;
use super::routed::Routed;
use crate::moe::math;
use crate::num::array::row_major;
use crate::num::scalar::{ScalarType, round_to};
use crate::{Error, Result};

/// Grouped top-k: groups first, then experts in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups of consecutive experts.
    pub num_expert_group: usize,
    /// Groups kept.
    pub topk_group: usize,
}

/// How a row of logits becomes expert ids and weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Router<'a> {
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Present for grouped top-k.
    pub groups: Option<Groups>,
    /// Factor on the weights, after renormalizing.
    pub routed_scaling_factor: f32,
    /// `e_score_correction_bias`, one per expert: added for the selection only.
    pub bias: Option<&'a [f32]>,
    /// The logits' own type: [`ScalarType::FLOAT32`], `FLOAT16` or `BFLOAT16`.
    pub logits_type: ScalarType,
}

/// The result of routing, `[M, top_k]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Router weights.
    pub topk_weights: Array2<f32>,
    /// Global expert ids.
    pub topk_ids: Array2<i32>,
    /// Upstream's `token_expert_indices`: entry (token, j) is j · M + token.
    pub token_expert_indices: Array2<i32>,
}

impl Routing {
    /// Weights and ids of rows of `top_k` entries, row-major; not copied.
    ///
    /// # Errors
    /// [`Error::Size`] for no entries in a row; [`Error::Shape`] if they do not fill
    /// the same number of rows.
    pub fn from_rows(top_k: usize, topk_weights: Vec<f32>, topk_ids: Vec<i32>) -> Result<Self> {
        let rows = Routed::from_rows(top_k, &topk_ids, &topk_weights)?.topk_ids().nrows();
        Ok(Self::of_rows(rows, top_k, topk_weights, topk_ids))
    }

    /// [`Routing::from_rows`] of `rows` whole rows.
    pub(super) fn of_rows(rows: usize, top_k: usize, weights: Vec<f32>, ids: Vec<i32>) -> Self {
        let shape = (rows, top_k);
        let indices = token_expert_indices(rows, top_k);
        Self {
            topk_weights: Array2::from_shape_vec(shape, weights).expect("whole rows"),
            topk_ids: Array2::from_shape_vec(shape, ids).expect("whole rows"),
            token_expert_indices: Array2::from_shape_vec(shape, indices).expect("whole rows"),
        }
    }

    /// Where each token goes, as a layer takes it.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::NotContiguous`] if the arrays were replaced by others that differ in
    /// shape or are not row-major.
    pub fn routed(&self) -> Result<Routed<'_>> {
        Routed::new(self.topk_ids.view(), self.topk_weights.view())
    }
}

/// The order of equal experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ties {
    Lower,
    Higher,
}

/// The reference's scores of one token.
pub(crate) struct Scores {
    /// Weight before renormalizing.
    pub(crate) scores: Vec<f32>,
    /// Selection values.
    pub(crate) choice: Vec<f32>,
}

impl<'a> Router<'a> {
    /// Softmax or sigmoid and top-k of f32 logits, without groups, bias or factor.
    pub fn new(scoring_func: ScoringFunc, top_k: usize, renormalize: bool) -> Self {
        Self {
            scoring_func,
            top_k,
            renormalize,
            groups: None,
            routed_scaling_factor: 1.0,
            bias: None,
            logits_type: ScalarType::FLOAT32,
        }
    }

    /// The type that scores are stored in.
    pub(crate) fn score_type(&self) -> ScalarType {
        if self.groups.is_some() { self.logits_type } else { ScalarType::FLOAT32 }
    }

    /// Checks that the sizes fit `logits` `[M, experts]`, no logit is NaN or +∞, and the bias is finite.
    ///
    /// # Errors
    /// [`Error::Size`] and [`Error::Unsupported`] for sizes; [`Error::Shape`] if `logits` is not a
    /// whole number of rows or the bias has another length; [`Error::Value`] at a logit that is NaN
    /// or +∞, a token whose logits are all −∞ under a softmax, and a bias that is not finite (also
    /// in the scores' type).
    pub fn validate(&self, logits: ArrayView2<'_, f32>) -> Result<()> {
        let experts = logits.ncols();
        self.validate_rows(&row_major(logits), experts)
    }

    /// [`Router::validate`] of rows of `experts` logits.
    pub(crate) fn validate_rows(&self, logits: &[f32], experts: usize) -> Result<()> {
        let size = |what: &str, found: usize, rule: String| Err(Error::size(what, found, rule));
        if experts == 0 || self.top_k == 0 || self.top_k > experts {
            return size("top_k", self.top_k, format!("1 to the number of experts, {experts}"));
        }
        if i32::try_from(experts).is_err() || i32::try_from(logits.len()).is_err() {
            return size("router logits", logits.len(), "fewer than 2^31".to_owned());
        }
        if !logits.len().is_multiple_of(experts) {
            let rule = format!("rows of {experts} experts");
            return Err(Error::shape("router_logits", &[logits.len()], rule));
        }
        if !self.routed_scaling_factor.is_finite() {
            let found = self.routed_scaling_factor;
            return Err(Error::size("routed_scaling_factor", found, "a finite f32"));
        }
        if let Some(g) = self.groups {
            let n = g.num_expert_group;
            if n == 0 || !experts.is_multiple_of(n) {
                return size("num_expert_group", n, format!("a divisor of {experts} experts"));
            }
            if g.topk_group == 0 || g.topk_group > n {
                return size("topk_group", g.topk_group, format!("1 to {n}"));
            }
            let reachable = g.topk_group * (experts / n);
            if self.top_k > reachable {
                return size("top_k", self.top_k, format!("the {reachable} experts of the groups"));
            }
            if self.bias.is_some() && experts / n < 2 {
                let reason = "the score of a group is the sum of its two best experts";
                return Err(Error::unsupported("a group of one expert with a bias", reason));
            }
        }
        if let Some(i) = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
            let at = [i / experts, i % experts];
            let rule = "a finite number, or -inf for a masked expert";
            return Err(Error::value("router_logits", &at, logits[i], rule));
        }
        if self.scoring_func == ScoringFunc::Softmax {
            let masked = |row: &[f32]| row.iter().all(|x| *x == f32::NEG_INFINITY);
            if let Some(row) = logits.chunks_exact(experts).position(masked) {
                let found = "-inf for every expert";
                let rule = "a finite logit in each row, since the softmax of none is NaN";
                return Err(Error::value("router_logits", &[row], found, rule));
            }
        }
        if let Some(bias) = self.bias {
            if bias.len() != experts {
                let rule = format!("[{experts}]");
                return Err(Error::shape("e_score_correction_bias", &[bias.len()], rule));
            }
            let ty = self.score_type();
            if let Some(i) = bias.iter().position(|&b| !round_to(ty, b).is_finite()) {
                let rule = format!("a number that is finite as {ty}");
                return Err(Error::value("e_score_correction_bias", &[i], bias[i], rule));
            }
        }
        Ok(())
    }

    /// Routes every row of `logits` `[M, experts]` (16-bit logits widened to f32).
    ///
    /// # Errors
    /// As [`Router::validate`].
    ///
    /// ```
    /// use marlinspike::moe::{ScoringFunc, router::Router};
    /// use ndarray::array;
    ///
    /// let router = Router::new(ScoringFunc::Softmax, 2, true);
    /// let routing = router.route(array![[0.0f32, 3.0, 1.0], [2.0, 2.0, 1.0]].view())?;
    /// assert_eq!(routing.topk_ids, array![[1, 2], [0, 1]]);
    /// assert_eq!(routing.topk_weights.row(1), array![0.5, 0.5]);
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn route(&self, logits: ArrayView2<'_, f32>) -> Result<Routing> {
        let experts = logits.ncols();
        self.route_with(&row_major(logits), experts, Ties::Lower)
    }

    pub(crate) fn route_with(&self, logits: &[f32], experts: usize, ties: Ties) -> Result<Routing> {
        self.validate_rows(logits, experts)?;
        let rows = logits.len() / experts;
        let mut topk_weights = Vec::with_capacity(rows * self.top_k);
        let mut topk_ids = Vec::with_capacity(rows * self.top_k);
        for row in logits.chunks_exact(experts) {
            let scores = self.scores(row);
            let ids = self.select(&scores, ties);
            topk_weights.extend(self.weights(&scores, &ids));
            topk_ids.extend(ids.iter().map(|&id| id as i32));
        }
        Ok(Routing::of_rows(rows, self.top_k, topk_weights, topk_ids))
    }

    /// The scores of one token. Softmax: m = largest logit, eᵢ = exp(xᵢ − m), s = Σ eᵢ from the
    /// first expert on, eᵢ · (1 / s).
    pub(crate) fn scores(&self, row: &[f32]) -> Scores {
        let ty = self.score_type();
        let mut scores: Vec<f32> = match self.scoring_func {
            ScoringFunc::Sigmoid => row.iter().map(|&x| math::sigmoid(x)).collect(),
            ScoringFunc::Softmax => {
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let e: Vec<f32> = row.iter().map(|&x| math::exp(x - max)).collect();
                let reciprocal = 1.0 / e.iter().sum::<f32>();
                e.iter().map(|e| e * reciprocal).collect()
            }
        };
        for s in &mut scores {
            *s = round_to(ty, *s);
        }
        let choice = match self.bias {
            Some(bias) => {
                let biased = |(s, &b): (&f32, &f32)| round_to(ty, s + round_to(ty, b));
                scores.iter().zip(bias).map(biased).collect()
            }
            None => scores.clone(),
        };
        Scores { scores, choice }
    }

    /// The ids of one token, best first.
    pub(crate) fn select(&self, scores: &Scores, ties: Ties) -> Vec<usize> {
        self.select_by(scores, ties, |choice| self.group_score(choice))
    }

    /// As [`Router::select`], with another score of a group.
    pub(crate) fn select_by(
        &self,
        scores: &Scores,
        ties: Ties,
        group_score: impl Fn(&[f32]) -> f32,
    ) -> Vec<usize> {
        let choice = &scores.choice;
        let mut experts: Vec<usize> = (0..choice.len()).collect();
        if let Some(g) = self.groups {
            let per = choice.len() / g.num_expert_group;
            let values: Vec<f32> = choice.chunks_exact(per).map(group_score).collect();
            let mut groups: Vec<usize> = (0..g.num_expert_group).collect();
            sort(&mut groups, &values, ties);
            groups.truncate(g.topk_group);
            experts.retain(|e| groups.contains(&(e / per)));
        }
        sort(&mut experts, choice, ties);
        experts.truncate(self.top_k);
        experts
    }

    pub(crate) fn group_score(&self, choice: &[f32]) -> f32 {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &c in choice {
            if c > first {
                (first, second) = (c, first);
            } else if c > second {
                second = c;
            }
        }
        match self.bias {
            Some(_) => round_to(self.score_type(), first + second),
            None => first,
        }
    }

    /// The weights of the chosen `ids`: divided by their sum (added in the order of the ids) if it
    /// is positive, then multiplied by the routed scaling factor.
    pub(crate) fn weights(&self, scores: &Scores, ids: &[usize]) -> Vec<f32> {
        let mut weights: Vec<f32> = ids.iter().map(|&id| scores.scores[id]).collect();
        if self.renormalize {
            let sum: f32 = weights.iter().sum();
            let sum = if sum > 0.0 { sum } else { 1.0 };
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        weights.iter_mut().for_each(|w| *w *= self.routed_scaling_factor);
        weights
    }
}

/// Upstream's `token_expert_indices` [rows, top_k]: entry (token, j) is j · rows + token.
pub fn token_expert_indices(rows: usize, top_k: usize) -> Vec<i32> {
    let entry = |token: usize, j: usize| (j * rows + token) as i32;
    (0..rows).flat_map(|token| (0..top_k).map(move |j| entry(token, j))).collect()
}

/// Sorts ids by falling value; `sort_by` is stable, so equal values keep the order of the ids.
fn sort(ids: &mut [usize], values: &[f32], ties: Ties) {
    if ties == Ties::Higher {
        ids.reverse();
    }
    // Zeros of both signs are equal; there is no NaN.
    ids.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap_or(std::cmp::Ordering::Equal));
}
