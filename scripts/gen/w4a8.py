#!/usr/bin/env python3
"""Case files of int4 weights in groups with e4m3 activations.

The preparation is that of vLLM's `convert_bf16_scales_to_fp8` and `cutlass_pack_scale_fp8` in numpy's float32, with
ml_dtypes' casts to e4m3fn. `*_exact` are integers and fractions, rounded once; `*_f32` adds in float32, k ascending,
as a kernel without matrix units would, and multiplies by the token's scale, then by the column's.

    w4a8.py        writes golden/data/cases/cutlass_w4a8_mm-np_*.safetensors

Requires numpy and ml_dtypes.
"""

from fractions import Fraction

import numpy as np

from fp8_blocks import BF16, E4M3, F32, PROVENANCE, rounded, write

FROM = PROVENANCE.replace("fp8_blocks.py", "w4a8.py")


def to_e4m3(values):
    assert values.dtype == F32
    return np.clip(values, F32(-448), F32(448)).astype(E4M3)


def prepared(scales):
    """e4m3 scales of groups, and one float32 scale for each column."""
    wide = scales.astype(F32)
    top = np.abs(wide).max(axis=1, keepdims=True)
    column = np.maximum(top / F32(448), F32(1) / F32(448 * 512))
    groups = to_e4m3(to_e4m3(wide / column).astype(F32) / F32(8))
    return groups, column * F32(8)


def packed(q):
    """Codes plus 8, eight to an int32, the lowest k in the lowest bits."""
    n, k = q.shape
    nibbles = (q + 8).astype(np.int64).reshape(n, k // 8, 8)
    words = (nibbles << (4 * np.arange(8))).sum(axis=2)
    return (words - ((words >> 31) << 32)).astype(np.int32)


def exact_integers(codes):
    """e4m3 numbers are multiples of 2^-9."""
    return (codes.astype(np.float64) * 512).astype(np.int64)


def main():
    for seed, (m, n, k, group, dtype, in_f32) in enumerate([
        (3, 24, 384, 128, BF16, False), (3, 24, 384, 128, BF16, True),
        (2, 16, 256, 128, np.float16, False), (5, 8, 96, 32, BF16, False),
    ]):
        rng = np.random.default_rng(500 + seed)
        a = (rng.standard_normal((m, k)) * 60).astype(E4M3)
        a_scales = (2.0 ** rng.uniform(-9, -6, (m, 1))).astype(F32)
        q = rng.integers(-8, 8, (n, k))
        scales = (2.0 ** rng.uniform(-7, -5, (n, k // group))).astype(dtype)
        scales[1, 0] = dtype(2.0**-16)  # below e4m3's normal numbers under the column's scale
        scales[2] = 0  # a column of zeros
        scales[3, 1] = -scales[3, 1]
        groups, columns = prepared(scales)
        w = to_e4m3((q * groups.astype(F32).repeat(group, axis=1)).astype(F32))
        ia, iw = exact_integers(a), exact_integers(w)
        y = np.zeros((m, n), dtype=dtype)
        for i in range(m):
            for j in range(n):
                if in_f32:
                    total = F32(0)
                    for product in ia[i] * iw[j]:
                        total = total + F32(float(product) / 2.0**18)
                    y[i, j] = np.asarray(total * a_scales[i, 0] * columns[j, 0]).astype(dtype)
                    continue
                total = Fraction(int(ia[i] @ iw[j]), 2**18)
                total *= Fraction(float(a_scales[i, 0])) * Fraction(float(columns[j, 0]))
                y[i, j] = rounded(total, dtype)
        assert np.isfinite(y.astype(np.float64)).all()
        config = {"dtype": "float16" if dtype == np.float16 else "bfloat16", "size_m": m, "size_n": n,
                  "size_k": k, "group_size": group}
        tensors = {"in.a": (a, None), "in.a_scales": (a_scales, None), "in.weight_packed": (packed(q), None),
                   "in.weight_scale": (scales, None), "out.weight_scale": (groups, None),
                   "out.weight_chan_scale": (columns, None), "out.y": (y, None)}
        name = f"np_g{group}_{'f16' if dtype == np.float16 else 'bf16'}_{'f32' if in_f32 else 'exact'}"
        write("cutlass_w4a8_mm", name, config, tensors, FROM)


if __name__ == "__main__":
    main()
