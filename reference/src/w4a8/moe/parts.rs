//! A layer as the engine sees it, whatever the format of its weights.

use super::activation::GatedActivation;
use crate::w4a8::matrices::Matrices;

/// The experts' products and what joins them.
#[derive(Clone, Copy)]
pub(in crate::w4a8) struct Parts<'l> {
    /// Gate and up, `[H, 2I]`: gate first.
    pub(in crate::w4a8) w13: &'l dyn Matrices,
    /// Down, `[I, H]`.
    pub(in crate::w4a8) w2: &'l dyn Matrices,
    /// Experts of all ranks.
    pub(in crate::w4a8) num_experts: usize,
    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    pub(in crate::w4a8) expert_map: Option<&'l [i32]>,
    /// Activation between the products.
    pub(in crate::w4a8) kind: GatedActivation,
    /// Whether router weights multiply the input instead of the output.
    pub(in crate::w4a8) router_weight_on_input: bool,
}

impl Parts<'_> {
    /// H.
    pub(in crate::w4a8) fn hidden_size(&self) -> usize {
        self.w13.shape().size_k
    }

    /// I.
    pub(in crate::w4a8) fn intermediate_size(&self) -> usize {
        self.w2.shape().size_k
    }
}
