#!/usr/bin/env python3
"""Checkpoints by the published recipes, in plain torch: FP8 blocks and gpt-oss's MXFP4.

    python3 published.py --vllm-wheel vllm-0.21.0-….whl

FP8 blocks: DeepSeek-V3 and Qwen3-FP8 store e4m3 weights and `weight_scale_inv`,
the float32 factor amax / 448 of each 128 x 128 block (cut at the edges).
gpt-oss: experts' weights as `*_blocks` [E, N, K/32, 16] (two e2m1 codes a byte,
even k low) and `*_scales` [E, N, K/32] (e8m0), gate and up rows interleaved.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch

from common import QWEN3, Checkpoint, seeded
from vllm_helpers import load, prove_operators

BLOCK = 128
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8_block(v):
    ckpt = Checkpoint("fp8-block", QWEN3, 128, 256, torch.bfloat16, fmt="fp8", script="scripts/gen/published.py",
                      producer="torch", version="2.11.0",
                      about="e4m3 weights, one scale per 128 x 128 block, as DeepSeek-V3 and Qwen3-FP8 store them")
    for head in ("q_norm", "k_norm"):
        ckpt.plain(f"model.layers.0.self_attn.{head}.weight", 64)
    truths = ("self_attn.k_proj", "mlp.down_proj")  # a cut block, and two blocks along k
    for name, (size_n, size_k) in ckpt.linears.items():
        weight = ckpt.weight(name)
        rows, cols = -(-size_n // BLOCK), -(-size_k // BLOCK)
        scale = torch.empty(rows, cols)
        codes = torch.empty(size_n, size_k, dtype=torch.float8_e4m3fn)
        for r in range(rows):
            for c in range(cols):
                at = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
                scale[r, c] = weight[at].abs().max() / 448
                codes[at] = (weight[at] / scale[r, c]).to(torch.float8_e4m3fn)
        ckpt.add(name, {"weight": codes, "weight_scale_inv": scale})
        if name.endswith(truths[0]) or name.endswith(truths[1]):
            spread = scale.repeat_interleave(BLOCK, 0)[:size_n].repeat_interleave(BLOCK, 1)[:, :size_k]
            layer = SimpleNamespace(
                weight=codes, weight_scale_inv=scale, weight_block_size=[BLOCK, BLOCK], orig_dtype=ckpt.dtype,
                output_size_per_partition=size_n, input_size_per_partition=size_k,
            )
            v.fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
            out = {"marlin_scales": layer.weight_scale_inv}
            if name.endswith(truths[0]):
                out |= {"weight": codes.float() * spread, "marlin_qweight": layer.weight}
            ckpt.expect(name, **out)
    ckpt.notes = [
        "weight: torch 2.11.0, float32 product of code and scale;",
        "Marlin tensors: vllm 0.21.0 pure-PyTorch helpers, torch 2.11.0 CPU",
    ]
    ckpt.write({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK]})


def gpt_oss(v):
    hidden = intermediate = 128
    experts = 2
    base = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": experts,
            "num_experts_per_tok": 1}
    ckpt = Checkpoint("gpt-oss-mxfp4", {**base}, hidden, intermediate, torch.bfloat16, fmt="mxfp4",
                      script="scripts/gen/published.py", producer="torch", version="2.11.0",
                      about="experts' e2m1 blocks and e8m0 scales as gpt-oss stores them, attention unquantized")
    router = "model.layers.0.mlp."
    del ckpt.tensors[router + "gate.weight"]
    ckpt.plain(router + "router.weight", experts, hidden)
    ckpt.plain(router + "router.bias", experts)
    for kind, size_n, size_k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        weight = seeded(f"{ckpt.name}/{kind}", experts, size_n, size_k)
        groups = weight.reshape(experts, size_n, size_k // 32, 32)
        # OCP MX: the largest exponent of the group minus e2m1's largest exponent, 2.
        exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
        scaled = groups / torch.exp2(exponent)[..., None]
        code = (scaled.abs()[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
        code = code | ((scaled < 0).to(torch.uint8) << 3)
        blocks = code[..., 0::2] | (code[..., 1::2] << 4)
        scales = (exponent + 127).to(torch.uint8)
        prefix = f"{router}experts.{kind}"
        ckpt.tensors[prefix + "_blocks"] = blocks.contiguous()
        ckpt.tensors[prefix + "_scales"] = scales.contiguous()
        ckpt.tensors[prefix + "_bias"] = seeded(f"{ckpt.name}/{kind}/bias", experts, size_n, dtype=ckpt.dtype)
        if kind == "down_proj":
            value = E2M1[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)
            truth = (value * torch.exp2(exponent)[..., None]).reshape(experts, size_n, size_k)
            layer = SimpleNamespace(
                weight=blocks[0].reshape(size_n, size_k // 2), weight_scale=scales[0], params_dtype=ckpt.dtype,
                output_size_per_partition=size_n, input_size_per_partition=size_k,
            )
            v.fp4.prepare_fp4_layer_for_marlin(layer)
            ckpt.expect(f"{prefix}.0", weight=truth[0], marlin_qweight=layer.weight,
                        marlin_scales=layer.weight_scale.view(torch.uint8))
    ckpt.notes = [
        "`experts.down_proj.0`: expert 0. weight: torch 2.11.0, exact;",
        "Marlin tensors: vllm 0.21.0 pure-PyTorch helpers, torch 2.11.0 CPU",
    ]
    ckpt.write({"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    v = load(parser.parse_args().vllm_wheel)
    prove_operators(v)
    if not torch.__version__.startswith("2.11.0"):
        raise SystemExit(f"expected torch 2.11.0, found {torch.__version__}")
    fp8_block(v)
    gpt_oss(v)


if __name__ == "__main__":
    main()
