"""Block formats of llama.cpp's ggml and of its Python package gguf against their definitions in numpy.

    pip install ./integrations/python gguf llama-cpp-python
    python ggml_blocks.py                    # gguf, and ggml where llama-cpp-python is installed
    python ggml_blocks.py --ggml FOLDER      # ggml from libggml-base.so and libggml-cpu.so in a folder

Decoding is compared exactly, for every scale code with every code. Encoding is judged by its definition: the scale, then each
element, which must be a nearest value of the block (at a tie either one). Dot products of whole rows are compared with
their exact value within the error of f32 sums.
"""

import argparse
import ctypes
import glob
import importlib
import importlib.util
import os
import sys

import numpy as np

import marlinspike

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGNED_E2M1 = np.concatenate([E2M1, -E2M1])
#: Elements and bytes of a block, ggml's number of the type.
BLOCKS = {"Q4_0": (32, 18, 2), "Q8_0": (32, 34, 8), "MXFP4": (32, 17, 39), "NVFP4": (64, 36, 40)}


def nibbles(packed):
    """Codes of a block whose low nibbles are its first half."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def scale_codes(name, blocks):
    """Codes of the scales ``[blocks, scales]`` and of the elements ``[blocks, scales, elements]``."""
    if name == "Q4_0":
        return blocks[:, :2].copy().view(np.uint16), nibbles(blocks[:, 2:])[:, None]
    if name == "Q8_0":
        return blocks[:, :2].copy().view(np.uint16), blocks[:, 2:][:, None]
    if name == "MXFP4":
        return blocks[:, :1], nibbles(blocks[:, 1:])[:, None]
    return blocks[:, :4], nibbles(blocks[:, 4:].reshape(len(blocks), 4, 8))


def scale_values(name, codes):
    kinds = {"Q4_0": "float16", "Q8_0": "float16", "MXFP4": "float8_e8m0fnu", "NVFP4": "float8_e4m3fn"}
    return np.asarray(marlinspike.decode(codes, kinds[name]))


def element_values(name, codes):
    if name == "Q4_0":
        return codes.astype(np.float64) - 8
    return codes.view(np.int8).astype(np.float64) if name == "Q8_0" else SIGNED_E2M1[codes]


def decoded(name, blocks):
    """The values of blocks, exactly."""
    scales, codes = scale_codes(name, blocks)
    with np.errstate(invalid="ignore"):
        values = scale_values(name, scales)[..., None] * element_values(name, codes)
    return values.reshape(len(blocks), -1)


def every_code(name):
    """Blocks with every scale code and every code. NaN and infinite scales are left out, and the sign bit of NVFP4's."""
    elements, size, _ = BLOCKS[name]
    if name == "Q8_0":
        scales = np.repeat(np.arange(1 << 16, dtype=np.uint16), 8)
        codes = np.tile(np.arange(256, dtype=np.uint8).reshape(8, 32), (1 << 16, 1))
        blocks = np.concatenate([scales[:, None].view(np.uint8), codes], axis=1)
    else:
        count = 1 << 16 if name == "Q4_0" else 255 if name == "MXFP4" else 127
        scales = np.arange(count, dtype=np.uint16)[:, None].view(np.uint8)
        scales = scales if name == "Q4_0" else np.tile(scales[:, :1], (1, size - elements // 2))
        packed = np.arange(16, dtype=np.uint8) | np.arange(15, -1, -1, dtype=np.uint8) << 4
        blocks = np.concatenate([scales, np.tile(packed, (count, elements // 32))], axis=1)
    return blocks[np.isfinite(decoded(name, blocks)).all(axis=1)]


def drawn(name, count, seed):
    """Blocks of f32 values: scales over many powers of two, largest values next to powers of two, ties, zeros."""
    random, elements = np.random.default_rng(seed), BLOCKS[name][0]
    low, high = {"Q4_0": (-14, 18), "Q8_0": (-14, 20), "MXFP4": (-124, 125), "NVFP4": (-12, 14)}[name]
    values = random.standard_normal((count, elements))
    values = np.ldexp(values, random.integers(low, high, (count, 1))).astype(np.float32)
    kind = random.integers(0, 6, count)
    grid = random.choice(SIGNED_E2M1, (count, elements)) * random.choice([1.0, 0.5, 0.75, 1.25], (count, elements))
    exact = np.ldexp(grid, random.integers(max(low, -100), min(high, 100), (count, 1))).astype(np.float32)
    values = np.where((kind == 1)[:, None], exact, values)
    # The block's largest value directly below, at or above a power of two.
    power = np.ldexp(np.float32(1), random.integers(low, high, count)).astype(np.float32)
    beside = np.where(kind == 2, np.nextafter(power, np.float32(0)), np.where(kind == 3, power, values[:, 0]))
    small = np.clip(values, -np.abs(beside[:, None]), np.abs(beside[:, None]))
    values = np.where(((kind == 2) | (kind == 3))[:, None], small, values)
    values[:, 0] = beside
    values[kind == 4, elements // 2 :] = 0
    return values


class Gguf:
    """gguf.quants, in numpy."""

    def __init__(self):
        self.quants = importlib.import_module("gguf.quants")
        self.types = importlib.import_module("gguf").GGMLQuantizationType
        self.version = f"gguf {importlib.import_module('importlib.metadata').version('gguf')}"

    def has(self, name):
        return hasattr(self.types, name)

    def encode(self, name, values):
        with np.errstate(all="ignore"):
            return self.quants.quantize(values, self.types[name])

    def decode(self, name, blocks):
        with np.errstate(all="ignore"):
            return self.quants.dequantize(blocks, self.types[name])


class Ggml:
    """ggml's functions through ctypes: the reference ones, or those of the CPU backend."""

    def __init__(self, folder, backend=False):
        name = lambda part: sorted(glob.glob(os.path.join(folder, f"libggml-{part}.so*")))[0]  # noqa: E731
        self.base = ctypes.CDLL(name("base"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(name("cpu"))
        self.cpu.ggml_cpu_init()
        self.backend = backend
        self.base.ggml_version.restype = ctypes.c_char_p
        self.version = f"ggml {self.base.ggml_version().decode()}" + (" backend" if backend else "")

    def has(self, name):
        return hasattr(self.base, f"dequantize_row_{name.lower()}")

    def encode(self, name, values):
        blocks = np.zeros((len(values), BLOCKS[name][1]), np.uint8)
        rows = self.cpu if self.backend else self.base
        suffix = "" if self.backend else "_ref"
        function = getattr(rows, f"quantize_row_{name.lower()}{suffix}")
        values = np.ascontiguousarray(values)
        function(values.ctypes.data_as(ctypes.c_void_p), blocks.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.size))
        return blocks

    def decode(self, name, blocks):
        values = np.zeros((len(blocks), BLOCKS[name][0]), np.float32)
        function = getattr(self.base, f"dequantize_row_{name.lower()}")
        blocks = np.ascontiguousarray(blocks)
        function(blocks.ctypes.data_as(ctypes.c_void_p), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.size))
        return values

    def dot(self, name, blocks, others):
        result = ctypes.c_float()
        function = getattr(self.cpu, f"ggml_vec_dot_{name.lower()}_q8_0" + ("" if self.backend else "_generic"))
        pointer = lambda array: np.ascontiguousarray(array).ctypes.data_as(ctypes.c_void_p)  # noqa: E731
        count = ctypes.c_int(blocks.shape[0] * BLOCKS[name][0])
        zero = ctypes.c_size_t(0)
        function(count, ctypes.byref(result), zero, pointer(blocks), zero, pointer(others), zero, ctypes.c_int(1))
        return result.value


class Tally:
    def __init__(self, library, what):
        self.library, self.what, self.judged, self.wrong, self.first = library, what, 0, 0, None

    def add(self, wrong, describe, judged=None):
        self.judged += len(wrong) if judged is None else judged
        self.wrong += int(np.count_nonzero(wrong))
        if self.first is None and np.any(wrong):
            self.first = describe(np.flatnonzero(wrong)[0])

    def __str__(self):
        note = f"; first: {self.first}" if self.wrong else ""
        return f"{self.library:20} {self.what:24} {self.judged:10,} judged, {self.wrong:8,} wrong{note}"


def judge_decode(library, name):
    blocks = every_code(name)
    tally = Tally(library.version, f"{name} decode")
    with np.errstate(over="ignore"):
        right = decoded(name, blocks).astype(np.float32)
    found = library.decode(name, blocks)
    wrong = (right != found).any(axis=1)
    tally.add(wrong, lambda i: f"block {blocks[i].tolist()}: {found[i].tolist()}")
    return [tally]


def right_scales(name, values):
    """The scale codes that the definition gives, as (lowest, highest) where a tie leaves a choice."""
    groups = values.reshape(len(values), -1, 16) if name == "NVFP4" else values[:, None]
    largest = np.abs(groups).max(axis=2)
    if name == "MXFP4":
        # floor(log2(largest)) - 2, OCP's rule.
        code = np.clip(np.frexp(largest.astype(np.float64))[1] - 1 - 2 + 127, 0, 254)
        code = np.where(largest == 0, -1, code)
        return code, code
    if name == "NVFP4":
        quotient = (largest / np.float32(6)).astype(np.float64)
        kind, even = "float8_e4m3fn", marlinspike.encode(quotient, "float8_e4m3fn", "nearest_even", "saturate")
        away = marlinspike.encode(quotient, kind, "nearest_away", "saturate")
        return tuple(np.sort(np.stack([c.view(np.uint8).astype(int) for c in (even, away)]), axis=0))
    index = np.abs(groups).argmax(axis=2, keepdims=True)
    signed = np.take_along_axis(groups, index, axis=2)[..., 0]
    step = signed / np.float32(-8) if name == "Q4_0" else largest / np.float32(127)
    code = np.asarray(marlinspike.encode(step, "float16")).view(np.uint16).astype(int)
    return code, code


def judge_encode(library, name, count, seed):
    values = drawn(name, count, seed)
    try:
        blocks = library.encode(name, values)
    except NotImplementedError:
        return []
    scales, codes = scale_codes(name, blocks)
    low, high = right_scales(name, values)
    tallies = [Tally(library.version, f"{name} scales"), Tally(library.version, f"{name} elements")]
    found = scales.astype(int)
    wrong = ((found < low) | (found > high)) & (low >= 0)
    show = lambda i: f"largest value {np.abs(values[i]).max()!r}: {found[i].tolist()}, expected {low[i].tolist()}"  # noqa: E731
    tallies[0].add(wrong.any(axis=1), show)
    if name in ("MXFP4", "NVFP4"):
        # The nearest values of the scale that was written.
        step = scale_values(name, scales)[..., None]
        x = values.reshape(codes.shape).astype(np.float64)
        error = np.abs(step * element_values(name, codes) - x)
        best = np.abs(step[..., None] * SIGNED_E2M1 - x[..., None]).min(axis=-1)
        off = error > best
    else:
        # The step before it is rounded to f16, as ggml takes it.
        largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
        step = largest / np.float32(-8) if name == "Q4_0" else np.abs(largest) / np.float32(127)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x = np.where(step == 0, 0, values.astype(np.float64) / step.astype(np.float64))
        q, (least, most) = element_values(name, codes)[:, 0], (-8, 7) if name == "Q4_0" else (-127, 127)
        slack = 2.0**-15 if name == "Q8_0" else 2.0**-20
        off = np.abs(q - np.clip(x, least, most)) > 0.5 + slack
    off = off.reshape(len(values), -1)
    tallies[1].add(off.any(axis=1), lambda i: f"values {values[i][off[i]][:3].tolist()} with scales {found[i].tolist()}")
    return tallies


def judge_dot(library, name, count, seed):
    random, tally = np.random.default_rng(seed), Tally(library.version, f"{name} . Q8_0")
    for _ in range(count):
        k = 64 * int(random.integers(1, 9))
        x, y = (random.standard_normal((1, k)).astype(np.float32) for _ in range(2))
        blocks = library.encode(name, x.reshape(-1, BLOCKS[name][0]))
        others = library.encode("Q8_0", y.reshape(-1, 32))
        terms = decoded(name, blocks).ravel() * decoded("Q8_0", others).ravel()
        found = library.dot(name, blocks, others)
        bound = (len(others) + 8) * 2.0**-24 * np.abs(terms).sum()
        tally.add(np.array([not abs(found - terms.sum()) <= bound]), lambda _: f"K {k}: {found}, expected {terms.sum()}")
    return [tally]


def run(library, count=20000, seed=16):
    tallies = []
    for name in BLOCKS:
        if not library.has(name):
            continue
        tallies += judge_decode(library, name)
        tallies += judge_encode(library, name, count, seed)
        if hasattr(library, "dot"):
            tallies += judge_dot(library, name, count, seed)
    return tallies


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", metavar="FOLDER", help="folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("--cases", type=int, default=20000)
    options = parser.parse_args(arguments)
    folder, spec = options.ggml, importlib.util.find_spec("llama_cpp")
    if folder is None and spec:
        folder = os.path.join(os.path.dirname(spec.origin), "lib")
    libraries = [Gguf] if importlib.util.find_spec("gguf") else []
    if folder:
        libraries += [lambda: Ggml(folder), lambda: Ggml(folder, backend=True)]
    if not libraries:
        print("neither gguf nor ggml: pip install gguf, or --ggml FOLDER", file=sys.stderr)
        return 2
    found = 0
    for make in libraries:
        for tally in run(make(), options.cases):
            print(tally, flush=True)
            found += tally.wrong
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
