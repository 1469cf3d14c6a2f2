//! Families whose scores are a sigmoid, or another function of each logit.

use super::key::Key;
use super::row::{
    ActivationRule, BiasRule, Family, GroupKeys, NORM, RenormRule, SCALE, Same, ScoreRule, Support,
    VllmKey,
};
use super::rule::{ChooseBy, Masked, Score};
use super::stage_rules::{Path, StageRule};
use super::tensors::{ExpertsRule, SharedRule};

const ALWAYS: RenormRule = RenormRule::Always(1e-20);

const fn limited(default: f32) -> ActivationRule {
    ActivationRule::Clamped(Key::new(&["swiglu_limit"], default))
}

const fn vllm_norm(key: &'static str) -> VllmKey {
    VllmKey { key, same: Same::Flag(true), does: "does not renormalize where it is false" }
}

/// Groups whose number kept has no known default.
const fn groups(n_group: usize) -> GroupKeys {
    GroupKeys { topk_group: None, ..Family::groups_of(n_group, 1) }
}

/// Groups whose keys have no known defaults.
const STATED: Option<GroupKeys> =
    Some(GroupKeys { n_group: None, topk_group: None, ..Family::groups_of(1, 1) });

/// A flag without a known default.
const fn stated(keys: &'static [&'static str]) -> RenormRule {
    RenormRule::Key(Key::required(keys), 1e-20)
}

