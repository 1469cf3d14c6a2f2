//! The definition of a layer of the int4 path, for comparison with its output.

use marlinspike::Result;
use marlinspike::moe::families::{RouterTensors, Tokens};
use marlinspike::moe::layer::Routed;
use marlinspike::num::array::rows_of;
use marlinspike::w4a8::{LayerRouter, Values};

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
        let (router, experts) = (moe.router(), moe.num_experts());
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
        RoutingReport::new(source, rule, (tensors, Tokens::default()), given, made).map(Some)
    }

    /// The output by the scalar definition, value by value.
    ///
    /// # Errors
    /// As the layer itself.
    pub fn definition(&self, inputs: &Inputs<Values>) -> Result<Values> {
        let moe = match self {
            Self::Linear(linear) => {
                return linear.definition(&inputs.x);
            }
            Self::Moe(moe) => moe,
        };
        let routing;
        let routed = match &inputs.routing {
            Routing::Given { top_k, ids, weights } => Routed::from_rows(*top_k, ids, weights)?,
            Routing::Logits(logits) => {
                let logits = rows_of("router_logits", logits, moe.num_experts())?;
                routing = moe.router().route(logits)?;
                routing.routed()?
            }
        };
        moe.definition(&inputs.x, routed)
    }
}
