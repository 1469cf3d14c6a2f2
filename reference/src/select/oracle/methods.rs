//! The backends of each quantization method as rows: their classes, their order, and the names by
//! which a user requests them. Facts follow vLLM 0.21.0
//! `fused_moe/oracle/{fp8,nvfp4,mxfp8,int_wna16}.py`.

use super::super::WeightKey;
use super::class::{Compute, Experts};
use super::experts;
use super::keys::{ActivationKey, Runner, Switches};
use crate::config::Scheme;
use crate::formats::blocks::BlockFormat;
use crate::formats::{mxfp8, nvfp4};
use crate::num::dims::GroupSize;

/// A MoE backend, by upstream's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum MoeBackend {
    FlashInferTrtllm,
    FlashInferCutlass,
    FlashInferCuteDsl,
    FlashInferCuteDslBatched,
    DeepGemm,
    BatchedDeepGemm,
    Marlin,
    BatchedMarlin,
    Triton,
    BatchedTriton,
    Aiter,
    VllmCutlass,
    BatchedVllmCutlass,
    Xpu,
    Cpu,
    Emulation,
}

impl MoeBackend {
    /// Upstream's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FlashInferTrtllm => "FLASHINFER_TRTLLM",
            Self::FlashInferCutlass => "FLASHINFER_CUTLASS",
            Self::FlashInferCuteDsl => "FLASHINFER_CUTEDSL",
            Self::FlashInferCuteDslBatched => "FLASHINFER_CUTEDSL_BATCHED",
            Self::DeepGemm => "DEEPGEMM",
            Self::BatchedDeepGemm => "BATCHED_DEEPGEMM",
            Self::Marlin => "MARLIN",
            Self::BatchedMarlin => "BATCHED_MARLIN",
            Self::Triton => "TRITON",
            Self::BatchedTriton => "BATCHED_TRITON",
            Self::Aiter => "AITER",
            Self::VllmCutlass => "VLLM_CUTLASS",
            Self::BatchedVllmCutlass => "BATCHED_VLLM_CUTLASS",
            Self::Xpu => "XPU",
            Self::Cpu => "CPU",
            Self::Emulation => "EMULATION",
        }
    }
}

/// A quantization method with its own oracle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MoeMethod {
    /// e4m3fn weights (`select_fp8_moe_backend`).
    Fp8,
    /// NVFP4 (`select_nvfp4_moe_backend`).
    Nvfp4,
    /// MXFP8 (`select_mxfp8_moe_backend`).
    Mxfp8,
    /// 4- and 8-bit integers with 16-bit activations (`select_wna16_moe_backend`).
    IntWna16,
}

/// A backend and its classes, the preferred first.
#[derive(Debug)]
pub struct Row {
    /// Backend.
    pub backend: MoeBackend,
    /// Classes.
    pub experts: &'static [&'static Experts],
}

/// An environment switch of a library's backends.
#[derive(Debug)]
pub struct LibrarySwitch {
    /// Its value: `true` requests the backends, `false` rules them out.
    pub value: fn(&Switches) -> Option<bool>,
    /// The backends, in the order in which they are tried on request.
    pub backends: &'static [MoeBackend],
}

/// A method's table.
#[derive(Debug)]
pub struct Table {
    /// Backends, the preferred first.
    pub rows: &'static [Row],
    /// Names by which a user requests a backend.
    pub runners: &'static [(Runner, MoeBackend)],
    /// Backends with a counterpart for tokens sorted by expert, which replaces a requested backend.
    pub batched: &'static [(MoeBackend, MoeBackend)],
    /// The switch that requests a library's backends or rules them out.
    pub switch: Option<LibrarySwitch>,
    /// Whether `VLLM_TEST_FORCE_FP8_MARLIN` asks for Marlin.
    pub forces_marlin: bool,
}

impl Table {
    /// The classes of a backend.
    pub fn experts(&self, backend: MoeBackend) -> &'static [&'static Experts] {
        self.rows.iter().find(|row| row.backend == backend).map_or(&[], |row| row.experts)
    }
}

use MoeBackend as B;

const fn row(backend: B, experts: &'static [&'static Experts]) -> Row {
    Row { backend, experts }
}

