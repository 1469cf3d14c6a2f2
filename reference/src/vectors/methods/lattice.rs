//! The configurations of each operation.

use crate::case::{
    Activation, CaseConfig, FnuzConfig, Fp4MmConfig, Fp4QuantConfig, Fp8LayerConfig, Fp8MmConfig,
    GptOssConfig, MxInt4Config, Nvfp4ExpertsConfig, Op, RequantizeConfig, ScheduleChoice,
    SwizzleConfig,
};
use crate::gemm::schedule::{Fp8Kernel, Schedule};
use crate::gemm::tensor_core::Architecture;
use crate::layout::flashinfer::{Nvfp4Backend, ScaleTile};
use crate::prepare::gate_up::GateUp;
use crate::prepare::gpt_oss::GptOssShard;
use crate::prepare::pad::Mxfp4Backend;
use crate::prepare::requantize::{Fp8Type, Requantize};
use crate::scalar::ScalarType;
use crate::select::Platform;
use crate::{Error, Result};

const HALF: [ScalarType; 2] = [ScalarType::FLOAT16, ScalarType::BFLOAT16];
const FLAGS: [bool; 2] = [false, true];

/// Every configuration of a method's operation.
///
/// # Errors
/// [`Error::Unsupported`] for an operation of another kind.
pub(in crate::vectors) fn lattice(op: Op) -> Result<Vec<CaseConfig>> {
    Ok(match op {
        Op::SwizzleBlockscale => swizzle(),
        Op::TrtllmMxInt4 => mxint4(),
        Op::Nvfp4Experts => nvfp4(),
        Op::Fp8Requantize => requantize(),
        Op::NormalizeFnuz => fnuz(),
        Op::GptOssMxfp4 => gpt_oss(),
        Op::ScaledFp4Quant => fp4_quant(),
        Op::ScaledFp4Mm => fp4_mm(),
        Op::ScaledMm => scaled_mm()?,
        Op::Fp8Moe => fp8_moe()?,
        other => return Err(Error::unsupported(other, "no cases are generated for it")),
    })
}

/// Rows and groups around the edges of tiles of 128 x 4 and 8 x 4.
fn swizzle() -> Vec<CaseConfig> {
    let types = [ScalarType::FLOAT8_E4M3FN, ScalarType::FLOAT8_E8M0FNU, ScalarType::BFLOAT16];
    let mut all = Vec::new();
    for size_n in [1, 7, 8, 9, 31, 33, 127, 128, 129, 257] {
        for groups in [1, 3, 4, 5, 8] {
            for scale_type in types {
                for (tile, num_experts) in [
                    (ScaleTile::Rows128, None),
                    (ScaleTile::Rows8, None),
                    (ScaleTile::Rows128, Some(3)),
                ] {
                    all.push(
                        SwizzleConfig { scale_type, tile, num_experts, size_n, groups }.into(),
                    );
                }
            }
        }
    }
    all
}

fn mxint4() -> Vec<CaseConfig> {
    let sizes = [(256, 256), (512, 256), (256, 512)];
    let of = |(hidden_size, intermediate_size)| {
        [1, 2]
            .map(|num_experts| MxInt4Config { num_experts, hidden_size, intermediate_size }.into())
    };
    sizes.into_iter().flat_map(of).collect()
}

/// Every backend, with and without a gate, at sizes that need padding and sizes that need none.
fn nvfp4() -> Vec<CaseConfig> {
    let mut all = Vec::new();
    for (_, backend) in Nvfp4Backend::NAMED {
        for (hidden_size, intermediate_size) in
            [(48, 64), (128, 128), (192, 64), (256, 192), (272, 48)]
        {
            for is_act_and_mul in FLAGS {
                for num_experts in [1, 3] {
                    let c = Nvfp4ExpertsConfig {
                        backend,
                        num_experts,
                        hidden_size,
                        intermediate_size,
                        is_act_and_mul,
                    };
                    // What the backend refuses is no case.
                    if c.projections().iter().all(|p| c.layout(p.1).is_ok()) {
                        all.push(c.into());
                    }
                }
            }
        }
    }
    all
}

fn requantize() -> Vec<CaseConfig> {
    let mut all = Vec::new();
    for requantize in [Requantize::Exact, Requantize::UpstreamCuda, Requantize::UpstreamCpu] {
        for fp8_type in [Fp8Type::E4m3fn, Fp8Type::E4m3fnuz] {
            for (num_experts, hidden_size, intermediate_size) in
                [(1, 256, 1), (3, 16, 5), (8, 1, 32)]
            {
                all.push(
                    RequantizeConfig {
                        num_experts,
                        hidden_size,
                        intermediate_size,
                        requantize,
                        fp8_type,
                    }
                    .into(),
                );
            }
        }
    }
    all
}

fn fnuz() -> Vec<CaseConfig> {
    [(1, 256, 1), (16, 48, 16), (33, 7, 2)]
        .map(|(size_n, size_k, num_scales)| FnuzConfig { size_n, size_k, num_scales }.into())
        .into()
}

