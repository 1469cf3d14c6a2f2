//! What upstream's method refuses, and what it would fail on.

use crate::moe::activation::Activation;
use crate::scalar::ScalarType;

/// What decides whether upstream's method takes a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Bits of the weights.
    pub num_bits: u32,
    /// Whether activations are quantized when they come.
    pub dynamic: bool,
    /// Whether each token has its own scale.
    pub per_token: bool,
    /// Whether experts are rebalanced over ranks (EPLB).
    pub enable_eplb: bool,
    /// Whether experts are spread over ranks.
    pub has_expert_map: bool,
    /// Whether experts are chosen in groups.
    pub use_grouped_topk: bool,
    /// Between the products.
    pub activation: Activation,
    /// Activations: FLOAT32 or BFLOAT16.
    pub dtype: ScalarType,
    /// Whether router weights multiply the input instead of the output.
    pub router_weight_on_input: bool,
}

impl Settings {
    /// A layer that upstream takes: 4 bits, dynamic per token, all experts here.
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

/// Why a layer is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Weights of another size.
    #[error("weights of {found} bits: found {found}, expected 4")]
    Bits {
        /// Bits found.
        found: u32,
    },
    /// Static scales, or scales that tokens share.
    #[error(
        "activation quantization: found dynamic {dynamic}, per token {per_token}, expected both true"
    )]
    InputQuantization {
        /// Whether it is dynamic.
        dynamic: bool,
        /// Whether it is per token.
        per_token: bool,
    },
    /// Activations that the operator does not have.
    #[error("activation: found {found}, expected silu, swigluoai or swiglustep")]
    Activation {
        /// The activation found.
        found: Activation,
    },
    /// Types that the products do not have.
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
    /// Grouped top-k: upstream's method does not hand the number of groups on, so that its router
    /// stops. Upstream only.
    #[error("use_grouped_topk: found true, expected false (the groups' sizes do not get through)")]
    GroupedTopk,
    /// bf16 activations whose router weights multiply the output: the products with f32 weights
    /// are f32, which PyTorch's `index_add` does not add to a bf16 tensor. Upstream only.
    #[error("bfloat16 with router weights on the output: found it, expected them on the input")]
    WeightedBf16,
}

impl From<Refusal> for crate::Error {
    fn from(refusal: Refusal) -> Self {
        Self::unsupported("this layer as int4 with dynamic int8 activations", refusal)
    }
}

/// How closely upstream is followed where it stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Upstream's refusals are refusals.
    Upstream,
    /// Expert maps, grouped top-k and bf16 with router weights on the output work too.
    Extended,
}

impl Mode {
    /// Fails with the first reason against a layer, in the order in which upstream looks.
    ///
    /// # Errors
    /// The reason.
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
        if super::Kind::of(s.activation).is_none() {
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
