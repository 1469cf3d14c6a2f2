//! The layer and the deployment, as described to the selection.

use crate::config::{ScaleStrategy, Scheme};
use crate::formats::blocks::BlockFormat;
use crate::num::scalar::ScalarType;

/// Switches of a deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Results must not depend on the batch.
    pub batch_invariant: bool,
    /// Use Marlin for FP8 weights even on devices with native FP8.
    pub force_fp8_marlin: bool,
    /// Type that activations are quantized to before the product.
    pub input_type: InputType,
}

/// Type of the activations that enter the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum InputType {
    /// f16 or bf16.
    #[default]
    SixteenBit,
    /// int8, per token.
    Int8,
    /// e4m3fn, per token.
    Fp8,
}

impl InputType {
    /// Name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SixteenBit => "16-bit",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }
}

/// A linear layer on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearDesc {
    /// Input features of the whole layer.
    pub input_size: usize,
    /// Input features on this rank.
    pub input_size_per_partition: usize,
    /// Output features on this rank.
    pub output_size_per_partition: usize,
    /// Deployment.
    pub options: Options,
}

impl LinearDesc {
    /// A layer on one rank, without options.
    pub fn whole(input_size: usize, output_size: usize) -> Self {
        Self {
            input_size,
            input_size_per_partition: input_size,
            output_size_per_partition: output_size,
            options: Options::default(),
        }
    }
}

macro_rules! activations {
    ($($variant:ident $name:literal),+ $(,)?) => {
        /// Activation function between the two products of an expert, by upstream's name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum MoeActivation { $($variant),+ }

        impl MoeActivation {
            /// Every activation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Upstream's name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// The activation of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

activations! {
    Silu "silu", Gelu "gelu", GeluTanh "gelu_tanh", Relu2 "relu2", SwigluOai "swigluoai",
    SwigluStep "swiglustep", SiluNoMul "silu_no_mul", GeluNoMul "gelu_no_mul",
    GeluTanhNoMul "gelu_tanh_no_mul", Relu2NoMul "relu2_no_mul",
}

impl MoeActivation {
    /// Whether the expert has a gate matrix.
    pub fn is_gated(self) -> bool {
        !self.name().ends_with("_no_mul")
    }
}

macro_rules! all2all {
    ($($variant:ident $name:literal),+ $(,)?) => {
        /// How tokens are exchanged between ranks, by upstream's name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum All2All { $($variant),+ }

        impl All2All {
            /// Every backend.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Upstream's name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// The backend of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

all2all! {
    AllGatherReduceScatter "allgather_reducescatter",
    DeepEpHighThroughput "deepep_high_throughput",
    DeepEpLowLatency "deepep_low_latency",
    FlashInferAll2AllV "flashinfer_all2allv",
    FlashInferNvlinkTwoSided "flashinfer_nvlink_two_sided",
    FlashInferNvlinkOneSided "flashinfer_nvlink_one_sided",
    Mori "mori",
    NixlEp "nixl_ep",
}

/// Order of the tokens in a MoE kernel's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationFormat {
    /// Tokens in their original order.
    Standard,
    /// Tokens sorted by expert, padded to one length.
    BatchedExperts,
}

impl ActivationFormat {
    /// Upstream's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::BatchedExperts => "batched_experts",
        }
    }
}

/// How a MoE layer is distributed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeParallel {
    /// Data-parallel ranks.
    pub dp_size: usize,
    /// Whether experts are distributed over ranks.
    pub use_ep: bool,
    /// How tokens are exchanged; relevant with `use_ep` and several data-parallel ranks.
    pub all2all: All2All,
}

impl MoeParallel {
    /// One rank.
    pub const NONE: Self =
        Self { dp_size: 1, use_ep: false, all2all: All2All::AllGatherReduceScatter };

    /// Whether tokens are exchanged between ranks.
    pub const fn use_all2all(&self) -> bool {
        self.dp_size > 1 && self.use_ep
    }

    /// Order of the tokens: batched with DeepEP low-latency and NIXL.
    pub fn activation_format(&self) -> ActivationFormat {
        let batched = matches!(self.all2all, All2All::DeepEpLowLatency | All2All::NixlEp);
        if self.use_all2all() && batched {
            ActivationFormat::BatchedExperts
        } else {
            ActivationFormat::Standard
        }
    }
}

/// A MoE layer on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeDesc {
    /// Hidden size.
    pub hidden_size: usize,
    /// Intermediate size on this rank.
    pub intermediate_size_per_partition: usize,
    /// Activation function.
    pub activation: MoeActivation,
    /// How the layer is distributed.
    pub parallel: MoeParallel,
    /// Whether router weights multiply the input instead of the output.
    pub apply_router_weight_on_input: bool,
    /// Whether adapters are attached.
    pub lora: bool,
    /// Deployment.
    pub options: Options,
}

impl MoeDesc {
    /// A gated SiLU layer on one rank, without options.
    pub fn new(hidden_size: usize, intermediate_size_per_partition: usize) -> Self {
        Self {
            hidden_size,
            intermediate_size_per_partition,
            activation: MoeActivation::Silu,
            parallel: MoeParallel::NONE,
            apply_router_weight_on_input: false,
            lora: false,
            options: Options::default(),
        }
    }
}

/// Weight quantization in kernel selection (upstream's quantization keys).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightKey {
    /// 4-bit symmetric integers.
    Int4,
    /// 8-bit symmetric integers.
    Int8,
    /// 4- or 8-bit integers with run-time zero points.
    IntZeroPoints,
    /// e4m3fn, one scale per tensor.
    Fp8Tensor,
    /// e4m3fn, one scale per channel.
    Fp8Channel,
    /// e4m3fn, one scale per 128 × 128 block.
    Fp8Block128,
    /// e4m3fn, blocks of another size.
    Fp8OtherBlock,
    /// A block format.
    Block(&'static BlockFormat),
    /// int8 with int8 activations.
    W8A8Int8,
}

impl WeightKey {
    /// The key of a scheme; `None` when it is unquantized or has no weight-only form.
    pub fn of(scheme: &Scheme) -> Option<Self> {
        Some(match scheme {
            Scheme::Wna16(w) => match w.weight_type {
                ScalarType::UINT4B8 => Self::Int4,
                ScalarType::UINT8B128 => Self::Int8,
                _ => Self::IntZeroPoints,
            },
            Scheme::Fp8(f) => match f.strategy {
                ScaleStrategy::Tensor => Self::Fp8Tensor,
                ScaleStrategy::Channel => Self::Fp8Channel,
                ScaleStrategy::Block { block_n: 128, block_k: 128 } => Self::Fp8Block128,
                ScaleStrategy::Block { .. } => Self::Fp8OtherBlock,
            },
            Scheme::Block { format, .. } => Self::Block(format),
            Scheme::W8A8Int8 { .. } => Self::W8A8Int8,
            Scheme::Unquantized { .. } | Scheme::W4A8Int8 { .. } | Scheme::W4A8Fp8 { .. } => {
                return None;
            }
        })
    }

    /// Name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::IntZeroPoints => "integers with zero points",
            Self::Fp8Tensor => "fp8 per tensor",
            Self::Fp8Channel => "fp8 per channel",
            Self::Fp8Block128 => "fp8 128x128 blocks",
            Self::Fp8OtherBlock => "fp8 other blocks",
            Self::Block(format) => format.name,
            Self::W8A8Int8 => "w8a8 int8",
        }
    }
}
