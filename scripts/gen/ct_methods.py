#!/usr/bin/env python3
"""Experts whose method quantizes activations, with the layer's stages computed independently of this project.

    python3 ct_methods.py --vllm-wheel vllm-0.21.0-….whl

`ct-fp8-moe` (W8A8-FP8, one scale per tensor, static activations) and `ct-nvfp4-moe` (W4A4) are packed by
`compressed-tensors` 0.20.0; `fp8-block-moe` follows the published recipe of `quant_method: fp8`. w1 and w3
are quantized separately, so that their scales differ.

Stages: x and the routing are given. Codes are quantized by torch and by vLLM's `ref_nvfp4_quant`; w1 and w3
get one scale by vLLM's `process_fp8_weight_tensor_strategy_moe`, as on a CPU. Products are summed in float64,
multiplied by their factors and rounded once to bfloat16. Activations with a sum too close to a tie for
float64 are rejected, so that every bit is certain. SiLU is float64's, with a margin for an f32 chain; the
sum over top_k is in f32, first slot to last.
"""

import argparse
import ast
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from common import MIXTRAL, QWEN3_MOE, Checkpoint, seeded
from ct import VERSION, compress, preset
from vllm_helpers import load

TOKENS, EXPERTS, TOP_K, BLOCK = 5, 2, 2, 128
E4M3_MAX = 448.0


def taken(wheel, file, names, scope):
    """Functions of one of vLLM's files, unchanged except for their annotations."""
    source = zipfile.ZipFile(wheel).read(f"vllm/model_executor/layers/quantization/utils/{file}").decode()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.returns, node.decorator_list = None, []
            for arg in node.args.args:
                arg.annotation = None
            exec(compile(ast.unparse(node), file, "exec"), scope)
    return scope


def scaled_fp8_quant(x, scale):
    """`static_scaled_fp8_quant`: times fl(1 / scale), limited, to nearest even."""
    y = x.float() * (torch.ones_like(scale) / scale)
    return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


class NearTie(Exception):
    """A value whose rounding float64 cannot decide."""


def to_bf16(values, margin):
    """float64 to bfloat16, once; rejects values that round differently within `margin` (relative)."""
    def rounded(v):
        bits = np.ascontiguousarray(v).view(np.uint64)
        odd = bits >> np.uint64(45) & np.uint64(1)
        kept = (bits + odd + np.uint64((1 << 44) - 1)) & ~np.uint64((1 << 45) - 1)
        return kept.view(np.float64)
    v = values.numpy()
    out = rounded(v)
    if not (np.array_equal(rounded(v * (1 + margin)), out) and np.array_equal(rounded(v * (1 - margin)), out)):
        raise NearTie
    assert np.all((np.abs(out) > 2.0**-126) | (out == 0))
    return torch.from_numpy(out).to(torch.bfloat16)


def static(scale):
    def quantize(x, _experts):
        codes, _ = scaled_fp8_quant(x, scale)
        return codes.double() * scale.double(), torch.ones(len(x))
    return quantize


def groups(x, _experts):
    m, k = x.shape
    blocks = x.float().reshape(m, k // BLOCK, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) * np.float32(1.0 / E4M3_MAX)
    codes = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).reshape(m, k), torch.ones(m)


def nvfp4(quant, multiplier):
    def quantize(x, _experts):
        codes, scale = quant(x, 1 / multiplier, 16)
        return codes.double() * scale.double().repeat_interleave(16, 1), multiplier.expand(len(x))
    return quantize


def stages(x, ids, weights, w13, w2, factors, quantizers):
    """`w13[e]` [2I, H] and `w2[e]` [H, I] in float64; `factors[i][e]` float32 multipliers of weights."""
    rows, experts = x.repeat_interleave(TOP_K, 0), ids.flatten()

    def product(i, x, w, router):
        values, of_row = quantizers[i](x, experts)
        alpha = (of_row * factors[i][experts]).double()  # a float32 product
        sums = torch.stack([values[r] @ w[e].T for r, e in enumerate(experts)])
        sums = sums * alpha[:, None]
        return to_bf16(sums * router.double()[:, None] if router is not None else sums, 1e-12)

    gate_up = product(0, rows, w13, None)
    gate, up = gate_up.double().chunk(2, 1)
    activated = to_bf16(gate / (1 + torch.exp(-gate)) * up, 2.0**-20)
    down = product(1, activated, w2, weights.flatten())
    y = down.float().reshape(TOKENS, TOP_K, -1)
    y = (y[:, 0] + y[:, 1]).to(torch.bfloat16)
    return {"gate_up": gate_up, "activated": activated, "down": down, "y": y}


