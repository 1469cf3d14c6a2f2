//! A case's layer, with everything that recomputes its stages.

use crate::act_order;
use crate::case::{Case, MoeConfig, ScheduleChoice};
use crate::check::weights::Source as Matrices;
use crate::dims::Shape;
use crate::gemm::schedule::Schedule;
use crate::moe::activation::Definition;
use crate::moe::layer::{Layer, Routed};
use crate::moe::router::Router;
use crate::weight::Weight;
use crate::{Error, Result};

/// The parts that a [`Layer`] and its [`Routed`] borrow.
pub(super) struct Source<'c> {
    config: &'c MoeConfig,
    w13: Vec<Weight<'c>>,
    w2: Vec<Weight<'c>>,
    /// The case's own permutations where they sort, else stable ones.
    orders: [Option<Vec<Vec<u32>>>; 2],
    map: Option<Vec<i32>>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl<'c> Source<'c> {
    pub(super) fn new(case: &'c Case<'c>, config: &'c MoeConfig) -> Result<Self> {
        let (h, i) = (config.hidden_size, config.intermediate_size);
        let part = |prefix, shape| -> Result<_> {
            let matrices = Matrices::new(case, &config.quant, prefix, shape);
            let weights = matrices.weights()?;
            let orders = matrices.orders(&weights)?;
            Ok((weights, orders))
        };
        let (w13, order13) = part("w13_", Shape::new(h, config.w13_size_n()))?;
        let (w2, order2) = part("w2_", Shape::new(i, h))?;
        let routed = match case.inputs.get("router_logits") {
            Some(logits) => {
                let logits = logits.elements::<f32>();
                Some(Router::from_moe(config).route(&logits, config.num_experts)?)
            }
            None => None,
        };
        let lacking = |what: &str| Error::missing(what, "a layer without router_logits");
        let topk_ids = match (case.output("topk_ids"), &routed) {
            (Some(ids), _) => ids.elements::<i32>().into_owned(),
            (None, Some(routed)) => routed.topk_ids.clone(),
            (None, None) => return Err(lacking("out.topk_ids")),
        };
        let topk_weights = match (case.output("topk_weights"), routed) {
            (Some(weights), _) => weights.elements::<f32>().into_owned(),
            (None, Some(routed)) => routed.topk_weights,
            (None, None) => return Err(lacking("out.topk_weights")),
        };
        let orders = [or_stable(order13, &w13), or_stable(order2, &w2)];
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        Ok(Self { config, w13, w2, orders, map, topk_ids, topk_weights })
    }

    pub(super) fn layer(&self) -> Layer<'_> {
        let c = self.config;
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [self.orders[0].as_deref(), self.orders[1].as_deref()],
            num_experts: c.num_experts,
            expert_map: self.map.as_deref(),
            activation: Definition::new(c.activation),
            dtype: c.quant.dtype,
            input_dtype: c.quant.input_dtype,
            router_weight_on_input: c.apply_router_weight_on_input,
        }
    }

    pub(super) fn routed(&self) -> Routed<'_> {
        Routed {
            top_k: self.config.top_k,
            topk_ids: &self.topk_ids,
            topk_weights: &self.topk_weights,
        }
    }

    /// The schedule that is meant for w13 (`which` 0) or w2 (1).
    pub(super) fn schedule(&self, choice: &ScheduleChoice, which: usize) -> Result<Schedule> {
        match choice {
            ScheduleChoice::Given(schedule) => Ok((**schedule).clone()),
            ScheduleChoice::Canonical => {
                let how = self.layer().canonical()?;
                Ok([how.w13, how.w2][which].clone())
            }
        }
    }
}

/// Stated permutations, or the stable ones of matrices with a `g_idx`.
fn or_stable(stated: Option<Vec<Vec<u32>>>, weights: &[Weight<'_>]) -> Option<Vec<Vec<u32>>> {
    let stable = |w: &Weight<'_>| match &w.groups {
        crate::weight::Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
        crate::weight::Groups::Uniform(_) => None,
    };
    stated.or_else(|| weights.iter().map(stable).collect())
}
