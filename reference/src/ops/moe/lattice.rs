//! The configs from which layers are generated: axes, what is illegal, and a covering array.

use super::MoeConfig;
use crate::layers::ParallelStyle::{Column, Row};
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::num::dims::GroupSize;
use crate::ops::axes::{Space, named, shown};
use crate::ops::layer_rules::{
    GENERATED_LAYOUTS, GENERATED_PARAMETERS, LayerRules, NO_PARAMETER, NO_UP, ROUTER_WEIGHT_ON,
};
use crate::ops::quant::lattice::{plain_quant, quant_axes, ranks, settle};
use crate::ops::tensors::FLAGS;

/// Combinations of the values of this many axes that the lattice has.
const STRENGTH: usize = 3;

/// The group sizes of upstream's kernels for experts.
const GROUPS: [GroupSize; 4] =
    [GroupSize::Channel, GroupSize::Of(32), GroupSize::Of(64), GroupSize::Of(128)];

/// Expert-parallel ranks: their number, and the first or the last one.
const EXPERT_RANKS: [(usize, usize); 6] = [(1, 0), (2, 0), (2, 1), (3, 1), (4, 0), (4, 3)];

fn base() -> MoeConfig {
    MoeConfig {
        quant: plain_quant(),
        size_m: 1,
        num_experts: 8,
        top_k: 1,
        hidden_size: 128,
        intermediate_size: 128,
        activation: Activation::Silu,
        scoring_func: ScoringFunc::Softmax,
        renormalize: true,
        apply_router_weight_on_input: false,
        block_size_m: 16,
        ep_size: 1,
        ep_rank: 0,
        scale_factor_w13: None,
        scale_factor_w2: None,
        schedule_w13: None,
        schedule_w2: None,
        rules: LayerRules::NONE,
    }
}

/// The axes of a layer. Row counts are drawn with each case.
///
/// Every combination that upstream's operators compute is legal, also where a method refuses the
/// layer: router weights on the input, `relu2`, and FP8 in groups of 32 and 64.
pub(super) fn space() -> Space<MoeConfig> {
    let finish = |c: &mut MoeConfig| settle(&mut c.quant);
    let experts = EXPERT_RANKS.map(|(size, rank)| (format!("{rank}/{size}"), (size, rank)));
    let tensor = ranks(&[(2, 1, Row), (4, 3, Row), (2, 1, Column)]);
    quant_axes(Space::new(base(), finish), |c| &mut c.quant)
        .axis("has_bias", shown(FLAGS), |c, &flag| c.quant.has_bias = flag)
        .axis("tensor_parallel", tensor, |c, &tp| c.quant.tensor_parallel = tp)
        .axis("hidden_size", shown([128, 256]), |c, &size| c.hidden_size = size)
        // With I = 128 < H, a group of 128 is all of w2's K but not of w13's.
        .axis("intermediate_size", shown([64, 128, 192]), |c, &size| c.intermediate_size = size)
        .axis("activation", named(Activation::NAMED), |c, &value| c.activation = value)
        .axis("num_experts", shown([1, 2, 3, 5, 8]), |c, &count| c.num_experts = count)
        .axis("top_k", shown([1, 2, 3, 4, 6]), |c, &count| c.top_k = count)
        .axis("expert_parallel", experts, |c, &(size, rank)| {
            (c.ep_size, c.ep_rank) = (size, rank);
        })
        .axis("scoring_func", named(ScoringFunc::NAMED), |c, &value| c.scoring_func = value)
        .axis("renormalize", shown(FLAGS), |c, &flag| c.renormalize = flag)
        .axis("router_weight_on", named(&ROUTER_WEIGHT_ON), |c, &(on_gate_up, on_x)| {
            c.apply_router_weight_on_input = on_gate_up;
            c.rules.router_weight_on_x = on_x;
        })
        .axis("gate_up_layout", named(&GENERATED_LAYOUTS), |c, &layout| {
            c.rules.gate_up_layout = layout;
        })
        .axis("swiglu parameters", named(&GENERATED_PARAMETERS), |c, &all| {
            c.rules.set_parameters(all);
        })
        .axis("block_size_m", shown([8, 16, 32, 48, 64]), |c, &size| c.block_size_m = size)
        .illegal(
            "upstream's kernels for experts have groups of 32, 64, 128 or all of K",
            &["weight", "group_size"],
            |c| {
                let is_fixed = c.quant.checkpoint_format.fixed_group().is_some();
                !is_fixed && !GROUPS.contains(&c.quant.group_size)
            },
        )
        .illegal(
            "w2's K, the intermediate size of a rank, is whole groups",
            &["group_size", "intermediate_size"],
            |c| match c.quant.group_size {
                GroupSize::Of(size) => !c.intermediate_size.is_multiple_of(size),
                GroupSize::Channel => false,
            },
        )
        .illegal("a token has at most every expert", &["top_k", "num_experts"], |c| {
            c.top_k > c.num_experts
        })
        .illegal("every rank has an expert", &["expert_parallel", "num_experts"], |c| {
            c.ep_size > c.num_experts
        })
        .illegal(NO_UP, &["activation", "gate_up_layout"], |c| {
            c.rules.gate_up_layout.is_some() && !c.activation.is_gated()
        })
        .illegal(NO_PARAMETER, &["activation", "swiglu parameters"], |c| {
            c.rules.has_foreign_parameter(c.activation)
        })
        // Kernels and packed layouts depend on all of these together.
        .together(&["weight", "dtype", "input_dtype", "group_size", "desc_act"])
        // Where the bias and the router weight enter depends on the format and the sizes.
        .together(&[
            "weight",
            "dtype",
            "has_bias",
            "router_weight_on",
            "hidden_size",
            "intermediate_size",
        ])
}

