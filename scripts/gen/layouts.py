#!/usr/bin/env python3
"""Golden layout vectors from vLLM's pure-PyTorch helpers, on a CPU.

    python3 layouts.py --vllm-wheel vllm-0.21.0-….whl

Case files `linear-py_*` for configurations that the GPU cases lack, and one
table of the permutations themselves for combinations that no supported layer
has (8-bit weights under 8-bit activations, 8-bit AWQ).
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch

from common import GOLDEN, seeded, seeded_ints, write_sorted
from vllm_helpers import load, prove_operators

PROVENANCE = "vllm 0.21.0 pure-PyTorch helpers (marlin_utils_test.py, marlin_utils.py), torch 2.11.0 CPU"
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
SHORT = {torch.float16: "f16", torch.bfloat16: "bf16"}


def write_case(name, inputs, outputs, **config):
    full = {
        "input_dtype": None, "desc_act": False, "is_k_full": True,
        "has_bias": "bias" in inputs, "size_m": 1, **config,
    }
    tensors = {f"in.{k}": t for k, t in inputs.items()} | {f"out.{k}": t for k, t in outputs.items()}
    write_sorted(
        GOLDEN / f"data/cases/linear-py_{name}.safetensors", tensors,
        {"format": "marlinspike-case", "version": "1", "op": "linear", "name": f"py_{name}",
         "config": json.dumps(full, sort_keys=True), "provenance": PROVENANCE},
    )


def positive(name, *shape, dtype, low=0.001, high=0.02):
    steps = seeded_ints(name, 0, 1 << 20, *shape, dtype=torch.float32) / (1 << 20)
    return (low + (high - low) * steps).to(dtype)


def gptq(v, dtype, bits, size_k, size_n, group, act=False, bias=False, input_dtype=None):
    kind = {4: "uint4b8", 8: "uint8b128"}[bits]
    label = {torch.int8: "_int8act", torch.float8_e4m3fn: "_fp8act", None: ""}[input_dtype]
    name = f"{SHORT[dtype]}_{kind}_k{size_k}_n{size_n}_g{group}_act{int(act)}{label}"
    a8 = input_dtype is not None
    groups = 1 if group == -1 else size_k // group
    codes = seeded_ints(name, 0, 1 << bits, size_k, size_n)
    scales = positive(name + "s", groups, size_n, dtype=dtype)
    inputs = {"qweight": v.quant.gptq_pack(codes, bits, size_k, size_n), "scales": scales}
    outputs, perm = {}, torch.empty(0, dtype=torch.int32)
    if act:
        shuffle = seeded(name + "p", size_k).argsort(stable=True)
        inputs["g_idx"] = (torch.arange(size_k, dtype=torch.int32) // group)[shuffle]
        outputs["sorted_g_idx"], perm = v.marlin.marlin_sort_g_idx(inputs["g_idx"])
        outputs["g_idx_sort_indices"] = perm
    qweight = inputs["qweight"]
    if input_dtype == torch.float8_e4m3fn:
        qweight, scales = v.preprocess(qweight), scales * 512
    outputs["marlin_qweight"] = v.repack(qweight, perm, size_k, size_n, bits, is_a_8bit=a8)
    out = v.marlin.marlin_permute_scales(scales, size_k, size_n, group, is_a_8bit=a8)
    if input_dtype == torch.int8 and groups > 1:
        out, factor = v.marlin.marlin_act_int8_process_scales(out)
        outputs["input_global_scale"] = factor.reshape(1)
    outputs["marlin_scales"] = out
    if bias:
        inputs["bias"] = seeded(name + "b", size_n, dtype=dtype)
        outputs["marlin_bias"] = v.marlin.marlin_permute_bias(inputs["bias"])
    write_case(
        name, inputs, outputs, checkpoint_format="gptq", weight_type=kind, dtype=NAMES[dtype], desc_act=act,
        input_dtype=str(input_dtype).removeprefix("torch.") if a8 else None,
        group_size=group, size_k=size_k, size_n=size_n,
    )


def awq(v, dtype, size_k, size_n, group, input_dtype=None):
    a8 = input_dtype is not None
    name = f"{SHORT[dtype]}_awq_k{size_k}_n{size_n}_g{group}{'_int8act' if a8 else ''}"
    groups = 1 if group == -1 else size_k // group
    codes = seeded_ints(name, 0, 16, size_k, size_n)
    zeros = seeded_ints(name + "z", 0, 16, groups, size_n)
    scales = positive(name + "s", groups, size_n, dtype=dtype)
    inputs = {
        "qweight": v.quant.awq_pack(codes, 4, size_k, size_n),
        "qzeros": v.quant.awq_pack(zeros, 4, groups, size_n),
        "scales": scales,
    }
    order = v.test.get_weight_perm(4, a8)
    outputs = {
        "marlin_qweight": v.test.marlin_weights(codes, size_k, size_n, 4, order, is_a_8bit=a8),
        "marlin_zeros": v.marlin.awq_to_marlin_zero_points(inputs["qzeros"], groups, size_n, 4, a8),
    }
    out = v.marlin.marlin_permute_scales(scales, size_k, size_n, group, is_a_8bit=a8)
    if a8 and groups > 1:
        out, factor = v.marlin.marlin_act_int8_process_scales(out)
        outputs["input_global_scale"] = factor.reshape(1)
    outputs["marlin_scales"] = out
    write_case(
        name, inputs, outputs, checkpoint_format="awq", weight_type="uint4", dtype=NAMES[dtype],
        input_dtype="int8" if a8 else None, group_size=group, size_k=size_k, size_n=size_n,
    )


def floats(name, *shape):
    """All e4m3fn codes except the two NaNs."""
    codes = seeded_ints(name, 0, 254, *shape, dtype=torch.uint8)
    return (codes + (codes >= 127).to(torch.uint8)).view(torch.float8_e4m3fn)


def fp8(v, dtype, size_k, size_n, group):
    name = f"{SHORT[dtype]}_fp8_k{size_k}_n{size_n}_g{group}"
    groups = 1 if group == -1 else size_k // group
    weight = floats(name, size_n, size_k)
    scales = positive(name + "s", groups, size_n, dtype=dtype, high=0.01)
    packed = v.fp8.pack_fp8_to_int32(weight, False).T.contiguous()
    out = v.marlin.marlin_permute_scales(scales, size_k, size_n, group)
    write_case(
        name, {"weight": weight, "weight_scale": scales},
        {"marlin_qweight": v.repack(packed, torch.empty(0), size_k, size_n, 8),
         "marlin_scales": v.fp8.fp8_fused_exponent_bias_into_scales(out)},
        checkpoint_format="fp8", weight_type="float8_e4m3fn", dtype=NAMES[dtype],
        group_size=group, size_k=size_k, size_n=size_n,
    )


def mxfp8(v, dtype, size_k, size_n):
    name = f"{SHORT[dtype]}_mxfp8_k{size_k}_n{size_n}"
    low, high = (113, 140) if dtype == torch.float16 else (1, 254)
    weight = floats(name, size_n, size_k)
    scale = seeded_ints(name + "s", low, high, size_n, size_k // 32, dtype=torch.uint8)
    layer = SimpleNamespace(
        weight=weight, weight_scale=scale, output_size_per_partition=size_n, input_size_per_partition=size_k
    )
    torch.set_default_dtype(dtype)  # upstream converts through the default type
    v.fp8.prepare_mxfp8_layer_for_marlin(layer)
    torch.set_default_dtype(torch.float32)
    write_case(
        name, {"weight": weight, "weight_scale": scale},
        {"marlin_qweight": layer.weight, "marlin_scales": layer.weight_scale.view(torch.uint8)},
        checkpoint_format="mxfp8", weight_type="float8_e4m3fn", dtype=NAMES[dtype],
        group_size=32, size_k=size_k, size_n=size_n,
    )


def fp4(v, dtype, size_k, size_n, nv, tag="", low=0, high=127, input_dtype=None):
    a8 = input_dtype is not None
    name = f"{SHORT[dtype]}_{'nvfp4' if nv else 'mxfp4'}_k{size_k}_n{size_n}{tag}{'_fp8act' if a8 else ''}"
    group = 16 if nv else 32
    weight = seeded_ints(name, 0, 256, size_n, size_k // 2, dtype=torch.uint8)
    scale = seeded_ints(name + "s", low, high, size_n, size_k // group, dtype=torch.uint8)
    inputs = {"weight": weight, "weight_scale": scale}
    layer = SimpleNamespace(
        weight=weight, weight_scale=scale, params_dtype=dtype,
        output_size_per_partition=size_n, input_size_per_partition=size_k,
    )
    extra = {}
    if nv:
        inputs["weight_scale"] = layer.weight_scale = scale.view(torch.float8_e4m3fn)
        inputs["weight_global_scale"] = layer.weight_global_scale = torch.tensor([0.00037])
        # Upstream's divisor of the global scale, computed by upstream's code.
        permuted = v.marlin.marlin_permute_scales(layer.weight_scale.T.contiguous().to(dtype), size_k, size_n, group)
        extra["scale_factor"] = v.fp4.nvfp4_marlin_process_scales(permuted, a_dtype=dtype)[1]
    v.fp4.prepare_fp4_layer_for_marlin(layer, input_dtype)
    outputs = {"marlin_qweight": layer.weight, "marlin_scales": layer.weight_scale}
    if nv:
        outputs["marlin_global_scale"] = layer.weight_global_scale
    else:
        outputs["marlin_scales"] = layer.weight_scale.view(torch.uint8)
    write_case(
        name, inputs, outputs, checkpoint_format="nvfp4" if nv else "mxfp4", weight_type="float4_e2m1f",
        dtype=NAMES[dtype], input_dtype="float8_e4m3fn" if a8 else None,
        group_size=group, size_k=size_k, size_n=size_n, **extra,
    )


def table(v):
    """The permutations as upstream's functions return them, and the two layouts without a layer."""
    tensors = {}
    for bits in (4, 8):
        for a8 in (False, True):
            perm = v.test.get_weight_perm(bits, a8)
            tensors[f"weight_perm.{bits}bit.{'a8' if a8 else 'a16'}"] = perm.to(torch.int32)
    grouped, single = v.marlin.get_scale_perms()
    tensors["scale_perm"] = torch.tensor(grouped, dtype=torch.int32)
    tensors["scale_perm_single"] = torch.tensor(single, dtype=torch.int32)
    size_k, size_n, groups = 128, 64, 2
    codes = seeded_ints("table codes", 0, 256, size_k, size_n)
    zeros = seeded_ints("table zeros", 0, 256, groups, size_n)
    tensors["weights_8bit.codes"] = codes.to(torch.uint8)
    tensors["weights_8bit.gptq"] = v.quant.gptq_pack(codes, 8, size_k, size_n)
    tensors["weights_8bit.awq"] = v.quant.awq_pack(codes, 8, size_k, size_n)
    tensors["weights_8bit.marlin.a8"] = v.test.marlin_weights(
        codes, size_k, size_n, 8, v.test.get_weight_perm(8, True), is_a_8bit=True)
    tensors["zeros_8bit.codes"] = zeros.to(torch.uint8)
    tensors["zeros_8bit.awq"] = v.quant.awq_pack(zeros, 8, groups, size_n)
    for a8 in (False, True):
        tensors[f"zeros_8bit.marlin.{'a8' if a8 else 'a16'}"] = v.marlin.awq_to_marlin_zero_points(
            tensors["zeros_8bit.awq"], groups, size_n, 8, a8)
    write_sorted(GOLDEN / "data/tables/marlin_permutations.safetensors", tensors,
                 {"format": "marlinspike-table", "name": "marlin_permutations", "provenance": PROVENANCE})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    v = load(parser.parse_args().vllm_wheel)
    prove_operators(v)
    f16, bf16, int8, e4m3 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
    for bits in (4, 8):
        gptq(v, f16, bits, 128, 64, 128)  # group = K: not "grouped"
        gptq(v, bf16, bits, 128, 64, -1, bias=True)
        gptq(v, bf16, bits, 128, 192 if bits == 4 else 64, 32)
        gptq(v, f16, bits, 128, 64, 64, act=True)
    gptq(v, bf16, 4, 128, 320, 64, act=True, bias=True)
    gptq(v, f16, 4, 128, 64, 128, input_dtype=int8)  # one group: the scales stay floats
    gptq(v, bf16, 4, 128, 64, 32, input_dtype=int8)
    gptq(v, f16, 4, 256, 64, 128, input_dtype=int8)
    gptq(v, bf16, 4, 128, 64, -1, input_dtype=e4m3)
    gptq(v, f16, 4, 128, 64, 64, input_dtype=e4m3)
    awq(v, f16, 128, 64, 128)
    awq(v, bf16, 128, 64, 32)
    awq(v, bf16, 128, 64, -1)
    awq(v, f16, 128, 192, 64, input_dtype=int8)
    awq(v, bf16, 128, 64, 128, input_dtype=int8)
    fp8(v, f16, 128, 64, 128)
    fp8(v, f16, 256, 64, 128)
    fp8(v, bf16, 128, 192, -1)
    mxfp8(v, f16, 128, 64)
    mxfp8(v, bf16, 128, 64)
    fp4(v, f16, 128, 64, nv=False, low=113, high=140)
    fp4(v, bf16, 128, 64, nv=False, low=1, high=254)
    fp4(v, bf16, 128, 64, nv=False, low=100, high=200, input_dtype=e4m3)
    fp4(v, f16, 128, 192, nv=True)
    fp4(v, bf16, 128, 64, nv=True)  # scales fill the range: factor 1
    fp4(v, bf16, 128, 64, nv=True, tag="_small", high=60)  # factor above 1
    table(v)


if __name__ == "__main__":
    main()
