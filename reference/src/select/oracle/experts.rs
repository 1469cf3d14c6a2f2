//! The table of kernel classes: the devices and computations that each supports.
//!
//! Facts follow the `_supports_*` methods of vLLM 0.21.0 `fused_moe/experts/*.py`,
//! `fused_batched_moe.py`, `triton_cutlass_moe.py` and `triton_deep_gemm_moe.py`.

use super::super::ActivationFormat::{BatchedExperts, Standard};
use super::super::All2All;
use super::super::{MoeActivation as Act, WeightKey as W};
use super::class::{Compute, Devices, Excludes, Experts, Needs, Pairs};
use super::keys::{ActivationKey as A, RoutingMethod as R};
use crate::formats::{mxfp4, mxfp8, nvfp4};
use All2All::{
    DeepEpHighThroughput, DeepEpLowLatency, FlashInferAll2AllV, FlashInferNvlinkOneSided,
    FlashInferNvlinkTwoSided, Mori, NixlEp,
};
use Compute::{Between, Exactly, Family, From};

const NOTHING: Needs = Needs { text: "", met: |_| true };
const FLASHINFER: Needs = Needs { text: " with FlashInfer", met: |d| d.packages.flashinfer };
const DEEP_GEMM_PACKAGE: Needs = Needs {
    text: " with DeepGEMM, not switched off",
    met: |d| d.packages.deep_gemm && d.switches.use_deep_gemm != Some(false),
};

const fn cuda(cuda: &'static [Compute], needs: Needs) -> Devices {
    Devices { cuda, xpu: false, cpu: false, needs }
}

const fn pairs(keys: &'static [(W, Option<A>)]) -> Pairs {
    Pairs { keys, cuda: None }
}

const ANY: &[Compute] = &[From(0, 0)];
const NVLINK: &[All2All] =
    &[FlashInferAll2AllV, FlashInferNvlinkTwoSided, FlashInferNvlinkOneSided];
const NOT_NVLINK: Excludes = Excludes { all2all: NVLINK, ep: false, eplb: false };
const SERVES_ALL: Excludes = Excludes { all2all: &[], ep: false, eplb: false };

const BLOCK: (W, Option<A>) = (W::Fp8Block128, Some(A::Fp8Dynamic128));
const CHANNEL: (W, Option<A>) = (W::Fp8Channel, Some(A::Fp8DynamicToken));
const TENSOR_STATIC: (W, Option<A>) = (W::Fp8Tensor, Some(A::Fp8StaticTensor));
const TENSOR_DYNAMIC: (W, Option<A>) = (W::Fp8Tensor, Some(A::Fp8DynamicTensor));
const TENSOR_TOKEN: (W, Option<A>) = (W::Fp8Tensor, Some(A::Fp8DynamicToken));
const MXFP8: (W, Option<A>) = (W::Block(&mxfp8::FORMAT), Some(A::Block(&mxfp8::FORMAT)));
const NVFP4: (W, Option<A>) = (W::Block(&nvfp4::FORMAT), Some(A::Block(&nvfp4::FORMAT)));
const FP8: &[(W, Option<A>)] = &[BLOCK, CHANNEL, TENSOR_TOKEN, TENSOR_STATIC, TENSOR_DYNAMIC];

/// Both forms of every function except gated squared ReLU.
const MOST: &[Act] = &[
    Act::Silu,
    Act::Gelu,
    Act::GeluTanh,
    Act::SwigluOai,
    Act::SwigluStep,
    Act::SiluNoMul,
    Act::GeluNoMul,
    Act::GeluTanhNoMul,
    Act::Relu2NoMul,
];

/// A modular class on tokens in their original order that supports every deployment and has no
/// extras.
const PLAIN: Experts = Experts {
    name: "",
    devices: cuda(&[], NOTHING),
    ungated: false,
    activations: &[Act::Silu],
    schemes: &[],
    excludes: SERVES_ALL,
    routing: None,
    format: Standard,
    batch_invariant: false,
    lora: false,
    fallback: None,
};

