//! Families whose scores are a softmax.

use super::key::Key;
use super::row::{
    ActivationRule, BiasRule, EXPERTS, Family, GroupKeys, NORM, RenormRule, SCALE, Same, ScoreRule,
    Support, VllmKey,
};
use super::rule::{GroupScore, Masked, Score, ZeroExpert};
use super::stage_rules::{Path, StageRule};
use super::tensors::{ExpertsRule, SharedRule};

const fn by_key(default: bool) -> RenormRule {
    RenormRule::Key(Key::new(NORM, default), 0.0)
}

const VLLM_NORM: VllmKey = VllmKey {
    key: "norm_topk_prob",
    same: Same::Flag(true),
    does: "does not renormalize where it is false",
};

const VLLM_NEVER: VllmKey = VllmKey {
    key: "norm_topk_prob",
    same: Same::Flag(false),
    does: "ignores the key and never renormalizes",
};

/// The rows.
pub(super) static ROWS: &[Family] = &[
    Family::softmax(&["mixtral"], 2),
    Family::softmax(&["minimax"], 2),
    Family {
        renormalize: by_key(false),
        experts: ExpertsRule::SHARED_GATE,
        ..Family::softmax(&["qwen2_moe"], 4)
    },
    Family { renormalize: by_key(false), ..Family::softmax(&["qwen3_moe"], 8) },
    Family {
        renormalize: by_key(true),
        experts: ExpertsRule::SHARED_GATE,
        ..Family::softmax(&["qwen3_next"], 10)
    },
    Family {
        vllm: &[VLLM_NORM],
        experts: ExpertsRule::SHARED_GATE,
        ..Family::softmax(&["qwen3_5_moe"], 8)
    },
    Family {
        renormalize: by_key(true),
        experts: ExpertsRule::SHARED_GATE,
        ..Family::softmax(&["qwen4_exp"], 10)
    },
    Family { vllm: &[VLLM_NORM], ..Family::softmax(&["qwen3_vl_moe"], 4) },
    Family {
        renormalize: by_key(true),
        ..Family::softmax(&["qwen3_omni_moe", "qwen3_omni_moe_thinker"], 8)
    },
    Family {
        renormalize: by_key(false),
        experts: ExpertsRule::SHARED_GATE,
        ..Family::softmax(&["qwen3_omni_moe_talker"], 8)
    },
    Family { renormalize: by_key(false), vllm: &[VLLM_NEVER], ..Family::softmax(&["olmoe"], 8) },
    Family { renormalize: by_key(false), ..Family::softmax(&["flex_olmo"], 5) },
    Family { renormalize: by_key(true), ..Family::softmax(&["mellum"], 8) },
    Family { renormalize: RenormRule::Never, ..Family::softmax(&["jamba"], 2) },
    Family {
        top_k: Key::new(&["moe_topk", "num_experts_per_tok"], 1),
        ..Family::softmax(&["hunyuan_v1_moe"], 1)
    },
    Family::softmax(&["granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa"], 2),
    Family {
        support: Support::RoutingOnly("the block adds a tensor mlp.bias to its output"),
        ..Family::softmax(&["jetmoe"], 2)
    }
    .act(&["activation_function", "hidden_act"]),
    Family {
        top_k: Key::new(&["moe_topk"], 2),
        num_experts: &["moe_num_experts"],
        ..Family::softmax(&["aria_text", "aria"], 2)
    },
    Family {
        top_k: Key::new(&["num_experts_per_tok", "experts_per_token"], 4),
        activation: ActivationRule::Oai,
        experts: ExpertsRule { interleaved: true, ..ExpertsRule::PLAIN },
        ..Family::softmax(&["gpt_oss"], 4)
    },
    // Weights are divided by top_k, and the output multiplied with it.
    Family { activation: ActivationRule::Oai, ..Family::softmax(&["openai_privacy_filter"], 4) },
    Family {
        top_k: Key::required(&["ffn_config.moe_top_k"]),
        num_experts: &["ffn_config.moe_num_experts"],
        renormalize: RenormRule::Norm(Key::new(&["ffn_config.moe_normalize_expert_weights"], 1.0)),
        vllm: &[VllmKey {
            key: "ffn_config.moe_normalize_expert_weights",
            same: Same::Number(1.0),
            does: "divides by the sum whatever p is",
        }],
        ..Family::softmax(&["dbrx"], 1)
    }
    .act(&["ffn_config.ffn_act_fn.name"]),
    Family {
        score: ScoreRule::Fixed(Score::SparseMixer),
        renormalize: RenormRule::Never,
        vllm: &[VllmKey {
            key: "router_jitter_noise",
            same: Same::Number(0.01),
            does: "has a threshold of 0.01 whatever the key says",
        }],
        ..Family::softmax(&["phimoe"], 2)
    },
    Family {
        top_k: Key::required(&["num_experts_per_tok"]),
        renormalize: RenormRule::Never,
        groups: Some(GroupKeys {
            n_group: None,
            topk_group: None,
            score: GroupScore::Max,
            masked: Masked::Zero,
        }),
        group_method: Some(("topk_method", ["group_limited_greedy", "greedy"])),
        vllm: &[VllmKey {
            key: "norm_topk_prob",
            same: Same::Flag(false),
            does: "renormalizes where it is true",
        }],
        ..Family::softmax(&["deepseek_v2"], 1).scaled(SCALE, 1.0)
    },
    Family {
        top_k: Key::new(&["moe_k"], 6),
        num_experts: &["moe_num_experts"],
        bias: BiasRule::Required("moe_statics.e_score_correction_bias"),
        renormalize: RenormRule::Floor(Key::new(&["moe_norm_min"], 1e-12)),
        ..Family::softmax(&["ernie4_5_moe"], 6)
    },
    Family {
        support: Support::RoutingOnly(
            "text and vision tokens have a router and experts of their own, chosen by token type",
        ),
        top_k: Key::new(&["moe_k"], 6),
        num_experts: &["moe_num_experts"],
        bias: BiasRule::Required("moe_statics.e_score_correction_bias"),
        renormalize: RenormRule::Floor(Key::new(&["moe_norm_min"], 1e-12)),
        experts: ExpertsRule { token_groups: 2, ..ExpertsRule::PLAIN },
        ..Family::softmax(&["ernie4_5_vl_moe"], 6)
    },
    Family {
        support: Support::RoutingOnly(
            "ids after the last expert are zero experts, which add their input to the output",
        ),
        top_k: Key::new(&["moe_topk"], 12),
        bias: BiasRule::Required("router.e_score_correction_bias"),
        renormalize: RenormRule::Never,
        zero_experts: Some(Key::new(&["zero_expert_num"], 256)),
        ..Family::softmax(&["longcat_flash"], 12).scaled(SCALE, 6.0)
    },
    Family {
        groups: Some(GroupKeys {
            n_group: Some(1),
            topk_group: Some(1),
            score: GroupScore::TopTwo,
            masked: Masked::Zero,
        }),
        renormalize: RenormRule::Key(Key::new(NORM, true), 1e-20),
        scale: Some(Key::required(SCALE)),
        ..Family::softmax(&["mistral4"], 4)
    },
    Family {
        groups: Some(GroupKeys {
            n_group: Some(1),
            topk_group: Some(1),
            score: GroupScore::TopTwo,
            masked: Masked::Zero,
        }),
        renormalize: RenormRule::Always(1e-20),
        scale: Some(Key::required(SCALE)),
        ..Family::softmax(&["mistral_large4"], 4)
    },
    Family {
        top_k: Key::required(&["top_k_experts"]),
        num_experts: EXPERTS,
        expert_scale: Some("router.per_expert_scale"),
        experts: ExpertsRule {
            stages: &[
                (
                    Path::RouterInput,
                    &[
                        StageRule::norm(None, 1e-6),
                        StageRule::Scale("router.scale"),
                        StageRule::RootOfHidden,
                    ],
                ),
                (Path::ExpertInput, &[StageRule::norm(Some("pre_feedforward_layernorm_2"), 1e-6)]),
                (Path::Output, &[StageRule::norm(Some("post_feedforward_layernorm_2"), 1e-6)]),
            ],
            ..ExpertsRule::PLAIN
        },
        ..Family::softmax(&["gemma4"], 1)
    }
    .act(&["hidden_activation", "hidden_act"]),
    Family {
        support: Support::RoutingOnly(
            "its router is a network of several layers with a class that skips the block",
        ),
        bias: BiasRule::Required("gate.balancing_biases"),
        renormalize: RenormRule::Never,
        zero_experts: Some(Key::new(&[], 1)),
        zero_expert_type: ZeroExpert::Skip,
        experts: ExpertsRule {
            stages: &[(
                Path::RouterInput,
                &[
                    StageRule::Linear("gate.down_proj"),
                    StageRule::norm(Some("gate.router_mlp.norm"), 1e-5),
                    StageRule::Linear("gate.router_mlp.fc1"),
                    StageRule::Gelu,
                    StageRule::Linear("gate.router_mlp.fc2"),
                    StageRule::Gelu,
                ],
            )],
            ..ExpertsRule::PLAIN
        },
        ..Family::softmax(&["zaya"], 1)
    },
    Family {
        score: ScoreRule::Key(Key::new(&["expert_selection_fn"], Score::Softmax)),
        renormalize: by_key(true),
        softmax_of_chosen: true,
        experts: ExpertsRule { shared: SharedRule::Averaged, ..ExpertsRule::PLAIN },
        ..Family::softmax(&["cohere2_moe"], 2)
    },
];
