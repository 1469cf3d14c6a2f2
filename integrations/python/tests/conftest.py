"""Independent numpy code: packing by loops over positions, products in float64."""

import numpy as np
import pytest


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """GPTQ: codes [K, N], consecutive k in a word, the first in the lowest bits."""
    pack = 32 // bits
    size_k, size_n = codes.shape
    words = np.zeros((size_k // pack, size_n), np.uint32)
    for i in range(pack):
        words |= codes[i::pack].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """AWQ, 4 bits: codes [K, N]; field i of a word holds column order[i] of its eight."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        words |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def marlin_weight_perm(bits: int) -> np.ndarray:
    """The order of a 16 x 64 tile's values in Marlin's words, written as its authors' script has it."""
    perm = []
    for i in range(32):
        column = i // 4
        one = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                one.append(16 * row + column + 8 * block)
        for j in range(4):
            perm.extend(p + 256 * j for p in one)
    interleave = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    return np.array(perm).reshape(-1, len(interleave))[:, interleave].ravel()


def marlin_pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [K, N] as Marlin's words [K / 16, N * 16 / pack]."""
    size_k, size_n = codes.shape
    pack = 32 // bits
    tiles = codes.reshape(size_k // 16, 16, size_n // 16, 16).transpose(0, 2, 1, 3)
    flat = tiles.reshape(size_k // 16, size_n * 16)
    perm = marlin_weight_perm(bits)
    flat = flat.reshape(-1, perm.size)[:, perm].reshape(flat.shape)
    words = np.zeros((flat.shape[0], flat.shape[1] // pack), np.uint32)
    for i in range(pack):
        words |= flat[:, i::pack].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.fixture
def rng():
    return np.random.default_rng(20)


class Linear:
    """A GPTQ matrix with its activations, and products by numpy."""

    def __init__(self, rng, size_m=5, size_n=128, size_k=256, group_size=64):
        self.shape = (size_m, size_n, size_k)
        self.group_size = group_size
        self.codes = rng.integers(0, 16, (size_k, size_n))
        groups = 1 if group_size == -1 else size_k // group_size
        self.scales = rng.uniform(0.5, 1.5, (groups, size_n)).astype(np.float16) / np.float16(64)
        self.x = rng.standard_normal((size_m, size_k)).astype(np.float16)
        self.config = {
            "checkpoint_format": "gptq",
            "weight_type": "uint4b8",
            "dtype": "float16",
            "group_size": group_size,
            "size_m": size_m,
            "size_n": size_n,
            "size_k": size_k,
        }
        self.inputs = {"qweight": pack_rows(self.codes, 4), "scales": self.scales, "x": self.x}

    def product(self, codes=None, scales=None, zero=8):
        codes = self.codes if codes is None else codes
        scales = self.scales if scales is None else scales
        size_k = self.shape[2]
        w = (codes - zero) * np.repeat(scales.astype(np.float64), size_k // len(scales), axis=0)
        return (self.x.astype(np.float64) @ w).astype(np.float16)


@pytest.fixture
def linear(rng):
    return Linear(rng)
