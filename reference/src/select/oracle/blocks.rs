//! Classes that read block formats, and the oracles and defaults of these formats.
//!
//! This is the only file of kernel selection that names a block format. Facts follow vLLM 0.21.0
//! `fused_moe/oracle/{nvfp4,mxfp8,mxfp4}.py` and `fused_moe/experts/*.py`.

use std::hash::{Hash, Hasher};

use super::super::ActivationFormat::BatchedExperts;
use super::super::{All2All, Capability};
use super::super::{MoeActivation as Act, WeightKey as W};
use super::class::{
    Compute, Devices, Excludes, Experts, LibrarySwitch, MoeBackend as B, Needs, Newer, Pairs,
    Table, humming, newer, of, row,
};
use super::experts::{ANY, BLOCK, MOST, NOT_NVLINK, NOTHING, PLAIN, TENSOR_STATIC, cuda, pairs};
use super::keys::{ActivationKey as A, FlashInferBackend, RoutingMethod as R, Runner, Switches};
use crate::formats::blocks::BlockFormat;
use crate::formats::{mxfp4, mxfp8, nvfp4};
use All2All::{
    DeepEpHighThroughput, DeepEpLowLatency, FlashInferAll2AllV, FlashInferNvlinkOneSided,
    FlashInferNvlinkTwoSided, Mori, NixlEp,
};
use Compute::{Exactly, Family, From};

/// The package of these classes.
const PACKAGE: &str = "FlashInfer";
const WITH_PACKAGE: Needs = Needs { package: PACKAGE, met: |d| d.packages.has_flashinfer };

/// The switch of the package's kernels, for a method's table.
pub(super) const fn switched(
    value: fn(&Switches) -> Option<bool>,
    backends: &'static [B],
) -> LibrarySwitch {
    LibrarySwitch { library: PACKAGE, value, requested, backends }
}

/// The backend of `VLLM_FLASHINFER_MOE_BACKEND`, and the variable's value.
fn requested(switches: &Switches, device: &Capability) -> Option<(B, &'static str)> {
    let value = switches.flashinfer_moe_backend?;
    let family_10 = device.compute.is_some_and(|(major, _)| major == 10);
    let backend = match value {
        FlashInferBackend::Latency if family_10 => B::FlashInferTrtllm,
        FlashInferBackend::Latency | FlashInferBackend::Throughput => B::FlashInferCutlass,
        FlashInferBackend::MaskedGemm => B::FlashInferCuteDsl,
    };
    Some((backend, value.name()))
}

const MXFP8_BOTH: (W, Option<A>) = (W::Block(&mxfp8::FORMAT), Some(A::Block(&mxfp8::FORMAT)));
const NVFP4_BOTH: (W, Option<A>) = (W::Block(&nvfp4::FORMAT), Some(A::Block(&nvfp4::FORMAT)));

const TRTLLM_FP8: Experts = Experts {
    devices: cuda(&[Family(10)], WITH_PACKAGE),
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
    schemes: &[pairs(&[BLOCK, TENSOR_STATIC, MXFP8_BOTH])],
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
pub static TRTLLM_FP8_MODULAR: Experts = Experts {
    name: "TrtLlmFp8ExpertsModular",
    schemes: &[pairs(&[BLOCK, MXFP8_BOTH])],
    ..TRTLLM_FP8
};

/// `FlashInferExperts`: CUTLASS kernels. 11.x is left out.
pub static FLASHINFER_CUTLASS: Experts = Experts {
    name: "FlashInferExperts",
    devices: cuda(&[Exactly(9, 0), Family(10), Family(12)], WITH_PACKAGE),
    ungated: true,
    activations: &[Act::Silu, Act::Relu2NoMul, Act::SwigluOai],
    schemes: &[
        Pairs { keys: &[TENSOR_STATIC], cuda: Some(From(9, 0)) },
        Pairs { keys: &[BLOCK], cuda: Some(Exactly(9, 0)) },
        Pairs { keys: &[NVFP4_BOTH], cuda: Some(From(10, 0)) },
    ],
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
    devices: cuda(&[Family(10)], WITH_PACKAGE),
    ungated: true,
    activations: &[Act::Silu, Act::Relu2NoMul, Act::Gelu],
    schemes: &[pairs(&[NVFP4_BOTH])],
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

const CUTEDSL: Experts = Experts {
    devices: cuda(&[Family(10)], WITH_PACKAGE),
    schemes: &[pairs(&[NVFP4_BOTH])],
    ..PLAIN
};

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
    schemes: &[pairs(&[NVFP4_BOTH])],
    excludes: Excludes { all2all: &[], ep: true, eplb: false },
    ..PLAIN
};

/// `Nvfp4QuantizationEmulationTritonExperts`: dequantized weights through Triton.
pub static NVFP4_EMULATION: Experts = Experts {
    name: "Nvfp4QuantizationEmulationTritonExperts",
    devices: Devices { cuda: ANY, xpu: true, cpu: false, needs: NOTHING },
    ungated: true,
    activations: MOST,
    schemes: &[pairs(&[NVFP4_BOTH])],
    excludes: NOT_NVLINK,
    batch_invariant: true,
    lora: true,
    ..PLAIN
};

/// A block format with an oracle upstream, `select_<format>_moe_backend`. It asks about activations
/// in the same format.
#[derive(Debug)]
pub struct BlockOracle {
    pub(super) format: &'static BlockFormat,
    pub(super) table: Table,
}

impl PartialEq for BlockOracle {
    fn eq(&self, other: &Self) -> bool {
        self.format == other.format
    }
}

impl Eq for BlockOracle {}

impl Hash for BlockOracle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.format.hash(state);
    }
}

