"""An int4 GPTQ product in numpy, as an example of a kernel under test.

Its sums are in float64: it is right for every case that ``WHERE`` admits. ``python numpy_linear.py INPUT
OUTPUT`` answers `marlinspike fuzz --cmd`.
"""

import json
import struct
import sys

import numpy as np

#: The configurations that the kernel takes.
WHERE = (
    "checkpoint_format=gptq,weight_type=uint4b8,dtype=float16,input_dtype=null,desc_act=false,"
    "has_bias=false,tensor_parallel.size=null"
)


def kernel(inputs, config):
    """y ``[M, N]`` in float16."""
    words = inputs["qweight"].view(np.uint32)
    fields = [words >> np.uint32(4 * i) & np.uint32(15) for i in range(8)]
    codes = np.stack(fields, axis=1).reshape(config["size_k"], config["size_n"]).astype(np.float64)
    scales = inputs["scales"].astype(np.float64)
    weight = (codes - 8) * np.repeat(scales, len(codes) // len(scales), axis=0)
    with np.errstate(over="ignore"):
        return {"y": (inputs["x"].astype(np.float64) @ weight).astype(np.float16)}


def _read(path):
    data = open(path, "rb").read()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__")
    types = {"F16": np.float16, "I32": np.int32}
    inputs = {}
    for name, tensor in header.items():
        begin, stop = tensor["data_offsets"]
        if name.startswith("in."):
            values = np.frombuffer(data[end + begin : end + stop], types[tensor["dtype"]])
            inputs[name[3:]] = values.reshape(tensor["shape"])
    return inputs, json.loads(metadata["config"])


def _write(path, outputs):
    header, data = {}, b""
    for name, array in outputs.items():
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F16", "shape": array.shape, "data_offsets": span}
        data += array.tobytes()
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    _write(sys.argv[2], kernel(*_read(sys.argv[1])))
