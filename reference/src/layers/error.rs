//! Errors of a layer's constructor or shape rules, one variant per failure.

use crate::num::scalar::ScalarType;
use crate::select::{MarlinRefusal, Platform};

/// A refused layer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The method has no weight type of this width.
    #[error("{method}: {bits}-bit weights are not supported, expected {expected}")]
    Bits {
        /// Layer method.
        method: &'static str,
        /// Bits per weight.
        bits: u32,
        /// Widths that exist.
        expected: &'static str,
    },
    /// 8-bit activations need `uint4b8` weights.
    #[error("8-bit activations with {weight_type} weights are not supported by Marlin")]
    EightBitActivations {
        /// Weight type found.
        weight_type: ScalarType,
    },
    /// Experts are read with symmetric quantization only.
    #[error("{method}: asymmetric weights are not supported")]
    Asymmetric {
        /// Layer method.
        method: &'static str,
    },
    /// The shape of a scale was requested without its number of groups.
    #[error("the shape of {weight} needs its number of groups")]
    GroupsMissing {
        /// `w13_scale` or `w2_scale`.
        weight: &'static str,
    },
    /// A size is not divisible.
    #[error("{what} = {found} is not divisible by {by} = {of}")]
    NotDivisible {
        /// Which size.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What it is divided by.
        by: &'static str,
        /// Divisor.
        of: usize,
    },
    /// A size is zero.
    #[error("{what} is 0")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// The product of sizes overflows.
    #[error("{what}: the size overflows")]
    Overflow {
        /// Which size.
        what: &'static str,
    },
    /// A rank outside its group.
    #[error("{what}: rank {rank} of {size}")]
    Rank {
        /// Which group (`tp_rank`, `ep_rank`).
        what: &'static str,
        /// Rank found.
        rank: usize,
        /// Ranks in the group.
        size: usize,
    },
    /// W4A8-int8 experts need activations quantized per token at run time.
    #[error("W4A8-int8 experts need dynamic per-token activations, found {found}")]
    NotDynamicPerToken {
        /// What the config says.
        found: String,
    },
    /// A method that runs only on CPUs.
    #[error("{method} runs on CPUs only, not on {platform}")]
    CpuOnly {
        /// Layer method.
        method: &'static str,
        /// Platform found.
        platform: Platform,
    },
    /// FP8 experts with an unsupported pair of weight and activation scales.
    #[error("FP8 experts: weight scales {weights} do not go with activation scales {activations}")]
    StrategyPair {
        /// Scales of the weights.
        weights: String,
        /// Scales of the activations.
        activations: String,
    },
    /// Block scales without their block.
    #[error("block scales need a block structure")]
    BlockMissing,
    /// The kernel that reads the layer refuses it.
    #[error(transparent)]
    Marlin(#[from] MarlinRefusal),
}

impl From<LayerError> for crate::Error {
    fn from(error: LayerError) -> Self {
        Self::module(error)
    }
}
