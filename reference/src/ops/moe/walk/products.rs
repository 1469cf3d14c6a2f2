//! Judges the products of a layer bit for bit, by the declared schedule or by a known one.

use super::{NAMES, Walk};
use crate::Result;
use crate::judge::OutputReport;
use crate::judge::scheduled::{self, Product};
use crate::num::tensor::Tensor;
use crate::ops::moe::product;
use crate::ops::moe::source::Source;
use crate::products::schedule::ScheduleChoice;

impl Walk<'_> {
    /// Compares a stage with its declared schedule.
    pub(super) fn scheduled(
        &self,
        stage: usize,
        choice: &ScheduleChoice,
        before: &[u16],
        source: &Source<'_>,
    ) -> Result<OutputReport> {
        let bounded =
            || product::expert_product(self.case, self.config, self.declared, NAMES[stage]);
        self.with_product(stage, before, source, |found, product| {
            scheduled::judge(NAMES[stage], found, product, choice, bounded)
        })
    }

    /// Calls `with` with the stage's output and the inputs of its product.
    fn with_product<R>(
        &self,
        stage: usize,
        before: &[u16],
        source: &Source<'_>,
        with: impl FnOnce(&Tensor<'_>, Product<'_>) -> Result<R>,
    ) -> Result<R> {
        let (layer, routed) = (source.layer(), source.routed());
        layer.validate()?;
        let experts = layer.local_experts(routed)?;
        let first = stage == 0;
        let (weights, cols) = match first {
            true => (layer.w13, layer.hidden_size()),
            false => (layer.w2, layer.intermediate_size()),
        };
        let mut rows = layer.quantized(before, cols, weights)?;
        if first {
            rows = rows.to_slots(cols, self.slots_of_x(routed.top_k));
        }
        let product = Product {
            x: &rows.codes,
            input: layer.input_dtype.unwrap_or(layer.dtype),
            dtype: layer.dtype,
            weights,
            expert_of: Some(&experts),
            orders: layer.orders[usize::from(!first)],
            activation_scales: rows.scales.as_deref(),
            router_weights: self.config.weights_product(first).then_some(routed.topk_weights),
        };
        let Some(found) = self.case.output(NAMES[stage]) else {
            return Err(crate::Error::missing(NAMES[stage], "a stage to judge"));
        };
        with(found, product)
    }
}
