//! Layers that upstream's method refuses or fails on.

use crate::moe::activation::Activation;
use crate::num::scalar::ScalarType;

/// The settings that upstream's method depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Bits of the weights.
    pub num_bits: u32,
    /// Whether activations are quantized at run time.
    pub dynamic: bool,
    /// Whether each token has its own scale.
    pub per_token: bool,
    /// Whether experts are rebalanced over ranks (EPLB).
    pub enable_eplb: bool,
    /// Whether experts are distributed over ranks.
    pub has_expert_map: bool,
    /// Whether experts are chosen in groups.
    pub use_grouped_topk: bool,
    /// Activation between the products.
    pub activation: Activation,
    /// Activations: FLOAT32 or BFLOAT16.
    pub dtype: ScalarType,
    /// Whether router weights multiply the input instead of the output.
    pub router_weight_on_input: bool,
}

impl Settings {
    /// Settings that upstream accepts: 4 bits, dynamic per token, all experts local.
    pub fn new(activation: Activation, dtype: ScalarType) -> Self {
        Self {
            num_bits: 4,
            dynamic: true,
            per_token: true,
            enable_eplb: false,
            has_expert_map: false,
            use_grouped_topk: false,
            activation,
            dtype,
            router_weight_on_input: dtype == ScalarType::BFLOAT16,
        }
    }
}

/// Why a layer is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Weights that do not have 4 bits.
    #[error("weights of {found} bits, expected 4")]
    Bits {
        /// Bits found.
        found: u32,
    },
    /// Static scales, or scales shared by tokens.
    #[error(
        "activation quantization: found dynamic {dynamic}, per token {per_token}, expected both true"
    )]
    InputQuantization {
        /// Whether it is dynamic.
        dynamic: bool,
        /// Whether it is per token.
        per_token: bool,
    },
    /// An activation that the operator lacks.
    #[error("activation: found {found}, expected silu, swigluoai or swiglustep")]
    Activation {
        /// The activation found.
        found: Activation,
    },
    /// A type that the products lack.
    #[error("activations of type {found}: found {found}, expected float32 or bfloat16")]
    Dtype {
        /// The type found.
        found: ScalarType,
    },
    /// Rebalanced experts.
    #[error("enable_eplb: found true, expected false")]
    Eplb,
    /// Experts on several ranks: upstream only.
    #[error("expert_map: found one, expected none")]
    ExpertMap,
    /// Grouped top-k: upstream's method does not pass on the number of groups, so its router fails.
    /// Upstream only.
    #[error("use_grouped_topk: found true, expected false (the groups' sizes do not get through)")]
    GroupedTopk,
    /// bf16 activations with router weights on the output: the products with f32 weights are f32,
    /// which PyTorch's `index_add` does not add to a bf16 tensor. Upstream only.
    #[error("bfloat16 with router weights on the output: found it, expected them on the input")]
    WeightedBf16,
}

impl From<Refusal> for crate::Error {
    fn from(refusal: Refusal) -> Self {
        Self::unsupported("this layer as int4 with dynamic int8 activations", refusal)
    }
}

/// Whether to refuse what upstream refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Refuses whatever upstream refuses.
    Upstream,
    /// Also runs expert maps, grouped top-k, and bf16 with router weights on the output.
    Extended,
}

impl Mode {
    /// Checks a layer in upstream's order.
    ///
    /// # Errors
    /// The first reason to refuse it.
    pub fn admit(self, s: &Settings) -> Result<(), Refusal> {
        let upstream = self == Self::Upstream;
        if !(s.dynamic && s.per_token) {
            return Err(Refusal::InputQuantization { dynamic: s.dynamic, per_token: s.per_token });
        }
        if s.num_bits != 4 {
            return Err(Refusal::Bits { found: s.num_bits });
        }
        if s.enable_eplb {
            return Err(Refusal::Eplb);
        }
        if super::GatedActivation::of(s.activation).is_none() {
            return Err(Refusal::Activation { found: s.activation });
        }
        if upstream && s.has_expert_map {
            return Err(Refusal::ExpertMap);
        }
        if upstream && s.use_grouped_topk {
            return Err(Refusal::GroupedTopk);
        }
        match s.dtype {
            ScalarType::FLOAT32 => Ok(()),
            ScalarType::BFLOAT16 if upstream && !s.router_weight_on_input => {
                Err(Refusal::WeightedBf16)
            }
            ScalarType::BFLOAT16 => Ok(()),
            found => Err(Refusal::Dtype { found }),
        }
    }
}
