//! The table of kernel classes outside the block formats: the devices and computations that each
//! supports.
//!
//! Facts follow the `_supports_*` methods of vLLM 0.21.0 `fused_moe/experts/*.py`,
//! `fused_batched_moe.py`, `triton_cutlass_moe.py` and `triton_deep_gemm_moe.py`.

use super::super::ActivationFormat::{BatchedExperts, Standard};
use super::super::All2All;
use super::super::{MoeActivation as Act, WeightKey as W};
use super::class::{Compute, Devices, Excludes, Experts, Needs, Pairs};
use super::keys::{ActivationKey as A, RoutingMethod as R};
use All2All::{
    DeepEpHighThroughput, FlashInferAll2AllV, FlashInferNvlinkOneSided, FlashInferNvlinkTwoSided,
};
use Compute::{Between, Exactly, Family, From};

pub(super) const NOTHING: Needs = Needs { package: "", met: |_| true };
const DEEP_GEMM_PACKAGE: Needs = Needs {
    package: "DeepGEMM, not switched off",
    met: |d| d.packages.has_deep_gemm && d.switches.use_deep_gemm != Some(false),
};

pub(super) const fn cuda(cuda: &'static [Compute], needs: Needs) -> Devices {
    Devices { cuda, xpu: false, cpu: false, needs }
}

pub(super) const fn pairs(keys: &'static [(W, Option<A>)]) -> Pairs {
    Pairs { keys, cuda: None }
}

pub(super) const ANY: &[Compute] = &[From(0, 0)];
const NVLINK: &[All2All] =
    &[FlashInferAll2AllV, FlashInferNvlinkTwoSided, FlashInferNvlinkOneSided];
pub(super) const NOT_NVLINK: Excludes = Excludes { all2all: NVLINK, ep: false, eplb: false };
const SERVES_ALL: Excludes = Excludes { all2all: &[], ep: false, eplb: false };

pub(super) const BLOCK: (W, Option<A>) = (W::Fp8Block128, Some(A::Fp8Dynamic128));
const CHANNEL: (W, Option<A>) = (W::Fp8Channel, Some(A::Fp8DynamicToken));
pub(super) const TENSOR_STATIC: (W, Option<A>) = (W::Fp8Tensor, Some(A::Fp8StaticTensor));
const TENSOR_DYNAMIC: (W, Option<A>) = (W::Fp8Tensor, Some(A::Fp8DynamicTensor));
const TENSOR_TOKEN: (W, Option<A>) = (W::Fp8Tensor, Some(A::Fp8DynamicToken));
const FP8: &[(W, Option<A>)] = &[BLOCK, CHANNEL, TENSOR_TOKEN, TENSOR_STATIC, TENSOR_DYNAMIC];

/// Both forms of every function except gated squared ReLU.
pub(super) const MOST: &[Act] = &[
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
pub(super) const PLAIN: Experts = Experts {
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
