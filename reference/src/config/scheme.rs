//! The storage scheme of one module as plain data, sufficient to read its tensors.

use crate::formats::blocks::BlockFormat;
use crate::formats::global_scale::GlobalScale;
use crate::formats::integers::IntFormat;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// How a module's weights are stored.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Scheme {
    /// Plain 16- or 32-bit weights.
    Unquantized {
        /// The rule that excludes the module.
        reason: String,
    },
    /// 4- or 8-bit integers with 16-bit activations.
    Wna16(Wna16Scheme),
    /// e4m3fn weights.
    Fp8(Fp8Scheme),
    /// Small floats with a scale of one byte per block.
    Block {
        /// The block format.
        format: &'static BlockFormat,
        /// Container that defines the names of the tensors.
        container: FloatContainer,
        /// Whether activations stay 16 bits wide; true where configs do not say it
        /// ([`BlockFormat::quantizes_activations`]).
        weight_only: bool,
    },
    /// 4-bit integers stored as int8, activations quantized per token to int8 at run time.
    W4A8Int8 {
        /// −1 or the group.
        group_size: GroupSize,
        /// int8 values in [−8, 7], or packed.
        checkpoint_format: &'static IntFormat,
    },
    /// Packed 4-bit integers, activations quantized per token to e4m3fn.
    W4A8Fp8 {
        /// The group (128 in every kernel that reads it).
        group_size: GroupSize,
    },
    /// 8-bit integers, activations in int8.
    W8A8Int8 {
        /// One scale per tensor or per channel.
        strategy: ScaleStrategy,
        /// Activation quantization.
        activations: ActivationScheme,
        /// Whether activations have no zero points.
        input_symmetric: bool,
    },
}

/// Container of a floating-point checkpoint; defines its tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatContainer {
    /// `quant_method: fp8`: `weight`, `weight_scale` or `weight_scale_inv`.
    Fp8,
    /// compressed-tensors: `weight` or `weight_packed`, `weight_scale`, `weight_global_scale`
    /// (a divisor: the largest code over the largest value).
    CompressedTensors,
    /// ModelOpt: `weight`, `weight_scale`, `weight_scale_2` (a multiplier).
    ModelOpt,
    /// gpt-oss: `gate_up_proj_blocks`, `gate_up_proj_scales`, `down_proj_blocks`, ...
    StackedBlocks,
}

impl FloatContainer {
    /// Whether experts are stored in stacks, their codes with an axis of blocks, and columns of
    /// gate and up alternating.
    pub const fn stacks_experts(self) -> bool {
        matches!(self, Self::StackedBlocks)
    }

    /// Whether its global scales multiply or divide.
    pub const fn global_scale(self) -> GlobalScale {
        match self {
            Self::ModelOpt => GlobalScale::Multiplier,
            _ => GlobalScale::Divisor,
        }
    }
}

/// Contents of the zero-point tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZeroPoints {
    /// The type's own bias; a zero-point tensor, if the file has one, is not read.
    Symmetric,
    /// Stored as zero − 1 (GPTQ v1).
    StoredMinusOne,
    /// Stored as is (GPTQ v2, AWQ, compressed-tensors).
    Stored,
}

/// compressed-tensors' activation ordering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActOrder {
    /// `weight`, alias `static`: columns were ordered during calibration only. The file has
    /// uniform groups and no `g_idx`.
    Weight,
    /// `group`, alias `dynamic` (and `true`): rows belong to groups through `weight_g_idx`.
    Group,
}

/// Integer weights, 16-bit activations.
#[derive(Debug, Clone, PartialEq)]
pub struct Wna16Scheme {
    /// How the tensors are stored.
    pub checkpoint_format: &'static IntFormat,
    /// Meaning of a code: `uint4b8`, `uint8b128`, `uint4` or `uint8` (asymmetric).
    pub weight_type: ScalarType,
    /// −1 or the group.
    pub group_size: GroupSize,
    /// Whether rows belong to groups through a `g_idx` tensor.
    pub desc_act: bool,
    /// compressed-tensors' `actorder` as configured; `desc_act` is true only for `Group`.
    pub actorder: Option<ActOrder>,
    /// Contents of the zero-point tensor.
    pub zeros: ZeroPoints,
}

impl Wna16Scheme {
    /// Whether zero points are the type's own bias.
    pub fn symmetric(&self) -> bool {
        self.zeros == ZeroPoints::Symmetric
    }

