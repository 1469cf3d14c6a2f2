//! What a case says beside the product itself.

use crate::layers::TensorParallel;

/// Facts that a product does not depend on, and that a wrong one may be explained by.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hints<'c> {
    /// Router weight of each row, also of the product that they do not multiply.
    pub(crate) router_weights: Option<&'c [f32]>,
    /// The shard that the matrix is.
    pub(crate) tensor_parallel: Option<TensorParallel>,
    /// `in.g_idx` of a matrix whose rows are in the order of their groups all the same.
    pub(crate) unused_g_idx: Option<&'c [u32]>,
    /// Whether the layer has an up projection beside the gate.
    pub(crate) is_gated: bool,
}
