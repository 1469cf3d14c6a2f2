#!/usr/bin/env python3
"""A layer of experts computed by PyTorch's operators for Arm, with every stage.

    w4a8_layer.py golden/data/tables      on aarch64, or under qemu with an aarch64 Python

`_dyn_quant_pack_4bit_weight` and `_dyn_quant_matmul_4bit` run KleidiAI's kernels there. The order of the stages is that
of vLLM's `dynamic_4bit_int_moe`: tokens by expert, w13, SiLU, w2, the router's weight, the sum in the order of experts.
Inputs and weights come from SplitMix64, so that the file needs only the outputs. Requires torch and numpy.
"""

import json
import pathlib
import sys

import numpy as np
import torch

HIDDEN, INTER, EXPERTS, TOP_K, TOKENS, GROUP = 64, 64, 3, 2, 4, 32
aten = torch.ops.aten


def numbers(seed, count):
    """SplitMix64's outputs for a seed."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, count + 1, dtype=np.uint64)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def packed(seed, size_k, size_n):
    """Codes plus 8, the even k in the low nibble; bf16 scales k / 8192, k from 1 to 256."""
    codes = (numbers(seed, size_n * size_k) % np.uint64(16)).astype(np.uint8).reshape(size_n, size_k)
    scales = (numbers(seed + 1, size_n * size_k // GROUP) % np.uint64(256) + np.uint64(1)).astype(np.float32) / 8192
    pairs = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    scales = torch.from_numpy(scales.reshape(size_n, -1)).to(torch.bfloat16)
    return aten._dyn_quant_pack_4bit_weight(pairs, scales, None, GROUP, size_k, size_n)


def main():
    x = (numbers(1, TOKENS * HIDDEN) % np.uint64(4001)).astype(np.float32) / 512 - np.float32(3.5)
    x = torch.from_numpy(x.reshape(TOKENS, HIDDEN))
    ids = (np.arange(TOKENS)[:, None] + np.arange(TOP_K)[None] * (1 + np.arange(TOKENS)[:, None] % 2)) % EXPERTS
    weights = torch.from_numpy((numbers(2, TOKENS * TOP_K) % np.uint64(64) + np.uint64(1)).astype(np.float32) / 64)
    shapes = {"gate_up": 2 * INTER, "activated": INTER, "down": HIDDEN}
    stages = {name: torch.zeros(TOKENS * TOP_K, width) for name, width in shapes.items()}
    y = torch.zeros(TOKENS, HIDDEN)
    for expert in range(EXPERTS):
        slots = torch.from_numpy(np.flatnonzero(ids == expert))
        w13, w2 = packed(100 + 10 * expert, HIDDEN, 2 * INTER), packed(200 + 10 * expert, INTER, HIDDEN)
        gate_up = aten._dyn_quant_matmul_4bit(x[slots // TOP_K], w13, GROUP, HIDDEN, 2 * INTER)
        activated = torch.nn.functional.silu(gate_up[:, :INTER]) * gate_up[:, INTER:]
        down = aten._dyn_quant_matmul_4bit(activated, w2, GROUP, INTER, HIDDEN)
        for name, rows in (("gate_up", gate_up), ("activated", activated), ("down", down)):
            stages[name][slots] = rows
        y.index_add_(0, slots // TOP_K, down * weights[slots][:, None])
    version = torch.__version__.split("+")[0]
    provenance = f"torch {version} on aarch64 (qemu-user), _dyn_quant_matmul_4bit, scripts/gen/w4a8_layer.py"
    header, data = {"__metadata__": {"name": "w4a8_layer", "provenance": provenance}}, b""
    for name, tensor in sorted({**stages, "y": y}.items()):
        raw = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    out = pathlib.Path(sys.argv[1]) / "w4a8_layer.safetensors"
    out.write_bytes(len(text).to_bytes(8, "little") + text + data)


if __name__ == "__main__":
    main()
