#!/usr/bin/env python3
"""Case files of layers of int8 experts.

The quantizer is the text of vLLM's `per_token_quant_int8` in numpy's float32. Products are integers; what follows
them is float32 in the order of `fused_moe_kernel` (`*_blocks`: an int32 sum for each BLOCK_SIZE_K, added in float32),
or fractions, rounded once (`*_exact`). The activation is silu(gate) · up in float32.

    int8_experts.py        writes golden/data/cases/fused_experts_int8_w8a8-np_*.safetensors

Requires numpy and ml_dtypes.
"""

from fractions import Fraction

import numpy as np

from fp8_blocks import BF16, F32, PROVENANCE, rounded, write

FROM = PROVENANCE.replace("fp8_blocks.py", "int8_experts.py")


def quantize(x):
    """Halves go away from zero."""
    wide = x.astype(F32)
    top = np.maximum(np.abs(wide).max(axis=1, keepdims=True), F32(1e-10))
    moved = wide * (F32(127) / top)
    whole = np.trunc(moved)
    away = np.where(np.abs(moved - whole) >= F32(0.5), np.sign(moved), F32(0))
    return (whole + away).astype(np.int8), top / F32(127)


def product(q, scale, weight, columns, router, block, dtype):
    """One row by one matrix; `block` None: exact."""
    out = np.zeros(len(weight), dtype=dtype)
    for n, w in enumerate(weight):
        products = q.astype(np.int64) * w.astype(np.int64)
        if block is None:
            value = Fraction(int(products.sum())) * Fraction(float(scale)) * Fraction(float(columns[n]))
            out[n] = rounded(value * (1 if router is None else Fraction(float(router))), dtype)
            continue
        total = F32(0)
        for start in range(0, len(products), block):
            total = total + F32(int(products[start:start + block].sum()))
        total = total * scale * columns[n]
        if router is not None:
            total = total * router
        assert total.dtype == F32
        out[n] = np.asarray(total).astype(dtype)
    return out


def layer(name, seed, sizes, block, declared, dtype, local=None, on_input=False, shared=False):
    m, experts, top_k, h, inter = sizes
    rng = np.random.default_rng(600 + seed)
    x = (rng.standard_normal((m, h)) + 0.5).astype(dtype)
    x[1, 0], x[1, 1:8] = 127 / 64, [0.5 / 64, 1.5 / 64, -0.5 / 64, -2.5 / 64, 3.5 / 64, 4.5 / 64, -5.5 / 64]
    x[1, 8:] = np.clip(x[1, 8:].astype(np.float64), -1.5, 1.5).astype(dtype)  # the scale is 1/64
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(m)]).astype(np.int32)
    weights = rng.uniform(0.1, 1.0, (m, top_k)).astype(F32)
    here = list(range(experts)) if local is None else local
    map_ = np.full(experts, -1, dtype=np.int32)
    map_[here] = np.arange(len(here))
    stack = {}
    for prefix, n, k in [("w13", 2 * inter, h), ("w2", h, inter)]:
        codes = rng.integers(-128, 128, (len(here), n, k)).astype(np.int8)
        codes = np.where(rng.random(codes.shape) < 0.2, np.abs(codes.astype(np.int16)).clip(0, 127), codes)
        scales = (2.0 ** rng.uniform(-12, -9, (len(here), n, 1))).astype(F32)
        stack[prefix] = (codes.astype(np.int8), scales)
    a1q, a1q_scale = quantize(x)
    rows = m * top_k
    gate_up, activated, down = (np.zeros((rows, c), dtype=dtype) for c in (2 * inter, inter, h))
    expert_of = map_[ids].ravel()
    for row in range(rows):
        e = expert_of[row]
        if e < 0:
            continue
        codes, scales = stack["w13"]
        router = weights.flat[row] if on_input else None
        gate_up[row] = product(a1q[row // top_k], a1q_scale[row // top_k, 0], codes[e], scales[e, :, 0], router,
                               block, dtype)
    gate, up = gate_up[:, :inter].astype(F32), gate_up[:, inter:].astype(F32)
    activated[:] = (gate / (F32(1) + np.exp(-gate)) * up).astype(dtype)
    a2q, a2q_scale = quantize(activated)
    for row in range(rows):
        e = expert_of[row]
        if e < 0:
            continue
        codes, scales = stack["w2"]
        router = None if on_input else weights.flat[row]
        down[row] = product(a2q[row], a2q_scale[row, 0], codes[e], scales[e, :, 0], router, block, dtype)
    y = np.zeros((m, h), dtype=F32)
    for slot in range(top_k):
        y += down.reshape(m, top_k, h)[:, slot].astype(F32)
    assert all(np.isfinite(t.astype(np.float64)).all() for t in (gate_up, activated, down, y))
    config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": m, "num_experts": experts,
              "num_local_experts": len(here), "top_k": top_k, "hidden_size": h, "intermediate_size": inter,
              "activation": "silu", "apply_router_weight_on_input": on_input}
    if declared:
        config |= {"quantizer": "product", "block_size_k": block}
    tensors = {"in.x": (x, None), "in.topk_ids": (ids, None), "in.topk_weights": (weights, None),
               "out.a1q": (a1q, None), "out.a1q_scale": (a1q_scale, None), "out.gate_up": (gate_up, None),
               "out.activated": (activated, None), "out.a2q": (a2q, None), "out.a2q_scale": (a2q_scale, None),
               "out.down": (down, None), "out.y": (y.astype(dtype), None)}
    if shared:  # the output of a shared expert is added to the rounded sum
        extra = (rng.standard_normal((m, h)) * np.abs(y).mean()).astype(dtype)
        tensors["in.shared_output"] = (extra, None)
        tensors["out.y"] = ((y.astype(dtype).astype(F32) + extra.astype(F32)).astype(dtype), None)
    if local is not None:
        tensors["in.expert_map"] = (map_, None)
    for prefix, (codes, scales) in stack.items():
        tensors[f"in.{prefix}_weight"] = (codes, None)
        tensors[f"in.{prefix}_weight_scale"] = (scales, None)
    write("fused_experts_int8_w8a8", name, config, tensors, FROM)


def main():
    # More than 1024 k: float32 does not have every sum.
    layer("np_bf16_blocks", 0, (4, 2, 2, 1056, 8), 64, True, BF16)
    layer("np_f16_blocks", 1, (5, 4, 2, 96, 32), 32, True, np.float16, local=[2, 0, 3])
    layer("np_bf16_exact", 2, (4, 3, 1, 160, 32), None, False, BF16, on_input=True)
    layer("np_f16_any", 3, (3, 2, 2, 1056, 8), 16, False, np.float16)
    layer("np_f16_shared", 4, (3, 4, 3, 64, 32), 32, True, np.float16, shared=True)


if __name__ == "__main__":
    main()
