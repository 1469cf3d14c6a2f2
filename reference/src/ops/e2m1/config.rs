//! The config of a layer.

use crate::moe::activation::{Activation, Columns, Definition};
use crate::num::scalar::ScalarType;
use crate::ops::layer_rules::LayerRules;

pub(super) const TYPES: &[(&str, ScalarType)] =
    &[("float32", ScalarType::FLOAT32), ("bfloat16", ScalarType::BFLOAT16)];

pub(super) const ACTIVATIONS: &[(&str, Activation)] =
    &[("swigluoai", Activation::SwigluOai), ("silu", Activation::Silu)];

/// Config of `mxfp4_int8_moe`: the experts of a layer, each product as `mxfp4_int8_linear`.
///
/// in: `x` `[M, H]`, `topk_ids` and `topk_weights` `[M, top_k]`, `w13_weight` `[E, 2I, H / 2]` (gate, then
/// up), `w2_weight` `[E, H, I / 2]`, their `_scale` and `_bias`. out: `gate_up` and `activated`, a row for
/// each token and choice; `y` `[M, H]`. Every output has the type of `x`.
#[derive(Debug, Clone, PartialEq)]
pub struct E2m1MoeConfig {
    /// Activations and outputs: [`ScalarType::FLOAT32`] or [`ScalarType::BFLOAT16`].
    pub dtype: ScalarType,
    /// Tokens.
    pub size_m: usize,
    /// Experts.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
    /// Whether products have a bias.
    pub has_bias: bool,
    /// Activation between the products; `swigluoai` has the limit 7 unless the rules state another.
    pub activation: Activation,
    /// Whether router weights multiply `gate_up` instead of the rows that are added.
    pub apply_router_weight_on_input: bool,
    /// Router weights on x, the layout of gate and up, the activation's parameters.
    pub rules: LayerRules,
}

impl E2m1MoeConfig {
    /// Columns and K of w13 and w2.
    pub(super) fn shapes(&self) -> [(&'static str, usize, usize); 2] {
        let (h, i) = (self.hidden_size, self.intermediate_size);
        [("w13", 2 * i, h), ("w2", h, i)]
    }

    /// The activation; without a stated layout, gate and up are halves.
    pub(super) fn definition(&self) -> Definition {
        self.rules.definition(self.activation, Columns::Halves)
    }

    pub(super) fn slots(&self) -> usize {
        self.size_m * self.top_k
    }
}