static FP8: Table = Table {
    rows: &[
        row(B::Aiter, &[&experts::AITER]),
        row(B::FlashInferTrtllm, &[&experts::TRTLLM_FP8_MONOLITHIC, &experts::TRTLLM_FP8_MODULAR]),
        row(B::FlashInferCutlass, &[&experts::FLASHINFER_CUTLASS]),
        row(B::DeepGemm, &[&experts::TRITON_OR_DEEP_GEMM]),
        row(B::VllmCutlass, &[&experts::TRITON_OR_CUTLASS]),
        row(B::Triton, &[&experts::TRITON]),
        row(B::Marlin, &[&experts::MARLIN]),
        row(B::BatchedDeepGemm, &[&experts::BATCHED_DEEP_GEMM]),
        row(B::BatchedVllmCutlass, &[&experts::BATCHED_CUTLASS]),
        row(B::BatchedTriton, &[&experts::BATCHED_TRITON]),
        row(B::Xpu, &[&experts::XPU_FP8]),
        row(B::Cpu, &[&experts::CPU_FP8]),
    ],
    runners: &[
        (Runner::Triton, B::Triton),
        (Runner::DeepGemm, B::DeepGemm),
        (Runner::Cutlass, B::VllmCutlass),
        (Runner::FlashInferTrtllm, B::FlashInferTrtllm),
        (Runner::FlashInferCutlass, B::FlashInferCutlass),
        (Runner::Marlin, B::Marlin),
        (Runner::Aiter, B::Aiter),
    ],
    batched: &[
        (B::DeepGemm, B::BatchedDeepGemm),
        (B::Triton, B::BatchedTriton),
        (B::VllmCutlass, B::BatchedVllmCutlass),
    ],
    switch: Some(LibrarySwitch {
        value: |s| s.use_flashinfer_moe_fp8,
        backends: &[B::FlashInferTrtllm, B::FlashInferCutlass],
    }),
    forces_marlin: true,
};

static NVFP4: Table = Table {
    rows: &[
        row(
            B::FlashInferTrtllm,
            &[&experts::TRTLLM_NVFP4_MONOLITHIC, &experts::TRTLLM_NVFP4_MODULAR],
        ),
        row(B::FlashInferCuteDsl, &[&experts::FLASHINFER_CUTEDSL]),
        row(B::FlashInferCuteDslBatched, &[&experts::FLASHINFER_CUTEDSL_BATCHED]),
        row(B::FlashInferCutlass, &[&experts::FLASHINFER_CUTLASS]),
        row(B::VllmCutlass, &[&experts::CUTLASS_NVFP4]),
        row(B::Marlin, &[&experts::MARLIN]),
        row(B::Emulation, &[&experts::NVFP4_EMULATION]),
    ],
    runners: &[
        (Runner::Cutlass, B::VllmCutlass),
        (Runner::FlashInferTrtllm, B::FlashInferTrtllm),
        (Runner::FlashInferCutlass, B::FlashInferCutlass),
        (Runner::FlashInferCuteDsl, B::FlashInferCuteDsl),
        (Runner::Marlin, B::Marlin),
        (Runner::Emulation, B::Emulation),
    ],
    batched: &[(B::FlashInferCuteDsl, B::FlashInferCuteDslBatched)],
    switch: Some(LibrarySwitch {
        value: |s| s.use_flashinfer_moe_fp4,
        backends: &[
            B::FlashInferTrtllm,
            B::FlashInferCutlass,
            B::FlashInferCuteDsl,
            B::FlashInferCuteDslBatched,
        ],
    }),
    forces_marlin: true,
};

static MXFP8: Table = Table {
    rows: &[
        row(B::FlashInferTrtllm, &[&experts::TRTLLM_FP8_MONOLITHIC, &experts::TRTLLM_FP8_MODULAR]),
        row(B::Marlin, &[&experts::MARLIN]),
    ],
    runners: &[(Runner::FlashInferTrtllm, B::FlashInferTrtllm), (Runner::Marlin, B::Marlin)],
    batched: &[],
    switch: None,
    forces_marlin: false,
};