/// The configs of the covering array.
pub(super) fn configs() -> Vec<MoeConfig> {
    space().configs(STRENGTH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quant::lattice::{DEVICE, Probe, deployment, scheme};
    use crate::ops::{CaseConfig, is_read_back};
    use crate::select::{MoeActivation, MoeDesc, select_moe};

    /// What the declared axes call legal is what the reader, the packing functions and upstream's
    /// choice of kernels take, but for what only a method refuses.
    #[test]
    fn the_rules_are_those_of_upstream() {
        let axes = space().axes();
        let mut probe = Probe::default();
        let sizes: Vec<usize> = axes.axes().iter().map(|axis| axis.values.len()).collect();
        let mut rng = crate::ops::draw::Rng::new(5);
        let mut seen = [0; 2];
        for _ in 0..6000 {
            let row: Vec<usize> = sizes.iter().map(|&size| rng.below(size)).collect();
            let CaseConfig::Moe(c) = axes.config(&row) else { panic!("{row:?}") };
            let fp8_groups = c.quant.checkpoint_format == crate::formats::Format::Fp8
                && matches!(c.quant.group_size, GroupSize::Of(16 | 32 | 64));
            let mut scheme = scheme(&c.quant);
            if fp8_groups {
                // Judged as integers with these groups are.
                let gptq = crate::ops::quant::QuantConfig {
                    group_size: c.quant.group_size,
                    ..plain_quant()
                };
                scheme = crate::ops::quant::lattice::scheme(&gptq);
            }
            let desc = MoeDesc {
                activation: MoeActivation::Silu,
                options: deployment(),
                ..MoeDesc::new(c.hidden_size, c.intermediate_size)
            };
            let offered = is_read_back(&c)
                && probe.takes(&c.quant)
                && select_moe(&scheme, &desc, &DEVICE).chosen.is_some();
            assert_eq!(
                axes.objection(&row).is_none(),
                offered,
                "{:?}: {c:?}",
                axes.objection(&row)
            );
            seen[usize::from(offered)] += 1;
        }
        assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
    }

    #[test]
    fn the_array_is_of_moderate_size_and_has_every_legal_value() {
        let axes = space().axes();
        let rows = axes.cover(STRENGTH);
        assert!((400..1200).contains(&rows.len()), "{}", rows.len());
        for (at, axis) in axes.axes().iter().enumerate() {
            let even = rows.len() / axis.values.len();
            for value in 0..axis.values.len() {
                let count = rows.iter().filter(|row| row[at] == value).count();
                let mut only = vec![None; axes.axes().len()];
                only[at] = Some(value);
                let is_legal = axes.complete(&only).is_some();
                assert_eq!(count > 0, is_legal, "{} {}", axis.name, axis.values[value]);
                // No value crowds out the others.
                assert!(!is_legal || count * 5 >= even, "{} {}", axis.name, axis.values[value]);
            }
        }
    }
}