/// The rows.
pub(super) static ROWS: &[Family] = &[
    Family {
        groups: Some(Family::groups_of(8, 4)),
        ..Family::deepseek_v3(&["deepseek_v3", "kimi_k2", "kimi_k25", "deepseek_v32"], 8)
            .scaled(SCALE, 2.5)
    },
    Family { renormalize: stated(NORM), ..Family::deepseek_v3(&["glm_moe_dsa"], 8) },
    Family {
        score: ScoreRule::Key(Key::new(&["scoring_func"], Score::SqrtSoftplus)),
        bias: BiasRule::Required("gate.bias"),
        groups: None,
        renormalize: ALWAYS,
        activation: limited(10.0),
        token_table: Some("gate.tid2eid"),
        vllm: &[vllm_norm("norm_topk_prob")],
        ..Family::deepseek_v3(&["deepseek_v4"], 6).scaled(SCALE, 1.5)
    },
    Family::deepseek_v3(&["glm4_moe", "glm4v_moe"], 8).scaled(SCALE, 1.0),
    Family { groups: STATED, ..Family::deepseek_v3(&["glm4_moe_lite"], 4).scaled(SCALE, 1.8) },
    Family {
        groups: STATED,
        renormalize: stated(NORM),
        activation: limited(10.0),
        ..Family::deepseek_v3(&["glm5_next"], 8).scaled(SCALE, 2.5)
    },
    Family {
        top_k: Key::required(&["num_experts_per_tok"]),
        groups: STATED,
        renormalize: RenormRule::Key(Key::new(NORM, false), 1e-20),
        ..Family::deepseek_v3(&["dots1", "dots3_note"], 1)
    },
    Family { groups: STATED, ..Family::deepseek_v3(&["solar_open"], 8).scaled(SCALE, 1.0) },
    Family {
        groups: Some(groups(8)),
        experts: ExpertsRule {
            stages: &[(Path::Output, &[StageRule::norm(Some("post_mlp_layernorm"), 1e-6)])],
            ..ExpertsRule::PLAIN
        },
        ..Family::deepseek_v3(&["axk1"], 8)
    },
    Family {
        groups: Some(GroupKeys { masked: Masked::Zero, ..groups(1) }),
        ..Family::deepseek_v3(&["axk2"], 8)
    },
    Family { groups: Some(groups(8)), ..Family::deepseek_v3(&["beam"], 8) },
    Family {
        bias: BiasRule::Required("e_score_correction_bias"),
        groups: STATED,
        ..Family::deepseek_v3(&["exaone_moe"], 8).scaled(SCALE, 2.5)
    },
    Family {
        top_k: Key::new(&["num_experts_per_token", "num_experts_per_tok"], 8),
        bias: BiasRule::Required("gate.expert_bias"),
        groups: STATED,
        renormalize: stated(&["moe_renormalize", "norm_topk_prob"]),
        ..Family::deepseek_v3(&["bailing_hybrid"], 8)
    },
    // vLLM's classes; transformers has none of these names.
    Family {
        top_k: Key::required(&["num_experts_per_tok"]),
        score: ScoreRule::Key(Key::new(&["score_function"], Score::Softmax)),
        bias: BiasRule::IfKey("moe_router_enable_expert_bias", false, "gate.expert_bias"),
        groups: Some(groups(1)),
        renormalize: RenormRule::Key(Key::required(NORM), 0.0),
        by_vllm: true,
        ..Family::deepseek_v3(
            &["bailing_moe", "bailing_moe_v2", "bailing_moe_linear", "bailing_moe_v3"],
            1,
        )
        .scaled(SCALE, 1.0)
    },
    Family {
        top_k: Key::new(&["num_experts_per_token", "num_experts_per_tok"], 8),
        groups: STATED,
        renormalize: stated(&["moe_renormalize", "norm_topk_prob"]),
        ..Family::deepseek_v3(&["kimi_linear"], 8).scaled(SCALE, 2.446)
    },
    Family {
        groups: STATED,
        vllm: &[VllmKey {
            key: "routed_scaling_factor",
            same: Same::Number(1.0),
            does: "does not read the factor",
        }],
        ..Family::deepseek_v3(&["mimo_v2_flash"], 8).scaled(SCALE, 1.0)
    },
    Family {
        support: Support::RoutingOnly("its experts have no gate projection (relu2 of up alone)"),
        groups: STATED,
        experts: ExpertsRule {
            gated: false,
            stages: &[
                (Path::ExpertInput, &[StageRule::LinearIfPresent("fc1_latent_proj")]),
                (Path::RoutedOutput, &[StageRule::LinearIfPresent("fc2_latent_proj")]),
            ],
            ..ExpertsRule::PLAIN
        },
        ..Family::deepseek_v3(&["nemotron_h"], 2).scaled(SCALE, 1.0)
    },
    Family {
        bias: BiasRule::Required("expert_bias"),
        groups: None,
        renormalize: ALWAYS,
        vllm: &[vllm_norm("route_norm")],
        ..Family::deepseek_v3(&["hy_v3"], 8).scaled(&["router_scaling_factor"], 2.826)
    },
    Family {
        groups: STATED,
        activation: limited(10.0),
        experts: ExpertsRule { shared: SharedRule::Plain, ..ExpertsRule::PLAIN },
        ..Family::deepseek_v3(&["hy_v4"], 8).scaled(SCALE, 2.827)
    },
    Family {
        bias: BiasRule::Required("expert_bias"),
        groups: None,
        renormalize: ALWAYS,
        vllm: &[
            vllm_norm("route_norm"),
            VllmKey { key: "n_group", same: Same::Number(1.0), does: "chooses groups first" },
        ],
        ..Family::deepseek_v3(&["afmoe"], 6).scaled(&["route_scale"], 1.0)
    },
    Family {
        bias: BiasRule::IfKey("use_expert_bias", true, "expert_bias"),
        groups: None,
        renormalize: RenormRule::Key(Key::new(NORM, true), 1e-6),
        ..Family::deepseek_v3(&["lfm2_moe"], 4).scaled(SCALE, 1.0)
    },
    Family {
        bias: BiasRule::Required("e_score_correction_bias"),
        groups: None,
        renormalize: ALWAYS,
        scale: None,
        ..Family::deepseek_v3(&["minimax_m2"], 8)
    },
    Family {
        bias: BiasRule::Required("e_score_correction_bias"),
        groups: None,
        renormalize: ALWAYS,
        activation: ActivationRule::Oai,
        ..Family::deepseek_v3(&["minimax_m3_vl"], 4).scaled(SCALE, 2.0)
    },
    Family {
        top_k: Key::new(&["num_experts_per_tok", "moe_top_k"], 8),
        num_experts: &["num_local_experts", "moe_num_experts"],
        bias: BiasRule::IfKey("use_moe_router_bias", true, "router_bias"),
        groups: None,
        renormalize: ALWAYS,
        scale: Some(Key::required(&["moe_router_scaling_factor"])),
        activation: ActivationRule::Step,
        vllm: &[vllm_norm("norm_expert_weight")],
        experts: ExpertsRule { shared: SharedRule::Step(None), ..ExpertsRule::PLAIN },
        ..Family::deepseek_v3(&["step3p7", "step3p5"], 8)
    },
    Family {
        bias: BiasRule::Required("experts.e_score_correction_bias"),
        groups: None,
        renormalize: ALWAYS,
        scale: Some(Key::required(&["moe_routed_scaling_factor"])),
        logit_softcap: Some("moe_router_logit_softcapping"),
        ..Family::deepseek_v3(&["laguna"], 8)
    },
    Family {
        choose_by: ChooseBy::Logit,
        bias: BiasRule::None,
        groups: None,
        renormalize: RenormRule::Never,
        scale: None,
        weight_on_input: true,
        ..Family::deepseek_v3(&["llama4"], 1)
    },
    Family {
        bias: BiasRule::None,
        groups: None,
        renormalize: RenormRule::Key(Key::new(NORM, true), 0.0),
        scale: None,
        ..Family::deepseek_v3(&["flint"], 6)
    },
    Family {
        choose_by: ChooseBy::Logit,
        bias: BiasRule::Required("../moe.router.expert_bias"),
        groups: None,
        renormalize: RenormRule::Key(Key::new(NORM, false), 0.0),
        scale: None,
        ..Family::deepseek_v3(&["kolibri1"], 6)
    },
    Family {
        support: Support::RoutingOnly("its router weights the shared experts too"),
        bias: BiasRule::Required("gate.bias"),
        groups: None,
        renormalize: RenormRule::Always(0.0),
        expert_scale: Some("gate.global_scale"),
        shared_experts: Some(Key::required(&["n_shared_experts"])),
        experts: ExpertsRule { interleaved: true, ..ExpertsRule::PLAIN },
        ..Family::deepseek_v3(&["inkling"], 6).scaled(&["route_scale"], 8.0)
    },
    Family {
        support: Support::RoutingOnly("its activation caps gate and up by tanh"),
        bias: BiasRule::Required("gate.bias"),
        groups: None,
        renormalize: ALWAYS,
        experts: ExpertsRule {
            interleaved: true,
            softcaps: Some([
                Key::new(&["mlp_gate_softcap"], 4.0),
                Key::new(&["mlp_up_softcap"], 25.0),
            ]),
            ..ExpertsRule::PLAIN
        },
        ..Family::deepseek_v3(&["inkling2"], 8).scaled(&["route_scale"], 8.0)
    },
    Family {
        support: Support::RoutingOnly(
            "its experts run between projections, and each expert's output is normalized",
        ),
        groups: None,
        renormalize: RenormRule::Always(1e-15),
        experts: ExpertsRule {
            logit_multiplier: Some(Key::new(&["output_multiplier"], 0.176_776_7)),
            stages: &[
                (
                    Path::ExpertInput,
                    &[
                        StageRule::Linear("pre_expert_proj"),
                        StageRule::Norm {
                            module: Some("pre_expert_norm"),
                            eps: Key::new(&["rms_norm_eps"], 1e-5),
                            weight_offset: 1.0,
                            weight_first: false,
                        },
                    ],
                ),
                (
                    Path::ExpertOutput,
                    &[StageRule::Norm {
                        module: Some("experts.post_expert_norm"),
                        eps: Key::new(&["post_norm_eps"], 1e-8),
                        weight_offset: 1.0,
                        weight_first: true,
                    }],
                ),
                (Path::RoutedOutput, &[StageRule::Linear("post_expert_proj")]),
            ],
            ..ExpertsRule::PLAIN
        },
        ..Family::deepseek_v3(&["muse_spark"], 8).scaled(SCALE, 1.0)
    },
];
