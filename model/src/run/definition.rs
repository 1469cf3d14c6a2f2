//! The definition of a layer of the int4 path, for comparison with its output.

use marlinspike::Result;
use marlinspike::moe::families::RouterTensors;
use marlinspike::moe::layer::Routed;
use marlinspike::num::array::rows_of;
use marlinspike::w4a8::moe::GatedActivation;
use marlinspike::w4a8::scalar::Scalar;
use marlinspike::w4a8::{self, LayerRouter, Values, moe};

use super::input::{Inputs, Routing};
use super::layer::Layer;
use super::routing::{self, RoutingReport};

impl Layer<'_> {
    /// The routing of `inputs`; with `check`, compared with a second implementation.
    ///
    /// # Errors
    /// For logits that cannot be routed.
    pub(super) fn routing(
        &self,
        inputs: &Inputs<Values>,
        check: bool,
    ) -> Result<Option<RoutingReport>> {
        let (Self::Moe(moe), Routing::Logits(logits)) = (self, &inputs.routing) else {
            return Ok(None);
        };
        let (router, experts) = (&moe.config().router, moe.config().num_experts);
        let route = || router.route(rows_of("router_logits", logits, experts)?);
        let made = check.then(route).transpose()?;
        let (rule, tensors) = match router {
            LayerRouter::Operator(router) => {
                (routing::plain_rule(router), RouterTensors::default())
            }
            LayerRouter::Family(family) => (family.rule().clone(), family.tensors()),
        };
        let source = "the layer's file".to_owned();
        let given = (&logits[..], experts);
        RoutingReport::new(source, rule, tensors, given, made).map(Some)
    }

    /// The output by the scalar definition, value by value.
    ///
    /// # Errors
    /// As the layer itself.
    pub fn definition(&self, inputs: &Inputs<Values>) -> Result<Values> {
        let moe = match self {
            Self::Linear(linear) => {
                return w4a8::linear(&Scalar, &inputs.x, linear.weight(), linear.rounding);
            }
            Self::Moe(moe) => moe,
        };
        let config = moe.config();
        let (w13, w2): (Vec<_>, Vec<_>) = (moe.w13().iter().collect(), moe.w2().iter().collect());
        let definition = moe::Layer {
            w13: &w13,
            w2: &w2,
            num_experts: config.num_experts,
            expert_map: config.expert_map.as_deref(),
            activation: config.activation,
            rounding: config.rounding,
            router_weight_on_input: config.router_weight_on_input,
            mode: config.mode,
        };
        let routing;
        let routed = match &inputs.routing {
            Routing::Given { top_k, ids, weights } => Routed::from_rows(*top_k, ids, weights)?,
            Routing::Logits(logits) => {
                let logits = rows_of("router_logits", logits, config.num_experts)?;
                routing = config.router.route(logits)?;
                routing.routed()?
            }
        };
        match &config.router {
            LayerRouter::Operator(_) => definition.forward(&Scalar, &inputs.x, routed),
            LayerRouter::Family(family) => {
                let kind = GatedActivation::of_family(family.activation())?;
                definition.forward_activated(&Scalar, kind, &inputs.x, routed)
            }
        }
    }
}
