#!/usr/bin/env python3
"""Tiny models that generate text: golden/data/models/NAME and golden/data/expected/NAME.safetensors.

    python3 generate_models.py [NAME ...]

Needs torch, transformers, tokenizers, compressed-tensors and numpy. The weights are random; attention and experts are
packed to 4 bits by compressed-tensors, everything else stays bfloat16. The expectations are logits in float64 of the
dequantized weights by a plain numpy implementation, which must agree with transformers' own module (a float64 copy
of it, whose norms and softmax are float32), and logits whose products quantize each row of their input to 8 bits.
"""

import json
import math
import shutil
import sys

import compressed_tensors
import numpy as np
import tokenizers
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common import GOLDEN, file_entry, seeded, write_sorted

FORMAT, GROUP = "pack-quantized", 32
PROMPT = "The lighthouse keeper counts the waves: one, two, three"
NEW_TOKENS = 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The split pattern of Qwen2 and Qwen3, which needs look-ahead.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Chosen so that no expert and no greedy token is decided by less than rounding 8-bit activations may change.
SEEDS = {"qwen3-moe-tiny": 12, "mixtral-tiny": 2}
MODELS = {
    "qwen3-moe-tiny": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            **COMMON,
            "head_dim": 32,
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
            "rope_theta": 10000.0,
        },
    ),
    "mixtral-tiny": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {
            **COMMON,
            "head_dim": 16,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "tie_word_embeddings": True,
            "rope_theta": 1000.0,
        },
    ),
}


class Names:
    """The checkpoint's names of one family."""

    def __init__(self, config):
        self.qwen = config["model_type"] == "qwen3_moe"
        self.mlp = "mlp" if self.qwen else "block_sparse_moe"
        self.parts = ("gate_proj", "up_proj", "down_proj") if self.qwen else ("w1", "w3", "w2")
        self.experts = config["num_experts"] if self.qwen else config["num_local_experts"]
        self.width = config["moe_intermediate_size"] if self.qwen else config["intermediate_size"]


def weights(name, config, names):
    """Float weights by checkpoint name; the linear ones are scaled so that activations stay near 1."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    out = {"model.embed_tokens.weight": seeded(f"{name}/embed", config["vocab_size"], hidden, scale=1.0)}

    def norm(key, size):
        out[key] = 1 + seeded(f"{name}/{key}", size, scale=0.2)

    def linear(key, n, k, gain=1.0):
        out[key] = seeded(f"{name}/{key}", n, k, scale=gain / math.sqrt(k))

    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head.weight", config["vocab_size"], hidden, 2.0)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        norm(layer + "input_layernorm.weight", hidden)
        norm(layer + "post_attention_layernorm.weight", hidden)
        attention = layer + "self_attn."
        linear(attention + "q_proj.weight", q, hidden, 1.5)
        linear(attention + "k_proj.weight", kv, hidden, 1.5)
        linear(attention + "v_proj.weight", kv, hidden)
        linear(attention + "o_proj.weight", hidden, q)
        if names.qwen:
            norm(attention + "q_norm.weight", head)
            norm(attention + "k_norm.weight", head)
        mlp = f"{layer}{names.mlp}."
        linear(mlp + "gate.weight", names.experts, hidden, 2.0)
        for e in range(names.experts):
            linear(f"{mlp}experts.{e}.{names.parts[0]}.weight", names.width, hidden)
            linear(f"{mlp}experts.{e}.{names.parts[1]}.weight", names.width, hidden)
            linear(f"{mlp}experts.{e}.{names.parts[2]}.weight", hidden, names.width, 2.0)
    return {key: value.to(torch.bfloat16) for key, value in out.items()}


def is_packed(key):
    return "self_attn." in key and "norm" not in key or ".experts." in key


def pack(tensors, scheme):
    """The checkpoint's tensors, and the float64 value of every weight."""
    stored, values = {}, {}
    compressor = BaseCompressor.get_value_from_registry(FORMAT)
    for key, weight in tensors.items():
        if not is_packed(key):
            stored[key], values[key] = weight, weight.double().numpy()
            continue
        size_n, size_k = weight.shape
        grouped = weight.reshape(size_n, size_k // GROUP, GROUP)
        scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
        state = compressor.compress({"weight": weight, "weight_scale": scale.to(torch.bfloat16)}, scheme)
        for part, tensor in state.items():
            stored[key.removesuffix("weight") + part] = tensor.contiguous()
        wide = {**state, "weight_scale": state["weight_scale"].float()}
        values[key] = compressor.decompress(wide, scheme)["weight"].double().numpy()
    return stored, values


def quantized(x):
    """Each row of x as the 8-bit codes of the int4 path represent it."""
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    scale = np.where(low == high, 1.0, 255 / np.where(low == high, 1.0, high - low))
    first = (-128 + low * scale) + (127 + high * scale) > 0
    zero = np.rint(np.clip(np.where(first, -128 - low * scale, 127 - high * scale), -128, 127))
    scaled = x * scale[..., None]
    codes = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled) + zero[..., None]
    return (np.clip(codes, -128, 127) - zero[..., None]) / scale[..., None]


