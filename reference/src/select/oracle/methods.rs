//! The backends of each quantization method as rows: their classes, their order, and the names by
//! which a user requests them. Facts follow vLLM 0.21.0
//! `fused_moe/oracle/{fp8,nvfp4,mxfp8,int_wna16}.py`.

use super::class::Experts;
use super::experts;
use super::keys::{Runner, Switches};
use crate::formats::blocks::BlockFormat;
use crate::formats::{mxfp8, nvfp4};

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

/// A method's table.
#[derive(Debug)]
pub struct Table {
    /// Backends, the preferred first.
    pub rows: &'static [Row],
    /// Names by which a user requests a backend.
    pub runners: &'static [(Runner, MoeBackend)],
    /// Backends with a counterpart for tokens sorted by expert, which replaces a requested backend.
    pub batched: &'static [(MoeBackend, MoeBackend)],
    /// FlashInfer's backends, in the order in which they are tried when FlashInfer is requested.
    pub flashinfer: &'static [MoeBackend],
    /// The switch that asks for FlashInfer or rules it out.
    pub flashinfer_switch: Option<fn(&Switches) -> Option<bool>>,
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
    flashinfer: &[B::FlashInferTrtllm, B::FlashInferCutlass],
    flashinfer_switch: Some(|s| s.use_flashinfer_moe_fp8),
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
    flashinfer: &[
        B::FlashInferTrtllm,
        B::FlashInferCutlass,
        B::FlashInferCuteDsl,
        B::FlashInferCuteDslBatched,
    ],
    flashinfer_switch: Some(|s| s.use_flashinfer_moe_fp4),
    forces_marlin: true,
};

static MXFP8: Table = Table {
    rows: &[
        row(B::FlashInferTrtllm, &[&experts::TRTLLM_FP8_MONOLITHIC, &experts::TRTLLM_FP8_MODULAR]),
        row(B::Marlin, &[&experts::MARLIN]),
    ],
    runners: &[(Runner::FlashInferTrtllm, B::FlashInferTrtllm), (Runner::Marlin, B::Marlin)],
    batched: &[],
    flashinfer: &[],
    flashinfer_switch: None,
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
    flashinfer: &[],
    flashinfer_switch: None,
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
