//! Router logits from hidden states.

use std::ops::Range;

use marlinspike::moe::block::{self, AfterLogits, Near};
use marlinspike::moe::families::RoutingRule;
use marlinspike::ndarray::ArrayView2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};
use rayon::prelude::*;

use super::dense::{Dense, compensated, round, values};
use super::stages::Stages;
use crate::model::block::BlockParts;
use crate::run::input::Routing;
use crate::run::output::{LogitsReport, Outside, WrongLogit};

/// The router of a layer. Its weight holds the experts of each group, then the shared experts.
#[derive(Debug, Clone)]
pub struct Router {
    input: Stages,
    weight: Dense,
    bias: Option<Vec<f32>>,
    after: AfterLogits,
    is_f32: bool,
    /// Logits of a token: the experts of its group, and zero experts.
    scores: usize,
    /// Features of the hidden states.
    hidden: usize,
}

impl Router {
    /// The router of a block, if its files have one; `input` are the stages before it.
    ///
    /// # Errors
    /// [`Error::Shape`] for a weight or bias that does not fit `scores` experts of a group, zero
    /// experts included, and `hidden` features.
    pub(crate) fn new(
        parts: &BlockParts,
        input: Stages,
        routing: &RoutingRule,
        [scores, hidden]: [usize; 2],
    ) -> Result<Option<Self>> {
        let Some(tensor) = &parts.tensors.router_weight else { return Ok(None) };
        let rows = scores * routing.token_groups + routing.shared_experts;
        tensor.expect_shape(&[rows, input.width()])?;
        let weight = Dense::new(tensor, input.width())?;
        let bias = |t: &Tensor<'_>| -> Result<Vec<f32>> {
            t.expect_shape(&[scores])?;
            values(t)
        };
        let bias = parts.tensors.router_bias.as_ref().map(bias).transpose()?;
        let after = AfterLogits {
            multiplier: parts.numbers.logit_multiplier,
            softcap: parts.numbers.logit_softcap,
        };
        let is_f32 = parts.logits_are_f32;
        Ok(Some(Self { input, weight, bias, after, is_f32, scores, hidden }))
    }

    /// The router of hidden states with `size_k` features, of which the last have weight 0.
    pub(super) fn padded(self, size_k: usize) -> Self {
        Self { weight: self.weight.padded(size_k), hidden: size_k, ..self }
    }

    /// The type of the logits for hidden states of type `x`.
    fn ty(&self, x: ScalarType) -> ScalarType {
        if self.is_f32 { ScalarType::FLOAT32 } else { x }
    }

    /// Rows of the weight for a token of `group`.
    fn group(&self, group: usize) -> Range<usize> {
        group * self.scores..(group + 1) * self.scores
    }

    /// Logits of rows of hidden states of type `ty`; `groups` are the tokens' groups of experts, if
    /// the block has several.
    pub(crate) fn logits(&self, x: &[f32], ty: ScalarType, groups: Option<&[usize]>) -> Vec<f32> {
        let ty = self.ty(ty);
        let k = self.weight.size_k;
        let row = |(t, x): (usize, &[f32])| -> Vec<f32> {
            let x = self.input.row(x.to_vec(), ty, compensated);
            let rows = self.group(groups.map_or(0, |g| g[t]));
            let weight = &self.weight.values[rows.start * k..rows.end * k];
            let rows = weight.chunks_exact(k).enumerate();
            rows.map(|(n, w)| self.finish(round(ty, compensated(&x, w)), n, ty)).collect()
        };
        x.par_chunks_exact(self.hidden).enumerate().flat_map_iter(row).collect()
    }

    /// What follows the product of expert `n`.
    fn finish(&self, mut logit: f32, n: usize, ty: ScalarType) -> f32 {
        if let Some(bias) = &self.bias {
            logit = round(ty, f64::from(logit) + f64::from(bias[n]));
        }
        if let Some(factor) = self.after.multiplier.map(f64::from) {
            logit = round(ty, f64::from(logit) * factor);
        }
        if let Some(cap) = self.after.softcap.map(f64::from) {
            logit = round(ty, cap * (f64::from(logit) / cap).tanh());
        }
        logit
    }

    /// Exact logits of one token for rows of the weight, with the largest error of a router whose
    /// products and sums are f32.
    fn near(&self, x: &[f32], rows: Range<usize>, bias: bool, ty: ScalarType) -> Result<Vec<Near>> {
        let k = self.weight.size_k;
        let x = x.iter().map(|&x| Near::point(x.into())).collect();
        let x = self.input.near(x, ty);
        let weight = &self.weight.values[rows.start * k..rows.end * k];
        let weight: Vec<f64> = weight.iter().map(|&w| w.into()).collect();
        let weight = ArrayView2::from_shape((rows.len(), k), &weight)
            .map_err(|_| Error::shape("the router's weight", &[rows.len(), k], "[E, H]"))?;
        let own = self.bias.as_ref().filter(|_| bias);
        let bias: Option<Vec<f64>> = own.map(|b| b.iter().map(|&b| b.into()).collect());
        Ok(block::logits(&x, weight, bias.as_deref(), self.after, ty))
    }

    /// Logits of the shared experts `[M, shared_experts]`, whose rows of the weight are last.
    ///
    /// # Errors
    /// [`Error::Shape`]; never for a router of [`Self::new`].
    pub(crate) fn shared_logits(
        &self,
        x: &[f32],
        ty: ScalarType,
        shared_experts: usize,
    ) -> Result<Vec<Near>> {
        let (ty, n) = (self.ty(ty), self.weight.size_n());
        let mut all = Vec::with_capacity(x.len() / self.hidden * shared_experts);
        for x in x.chunks_exact(self.hidden) {
            all.extend(self.near(x, n - shared_experts..n, false, ty)?);
        }
        Ok(all)
    }

    /// Logits that no router with products and sums in f32 gives: their number, and the first with
    /// its token, expert and exact value.
    ///
    /// # Errors
    /// [`Error::Shape`]; never for logits of [`Self::logits`].
    pub(crate) fn outside(
        &self,
        x: &[f32],
        ty: ScalarType,
        groups: Option<&[usize]>,
        logits: &[f32],
    ) -> Result<Outside> {
        let ty = self.ty(ty);
        let mut outside = Outside::default();
        let rows = x.chunks_exact(self.hidden).zip(logits.chunks_exact(self.scores));
        for (m, (x, found)) in rows.enumerate() {
            let near = self.near(x, self.group(groups.map_or(0, |g| g[m])), true, ty)?;
            for (e, (near, found)) in near.iter().zip(found).enumerate() {
                let accepts = || near.interval().rounded(ty).contains(f64::from(*found));
                if near.error.is_finite() && !accepts() {
                    outside.count += 1;
                    let wrong = WrongLogit { at: [m, e], found: *found, exact: near.exact };
                    outside.first.get_or_insert(wrong);
                }
            }
        }
        Ok(outside)
    }

    /// Computes the logits that `routing` lacks from hidden states `x` of type `ty`.
    ///
    /// # Errors
    /// As [`Self::outside`].
    pub(crate) fn fill(
        &self,
        x: &[f32],
        ty: ScalarType,
        groups: Option<&[usize]>,
        routing: &mut Routing,
        check: bool,
    ) -> Result<Option<LogitsReport>> {
        let Routing::Logits(logits) = routing else { return Ok(None) };
        if !logits.is_empty() {
            return Ok(None);
        }
        *logits = self.logits(x, ty, groups);
        let outside = check.then(|| self.outside(x, ty, groups, logits)).transpose()?;
        Ok(Some(LogitsReport { outside }))
    }
}