const TRTLLM_FP8: Experts = Experts {
    devices: cuda(&[Family(10)], FLASHINFER),
    ungated: true,
    activations: &[Act::Silu, Act::Relu2NoMul],
    // Only collectives that need no separate kernel.
    excludes: Excludes {
        all2all: &[
            DeepEpHighThroughput,
            DeepEpLowLatency,
            FlashInferAll2AllV,
            FlashInferNvlinkTwoSided,
            FlashInferNvlinkOneSided,
            Mori,
            NixlEp,
        ],
        ep: false,
        eplb: true,
    },
    ..PLAIN
};

/// `TrtLlmFp8ExpertsMonolithic`: router and experts in one kernel.
pub static TRTLLM_FP8_MONOLITHIC: Experts = Experts {
    name: "TrtLlmFp8ExpertsMonolithic",
    schemes: &[pairs(&[BLOCK, TENSOR_STATIC, MXFP8])],
    routing: Some(&[
        (
            &[W::Fp8Block128, W::Block(&mxfp8::FORMAT)],
            &[
                R::DeepSeekV3,
                R::Renormalize,
                R::RenormalizeNaive,
                R::SigmoidRenorm,
                R::MiniMax2,
                R::Simulated,
            ],
        ),
        (
            &[W::Fp8Tensor],
            &[
                R::DeepSeekV3,
                R::Llama4,
                R::Renormalize,
                R::RenormalizeNaive,
                R::SigmoidRenorm,
                R::MiniMax2,
                R::Simulated,
            ],
        ),
    ]),
    ..TRTLLM_FP8
};

/// `TrtLlmFp8ExpertsModular`.
pub static TRTLLM_FP8_MODULAR: Experts =
    Experts { name: "TrtLlmFp8ExpertsModular", schemes: &[pairs(&[BLOCK, MXFP8])], ..TRTLLM_FP8 };

/// `FlashInferExperts`: CUTLASS kernels. 11.x is left out.
pub static FLASHINFER_CUTLASS: Experts = Experts {
    name: "FlashInferExperts",
    devices: cuda(&[Exactly(9, 0), Family(10), Family(12)], FLASHINFER),
    ungated: true,
    activations: &[Act::Silu, Act::Relu2NoMul, Act::SwigluOai],
    schemes: &[
        Pairs { keys: &[TENSOR_STATIC], cuda: Some(From(9, 0)) },
        Pairs { keys: &[BLOCK], cuda: Some(Exactly(9, 0)) },
        Pairs { keys: &[NVFP4], cuda: Some(From(10, 0)) },
    ],
    ..PLAIN
};

/// `TritonExperts`.
pub static TRITON: Experts = Experts {
    name: "TritonExperts",
    devices: Devices { cuda: ANY, xpu: true, cpu: false, needs: NOTHING },
    ungated: true,
    activations: MOST,
    schemes: &[Pairs { keys: FP8, cuda: Some(From(8, 9)) }],
    excludes: NOT_NVLINK,
    batch_invariant: true,
    lora: true,
    ..PLAIN
};

/// `BatchedTritonExperts`.
pub static BATCHED_TRITON: Experts = Experts {
    name: "BatchedTritonExperts",
    devices: cuda(ANY, NOTHING),
    ungated: true,
    activations: &[
        Act::Silu,
        Act::Gelu,
        Act::GeluTanh,
        Act::SwigluOai,
        Act::SiluNoMul,
        Act::GeluNoMul,
        Act::GeluTanhNoMul,
        Act::Relu2NoMul,
    ],
    schemes: &[Pairs { keys: FP8, cuda: Some(From(8, 9)) }],
    format: BatchedExperts,
    ..PLAIN
};

const DEEP_GEMM: Devices = cuda(&[Exactly(9, 0), Family(10)], DEEP_GEMM_PACKAGE);

