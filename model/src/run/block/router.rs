//! Router logits from hidden states.

use marlinspike::moe::block::{self, AfterLogits, Near};
use marlinspike::ndarray::ArrayView2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::{Error, Result};
use rayon::prelude::*;

use super::dense::{Dense, compensated, round, values};
use crate::model::block::BlockParts;
use crate::run::input::Routing;
use crate::run::output::{LogitsReport, Outside, WrongLogit};

/// The router of a layer.
#[derive(Debug, Clone)]
pub struct Router {
    weight: Dense,
    bias: Option<Vec<f32>>,
    softcap: Option<f32>,
    is_f32: bool,
}

impl Router {
    /// The router of a block, if its files have one.
    ///
    /// # Errors
    /// [`Error::Shape`] for a weight or bias that does not fit `scores` experts, zero experts
    /// included, and `hidden` features.
    pub fn new(parts: &BlockParts, scores: usize, hidden: usize) -> Result<Option<Self>> {
        let Some(tensor) = &parts.tensors.router_weight else { return Ok(None) };
        tensor.expect_shape(&[scores, hidden])?;
        let weight = Dense::new(tensor, hidden)?;
        let bias = |t: &Tensor<'_>| -> Result<Vec<f32>> {
            t.expect_shape(&[scores])?;
            values(t)
        };
        let bias = parts.tensors.router_bias.as_ref().map(bias).transpose()?;
        Ok(Some(Self { weight, bias, softcap: parts.softcap, is_f32: parts.logits_are_f32 }))
    }

    /// The router of hidden states with `size_k` features, of which the last have weight 0.
    pub(super) fn padded(self, size_k: usize) -> Self {
        Self { weight: self.weight.padded(size_k), ..self }
    }

    /// The type of the logits for hidden states of type `x`.
    fn ty(&self, x: ScalarType) -> ScalarType {
        if self.is_f32 { ScalarType::FLOAT32 } else { x }
    }

    /// Logits of rows of hidden states of type `ty`.
    pub fn logits(&self, x: &[f32], ty: ScalarType) -> Vec<f32> {
        let ty = self.ty(ty);
        let row = |x: &[f32]| -> Vec<f32> {
            let mut logits = self.weight.row(x, ty, compensated);
            for (n, logit) in logits.iter_mut().enumerate() {
                if let Some(bias) = &self.bias {
                    *logit = round(ty, f64::from(*logit) + f64::from(bias[n]));
                }
                if let Some(cap) = self.softcap.map(f64::from) {
                    *logit = round(ty, cap * (f64::from(*logit) / cap).tanh());
                }
            }
            logits
        };
        x.par_chunks_exact(self.weight.size_k).flat_map_iter(row).collect()
    }

    /// Logits that no router with products and sums in f32 gives: their number, and the first with
    /// its token, expert and exact value.
    ///
    /// # Errors
    /// [`Error::Shape`]; never for logits of [`Self::logits`].
    pub fn outside(&self, x: &[f32], ty: ScalarType, logits: &[f32]) -> Result<Outside> {
        let ty = self.ty(ty);
        let (n, k) = (self.weight.size_n(), self.weight.size_k);
        let weight: Vec<f64> = self.weight.values.iter().map(|&w| w.into()).collect();
        let weight = ArrayView2::from_shape((n, k), &weight)
            .map_err(|_| Error::shape("the router's weight", &[n, k], "[E, H]"))?;
        let bias: Option<Vec<f64>> =
            self.bias.as_ref().map(|b| b.iter().map(|&b| b.into()).collect());
        let mut outside = Outside::default();
        for (m, (x, found)) in x.chunks_exact(k).zip(logits.chunks_exact(n)).enumerate() {
            let x: Vec<Near> = x.iter().map(|&x| Near::point(x.into())).collect();
            let after = AfterLogits { softcap: self.softcap, ..AfterLogits::default() };
            let near = block::logits(&x, weight, bias.as_deref(), after, ty);
            for (e, (near, found)) in near.iter().zip(found).enumerate() {
                if !near.interval().rounded(ty).contains(f64::from(*found)) {
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
        routing: &mut Routing,
        check: bool,
    ) -> Result<Option<LogitsReport>> {
        let Routing::Logits(logits) = routing else { return Ok(None) };
        if !logits.is_empty() {
            return Ok(None);
        }
        *logits = self.logits(x, ty);
        let outside = check.then(|| self.outside(x, ty, logits)).transpose()?;
        Ok(Some(LogitsReport { outside }))
    }
}
