//! The parts of a loaded layer.

use marlinspike::method::Quantizer;
use marlinspike::moe::layer::Layer;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

use crate::model::routing::MoeRouting;

/// The weights of a layer, and how its activations are quantized.
#[derive(Debug)]
pub(in crate::run) enum LayerWeights {
    Linear { weight: Box<Weight<'static>>, quantizer: Quantizer },
    Moe(Box<Moe>),
}

/// A layer of experts.
#[derive(Debug)]
pub(in crate::run) struct Moe {
    pub(in crate::run) w13: Vec<Weight<'static>>,
    pub(in crate::run) w2: Vec<Weight<'static>>,
    pub(in crate::run) quantizers: [Quantizer; 2],
    pub(in crate::run) multipliers: Option<Vec<[f32; 2]>>,
    pub(in crate::run) routing: MoeRouting,
}

impl Moe {
    /// The layer, with activations and output of type `dtype`.
    pub(in crate::run) fn layer(&self, dtype: ScalarType) -> Layer<'_> {
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [None; 2],
            num_experts: self.w13.len(),
            expert_map: None,
            activation: self.routing.activation,
            dtype,
            input_dtype: None,
            router_weight_on_input: self.routing.rule.apply_router_weight_on_input,
        }
    }
}
