#!/usr/bin/env python3
"""Requantization of FP8 experts with one scale per tensor on loading, over all 256 codes.

Runs vLLM's own `per_tensor_dequantize`, `process_fp8_weight_tensor_strategy_moe`,
`process_fp8_input_tensor_strategy_moe` and `normalize_e4m3fn_to_e4m3fnuz`, extracted from its files.
Four tensor operations replace the operator `scaled_fp8_quant`; their `fmin` and `fmax` drop a NaN like
the kernel's `fminf` and `fmaxf`.

CPU and GPU differ: on CUDA, the product of float16 codes with a float32 scale on the same device rounds
the scale to float16 first; on a CPU it does not. With a GPU, both results are written; without one, the
CPU's part of OUT is checked.

    fp8_requantize.py VLLM_DIR reference/tests/data/fp8_requantize.json

VLLM_DIR holds `model_executor/`. Requires torch 2.11.0.
"""

import ast
import json
import random
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

if len(sys.argv) != 3:
    sys.exit(__doc__)
UTILS = Path(sys.argv[1]) / "model_executor/layers/quantization/utils"


def function(file, name, scope):
    """One function of a file, its annotations removed, with `scope` as its globals."""
    tree = ast.parse((UTILS / file).read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    node.returns = None
    for arg in node.args.args:
        arg.annotation = None
    exec(compile(ast.unparse(node), file, "exec"), scope)
    return scope[name]


FP8 = {"type": torch.float8_e4m3fn, "limit": 448.0}


def scaled_fp8_quant(x, scale):
    """`static_scaled_fp8_quant`: times fl(1 / scale), limited, to nearest even."""
    y = x.float() * (torch.ones_like(scale) / scale)
    limit = torch.tensor(FP8["limit"], device=x.device)
    return torch.fmax(torch.fmin(y, limit), -limit).to(FP8["type"]), scale


scope = {"torch": torch, "ops": SimpleNamespace(scaled_fp8_quant=scaled_fp8_quant),
         "logger": SimpleNamespace(info_once=lambda *a: None)}
function("w8a8_utils.py", "per_tensor_dequantize", scope)
function("w8a8_utils.py", "all_close_1d", scope)
normalize = function("w8a8_utils.py", "normalize_e4m3fn_to_e4m3fnuz", {"torch": torch})
weights = function("fp8_utils.py", "process_fp8_weight_tensor_strategy_moe", scope)
inputs = function("fp8_utils.py", "process_fp8_input_tensor_strategy_moe", scope)


def f32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def pairs():
    """(w1, w3) scales: equal ones, ratios whose quotients tie, and the edges of float16."""
    ordinary = 0.0123291015625
    found = [(ordinary, ordinary), (1.0, 1.0), (0.1, 0.1), (3e-4, 3e-4), (0.3, 0.7)]
    # Ratios of small fractions give quotients that are ties of e4m3.
    found += [(ordinary * n / d, ordinary) for n, d in [(1, 2), (3, 4), (7, 8), (15, 16), (17, 32), (1, 64)]]
    # One step of f32 below, above the step of float16.
    found += [(f32(bits(1e-3) - 1), 1e-3), (0.00099992, 1e-3)]
    # Below float16's normal range, below half its smallest number, and where products overflow it.
    found += [(2e-5, 5e-5), (6e-8, 1e-7), (2e-8, 1e-6), (2e-8, 2e-8), (100.0, 200.0), (150.0, 150.0), (1e-3, 7e4)]
    rng = random.Random(2026)
    found += [(10 ** rng.uniform(-4.5, -1), 10 ** rng.uniform(-4.5, -1)) for _ in range(24)]
    return [(f32(bits(a)), f32(bits(b))) for a, b in found]


CODES = torch.arange(256, dtype=torch.uint8)


def requantized(device, count=None):
    """Both shards' 256 codes under every pair of scales, as hexadecimal."""
    out = []
    for w1, w3 in pairs()[:count]:
        w13 = torch.stack([CODES, CODES]).view(FP8["type"]).reshape(1, 2, 256).to(device)
        scales = torch.tensor([[w1, w3]], dtype=torch.float32, device=device)
        codes, largest = weights(w13.clone(), scales, shard_size=1, num_experts=1)
        assert bits(largest.item()) == bits(max(w1, w3))
        row = [bytes(codes[0, i].view(torch.uint8).cpu().tolist()).hex() for i in (0, 1)]
        out.append({"w1": bits(w1), "w3": bits(w3), "codes": row})
    return out


def normalized():
    scale, a = torch.tensor([0.3, 3e38]), torch.tensor([0.7])
    codes, scale2, a2 = normalize(CODES.clone().view(torch.float8_e4m3fn), scale, a)
    values = codes.to(torch.float32).view(torch.int32).tolist()
    return {
        "codes": bytes(codes.view(torch.uint8).tolist()).hex(),
        "values": [v & 0xFFFFFFFF for v in values],
        "scales": [[bits(x), bits(y)] for x, y in zip([*scale, *a], [*scale2, *a2])],
    }


def largest_inputs():
    cases = [[0.5, 0.25, 0.75], [1.0], [0.1, 0.1000001]]
    return [{"scales": [bits(x) for x in c], "largest": bits(inputs(torch.tensor(c), torch.tensor(c))[0].item())}
            for c in cases]


out = Path(sys.argv[2])
cpu = requantized("cpu")
if not torch.cuda.is_available():
    recorded = [row["cpu"] if "cpu" in row else row["codes"] for row in json.loads(out.read_text())["requantized"]]
    if recorded != [row["codes"] for row in cpu]:
        sys.exit(f"{out}: found other values than this CPU computes")
    sys.exit(print(f"{out}: the CPU's part is unchanged; to write the file, use a machine with a GPU"))
rows = requantized("cuda")
FP8.update(type=torch.float8_e4m3fnuz, limit=224.0)
for row, other in zip(rows, cpu):
    if row["codes"] != other["codes"]:
        row["cpu"] = other["codes"]
result = {
    "producer": "scripts/gen/fp8_requantize.py, vLLM 0.21.0, torch 2.11.0, " + torch.cuda.get_device_name(),
    "requantized": rows,
    "fnuz": requantized("cpu", 14),
    "normalized": normalized(),
    "input_scales": largest_inputs(),
}
out.write_text(json.dumps(result, separators=(",", ":")) + "\n")
