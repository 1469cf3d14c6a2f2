//! Every configuration that a case can be generated for.

use super::refusal::Probe;
use crate::Result;
use crate::act_order;
use crate::case::{
    Activation, AlignConfig, CaseConfig, CheckpointFormat, GroupedTopk, LinearConfig, MoeConfig,
    Op, ParallelStyle, PreprocessConfig, QuantConfig, RouterConfig, ScoringFunc, TensorParallel,
};
use crate::dims::GroupSize;
use crate::scalar::ScalarType;

const HALF: [ScalarType; 2] = [ScalarType::FLOAT16, ScalarType::BFLOAT16];
const INPUTS: [Option<ScalarType>; 3] =
    [None, Some(ScalarType::INT8), Some(ScalarType::FLOAT8_E4M3FN)];
/// Those that kernels have, and 16, which only NVFP4 may have.
const GROUPS: [GroupSize; 5] = [
    GroupSize::Channel,
    GroupSize::Of(16),
    GroupSize::Of(32),
    GroupSize::Of(64),
    GroupSize::Of(128),
];
const FLAGS: [bool; 2] = [false, true];

/// K × N of one rank: K = 128, where a group of 128 is the whole K; N an odd multiple of 64.
const LINEAR_SHAPES: [(usize, usize); 6] =
    [(128, 64), (128, 192), (128, 320), (256, 64), (256, 128), (384, 192)];

/// H × I. With I = 128 < H, a group of 128 is all of w2's K but not of w13's.
const MOE_SHAPES: [(usize, usize); 4] = [(128, 64), (128, 128), (256, 128), (256, 192)];

const fn parallel(size: usize, rank: usize, style: ParallelStyle) -> Option<TensorParallel> {
    Some(TensorParallel { size, rank, style })
}

/// Types, group sizes and orders, in every combination.
fn quants() -> impl Iterator<Item = QuantConfig> {
    CheckpointFormat::NAMED.iter().flat_map(|&(_, checkpoint_format)| {
        checkpoint_format.weight_types().iter().flat_map(move |&weight_type| {
            HALF.into_iter().flat_map(move |dtype| {
                INPUTS.into_iter().flat_map(move |input_dtype| {
                    GROUPS.into_iter().flat_map(move |group_size| {
                        FLAGS.into_iter().map(move |desc_act| QuantConfig {
                            checkpoint_format,
                            weight_type,
                            dtype,
                            input_dtype,
                            group_size,
                            desc_act,
                            is_k_full: true,
                            has_bias: false,
                            tensor_parallel: None,
                            convention: None,
                        })
                    })
                })
            })
        })
    })
}

/// `quant` on a rank: the slices that a row-parallel rank holds may cut groups.
fn on_rank(quant: &QuantConfig, tp: Option<TensorParallel>, has_bias: bool) -> QuantConfig {
    let row = tp.is_some_and(|tp| tp.style == ParallelStyle::Row);
    QuantConfig {
        is_k_full: act_order::is_k_full(quant.desc_act, row),
        has_bias,
        tensor_parallel: tp,
        ..quant.clone()
    }
}

/// All configurations of `op` that the reference does not refuse, in a fixed order.
///
/// Row counts (`size_m`) are not part of it; a case draws its own. Of a MoE layer, activation,
/// experts, ranks and scoring are not multiplied out with the formats but dealt to them in turn,
/// so that each value occurs many times with every other axis.
///
/// # Errors
/// None for the operations there are.
pub fn lattice(op: Op) -> Result<Vec<CaseConfig>> {
    let mut probe = Probe::default();
    let configs = match op {
        Op::Linear => linear(&mut probe),
        Op::Moe => moe(&mut probe),
        Op::Router => router(),
        Op::MoeAlignBlockSize => align(),
        Op::Int4Fp8Preprocess => preprocess(),
        Op::DynQuantLinear => super::dyn_quant::lattice(),
        method => super::methods::lattice(method)?,
    };
    Ok(configs.into_iter().filter(|c| probe.ask(c).is_ok()).collect())
}

