"""The families of `router_blocks.py`: tiny sizes, configuration keys, and the rule that the check recomputes.

Keys of a family: `model_type` (default: the family's name), `text` (values for keys that the configuration has),
`config` (top-level keys, added in any case), `module` (class of the block), `rule` (see `router_blocks_check.py`).
"""

import torch

import router_blocks_check as check

TINY = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "unpadded_vocab_size": 96,
    "hidden_size": 96,
    "d_model": 96,
    "intermediate_size": 192,
    "ffn_hidden_size": 192,
    "dense_intermediate_size": 192,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "expert_ffn_hidden_size": 32,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "head_dim": 16,
    "global_head_dim": 16,
    "kv_channels": 16,
    "max_position_embeddings": 128,
    "max_seq_len": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 48,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "block_size": 16,
    "d_rel": 8,
    "rel_extent": 32,
    "router_hidden_size": 32,
    "rotary_dim": 8,
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "image_token_index": 90,
    "video_token_index": 91,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
    "projection_hidden_size": 32,
    "projector_hidden_size": 32,
}
TINY_VISION = {
    "n_layers": 1,
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 96,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "adapter_out_dim": 96,
    "num_local_experts": 4,
    "projection_intermediate_size": 32,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pos_emb_time": 2,
    "image_size": 56,
    "patch_size": 14,
}

