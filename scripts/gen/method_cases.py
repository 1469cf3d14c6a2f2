#!/usr/bin/env python3
"""Case files of the operations other than Marlin's, from recorded outputs.

Standard library only; nothing is computed here. The outputs are those that `flashinfer_layouts.py` and
`fp8_requantize.py` recorded with vLLM's and FlashInfer's own functions; inputs of the former are
the same functions of their names.

    method_cases.py        writes golden/data/cases/{swizzle,nvfp4,fp8}-*.safetensors
"""

import json
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "golden"
MASK = (1 << 64) - 1
ONE = struct.pack("<f", 1.0)


def stream(name):
    """64 bits per element: SplitMix64 started at the FNV-1a hash of the name."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 & MASK
    index = 0
    while True:
        index += 1
        z = (seed + index * 0x9E3779B97F4A7C15) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def count(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def made(name, shape, value):
    values = stream(name)
    return b"".join(value(next(values)) for _ in range(count(shape)))


def byte(name, shape):
    return ("U8", shape, made(name, shape, lambda z: bytes([z >> 56])))


def e4m3(name, shape):
    return ("F8_E4M3", shape, made(name, shape, lambda z: bytes([(z >> 57) % 127])))


def bf16(name, shape):
    return ("BF16", shape, made(name, shape, lambda z: struct.pack("<H", 0x3C00 + (z >> 54))))


def words(values):
    return struct.pack(f"<{len(values)}I", *values)


class Table:
    """A recorded safetensors file."""

    def __init__(self, path):
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        self.header = json.loads(data[8 : 8 + length])
        self.provenance = self.header.pop("__metadata__")["provenance"]
        self.body = data[8 + length :]

    def get(self, name, dtype=None, shape=None):
        entry = self.header[name]
        start, end = entry["data_offsets"]
        return (dtype or entry["dtype"], shape or entry["shape"], self.body[start:end])


def write(op, file, name, config, provenance, tensors):
    metadata = {
        "config": json.dumps(config, sort_keys=True), "format": "marlinspike-case", "name": name, "op": op,
        "provenance": provenance, "version": "1",
    }
    header, offset, bodies = {"__metadata__": metadata}, 0, []
    for key in sorted(tensors):
        dtype, shape, body = tensors[key]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(body)]}
        offset += len(body)
        bodies.append(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = GOLDEN / f"data/cases/{file}.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bodies))
    print(f"{path.name}: {path.stat().st_size} bytes")


def swizzles(table):
    for rows, cols in [(33, 3), (129, 5)]:
        name = f"swizzle.{rows}x{cols}"
        padded = [-(-rows // 128) * 128, -(-cols // 4) * 4]
        config = {"scale_type": "float8_e4m3fn", "sf_layout": "128x4", "size_n": rows, "groups": cols}
        tensors = {"in.scale": e4m3(name, [rows, cols]), "out.swizzled_scale": table.get(name, "F8_E4M3", padded)}
        write("swizzle_blockscale", f"swizzle-{rows}x{cols}", name, config, table.provenance, tensors)
    name = "swizzle_experts.3x5x6"
    config = {"scale_type": "float8_e4m3fn", "sf_layout": "128x4", "num_experts": 3, "size_n": 5, "groups": 6}
    tensors = {"in.scale": e4m3(name, [3, 5, 6]), "out.swizzled_scale": table.get(name, "F8_E4M3", [3, 128, 8])}
    write("swizzle_blockscale", "swizzle-experts", name, config, table.provenance, tensors)
    name = "swizzle_bf16.130x6"
    config = {"scale_type": "bfloat16", "sf_layout": "128x4", "size_n": 130, "groups": 6}
    tensors = {"in.scale": bf16(name, [130, 6]), "out.swizzled_scale": table.get(name, "BF16", [256, 8])}
    write("swizzle_blockscale", "swizzle-bf16", name, config, table.provenance, tensors)


def nvfp4(table, name, backend, experts, hidden, inter, gated=True):
    label, shards = f"nvfp4.{name}", 2 if gated else 1
    config = {
        "backend": backend, "num_experts": experts, "hidden_size": hidden, "intermediate_size": inter,
        "is_act_and_mul": gated,
    }
    tensors = {}
    for part, (size_n, size_k), columns in [("w13", (shards * inter, hidden), shards), ("w2", (hidden, inter), 1)]:
        tensors[f"in.{part}_weight"] = byte(f"{label}.{part}", [experts, size_n, size_k // 2])
        tensors[f"in.{part}_weight_scale"] = e4m3(f"{label}.{part}_scale", [experts, size_n, size_k // 16])
        for scale in ("weight_scale_2", "input_scale"):
            tensors[f"in.{part}_{scale}"] = ("F32", [experts, columns], ONE * experts * columns)
        tensors[f"out.{part}_weight"] = table.get(f"{label}.{part}")
        scales = table.get(f"{label}.{part}_scale", "F8_E4M3")
        if len(scales[1]) != 3:
            # CuTe DSL's six dimensions: tiles of 128 rows by tiles of four groups, after the expert.
            _, down, across, *_ = scales[1]
            scales = (scales[0], [experts, down * 128, across * 4], scales[2])
        tensors[f"out.{part}_weight_scale"] = scales
    write("convert_to_nvfp4_moe_kernel_format", f"nvfp4-{name}", label, config, table.provenance, tensors)


def requantize(facts, file, rule, rows, codes, fp8_type="float8_e4m3fn", inputs=None):
    all_codes, experts = bytes(range(256)), len(rows)
    config = {
        "num_experts": experts, "hidden_size": 256, "intermediate_size": 1, "requantize": rule, "fp8_type": fp8_type,
    }
    weight = [experts, 2, 256]
    tensors = {
        "in.w13_weight": ("F8_E4M3", weight, all_codes * 2 * experts),
        "in.w13_weight_scale": ("F32", [experts, 2], words([row[w] for row in rows for w in ("w1", "w3")])),
        "out.w13_weight": ("F8_E4M3", weight, b"".join(bytes.fromhex(c) for row in rows for c in codes(row))),
        # Positive floats order like their bits.
        "out.w13_weight_scale": ("F32", [experts], words([max(row["w1"], row["w3"]) for row in rows])),
    }
    if inputs:
        tensors["in.w13_input_scale"] = ("F32", [experts], words(inputs["scales"]))
        tensors["out.w13_input_scale"] = ("F32", [1], words([inputs["largest"]]))
    provenance = "vllm 0.21.0 (w8a8_utils.py, fp8_utils.py), recorded by " + facts["producer"]
    write("process_fp8_weight_tensor_strategy_moe", f"fp8-{file}", file, config, provenance, tensors)


def normalize(facts):
    found = facts["normalized"]
    before, after = zip(*found["scales"])
    config = {"size_n": 1, "size_k": 256, "num_scales": 2}
    tensors = {
        "in.weight": ("F8_E4M3", [1, 256], bytes(range(256))),
        "in.weight_scale": ("F32", [2], words(before[:2])),
        "in.input_scale": ("F32", [1], words(before[2:])),
        "out.weight": ("F8_E4M3", [1, 256], bytes.fromhex(found["codes"])),
        "out.weight_scale": ("F32", [2], words(after[:2])),
        "out.input_scale": ("F32", [1], words(after[2:])),
    }
    provenance = "vllm 0.21.0 (w8a8_utils.py), recorded by " + facts["producer"]
    write("normalize_e4m3fn_to_e4m3fnuz", "fp8-fnuz", "fnuz", config, provenance, tensors)


def main():
    table = Table(GOLDEN / "data/tables/flashinfer_layouts.safetensors")
    swizzles(table)
    nvfp4(table, "trtllm", "FLASHINFER_TRTLLM", 1, 192, 64)
    nvfp4(table, "flashinfer_cutlass", "FLASHINFER_CUTLASS", 2, 48, 64)
    nvfp4(table, "vllm_cutlass", "VLLM_CUTLASS", 2, 48, 64)
    nvfp4(table, "cutlass_ungated", "FLASHINFER_CUTLASS", 1, 64, 48, gated=False)
    nvfp4(table, "cutedsl", "FLASHINFER_CUTEDSL", 1, 32, 128)
    facts = json.loads((ROOT / "reference/tests/data/fp8_requantize.json").read_text())
    rows = facts["requantized"]
    differ = [row for row in rows if "cpu" in row]
    requantize(facts, "requantize-cuda", "upstream_cuda", differ + rows[:9], lambda row: row["codes"])
    requantize(facts, "requantize-cpu", "upstream_cpu", differ + rows[:9], lambda row: row.get("cpu", row["codes"]))
    inputs = facts["input_scales"][0]
    requantize(facts, "requantize-static", "upstream_cuda", rows[4:7], lambda row: row["codes"], inputs=inputs)
    requantize(facts, "requantize-fnuz", "upstream_cpu", facts["fnuz"][4:8], lambda row: row["codes"], "float8_e4m3fnuz")
    normalize(facts)


if __name__ == "__main__":
    main()
