#!/usr/bin/env python3
"""Samples tiles of a dump of tensor_core.cu into one safetensors file (standard library only).

    golden_tiles.py DUMP OUT.safetensors PROVENANCE

Tensors `<instruction>.k<k>.{a,b,c,d}`: a [tiles, rows, bytes] and b [tiles, 8, bytes] uint8,
c and d [tiles, rows, 8] uint32.
"""

import json
import struct
import sys

OUTPUTS = 2048  # per instruction

dump, out, provenance = sys.argv[1:]
header = {"__metadata__": {"name": "tensor_core_tiles", "provenance": provenance}}
data = bytearray()


def add(name, dtype, shape, parts):
    start = len(data)
    for part in parts:
        data.extend(part)
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(data)]}


with open(dump, "rb") as file:
    while name := file.read(32):
        name = name.rstrip(b"\0").decode()
        _, _, _, row_bytes, rows, tiles = struct.unpack("<6i", file.read(24))
        width = 4 if "tf32" in name else 2 if name.split("_")[1] in ("f16", "bf16") else 1
        count = OUTPUTS // (rows * 8)
        # A stride without a small common factor with the cycles of the probe's settings.
        chosen = sorted(i * tiles // count + i * 7 % (tiles // count) for i in range(count))
        prefix = f"{name}.k{row_bytes // width}"
        for part, dtype, shape, size in (
            ("a", "U8", [count, rows, row_bytes], rows * row_bytes),
            ("b", "U8", [count, 8, row_bytes], 8 * row_bytes),
            ("c", "U32", [count, rows, 8], rows * 8 * 4),
            ("d", "U32", [count, rows, 8], rows * 8 * 4),
        ):
            base = file.tell()
            picked = []
            for tile in chosen:
                file.seek(base + tile * size)
                picked.append(file.read(size))
            file.seek(base + tiles * size)
            add(f"{prefix}.{part}", dtype, shape, picked)

text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(out, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + data)
