"""Writes case files from numpy arrays: pip install numpy safetensors."""

import json

import numpy as np
from safetensors import serialize_file

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
    """Writes one case. Tensors are pairs of an element type's name and an array of its bits."""
    tensors = {f"in.{name}": tensor for name, tensor in inputs.items()}
    tensors |= {f"out.{name}": tensor for name, tensor in outputs.items()}
    data = {
        name: {"dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}
        for name, (dtype, array) in tensors.items()
    }
    metadata = {"format": "marlinspike-case", "version": "1", "op": op, "name": "example"}
    serialize_file(data, path, metadata | {"config": json.dumps(config)})
