#!/usr/bin/env python3
"""Golden tables of PyTorch's conversions to and from its 8-bit float types.

Requires: torch >= 2.7 (float8_e8m0fnu), numpy. CPU only; some minutes for the f32 sweeps.
Usage: scripts/gen/scalar_torch.py golden/data/scalar

Decoding: per type the f32 bits of all 256 codes.
Encoding: `tensor.to(dtype)` over every bit pattern of the source type. Results are constant over
long stretches of neighbouring patterns, so a table is a list of [first source pattern, code]: the
code holds until the next entry. The f32 tables therefore cover all 2^32 inputs.
"""

import json
import pathlib
import platform
import sys

import numpy as np
import torch

TARGETS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}
SOURCES = {
    "float16": (torch.float16, np.uint16),
    "bfloat16": (torch.bfloat16, np.uint16),
    "float32": (torch.float32, np.uint32),
}
CHUNK = 1 << 24


def runs(source, target):
    dtype, word = SOURCES[source]
    total = 1 << (8 * np.dtype(word).itemsize)
    found, last = [], None
    for start in range(0, total, CHUNK):
        patterns = np.arange(start, min(start + CHUNK, total), dtype=np.int64).astype(word)
        values = torch.from_numpy(patterns.view(np.int16 if word is np.uint16 else np.int32))
        codes = values.view(dtype).to(TARGETS[target]).view(torch.uint8).numpy()
        changes = np.flatnonzero(np.diff(codes)) + 1
        if last is None or codes[0] != last:
            changes = np.concatenate(([0], changes))
        found += [[int(start + c), int(codes[c])] for c in changes]
        last = codes[-1]
    return found


def write(path, producer, body):
    with open(path, "w") as file:
        json.dump({"producer": producer, **body}, file, separators=(",", ":"))
        file.write("\n")


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    producer = {
        "script": "scripts/gen/scalar_torch.py",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    decoded = {}
    for name, dtype in TARGETS.items():
        values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
        decoded[name] = [int(b) for b in values.numpy().view(np.uint32)]
    write(out / "decode.json", producer, {"f32_bits": decoded})
    for source in SOURCES:
        for target in TARGETS:
            body = {"from": source, "to": target, "runs": runs(source, target)}
            write(out / f"{source}_to_{target}.json", producer, body)
            print(source, target, len(body["runs"]), flush=True)


if __name__ == "__main__":
    main()
