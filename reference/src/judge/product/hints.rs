//! Facts about a case besides the product itself.

use crate::layers::TensorParallel;
use crate::weight::Weight;

/// Facts that do not enter the product but may explain a wrong one.
#[derive(Clone, Copy, Default)]
pub(crate) struct Hints<'c> {
    /// Router weight of each row, even for a product that they do not multiply.
    pub(crate) router_weights: Option<&'c [f32]>,
    /// The shard of the matrix.
    pub(crate) tensor_parallel: Option<TensorParallel>,
    /// `in.g_idx` of a matrix whose rows are nevertheless in the order of their groups.
    pub(crate) unused_g_idx: Option<&'c [u32]>,
    /// Whether the layer has an up projection next to the gate.
    pub(crate) is_gated: bool,
    /// Whether the kernel reads scales and bias as they are stored, not in Marlin's order of columns.
    pub(crate) is_unpermuted: bool,
    /// The operation's own known mistakes with the weights.
    pub(crate) mistaken: Option<&'c dyn Fn() -> Vec<Mistaken>>,
}

/// A known mistake of an operation that changes its weights.
pub(crate) struct Mistaken {
    pub(crate) id: &'static str,
    pub(crate) text: String,
    /// One for each part.
    pub(crate) weights: Vec<Weight<'static>>,
}