fn linear(probe: &mut Probe) -> Vec<CaseConfig> {
    let parallels = [
        None,
        parallel(2, 1, ParallelStyle::Column),
        parallel(2, 0, ParallelStyle::Row),
        parallel(4, 3, ParallelStyle::Row),
    ];
    let config = |quant: QuantConfig, (size_k, size_n)| {
        CaseConfig::Linear(LinearConfig {
            quant,
            size_m: 1,
            size_n,
            size_k,
            scale_factor: None,
            schedule: None,
            quantizer: None,
        })
    };
    // A combination of types that fits no shape need not be multiplied with the other axes.
    let quants = quants().filter(|q| probe.ask(&config(q.clone(), (384, 192))).is_ok());
    let mut configs = Vec::new();
    for quant in quants {
        for tp in parallels {
            for has_bias in FLAGS {
                let quant = on_rank(&quant, tp, has_bias);
                configs.extend(LINEAR_SHAPES.map(|shape| config(quant.clone(), shape)));
            }
        }
    }
    configs
}

fn moe(probe: &mut Probe) -> Vec<CaseConfig> {
    // (num_experts, top_k, ep_size, ep_rank)
    let experts = [
        (4, 2, 1, 0),
        (2, 1, 1, 0),
        (6, 3, 3, 1),
        (3, 3, 1, 0),
        (8, 4, 4, 3),
        (5, 2, 2, 1),
        (1, 1, 1, 0),
    ];
    let parallels = [None, parallel(2, 1, ParallelStyle::Row)];
    // Those without an up projection would shift every batch that older versions have written.
    let gated: Vec<Activation> =
        Activation::NAMED.iter().map(|&(_, a)| a).filter(|a| a.is_gated()).collect();
    let config = |quant: QuantConfig, (hidden_size, intermediate_size), turn: usize| {
        let (num_experts, top_k, ep_size, ep_rank) = experts[turn % experts.len()];
        CaseConfig::Moe(MoeConfig {
            quant,
            size_m: 1,
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            activation: gated[turn % gated.len()],
            scoring_func: ScoringFunc::NAMED[turn / 2 % ScoringFunc::NAMED.len()].1,
            renormalize: !turn.is_multiple_of(3),
            apply_router_weight_on_input: turn % 11 == 10,
            block_size_m: [16, 8, 32, 48, 64][turn % 5],
            ep_size,
            ep_rank,
            scale_factor_w13: None,
            scale_factor_w2: None,
            schedule_w13: None,
            schedule_w2: None,
        })
    };
    let quants = quants().filter(|q| probe.ask(&config(q.clone(), (256, 128), 0)).is_ok());
    let mut configs = Vec::new();
    for quant in quants {
        for tp in parallels {
            for has_bias in FLAGS {
                let quant = on_rank(&quant, tp, has_bias);
                for shape in MOE_SHAPES {
                    configs.push(config(quant.clone(), shape, configs.len()));
                }
            }
        }
    }
    configs
}

fn router() -> Vec<CaseConfig> {
    let mut configs = Vec::new();
    for (_, scoring_func) in ScoringFunc::NAMED {
        for renormalize in FLAGS {
            for top_k in [1, 2, 3, 4, 8] {
                let grouped = [(1, 1, 1.0), (4, 2, 1.0), (8, 4, 2.5)];
                let grouped =
                    grouped.map(|(num_expert_group, topk_group, routed_scaling_factor)| {
                        Some(GroupedTopk { num_expert_group, topk_group, routed_scaling_factor })
                    });
                configs.extend([None].into_iter().chain(grouped).map(|grouped| {
                    let scoring_func = *scoring_func;
                    let rule = None;
                    CaseConfig::Router(RouterConfig {
                        scoring_func,
                        top_k,
                        renormalize,
                        grouped,
                        rule,
                    })
                }));
            }
        }
    }
    configs
}

fn align() -> Vec<CaseConfig> {
    let mut configs = Vec::new();
    for block_size in [8, 16, 32, 48, 64] {
        for (num_experts, top_k) in [(1, 1), (4, 2), (8, 8), (60, 4), (128, 8)] {
            for (ep_size, ep_rank) in [(1, 0), (2, 1), (4, 0)] {
                let c = AlignConfig { block_size, num_experts, top_k, ep_size, ep_rank };
                configs.push(CaseConfig::Align(c));
            }
        }
    }
    configs
}

fn preprocess() -> Vec<CaseConfig> {
    let formats = [CheckpointFormat::Gptq, CheckpointFormat::Awq];
    let config = |checkpoint_format| {
        LINEAR_SHAPES.map(|(size_k, size_n)| {
            CaseConfig::Preprocess(PreprocessConfig { checkpoint_format, size_k, size_n })
        })
    };
    formats.into_iter().flat_map(config).collect()
}
