"""Row-parallel products over ranks: a rank's part and the sum of all parts, version 2 of the canonical schedule."""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

import torch

from .. import _core
from .._arrays import like, typed
from .._core import Error
from .._functions import _packed
from ._products import Sizes, Weight, _Dense, _has, _no_nvfp4, _null
from ._tensors import HALVES, aligned, expect, memory, name_of, native, on, optional_memory, scratch

_F32 = (torch.float32,)


def _host_parts(weight: Weight) -> Any:
    _no_nvfp4(weight)
    q, s, z, bias, _ = weight.parts
    return _packed(q, s, z, None, None, bias, weight.quant_type, None)


class _Part(_Dense):
    """The checked arguments of a rank's part of a product."""

    def __init__(
        self, a: torch.Tensor, size_k: int, rank: int, ranks: int, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(a, *args, **kwargs)
        rows = self.weight.size_k
        if rows * ranks != size_k and 0 <= rank < ranks and size_k % ranks == 0:
            found = f"{size_k}, expected {rows * ranks}: {ranks} ranks of {rows} rows"
            raise Error(f"size_k: found {found}")
        self.split = (size_k, rank, ranks)

    def shape(self) -> Tuple[int, int]:
        return self.a.shape[0], self.weight.size_n


@functools.lru_cache(maxsize=4096)
def _measure(
    place: Tuple[int, int],
    dtype: str,
    sizes: Sizes,
    has: Tuple[bool, ...],
    split: Tuple[int, int, int],
    rows: int,
) -> Tuple[int, int]:
    x, sums = (0, rows * sizes[3]), (0, rows * sizes[4])
    return native("cuda_gemm_part")(place, dtype, _null(sizes, has), split, x, sums, None, None)


def part_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    part = _Part(*args, **kwargs)
    return part.a.new_empty(part.shape(), dtype=torch.float32)


def part_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    part = _Part(*args, **kwargs)
    a, weight = aligned(part.a), part.weight
    sums = torch.empty(part.shape(), dtype=torch.float32, device=a.device)
    if a.shape[0] == 0:
        return sums
    dtype = name_of(a.dtype)
    with on(a.device) as place:
        sizes, has = weight.sizes(), _has(weight)
        size, flags = _measure((place[0], 0), dtype, sizes, has, part.split, int(a.shape[0]))
        room, ready = scratch(size, flags, a.device)
        native("cuda_gemm_part")(
            place,
            dtype,
            weight.native(),
            part.split,
            memory("a", a),
            memory("sums", sums),
            (room.data_ptr(), size),
            optional_memory("flags", ready),
        )
    return sums


def part_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    part = _Part(*args, **kwargs)
    if part.a.shape[0] == 0:
        return part_fake(*args, **kwargs)
    packed, weight = _host_parts(part.weight), part.weight
    made = _core.marlin_gemm_part(
        typed(part.a, "a"), packed, weight.quant_type, int(weight.size_n), part.split
    )
    return like(part.a, made)


class _Sum:
    """The checked arguments of the sum over ranks."""

    def __init__(
        self,
        sums: torch.Tensor,
        size_k: int,
        dtype: torch.dtype,
        b_q_weight: torch.Tensor,
        b_scales: torch.Tensor,
        b_zeros: Optional[torch.Tensor] = None,
        b_bias: Optional[torch.Tensor] = None,
        global_scale: Optional[torch.Tensor] = None,
        b_q_type: str = "uint4b8",
    ) -> None:
        if dtype not in HALVES:
            raise Error(f"dtype: found {dtype}, expected torch.float16 or torch.bfloat16")
        expect("sums", sums, _F32, [None, None, None], sums.device)
        # Of the type of y, on the device of the sums.
        y = sums.new_empty((0, 0), dtype=dtype)
        parts = (b_q_weight, b_scales, b_zeros, b_bias, global_scale)
        self.weight = Weight("b", *parts, b_q_type, 0, y, 2)
        expect("sums", sums, _F32, [None, None, self.weight.size_n], sums.device)
        ranks = sums.shape[0]
        if self.weight.size_k * ranks != size_k:
            rows = int(self.weight.size_k)
            found = f"{size_k}, expected {rows * ranks}: {ranks} ranks of {rows} rows"
            raise Error(f"size_k: found {found}")
        self.sums, self.dtype, self.split = sums, dtype, (size_k, 0, int(ranks))

    def y(self) -> torch.Tensor:
        return self.sums.new_empty(self.sums.shape[1:], dtype=self.dtype)


def add_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _Sum(*args, **kwargs).y()


def add_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    added = _Sum(*args, **kwargs)
    sums, y = aligned(added.sums), added.y()
    if y.shape[0] == 0:
        return y
    with on(y.device) as place:
        native("cuda_add_ranks")(
            place,
            name_of(y.dtype),
            added.weight.native(),
            added.split,
            memory("sums", sums),
            memory("y", y),
        )
    return y


def add_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    added = _Sum(*args, **kwargs)
    if added.sums.shape[1] == 0:
        return added.y()
    weight, size_k = added.weight, added.split[0]
    made = _core.add_ranks(
        typed(added.sums, "sums"), _host_parts(weight), weight.quant_type, name_of(added.dtype), size_k
    )
    return like(added.sums, made)
