#!/usr/bin/env python3
"""Golden layouts of FlashInfer's and CUTLASS's kernels for 4-bit weights, on a CPU.

    PYTHONPATH=TVM_FFI_SITE python3 flashinfer_layouts.py --vllm-wheel vllm-0.21.0-….whl \\
        --flashinfer-wheel flashinfer_python-0.6.8.post1-….whl --fp4op fp4op.so

Writes `tables/flashinfer_layouts.safetensors` (row orders, interleaved scales, whole layers) and
`reference/tests/data/flashinfer_facts.json`. Inputs are functions of their names (`stream` below);
a test recomputes them, so that only outputs are stored. `build_fp4op.sh` builds fp4op.so.
"""

import argparse
import ast
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from common import GOLDEN, write_sorted
from flashinfer_helpers import load

PROVENANCE = (
    "flashinfer 0.6.8.post1 (fused_moe/core.py, utils.py, quantization/fp4_quantization.py, thop/fp4Op.cpp) "
    "as called by vllm 0.21.0 (flashinfer_mxint4_moe.py, flashinfer_fp4_moe.py, nvfp4_utils.py), torch 2.11.0 CPU"
)
SWIZZLED = [(1, 1), (1, 4), (3, 5), (31, 4), (32, 1), (33, 3), (65, 2), (127, 8), (128, 4), (129, 5), (257, 9)]
ROWS = [64, 256]


def stream(name: str, *shape: int) -> np.ndarray:
    """64 bits per element: SplitMix64 started at the FNV-1a hash of the name."""
    mask, seed = (1 << 64) - 1, 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 & mask
    with np.errstate(over="ignore"):
        index = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
        z = np.uint64(seed) + index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).reshape(shape)


def bytes_of(name, *shape):
    return torch.from_numpy((stream(name, *shape) >> np.uint64(56)).astype(np.uint8))


def words(name, *shape):
    return torch.from_numpy((stream(name, *shape) >> np.uint64(32)).astype(np.uint32).view(np.int32))