def new(name, base, intermediate, fmt, producer, version, about):
    base = {**base, "num_experts_per_tok": TOP_K, "hidden_act": "silu"}
    ckpt = Checkpoint(name, base, 128, intermediate, torch.bfloat16, script="scripts/gen/ct_methods.py",
                      producer=producer, version=version, fmt=fmt, about=about)
    # Only the experts and one linear layer.
    ckpt.linears = {n: s for n, s in ckpt.linears.items() if "experts" in n or n.endswith("o_proj")}
    ckpt.tensors = {n: t for n, t in ckpt.tensors.items() if n.endswith("gate.weight") or n == "model.norm.weight"}
    return ckpt


def inputs(ckpt, attempt):
    x = seeded(f"{ckpt.name}/x/{attempt}", TOKENS, 128, dtype=torch.bfloat16, scale=1.0)
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    weights = seeded(f"{ckpt.name}/weights", TOKENS, TOP_K).abs() * 8 + 0.1
    return x, ids, weights


def weight(ckpt, name):
    """w3 has a wider range than w1, so that one must be requantized with the other's scale."""
    wide = 1.7 if name.endswith(("w3", "up_proj")) else 1.0
    return ckpt.weight(name, torch.float32).mul(wide).to(torch.bfloat16)


def experts_of(ckpt, names):
    prefix = next(n for n in ckpt.linears if "experts.0." in n).split("experts.")[0] + "experts"
    return prefix, [[f"{prefix}.{e}.{n}" for n in names] for e in range(EXPERTS)]


def finish(ckpt, prefix, layer, notes, config):
    """`layer` gives the stages of x, ids and weights; activations are the first draw without a near tie."""
    for attempt in range(64):
        x, ids, weights = inputs(ckpt, attempt)
        try:
            found = layer(x, ids, weights)
            break
        except NearTie:
            continue
    ckpt.expect(prefix, x=x, topk_ids=ids, topk_weights=weights, **found)
    ckpt.notes = [notes, "products: torch 2.11.0, float64 sums rounded once to bfloat16"]
    ckpt.write(config)


def ct_config(scheme, fmt):
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=fmt, quantization_status="compressed",
                                ignore=["lm_head", "model.layers.0.block_sparse_moe.gate"]).model_dump(mode="json")
    return {**config, "version": VERSION}


def ct_fp8(v, wheel):
    fmt = "float-quantized"
    ckpt = new("ct-fp8-moe", MIXTRAL, 64, fmt, "compressed-tensors", VERSION,
               "W8A8-FP8 experts: one scale for a tensor, static activations, w1 and w3 quantized apart")
    scheme = preset("FP8", fmt)
    for name, (_, size_k) in ckpt.linears.items():
        _, state = compress(weight(ckpt, name), scheme, fmt)
        # As in a calibration: the largest activation of its samples, equal for w1 and w3.
        expert = name.rsplit(".", 1)[0]
        seen = seeded(f"{expert}/{size_k}/calibration", 32, size_k, scale=1.3)
        low, high = seen.amin().reshape(1), seen.amax().reshape(1)
        state["input_scale"], _ = calculate_qparams(low, high, scheme.input_activations)
        ckpt.add(name, {k: t.float() if k.endswith("scale") else t for k, t in state.items()})
    prefix, names = experts_of(ckpt, ("w1", "w3", "w2"))
    get = lambda e, i, part: ckpt.tensors[f"{names[e][i]}.{part}"]  # noqa: E731
    w13 = torch.stack([torch.cat([get(e, 0, "weight"), get(e, 1, "weight")]) for e in range(EXPERTS)])
    s13 = torch.stack([torch.cat([get(e, i, "weight_scale").flatten() for i in (0, 1)]) for e in range(EXPERTS)])
    assert torch.all(s13[:, 0] != s13[:, 1])
    scope = {"torch": torch, "ops": SimpleNamespace(scaled_fp8_quant=scaled_fp8_quant)}
    taken(wheel, "w8a8_utils.py", ("per_tensor_dequantize", "all_close_1d"), scope)
    taken(wheel, "fp8_utils.py", ("process_fp8_weight_tensor_strategy_moe",), scope)
    w13, s13 = scope["process_fp8_weight_tensor_strategy_moe"](w13, s13, shard_size=64, num_experts=EXPERTS)
    w2 = torch.stack([get(e, 2, "weight") for e in range(EXPERTS)])
    s2 = torch.stack([get(e, 2, "weight_scale").flatten()[0] for e in range(EXPERTS)])
    largest = [max(get(e, i, "input_scale").flatten()[0] for e in range(EXPERTS)) for i in (0, 2)]
    layer = SimpleNamespace(num_experts=EXPERTS, hidden_size=128, intermediate_size_per_partition=64,
                            w13_weight=w13, orig_dtype=torch.bfloat16)
    v.fp8.get_marlin_input_dtype = v.fp8.marlin_make_workspace_new = lambda *a: None
    packed = v.fp8.prepare_fp8_moe_layer_for_marlin(layer, w13, w2, s13, s2)
    names = ("w13_marlin_qweight", "w2_marlin_qweight", "w13_marlin_scales", "w2_marlin_scales")
    ckpt.expect(prefix, **dict(zip(names, packed)))
    ckpt.expect(f"{prefix}.1.w2", weight=w2[1].float() * s2[1])
    one = torch.ones(EXPERTS)
    weights = [w13.double() * s13.double()[:, None, None], w2.double() * s2.double()[:, None, None]]
    layer = lambda *given: stages(*given, *weights, [one, one], [static(s) for s in largest])  # noqa: E731
    finish(ckpt, prefix, layer, "w13: vllm 0.21.0, requantized on a CPU;", ct_config(scheme, fmt))