/// Every block format with an oracle.
pub static ORACLES: [BlockOracle; 2] = [
    BlockOracle {
        format: &nvfp4::FORMAT,
        table: Table {
            rows: &[
                row(B::FlashInferTrtllm, &[&TRTLLM_NVFP4_MONOLITHIC, &TRTLLM_NVFP4_MODULAR]),
                row(B::FlashInferCuteDsl, &[&FLASHINFER_CUTEDSL]),
                row(B::FlashInferCuteDslBatched, &[&FLASHINFER_CUTEDSL_BATCHED]),
                row(B::FlashInferCutlass, &[&FLASHINFER_CUTLASS]),
                row(B::VllmCutlass, &[&CUTLASS_NVFP4]),
                row(B::Marlin, &[&MARLIN]),
                row(B::Emulation, &[&NVFP4_EMULATION]),
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
            switch: Some(switched(
                |s| s.use_flashinfer_moe_fp4,
                &[
                    B::FlashInferTrtllm,
                    B::FlashInferCutlass,
                    B::FlashInferCuteDsl,
                    B::FlashInferCuteDslBatched,
                ],
            )),
            forces_marlin: true,
        },
    },
    BlockOracle {
        format: &mxfp8::FORMAT,
        table: Table {
            rows: &[
                row(B::FlashInferTrtllm, &[&TRTLLM_FP8_MONOLITHIC, &TRTLLM_FP8_MODULAR]),
                row(B::Marlin, &[&MARLIN]),
            ],
            runners: &[
                (Runner::FlashInferTrtllm, B::FlashInferTrtllm),
                (Runner::Marlin, B::Marlin),
            ],
            batched: &[],
            switch: None,
            forces_marlin: false,
        },
    },
];

const MXFP8_KEYS: &[(W, A)] = &[(W::Block(&mxfp8::FORMAT), A::Block(&mxfp8::FORMAT))];
const NVFP4_KEYS: &[(W, A)] = &[(W::Block(&nvfp4::FORMAT), A::Block(&nvfp4::FORMAT))];
const NVFP4_16: &[(W, A)] = &[(W::Block(&nvfp4::FORMAT), A::None)];

/// Marlin's row among the defaults of vLLM 0.33.0.
pub(super) const fn marlin(keys: &'static [(W, A)]) -> Newer {
    of(keys, From(7, 5), B::Marlin, &MARLIN)
}

/// The defaults of vLLM 0.33.0 for block formats, as [`Newer`].
pub static NEWER: &[Newer] = &[
    humming(NVFP4_KEYS, Exactly(9, 0)),
    of(NVFP4_KEYS, Family(10), B::FlashInferTrtllm, &TRTLLM_NVFP4_MONOLITHIC),
    of(NVFP4_KEYS, Family(11), B::VllmCutlass, &CUTLASS_NVFP4),
    of(NVFP4_KEYS, Family(12), B::FlashInferCutlass, &FLASHINFER_CUTLASS),
    marlin(NVFP4_KEYS),
    humming(NVFP4_16, Exactly(9, 0)),
    marlin(NVFP4_16),
    humming(MXFP8_KEYS, Exactly(9, 0)),
    of(MXFP8_KEYS, Family(10), B::FlashInferTrtllm, &TRTLLM_FP8_MONOLITHIC),
    marlin(MXFP8_KEYS),
];

/// gpt-oss's experts in TensorRT-LLM's kernel.
const STACKS_TRTLLM: Newer =
    newer(&[], Family(10), "FLASHINFER_TRTLLM_MXFP4_BF16", "TrtLlmMxfp4ExpertsMonolithic");

/// gpt-oss's experts in Triton's own kernels.
const fn stacks_triton(cuda: Compute) -> Newer {
    newer(&[], cuda, "TRITON", "OAITritonMxfp4ExpertsMonolithic")
}

/// Experts that files keep in stacks (`select_mxfp4_moe_backend`), in 0.21.0 and in 0.33.0.
pub static STORED_STACKS: [&[Newer]; 2] = [
    &[STACKS_TRTLLM, stacks_triton(Exactly(9, 0)), marlin(&[])],
    &[STACKS_TRTLLM, stacks_triton(Exactly(9, 0)), stacks_triton(Family(11)), marlin(&[])],
];
