"""One model with random weights in two forms: a checkpoint folder, and a GGUF file for llama.cpp.

    models.py OUT [--model qwen3-30b-a3b|gpt-oss-20b] [--layers 4] [--vocab 4096] [--seed 1]

OUT/checkpoint is a model of Qwen3-30B-A3B's shape (compressed-tensors, 4 bits, groups of 32; norms, router,
embedding and head in bfloat16), OUT/model.gguf the same shape in Q4_0 (4 bits, blocks of 32; router in f32,
embedding and head in BF16). Both store 4.5 bits per quantized weight. gpt-oss-20b has experts in MXFP4 and
everything else in bfloat16, in both forms. The weights are drawn separately: what is compared is time.
Needs numpy and gguf.
"""

import argparse
import json
import pathlib
import struct

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, TOP_K, INNER = 128, 8, 768
GROUP = 32


class GptOss:
    """Sizes of gpt-oss-20b."""

    HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, INNER = 2880, 64, 8, 64, 32, 4, 2880
    WINDOW = 128

    @classmethod
    def attention(cls):
        """(name of the checkpoint, of the GGUF file, size_n, size_k)"""
        q, kv = cls.HEADS * cls.HEAD_DIM, cls.KV_HEADS * cls.HEAD_DIM
        return [("q_proj", "attn_q", q, cls.HIDDEN), ("k_proj", "attn_k", kv, cls.HIDDEN),
                ("v_proj", "attn_v", kv, cls.HIDDEN), ("o_proj", "attn_output", cls.HIDDEN, q)]  # fmt: skip


class Safetensors:
    """Tensors as functions that make them, written one after another."""

    def __init__(self):
        self.entries = []

    def add(self, name, dtype, shape, make):
        self.entries.append((name, dtype, shape, make))

    def write(self, path):
        header, at = {}, 0
        sizes = {"U8": 1, "BF16": 2, "I32": 4, "I64": 8}
        for name, dtype, shape, _ in self.entries:
            size = sizes[dtype] * int(np.prod(shape))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for *_, make in self.entries:
                out.write(make().tobytes())


def matrices(layers):
    """(name of the checkpoint, size_n, size_k) of each quantized matrix of a layer."""
    attention = [
        ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
        ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    ]
    experts = [
        (f"mlp.experts.{e}.{name}", *shape)
        for e in range(EXPERTS)
        for name, shape in [("gate_proj", (INNER, HIDDEN)), ("up_proj", (INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))]
    ]
    for i in range(layers):
        for name, size_n, size_k in attention + experts:
            yield f"model.layers.{i}.{name}", size_n, size_k


