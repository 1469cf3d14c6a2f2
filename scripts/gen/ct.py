#!/usr/bin/env python3
"""Checkpoints packed by the `compressed-tensors` package 0.20.0.

    python3 ct.py --vllm-wheel vllm-0.21.0-….whl

pack-quantized and int-quantized mixtures of experts, and dense float-quantized,
nvfp4-pack-quantized, mxfp4-pack-quantized and mxfp8-quantized models.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace

import compressed_tensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from common import LLAMA, MIXTRAL, QWEN3_MOE, Checkpoint
from vllm_helpers import load, marlin_integer, prove_operators

VERSION = "0.20.0"
K_PROJ = "model.layers.0.self_attn.k_proj"


def compress(weight, scheme, fmt):
    """The compressed state of one linear layer, from the package; scales from min/max."""
    args = scheme.weights
    size_n, size_k = weight.shape
    strategy = getattr(args.strategy, "value", args.strategy)
    span = {"tensor": None, "channel": size_k}.get(strategy, args.group_size)
    grouped = weight.reshape(1, -1) if span is None else weight.reshape(size_n, size_k // span, span)
    low, high = grouped.amin(-1), grouped.amax(-1)
    state = {"weight": weight}
    if strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(low.min().float(), high.max().float())
    scale, _ = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale
    compressor = BaseCompressor.get_value_from_registry(fmt)
    return compressor, compressor.compress(state, scheme)


def truth(compressor, state, scheme, fmt):
    """[N, K] in float32 by the package; scales are widened first, so that nothing is rounded."""
    if fmt == "nvfp4-pack-quantized":
        rows, half = state["weight_packed"].shape
        codes = unpack_fp4_from_uint8(state["weight_packed"], rows, half * 2, dtype=torch.float32)
        return dequantize(codes, state["weight_scale"].float(), args=scheme.weights,
                          global_scale=state["weight_global_scale"], dtype=torch.float32)
    if state["weight_scale"].dtype != torch.uint8:  # an e8m0 scale is a power of two: nothing to widen
        state = {**state, "weight_scale": state["weight_scale"].float()}
    return compressor.decompress(state, scheme)["weight"].float()


def marlin(v, state, scheme, fmt, dtype):
    """Marlin tensors by vLLM's helpers, if vLLM runs the format on Marlin."""
    if fmt == "pack-quantized":
        group = scheme.weights.group_size or -1
        packed, scale = state["weight_packed"].T.contiguous(), state["weight_scale"].T.contiguous()
        return marlin_integer(v, packed, scale, scheme.weights.num_bits, group)
    if fmt == "int-quantized":
        return {}
    packed = state.get("weight_packed", state.get("weight"))
    size_n, size_k = packed.shape[0], packed.shape[1] * (2 if "weight_packed" in state else 1)
    layer = SimpleNamespace(
        weight=packed, weight_scale=state["weight_scale"], params_dtype=dtype, orig_dtype=dtype,
        output_size_per_partition=size_n, input_size_per_partition=size_k,
    )
    out = {}
    if fmt == "nvfp4-pack-quantized":
        # The checkpoint stores the factor that the weights were multiplied by; vLLM inverts it on loading.
        layer.weight_global_scale = 1 / state["weight_global_scale"]
    if fmt in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        v.fp4.prepare_fp4_layer_for_marlin(layer)
    elif fmt == "mxfp8-quantized":
        torch.set_default_dtype(dtype)
        v.fp8.prepare_mxfp8_layer_for_marlin(layer)
        torch.set_default_dtype(torch.float32)
    else:
        v.fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    out["marlin_qweight"], out["marlin_scales"] = layer.weight, layer.weight_scale
    if out["marlin_scales"].dtype == torch.float8_e8m0fnu:
        out["marlin_scales"] = out["marlin_scales"].view(torch.uint8)
    if fmt == "nvfp4-pack-quantized":
        out["marlin_global_scale"] = layer.weight_global_scale
    return out


