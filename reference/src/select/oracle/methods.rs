//! The methods and their backends as rows: their classes, their order, and the names by which a user
//! requests them. [`blocks`] has those of block formats. Facts follow vLLM 0.21.0
//! `fused_moe/oracle/{fp8,int_wna16}.py`.

use super::super::WeightKey as W;
use super::blocks::{BlockOracle, ORACLES, marlin, switched};
use super::class::{Compute, MoeBackend as B, Newer, Table, humming, newer, of, row};
use super::keys::{ActivationKey as A, Runner};
use super::{blocks, experts};
use crate::config::Scheme;
use crate::formats::blocks::BlockFormat;
use crate::num::dims::GroupSize;

/// A quantization method with its own oracle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MoeMethod {
    /// e4m3fn weights (`select_fp8_moe_backend`).
    Fp8,
    /// A block format.
    Block(&'static BlockOracle),
    /// 4- and 8-bit integers with 16-bit activations (`select_wna16_moe_backend`).
    IntWna16,
}

static FP8: Table = Table {
    rows: &[
        row(B::Aiter, &[&experts::AITER]),
        row(B::FlashInferTrtllm, &[&blocks::TRTLLM_FP8_MONOLITHIC, &blocks::TRTLLM_FP8_MODULAR]),
        row(B::FlashInferCutlass, &[&blocks::FLASHINFER_CUTLASS]),
        row(B::DeepGemm, &[&experts::TRITON_OR_DEEP_GEMM]),
        row(B::VllmCutlass, &[&experts::TRITON_OR_CUTLASS]),
        row(B::Triton, &[&experts::TRITON]),
        row(B::Marlin, &[&blocks::MARLIN]),
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
    switch: Some(switched(
        |s| s.use_flashinfer_moe_fp8,
        &[B::FlashInferTrtllm, B::FlashInferCutlass],
    )),
    forces_marlin: true,
};

static INT_WNA16: Table = Table {
    rows: &[row(B::Marlin, &[&blocks::MARLIN]), row(B::BatchedMarlin, &[&blocks::BATCHED_MARLIN])],
    // This oracle ignores the requested backend.
    runners: &[],
    batched: &[],
    switch: None,
    forces_marlin: false,
};

impl MoeMethod {
    /// Every method.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Fp8].into_iter().chain(ORACLES.iter().map(Self::Block)).chain([Self::IntWna16])
    }

    /// The method of a block format.
    pub(super) fn of_block(format: &BlockFormat) -> Option<Self> {
        ORACLES.iter().find(|oracle| oracle.format == format).map(Self::Block)
    }

    /// Name, as upstream's module is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Block(oracle) => oracle.format.name,
            Self::IntWna16 => "int_wna16",
        }
    }

    /// The method's table.
    pub fn table(self) -> &'static Table {
        match self {
            Self::Fp8 => &FP8,
            Self::Block(oracle) => &oracle.table,
            Self::IntWna16 => &INT_WNA16,
        }
    }
}

use Compute::{Between, Exactly, Family, From};

const BLOCK: &[(W, A)] = &[(W::Fp8Block128, A::Fp8Dynamic128)];
const STATIC: &[(W, A)] = &[(W::Fp8Tensor, A::Fp8StaticTensor)];
const DYNAMIC: &[(W, A)] =
    &[(W::Fp8Channel, A::Fp8DynamicToken), (W::Fp8Tensor, A::Fp8DynamicTensor)];
const FP8_KEYS: &[(W, A)] = &[BLOCK[0], STATIC[0], DYNAMIC[0], DYNAMIC[1]];
const MARLIN_ONLY: &[(W, A)] = &[(W::Fp8Tensor, A::Fp8Dynamic128)];
const INTEGERS: &[(W, A)] = &[(W::Int4, A::None), (W::Int8, A::None), (W::IntZeroPoints, A::None)];
const W4A8: &[(W, A)] = &[(W::Int4, A::Fp8DynamicToken)];

/// compressed-tensors with zero points, which Humming's key does not cover.
fn packed_with_zeros(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Wna16(w) if w.checkpoint_format.columns_first && !w.symmetric())
}

/// compressed-tensors' 4-bit integers without zero points, in groups of 32.
fn packed_groups_of_32(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Wna16(w) if w.checkpoint_format.columns_first
        && w.symmetric() && w.bits() == 4 && w.group_size == GroupSize::Of(32))
}

/// The defaults of vLLM 0.33.0 on CUDA, from 7.5 on, outside the block formats
/// (`fused_moe/oracle/*.py`).
pub static NEWER: &[Newer] = &[
    Newer {
        ep: true,
        ..of(BLOCK, Exactly(9, 0), B::FlashInferCutlass, &blocks::FLASHINFER_CUTLASS)
    },
    of(BLOCK, Family(10), B::FlashInferTrtllm, &blocks::TRTLLM_FP8_MONOLITHIC),
    of(BLOCK, Family(12), B::DeepGemm, &experts::TRITON_OR_DEEP_GEMM),
    of(STATIC, Family(10), B::FlashInferTrtllm, &blocks::TRTLLM_FP8_MONOLITHIC),
    of(STATIC, Exactly(9, 0), B::FlashInferCutlass, &blocks::FLASHINFER_CUTLASS),
    of(STATIC, Family(12), B::FlashInferCutlass, &blocks::FLASHINFER_CUTLASS),
    Newer {
        cutlass: true,
        ..of(DYNAMIC, Between((9, 0), (11, 0)), B::VllmCutlass, &experts::TRITON_OR_CUTLASS)
    },
    of(FP8_KEYS, From(8, 9), B::Triton, &experts::TRITON),
    marlin(FP8_KEYS),
    humming(MARLIN_ONLY, Exactly(9, 0)),
    marlin(MARLIN_ONLY),
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
