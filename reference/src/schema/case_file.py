"""Writes case files, which are safetensors files, from numpy arrays."""

import json
import struct

import numpy as np

rng = np.random.default_rng(0)


def bf16(values):
    """The bits of float32 values as bfloat16, rounded toward zero."""
    return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def topk_ids(shape, num_experts):
    """Different experts in each row."""
    tokens, top_k = shape
    order = np.argsort(rng.random((tokens, num_experts)), axis=1)
    return np.ascontiguousarray(order[:, :top_k].astype(np.int32))


def write_case(path, op, config, inputs, outputs):
    """Writes one case. Tensors are pairs of a safetensors type and an array of its bits."""
    metadata = {"format": "marlinspike-case", "version": "1", "op": op, "name": "example"}
    header = {"__metadata__": dict(metadata, config=json.dumps(config))}
    data = b""
    for prefix, tensors in [("in", inputs), ("out", outputs)]:
        for name, (dtype, array) in tensors.items():
            offsets = [len(data), len(data) + array.nbytes]
            header[f"{prefix}.{name}"] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
            data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
