#!/usr/bin/env python3
"""Dot products of block-scaled fp4 instructions by MMA-Sim's model, on a CPU.

    python3 mma_sim.py MMA_SIM_SOURCE      # microsoft/MMA-Sim at c78513835c8b2ae61b35062afce4c4255bc6901c

Writes `reference/tests/data/block_scaled_units.json`: per row scale type, k per scale, codes of a and b
(two a byte, lower k in the low nibble), scales of a and b, bits of c and of the result. No group of 16
products sums to zero, where the published versions of the model differ.
"""

import json
import random
import struct
import sys
from pathlib import Path

import torch

SIZE_K = 64
TYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e8m0fnu": torch.float8_e8m0fnu}


def floats(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def row(model, rng, scale, block, kind):
    """Codes and scales at random.

    `usual`: numbers of about one and an accumulator near the sum. `wild`: any. `cancelling`: the second 16
    products undo the first, whose scales are large, and what is left lies about 35 bits below them.
    """
    wild, cancelling = kind == "wild", kind == "cancelling"
    scales = {
        "float8_e4m3fn": (range(1, 127), range(0x28, 0x48)),
        "float8_e8m0fnu": (range(1, 254), range(120, 134)),
    }[scale][0 if wild else 1]
    while True:
        a, b = ([rng.randrange(256) for _ in range(SIZE_K // 2)] for _ in "ab")
        if cancelling:
            a[8:16], b[8:16] = (code ^ 0x88 for code in a[:8]), b[:8]
        values = [model.unpack_fp4_tensor(torch.tensor(x, dtype=torch.uint8)) for x in (a, b)]
        if (values[0] * values[1]).reshape(-1, 16).sum(1).ne(0).all():
            break
    sa, sb = ([rng.choice(scales) for _ in range(SIZE_K // block)] for _ in "ab")
    if cancelling:
        high, low = {"float8_e4m3fn": (range(0x70, 0x7F), range(1, 12)),
                     "float8_e8m0fnu": (range(130, 140), range(108, 124))}[scale]
        near = 32 // block
        for s in (sa, sb):
            s[:near] = [rng.choice(high)] * near
            s[near:] = [rng.choice(low) for _ in s[near:]]
    # Finite, from the smallest subnormal on; zero now and then.
    c = rng.choice([0, 0x80000000, 1, 0x007FFFFF] + 12 * [rng.randrange(0x7F800000)])
    if cancelling:
        # About 2^(E - 35) with E the sum of the large scales' exponents.
        exponents = [(x >> 3) - 7 if scale == "float8_e4m3fn" else x - 127 for x in (sa[0], sb[0])]
        c = (sum(exponents) - 35 + 127 + rng.randrange(16) << 23) + rng.randrange(1 << 23)
    elif not wild:
        c = rng.randrange(0x3C000000, 0x49000000)
    c |= rng.randrange(2) << 31
    bits = [torch.tensor(x, dtype=torch.uint8).view(TYPES[scale]) for x in (sa, sb)]
    d = model.nv_fused_dot_add_with_block_scale(*values, torch.tensor(floats(c)), *bits, n_fractional_bits=35)
    return [scale, block, bytes(a).hex(), bytes(b).hex(), bytes(sa).hex(), bytes(sb).hex(), c,
            d.view(torch.uint32).item()]


def main():
    sys.path.insert(0, sys.argv[1])
    from mmasim.simulator import arithmetic as model

    rng = random.Random(64)
    rows = [row(model, rng, scale, block, kind)
            for scale in TYPES for block in (16, 32) for kind in ("usual", "wild", "cancelling") for _ in range(20)]
    head = {"producer": "MMA-Sim c78513835c8b (mmasim/simulator/arithmetic.py), torch 2.11.0 CPU",
            "columns": ["scale", "block", "a", "b", "scales_a", "scales_b", "c", "d"]}
    path = Path(__file__).resolve().parents[2] / "reference/tests/data/block_scaled_units.json"
    lines = ",\n".join("  " + json.dumps(r) for r in rows)
    text = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items())
    path.write_text("{\n" + text + ' "rows": [\n' + lines + "\n ]\n}\n")
    print(f"{path.name}: {path.stat().st_size} bytes, {len(rows)} rows")


if __name__ == "__main__":
    main()