    /// Bits per weight.
    pub fn bits(&self) -> u32 {
        self.weight_type.size_bits()
    }
}

/// How many weights share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleStrategy {
    /// One scale per tensor (per shard when several were merged).
    Tensor,
    /// One scale per output channel.
    Channel,
    /// One scale per `block_n × block_k` block.
    Block {
        /// Output channels per block.
        block_n: usize,
        /// Input features per block.
        block_k: usize,
    },
}

/// How activations are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationScheme {
    /// Not quantized.
    None,
    /// A scale from the file, one per tensor.
    StaticTensor,
    /// One scale per tensor at run time.
    DynamicTensor,
    /// One scale per token at run time.
    DynamicToken,
    /// One scale per token and group of this many k at run time.
    DynamicGroup(usize),
    /// As [`Self::DynamicGroup`], with scales rounded up to powers of two (`scale_fmt: ue8m0`).
    DynamicGroupUe8m0(usize),
}

/// e4m3fn weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Scheme {
    /// Container that defines the names of the tensors.
    pub container: FloatContainer,
    /// Scales of the weights.
    pub strategy: ScaleStrategy,
    /// Scales of the activations.
    pub activations: ActivationScheme,
    /// Whether block scales are stored under `weight_scale_inv` (`quant_method: fp8`).
    pub scale_inv: bool,
}

impl Scheme {
    /// Whether there is anything to convert.
    pub fn is_quantized(&self) -> bool {
        !matches!(self, Self::Unquantized { .. })
    }

    /// Rows of a weight per scale; [`GroupSize::Channel`] if a scale covers at least a column.
    pub fn group_size(&self) -> GroupSize {
        match self {
            Self::Wna16(w) => w.group_size,
            Self::Fp8(Fp8Scheme { strategy: ScaleStrategy::Block { block_k, .. }, .. }) => {
                GroupSize::Of(*block_k)
            }
            Self::Block { format, .. } => format.group_size(),
            Self::W4A8Int8 { group_size, .. } | Self::W4A8Fp8 { group_size } => *group_size,
            Self::Unquantized { .. } | Self::Fp8(_) | Self::W8A8Int8 { .. } => GroupSize::Channel,
        }
    }

    /// Type of the codes, when quantized.
    pub fn weight_type(&self) -> Option<ScalarType> {
        match self {
            Self::Unquantized { .. } => None,
            Self::Wna16(w) => Some(w.weight_type),
            Self::Fp8(_) => Some(ScalarType::FLOAT8_E4M3FN),
            Self::Block { format, .. } => Some(format.element),
            Self::W4A8Int8 { .. } | Self::W4A8Fp8 { .. } => Some(ScalarType::INT4),
            Self::W8A8Int8 { .. } => Some(ScalarType::INT8),
        }
    }

    /// Bits per weight, when quantized.
    pub fn bits(&self) -> Option<u32> {
        match self {
            Self::Unquantized { .. } => None,
            Self::Wna16(w) => Some(w.bits()),
            Self::Block { format, .. } => Some(format.element.size_bits()),
            Self::Fp8(_) | Self::W8A8Int8 { .. } => Some(8),
            Self::W4A8Int8 { .. } | Self::W4A8Fp8 { .. } => Some(4),
        }
    }

    /// Short name for reports: `gptq uint4b8`, `fp8 block 128x128`, `nvfp4`, ...
    pub fn label(&self) -> String {
        match self {
            Self::Unquantized { .. } => "unquantized".to_owned(),
            Self::Wna16(w) => format!("{} {}", w.checkpoint_format, w.weight_type),
            Self::Fp8(f) => match f.strategy {
                ScaleStrategy::Tensor => "fp8 tensor".to_owned(),
                ScaleStrategy::Channel => "fp8 channel".to_owned(),
                ScaleStrategy::Block { block_n, block_k } => {
                    format!("fp8 block {block_n}x{block_k}")
                }
            },
            Self::Block { format, weight_only, .. } if format.quantizes_activations() => {
                let bits = format.element.size_bits();
                let activations = if *weight_only { 16 } else { bits };
                format!("{} (W{bits}A{activations})", format.name)
            }
            Self::Block { format, .. } => format.name.to_owned(),
            Self::W4A8Int8 { .. } => "w4a8 int8".to_owned(),
            Self::W4A8Fp8 { .. } => "w4a8 fp8".to_owned(),
            Self::W8A8Int8 { .. } => "w8a8 int8".to_owned(),
        }
    }
}
