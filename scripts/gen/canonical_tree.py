#!/usr/bin/env python3
"""Case files of version 2 of the canonical schedule.

Each row of x has one number in each chunk of k, so a chunk's sum is one product, which float32 holds: numpy's
float32 additions in the order of the schedule give every bit, without a model of the matrix unit. Two chunks of
each row hold large numbers that cancel, so that another order, or other chunks, gives other outputs.

    canonical_tree.py        writes golden/data/cases/linear-np_canonical_v2_*.safetensors

Requires numpy and ml_dtypes.
"""

import numpy as np

from fp8_blocks import BF16, F32, PROVENANCE, write

FROM = PROVENANCE.replace("fp8_blocks.py", "canonical_tree.py")
GROUP = 64


def ascending(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def pairwise(parts):
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def case(name, seed, m, n, leaves, chunks, dtype):
    """`chunks`: lengths of the chunks of one leaf."""
    rng = np.random.default_rng(seed)
    large = 2.0**14 if dtype == np.float16 else 2.0**20
    k = leaves * sum(chunks)
    codes = rng.integers(0, 16, (k, n))
    column = rng.uniform(0.5, 2.0, n)
    exponents = rng.integers(-1, 1, k // GROUP)
    scales = (column * np.exp2(exponents)[:, None]).astype(dtype)
    weight = ((codes - 8) * scales[np.arange(k) // GROUP].astype(F32)).astype(dtype).astype(F32)

    starts = np.cumsum([0] + chunks * leaves)[:-1]
    lengths = np.array(chunks * leaves)
    x = np.zeros((m, k), dtype)
    parts = np.zeros((len(starts), m, n), F32)
    for row in range(m):
        at = starts + rng.integers(0, lengths)
        # A test drops k 32 to 64 of every case, which must show.
        at[0] = rng.integers(32, 64)
        values = rng.uniform(-2, 2, len(at)).astype(dtype)
        first, second = rng.choice(len(at), 2, replace=False)
        # The same weights in both rows of k, but for a power of two.
        codes[at[second]] = codes[at[first]]
        values[first] = dtype(large * (1 + rng.integers(0, 128) / 128))
        ratio = exponents[at[first] // GROUP] - exponents[at[second] // GROUP]
        values[second] = -values[first] * dtype(2.0**ratio)
        x[row, at] = values
    # Rows may share rows of k, so weights follow from the final codes.
    weight = ((codes - 8) * scales[np.arange(k) // GROUP].astype(F32)).astype(dtype).astype(F32)
    for i, (start, length) in enumerate(zip(starts, lengths)):
        span = slice(start, start + length)
        assert ((x[:, span] != 0).sum(axis=1) <= 1).all()
        parts[i] = x[:, span].astype(F32) @ weight[span]

    bias = rng.uniform(-1, 1, n).astype(dtype)
    finish = lambda total: (total + bias.astype(F32)).astype(dtype)
    per = len(chunks)
    of_leaves = [ascending(list(parts[i:i + per])) for i in range(0, len(parts), per)]
    y = finish(pairwise(of_leaves))
    differ = lambda other: (finish(other).view(np.uint16) != y.view(np.uint16)).mean()
    assert differ(ascending(list(parts))) > 0.2, differ(ascending(list(parts)))
    assert differ(ascending(list(parts[::-1]))) > 0.2

    qweight = np.zeros((k // 8, n), np.uint32)
    for i in range(8):
        qweight |= codes[i::8].astype(np.uint32) << (4 * i)
    config = {"checkpoint_format": "gptq", "weight_type": "uint4b8", "group_size": GROUP,
              "dtype": "float16" if dtype == np.float16 else "bfloat16", "has_bias": True,
              "size_m": m, "size_n": n, "size_k": k, "schedule": "canonical_v2"}
    tensors = {"in.x": (x, None), "in.qweight": (qweight.view(np.int32), None), "in.scales": (scales, None),
               "in.bias": (bias, None), "out.y": (y, None)}
    write("linear", f"np_canonical_v2_{name}", config, tensors, FROM)


if __name__ == "__main__":
    # 1408 has two leaves, each of three chunks; 1536 has eight.
    case("leaves_f16", 1, 6, 16, 2, [256, 256, 192], np.float16)
    case("tree_bf16", 2, 6, 16, 8, [192], BF16)