static INT_WNA16: Table = Table {
    rows: &[
        row(B::Marlin, &[&experts::MARLIN]),
        row(B::BatchedMarlin, &[&experts::BATCHED_MARLIN]),
    ],
    // This oracle ignores the requested backend.
    runners: &[],
    batched: &[],
    switch: None,
    forces_marlin: false,
};

impl MoeMethod {
    /// Every method.
    pub const ALL: &'static [Self] = &[Self::Fp8, Self::Nvfp4, Self::Mxfp8, Self::IntWna16];

    /// The method of a block format; it asks about activations in the same format.
    pub(super) fn of_block(format: &BlockFormat) -> Option<Self> {
        let known = [(&mxfp8::FORMAT, Self::Mxfp8), (&nvfp4::FORMAT, Self::Nvfp4)];
        known.into_iter().find(|(f, _)| *f == format).map(|(_, method)| method)
    }

    /// Name, as upstream's module is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
            Self::IntWna16 => "int_wna16",
        }
    }

    /// The method's table.
    pub fn table(self) -> &'static Table {
        match self {
            Self::Fp8 => &FP8,
            Self::Nvfp4 => &NVFP4,
            Self::Mxfp8 => &MXFP8,
            Self::IntWna16 => &INT_WNA16,
        }
    }
}

/// A default of vLLM 0.33.0: the kernel of experts with these keys on these devices. The first row
/// that fits is the answer.
#[derive(Debug, Clone, Copy)]
pub struct Newer {
    /// Weights and activations.
    pub keys: &'static [(WeightKey, ActivationKey)],
    /// Compute capabilities.
    pub cuda: Compute,
    /// Only with expert parallelism.
    pub ep: bool,
    /// FP8: only where the method takes vLLM's CUTLASS kernels.
    pub cutlass: bool,
    /// Only for some of the schemes with these keys.
    pub only: Option<fn(&Scheme) -> bool>,
    /// Upstream's name of the backend.
    pub backend: &'static str,
    /// Upstream's name of the class; `Humming` is the grouped class with expert parallelism and the
    /// indexed one without.
    pub class: &'static str,
}

use ActivationKey as A;
use Compute::{Between, Exactly, Family, From};
use WeightKey as W;

const BLOCK: &[(W, A)] = &[(W::Fp8Block128, A::Fp8Dynamic128)];
const STATIC: &[(W, A)] = &[(W::Fp8Tensor, A::Fp8StaticTensor)];
const DYNAMIC: &[(W, A)] =
    &[(W::Fp8Channel, A::Fp8DynamicToken), (W::Fp8Tensor, A::Fp8DynamicTensor)];
const FP8_KEYS: &[(W, A)] = &[BLOCK[0], STATIC[0], DYNAMIC[0], DYNAMIC[1]];
const MARLIN_ONLY: &[(W, A)] = &[(W::Fp8Tensor, A::Fp8Dynamic128)];
const MXFP8_KEYS: &[(W, A)] = &[(W::Block(&mxfp8::FORMAT), A::Block(&mxfp8::FORMAT))];
const NVFP4_KEYS: &[(W, A)] = &[(W::Block(&nvfp4::FORMAT), A::Block(&nvfp4::FORMAT))];
const NVFP4_16: &[(W, A)] = &[(W::Block(&nvfp4::FORMAT), A::None)];
const INTEGERS: &[(W, A)] = &[(W::Int4, A::None), (W::Int8, A::None), (W::IntZeroPoints, A::None)];
const W4A8: &[(W, A)] = &[(W::Int4, A::Fp8DynamicToken)];

const fn newer(
    keys: &'static [(W, A)],
    cuda: Compute,
    backend: &'static str,
    class: &'static str,
) -> Newer {
    Newer { keys, cuda, ep: false, cutlass: false, only: None, backend, class }
}

/// Humming, which precedes Marlin on 9.0.
const fn humming(keys: &'static [(W, A)], cuda: Compute) -> Newer {
    newer(keys, cuda, "HUMMING", "Humming")
}

const fn marlin(keys: &'static [(W, A)]) -> Newer {
    newer(keys, From(7, 5), "MARLIN", experts::MARLIN.name)
}

const fn of(keys: &'static [(W, A)], cuda: Compute, b: MoeBackend, class: &Experts) -> Newer {
    newer(keys, cuda, b.name(), class.name)
}