def bf16(name, *shape):
    """Positive normal numbers: 0x3c00 plus ten bits."""
    bits = 0x3C00 + (stream(name, *shape) >> np.uint64(54)).astype(np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def e4m3(name, *shape):
    """Positive numbers, no NaN."""
    bits = ((stream(name, *shape) >> np.uint64(57)) % np.uint64(127)).astype(np.uint8)
    return torch.from_numpy(bits).view(torch.float8_e4m3fn)


def row_orders(h):
    """For each new row, the index of the old row, `[rows]`."""
    out = {}
    for rows in ROWS:
        x = torch.zeros(rows, 128, dtype=torch.uint8)
        old = torch.arange(rows, dtype=torch.int32).reshape(rows, 1)
        out[f"rows.gated.{rows}"] = h.core.get_reorder_rows_for_gated_act_gemm_row_indices(x)
        out[f"rows.shuffle_tile128.{rows}"] = h.fi_utils.get_shuffle_matrix_a_row_indices(x, 128)
        out[f"rows.shuffle_tile64.{rows}"] = h.fi_utils.get_shuffle_matrix_a_row_indices(x, 64)
        out[f"rows.gated_shuffle_tile128.{rows}"] = h.core._maybe_get_cached_w3_w1_permute_indices({}, x, 128)
        out[f"rows.swap.{rows}"] = h.fp4_moe.reorder_w1w3_to_w3w1(old, old)[0].reshape(-1)
        if rows % 128 == 0:
            out[f"rows.interleave64.{rows}"] = h.fp4_moe.interleave_linear_and_gate(old, 64, dim=0).reshape(-1)
    x = torch.arange(3 * 256, dtype=torch.int32).reshape(3, 256)
    out["block_major_k.3x256"] = h.core.convert_to_block_layout(x, 128)
    return {name: rows.to(torch.int32) for name, rows in out.items()}


def interleaved(h):
    """FlashInfer's operator; for bytes, vLLM's `swizzle_blockscale` must agree with it."""
    out = {}
    for rows, cols in SWIZZLED:
        x = e4m3(f"swizzle.{rows}x{cols}", rows, cols)
        swizzled = h.nvfp4.swizzle_blockscale(x).view(torch.uint8)
        flat = h.fp4.block_scale_interleave(x.view(torch.uint8))
        if not torch.equal(swizzled.reshape(-1), flat):
            raise SystemExit(f"the two packages interleave {rows} x {cols} scales differently")
        out[f"swizzle.{rows}x{cols}"] = swizzled
    x = bf16("swizzle_bf16.130x6", 130, 6)
    out["swizzle_bf16.130x6"] = h.fp4.block_scale_interleave(x).reshape(256, 8)
    experts = e4m3("swizzle_experts.3x5x6", 3, 5, 6)
    out["swizzle_experts.3x5x6"] = h.nvfp4.swizzle_blockscale(experts).view(torch.uint8)
    return out


def mxint4(h, hidden=256, inter=256):
    made = h.mxint4.prepare_static_weights_for_trtllm_mxint4_moe(
        words("mxint4.w13", 1, 2 * inter, hidden // 8), bf16("mxint4.w13_scale", 1, 2 * inter, hidden // 32),
        words("mxint4.w2", 1, hidden, inter // 8), bf16("mxint4.w2_scale", 1, hidden, inter // 32),
    )
    return {f"mxint4.{name}": tensor for name, tensor in made.items()}


def nvfp4(h, name, backend, experts, hidden, inter, gated=True):
    shards = 2 if gated else 1
    label = f"nvfp4.{name}"
    weights = [
        bytes_of(f"{label}.w13", experts, shards * inter, hidden // 2),
        e4m3(f"{label}.w13_scale", experts, shards * inter, hidden // 16),
        bytes_of(f"{label}.w2", experts, hidden, inter // 2),
        e4m3(f"{label}.w2_scale", experts, hidden, inter // 16),
    ]
    config = SimpleNamespace(hidden_dim=hidden, hidden_dim_unpadded=None, intermediate_size_per_partition=inter)
    layer = SimpleNamespace(activation=SimpleNamespace(is_gated=gated), moe_config=config)
    scale_2 = torch.ones(experts)
    w13, w13_scale, _, _, w2, w2_scale, _, _ = h.oracle.convert_to_nvfp4_moe_kernel_format(
        backend, layer, weights[0], weights[1], scale_2, torch.ones(experts, shards),
        weights[2], weights[3], scale_2, torch.ones(experts), is_act_and_mul=gated,
    )
    if backend == h.oracle.NvFp4MoeBackend.FLASHINFER_CUTEDSL:
        # A strided view; the kernel reads its bytes in memory order.
        w13_scale, w2_scale = (s.permute(5, 2, 4, 0, 1, 3).contiguous() for s in (w13_scale, w2_scale))
    made = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    return {f"{label}.{part}": tensor.contiguous().view(torch.uint8) for part, tensor in made.items()}


def routing(h):
    method = h.moe_config.get_routing_method_type
    rows = []
    for scoring, top_k, renormalize, groups, bias in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"), (1, 8), (False, True), (None, 0, 1, 8), (False, True)
    ):
        found = method(scoring, top_k, renormalize, groups, bias)
        rows.append([scoring, top_k, renormalize, groups, bias, found.name, int(found)])
    types = h.moe_config.RoutingMethodType
    return {
        "columns": ["scoring_func", "top_k", "renormalize", "num_expert_group", "has_e_score_bias", "name", "value"],
        "rows": rows,
        "vllm": {t.name: int(t) for t in types},
        "flashinfer": {t.name: int(t) for t in h.enums.RoutingMethodType},
    }


def routing_lists(wheel):
    """The lists in each kernel's `_supports_routing_method`, in the source's order."""
    kernels = {"trtllm_nvfp4_moe": ["Nvfp4"], "trtllm_fp8_moe": ["Fp8Block", "Fp8Tensor"],
               "trtllm_bf16_moe": ["Bf16"], "trtllm_mxfp4_moe": ["Mxfp4"]}
    out = {}
    for module, names in kernels.items():
        tree = ast.parse(wheel.read(f"vllm/model_executor/layers/fused_moe/experts/{module}.py"))
        functions = [f for f in ast.walk(tree)
                     if isinstance(f, ast.FunctionDef) and f.name == "_supports_routing_method"]
        lists = [n for f in functions for n in ast.walk(f) if isinstance(n, ast.List) and n.elts
                 and all(ast.unparse(e).startswith("RoutingMethodType.") for e in n.elts)]
        lists.sort(key=lambda n: n.lineno)
        if len(lists) != len(names):
            raise SystemExit(f"{module}: {len(lists)} lists of routing methods, expected {len(names)}")
        for name, found in zip(names, lists):
            out[name] = sorted({e.attr for e in found.elts})
    return out


def scales_8x4(h, rows=19, groups=6):
    """`[rows, groups]` offsets of FlashInfer's 8x4 layout; `cute.jit` and Int32 compute nothing else."""
    padded = (groups + 3) // 4 * 4
    index = h.cute.compute_sf_index_swizzled_8x4_gpu
    return {"rows": rows, "groups": groups,
            "offsets": [[index(r, g, padded) for g in range(groups)] for r in range(rows)]}


def shard_scales():
    """[a, b, whether vLLM warns]: `torch.allclose` of two global scales, near its limit."""
    one, out = np.float32(1.0), []
    for value in (1.0, 448.0 * 6 / 3.3, 1e-3, 1e-7, 1e-9, 3e-39):
        a = np.float32(value)
        for ulps in (0, 1, 40, 80, 83, 84, 85, 86, 90, 120, 167, 168, 169, 200, 4000):
            b = np.array(a.view(np.uint32) + ulps, dtype=np.uint32).view(np.float32)
            for x, y in ((a, b), (b, a)):
                close = torch.allclose(*(torch.tensor([float(one), float(v)]) for v in (x, y)))
                out.append([int(x.view(np.uint32)), int(y.view(np.uint32)), not close])
    return out


def rows_of(rows):
    return "[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]"


def alphas(h, experts=6):
    """Bits of g1_alphas, g2_alphas and g1_scale_c, by the kernel class's own method on a bare layer."""
    path = "vllm/model_executor/layers/fused_moe/experts/trtllm_nvfp4_moe.py"
    method = next(f for f in ast.walk(ast.parse(h.vllm.read(path)))
                  if isinstance(f, ast.FunctionDef) and f.name == "process_weights_after_loading")
    module = ast.Module([method], type_ignores=[])
    scope = {"torch": torch}
    exec(compile(ast.fix_missing_locations(module), path, "exec"), scope)
    out = []
    for gated in (True, False):
        inputs = [bf16(f"alphas.{part}", experts).float() * 1.1 for part in ("w13", "a13", "w2", "a2")]
        layer = torch.nn.Module()
        given = [tensor.clone() for tensor in inputs]
        layer.w13_weight_scale_2, layer.w13_input_scale, layer.w2_weight_scale_2, layer.w2_input_scale = given
        quant = SimpleNamespace(g1_alphas=layer.w13_weight_scale_2, a2_gscale=1.0 / layer.w2_input_scale)
        config = SimpleNamespace(is_act_and_mul=gated)
        scope[method.name](SimpleNamespace(quant_config=quant, moe_config=config), layer)
        made = [layer.w13_weight_scale_2, layer.w2_weight_scale_2, layer.g1_scale_c.data]
        out.append([gated, [t.view(torch.int32).tolist() for t in inputs], [t.view(torch.int32).tolist() for t in made]])
    return out


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--vllm-wheel", "--flashinfer-wheel", "--fp4op"):
        parser.add_argument(flag, required=True, type=Path)
    args = parser.parse_args()
    h = load(args.vllm_wheel, args.flashinfer_wheel, args.fp4op)
    backends = h.oracle.NvFp4MoeBackend
    tensors = row_orders(h) | interleaved(h) | mxint4(h)
    tensors |= nvfp4(h, "trtllm", backends.FLASHINFER_TRTLLM, 1, 192, 64)
    tensors |= nvfp4(h, "trtllm_ungated", backends.FLASHINFER_TRTLLM, 1, 256, 48, gated=False)
    tensors |= nvfp4(h, "flashinfer_cutlass", backends.FLASHINFER_CUTLASS, 2, 48, 64)
    tensors |= nvfp4(h, "vllm_cutlass", backends.VLLM_CUTLASS, 2, 48, 64)
    tensors |= nvfp4(h, "cutlass_ungated", backends.FLASHINFER_CUTLASS, 1, 64, 48, gated=False)
    tensors |= nvfp4(h, "cutedsl_batched", backends.FLASHINFER_CUTEDSL_BATCHED, 1, 32, 64)
    tensors |= nvfp4(h, "cutedsl", backends.FLASHINFER_CUTEDSL, 1, 32, 128)
    path = GOLDEN / "data/tables/flashinfer_layouts.safetensors"
    write_sorted(path, tensors, {"name": "flashinfer_layouts", "provenance": PROVENANCE})
    head = {
        "producer": "vllm 0.21.0 (fused_moe/config.py, fused_moe/experts), flashinfer 0.6.8.post1 (tllm_enums.py, "
        "quantization_cute_dsl_utils.py), torch 2.11.0",
        **routing(h),
        "kernels": routing_lists(h.vllm),
        "scales_8x4": scales_8x4(h),
        "shards": shard_scales(),
        "alphas": alphas(h),
    }
    text = ",\n".join(
        f" {json.dumps(key)}: " + (rows_of(value) if isinstance(value, list) else json.dumps(value))
        for key, value in head.items()
    )
    facts = GOLDEN.parent / "reference/tests/data/flashinfer_facts.json"
    facts.write_text("{\n" + text + "\n}\n")
    print(f"{path.name}: {path.stat().st_size} bytes, {len(tensors)} tensors; {len(head['rows'])} routings")


if __name__ == "__main__":
    main()
