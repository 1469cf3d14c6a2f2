"""The int4 path on the CPU: torch's `_dyn_quant_*` operators, with the same bits on every processor."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .. import _core
from .._arrays import like, typed
from ._tensors import expect

_CPU = torch.device("cpu")


class _Pack:
    """The checked arguments of a packing."""

    def __init__(
        self,
        weights: torch.Tensor,
        scales_zeros: torch.Tensor,
        bias: Optional[torch.Tensor],
        block_size: int,
        in_features: int,
        out_features: int,
    ) -> None:
        expect("weights", weights, (torch.uint8,), [out_features, in_features // 2], weights.device)
        channel_wise = block_size == in_features
        kind = torch.float32 if channel_wise else torch.bfloat16
        groups = 1 if channel_wise else in_features // max(block_size, 1)
        shape = [out_features] if scales_zeros.dim() == 1 and channel_wise else [out_features, groups]
        expect("scales_zeros", scales_zeros, (kind,), shape, weights.device)
        if bias is not None:
            expect("bias", bias, (torch.float32,), [out_features], weights.device)
        self.tensors = (weights, scales_zeros, bias)
        self.sizes = (block_size, in_features, out_features)
        self.length = _core.dyn_quant_packed_len(*self.sizes)


def pack_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _Pack(*args, **kwargs)
    return call.tensors[0].new_empty((call.length,))


def pack_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _Pack(*args, **kwargs)
    names = ("weights", "scales_zeros", "bias")
    arrays = [None if t is None else typed(t, name) for t, name in zip(call.tensors, names)]
    return like(call.tensors[0], _core.dyn_quant_pack(*arrays, *call.sizes))


class _Matmul:
    """The checked arguments of a product."""

    def __init__(
        self,
        inp: torch.Tensor,
        packed_weights: torch.Tensor,
        block_size: int,
        in_features: int,
        out_features: int,
    ) -> None:
        self.inp, self.packed = inp, packed_weights
        self.sizes = (block_size, in_features, out_features)
        expect("inp", inp, (torch.float32, torch.bfloat16), [None, in_features], inp.device)
        length = _core.dyn_quant_packed_len(*self.sizes)
        expect("packed_weights", packed_weights, (torch.uint8,), [length], inp.device)

    def output(self) -> torch.Tensor:
        return self.inp.new_empty((self.inp.shape[0], self.sizes[2]))


def matmul_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _Matmul(*args, **kwargs).output()


def matmul_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _Matmul(*args, **kwargs)
    y = call.output()
    if y.numel() == 0:
        return y
    arrays = (typed(call.inp, "inp"), typed(call.packed, "packed_weights"))
    return like(call.inp, _core.dyn_quant_matmul(*arrays, *call.sizes))


def _pack_aten(
    weights: torch.Tensor,
    scales_zeros: torch.Tensor,
    bias: Optional[torch.Tensor],
    block_size: int,
    in_features: int,
    out_features: int,
) -> torch.Tensor:
    """As torch's operator, which also takes a 16-bit bias and scales of any shape."""
    groups = 1 if block_size == in_features else in_features // max(block_size, 1)
    bias = None if bias is None else bias.float()
    scales = scales_zeros.reshape(out_features, groups)
    return pack_cpu(weights, scales, bias, block_size, in_features, out_features)


_aten: Optional[torch.library.Library] = None


def install_aten() -> None:
    """Replaces the CPU kernels of ``aten::_dyn_quant_pack_4bit_weight`` and ``aten::_dyn_quant_matmul_4bit``.

    Both at once, for the packed bytes are this package's own: pack weights again that torch has packed. They stay
    replaced until the process ends. A second call changes nothing.
    """
    global _aten
    if _aten is not None:
        return
    aten = torch.library.Library("aten", "IMPL")
    names = {"_dyn_quant_pack_4bit_weight": _pack_aten, "_dyn_quant_matmul_4bit": matmul_cpu}
    for name, kernel in names.items():
        aten.impl(name, kernel, "CPU", allow_override=True)
    _aten = aten
