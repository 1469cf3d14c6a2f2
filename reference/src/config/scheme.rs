//! The storage scheme of one module as plain data, sufficient to read its tensors.

use std::fmt;

use crate::formats::mx::MxFormat;
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
    /// Small floats with one e8m0 scale per 32 k.
    Mx {
        /// The Microscaling format.
        format: &'static MxFormat,
        /// Container that defines the names of the tensors.
        container: FloatContainer,
    },
    /// e2m1 weights with one e4m3 scale per 16 k and a float32 global scale.
    Nvfp4 {
        /// Container that defines the names of the tensors.
        container: FloatContainer,
        /// Whether activations stay 16 bits wide (W4A16) rather than NVFP4 (W4A4).
        weight_only: bool,
    },
    /// 4-bit integers stored as int8, activations quantized per token to int8 at run time.
    W4A8Int8 {
        /// −1 or the group.
        group_size: GroupSize,
        /// `CtIntQuantized` (int8 values in [−8, 7]) or `CtPackQuantized`.
        checkpoint_format: IntContainer,
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
    },
}

/// Storage of integer weights in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntContainer {
    /// `qweight`, `qzeros` holding zero − 1, `scales`, `g_idx`.
    Gptq,
    /// The same with `qzeros` holding the zero itself.
    GptqV2,
    /// `qweight` packed along N in AWQ's order, `qzeros`, `scales`.
    Awq,
    /// `weight_packed` along K, `weight_scale`, `weight_shape`, `weight_g_idx`.
    CtPackQuantized,
    /// `weight` int8, `weight_scale`.
    CtIntQuantized,
}

impl IntContainer {
    /// Name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gptq => "gptq",
            Self::GptqV2 => "gptq_v2",
            Self::Awq => "awq",
            Self::CtPackQuantized => "compressed-tensors pack-quantized",
            Self::CtIntQuantized => "compressed-tensors int-quantized",
        }
    }
}

impl fmt::Display for IntContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
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
    GptOss,
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
    pub checkpoint_format: IntContainer,
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
            Self::Mx { .. } => MxFormat::GROUP_SIZE,
            Self::Nvfp4 { .. } => GroupSize::Of(crate::formats::nvfp4::BLOCK),
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
            Self::Mx { format, .. } => Some(format.element),
            Self::Nvfp4 { .. } => Some(ScalarType::FLOAT4_E2M1F),
            Self::W4A8Int8 { .. } | Self::W4A8Fp8 { .. } => Some(ScalarType::INT4),
            Self::W8A8Int8 { .. } => Some(ScalarType::INT8),
        }
    }

    /// Bits per weight, when quantized.
    pub fn bits(&self) -> Option<u32> {
        match self {
            Self::Unquantized { .. } => None,
            Self::Wna16(w) => Some(w.bits()),
            Self::Mx { format, .. } => Some(format.element.size_bits()),
            Self::Fp8(_) | Self::W8A8Int8 { .. } => Some(8),
            Self::Nvfp4 { .. } | Self::W4A8Int8 { .. } | Self::W4A8Fp8 { .. } => Some(4),
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
            Self::Mx { format, .. } => format.name.to_owned(),
            Self::Nvfp4 { weight_only: true, .. } => "nvfp4 (W4A16)".to_owned(),
            Self::Nvfp4 { weight_only: false, .. } => "nvfp4 (W4A4)".to_owned(),
            Self::W4A8Int8 { .. } => "w4a8 int8".to_owned(),
            Self::W4A8Fp8 { .. } => "w4a8 fp8".to_owned(),
            Self::W8A8Int8 { .. } => "w8a8 int8".to_owned(),
        }
    }
}
