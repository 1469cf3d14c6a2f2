"""Layouts of weights and scales, and quantizers of activations."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from .. import _functions as host
from .._core import Error
from ._tensors import HALVES, aligned, expect, memory, name_of, native, on, optional_memory

_WORDS = (torch.int32,)


class _Repack:
    """The checked arguments of a repack; those of AWQ have no permutation."""

    #: Whether the words of the checkpoint hold columns, in AWQ's order.
    columns = False

    def __init__(
        self,
        b_q_weight: torch.Tensor,
        perm: Optional[torch.Tensor],
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
    ) -> None:
        self.words = b_q_weight
        self.perm = None if perm is None or perm.numel() == 0 else perm
        self.sizes = (size_k, size_n, num_bits, is_a_8bit)

    def output(self) -> torch.Tensor:
        size_k, size_n, num_bits, is_a_8bit = self.sizes
        words = self.words
        stack = () if self.columns else tuple(words.shape[:-2])
        if len(stack) > 1:
            raise Error(f"`b_q_weight`: found shape {list(words.shape)}, expected 2 or 3 dimensions")
        if self.perm is not None:
            expect("perm", self.perm, _WORDS, [*stack, size_k], words.device)
        if num_bits not in (4, 8):
            raise Error(f"num_bits: found {num_bits}, expected 4 or 8")
        tile_k = 32 if is_a_8bit else 16
        if size_k < 1 or size_k % tile_k or size_n < 1 or size_n % 64:
            raise Error(
                f"size_k, size_n: found {size_k}, {size_n}, expected multiples of {tile_k} and 64"
            )
        shape = (size_k, size_n * num_bits // 32) if self.columns else (size_k * num_bits // 32, size_n)
        expect("b_q_weight", words, _WORDS, (*stack, *shape), words.device)
        return words.new_empty((*stack, size_k // 16, size_n * 16 * num_bits // 32))

    def launch(self) -> torch.Tensor:
        out = self.output()
        if out.numel() == 0:
            return out
        if self.perm is not None:
            _check_perm(self.perm, self.sizes[0])
        experts = self.words.shape[0] if self.words.dim() == 3 else 1
        with on(out.device) as place:
            perm = None if self.perm is None else aligned(self.perm)
            words, sizes = aligned(self.words), (experts, *self.sizes)
            order, to = optional_memory("perm", perm), memory("out", out)
            native("cuda_repack")(
                place, self.columns, memory("b_q_weight", words), order, sizes, to
            )
        return out


class _AwqRepack(_Repack):
    columns = True

    def __init__(
        self,
        b_q_weight: torch.Tensor,
        size_k: int,
        size_n: int,
        num_bits: int,
        is_a_8bit: bool = False,
    ) -> None:
        super().__init__(b_q_weight, None, size_k, size_n, num_bits, is_a_8bit)


def _check_perm(perm: torch.Tensor, size_k: int) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise Error("`perm`: found a graph being captured, expected none: its entries are checked")
    low, high = torch.aminmax(perm)
    if int(low) < 0 or int(high) >= size_k:
        raise Error(f"`perm`: found entries from {int(low)} to {int(high)}, expected 0 to {size_k - 1}")


def gptq_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _Repack(*args, **kwargs).output()


def gptq_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _Repack(*args, **kwargs).launch()


def gptq_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _Repack(*args, **kwargs)
    out = call.output()
    if out.numel() == 0:
        return out
    stacked = call.words.dim() == 3
    repack = host.gptq_marlin_moe_repack if stacked else host.gptq_marlin_repack
    return repack(call.words, call.perm, *call.sizes)


def awq_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _AwqRepack(*args, **kwargs).output()


def awq_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _AwqRepack(*args, **kwargs).launch()


def awq_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _AwqRepack(*args, **kwargs)
    call.output()
    return host.awq_marlin_repack(call.words, *call.sizes)


class _Scales:
    """The checked arguments of a permutation of scales."""

    def __init__(
        self, s: torch.Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
    ) -> None:
        if s.dim() not in (2, 3) or s.shape[-1] != size_n:
            raise Error(f"`s`: found shape {list(s.shape)}, expected [groups, {size_n}], or a stack of them")
        if size_n < 1 or size_n % 64:
            raise Error(f"size_n: found {size_n}, expected a multiple of 64")
        self.s, self.size_n = s, size_n
        self.sizes = (size_k, size_n, group_size, is_a_8bit)
        self.is_grouped = not is_a_8bit and group_size != -1 and group_size < size_k

    def output(self) -> torch.Tensor:
        return torch.empty_like(self.s, memory_format=torch.contiguous_format)

    def halves(self) -> torch.Tensor:
        return expect("s", self.s, HALVES, [None] * self.s.dim(), self.s.device)


def scales_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _Scales(*args, **kwargs).output()


def scales_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _Scales(*args, **kwargs)
    s, out = call.halves(), call.output()
    if out.numel() == 0:
        return out
    with on(out.device) as place:
        scales, to = memory("s", aligned(s)), memory("out", out)
        native("cuda_permute_scales")(place, scales, call.size_n, call.is_grouped, to)
    return out


def scales_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = _Scales(*args, **kwargs)
    s, out = call.halves(), call.output()
    if out.numel() == 0:
        return out
    made = host.marlin_permute_scales(s.reshape(-1, call.size_n), *call.sizes)
    return made.reshape(out.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return expect("x", x, HALVES, [None, None], x.device)


def int8_fake(x: torch.Tensor, rule: str = "quotient") -> Tuple[torch.Tensor, torch.Tensor]:
    _rows(x)
    scales = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), scales


def fp8_fake(x: torch.Tensor, scale_ub: Optional[float] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    _rows(x)
    scales = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


def _quantize(
    x: torch.Tensor, made: Tuple[torch.Tensor, torch.Tensor], rule: str, scale_ub: Optional[float]
) -> Tuple[torch.Tensor, torch.Tensor]:
    if x.numel() == 0:
        return made
    with on(x.device) as place:
        of = (memory("x", aligned(x)), memory("codes", made[0]), memory("scales", made[1]))
        columns = int(x.shape[1])
        native("cuda_quantize")(place, name_of(x.dtype), rule, scale_ub, columns, of)
    return made


def int8_cuda(x: torch.Tensor, rule: str = "quotient") -> Tuple[torch.Tensor, torch.Tensor]:
    if rule not in ("quotient", "product"):
        raise Error(f"rule: found {rule}, expected quotient or product")
    return _quantize(x, int8_fake(x), rule, None)


def fp8_cuda(x: torch.Tensor, scale_ub: Optional[float] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    return _quantize(x, fp8_fake(x), "fp8", scale_ub)


def int8_cpu(x: torch.Tensor, rule: str = "quotient") -> Tuple[torch.Tensor, torch.Tensor]:
    made = int8_fake(x)
    return host.per_token_quant_int8(x, rule) if x.numel() else made


def fp8_cpu(x: torch.Tensor, scale_ub: Optional[float] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    made = fp8_fake(x)
    if not x.numel():
        return made
    return host.scaled_fp8_quant(x, scale_ub=scale_ub, use_per_token_if_dynamic=True)