/// compressed-tensors with zero points, which Humming's key does not cover.
fn packed_with_zeros(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Wna16(w) if w.checkpoint_format.columns_first && !w.symmetric())
}

/// compressed-tensors' 4-bit integers without zero points, in groups of 32.
fn packed_groups_of_32(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Wna16(w) if w.checkpoint_format.columns_first
        && w.symmetric() && w.bits() == 4 && w.group_size == GroupSize::Of(32))
}

/// The defaults of vLLM 0.33.0 on CUDA, from 7.5 on (`fused_moe/oracle/*.py`).
pub static NEWER: &[Newer] = &[
    Newer {
        ep: true,
        ..of(BLOCK, Exactly(9, 0), B::FlashInferCutlass, &experts::FLASHINFER_CUTLASS)
    },
    of(BLOCK, Family(10), B::FlashInferTrtllm, &experts::TRTLLM_FP8_MONOLITHIC),
    of(BLOCK, Family(12), B::DeepGemm, &experts::TRITON_OR_DEEP_GEMM),
    of(STATIC, Family(10), B::FlashInferTrtllm, &experts::TRTLLM_FP8_MONOLITHIC),
    of(STATIC, Exactly(9, 0), B::FlashInferCutlass, &experts::FLASHINFER_CUTLASS),
    of(STATIC, Family(12), B::FlashInferCutlass, &experts::FLASHINFER_CUTLASS),
    Newer {
        cutlass: true,
        ..of(DYNAMIC, Between((9, 0), (11, 0)), B::VllmCutlass, &experts::TRITON_OR_CUTLASS)
    },
    of(FP8_KEYS, From(8, 9), B::Triton, &experts::TRITON),
    marlin(FP8_KEYS),
    humming(MARLIN_ONLY, Exactly(9, 0)),
    marlin(MARLIN_ONLY),
    humming(NVFP4_KEYS, Exactly(9, 0)),
    of(NVFP4_KEYS, Family(10), B::FlashInferTrtllm, &experts::TRTLLM_NVFP4_MONOLITHIC),
    of(NVFP4_KEYS, Family(11), B::VllmCutlass, &experts::CUTLASS_NVFP4),
    of(NVFP4_KEYS, Family(12), B::FlashInferCutlass, &experts::FLASHINFER_CUTLASS),
    marlin(NVFP4_KEYS),
    humming(NVFP4_16, Exactly(9, 0)),
    marlin(NVFP4_16),
    humming(MXFP8_KEYS, Exactly(9, 0)),
    of(MXFP8_KEYS, Family(10), B::FlashInferTrtllm, &experts::TRTLLM_FP8_MONOLITHIC),
    marlin(MXFP8_KEYS),
    Newer {
        only: Some(packed_groups_of_32),
        ..newer(INTEGERS, Family(10), "FLASHINFER_TRTLLM", "TrtLlmMxint4ExpertsMonolithic")
    },
    Newer { only: Some(packed_with_zeros), ..marlin(INTEGERS) },
    humming(INTEGERS, Exactly(9, 0)),
    marlin(INTEGERS),
    newer(W4A8, Exactly(9, 0), "CUTLASS", "CutlassExpertsW4A8Fp8"),
    humming(W4A8, From(7, 5)),
];

/// Experts that files keep in stacks (`select_mxfp4_moe_backend`), in 0.21.0 and in 0.33.0.
pub static STORED_STACKS: [&[Newer]; 2] = [
    &[
        newer(&[], Family(10), experts::STACKS_TRTLLM.0, experts::STACKS_TRTLLM.1),
        newer(&[], Exactly(9, 0), experts::STACKS_TRITON.0, experts::STACKS_TRITON.1),
        marlin(&[]),
    ],
    &[
        newer(&[], Family(10), experts::STACKS_TRTLLM.0, experts::STACKS_TRTLLM.1),
        newer(&[], Exactly(9, 0), experts::STACKS_TRITON.0, experts::STACKS_TRITON.1),
        newer(&[], Family(11), experts::STACKS_TRITON.0, experts::STACKS_TRITON.1),
        marlin(&[]),
    ],
];
