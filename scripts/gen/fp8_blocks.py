#!/usr/bin/env python3
"""Case files of FP8 blocks: quantized groups of activations, and products of 128 x 128 blocks.

The quantizers are the formulas of vLLM's `per_token_group_fp8_quant`, SGLang's, DeepEP's and DeepGEMM's
in numpy's float32, with ml_dtypes' casts to e4m3fn. The products are exact: integers and fractions,
rounded once; `*_f32` adds parts in float32 as a kernel without matrix units would.

    fp8_blocks.py        writes golden/data/cases/{per_token_group_fp8_quant,cutlass_scaled_mm}-np_*.safetensors
                         and reference/tests/data/fp8_requantize_ue8m0.json

Requires numpy and ml_dtypes.
"""

import json
import struct
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np

CASES = Path(__file__).resolve().parents[2] / "golden/data/cases"
PROVENANCE = f"numpy {np.__version__} with ml_dtypes {ml_dtypes.__version__}, scripts/gen/fp8_blocks.py"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
NAMES = {np.dtype(BF16): "BF16", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32",
         np.dtype(E4M3): "F8_E4M3", np.dtype(np.int32): "I32", np.dtype(np.int8): "I8"}
F32 = np.float32


def write(op, name, config, tensors, provenance=PROVENANCE):
    header = {"__metadata__": dict(sorted({
        "format": "marlinspike-case", "version": "1", "op": op, "name": name,
        "config": json.dumps(config), "provenance": provenance}.items()))}
    body = b""
    for key in sorted(tensors):
        tensor, dtype = tensors[key]
        data = np.ascontiguousarray(tensor).tobytes()
        header[key] = {"dtype": dtype or NAMES[tensor.dtype], "shape": list(tensor.shape),
                       "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (CASES / f"{op}-{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def activations(seed, m, k, dtype):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 7, (m, k // 32)).repeat(32, axis=1))
    x[1, :128] = 0  # a group of zeros
    x[2, 5] = 448.0 * 2.0**-3  # a scale that is a power of two
    x[2, :5] = x[2, 6:128] = 0
    x[3, :128] = 1e-9 if dtype != np.float16 else 6e-8  # below the least magnitudes
    return x.astype(dtype)


def ceil_to_ue8m0(scale):
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(F32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(F32)


def quantize(x, group, rule, ue8m0):
    m, k = x.shape
    groups = x.astype(F32).reshape(m, k // group, group)
    least = F32(1e-4 if rule in ("deep_gemm", "deep_ep") else 1e-10)
    top = np.maximum(np.abs(groups).max(axis=2), least)
    if rule in ("quotient", "scale_inverse", "deep_gemm"):
        scale = top / F32(448)
    else:
        scale = top * (F32(1) / F32(448))
    if ue8m0:
        scale = ceil_to_ue8m0(np.maximum(scale, F32(1e-10)) if rule in ("quotient", "scale_inverse") else scale)
        factor = F32(1) / scale
    elif rule in ("scale_inverse", "deep_gemm"):
        factor = F32(1) / scale
    elif rule in ("inverse", "deep_ep"):
        factor = F32(448) / top
    else:
        factor = None
    if factor is None:
        q = groups / scale[..., None]
    else:
        q = groups * factor[..., None]
    assert q.dtype == F32 and scale.dtype == F32
    return np.clip(q, F32(-448), F32(448)).astype(E4M3).reshape(m, k), scale


def stored(scale, layout):
    m, groups = scale.shape
    padded = -(-m // 4) * 4
    if layout == "row_major":
        return scale
    if layout == "column_major":
        return scale.T
    if layout == "tma_aligned":
        out = np.full((groups, padded), np.nan, dtype=F32)  # upstream leaves the padding unset
        out[:, :m] = scale.T
        return out
    exponents = (scale.view(np.int32) >> 23).astype(np.uint8)
    lines = np.zeros((padded, -(-groups // 4) * 4), dtype=np.uint8)
    lines[:m, :groups] = exponents
    return np.ascontiguousarray(lines).view("<i4").T


def quantizers():
    for seed, (rule, ue8m0, layout, dtype, k, group) in enumerate([
        ("quotient", False, "row_major", BF16, 640, 128),
        ("quotient", True, "column_major", np.float16, 640, 128),
        ("reciprocal", False, "column_major", np.float16, 256, 64),
        ("inverse", False, "tma_aligned", BF16, 640, 128),
        ("deep_ep", True, "row_major", BF16, 640, 128),
        ("deep_gemm", False, "tma_aligned", BF16, 640, 128),
        ("deep_gemm", True, "packed_ue8m0", BF16, 640, 128),
    ]):
        m = 7
        x = activations(seed, m, k, dtype)
        q, scale = quantize(x, group, rule, ue8m0)
        config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": m, "size_k": k,
                  "group_size": group, "quantizer": rule, "use_ue8m0": ue8m0, "scale_layout": layout}
        name = f"np_{rule}{'_ue8m0' if ue8m0 else ''}_{layout}"
        write("per_token_group_fp8_quant", name, config,
              {"in.x": (x, None), "out.x_q": (q, None), "out.x_s": (stored(scale, layout), None)})


def rounded(value, dtype):
    """The nearest number of dtype, to even."""
    if value == 0:
        return 0.0
    bits = 10 if dtype == np.float16 else 7
    exponent = 0
    size = abs(value)
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    exponent = max(exponent, -14 if dtype == np.float16 else -126)
    unit = Fraction(2) ** (exponent - bits)
    return float(round(value / unit) * unit)  # Python rounds fractions to even


def products():
    m, n, k = 5, 136, 384
    for seed, (ue8m0, dtype, has_bias, in_f32) in enumerate([
        (False, BF16, False, False), (True, BF16, True, False), (False, np.float16, True, False),
        (False, BF16, False, True), (True, np.float16, False, True),
    ]):
        rng = np.random.default_rng(100 + seed)
        a = (rng.standard_normal((m, k)) * 60).astype(E4M3)
        w = (rng.standard_normal((n, k)) * 60).astype(E4M3)
        blocks = (-(-n // 128), k // 128)
        draw = (lambda *s: rng.integers(110, 120, s).astype(np.uint8)) if ue8m0 else (
            lambda *s: (2.0 ** rng.uniform(-14, -9, s)).astype(F32))
        sa, sw = draw(m, k // 128), draw(*blocks)
        number = (lambda s: np.exp2(s.astype(np.float64) - 127)) if ue8m0 else np.float64
        fa, fw = number(sa), number(sw)
        bias = (rng.standard_normal(n) * 0.5).astype(dtype)
        # Codes are multiples of 2^-9: exact integers.
        ia, iw = ((c.astype(np.float64) * 512).astype(np.int64) for c in (a, w))
        y = np.zeros((m, n), dtype=dtype)
        for i in range(m):
            for j in range(n):
                if in_f32:
                    total = F32(0)
                    for g in range(k // 128):
                        at = slice(128 * g, 128 * g + 128)
                        part = F32(float(int(ia[i, at] @ iw[j, at])) / 2.0**18)
                        scale = F32(fa[i, g]) * F32(fw[j // 128, g])
                        total = total + part * scale
                    y[i, j] = np.asarray(total).astype(dtype)
                    continue
                total = Fraction(float(bias[j])) if has_bias else Fraction(0)
                for g in range(k // 128):
                    at = slice(128 * g, 128 * g + 128)
                    part = Fraction(int(ia[i, at] @ iw[j, at]), 2**18)
                    total += part * Fraction(float(fa[i, g])) * Fraction(float(fw[j // 128, g]))
                y[i, j] = rounded(total, dtype)
        assert np.isfinite(y.astype(np.float64)).all()
        config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": m, "size_n": n,
                  "size_k": k, "weight_block_size": [128, 128], "has_bias": has_bias}
        kind = "F8_E8M0" if ue8m0 else None
        tensors = {"in.a": (a, None), "in.a_scales": (sa, kind), "in.weight": (w, None),
                   "in.weight_scale": (sw, kind), "out.y": (y, None)}
        if has_bias:
            tensors["in.bias"] = (bias, None)
        scales, arithmetic = "ue8m0" if ue8m0 else "f32", "f32" if in_f32 else "exact"
        name = f"np_blocks_{scales}_{'f16' if dtype == np.float16 else 'bf16'}_{arithmetic}"
        write("cutlass_scaled_mm", name, config, tensors)


def requantized():
    """`requant_weight_ue8m0_inplace`: blocks [16, 32] of a matrix that does not fill them."""
    rng = np.random.default_rng(7)
    (n, k), (block_n, block_k) = (40, 80), (16, 32)
    codes = (rng.standard_normal((n, k)) * 120).clip(-448, 448).astype(E4M3)
    codes[:16, :32] = E4M3(0)
    scales = np.exp2(rng.uniform(-14, -6, (3, 3))).astype(F32)
    scales[1, 1] = F32(2.0**-9)
    values = codes.astype(F32) * scales.repeat(block_n, 0)[:n].repeat(block_k, 1)[:, :k]
    new_codes, new_scales = np.zeros_like(codes), np.zeros_like(scales)
    for i in range(3):
        for j in range(3):
            at = (slice(i * block_n, (i + 1) * block_n), slice(j * block_k, (j + 1) * block_k))
            top = max(np.abs(values[at]).max(), F32(1e-4))
            new_scales[i, j] = ceil_to_ue8m0(F32(top) / F32(448))
            new_codes[at] = (values[at] * (F32(1) / new_scales[i, j])).astype(E4M3)
    assert values.dtype == F32
    record = {"producer": PROVENANCE, "shape": [n, k], "block": [block_n, block_k]}
    for name, tensor, view in [("codes", codes, np.uint8), ("scales", scales, np.uint32),
                               ("new_codes", new_codes, np.uint8), ("new_scales", new_scales, np.uint32)]:
        record[name] = tensor.view(view).ravel().tolist()
    path = CASES.parents[2] / "reference/tests/data/fp8_requantize_ue8m0.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    quantizers()
    products()
    requantized()
