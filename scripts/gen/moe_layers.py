#!/usr/bin/env python3
"""Case files of layers of experts as their definitions say: int8 and e4m3 activations, the layout of gate and up, the
activation's parameters, router weights on x, rows with an infinity or NaN, the output of a shared expert.

Every product is a sum of fractions that is rounded once. The activation is in float64, rounded once. int8 rows are
quantized by scale = max * fl(1/127), q = x / scale to nearest even (`quotient`), or by the text of vLLM's
`per_token_quant_int8` (`product`); e4m3 rows as vLLM's `dynamic_per_token_scaled_fp8_quant` in float32, whose fmaxf and
fminf ignore NaN.

    moe_layers.py        writes golden/data/cases/moe-np_*.safetensors, fused_experts_fp8_w8a8-np_layer_*.safetensors

A shared expert's output is added to the sum over the slots: both in one sum of fractions that is rounded once (`fused`), or
to the rounded sum, rounded again (`apart`).

Requires numpy and ml_dtypes.
"""

from fractions import Fraction

import numpy as np

from fp8_blocks import BF16, E4M3, F32, PROVENANCE, rounded, write
from int8_experts import quantize as product_int8

FROM = PROVENANCE.replace("fp8_blocks.py", "moe_layers.py")
M, EXPERTS, TOP_K, H, I = 3, 2, 2, 64, 64


def quotient_int8(x):
    wide = x.astype(F32)
    scale = np.maximum(np.abs(wide).max(axis=1, keepdims=True), F32(1e-10)) * F32(1 / 127)
    return np.rint(wide / scale).clip(-128, 127).astype(np.int8), scale


def e4m3(x):
    wide = x.astype(F32)
    top = np.fmax.reduce(np.abs(wide), axis=1, keepdims=True)
    scale = np.maximum(top / F32(448), F32(1) / F32(448 * 512))
    with np.errstate(invalid="ignore"):
        moved = np.fmax(F32(-448), np.fmin(wide / scale, F32(448)))
    return moved.astype(E4M3), scale


def plain(x):
    return x, np.ones((len(x), 1), dtype=F32)


def fractions(row):
    return [Fraction(float(v)) for v in row]


def product(rows, scales, weights, experts, factors, dtype):
    """weights: for each expert [N][K] fractions; factors: router weights or None."""
    out = np.zeros((len(rows), len(weights[0])), dtype=dtype)
    for r, e in enumerate(experts):
        if e < 0:
            continue
        x, factor = fractions(rows[r]), Fraction(float(scales[r, 0]))
        if factors is not None:
            factor *= Fraction(float(factors[r]))
        for n, w in enumerate(weights[e]):
            out[r, n] = rounded(sum(a * b for a, b in zip(x, w) if a) * factor, dtype)
    return out


def activate(gate_up, layout, limit, alpha, beta, dtype):
    wide = gate_up.astype(np.float64)
    gate, up = (wide[:, :I], wide[:, I:]) if layout == "halves" else (wide[:, ::2], wide[:, 1::2])
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    values = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
    return np.array([[rounded(Fraction(float(v)), dtype) for v in row] for row in values]).astype(dtype)


def stages(x, ids, weights, stack, quantize, on, how, dtype):
    layout, limit, alpha, beta = how
    experts, router = ids.ravel(), weights.ravel()
    rows = np.repeat(x, TOP_K, axis=0)
    if on == "x":
        rows = (rows.astype(F32) * router.astype(dtype).astype(F32)[:, None]).astype(dtype)
    a1 = quantize(rows)
    gate_up = product(*a1, stack["w13"], experts, router if on == "gate_up" else None, dtype)
    activated = activate(gate_up, layout, limit, alpha, beta, dtype)
    a2 = quantize(activated)
    down = product(*a2, stack["w2"], experts, router if on == "down" else None, dtype)
    return a1, gate_up, activated, a2, down, total(down, None, None, dtype)


