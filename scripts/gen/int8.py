#!/usr/bin/env python3
"""Case files of int8 products and quantizers.

The quantizers are the formulas of vLLM's `static_scaled_int8_quant` and `dynamic_scaled_int8_quant` in numpy's
float32. Sums of products are Python integers, taken modulo 2^32; what follows them is computed in fractions,
rounded to float32 and to the output's type where the kernels of `cutlass_scaled_mm_azp` round.

    int8.py        writes golden/data/cases/{cutlass_scaled_mm_azp,{static,dynamic}_scaled_int8_quant}-np_*.safetensors

Requires numpy and ml_dtypes.
"""

from fractions import Fraction

import numpy as np

from fp8_blocks import BF16, F32, PROVENANCE, rounded, write

FROM = PROVENANCE.replace("fp8_blocks.py", "int8.py")
INT32 = 2**32


def to_f32(value):
    """The nearest float32 of a fraction, to even; results here are normal numbers or zero."""
    if value == 0:
        return Fraction(0)
    exponent, size = 0, abs(value)
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    assert exponent >= -126
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def wrapped(value):
    return (value + INT32 // 2) % INT32 - INT32 // 2


def output(total, row, column, bias, epilogue, dtype):
    row, column = Fraction(float(row)), Fraction(float(column))
    bias = Fraction(float(bias))
    if epilogue == "exact":
        return rounded(total * row * column + bias, dtype)
    total = to_f32(Fraction(total))
    if epilogue == "cutlass":
        return rounded(to_f32(to_f32(total * column) * row + bias), dtype)
    assert epilogue == "triton"
    y = rounded(to_f32(to_f32(total * row) * column), dtype)
    return rounded(Fraction(y) + bias, dtype)


def products():
    m, n, k = 3, 16, 96
    for seed, (azp, dtype, own, has_bias, epilogue) in enumerate([
        (None, BF16, False, False, "exact"), (None, np.float16, True, True, "cutlass"),
        (None, BF16, True, True, "triton"), ("tensor", BF16, True, True, "cutlass"),
        ("token", np.float16, True, False, "cutlass"), ("token", BF16, True, True, "exact"),
        ("far", np.float16, True, True, "cutlass"),
    ]):
        rng = np.random.default_rng(300 + seed)
        a = rng.integers(-128, 128, (m, k)).astype(np.int8)
        w = rng.integers(-128, 128, (n, k)).astype(np.int8)
        a[0], w[0] = -128, -128  # the largest sum
        sa = (2.0 ** rng.uniform(-11, -8, (m, 1) if own else 1)).astype(F32)
        sw = (2.0 ** rng.uniform(-11, -8, (n, 1) if own else 1)).astype(F32)
        bias = (rng.standard_normal(n) * 0.5).astype(dtype)
        sums = [sum(int(v) for v in w[j]) for j in range(n)]
        zeros, token = [0] * m, azp in ("token", "far")
        if azp == "tensor":
            zeros = [int(rng.integers(-128, 128))] * m
        if azp == "token":
            zeros = [int(z) for z in rng.integers(-128, 128, m)]
        if azp == "far":  # products with azp that leave int32
            zeros = [-(2**31), 2**31 - 1, 1234567890]
        y = np.zeros((m, n), dtype=dtype)
        for i in range(m):
            for j in range(n):
                total = sum(int(x) * int(v) for x, v in zip(a[i], w[j]))
                total = wrapped(total - zeros[i] * sums[j])
                y[i, j] = output(total, sa.flat[i if own else 0], sw.flat[j if own else 0],
                                 bias[j] if has_bias else 0, epilogue, dtype)
        assert np.isfinite(y.astype(np.float64)).all()
        config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": m, "size_n": n,
                  "size_k": k, "per_act_token_quant": own, "per_out_ch_quant": own, "has_bias": has_bias,
                  "azp": "token" if token else azp, "epilogue": None if epilogue == "exact" else epilogue}
        tensors = {"in.a": (a, None), "in.a_scales": (sa, None), "in.weight": (w, None),
                   "in.weight_scale": (sw, None), "out.y": (y, None)}
        if has_bias:
            tensors["in.bias"] = (bias, None)
        if azp:
            adj = [wrapped(s * zeros[0]) if azp == "tensor" else s for s in sums]
            tensors["in.azp_adj"] = (np.array(adj, dtype=np.int32), None)
            given = np.array(zeros, dtype=np.int32).reshape(m, 1) if token else np.array(zeros[:1], dtype=np.int32)
            tensors["in.azp"] = (given, None)
        name = f"np_{azp or 'symmetric'}_{'f16' if dtype == np.float16 else 'bf16'}_{epilogue}"
        write("cutlass_scaled_mm_azp", name, config, tensors, FROM)


def activations(seed, m, k, dtype):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-4, 5, (m, 1)))
    x[0, :8] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.5, -128.5]  # halves under the scale 1
    x[1] = 0
    x[2] = np.abs(x[2]) + 3  # far from zero: azp below -128
    x[3] = -1.25  # one value
    return x.astype(dtype)


def int32_of(values):
    """`cvt.rni.sat.s32.f32` of rounded values: saturates, and NaN becomes 0."""
    values = np.nan_to_num(np.rint(values).astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return np.clip(values, -(2.0**31), 2.0**31 - 1).astype(np.int64)


def int8_of(values):
    return np.clip(values, -128, 127).astype(np.int8)


def quantizers():
    m, k = 5, 33
    for seed, (static, symmetric, dtype) in enumerate(
            [(s, y, d) for s in (True, False) for y in (True, False) for d in (BF16, np.float16)]):
        x = activations(400 + seed, m, k, dtype)
        wide = x.astype(F32)
        tensors = {"in.x": (x, None)}
        with np.errstate(all="ignore"):
            if static:
                scale, azp = F32(1) if seed % 2 else F32(0.037), -13
                if symmetric:
                    q = int8_of(np.rint(wide / scale))
                else:
                    q = int8_of(int32_of(wide * (F32(1) / scale)) + azp)
                    tensors["in.azp"] = (np.array([azp], dtype=np.int32), None)
                tensors["in.scale"] = (np.array([scale], dtype=F32), None)
            elif symmetric:
                top = np.abs(wide).max(axis=1, keepdims=True)
                scale, factor = top / F32(127), np.where(top == 0, F32(0), F32(127) / top)
                q = int8_of(np.rint(wide * factor))
                tensors["out.x_s"] = (scale, None)
            else:
                low, high = wide.min(axis=1, keepdims=True), wide.max(axis=1, keepdims=True)
                scale = (high - low) / F32(255)
                azp = int32_of(F32(-128) - low / scale)
                moved = int32_of(wide * (F32(1) / scale)) + azp
                q = int8_of((moved + 2**31) % 2**32 - 2**31)
                tensors["out.x_s"] = (scale, None)
                tensors["out.x_azp"] = (azp.astype(np.int32), None)
                assert wide.dtype == scale.dtype == F32
        tensors["out.x_q"] = (q, None)
        config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": m, "size_k": k,
                  "symmetric": symmetric}
        op = f"{'static' if static else 'dynamic'}_scaled_int8_quant"
        name = f"np_{'symmetric' if symmetric else 'azp'}_{'f16' if dtype == np.float16 else 'bf16'}"
        write(op, name, config, tensors, FROM)


products()
quantizers()
