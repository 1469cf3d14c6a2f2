//! The parts of a loaded layer.

use marlinspike::Result;
use marlinspike::layouts::marlin;
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

impl LayerWeights {
    /// The type of the scales.
    pub(super) fn scale_type(&self) -> ScalarType {
        match self {
            Self::Linear { weight, .. } => weight.scales.ty(),
            Self::Moe(moe) => moe.w13[0].scales.ty(),
        }
    }

    /// Every matrix by [`marlin::in_dtype`].
    pub(super) fn in_dtype(self, dtype: ScalarType) -> Result<Self> {
        let all = |weights: Vec<Weight<'static>>| -> Result<Vec<Weight<'static>>> {
            weights.into_iter().map(|weight| marlin::in_dtype(weight, dtype)).collect()
        };
        Ok(match self {
            Self::Linear { weight, quantizer } => {
                Self::Linear { weight: Box::new(marlin::in_dtype(*weight, dtype)?), quantizer }
            }
            Self::Moe(moe) => {
                let Moe { w13, w2, .. } = *moe;
                Self::Moe(Box::new(Moe { w13: all(w13)?, w2: all(w2)?, ..*moe }))
            }
        })
    }
}

/// A layer of experts.
#[derive(Debug)]
pub(in crate::run) struct Moe {
    pub(in crate::run) w13: Vec<Weight<'static>>,
    pub(in crate::run) w2: Vec<Weight<'static>>,
    pub(in crate::run) quantizers: [Quantizer; 2],
    pub(in crate::run) multipliers: Option<Vec<[f32; 2]>>,
    pub(in crate::run) routing: MoeRouting,
    /// The experts of all ranks, and the local index of each, or −1; absent if the layer has all.
    pub(in crate::run) shared: Option<Vec<i32>>,
}

impl Moe {
    /// The experts of all ranks.
    pub(in crate::run) fn num_experts(&self) -> usize {
        self.shared.as_ref().map_or(self.w13.len(), Vec::len)
    }

    /// The layer, with activations and output of type `dtype`.
    pub(in crate::run) fn layer(&self, dtype: ScalarType) -> Layer<'_> {
        Layer {
            w13: &self.w13,
            w2: &self.w2,
            orders: [None; 2],
            num_experts: self.num_experts(),
            expert_map: self.shared.as_deref(),
            activation: self.routing.activation,
            dtype,
            input_dtype: None,
            router_weight_on_input: self.routing.rule.apply_router_weight_on_input,
        }
    }
}