def ct_nvfp4(wheel):
    fmt = "nvfp4-pack-quantized"
    ckpt = new("ct-nvfp4-moe", MIXTRAL, 64, fmt, "compressed-tensors", VERSION,
               "W4A4-NVFP4 experts, global scales of w1 and w3 that differ")
    scheme = preset("NVFP4", fmt)
    for name, (_, size_k) in ckpt.linears.items():
        _, state = compress(weight(ckpt, name), scheme, fmt)
        seen = seeded(f"{name.rsplit('.', 1)[0]}/{size_k}/calibration", 32, size_k, scale=1.3)
        state["input_global_scale"] = generate_gparam(seen.amin(), seen.amax())
        ckpt.add(name, state)
    prefix, names = experts_of(ckpt, ("w1", "w3", "w2"))
    get = lambda e, i, part: ckpt.tensors[f"{names[e][i]}.{part}"]  # noqa: E731

    def value(e, i):
        packed, scale = get(e, i, "weight_packed"), get(e, i, "weight_scale")
        rows, half = packed.shape
        codes = unpack_fp4_from_uint8(packed, rows, half * 2, dtype=torch.float32)
        return codes.double() * scale.double().repeat_interleave(16, 1)

    def factor(i, part):
        return 1 / torch.cat([get(e, i, part).flatten() for e in range(EXPERTS)])

    assert torch.all(factor(0, "weight_global_scale") != factor(1, "weight_global_scale"))
    scope = {"torch": torch, "FLOAT4_E2M1_MAX_RECIPROCAL": 1 / 6.0}
    taken(wheel, "nvfp4_emulation_utils.py", ("get_reciprocal", "cast_to_fp4", "ref_nvfp4_quant"), scope)
    w13 = [torch.cat([value(e, 0), value(e, 1)]) for e in range(EXPERTS)]
    w2 = [value(e, 2) for e in range(EXPERTS)]
    multiplier = factor(2, "weight_global_scale").double()
    ckpt.expect(names[1][2], weight=(w2[1] * multiplier[1]).float())
    # One multiplier of the activations for all experts, the largest, of w1 and w3 alike.
    a13 = torch.cat([factor(i, "input_global_scale") for i in (0, 1)]).max()
    a2 = factor(2, "input_global_scale").max()
    # Like upstream, w1's global scale for both.
    factors = [factor(i, "weight_global_scale") for i in (0, 2)]
    quantizers = [nvfp4(scope["ref_nvfp4_quant"], a) for a in (a13, a2)]
    finish(ckpt, prefix, lambda *given: stages(*given, w13, w2, factors, quantizers), "activations: vllm 0.21.0 ref_nvfp4_quant;", ct_config(scheme, fmt))


def fp8_block():
    ckpt = new("fp8-block-moe", QWEN3_MOE, 128, "fp8", "torch", "2.11.0",
               "W8A8-FP8 experts, one scale per 128 x 128 block, dynamic activations")
    del ckpt.linears["model.layers.0.self_attn.o_proj"]
    for name in ckpt.linears:
        w = weight(ckpt, name).float()
        scale = (w.abs().max() / E4M3_MAX).reshape(1, 1)
        ckpt.add(name, {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale})
    prefix, names = experts_of(ckpt, ("gate_proj", "up_proj", "down_proj"))
    value = lambda n: ckpt.tensors[f"{n}.weight"].double() * ckpt.tensors[f"{n}.weight_scale_inv"].double()  # noqa: E731
    w13 = [torch.cat([value(n[0]), value(n[1])]) for n in names]
    w2, one = [value(n[2]) for n in names], torch.ones(EXPERTS)
    ckpt.expect(names[1][2], weight=w2[1].float())
    finish(ckpt, prefix, lambda *given: stages(*given, w13, w2, [one, one], [groups, groups]), "activations: groups of 128 k;",
           {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    wheel = parser.parse_args().vllm_wheel
    v = load(wheel)
    ct_fp8(v, wheel)
    ct_nvfp4(wheel)
    fp8_block()


if __name__ == "__main__":
    main()
