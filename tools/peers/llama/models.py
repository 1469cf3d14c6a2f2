"""Writes one model of random weights twice: as a checkpoint for `marlinspike convert`, and as GGUF for llama.cpp.

    pip install gguf numpy
    python models.py DIR [--layers 4]

The shape is Qwen3-30B-A3B's, with fewer layers. Both files hold the same 4-bit codes: compressed-tensors pack-quantized
in groups of 32, and Q4_0. Scales are exact in bf16 and f16. The embedding is bf16 in both.
"""

import argparse
import json
import struct
from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD = 2048, 32, 4, 128
EXPERTS, TOP_K, INNER, VOCAB, POSITIONS = 128, 8, 768, 151936, 4096
GROUP, THETA, EPS = 32, 1e6, 1e-6


class Random:
    """Codes and scales from one pool, which matrices begin at different places of."""

    def __init__(self):
        rng = np.random.default_rng(17)
        self.codes = rng.integers(1, 16, 1 << 26, dtype=np.uint8)
        self.mantissas = rng.integers(0, 4, 1 << 22, dtype=np.uint8)
        self.at = 0

    def matrix(self, size_n, size_k):
        """Codes [N, K] and scales [N, K / 32], about 1 / (4.6 sqrt(K))."""
        self.at += 1_000_003
        indices = (np.arange(size_n * size_k, dtype=np.int64) + self.at) % len(self.codes)
        codes = self.codes[indices].reshape(size_n, size_k)
        groups = size_n * size_k // GROUP
        mantissas = self.mantissas[(np.arange(groups) + self.at) % len(self.mantissas)]
        exponent = -np.ceil(np.log2(4.6 * np.sqrt(size_k)))
        scales = (2.0**exponent * (1 + mantissas / 8.0)).astype(np.float32)
        return codes, scales.reshape(size_n, size_k // GROUP)


def bf16(values):
    """Bits of values that are exact in bf16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def q4_0(codes, scales):
    """Rows of blocks: an f16 scale, then bytes with value i in the low half and i + 16 in the high half."""
    size_n, size_k = codes.shape
    blocks = codes.reshape(size_n, size_k // GROUP, 2, GROUP // 2)
    packed = np.empty((size_n, size_k // GROUP, 2 + GROUP // 2), dtype=np.uint8)
    packed[:, :, :2] = scales.astype(np.float16)[..., None].view(np.uint8)
    packed[:, :, 2:] = blocks[:, :, 0] | blocks[:, :, 1] << 4
    return packed.reshape(size_n, -1)


class Checkpoint:
    """A safetensors file, written tensor by tensor."""

    def __init__(self, path):
        self.data = open(path.with_suffix(".data"), "w+b")
        self.path, self.header = path, {}

    def add(self, name, dtype, array):
        begin = self.data.tell()
        self.data.write(np.ascontiguousarray(array).tobytes())
        self.header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, self.data.tell()],
        }

    def quantized(self, name, codes, scales):
        self.add(f"{name}.weight_packed", "I32", (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int32))
        self.add(f"{name}.weight_scale", "BF16", bf16(scales))
        self.add(f"{name}.weight_shape", "I64", np.array(codes.shape, dtype=np.int64))

    def close(self):
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        self.data.seek(0)
        with open(self.path, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            while block := self.data.read(1 << 26):
                out.write(block)
        self.data.close()
        Path(self.data.name).unlink()


def config(layers):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group"}
    group = {"targets": ["Linear", "lm_head"], "weights": {**weights, "dynamic": False}, "input_activations": None}
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_act": "silu", "attention_bias": False, "hidden_size": HIDDEN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "max_position_embeddings": POSITIONS, "rms_norm_eps": EPS, "vocab_size": VOCAB,
        "intermediate_size": 6144, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False, "rope_theta": THETA, "rope_scaling": None,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "ignore": ["re:.*mlp.gate$"], "config_groups": {"group_0": group},
        },
    }


def tokenizer():
    """A word for each token, so that a text has a known number of tokens."""
    vocab = {f"t{i}": i for i in range(VOCAB)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }


def describe(writer, layers):
    writer.add_block_count(layers)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    folder = args.dir / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(args.layers)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    random, checkpoint = Random(), Checkpoint(folder / "model.safetensors")
    writer = gguf.GGUFWriter(args.dir / "model.gguf", "qwen3moe", use_temp_file=True)
    describe(writer, args.layers)
    kinds = gguf.GGMLQuantizationType

    def quantized(name, other, size_n, size_k):
        codes, scales = random.matrix(size_n, size_k)
        checkpoint.quantized(name, codes, scales)
        writer.add_tensor(other, q4_0(codes, scales), raw_dtype=kinds.Q4_0)

    def norm(name, other, size):
        ones = np.ones(size, dtype=np.float32)
        checkpoint.add(name, "BF16", bf16(ones))
        writer.add_tensor(other, ones)

    def floats(size_n, size_k):
        codes, scales = random.matrix(size_n, size_k)
        return (codes.astype(np.float32) - 8) * scales[:, :1]

    embedding = bf16(floats(VOCAB, HIDDEN) * 128)
    checkpoint.add("model.embed_tokens.weight", "BF16", embedding)
    writer.add_tensor("token_embd.weight", embedding.view(np.uint8), raw_dtype=kinds.BF16)
    for i in range(args.layers):
        layer, block = f"model.layers.{i}", f"blk.{i}"
        norm(f"{layer}.input_layernorm.weight", f"{block}.attn_norm.weight", HIDDEN)
        norm(f"{layer}.post_attention_layernorm.weight", f"{block}.ffn_norm.weight", HIDDEN)
        for which in "qk":
            name = f"{layer}.self_attn.{which}_norm.weight"
            norm(name, f"{block}.attn_{which}_norm.weight", HEAD)
        for which, size in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)]:
            name = f"{layer}.self_attn.{which}_proj"
            quantized(name, f"{block}.attn_{which}.weight", size * HEAD, HIDDEN)
        quantized(f"{layer}.self_attn.o_proj", f"{block}.attn_output.weight", HIDDEN, HEADS * HEAD)
        gate = floats(EXPERTS, HIDDEN)
        checkpoint.add(f"{layer}.mlp.gate.weight", "BF16", bf16(gate))
        writer.add_tensor(f"{block}.ffn_gate_inp.weight", gate)
        for which, size_n, size_k in [("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)]:
            stack = []
            for e in range(EXPERTS):
                codes, scales = random.matrix(size_n, size_k)
                checkpoint.quantized(f"{layer}.mlp.experts.{e}.{which}_proj", codes, scales)
                stack.append(q4_0(codes, scales))
            writer.add_tensor(f"{block}.ffn_{which}_exps.weight", np.stack(stack), raw_dtype=kinds.Q4_0)
    norm("model.norm.weight", "output_norm.weight", HIDDEN)
    quantized("lm_head", "output.weight", VOCAB, HIDDEN)
    checkpoint.close()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