def total(down, shared, how, dtype):
    y = np.zeros((M, H), dtype=dtype)
    for m, n in np.ndindex(M, H):
        routed = sum(Fraction(float(v)) for v in down.reshape(M, TOP_K, H)[m, :, n])
        extra = Fraction(float(shared[m, n])) if shared is not None else 0
        if how == "apart":
            routed = Fraction(float(rounded(routed, dtype)))
        y[m, n] = rounded(routed + extra, dtype)
    return y


def route(rng):
    logits = rng.standard_normal((M, EXPERTS)).astype(F32)
    scores = np.exp(logits.astype(np.float64))
    scores /= scores.sum(axis=1, keepdims=True)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K].astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=1)
    return logits, ids, (weights / weights.sum(axis=1, keepdims=True)).astype(F32)


def moe(name, seed, dtype, quantize=plain, group=-1, keys=None, activation="silu", on="down", how=None, outputs=None,
        shared=None):
    rng = np.random.default_rng(700 + seed)
    x = rng.standard_normal((M, H)).astype(dtype)
    logits, ids, weights = route(rng)
    tensors, stack = {}, {}
    for prefix, n, k in [("w13", 2 * I, H), ("w2", H, I)]:
        codes = rng.integers(0, 16, (EXPERTS, k, n)).astype(np.uint32)
        groups = 1 if group == -1 else k // group
        scales = (rng.uniform(0.5, 1.5, (EXPERTS, groups, n)) / 16).astype(dtype)
        shifted = codes.reshape(EXPERTS, k // 8, 8, n) << (4 * np.arange(8, dtype=np.uint32))[:, None]
        tensors[f"in.{prefix}_qweight"] = (shifted.sum(axis=2, dtype=np.uint32).view(np.int32), None)
        tensors[f"in.{prefix}_scales"] = (scales, None)
        per = k // groups
        stack[prefix] = [[[(int(codes[e, i, j]) - 8) * Fraction(float(scales[e, i // per, j])) for i in range(k)]
                          for j in range(n)] for e in range(EXPERTS)]
    how = how or ("halves", None, 1.0, 0.0)
    _, gate_up, activated, _, down, y = stages(x, ids, weights, stack, quantize, on, how, dtype)
    config = {"checkpoint_format": "gptq", "weight_type": "uint4b8", "group_size": group, "size_m": M,
              "dtype": "float16" if dtype == np.float16 else "bfloat16", "num_experts": EXPERTS, "top_k": TOP_K,
              "hidden_size": H, "intermediate_size": I, "activation": activation, "scoring_func": "softmax",
              "renormalize": True, "block_size_m": 8} | (keys or {})
    if shared:
        extra = (rng.standard_normal((M, H)) * float(np.abs(y.astype(F32)).mean())).astype(dtype)
        tensors["in.shared_output"], y = (extra, None), total(down, extra, shared, dtype)
    made = {"gate_up": gate_up, "activated": activated, "down": down, "y": y}
    tensors |= {"in.x": (x, None), "in.router_logits": (logits, None), "out.topk_ids": (ids, None),
                "out.topk_weights": (weights, None)}
    tensors |= {f"out.{key}": (made[key], None) for key in outputs or made}
    write("moe", f"np_{name}", config, tensors, FROM)


def fp8(name, seed, dtype, on="down", keys=None, damage=None, outputs=None, shared=None):
    rng = np.random.default_rng(800 + seed)
    x = rng.standard_normal((M, H)).astype(dtype)
    if damage:
        x[0, 3], x[1, 5] = damage
    _, ids, weights = route(rng)
    ids[2, 1] = -1
    tensors, stack = {}, {}
    for prefix, n, k in [("w13", 2 * I, H), ("w2", H, I)]:
        codes = rng.standard_normal((EXPERTS, n, k)).astype(E4M3)
        scales = (rng.uniform(0.5, 1.5, (EXPERTS, n, 1)) / 8).astype(F32)
        tensors[f"in.{prefix}_weight"], tensors[f"in.{prefix}_weight_scale"] = (codes, None), (scales, None)
        stack[prefix] = [[[Fraction(float(codes[e, j, i])) * Fraction(float(scales[e, j, 0])) for i in range(k)]
                          for j in range(n)] for e in range(EXPERTS)]
    if damage:
        a1q, a1q_scale = e4m3(x)
        made = {"a1q": a1q, "a1q_scale": a1q_scale}
    else:
        a1, gate_up, activated, a2, down, y = stages(x, ids, weights, stack, e4m3, on,
                                                     ("halves", None, 1.0, 0.0), dtype)
        a1 = a1 if on == "x" else e4m3(x)
        if shared:
            extra = (rng.standard_normal((M, H)) * float(np.abs(y.astype(F32)).mean())).astype(dtype)
            tensors["in.shared_output"], y = (extra, None), total(down, extra, shared, dtype)
        made = {"a1q": a1[0], "a1q_scale": a1[1], "gate_up": gate_up, "activated": activated, "a2q": a2[0],
                "a2q_scale": a2[1], "down": down, "y": y}
    config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": M, "num_experts": EXPERTS,
              "top_k": TOP_K, "hidden_size": H, "intermediate_size": I, "activation": "silu",
              "per_act_token_quant": True, "per_out_ch_quant": True} | (keys or {})
    tensors |= {"in.x": (x, None), "in.topk_ids": (ids, None), "in.topk_weights": (weights, None)}
    tensors |= {f"out.{key}": (made[key], None) for key in outputs or made}
    write("fused_experts_fp8_w8a8", f"np_layer_{name}", config, tensors, FROM)


def main():
    f16, int8, fp8_input = np.float16, {"input_dtype": "int8"}, {"input_dtype": "float8_e4m3fn"}
    moe("int8_channel_f16", 0, f16, quotient_int8, keys=int8)
    moe("int8_groups_bf16", 1, BF16, quotient_int8, 32, int8)
    moe("int8_product_f16", 2, f16, product_int8, keys=int8)
    moe("int8_only_y_f16", 3, f16, quotient_int8, keys=int8, outputs=["y"])
    moe("int8_down_bf16", 4, BF16, quotient_int8, keys=int8, outputs=["activated", "down"])
    moe("e4m3_groups_bf16", 5, BF16, e4m3, 32, fp8_input)
    oai = (7.0, float(F32(1.702)), 1.0)
    moe("swigluoai_halves_bf16", 6, BF16, group=32, activation="swigluoai", how=("halves", *oai))
    moe("swigluoai_interleaved_f16", 7, f16, group=32, activation="swigluoai", how=("interleaved", *oai),
        keys={"gate_up_layout": "interleaved"})
    moe("clamp_bf16", 8, BF16, group=32, how=("halves", 0.5, 1.5, 0.25),
        keys={"swiglu_limit": 0.5, "swiglu_alpha": 1.5, "swiglu_beta": 0.25})
    moe("router_weight_on_x_bf16", 9, BF16, group=32, on="x", keys={"router_weight_on": "x"})
    moe("shared_apart_bf16", 10, BF16, group=32, shared="apart")
    moe("shared_fused_f16", 11, f16, group=32, shared="fused")
    moe("shared_only_y_bf16", 12, BF16, quotient_int8, keys=int8, outputs=["y"], shared="apart")
    fp8("on_x_bf16", 0, BF16, "x", {"router_weight_on": "x"})
    fp8("fused_f16", 1, f16, outputs=["a1q", "a1q_scale", "gate_up", "a2q", "a2q_scale", "down", "y"])
    fp8("infinite_f16", 2, f16, damage=(np.inf, np.nan))
    fp8("infinite_bf16", 3, BF16, damage=(-np.inf, np.nan))
    fp8("shared_apart_bf16", 4, BF16, shared="apart")
    fp8("shared_fused_f16", 5, f16, shared="fused")


if __name__ == "__main__":
    main()