class Plain:
    """The model in float64, one operation after the other."""

    def __init__(self, config, names, values, eight_bits):
        self.config, self.names, self.values, self.eight_bits = config, names, values, eight_bits
        self.margin = math.inf

    def linear(self, x, key):
        if self.eight_bits and is_packed(key):
            x = quantized(x)
        return x @ self.values[key].T

    def norm(self, x, key):
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.values[key]

    def rotate(self, x):
        """x [T, heads, head_dim]; the angles are float32, as transformers computes them."""
        dim = x.shape[-1]
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        inverse = (1.0 / np.float64(self.config["rope_theta"]) ** exponent.astype(np.float64)).astype(np.float32)
        angles = np.arange(len(x), dtype=np.float32)[:, None] * inverse[None]
        cos, sin = np.cos(angles.astype(np.float64))[:, None], np.sin(angles.astype(np.float64))[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, x, prefix):
        c, dim = self.config, self.config["head_dim"]
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        q = self.linear(x, prefix + "q_proj.weight").reshape(len(x), heads, dim)
        k = self.linear(x, prefix + "k_proj.weight").reshape(len(x), kv, dim)
        v = self.linear(x, prefix + "v_proj.weight").reshape(len(x), kv, dim)
        if self.names.qwen:
            q, k = self.norm(q, prefix + "q_norm.weight"), self.norm(k, prefix + "k_norm.weight")
        q, k = self.rotate(q), self.rotate(k)
        out = np.zeros_like(q)
        for t in range(len(x)):
            first = max(0, t + 1 - (c.get("sliding_window") or t + 1))
            for h in range(heads):
                scores = k[first : t + 1, h * kv // heads] @ q[t, h] / math.sqrt(dim)
                p = np.exp(scores - scores.max())
                out[t, h] = p @ v[first : t + 1, h * kv // heads] / p.sum()
        return self.linear(out.reshape(len(x), heads * dim), prefix + "o_proj.weight")

    def experts(self, x, prefix):
        logits = self.linear(x, prefix + "gate.weight")
        top_k = self.config["num_experts_per_tok"]
        out = np.zeros_like(x)
        for t, row in enumerate(logits):
            order = np.argsort(-row, kind="stable")
            self.margin = min(self.margin, row[order[top_k - 1]] - row[order[top_k]])
            p = np.exp(row - row.max())
            p /= p.sum()
            chosen = order[:top_k]
            for e in chosen:
                expert = f"{prefix}experts.{e}."
                gate, up, down = (f"{expert}{part}.weight" for part in self.names.parts)
                g, u = self.linear(x[t : t + 1], gate), self.linear(x[t : t + 1], up)
                inner = g / (1 + np.exp(-g)) * u
                out[t] += p[e] / p[chosen].sum() * self.linear(inner, down)[0]
        return out

    def logits(self, ids):
        x = self.values["model.embed_tokens.weight"][ids]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            x = x + self.attention(self.norm(x, layer + "input_layernorm.weight"), layer + "self_attn.")
            y = self.norm(x, layer + "post_attention_layernorm.weight")
            x = x + self.experts(y, f"{layer}{self.names.mlp}.")
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return self.linear(self.norm(x, "model.norm.weight"), head)


def by_transformers(model_class, config, names, values, ids):
    """Logits of transformers' module in float64 with the same weights."""
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = model_class(config).double().eval()
    state = {k: torch.from_numpy(v.copy()) for k, v in values.items() if ".experts." not in k}
    own = model.state_dict()
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        stack = [[values[f"{layer}{names.mlp}.experts.{e}.{part}.weight"] for part in names.parts] for e in range(names.experts)]
        if not names.qwen:
            state[f"{layer}mlp.gate.weight"] = state.pop(f"{layer}{names.mlp}.gate.weight")
        state[f"{layer}mlp.experts.gate_up_proj"] = torch.from_numpy(np.stack([np.concatenate(e[:2]) for e in stack]))
        state[f"{layer}mlp.experts.down_proj"] = torch.from_numpy(np.stack([e[2] for e in stack]))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    if set(own) != set(state):
        raise SystemExit(f"transformers has other parameters: {sorted(set(own) ^ set(state))}")
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def tokenizer(path, vocab_size=COMMON["vocab_size"], small=False):
    """Byte-level BPE with a few merges; a small one has only the bytes of the training text."""
    tok = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    alphabet = [] if small else sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    text = [PROMPT, "the waves and the wind and the lighthouse", "counting one two three four, one two three", "the keeper keeps the light"]
    tok.train_from_iterator(text * 3, trainer)
    tok.save(str(path), pretty=False)
    return tok


def build(name):
    config_class, model_class, keys = MODELS[name]
    config = config_class(**keys)
    names = Names({**keys, "model_type": config.model_type})
    keys = {**keys, "model_type": config.model_type}
    folder = GOLDEN / "data/models" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tok = tokenizer(folder / "tokenizer.json", keys["vocab_size"], small=keys["vocab_size"] < 256)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2], "chat_template": TEMPLATE}, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "do_sample": False}, indent=1) + "\n")

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=FORMAT)
    stored, values = pack(weights(f"{name}/{SEEDS[name]}", keys, names), scheme)
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format=FORMAT, quantization_status="compressed",
        ignore=["lm_head"] + [f"model.layers.{i}.{names.mlp}.gate" for i in range(keys["num_hidden_layers"])],
    ).model_dump(mode="json")
    written = {"architectures": [model_class.__name__], "model_type": config.model_type, "dtype": "bfloat16", "hidden_act": "silu",
               "rope_scaling": None, "attention_bias": False, **keys, "quantization_config": {**quantization, "version": compressed_tensors.__version__}}
    if not names.qwen:
        written.pop("attention_bias")
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    write_sorted(folder / "model.safetensors", stored, {"format": "pt"})

    ids = tok.encode(PROMPT).ids
    plain = Plain(keys, names, values, eight_bits=False)
    logits = plain.logits(ids)
    theirs = by_transformers(model_class, config, names, values, ids)
    difference = np.abs(logits - theirs).max() / np.abs(logits).max()
    if difference > 1e-5:
        raise SystemExit(f"{name}: transformers differs by {difference}")
    eight = Plain(keys, names, values, eight_bits=True)
    tokens, gap = list(ids), math.inf
    for _ in range(NEW_TOKENS):
        last = eight.logits(tokens)[-1]
        best = np.sort(last)
        gap = min(gap, best[-1] - best[-2])
        tokens.append(int(last.argmax()))
    print(f"{name}: {len(ids)} tokens, logits to {np.abs(logits).max():.2f}, transformers differs by {difference:.1e}; margins: router {plain.margin:.4f}, "
          f"{eight.margin:.4f}, greedy {gap:.4f}; 8 bits change logits by {np.abs(eight.logits(ids) - logits).max():.3f}; new {tokens[len(ids):]}")
    expected = GOLDEN / "data/expected" / f"{name}.safetensors"
    about = (f"logits: numpy {np.__version__} in float64 on the dequantized weights, equal to transformers {transformers.__version__} (torch "
             f"{torch.__version__}, float64) within {difference:.1e} of the largest; logits_int8: with 8-bit activations; new_tokens: greedy, 8-bit activations")
    write_sorted(expected, {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "logits": torch.from_numpy(logits).float(),
        "logits_int8": torch.from_numpy(eight.logits(ids)).float(),
        "new_tokens": torch.tensor(tokens[len(ids):], dtype=torch.int32),
    }, {"about": about})
    fragment = {
        "name": name,
        "dir": folder.relative_to(GOLDEN).as_posix(),
        "format": FORMAT,
        "about": f"a tiny {config.model_type} with a tokenizer, random weights (seeded by the tensors' names)",
        "producer": "transformers",
        "version": transformers.__version__,
        "script": "scripts/gen/generate_models.py",
        "files": [file_entry(path) for path in sorted(folder.iterdir())],
        "expected": [file_entry(expected)],
    }
    path = GOLDEN / "fragments/models" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(fragment, indent=1) + "\n")
    print(f"{name}: {sum(f['bytes'] for f in fragment['files'])} bytes, expected {fragment['expected'][0]['bytes']} bytes")


if __name__ == "__main__":
    for model in sys.argv[1:] or MODELS:
        build(model)