def build(v, ckpt, groups, fmt, truths, shards=1):
    """`groups`: list of (suffixes of the modules, scheme)."""
    for name in ckpt.linears:
        scheme = next(scheme for suffixes, scheme in groups if name.endswith(suffixes))
        compressor, state = compress(ckpt.weight(name, ckpt.dtype), scheme, fmt)
        ckpt.add(name, state)
        if name in truths:
            ckpt.expect(name, weight=truth(compressor, state, scheme, fmt), **marlin(v, state, scheme, fmt, ckpt.dtype))
    ckpt.notes = [
        f"weight: compressed-tensors {VERSION} dequantization in float32;",
        "Marlin tensors: vllm 0.21.0 pure-PyTorch helpers, torch 2.11.0 CPU",
    ]
    config = QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, (_, scheme) in enumerate(groups)},
        format=fmt, quantization_status="compressed",
        ignore=sorted({"lm_head"} | {n.removesuffix(".weight") for n in ckpt.tensors if n.endswith(".gate.weight")}),
    ).model_dump(mode="json")
    ckpt.write({**config, "version": VERSION}, shards)


def integer(group_size, targets=("Linear",), fmt="pack-quantized", activations=None):
    kind = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, **kind)
    return QuantizationScheme(targets=list(targets), weights=weights, input_activations=activations, format=fmt)


def preset(name, fmt):
    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.format = fmt
    return scheme


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    v = load(parser.parse_args().vllm_wheel)
    prove_operators(v)
    if compressed_tensors.__version__ != VERSION:
        raise SystemExit(f"expected compressed-tensors {VERSION}, found {compressed_tensors.__version__}")

    def new(name, base, hidden, fmt, about, dtype=torch.bfloat16):
        return Checkpoint(name, base, hidden, 128, dtype, script="scripts/gen/ct.py",
                          producer="compressed-tensors", version=VERSION, fmt=fmt, about=about)

    everything = ("",)
    fmt = "pack-quantized"
    build(v, new("ct-pack-moe", QWEN3_MOE, 128, fmt, "4 bits, groups of 32, experts, two shards with an index"),
          [(everything, integer(32))], fmt, ["model.layers.0.mlp.experts.1.down_proj"], shards=2)

    fmt = "int-quantized"
    tokens = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
    attention = integer(-1, [r"re:.*self_attn.*"], fmt, tokens)
    experts = integer(32, [r"re:.*experts.*"], fmt, tokens)
    build(v, new("ct-int-w4a8-moe", MIXTRAL, 128, fmt, "4-bit values in int8, 8-bit dynamic activations: "
                 "attention per channel, experts in groups of 32"),
          [(("q_proj", "k_proj", "v_proj", "o_proj"), attention), (everything, experts)], fmt,
          [K_PROJ, "model.layers.0.block_sparse_moe.experts.0.w2"])

    fmt = "float-quantized"
    build(v, new("ct-fp8-channel", LLAMA, 128, fmt, "e4m3 weights, one scale per output channel"),
          [(everything, preset("FP8_DYNAMIC", fmt))], fmt, [K_PROJ])
    fmt = "nvfp4-pack-quantized"
    build(v, new("ct-nvfp4", LLAMA, 128, fmt, "e2m1 weights, e4m3 scale per 16 and a float32 divisor per tensor"),
          [(everything, preset("NVFP4A16", fmt))], fmt, [K_PROJ])
    fmt = "mxfp4-pack-quantized"
    build(v, new("ct-mxfp4", LLAMA, 128, fmt, "e2m1 weights, e8m0 scale per 32"),
          [(everything, preset("MXFP4A16", fmt))], fmt, [K_PROJ])
    fmt = "mxfp8-quantized"
    build(v, new("ct-mxfp8", LLAMA, 128, fmt, "e4m3 weights, e8m0 scale per 32"),
          [(everything, preset("MXFP8A16", fmt))], fmt, [K_PROJ])


if __name__ == "__main__":
    main()
