"""Layouts of weights and scales, and quantizers of activations."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from .. import _functions as host
from .._core import Error
from ._tensors import HALVES, aligned, expect, memory, name_of, native, on, optional_memory

_WORDS = (torch.int32,)


def _packed(
    b_q_weight: torch.Tensor, shape: Tuple[int, ...], size_k: int, size_n: int, num_bits: int, is_a_8bit: bool
) -> torch.Tensor:
    if num_bits not in (4, 8):
        raise Error(f"num_bits: found {num_bits}, expected 4 or 8")
    tile_k = 32 if is_a_8bit else 16
    if size_k < 1 or size_k % tile_k or size_n < 1 or size_n % 64:
        raise Error(
            f"size_k, size_n: found {size_k}, {size_n}, expected multiples of {tile_k} and 64"
        )
    expect("b_q_weight", b_q_weight, _WORDS, shape, b_q_weight.device)
    out = (*shape[:-2], size_k // 16, size_n * 16 * num_bits // 32)
    return b_q_weight.new_empty(out)


def gptq_fake(
    b_q_weight: torch.Tensor,
    perm: Optional[torch.Tensor],
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    rows = size_k * num_bits // 32
    stack = tuple(b_q_weight.shape[:-2])
    if len(stack) > 1:
        raise Error(f"`b_q_weight`: found shape {list(b_q_weight.shape)}, expected 2 or 3 dimensions")
    if perm is not None:
        expect("perm", perm, _WORDS, [*stack, size_k], b_q_weight.device)
    return _packed(b_q_weight, (*stack, rows, size_n), size_k, size_n, num_bits, is_a_8bit)


def _check_perm(perm: torch.Tensor, size_k: int) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise Error("`perm`: found a graph being captured, expected none: its entries are checked")
    low, high = torch.aminmax(perm)
    if int(low) < 0 or int(high) >= size_k:
        raise Error(f"`perm`: found entries from {int(low)} to {int(high)}, expected 0 to {size_k - 1}")


def gptq_cuda(
    b_q_weight: torch.Tensor,
    perm: Optional[torch.Tensor],
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    perm = None if perm is None or perm.numel() == 0 else perm
    out = gptq_fake(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)
    if out.numel() == 0:
        return out
    if perm is not None:
        _check_perm(perm, size_k)
        perm = aligned(perm)
    experts = b_q_weight.shape[0] if b_q_weight.dim() == 3 else 1
    with on(out.device) as place:
        words, sizes = aligned(b_q_weight), (experts, size_k, size_n, num_bits, is_a_8bit)
        order, to = optional_memory("perm", perm), memory("out", out)
        native("cuda_repack")(place, False, memory("b_q_weight", words), order, sizes, to)
    return out


def gptq_cpu(
    b_q_weight: torch.Tensor,
    perm: Optional[torch.Tensor],
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    perm = None if perm is None or perm.numel() == 0 else perm
    out = gptq_fake(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)
    if out.numel() == 0:
        return out
    if b_q_weight.dim() == 3:
        return host.gptq_marlin_moe_repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)
    return host.gptq_marlin_repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)


def awq_fake(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    shape = (size_k, size_n * num_bits // 32)
    return _packed(b_q_weight, shape, size_k, size_n, num_bits, is_a_8bit)


def awq_cuda(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    out = awq_fake(b_q_weight, size_k, size_n, num_bits, is_a_8bit)
    with on(out.device) as place:
        words, sizes = aligned(b_q_weight), (1, size_k, size_n, num_bits, is_a_8bit)
        to = memory("out", out)
        native("cuda_repack")(place, True, memory("b_q_weight", words), None, sizes, to)
    return out


def awq_cpu(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    awq_fake(b_q_weight, size_k, size_n, num_bits, is_a_8bit)
    return host.awq_marlin_repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit)


def scales_fake(
    s: torch.Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
) -> torch.Tensor:
    if s.dim() not in (2, 3) or s.shape[-1] != size_n:
        raise Error(f"`s`: found shape {list(s.shape)}, expected [groups, {size_n}], or a stack of them")
    if size_n < 1 or size_n % 64:
        raise Error(f"size_n: found {size_n}, expected a multiple of 64")
    return torch.empty_like(s, memory_format=torch.contiguous_format)


def scales_cuda(
    s: torch.Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
) -> torch.Tensor:
    out = scales_fake(s, size_k, size_n, group_size, is_a_8bit)
    expect("s", s, HALVES, [None] * s.dim(), s.device)
    if out.numel() == 0:
        return out
    is_grouped = not is_a_8bit and group_size != -1 and group_size < size_k
    with on(out.device) as place:
        scales, to = memory("s", aligned(s)), memory("out", out)
        native("cuda_permute_scales")(place, scales, size_n, is_grouped, to)
    return out


def scales_cpu(
    s: torch.Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
) -> torch.Tensor:
    out = scales_fake(s, size_k, size_n, group_size, is_a_8bit)
    expect("s", s, HALVES, [None] * s.dim(), s.device)
    if out.numel() == 0:
        return out
    flat = s.reshape(-1, size_n)
    made = host.marlin_permute_scales(flat, size_k, size_n, group_size, is_a_8bit)
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