/// `TritonOrDeepGemmExperts`: DeepGEMM, and Triton for shapes that it does not support.
pub static TRITON_OR_DEEP_GEMM: Experts = Experts {
    name: "TritonOrDeepGemmExperts",
    devices: DEEP_GEMM,
    activations: &[Act::Silu, Act::SwigluStep],
    schemes: &[pairs(&[BLOCK])],
    excludes: NOT_NVLINK,
    fallback: Some(&TRITON),
    ..PLAIN
};

/// `BatchedDeepGemmExperts`.
pub static BATCHED_DEEP_GEMM: Experts = Experts {
    name: "BatchedDeepGemmExperts",
    devices: DEEP_GEMM,
    schemes: &[pairs(&[BLOCK])],
    format: BatchedExperts,
    ..PLAIN
};

/// vLLM's grouped FP8 products.
const CUTLASS_FP8: Experts = Experts {
    devices: cuda(&[Between((9, 0), (11, 0))], NOTHING),
    activations: &[Act::Silu, Act::Gelu, Act::SwigluOai],
    schemes: &[pairs(&[CHANNEL, TENSOR_DYNAMIC, TENSOR_STATIC])],
    ..PLAIN
};

/// `TritonOrCutlassExperts`: CUTLASS, and Triton for few tokens on 10.0 and newer.
pub static TRITON_OR_CUTLASS: Experts = Experts {
    name: "TritonOrCutlassExperts",
    excludes: Excludes {
        all2all: &[
            FlashInferAll2AllV,
            FlashInferNvlinkTwoSided,
            FlashInferNvlinkOneSided,
            DeepEpHighThroughput,
        ],
        ep: false,
        eplb: false,
    },
    fallback: Some(&TRITON),
    ..CUTLASS_FP8
};

/// `CutlassBatchedExpertsFp8`.
pub static BATCHED_CUTLASS: Experts =
    Experts { name: "CutlassBatchedExpertsFp8", format: BatchedExperts, ..CUTLASS_FP8 };

/// `AiterExperts`: only ROCm, which these tables do not cover.
pub static AITER: Experts = Experts { name: "AiterExperts", ..PLAIN };

/// `XPUExpertsFp8`.
pub static XPU_FP8: Experts = Experts {
    name: "XPUExpertsFp8",
    devices: Devices { cuda: &[], xpu: true, cpu: false, needs: NOTHING },
    ungated: true,
    activations: &[Act::Silu, Act::Gelu, Act::SwigluOai, Act::Relu2NoMul],
    schemes: &[pairs(&[(W::Fp8Tensor, Some(A::None)), TENSOR_DYNAMIC])],
    ..PLAIN
};

/// `CPUExpertsFp8`: router and experts in one kernel.
pub static CPU_FP8: Experts = Experts {
    name: "CPUExpertsFp8",
    devices: Devices { cuda: &[], xpu: false, cpu: true, needs: NOTHING },
    schemes: &[pairs(&[BLOCK])],
    routing: Some(&[(&[W::Fp8Block128], &[R::Default, R::Renormalize, R::RenormalizeNaive])]),
    ..PLAIN
};

/// Weights that Marlin supports with 16-bit activations.
const MARLIN_WEIGHTS: &[(W, Option<A>)] = &[
    (W::Fp8Block128, None),
    (W::Fp8Channel, None),
    (W::Fp8Tensor, None),
    (W::Block(&mxfp4::FORMAT), None),
    (W::Block(&mxfp8::FORMAT), None),
    (W::Block(&nvfp4::FORMAT), None),
    (W::Int4, None),
    (W::Int8, None),
];

/// Marlin: only the weights matter, since activations stay 16 bits wide.
const MARLIN_EITHER: Experts = Experts {
    devices: cuda(&[From(7, 5)], NOTHING),
    ungated: true,
    activations: MOST,
    schemes: &[pairs(MARLIN_WEIGHTS)],
    excludes: NOT_NVLINK,
    ..PLAIN
};

