//! Properties of a deployment besides the layer: activation quantization, routing, switches.

use super::super::MoeDesc;
use crate::formats::BLOCK_FORMATS;
use crate::formats::blocks::BlockFormat;

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// Every variant.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Upstream's name, or the name in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The variant called `name`.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|v| v.name() == name)
            }
        }
    };
}

/// Activation quantization in kernel selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationKey {
    /// 16-bit activations.
    None,
    /// e4m3fn, one scale from the file.
    Fp8StaticTensor,
    /// e4m3fn, one scale at run time.
    Fp8DynamicTensor,
    /// e4m3fn, a scale for each token at run time.
    Fp8DynamicToken,
    /// e4m3fn, a scale for each token and 128 k at run time.
    Fp8Dynamic128,
    /// A block format, at run time.
    Block(&'static BlockFormat),
}

impl ActivationKey {
    /// The keys outside the block formats.
    const OTHERS: [Self; 5] = [
        Self::None,
        Self::Fp8StaticTensor,
        Self::Fp8DynamicTensor,
        Self::Fp8DynamicToken,
        Self::Fp8Dynamic128,
    ];

    /// Every key.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::OTHERS.into_iter().chain(BLOCK_FORMATS.into_iter().map(Self::Block))
    }

    /// Upstream's name, or the name in reports; of a block format, its own.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Fp8StaticTensor => "static_tensor",
            Self::Fp8DynamicTensor => "dynamic_tensor",
            Self::Fp8DynamicToken => "dynamic_token",
            Self::Fp8Dynamic128 => "dynamic128",
            Self::Block(format) => format.name,
        }
    }

    /// The key called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|key| key.name() == name)
    }
}

named! {
    /// How the router turns logits into weights (upstream `RoutingMethodType`); relevant for
    /// kernels that include the router.
    RoutingMethod {
        /// Softmax, then the best.
        Default "Default",
        /// The best, then softmax or sigmoid.
        Renormalize "Renormalize",
        /// Sigmoid, bias, groups, the best of the best groups.
        DeepSeekV3 "DeepSeekV3",
        /// The best one, then sigmoid.
        Llama4 "Llama4",
        /// Softmax or sigmoid, the best, divided by their sum.
        RenormalizeNaive "RenormalizeNaive",
        /// The best, as they are.
        TopK "TopK",
        /// Sigmoid, the best, divided by their sum.
        SigmoidRenorm "SigmoidRenorm",
        /// Sigmoid and bias, the best, divided by their sum and scaled.
        MiniMax2 "MiniMax2",
        /// Not specified.
        Unspecified "Unspecified",
        /// Square root of softplus, bias, normalized.
        DeepseekV4 "DeepseekV4",
        /// A model's own function.
        Custom "Custom",
        /// Random, for measurements.
        Simulated "Simulated",
    }
}

named! {
    /// The backend that the user requests (`moe_backend`), by upstream's name.
    Runner {
        /// No request.
        Auto "auto",
        /// Triton.
        Triton "triton",
        /// DeepGEMM.
        DeepGemm "deep_gemm",
        /// vLLM's CUTLASS kernels.
        Cutlass "cutlass",
        /// FlashInfer with TensorRT-LLM's kernels.
        FlashInferTrtllm "flashinfer_trtllm",
        /// FlashInfer with CUTLASS kernels.
        FlashInferCutlass "flashinfer_cutlass",
        /// FlashInfer with CuTe DSL kernels.
        FlashInferCuteDsl "flashinfer_cutedsl",
        /// Marlin.
        Marlin "marlin",
        /// AITER (ROCm).
        Aiter "aiter",
        /// Dequantization at run time.
        Emulation "emulation",
    }
}

named! {
    /// Value of `VLLM_FLASHINFER_MOE_BACKEND`.
    FlashInferBackend {
        /// CUTLASS kernels.
        Throughput "throughput",
        /// TensorRT-LLM's kernels on 10.x, CUTLASS elsewhere.
        Latency "latency",
        /// CuTe DSL kernels.
        MaskedGemm "masked_gemm",
    }
}

/// Environment switches that the oracles read; `None` is a variable that is not set. Batch
/// invariance and `VLLM_TEST_FORCE_FP8_MARLIN` are in the layer's [`super::super::Options`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Switches {
    /// `VLLM_USE_FLASHINFER_MOE_FP8`.
    pub use_flashinfer_moe_fp8: Option<bool>,
    /// `VLLM_USE_FLASHINFER_MOE_FP4`.
    pub use_flashinfer_moe_fp4: Option<bool>,
    /// `VLLM_FLASHINFER_MOE_BACKEND`.
    pub flashinfer_moe_backend: Option<FlashInferBackend>,
    /// `VLLM_USE_DEEP_GEMM`; on where it is not set.
    pub use_deep_gemm: Option<bool>,
    /// `VLLM_MOE_USE_DEEP_GEMM`; on where it is not set.
    pub moe_use_deep_gemm: Option<bool>,
}

/// Packages that can be imported on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packages {
    /// FlashInfer with its fused MoE kernels (`has_flashinfer`).
    pub has_flashinfer: bool,
    /// DeepGEMM (`has_deep_gemm`).
    pub has_deep_gemm: bool,
}

/// A MoE layer and the properties of its deployment that kernel selection reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeDeployment {
    /// The layer.
    pub desc: MoeDesc,
    /// Expert-parallel ranks; 1 without expert parallelism.
    pub ep_size: usize,
    /// Whether experts are moved between ranks to balance their load.
    pub enable_eplb: bool,
    /// Routing.
    pub routing: RoutingMethod,
    /// The requested backend.
    pub runner: Runner,
    /// FP8: whether the quantization method takes vLLM's CUTLASS kernels (compressed-tensors
    /// does, `quant_method: fp8` does not).
    pub allow_vllm_cutlass: bool,
    /// Environment.
    pub switches: Switches,
    /// Installed packages.
    pub packages: Packages,
}

impl MoeDeployment {
    /// `desc` with no requested backend, no switch, every package, and the most common routing.
    pub fn new(desc: MoeDesc) -> Self {
        Self {
            desc,
            ep_size: 1,
            enable_eplb: false,
            routing: RoutingMethod::Renormalize,
            runner: Runner::Auto,
            allow_vllm_cutlass: false,
            switches: Switches::default(),
            packages: Packages { has_flashinfer: true, has_deep_gemm: true },
        }
    }
}
