//! The arguments that a quantization method passes to its oracle.

use super::super::WeightKey;
use super::keys::ActivationKey;
use super::methods::MoeMethod;
use crate::config::{ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme};

/// The keys that a quantization method passes to an oracle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeQuestion {
    /// The oracle's method.
    pub method: MoeMethod,
    /// Weights.
    pub weights: WeightKey,
    /// Activations.
    pub activations: ActivationKey,
    /// FP8: whether vLLM's CUTLASS kernels may be chosen.
    pub allow_vllm_cutlass: bool,
}

impl MoeQuestion {
    /// The arguments for experts of `scheme` (vLLM 0.21.0 `fp8.py`, `modelopt.py`,
    /// `gptq_marlin.py`, `compressed_tensors_moe*.py`); `None` if the method has none of these four
    /// oracles (AWQ, compressed-tensors integers, MXFP4) or refuses the scheme.
    ///
    /// As in upstream, two keys differ from the scheme. Blocks of any size are passed as 128 × 128.
    /// compressed-tensors passes dynamic per-tensor activations as `dynamic128`; with per-tensor
    /// weights only Marlin supports that pair, so no device uses native FP8.
    pub fn of(scheme: &Scheme) -> Option<Self> {
        let (method, weights, activations) = match scheme {
            Scheme::Fp8(fp8) => {
                let (weights, activations) = fp8_keys(fp8)?;
                (MoeMethod::Fp8, weights, activations)
            }
            Scheme::Block { format, container, weight_only } => {
                let method = MoeMethod::of_block(format)?;
                let sixteen_bit = *weight_only
                    && format.quantizes_activations()
                    && *container == FloatContainer::CompressedTensors;
                let activations =
                    if sixteen_bit { ActivationKey::None } else { ActivationKey::Block(format) };
                (method, WeightKey::Block(format), activations)
            }
            Scheme::Wna16(w) => {
                let asks = w.checkpoint_format.moe_oracle && w.symmetric();
                let weights = WeightKey::of(scheme).filter(|_| asks)?;
                (MoeMethod::IntWna16, weights, ActivationKey::None)
            }
            _ => return None,
        };
        let allow_vllm_cutlass = matches!(
            scheme,
            Scheme::Fp8(Fp8Scheme { container: FloatContainer::CompressedTensors, .. })
        );
        Some(Self { method, weights, activations, allow_vllm_cutlass })
    }
}

fn fp8_keys(scheme: &Fp8Scheme) -> Option<(WeightKey, ActivationKey)> {
    use ActivationScheme as S;
    let compressed = scheme.container == FloatContainer::CompressedTensors;
    Some(match (scheme.strategy, scheme.activations) {
        (_, S::None) => return None,
        (ScaleStrategy::Block { .. }, S::StaticTensor) => return None,
        (ScaleStrategy::Block { .. }, _) => (WeightKey::Fp8Block128, ActivationKey::Fp8Dynamic128),
        (ScaleStrategy::Tensor, S::StaticTensor) => {
            (WeightKey::Fp8Tensor, ActivationKey::Fp8StaticTensor)
        }
        (ScaleStrategy::Tensor, S::DynamicTensor) if compressed => {
            (WeightKey::Fp8Tensor, ActivationKey::Fp8Dynamic128)
        }
        (ScaleStrategy::Tensor, S::DynamicTensor) => {
            (WeightKey::Fp8Tensor, ActivationKey::Fp8DynamicTensor)
        }
        (ScaleStrategy::Channel, S::DynamicToken) if compressed => {
            (WeightKey::Fp8Channel, ActivationKey::Fp8DynamicToken)
        }
        _ => return None,
    })
}