TWO = (16, 96)
SOFTMAX = {"score": "softmax"}
SHARED_GATE = {"shared": "mlp.shared_expert", "shared_gate": "mlp.shared_expert_gate"}
GROUPS = {
    "hidden_size": 64,
    "num_local_experts": 12,
    "num_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "num_experts_per_token": 4,
    "n_group": 4,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DS3 = {
    "score": "sigmoid",
    "groups": "sum2",
    "scale": True,
    "renorm_default": True,
    "eps": 1e-20,
    "shared": "mlp.shared_experts",
}
# vLLM reads these two keys; transformers' classes have no such fields, Hub releases do.
NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def softmax_family(text=None, **rule):
    return {"tokens": TWO, "text": text or {}, "rule": SOFTMAX | rule}


def ds3(text=None, config=None, tokens=(16, 64), **rule):
    return {"tokens": tokens, "text": GROUPS | (text or {}), "config": config or {}, "rule": DS3 | rule}


def sigmoid_family(text=None, **rule):
    return {"tokens": TWO, "text": text or {}, "rule": {"score": "sigmoid"} | rule}


def granite(module=None, **rule):
    spec = {
        "tokens": TWO,
        "text": {"intermediate_size": 32},
        "rule": {"score": "topk_softmax", "layout": "input_linear", "prefix": "block_sparse_moe."} | rule,
    }
    return spec


def with_siblings(spec, *names, **more):
    return spec | {"siblings": names} | more


def call_with_shared(block, x, extra):
    """Granite's shared MLP stands next to the block; `extra['siblings']` holds it."""
    return block(x[None])[0] + extra["siblings"]["shared_mlp"](x)


def call_gemma4(layer, x, extra):
    """The expert branch of the decoder layer, from the residual to the norm after the experts."""
    _, weights, ids = layer.router(x)
    y = layer.experts(layer.pre_feedforward_layernorm_2(x), ids, weights)
    return layer.post_feedforward_layernorm_2(y)


def check_gemma4(block, config, tensors, rule, layer):
    x, eps, hidden = block.get("hidden_states"), config["rms_norm_eps"], config["hidden_size"]
    seen = check.rms(x, eps) * block.get("router.scale") * hidden**-0.5
    logits = seen @ block.get("router.proj.weight").T
    errors = [check.worst("logits", logits, tensors["out.router_logits"])]
    ids, weights = check.route(logits, config, {"score": "softmax", "renorm": True}, None)
    weights = weights * block.get("router.per_expert_scale")[ids]
    errors += check.compare_routing(ids, weights, tensors)
    inner = check.rms(x, eps, block.get("pre_feedforward_layernorm_2.weight"))
    expert = check.experts(block, {"layout": "fused"}, config)
    routed = check.run_experts(inner, ids, weights, expert, check.glu({"act": "gelu_tanh"}, config, layer), 1 << 30)
    errors.append(check.worst("y_experts", routed, tensors["out.y_experts"]))
    y = check.rms(routed, eps, block.get("post_feedforward_layernorm_2.weight"))
    errors.append(check.worst("y", y, tensors["out.y"]))
    return f"relative error {max(errors):.1e}"


def check_muse_spark(block, config, tensors, rule, layer):
    x = block.get("hidden_states")
    logits = x @ block.get("router_weight").T * config["output_multiplier"]
    errors = [check.worst("logits", logits, tensors["out.router_logits"])]
    ids, weights = check.route(
        logits, config, {"score": "sigmoid", "renorm": True, "eps": 1e-15, "scale": True}, block.get("correction_bias")
    )
    errors += check.compare_routing(ids, weights, tensors)
    inner = check.rms(
        block.linear("pre_expert_proj", x), config["rms_norm_eps"], 1 + block.get("pre_expert_norm.weight")
    )
    after = 1 + block.get("post_expert_norm.weight")
    routed = check.run_experts(
        inner,
        ids,
        weights,
        check.experts(block, {"layout": rule["layout"]}, config),
        check.glu({}, config, layer),
        1 << 30,
        lambda out: check.rms(out * after, config["post_norm_eps"]),
    )
    errors.append(check.worst("y_experts", routed, tensors["out.y_experts"]))
    errors.append(check.worst("y", block.linear("post_expert_proj", routed), tensors["out.y"]))
    return f"relative error {max(errors):.1e}"


def check_inkling(block, config, tensors, rule, layer):
    x, n = block.get("hidden_states"), config["n_shared_experts"]
    logits = x @ block.get("router_weight").T
    errors = [check.worst("logits", logits[:, :-n], tensors["out.router_logits"])]
    s = check.sigmoid(logits)
    ids = check.np.argsort(-(s[:, :-n] + block.get("correction_bias")), 1, kind="stable")[
        :, : config["num_experts_per_tok"]
    ]
    chosen = check.np.concatenate([check.np.take_along_axis(s, ids, 1), s[:, -n:]], 1)
    weights = chosen / chosen.sum(1, keepdims=True) * config["route_scale"] * block.get("gate.global_scale")
    errors += check.compare_routing(ids, weights[:, :-n], tensors)
    routed = check.run_experts(
        x,
        ids,
        weights[:, :-n],
        check.experts(block, {"layout": rule["layout"]}, config),
        check.glu({}, config, layer),
        1 << 30,
    )
    errors.append(check.worst("y_experts", routed, tensors["out.y_experts"]))
    y = routed.copy()
    if block.has("shared_w13_weight"):
        w13, w2 = block.get("shared_w13_weight"), block.get("shared_w2_weight")
        triples = [(w13[j, ::2], w13[j, 1::2], w2[j]) for j in range(n)]
    else:
        g, u, d = (block.get(f"shared_experts.{name}_proj") for name in ("gate", "up", "down"))
        triples = [(g[j], u[j], d[j]) for j in range(n)]
    for j, (g, u, d) in enumerate(triples):
        y += (check.silu(x @ g.T) * (x @ u.T) * weights[:, -n + j :][:, :1]) @ d.T
    errors.append(check.worst("y", y, tensors["out.y"]))
    return f"relative error {max(errors):.1e}"


def check_zaya(block, config, tensors, rule, layer):
    x = block.get("hidden_states")
    h = block.linear("gate.down_proj", x)
    h = check.rms(h, config["rms_norm_eps"], block.get("gate.router_mlp.norm.weight"))
    h = check.gelu(block.linear("gate.router_mlp.fc1", h))
    h = check.gelu(block.linear("gate.router_mlp.fc2", h))
    logits = block.linear("gate.router_mlp.out_proj", h)
    errors = [check.worst("logits", logits, tensors["out.router_logits"])]
    scores = check.softmax(logits)
    ids = (scores + block.get("correction_bias")).argmax(1)[:, None]
    weights = check.np.take_along_axis(scores, ids, 1)
    skip = ids == config["num_experts"]
    weights, ids = check.np.where(skip, 0, weights), check.np.where(skip, 0, ids)
    errors += check.compare_routing(ids, weights, tensors)
    y = check.run_experts(x, ids, weights, check.experts(block, rule, config), check.glu({}, config, layer), 1 << 30)
    errors.append(check.worst("y", y, tensors["out.y"]))
    return f"relative error {max(errors):.1e}, {int(skip.sum())} tokens skipped"


def check_ernie_vl(block, config, tensors, rule, layer):
    x, kinds = block.get("hidden_states"), block.get("token_types")
    bias = block.get("moe_statics.e_score_correction_bias")
    routers = [block.get("gate.weight"), block.get("gate.weight_1")]
    y = check.shared(block, {"shared": "mlp.shared_experts"}, config, x, layer)
    errors = []
    for kind, router in enumerate(routers):
        rows = kinds == kind
        router = router if router.shape[1] == x.shape[1] else router.T
        logits = x[rows] @ router.T
        ids, weights = check.route(logits, config, {"score": "softmax", "renorm": True}, bias[kind])
        part = {n: t[torch.tensor(rows)] for n, t in tensors.items() if n.startswith("out.")}
        errors.append(check.worst("logits", logits, part["out.router_logits"]))
        errors += check.compare_routing(ids, weights, part)
        expert = check.experts(block, {}, config)
        offset = kind * router.shape[0]
        y[rows] += check.run_experts(x[rows], ids + offset, weights, expert, check.glu({}, config, layer), 1 << 30)
    errors.append(check.worst("y", y, tensors["out.y"]))
    return f"relative error {max(errors):.1e}"


def average(block, config, routed, y):
    return y / 2


def post_norm(block, config, routed, y):
    return check.rms(y, config["rms_norm_eps"], block.get("post_mlp_layernorm.weight"))


def add_bias(block, config, routed, y):
    return y + block.get("mlp.bias")


WIDE_INPUT = {"x_std": 3.0, "std": 0.2, "router_std": 0.05}
MOE_LAYERS = {"mlp_layer_types": ["dense", "sparse"]}


def variant(family, **text):
    base = FAMILIES[family]
    return base | {"model_type": base.get("model_type", family), "text": base["text"] | text}


GEMMA4 = {
    "tokens": TWO,
    "text": {
        "enable_moe_block": True,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "module": "Gemma4TextDecoderLayer",
    "only": ("router", "experts", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    "call": call_gemma4,
    "logits_from": "proj",
    "router_std": 1.0,
    "y": "expert branch of the layer: pre_feedforward_layernorm_2, experts, post_feedforward_layernorm_2; the router reads hidden_states; the dense mlp is left out",
    "rule": {"special": check_gemma4},
}

OMNI = {"talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 32}}}

FAMILIES = {
    "qwen2_moe": softmax_family({"num_experts_per_tok": 4}, **SHARED_GATE, renorm_default=False),
    "qwen3_next": softmax_family({"num_experts_per_tok": 4}, **SHARED_GATE, renorm_default=True),
    "olmoe": softmax_family({"intermediate_size": 32, "num_experts_per_tok": 4}, renorm_default=False),
    "jamba": softmax_family(
        {
            "intermediate_size": 32,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "mamba_dt_rank": 4,
        },
        renorm=False,
    ),
    "hunyuan_v1_moe": softmax_family({"intermediate_size": 32}, renorm=True, shared="mlp.shared_mlp"),
    "granitemoe": granite(),
    "jetmoe": {
        "tokens": TWO,
        "text": {"intermediate_size": 32},
        "module": "JetMoeMoE",
        "rule": {"score": "topk_softmax", "layout": "input_linear", "prefix": "mlp.", "combine": add_bias},
    },
    "aria_text": softmax_family(
        {"intermediate_size": 32, "moe_num_shared_experts": 1},
        score="topk_softmax",
        layout="fc",
        shared="mlp.shared_experts",
    ),
    "dbrx": softmax_family({"intermediate_size": 32, "ffn_hidden_size": 32}, score="dbrx", layout="dbrx")
    | {"config": {"attn_config": {"rope_theta": 10000.0}}},
    "dbrx-p2": softmax_family(
        {"intermediate_size": 32, "ffn_hidden_size": 32, "moe_top_k": 4}, score="dbrx", layout="dbrx"
    )
    | {
        "model_type": "dbrx",
        "config": {"attn_config": {"rope_theta": 10000.0}, "ffn_config": {"moe_normalize_expert_weights": 2.0}},
    },
    "dbrx-nonorm": softmax_family(
        {"intermediate_size": 32, "ffn_hidden_size": 32, "moe_top_k": 4}, score="dbrx", layout="dbrx"
    )
    | {
        "model_type": "dbrx",
        "config": {"attn_config": {"rope_theta": 10000.0}, "ffn_config": {"moe_normalize_expert_weights": None}},
    },
    "phimoe": softmax_family({"intermediate_size": 32}, score="sparsemixer", layout="w123"),
    "phimoe-jitter": softmax_family(
        {"intermediate_size": 32, "router_jitter_noise": 0.3}, score="sparsemixer", layout="w123"
    )
    | {"model_type": "phimoe"},
    "deepseek_v2": {
        "tokens": (16, 64),
        "text": GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
        "config": {"scoring_func": "softmax", "norm_topk_prob": False},
        "rule": {
            "score": "softmax",
            "groups": "max",
            "masked": 0.0,
            "renorm": False,
            "scale": True,
            "shared": "mlp.shared_experts",
        },
    },
    "deepseek_v2-greedy": {
        "model_type": "deepseek_v2",
        "tokens": (16, 64),
        "text": GROUPS | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        "config": {"scoring_func": "softmax", "norm_topk_prob": False},
        "rule": {"score": "softmax", "renorm": False, "scale": True, "shared": "mlp.shared_experts"},
    },
    "ernie4_5_moe": softmax_family(
        {
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 1,
            "moe_k": 4,
            "num_experts_per_tok": 4,
        },
        renorm=True,
        shared="mlp.shared_experts",
    ),
    "longcat_flash": softmax_family(
        {"n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4, "num_key_value_heads": 4},
        renorm=False,
        scale=True,
        experts=lambda config: config["n_routed_experts"],
    ),
    "glm4_moe_lite": ds3(
        {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "routed_scaling_factor": 1.8, **MOE_LAYERS}, NOAUX
    ),
    "minimax_m2": sigmoid_family({"intermediate_size": 32, "num_experts_per_tok": 4}, renorm=True, layout="w123"),
    "nemotron_h": ds3(
        {
            "layers_block_type": ["full_attention", "moe"],
            "layer_types": ["full_attention", "moe"],
            "hidden_size": 96,
            "moe_shared_expert_intermediate_size": 64,
        },
        tokens=TWO,
        layout="up_down",
        shared="mixer.shared_experts",
    ),
    "hy_v3": sigmoid_family({"num_experts_per_tok": 4}, renorm=True, eps=1e-20, scale=True, shared="mlp.shared_mlp"),
    "hy_v4": ds3(
        {
            "n_group": 1,
            "topk_group": 1,
            "hidden_size": 96,
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
        tokens=TWO,
        layout="fused",
        act="clamp",
        shared_act="silu",
        shared_form="linear_gate",
    )
    | WIDE_INPUT,
    "afmoe": sigmoid_family(
        {"num_experts_per_tok": 4, "num_shared_experts": 1, "route_scale": 2.5},
        renorm=True,
        eps=1e-20,
        scale=True,
        shared="mlp.shared_experts",
    ),
    "lfm2_moe": sigmoid_family(
        {"num_experts_per_tok": 4, "layer_types": ["full_attention", "full_attention"]},
        renorm_default=True,
        eps=1e-6,
        scale=True,
        layout="w123",
    ),
    "laguna": sigmoid_family(
        {"num_experts_per_tok": 4, "moe_routed_scaling_factor": 2.5},
        renorm=True,
        scale=True,
        logit_cap="moe_router_logit_softcapping",
        shared="mlp.shared_expert",
    )
    | {"output_scale": lambda c: c.moe_routed_scaling_factor},
    "laguna-softcap": sigmoid_family(
        {"num_experts_per_tok": 4, "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 2.0},
        renorm=True,
        scale=True,
        logit_cap="moe_router_logit_softcapping",
        shared="mlp.shared_expert",
    )
    | {"output_scale": lambda c: c.moe_routed_scaling_factor, "model_type": "laguna"},
    "exaone_moe": ds3({"num_shared_experts": 1}),
    "kimi_linear": ds3(
        {
            "num_shared_experts": 1,
            "n_shared_experts": 1,
            "num_key_value_heads": 4,
            "layer_types": ["full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        {"moe_router_activation_func": "sigmoid"},
        layout="w123",
        shared="block_sparse_moe.shared_experts",
    ),
    "step3p7": sigmoid_family(
        {
            "num_experts_per_tok": 4,
            "moe_router_scaling_factor": 2.0,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "full_attention"],
            "swiglu_limits": [0.0, 7.0],
            "swiglu_limits_shared": [0.0, 5.0],
        },
        renorm=True,
        scale=True,
        layout="moe",
        act="clamp_after",
        shared="share_expert",
    )
    | WIDE_INPUT
    | {"output_scale": lambda c: c.moe_router_scaling_factor},
    "cohere2_moe": sigmoid_family(
        {"intermediate_size": 32, "num_shared_experts": 1, "prefix_dense_intermediate_size": 192},
        score="topk_softmax",
        shared="mlp.shared_experts",
        combine=average,
    ),
    "cohere2_moe-sigmoid": sigmoid_family(
        {
            "intermediate_size": 32,
            "num_shared_experts": 1,
            "prefix_dense_intermediate_size": 192,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
        },
        renorm_default=True,
        shared="mlp.shared_experts",
    )
    | {"model_type": "cohere2_moe"},
    "flint": sigmoid_family({"num_experts_per_tok": 4}, renorm_default=True, shared="mlp.shared_expert"),
    "kolibri1": sigmoid_family(
        {"num_experts_per_tok": 4}, renorm_default=False, choose_by_logit=True, shared="mlp.shared_experts"
    )
    | {"bias_std": 0.5},
    "deepseek_v4": {
        "tokens": TWO,
        "text": {
            "num_experts_per_tok": 4,
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["sliding_attention", "sliding_attention"],
            "num_key_value_heads": 1,
            "hc_mult": 2,
        },
        "rule": {
            "score": "sqrtsoftplus",
            "renorm": True,
            "eps": 1e-20,
            "scale": True,
            "layout": "w123",
            "act": "clamp",
            "shared": "ffn.shared_experts",
            "shared_form": "w123",
        },
    }
    | WIDE_INPUT,
    "deepseek_v4-hash": {
        "model_type": "deepseek_v4",
        "tokens": TWO,
        "token_ids": True,
        "text": {
            "num_experts_per_tok": 4,
            "mlp_layer_types": ["moe", "hash_moe"],
            "layer_types": ["sliding_attention", "sliding_attention"],
            "num_key_value_heads": 1,
            "hc_mult": 2,
        },
        "call": lambda block, x, extra: block(x[None], input_ids=extra["token_ids"][None]),
        "rule": {
            "score": "hash",
            "layout": "w123",
            "act": "clamp",
            "shared": "ffn.shared_experts",
            "shared_form": "w123",
        },
    }
    | WIDE_INPUT,
    "openai_privacy_filter": {
        "tokens": TWO,
        "text": {"intermediate_size": 32, "num_experts_per_tok": 4},
        "output_scale": lambda c: float(c.num_experts_per_tok),
        "rule": {"score": "topk_softmax", "router_bias": "mlp.router.bias", "layout": "fused_bias", "act": "oai"},
    }
    | WIDE_INPUT,
    "minimax_m3_vl": sigmoid_family(
        {"intermediate_size": 32, "num_experts_per_tok": 4, "mlp_layer_types": ["dense", "sparse"]},
        renorm=True,
        scale=True,
        layout="w123",
        act="oai",
        shared="block_sparse_moe.shared_experts",
    )
    | WIDE_INPUT
    | {"output_scale": lambda c: c.routed_scaling_factor},
    "gemma4_text": GEMMA4,
    "gemma4": GEMMA4,
    "bailing_hybrid": ds3(
        {
            "num_shared_experts": 1,
            "n_shared_experts": 1,
            "num_key_value_heads": 4,
            "layer_types": ["full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        }
    ),
    "qwen3_vl_moe": softmax_family({"num_experts_per_tok": 4}, renorm=True, layout="fused"),
    "qwen3_vl_moe-hub": softmax_family({"num_experts_per_tok": 4}, renorm=True, layout="fused_t")
    | {"model_type": "qwen3_vl_moe", "transpose": ("experts.gate_up_proj", "experts.down_proj")},
    "qwen3_5_moe": softmax_family(
        {"num_experts_per_tok": 4, "layer_types": ["full_attention", "full_attention"]}, renorm=True, **SHARED_GATE
    )
    | {"architecture": "Qwen3_5MoeForConditionalGeneration"},
    "mistral4": ds3(
        {
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 4,
            "routed_scaling_factor": 1.5,
        },
        score="softmax",
        masked=0.0,
        layout="fused",
    ),
    "mistral_large4": ds3(
        {
            "hidden_size": 64,
            "num_key_value_heads": 4,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse"],
        },
        score="softmax",
        masked=0.0,
        layout="w123",
        renorm=True,
        shared="shared_experts",
        shared_form="w123",
    ),
    "deepseek_v32": ds3({"num_key_value_heads": 4}, NOAUX),
    "glm_moe_dsa": ds3({"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **MOE_LAYERS}, NOAUX),
    "glm4v_moe": ds3({"n_group": 1, "topk_group": 1}),
    "glm5_next": ds3(
        {
            "n_group": 1,
            "topk_group": 1,
            "hidden_size": 64,
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "index_topk": 32,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["linear_attention", "indexed_attention"],
        },
        act="clamp",
    )
    | WIDE_INPUT,
    "dots1": ds3({"n_shared_experts": 1, "routed_scaling_factor": 2.5}, NOAUX, renorm_default=False),
    "dots3_note": ds3(
        {
            "num_key_value_heads": 4,
            "head_dim": 32,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "full_attention"],
        }
    )
    | {"model_type": "dots3_note_text", "architecture": "Dots3NoteForCausalLM"},
    "solar_open": ds3(),
    "axk1": ds3({"num_key_value_heads": 4}, NOAUX, combine=post_norm),
    "axk2": ds3({"num_key_value_heads": 4}, NOAUX, masked=0.0),
    "beam": ds3({"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4}, shared=None)
    | {"output_scale": lambda c: c.routed_scaling_factor},
    "mimo_v2_flash": ds3({"routed_scaling_factor": 1.0}, NOAUX, shared=None),
    # save_pretrained writes `blocks` for `layers`; Hub releases have `layers`.
    "kimi_k25": ds3({"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}, {"text_config": NOAUX})
    | {"rename": ((".model.blocks.", ".model.layers."),)},
    "minimax": softmax_family({"intermediate_size": 32}, renorm=True, layout="w123"),
    "flex_olmo": softmax_family({"intermediate_size": 32, "num_experts_per_tok": 4}, renorm_default=False),
    "mellum": softmax_family({"num_experts_per_tok": 4}, renorm_default=True),
    "qwen4_exp": softmax_family(
        {
            "num_experts_per_tok": 4,
            "layer_types": ["linear_attention", "linear_attention"],
            "hc_count": 2,
            "hc_lowrank": 8,
        },
        renorm_default=True,
        **SHARED_GATE,
    )
    | {"architecture": "Qwen4ExpForConditionalGeneration"},
    "qwen3_omni_moe": softmax_family({"num_experts_per_tok": 4}, renorm_default=True)
    | {"module": "Qwen3OmniMoeThinkerTextSparseMoeBlock", "config": OMNI},
    "qwen3_omni_moe-talker": softmax_family(
        {"num_experts_per_tok": 4},
        renorm_default=True,
        shared="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate",
        branch="talker_config",
    )
    | {"model_type": "qwen3_omni_moe", "module": "Qwen3OmniMoeTalkerTextSparseMoeBlock", "config": OMNI},
    "granitemoeshared": with_siblings(
        granite(shared="shared_mlp", shared_form="input_linear"),
        "shared_mlp",
        call=call_with_shared,
        y="block_sparse_moe plus shared_mlp, which the layer adds",
    ),
    "granitemoehybrid": with_siblings(
        granite(shared="shared_mlp", shared_form="input_linear"),
        "shared_mlp",
        call=call_with_shared,
        y="block_sparse_moe plus shared_mlp, which the layer adds",
    ),
    "granitemoe_swa": with_siblings(
        granite(layout="fused", shared="shared_mlp", shared_form="input_linear"),
        "shared_mlp",
        call=call_with_shared,
        y="block_sparse_moe plus shared_mlp, which the layer adds",
    ),
    "ernie4_5_vl_moe": {
        "tokens": (16, 64),
        "token_types": True,
        "text": {
            "hidden_size": 64,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": [32, 16],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 2, 4]},
            "moe_num_shared_experts": 1,
        },
        "module": "Ernie4_5_VLMoeMoeBlock",
        "rule": {"special": check_ernie_vl},
    },
    "inkling": {
        "model_type": "inkling_mm_model",
        "tokens": TWO,
        "text": {"local_layer_ids": [0], "n_shared_experts": 2, "num_experts_per_tok": 2, "n_routed_experts": 6},
        "rule": {"special": check_inkling, "layout": "w13"},
    },
    "inkling2": sigmoid_family(
        {"num_experts_per_tok": 4, "layer_types": ["hybrid_sliding", "hybrid"]},
        renorm=True,
        eps=1e-20,
        scale=True,
        layout="w13",
        act="soft_cap",
    )
    | WIDE_INPUT
    | {"config": {"vision_config": {"text_hidden_size": 96}}},
    "muse_spark": {
        "config": {
            "audio_config": {
                "num_hidden_layers": 4,
                "hidden_sizes": [16, 16, 32, 32],
                "depths": [1, 1, 1, 1],
                "out_hidden_size": 96,
            }
        },
        "tokens": TWO,
        "text": {
            "moe_hidden_size": 48,
            "num_experts_per_tok": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [500000.0, 0],
            "routed_scaling_factor": 2.0,
        },
        "centered_norm": True,
        "router_std": 0.8,
        "rule": {"special": check_muse_spark, "layout": "fused"},
    },
    "nemotron_h-latent": ds3(
        {
            "layers_block_type": ["full_attention", "moe"],
            "layer_types": ["full_attention", "moe"],
            "hidden_size": 96,
            "moe_latent_size": 48,
            "moe_shared_expert_intermediate_size": 64,
        },
        tokens=TWO,
        layout="up_down",
        shared="mixer.shared_experts",
        before="fc1_latent_proj",
        after="fc2_latent_proj",
    )
    | {"model_type": "nemotron_h"},
    "zaya": {
        "tokens": TWO,
        "text": {"num_experts_per_tok": 1},
        "module": "ZayaSparseMoeBlock",
        "router_weights": (),
        "std": 0.35,
        "linear_bias_std": 0.05,
        "call": lambda block, x, extra: block(x[None])[0],
        "rule": {"special": check_zaya, "layout": "fused"},
    },
}

# Variants of the families above: another value of a key, or the other layout of a name.
FAMILIES |= {
    "qwen2_moe-norm": variant("qwen2_moe", norm_topk_prob=True),
    "olmoe-norm": variant("olmoe", norm_topk_prob=True),
    "hunyuan_v1_moe-top1": variant("hunyuan_v1_moe", moe_topk=1, num_experts_per_tok=1),
    # The bias picks experts with scores near 0, so that the epsilon 1e-6 changes the weights.
    "lfm2_moe-eps": variant("lfm2_moe", num_experts_per_tok=2) | {"bias_std": 3.0, "router_std": 1.0},
    "lfm2_moe-nobias": variant("lfm2_moe", use_expert_bias=False),
    "flint-nonorm": variant("flint", norm_topk_prob=False),
    "kolibri1-norm": variant("kolibri1", norm_topk_prob=True),
    # Negative biased scores: a masked group at 0 would win over them. axk2 does mask with 0, but then torch.topk picks
    # among equal zeros, so axk2 has no such file.
    "deepseek_v32-negbias": variant("deepseek_v32") | {"bias_std": 0.5, "bias_mean": -1.0},
    "axk2-nogroups": variant("axk2", n_group=None, topk_group=None),
    "step3p7-nolimit": variant("step3p7", swiglu_limits=None, swiglu_limits_shared=None),
    "cohere2_moe-noshared": variant("cohere2_moe", num_shared_experts=0),
    "granitemoeshared-noshared": granite()
    | {"model_type": "granitemoeshared", "text": {"intermediate_size": 32, "shared_intermediate_size": 0}},
    # save_pretrained turns every MLP's `gate_proj` into `linear_gate`.
    "hy_v4-hub": FAMILIES["hy_v4"] | {"model_type": "hy_v4", "rename": ((".linear_gate.", ".gate_proj."),)},
}
FAMILIES["hy_v4-hub"]["rule"] = FAMILIES["hy_v4"]["rule"] | {"shared_form": "gate_up_down"}
FAMILIES["cohere2_moe-noshared"]["rule"] = {"score": "topk_softmax"}

# Small files for the repository: one for each block with stages of its own. Their config.json keeps the text model's
# keys with plain values.
SMALL = {
    "hidden_size": 16,
    "moe_intermediate_size": 4,
    "moe_hidden_size": 12,
    "moe_latent_size": 12,
    "moe_shared_expert_intermediate_size": 4,
    "router_hidden_size": 8,
    "n_routed_experts": 8,
    "vocab_size": 32,
    "n_group": 4,
    "topk_group": 2,
}


def small(family, experts=4, top_k=2, **text):
    base = variant(family)
    own = {key: value for key, value in SMALL.items() if key in base["text"] or key in TINY}
    counts = {key: experts for key in ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")}
    chosen = {key: top_k for key in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")}
    values = base["text"] | own | counts | chosen | text
    return base | {"text": values, "tokens": (6, 16), "std": base.get("std", 0.1) * 2, "small": True}


GROUPS_OF_TWO = {"n_group": 2, "topk_group": 1}
FAMILIES |= {
    "axk1-small": small("axk1", **GROUPS_OF_TWO),
    "deepseek_v4-hash-small": small("deepseek_v4-hash"),
    "ernie4_5_vl_moe-small": small(
        "ernie4_5_vl_moe", experts=3, moe_intermediate_size=[4, 2], num_attention_heads=1, num_key_value_heads=1
    ),
    "gemma4_text-small": small("gemma4_text"),
    "inkling-small": small("inkling"),
    "inkling2-small": small("inkling2") | {"config": {"vision_config": {"text_hidden_size": 16}}},
    "muse_spark-small": small("muse_spark"),
    "nemotron_h-latent-small": small("nemotron_h-latent", **GROUPS_OF_TWO),
    "zaya-skip-small": small("zaya", top_k=1) | {"bias_std": 0.1, "std": 1.0},
}
AUDIO = FAMILIES["muse_spark"]["config"]["audio_config"]
FAMILIES["muse_spark-small"]["config"] = {"audio_config": AUDIO | {"out_hidden_size": 16}}