/// `MarlinExperts`.
pub static MARLIN: Experts = Experts { name: "MarlinExperts", lora: true, ..MARLIN_EITHER };

/// `BatchedMarlinExperts`.
pub static BATCHED_MARLIN: Experts =
    Experts { name: "BatchedMarlinExperts", format: BatchedExperts, ..MARLIN_EITHER };

const TRTLLM_NVFP4: Experts = Experts {
    devices: cuda(&[Family(10)], FLASHINFER),
    ungated: true,
    activations: &[Act::Silu, Act::Relu2NoMul, Act::Gelu],
    schemes: &[pairs(&[NVFP4])],
    ..PLAIN
};

/// `TrtLlmNvFp4ExpertsMonolithic`: router and experts in one kernel; no exchange of tokens.
pub static TRTLLM_NVFP4_MONOLITHIC: Experts = Experts {
    name: "TrtLlmNvFp4ExpertsMonolithic",
    excludes: Excludes { all2all: All2All::ALL, ep: false, eplb: true },
    routing: Some(&[(
        &[W::Block(&nvfp4::FORMAT)],
        &[
            R::DeepSeekV3,
            R::Renormalize,
            R::RenormalizeNaive,
            R::Llama4,
            R::SigmoidRenorm,
            R::MiniMax2,
            R::Simulated,
        ],
    )]),
    ..TRTLLM_NVFP4
};

/// `TrtLlmNvFp4ExpertsModular`.
pub static TRTLLM_NVFP4_MODULAR: Experts =
    Experts { name: "TrtLlmNvFp4ExpertsModular", ..TRTLLM_NVFP4 };

const CUTEDSL: Experts =
    Experts { devices: cuda(&[Family(10)], FLASHINFER), schemes: &[pairs(&[NVFP4])], ..PLAIN };

/// `FlashInferCuteDSLExperts`.
pub static FLASHINFER_CUTEDSL: Experts = Experts { name: "FlashInferCuteDSLExperts", ..CUTEDSL };

/// `FlashInferCuteDSLBatchedExperts`.
pub static FLASHINFER_CUTEDSL_BATCHED: Experts =
    Experts { name: "FlashInferCuteDSLBatchedExperts", format: BatchedExperts, ..CUTEDSL };

/// `CutlassExpertsFp4`.
pub static CUTLASS_NVFP4: Experts = Experts {
    name: "CutlassExpertsFp4",
    devices: cuda(&[Family(10), Family(11), Family(12)], NOTHING),
    ungated: true,
    activations: &[
        Act::Silu,
        Act::Gelu,
        Act::SwigluOai,
        Act::SwigluStep,
        Act::SiluNoMul,
        Act::GeluNoMul,
        Act::Relu2NoMul,
    ],
    schemes: &[pairs(&[NVFP4])],
    excludes: Excludes { all2all: &[], ep: true, eplb: false },
    ..PLAIN
};

/// Backend and class of gpt-oss's experts in TensorRT-LLM's kernel.
pub const STACKS_TRTLLM: (&str, &str) =
    ("FLASHINFER_TRTLLM_MXFP4_BF16", "TrtLlmMxfp4ExpertsMonolithic");

/// Backend and class of gpt-oss's experts in Triton's own kernels.
pub const STACKS_TRITON: (&str, &str) = ("TRITON", "OAITritonMxfp4ExpertsMonolithic");

/// `Nvfp4QuantizationEmulationTritonExperts`: dequantized weights through Triton.
pub static NVFP4_EMULATION: Experts = Experts {
    name: "Nvfp4QuantizationEmulationTritonExperts",
    devices: Devices { cuda: ANY, xpu: true, cpu: false, needs: NOTHING },
    ungated: true,
    activations: MOST,
    schemes: &[pairs(&[NVFP4])],
    excludes: NOT_NVLINK,
    batch_invariant: true,
    lora: true,
    ..PLAIN
};