def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def checkpoint(folder, options, tokenizer):
    rng = np.random.default_rng(options.seed)
    files = Safetensors()

    def plain(name, shape, scale):
        files.add(name, "BF16", shape, lambda: bf16(rng.standard_normal(shape, dtype=np.float32) * scale))

    def ones(name, size):
        files.add(name, "BF16", [size], lambda: bf16(np.ones(size, np.float32)))

    for name, size_n, size_k in matrices(options.layers):
        scale = size_k**-0.5 / 4.6  # codes -8..7 have a deviation of 4.6
        files.add(
            f"{name}.weight_packed", "I32", [size_n, size_k // 8],
            lambda n=size_n, k=size_k: rng.integers(0, 2**32, (n, k // 8), dtype=np.uint32),
        )  # fmt: skip
        files.add(
            f"{name}.weight_scale", "BF16", [size_n, size_k // GROUP],
            lambda n=size_n, k=size_k, s=scale: bf16(rng.uniform(0.5 * s, 1.5 * s, (n, k // GROUP))),
        )  # fmt: skip
        files.add(f"{name}.weight_shape", "I64", [2], lambda n=size_n, k=size_k: np.array([n, k], np.int64))
    for i in range(options.layers):
        layer = f"model.layers.{i}"
        plain(f"{layer}.mlp.gate.weight", [EXPERTS, HIDDEN], HIDDEN**-0.5)
        for norm, size in [("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN),
                           ("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)]:  # fmt: skip
            ones(f"{layer}.{norm}.weight", size)
    ones("model.norm.weight", HIDDEN)
    plain("model.embed_tokens.weight", [options.vocab, HIDDEN], 1.0)
    plain("lm_head.weight", [options.vocab, HIDDEN], HIDDEN**-0.5)

    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "model.safetensors")
    config = json.loads((tokenizer / "config.json").read_text())
    config.update(
        hidden_size=HIDDEN, num_hidden_layers=options.layers, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        vocab_size=options.vocab, max_position_embeddings=4096, rope_theta=1000000.0,
    )  # fmt: skip
    ignore = ["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(options.layers)]
    config["quantization_config"]["ignore"] = ignore
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        (folder / name).write_bytes((tokenizer / name).read_bytes())


def q4_0(rng, shape):
    """Blocks of 32: an f16 scale, then 16 bytes of codes."""
    *lead, size_k = shape
    blocks = rng.integers(0, 256, (*lead, size_k // 32, 18), dtype=np.uint8)
    scale = size_k**-0.5 / 4.6
    scales = rng.uniform(0.5 * scale, 1.5 * scale, blocks.shape[:-1]).astype(np.float16)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*lead, size_k // 32 * 18)


def gguf_file(path, options):
    rng = np.random.default_rng(options.seed)
    out = gguf.GGUFWriter(path, "qwen3moe")
    out.add_block_count(options.layers)
    out.add_context_length(4096)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(INNER)
    out.add_expert_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_key_length(HEAD_DIM)
    out.add_value_length(HEAD_DIM)
    out.add_rope_freq_base(1000000.0)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_expert_count(EXPERTS)
    out.add_expert_used_count(TOP_K)
    out.add_vocab_size(options.vocab)
    out.add_tokenizer_model("none")

    def quantized(name, *shape):
        out.add_tensor(f"{name}.weight", q4_0(rng, shape), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def ones(name, size):
        out.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def plain(name, size_n, scale):
        values = bf16(rng.standard_normal((size_n, HIDDEN), dtype=np.float32) * scale)
        out.add_tensor(f"{name}.weight", values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    plain("token_embd", options.vocab, 1.0)
    plain("output", options.vocab, HIDDEN**-0.5)
    ones("output_norm", HIDDEN)
    for i in range(options.layers):
        ones(f"blk.{i}.attn_norm", HIDDEN)
        ones(f"blk.{i}.ffn_norm", HIDDEN)
        ones(f"blk.{i}.attn_q_norm", HEAD_DIM)
        ones(f"blk.{i}.attn_k_norm", HEAD_DIM)
        quantized(f"blk.{i}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        quantized(f"blk.{i}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        quantized(f"blk.{i}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        quantized(f"blk.{i}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        router = rng.standard_normal((EXPERTS, HIDDEN), dtype=np.float32) * HIDDEN**-0.5
        out.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        quantized(f"blk.{i}.ffn_gate_exps", EXPERTS, INNER, HIDDEN)
        quantized(f"blk.{i}.ffn_up_exps", EXPERTS, INNER, HIDDEN)
        quantized(f"blk.{i}.ffn_down_exps", EXPERTS, HIDDEN, INNER)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def gpt_oss_checkpoint(folder, options, tokenizer):
    rng, files, of = np.random.default_rng(options.seed), Safetensors(), GptOss

    def plain(name, shape, scale):
        files.add(name, "BF16", shape, lambda: bf16(rng.standard_normal(shape, dtype=np.float32) * scale))

    for i in range(options.layers):
        layer = f"model.layers.{i}"
        for norm in ["input_layernorm", "post_attention_layernorm"]:
            files.add(f"{layer}.{norm}.weight", "BF16", [of.HIDDEN], lambda: bf16(np.ones(of.HIDDEN)))
        for name, _, size_n, size_k in of.attention():
            plain(f"{layer}.self_attn.{name}.weight", [size_n, size_k], size_k**-0.5)
            plain(f"{layer}.self_attn.{name}.bias", [size_n], 0.1)
        plain(f"{layer}.self_attn.sinks", [of.HEADS], 0.1)
        plain(f"{layer}.mlp.router.weight", [of.EXPERTS, of.HIDDEN], of.HIDDEN**-0.5)
        plain(f"{layer}.mlp.router.bias", [of.EXPERTS], 0.1)
        for name, size_n, size_k in [("gate_up_proj", 2 * of.INNER, of.HIDDEN), ("down_proj", of.HIDDEN, of.INNER)]:
            shape = [of.EXPERTS, size_n, size_k // 32]
            experts = f"{layer}.mlp.experts.{name}"
            files.add(f"{experts}_blocks", "U8", shape + [16], lambda s=shape: rng.integers(0, 256, s + [16], dtype=np.uint8))
            # 2^-7 makes outputs of about 1.
            files.add(f"{experts}_scales", "U8", shape, lambda s=shape: np.full(s, 120, np.uint8))
            plain(f"{experts}_bias", [of.EXPERTS, size_n], 0.1)
    files.add("model.norm.weight", "BF16", [of.HIDDEN], lambda: bf16(np.ones(of.HIDDEN)))
    plain("model.embed_tokens.weight", [options.vocab, of.HIDDEN], 1.0)
    plain("lm_head.weight", [options.vocab, of.HIDDEN], of.HIDDEN**-0.5)

    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "model.safetensors")
    config = json.loads((tokenizer / "config.json").read_text())
    config.update(
        hidden_size=of.HIDDEN, num_hidden_layers=options.layers, num_attention_heads=of.HEADS,
        num_key_value_heads=of.KV_HEADS, head_dim=of.HEAD_DIM, intermediate_size=of.INNER, num_local_experts=of.EXPERTS,
        num_experts_per_tok=of.TOP_K, vocab_size=options.vocab, max_position_embeddings=4096, swiglu_limit=7.0,
        sliding_window=of.WINDOW, tie_word_embeddings=False, eos_token_id=options.vocab - 1,
        layer_types=["sliding_attention", "full_attention"] * (options.layers // 2),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        (folder / name).write_bytes((tokenizer / name).read_bytes())


def gpt_oss_gguf(path, options):
    rng, of = np.random.default_rng(options.seed), GptOss
    out = gguf.GGUFWriter(path, "gpt-oss")
    out.add_block_count(options.layers)
    out.add_context_length(4096)
    out.add_embedding_length(of.HIDDEN)
    out.add_feed_forward_length(of.INNER)
    out.add_expert_feed_forward_length(of.INNER)
    out.add_head_count(of.HEADS)
    out.add_head_count_kv(of.KV_HEADS)
    out.add_key_length(of.HEAD_DIM)
    out.add_value_length(of.HEAD_DIM)
    out.add_rope_freq_base(150000.0)
    out.add_sliding_window(of.WINDOW)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_expert_count(of.EXPERTS)
    out.add_expert_used_count(of.TOP_K)
    out.add_vocab_size(options.vocab)
    out.add_tokenizer_model("none")

    def plain(name, shape, scale):
        values = bf16(rng.standard_normal(shape, dtype=np.float32) * scale)
        out.add_tensor(name, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def floats(name, shape, scale=0.1):
        out.add_tensor(name, rng.standard_normal(shape, dtype=np.float32) * np.float32(scale))

    def experts(name, size_n, size_k):
        blocks = rng.integers(0, 256, (of.EXPERTS, size_n, size_k // 32, 17), dtype=np.uint8)
        blocks[..., 0] = 120
        blocks = blocks.reshape(of.EXPERTS, size_n, size_k // 32 * 17)
        out.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        floats(f"{name}.bias", (of.EXPERTS, size_n))

    plain("token_embd.weight", (options.vocab, of.HIDDEN), 1.0)
    plain("output.weight", (options.vocab, of.HIDDEN), of.HIDDEN**-0.5)
    out.add_tensor("output_norm.weight", np.ones(of.HIDDEN, np.float32))
    for i in range(options.layers):
        out.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(of.HIDDEN, np.float32))
        out.add_tensor(f"blk.{i}.post_attention_norm.weight", np.ones(of.HIDDEN, np.float32))
        for _, name, size_n, size_k in of.attention():
            plain(f"blk.{i}.{name}.weight", (size_n, size_k), size_k**-0.5)
            floats(f"blk.{i}.{name}.bias", size_n)
        floats(f"blk.{i}.attn_sinks.weight", of.HEADS)
        floats(f"blk.{i}.ffn_gate_inp.weight", (of.EXPERTS, of.HIDDEN), of.HIDDEN**-0.5)
        floats(f"blk.{i}.ffn_gate_inp.bias", of.EXPERTS)
        experts(f"blk.{i}.ffn_gate_exps", of.INNER, of.HIDDEN)
        experts(f"blk.{i}.ffn_up_exps", of.INNER, of.HIDDEN)
        experts(f"blk.{i}.ffn_down_exps", of.HIDDEN, of.INNER)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--model", choices=["qwen3-30b-a3b", "gpt-oss-20b"], default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    models = pathlib.Path(__file__).parents[2] / "golden/data/models"
    if options.model == "gpt-oss-20b":
        gpt_oss_checkpoint(options.out / "checkpoint", options, models / "gpt-oss-tiny")
        gpt_oss_gguf(options.out / "model.gguf", options)
    else:
        checkpoint(options.out / "checkpoint", options, models / "qwen3-moe-tiny")
        gguf_file(options.out / "model.gguf", options)


if __name__ == "__main__":
    main()
