#!/usr/bin/env python3
"""FP8, MXFP8 and MXFP4 layers in Marlin's format, by vLLM's own preparation of layers.

    VLLM_WHEEL=vllm-0.21.0-....whl moe_marlin.py reference/tests/data/moe_marlin.json

Inputs follow from the formulas below, which `reference/tests/methods/prepare_marlin.rs` repeats; outputs
are written as the first half of their SHA-256. MXFP8 scales have padding rows and columns of NaN bytes,
which some loaders leave.
"""

import ast
import enum
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import vllm_helpers

if len(sys.argv) != 2 or "VLLM_WHEEL" not in os.environ:
    sys.exit(__doc__)
v = vllm_helpers.load(Path(os.environ["VLLM_WHEEL"]))
vllm_helpers.prove_operators(v)
v.fp8.get_marlin_input_dtype = v.fp4.get_marlin_input_dtype = lambda *a: None
for module in (v.fp8, v.fp4):
    module.marlin_make_workspace_new = lambda *a: None
EXPERTS, HIDDEN, INTER = 2, 256, 192
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def codes(tag, *shape):
    i = np.arange(np.prod(shape), dtype=np.uint64)
    return torch.from_numpy(((i * 167 + (i >> 8) * 59 + tag * 31 + 7) & 255).astype(np.uint8)).reshape(shape)


def scales(tag, *shape):
    j = np.arange(np.prod(shape)) + tag * 13
    return torch.from_numpy(((1 + j * 37 % 101 / 128) / 128).astype(np.float32)).reshape(shape)


def powers(tag, *shape):
    j = np.arange(np.prod(shape)) * 7 + tag
    return torch.from_numpy((118 + j % 13).astype(np.uint8)).reshape(shape)


def biases(tag, *shape):
    j = np.arange(np.prod(shape)) + tag
    return torch.from_numpy(((j % 17 - 8) / 8).astype(np.float32)).reshape(shape).to(torch.bfloat16)


def digest(tensor):
    body = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(body).hexdigest()[:32]


def padded(bytes_, rows, cols):
    out = torch.full((*bytes_.shape[:-2], bytes_.shape[-2] + rows, bytes_.shape[-1] + cols), 255, dtype=torch.uint8)
    out[..., : bytes_.shape[-2], : bytes_.shape[-1]] = bytes_
    return out


e4m3 = torch.float8_e4m3fn
N13 = 2 * INTER
cases = []
for dtype_name, dtype in DTYPES.items():
    torch.set_default_dtype(dtype)
    for kind, s13, s2, block in [
        ("tensor", (EXPERTS,), (EXPERTS,), None),
        ("shard", (EXPERTS, 2), (EXPERTS,), None),
        ("channel", (EXPERTS, N13, 1), (EXPERTS, HIDDEN, 1), None),
        # 96 does not divide 256: the last block of w2's columns is cut.
        ("block", (EXPERTS, N13 // 96, HIDDEN // 64), (EXPERTS, -(-HIDDEN // 96), INTER // 64), [96, 64]),
    ]:
        w13, w2 = codes(1, EXPERTS, N13, HIDDEN).view(e4m3), codes(2, EXPERTS, HIDDEN, INTER).view(e4m3)
        layer = SimpleNamespace(num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=INTER,
                                weight_block_size=block, orig_dtype=dtype, w13_weight=w13)
        out = v.fp8.prepare_fp8_moe_layer_for_marlin(layer, w13, w2, scales(1, *s13), scales(2, *s2))
        cases.append({"format": "fp8", "scales": kind, "dtype": dtype_name, "out": [digest(t) for t in out]})
    w13, w2 = codes(1, EXPERTS, N13, HIDDEN).view(e4m3), codes(2, EXPERTS, HIDDEN, INTER).view(e4m3)
    s13, s2 = powers(1, EXPERTS, N13, HIDDEN // 32), powers(2, EXPERTS, HIDDEN, INTER // 32)
    out = v.fp8.prepare_mxfp8_moe_layer_for_marlin(SimpleNamespace(), w13, w2, padded(s13, 128, 2), padded(s2, 0, 2))
    cases.append({"format": "mxfp8", "scales": "padded", "dtype": dtype_name, "out": [digest(t) for t in out]})
    w13, w2 = codes(1, EXPERTS, N13, HIDDEN // 2), codes(2, EXPERTS, HIDDEN, INTER // 2)
    out = v.fp4.prepare_moe_mxfp4_layer_for_marlin(
        SimpleNamespace(params_dtype=dtype), w13, w2, s13, s2, biases(1, EXPERTS, N13), biases(2, EXPERTS, HIDDEN))
    cases.append({"format": "mxfp4", "scales": "block", "dtype": dtype_name, "out": [digest(t) for t in out]})

# A linear layer: [N, K] weights, every shape of scale.
N, K = 192, 256
torch.set_default_dtype(torch.bfloat16)
for kind, shape, block in [("tensor", (), None), ("shard", (3,), None), ("channel", (N, 1), None),
                           ("block", (-(-N // 128), K // 128), [128, 128])]:
    layer = SimpleNamespace(
        output_size_per_partition=N, input_size_per_partition=K, weight_block_size=block, orig_dtype=torch.bfloat16,
        weight=codes(3, N, K).view(e4m3), bias=biases(3, N), logical_widths=[96, 32, 64])
    setattr(layer, "weight_scale_inv" if block else "weight_scale", scales(3, *shape))
    if block is None:
        del layer.weight_block_size
    v.fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    scale = layer.weight_scale_inv if block else layer.weight_scale
    cases.append({"format": "fp8-linear", "scales": kind, "dtype": "BF16",
                  "out": [digest(t.data) for t in (layer.weight, scale, layer.bias)]})


def rounded_sizes():
    """`mxfp4_round_up_hidden_size_and_intermediate_size` for every backend with its own rounding."""
    with zipfile.ZipFile(os.environ["VLLM_WHEEL"]) as wheel:
        source = wheel.read("vllm/model_executor/layers/fused_moe/oracle/mxfp4.py").decode()
    names = {"Mxfp4MoeBackend", "TRTLLM_BACKENDS", "mxfp4_round_up_hidden_size_and_intermediate_size"}
    wanted = [n for n in ast.parse(source).body
              if getattr(n, "name", None) in names or isinstance(n, ast.Assign) and n.targets[0].id in names]
    assert len(wanted) == len(names)
    found = []
    for platform in ("cuda", "xpu", "rocm"):
        current = SimpleNamespace(is_xpu=lambda: platform == "xpu", is_rocm=lambda: platform == "rocm")
        scope = {"Enum": enum.Enum, "current_platform": current, "round_up": lambda x, y: -(-x // y) * y}
        exec(compile(ast.Module(wanted, []), "mxfp4.py", "exec"), scope)
        for backend in ("DEEPGEMM_MXFP4", "MARLIN", "FLASHINFER_TRTLLM_MXFP4_BF16", "FLASHINFER_CUTLASS_MXFP4_BF16", "TRITON"):
            for sizes in ((2880, 2880), (2880, 720), (4096, 96), (1, 1)):
                to = scope["mxfp4_round_up_hidden_size_and_intermediate_size"](scope["Mxfp4MoeBackend"][backend], *sizes)
                found.append([backend, platform, *sizes, *to])
    return found


result = {"producer": "scripts/gen/moe_marlin.py, vLLM 0.21.0", "cases": cases, "sizes": rounded_sizes()}
Path(sys.argv[1]).write_text(json.dumps(result, separators=(",", ":")) + "\n")
