//! What a case says beside the product itself.

use crate::case::TensorParallel;

/// Facts that a product does not depend on, and that a wrong one may be explained by.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::check) struct Hints<'c> {
    /// Router weight of each row, also of the product that they do not multiply.
    pub(in crate::check) router_weights: Option<&'c [f32]>,
    /// The shard that the matrix is.
    pub(in crate::check) tensor_parallel: Option<TensorParallel>,
    /// `in.g_idx` of a matrix whose rows are in the order of their groups all the same.
    pub(in crate::check) unused_g_idx: Option<&'c [u32]>,
    /// Whether the layer has an up projection beside the gate.
    pub(in crate::check) is_gated: bool,
}