/// Every kernel's multiples, ranks with the same and with fewer blocks, all orders of gate and up.
fn gpt_oss() -> Vec<CaseConfig> {
    let backends = [
        Mxfp4Backend::DeepGemm,
        Mxfp4Backend::Marlin,
        Mxfp4Backend::FlashInferTrtllm,
        Mxfp4Backend::FlashInferCutlass,
        Mxfp4Backend::Other,
    ];
    let mut all = Vec::new();
    for backend in backends {
        for platform in [Platform::Cuda, Platform::Rocm, Platform::Xpu] {
            for gate_up in [GateUp::Interleaved, GateUp::Halves, GateUp::SwappedHalves] {
                for (hidden_size, intermediate_size, tp_size) in
                    [(32, 32, 1), (96, 160, 1), (64, 128, 2), (64, 96, 2)]
                {
                    for tp_rank in 0..tp_size {
                        let shard = GptOssShard {
                            hidden_size,
                            intermediate_size,
                            tp_size,
                            tp_rank,
                            backend,
                            platform,
                        };
                        all.push(GptOssConfig { num_experts: 2, shard, gate_up }.into());
                    }
                }
            }
        }
    }
    all
}

fn fp4_quant() -> Vec<CaseConfig> {
    let mut all = Vec::new();
    for dtype in HALF {
        for size_m in [1, 3, 127, 128, 129] {
            for size_k in [16, 48, 64, 80] {
                all.extend(FLAGS.map(|is_sf_swizzled_layout| {
                    Fp4QuantConfig {
                        dtype,
                        size_m,
                        size_k,
                        is_sf_swizzled_layout,
                        reciprocal: None,
                    }
                    .into()
                }));
            }
        }
    }
    all
}

/// K that fills no whole instruction of 64, several shards.
fn fp4_mm() -> Vec<CaseConfig> {
    let mut all = Vec::new();
    for dtype in HALF {
        for (size_m, size_k) in [(1, 16), (3, 64), (5, 80), (17, 192)] {
            for widths in [vec![8], vec![16, 16], vec![32, 8, 8]] {
                for schedule in
                    [None, Some(Architecture::Blackwell), Some(Architecture::RtxBlackwell)]
                {
                    let size_n = widths.iter().sum();
                    let widths = widths.clone();
                    all.push(
                        Fp4MmConfig { dtype, size_m, size_n, size_k, widths, schedule }.into(),
                    );
                }
            }
        }
    }
    all
}

/// A schedule of each kernel, with and without promotion.
fn schedules(dtype: ScalarType) -> Result<Vec<ScheduleChoice>> {
    let mut all = vec![ScheduleChoice::Canonical];
    for kernel in [Fp8Kernel::Cutlass, Fp8Kernel::Triton] {
        for promoted in FLAGS {
            let schedule = Schedule::w8a8_fp8(kernel, dtype, promoted)?;
            all.push(ScheduleChoice::Given(Box::new(schedule)));
        }
    }
    Ok(all)
}

/// K of one instruction, of part of a promotion, of several.
fn scaled_mm() -> Result<Vec<CaseConfig>> {
    let mut all = Vec::new();
    for dtype in HALF {
        for schedule in schedules(dtype)?.into_iter().map(Some).chain([None]) {
            for (size_m, size_n, size_k) in [(1, 16, 32), (3, 24, 160), (17, 40, 384)] {
                for (per_act_token_quant, per_out_ch_quant) in [(false, false), (true, true)] {
                    for has_bias in FLAGS {
                        all.push(
                            Fp8MmConfig {
                                dtype,
                                size_m,
                                size_n,
                                size_k,
                                per_act_token_quant,
                                per_out_ch_quant,
                                has_bias,
                                schedule: schedule.clone(),
                            }
                            .into(),
                        );
                    }
                }
            }
        }
    }
    Ok(all)
}

fn fp8_moe() -> Result<Vec<CaseConfig>> {
    let activations = [Activation::Silu, Activation::SwigluOai, Activation::SiluNoMul];
    let mut all = Vec::new();
    for dtype in HALF {
        for schedule in schedules(dtype)? {
            // CUTLASS's epilogue knows no router weight.
            let cutlass = Schedule::w8a8_fp8(Fp8Kernel::Cutlass, dtype, false)?.epilogue;
            if matches!(&schedule, ScheduleChoice::Given(s) if s.epilogue == cutlass) {
                continue;
            }
            for activation in activations {
                for (per_act_token_quant, per_out_ch_quant) in [(false, false), (true, true)] {
                    for (num_experts, num_local_experts, top_k) in [(4, 4, 2), (6, 3, 3), (8, 8, 1)]
                    {
                        for apply_router_weight_on_input in [false, top_k == 1] {
                            all.push(
                                Fp8LayerConfig {
                                    dtype,
                                    size_m: 5,
                                    num_experts,
                                    num_local_experts,
                                    top_k,
                                    hidden_size: 160,
                                    intermediate_size: 64,
                                    activation,
                                    per_act_token_quant,
                                    per_out_ch_quant,
                                    apply_router_weight_on_input,
                                    schedule_w13: Some(schedule.clone()),
                                    schedule_w2: Some(schedule.clone()),
                                }
                                .into(),
                            );
                        }
                    }
                }
            }
        }
    }
    Ok(all)
}
