//! The parts of a loaded layer.

use marlinspike::method::Quantizer;
use marlinspike::weight::Weight;

use crate::model::routing::MoeRouting;

/// The weights of a layer, and how its activations are quantized.
#[derive(Debug)]
pub(super) enum LayerWeights {
    Linear { weight: Box<Weight<'static>>, quantizer: Quantizer },
    Moe(Box<Moe>),
}

/// A layer of experts.
#[derive(Debug)]
pub(super) struct Moe {
    pub(super) w13: Vec<Weight<'static>>,
    pub(super) w2: Vec<Weight<'static>>,
    pub(super) quantizers: [Quantizer; 2],
    pub(super) multipliers: Option<Vec<[f32; 2]>>,
    pub(super) routing: MoeRouting,
    /// The experts of all ranks, and the local index of each, or −1; absent if the layer has all.
    pub(super) shared: Option<Vec<i32>>,
}

impl Moe {
    /// The experts of all ranks.
    pub(super) fn num_experts(&self) -> usize {
        self.shared.as_ref().map_or(self.w13.len(), Vec::len)
    }
}
