#!/usr/bin/env python3
"""Tiny DeepSeek-V3, DeepSeek-V2 and gpt-oss models: golden/data/models/NAME and golden/data/expected/NAME.safetensors.

    python3 generate_families.py [NAME ...]

As generate_models.py, which has the tokenizer, the packing and the checks; here are the decoders' differences. Latent
attention is computed with expanded keys and values, as transformers does. MXFP4 weights are random codes and scales.
"""

import hashlib
import json
import math
import shutil
import sys

import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

import generate_models as base
from common import GOLDEN, file_entry, seeded, write_sorted

VOCAB = 78
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
DEEPSEEK = {
    **COMMON,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_rope_head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "hidden_act": "silu",
    "attention_bias": False,
}
# Chosen so that no expert and no greedy token is decided by less than rounding may change.
SEEDS = {"deepseek-v3-tiny": 9, "deepseek-v2-tiny": 1, "gpt-oss-tiny": 2}
MODELS = {
    "deepseek-v3-tiny": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            **DEEPSEEK,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "deepseek-v2-tiny": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {
            **DEEPSEEK,
            "num_hidden_layers": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 0,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "rope_theta": 10000.0,
        },
    ),
    "gpt-oss-tiny": (
        transformers.LoadWeightsConfig,
        transformers.GptOssForCausalLM,
        {
            **COMMON,
            "rms_norm_eps": 1e-5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_limit": 2.0,
            "attention_bias": True,
            "hidden_act": "silu",
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
PARTS = ("gate_proj", "up_proj", "down_proj")


def weights(name, config):
    """Float weights by checkpoint name, and the stored MXFP4 tensors."""
    out, stored = {}, {}
    hidden, heads, vocab = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]

    def norm(key, size):
        out[key] = 1 + seeded(f"{name}/{key}", size, scale=0.2)

    def linear(key, n, k, gain=1.0, bias=False):
        out[key + ".weight"] = seeded(f"{name}/{key}", n, k, scale=gain / math.sqrt(k))
        if bias:
            out[key + ".bias"] = seeded(f"{name}/{key}.bias", n, scale=0.3)

    def mxfp4(key, experts, n, k):
        random = np.random.default_rng(hash_of(f"{name}/{key}"))
        stored[key + "_blocks"] = torch.from_numpy(random.integers(0, 256, (experts, n, k // 32, 16), dtype=np.uint8))
        stored[key + "_scales"] = torch.from_numpy(random.integers(122, 125, (experts, n, k // 32), dtype=np.uint8))
        stored[key + "_bias"] = seeded(f"{name}/{key}_bias", experts, n, scale=0.3).to(torch.bfloat16)

    out["model.embed_tokens.weight"] = seeded(f"{name}/embed", vocab, hidden, scale=0.4)
    norm("model.norm.weight", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        norm(layer + "input_layernorm.weight", hidden)
        norm(layer + "post_attention_layernorm.weight", hidden)
        if "sliding_window" in config:
            q, kv = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
            for part, n, k, gain in (("q", q, hidden, 1.5), ("k", kv, hidden, 1.5), ("v", kv, hidden, 1.0), ("o", hidden, q, 1.0)):
                linear(f"{attention}{part}_proj", n, k, gain, bias=True)
            out[attention + "sinks"] = seeded(f"{name}/{attention}sinks", heads, scale=1.0)
            experts, width = config["num_local_experts"], config["intermediate_size"]
            linear(mlp + "router", experts, hidden, 2.0, bias=True)
            mxfp4(mlp + "experts.gate_up_proj", experts, 2 * width, hidden)
            mxfp4(mlp + "experts.down_proj", experts, hidden, width)
            continue
        rank, nope, rope, v = (config[k] for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if config["q_lora_rank"]:
            linear(attention + "q_a_proj", config["q_lora_rank"], hidden)
            norm(attention + "q_a_layernorm.weight", config["q_lora_rank"])
            linear(attention + "q_b_proj", heads * (nope + rope), config["q_lora_rank"], 1.5)
        else:
            linear(attention + "q_proj", heads * (nope + rope), hidden, 1.5)
        linear(attention + "kv_a_proj_with_mqa", rank + rope, hidden, 1.5)
        norm(attention + "kv_a_layernorm.weight", rank)
        linear(attention + "kv_b_proj", heads * (nope + v), rank, 1.5)
        linear(attention + "o_proj", hidden, heads * v)

        def dense(prefix, width):
            for part, n, k, gain in zip(PARTS, (width, width, hidden), (hidden, hidden, width), (1.0, 1.0, 2.0)):
                linear(f"{prefix}.{part}", n, k, gain)

        if i < config["first_k_dense_replace"]:
            dense(mlp.removesuffix("."), config["intermediate_size"])
            continue
        linear(mlp + "gate", config["n_routed_experts"], hidden, 2.0)
        if config["scoring_func"] == "sigmoid":
            out[mlp + "gate.e_score_correction_bias"] = seeded(f"{name}/{mlp}bias", config["n_routed_experts"], scale=0.2)
        for e in range(config["n_routed_experts"]):
            dense(f"{mlp}experts.{e}", config["moe_intermediate_size"])
        dense(mlp + "shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
    floats = ("e_score_correction_bias",)
    return {k: v.float() if k.endswith(floats) else v.to(torch.bfloat16) for k, v in out.items()}, stored


def hash_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def is_packed(config, key):
    """Whether a weight is stored in 4 bits: everything of DeepSeek-V2's layers, V3's without the attention."""
    if "sliding_window" in config or not key.endswith(".weight") or ".layers." not in key:
        return False
    inside = "self_attn." in key and config["q_lora_rank"] is None or ".mlp." in key
    return inside and "norm" not in key and ".gate.weight" not in key


def yarn(config):
    """Frequencies of pairs, the factor on cos and sin, and the factor on scores."""
    dim = config.get("qk_rope_head_dim") or config["head_dim"]
    theta, scaling = config["rope_theta"], config.get("rope_scaling")
    exponent = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    own = 1.0 / theta**exponent
    if not scaling:
        return own.astype(np.float32), 1.0, 1.0
    factor = scaling["factor"]

    def pair(turns):
        return dim * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling["beta_fast"]), pair(scaling["beta_slow"])
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    share = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)

    def mscale(m):
        return 0.1 * m * math.log(factor) + 1.0

    both = "mscale" in scaling and "mscale_all_dim" in scaling
    attention = mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"]) if both else mscale(1.0)
    score = mscale(scaling["mscale_all_dim"]) ** 2 if both else 1.0
    return (own / factor * share + own * (1 - share)).astype(np.float32), attention, score


class Plain(base.Plain):
    """The decoder in float64, one operation after the other."""

    def __init__(self, config, values, eight_bits):
        super().__init__(config, None, values, eight_bits)
        self.frequencies, self.attention_factor, self.score_factor = yarn(config)

    def grouped(self, x):
        """Each group of 32 of x as the 8-bit codes next to MXFP4 weights represent it."""
        groups = x.reshape(*x.shape[:-1], -1, 32)
        top = np.abs(groups).max(-1, keepdims=True)
        top = np.where(top == 0, 1.0, top)
        return (np.rint(groups * (127 / top)) * (top / 127)).reshape(x.shape)

    def linear(self, x, key):
        # The up-projection of latents is used as floats.
        if self.eight_bits and is_packed(self.config, key) and "kv_b_proj" not in key:
            x = base.quantized(x)
        y = x @ self.values[key].T
        bias = self.values.get(key.removesuffix("weight") + "bias")
        return y if bias is None else y + bias

    def norm(self, x, key, eps=None):
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + (eps or self.config["rms_norm_eps"])) * self.values[key]

    def rotate(self, x):
        """x [T, heads, dim], by pairs for DeepSeek and by halves for gpt-oss."""
        angles = (np.arange(len(x), dtype=np.float32)[:, None] * self.frequencies[None]).astype(np.float64)[:, None]
        cos, sin = np.cos(angles) * self.attention_factor, np.sin(angles) * self.attention_factor
        halves = "sliding_window" in self.config
        a, b = np.split(x, 2, -1) if halves else (x[..., ::2], x[..., 1::2])
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def softmax_sum(self, q, k, v, scale, window, sinks):
        """Causal attention: q [T, heads, dim], k and v [T, heads, ...]."""
        out = np.zeros((*q.shape[:2], v.shape[-1]))
        for t in range(len(q)):
            first = max(0, t + 1 - (window or t + 1))
            for h in range(q.shape[1]):
                scores = k[first : t + 1, h] @ q[t, h] * scale
                top = scores.max() if sinks is None else max(scores.max(), sinks[h])
                p = np.exp(scores - top)
                total = p.sum() + (0 if sinks is None else np.exp(sinks[h] - top))
                out[t, h] = p @ v[first : t + 1, h] / total
        return out.reshape(len(q), -1)

    def latent_attention(self, x, prefix):
        c, heads = self.config, self.config["num_attention_heads"]
        rank, nope = c["kv_lora_rank"], c["qk_nope_head_dim"]
        if c["q_lora_rank"]:
            latent = self.norm(self.linear(x, prefix + "q_a_proj.weight"), prefix + "q_a_layernorm.weight", 1e-6)
            q = self.linear(latent, prefix + "q_b_proj.weight")
        else:
            q = self.linear(x, prefix + "q_proj.weight")
        q = q.reshape(len(x), heads, -1)
        down = self.linear(x, prefix + "kv_a_proj_with_mqa.weight")
        up = self.linear(self.norm(down[:, :rank], prefix + "kv_a_layernorm.weight", 1e-6), prefix + "kv_b_proj.weight")
        up = up.reshape(len(x), heads, -1)
        turned = np.broadcast_to(self.rotate(down[:, None, rank:]), (len(x), heads, c["qk_rope_head_dim"]))
        q = np.concatenate([q[..., :nope], self.rotate(q[..., nope:])], -1)
        k = np.concatenate([up[..., :nope], turned], -1)
        scale = self.score_factor / math.sqrt(q.shape[-1])
        return self.linear(self.softmax_sum(q, k, up[..., nope:], scale, None, None), prefix + "o_proj.weight")

    def attention(self, x, prefix, layer):
        c = self.config
        if "sliding_window" not in c:
            return self.latent_attention(x, prefix)
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, k, v = (self.linear(x, f"{prefix}{p}_proj.weight").reshape(len(x), n, dim) for p, n in (("q", heads), ("k", kv), ("v", kv)))
        k, v = (np.repeat(y, heads // kv, 1) for y in (self.rotate(k), v))
        window = c["sliding_window"] if c["layer_types"][layer] == "sliding_attention" else None
        attended = self.softmax_sum(self.rotate(q), k, v, 1 / math.sqrt(dim), window, self.values[prefix + "sinks"])
        return self.linear(attended, prefix + "o_proj.weight")

    def mlp(self, x, prefix):
        g, u = (self.linear(x, f"{prefix}{p}.weight") for p in PARTS[:2])
        return self.linear(g / (1 + np.exp(-g)) * u, prefix + "down_proj.weight")

    def best(self, values, count):
        order = np.argsort(-values, kind="stable")
        if count < len(values):
            self.margin = min(self.margin, values[order[count - 1]] - values[order[count]])
        return order[:count]

    def choose(self, row, bias):
        """Experts and weights of one token's logits."""
        c, top_k = self.config, self.config["num_experts_per_tok"]
        if "sliding_window" in c:
            chosen = self.best(row, top_k)
            p = np.exp(row[chosen] - row.max())
            return chosen, p / p.sum()
        if c["scoring_func"] == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
            choice = scores + bias
            per_group = np.sort(choice.reshape(c["n_group"], -1), -1)[:, -2:].sum(-1)
        else:
            p = np.exp(row - row.max())
            scores = choice = p / p.sum()
            per_group = choice.reshape(c["n_group"], -1).max(-1)
        kept = self.best(per_group, c["topk_group"])
        group = np.arange(len(row)) // (len(row) // c["n_group"])
        chosen = self.best(np.where(np.isin(group, kept), choice, -1e9), top_k)
        weight = scores[chosen]
        if c["norm_topk_prob"]:
            weight = weight / (weight.sum() + 1e-20)
        return chosen, weight * c["routed_scaling_factor"]

    def expert(self, x, prefix, e):
        if "sliding_window" not in self.config:
            return self.mlp(x, f"{prefix}experts.{e}.")
        v, limit = self.values, self.config["swiglu_limit"]
        grouped = self.grouped if self.eight_bits else lambda x: x
        both = grouped(x) @ v[prefix + "experts.gate_up_proj"][e].T + v[prefix + "experts.gate_up_proj_bias"][e]
        g, u = np.minimum(both[:, ::2], limit), np.clip(both[:, 1::2], -limit, limit)
        inner = (u + 1) * (g / (1 + np.exp(-1.702 * g)))
        return grouped(inner) @ v[prefix + "experts.down_proj"][e].T + v[prefix + "experts.down_proj_bias"][e]

    def block(self, x, prefix, layer):
        if layer < self.config.get("first_k_dense_replace", 0):
            return self.mlp(x, prefix)
        router = "router" if "sliding_window" in self.config else "gate"
        logits = self.linear(x, f"{prefix}{router}.weight")
        out = np.zeros_like(x)
        for t, row in enumerate(logits):
            for e, weight in zip(*self.choose(row, self.values.get(prefix + "gate.e_score_correction_bias"))):
                out[t] += weight * self.expert(x[t : t + 1], prefix, e)[0]
        if "sliding_window" not in self.config:
            out = out + self.mlp(x, prefix + "shared_experts.")
        return out

    def logits(self, ids):
        x = self.values["model.embed_tokens.weight"][ids]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            x = x + self.attention(self.norm(x, layer + "input_layernorm.weight"), layer + "self_attn.", i)
            x = x + self.block(self.norm(x, layer + "post_attention_layernorm.weight"), layer + "mlp.", i)
        return self.linear(self.norm(x, "model.norm.weight"), "model.embed_tokens.weight")


def by_transformers(model_class, config, values, ids):
    """Logits of transformers' module in float64 with the same weights."""
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = model_class(config).double().eval()
    state = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in values.items() if ".experts." not in k}
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}.mlp.experts."
        if prefix + "gate_up_proj" in values:
            for key in ("gate_up_proj", "down_proj"):
                state[prefix + key] = torch.from_numpy(np.ascontiguousarray(values[prefix + key].transpose(0, 2, 1)))
                state[f"{prefix}{key}_bias"] = torch.from_numpy(values[f"{prefix}{key}_bias"])
        elif f"{prefix}0.gate_proj.weight" in values:
            stack = [[values[f"{prefix}{e}.{p}.weight"] for p in PARTS] for e in range(config.n_routed_experts)]
            state[prefix + "gate_up_proj"] = torch.from_numpy(np.stack([np.concatenate(e[:2]) for e in stack]))
            state[prefix + "down_proj"] = torch.from_numpy(np.stack([e[2] for e in stack]))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    own = model.state_dict()
    if set(own) != set(state):
        raise SystemExit(f"transformers has other parameters: {sorted(set(own) ^ set(state))}")
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def pack(config, floats, stored, scheme):
    """The checkpoint's tensors, and the float64 value of every weight."""
    packed = {k: v for k, v in floats.items() if is_packed(config, k)}
    base.is_packed, keep = (lambda key: key in packed), base.is_packed
    tensors, values = base.pack(floats, scheme)
    base.is_packed = keep
    for key, tensor in stored.items():
        tensors[key] = tensor
        if key.endswith("_bias"):
            values[key] = tensor.double().numpy()
        elif key.endswith("_blocks"):
            codes, scales = tensor.numpy(), stored[key.replace("_blocks", "_scales")].numpy()
            numbers = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:3], 32)
            numbers = numbers * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
            values[key.removesuffix("_blocks")] = numbers.reshape(*codes.shape[:2], -1)
    return tensors, values


def quantization(keys, scheme):
    if "sliding_window" in keys:
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    ignore = ["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(keys["first_k_dense_replace"], keys["num_hidden_layers"])]
    if keys["q_lora_rank"]:
        ignore.append("re:.*self_attn.*")
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=base.FORMAT, quantization_status="compressed", ignore=ignore)
    return {**config.model_dump(mode="json"), "version": compressed_tensors.__version__}


def compute(name, seed, ids):
    """Everything of a model but its files."""
    config_class, model_class, keys = MODELS[name]
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=base.GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=base.FORMAT)
    tensors, values = pack(keys, *weights(f"{name}/{seed}", keys), scheme)
    plain = Plain(keys, values, eight_bits=False)
    logits = plain.logits(ids)
    eight = Plain(keys, values, eight_bits=True)
    tokens, gap = list(ids), math.inf
    for _ in range(base.NEW_TOKENS):
        last = eight.logits(tokens)[-1]
        best = np.sort(last)
        gap = min(gap, best[-1] - best[-2])
        tokens.append(int(last.argmax()))
    margins = (plain.margin, eight.margin, gap)
    return keys, scheme, tensors, values, logits, eight.logits(ids), tokens, margins


def build(name):
    config_class, model_class, _ = MODELS[name]
    folder = GOLDEN / "data/models" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tok = base.tokenizer(folder / "tokenizer.json", VOCAB, small=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": base.SPECIAL[2], "chat_template": base.TEMPLATE}, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "do_sample": False}, indent=1) + "\n")
    ids = tok.encode(base.PROMPT).ids
    keys, scheme, tensors, values, logits, eight, tokens, margins = compute(name, SEEDS[name], ids)
    config = config_class(**json.loads(json.dumps(keys)))
    theirs = by_transformers(model_class, config, values, ids)
    difference = np.abs(logits - theirs).max() / np.abs(logits).max()
    if difference > 1e-5:
        raise SystemExit(f"{name}: transformers differs by {difference}")
    written = {"architectures": [model_class.__name__], "model_type": config.model_type, "dtype": "bfloat16", **keys,
               "quantization_config": quantization(keys, scheme)}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    write_sorted(folder / "model.safetensors", tensors, {"format": "pt"})
    print(f"{name}: {len(ids)} tokens, logits to {np.abs(logits).max():.2f}, transformers differs by {difference:.1e}; margins of router, router with 8 bits, "
          f"greedy {margins}; 8 bits change logits by {np.abs(eight - logits).max():.3f}; new {tokens[len(ids):]}")
    expected = GOLDEN / "data/expected" / f"{name}.safetensors"
    about = (f"logits: numpy {np.__version__} in float64 on the dequantized weights, equal to transformers {transformers.__version__} (torch "
             f"{torch.__version__}, float64) within {difference:.1e} of the largest; logits_int8: with 8-bit activations of int4 weights and of MXFP4 weights; "
             "new_tokens: greedy, as logits_int8")
    write_sorted(expected, {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "logits": torch.from_numpy(logits).float(),
        "logits_int8": torch.from_numpy(eight).float(),
        "new_tokens": torch.tensor(tokens[len(ids):], dtype=torch.int32),
    }, {"about": about})
    fragment = {
        "name": name,
        "dir": folder.relative_to(GOLDEN).as_posix(),
        "format": "mxfp4" if name == "gpt-oss-tiny" else base.FORMAT,
        "about": f"a tiny {config.model_type} with a tokenizer, random weights (seeded by the tensors' names)",
        "producer": "transformers",
        "version": transformers.__version__,
        "script": "scripts/gen/generate_families.py",
        "files": [file_entry(path) for path in sorted(folder.iterdir())],
        "expected": [file_entry(expected)],
    }
    path = GOLDEN / "fragments/models" / f"{name}.json"
    path.write_text(json.dumps(fragment, indent=1) + "\n")
    print(f"{name}: {sum(f['bytes'] for f in fragment['files'])} bytes, expected {fragment['expected'][0]['bytes']} bytes")


if __name__ == "__main__":
    for model in sys.argv[1:] or MODELS:
        build(model)
