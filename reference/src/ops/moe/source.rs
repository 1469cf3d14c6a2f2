//! The layer of a case, with everything needed to recompute its stages.

use super::MoeConfig;
use crate::Result;
use crate::moe::layer::{Layer, Routed};
use crate::num::dims::Shape;
use crate::ops::case::Case;
use crate::ops::layer::SHARED;
use crate::ops::quant::source::Source as Matrices;
use crate::ops::routing::stated_or_routed;
use crate::products::schedule::{Schedule, ScheduleChoice};
use crate::weight::Weight;

/// The parts that a [`Layer`] and its [`Routed`] borrow: a `moe` case's matrices, expert map and
/// routing.
pub struct Source<'c> {
    config: &'c MoeConfig,
    w13: Vec<Weight<'c>>,
    w2: Vec<Weight<'c>>,
    /// The permutations of the case if they sort, otherwise stable ones.
    orders: [Option<Vec<Vec<u32>>>; 2],
    map: Option<Vec<i32>>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
    has_shared: bool,
}

impl<'c> Source<'c> {
    /// Reads the inputs; uses the routing of the case if it has one.
    ///
    /// # Errors
    /// Returns an error for invalid weights, and without a routing or logits.
    pub fn new(case: &'c Case<'c>, config: &'c MoeConfig) -> Result<Self> {
        let (h, i) = (config.hidden_size, config.intermediate_size);
        let part = |prefix, shape| -> Result<_> {
            let matrices = Matrices::new(case, &config.quant, prefix, shape);
            let weights = matrices.weights()?;
            let orders = matrices.orders(&weights)?;
            Ok((weights, orders))
        };
        let (w13, order13) = part("w13_", Shape::new(h, config.w13_size_n()))?;
        let (w2, order2) = part("w2_", Shape::new(i, h))?;
        let (topk_ids, mut topk_weights) =
            stated_or_routed(case, &config.router(), config.num_experts)?;
        if config.rules.router_weight_on_x {
            // x has them already.
            topk_weights.fill(1.0);
        }
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        let has_shared = case.inputs.contains_key(SHARED);
        let orders = [order13, order2];
        Ok(Self { config, w13, w2, orders, map, topk_ids, topk_weights, has_shared })
    }

    /// Whether `y` contains a shared expert's output.
    pub(crate) fn has_shared(&self) -> bool {
        self.has_shared
    }

    /// The layer.
    pub fn layer(&self) -> Layer<'_> {
        let c = self.config;
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [self.orders[0].as_deref(), self.orders[1].as_deref()],
            num_experts: c.num_experts,
            expert_map: self.map.as_deref(),
            activation: c.definition(),
            dtype: c.quant.dtype,
            input_dtype: c.quant.input_dtype,
            router_weight_on_input: c.apply_router_weight_on_input,
        }
    }

    /// The routing of the tokens.
    pub fn routed(&self) -> Routed<'_> {
        Routed {
            top_k: self.config.top_k,
            topk_ids: &self.topk_ids,
            topk_weights: &self.topk_weights,
        }
    }

    /// The schedule of `choice` for w13 (`which` 0) or w2 (1).
    pub(crate) fn schedule(&self, choice: &ScheduleChoice, which: usize) -> Result<Schedule> {
        let weights = if which == 0 { &self.w13 } else { &self.w2 };
        let quant = &self.config.quant;
        choice.resolve(weights, quant.dtype, quant.input_dtype.unwrap_or(quant.dtype))
    }
}
