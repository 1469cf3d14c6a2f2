"""Routing, alignment, activation and sum."""

from __future__ import annotations

import functools
from typing import Any, Optional, Tuple

import torch

from .. import _core
from .. import _functions as host
from .._arrays import like, typed
from .._core import Error
from ._products import tables
from ._tensors import HALVES, aligned, expect, memory, name_of, native, on, optional_memory, scratch

_LOGITS = (torch.float32, *HALVES)


class _Router:
    """The checked arguments of a router."""

    def __init__(
        self,
        gating_output: torch.Tensor,
        topk: int,
        renormalize: bool,
        scoring_func: str = "softmax",
        num_expert_group: int = 0,
        topk_group: int = 0,
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Optional[torch.Tensor] = None,
    ) -> None:
        logits, bias, groups = gating_output, e_score_correction_bias, num_expert_group
        expect("gating_output", logits, _LOGITS, [None, None], logits.device)
        experts = logits.shape[1]
        if not 1 <= topk <= experts:
            raise Error(f"topk: found {topk}, expected 1 to {experts}, the columns of `gating_output`")
        if groups < 0 or (groups and (experts % groups or not 1 <= topk_group <= groups)):
            raise Error(f"num_expert_group: found {groups}, {topk_group} kept, for {experts} experts")
        if bias is not None:
            expect("e_score_correction_bias", bias, (torch.float32,), [experts], logits.device)
        self.logits, self.topk, self.bias = logits, topk, bias
        kept = (groups, topk_group) if groups else None
        self.rule = (topk, renormalize, scoring_func, kept, routed_scaling_factor)

    def outputs(self) -> Tuple[torch.Tensor, torch.Tensor]:
        shape = (self.logits.shape[0], self.topk)
        return (
            self.logits.new_empty(shape, dtype=torch.float32),
            self.logits.new_empty(shape, dtype=torch.int32),
        )


def topk_fake(*args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    return _Router(*args, **kwargs).outputs()


def topk_cuda(*args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    router = _Router(*args, **kwargs)
    made = router.outputs()
    weights, ids = made
    if router.logits.shape[0] == 0:
        return made
    logits = aligned(router.logits.float())
    with on(logits.device) as place:
        native("cuda_topk")(
            place,
            memory("gating_output", logits),
            int(logits.shape[1]),
            name_of(router.logits.dtype),
            router.rule,
            optional_memory("e_score_correction_bias", router.bias),
            (memory("topk_weights", weights), memory("topk_ids", ids)),
        )
    return made


def topk_cpu(*args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    router = _Router(*args, **kwargs)
    logits, bias = router.logits, router.bias
    bias = None if bias is None else typed(bias, "e_score_correction_bias")
    made = _core.topk(typed(logits, "gating_output"), *router.rule, bias)
    return like(logits, made[0]), like(logits, made[1])


def _room(entries: int, block_size: int, runs: int) -> Tuple[int, int]:
    """The most sorted entries and blocks: each run ends with at most one partial block."""
    most = entries + min(runs, entries) * (block_size - 1)
    most = (most + block_size - 1) // block_size * block_size
    return most, most // block_size


class _Alignment:
    """The checked arguments of an alignment."""

    def __init__(
        self,
        topk_ids: torch.Tensor,
        block_size: int,
        num_experts: int,
        expert_map: Optional[torch.Tensor] = None,
    ) -> None:
        expect("topk_ids", topk_ids, (torch.int32,), [None, None], topk_ids.device)
        if expert_map is not None:
            expect("expert_map", expert_map, (torch.int32,), [num_experts], topk_ids.device)
        if block_size < 1 or num_experts < 1:
            raise Error(f"block_size, num_experts: found {block_size}, {num_experts}, expected 1 or more")
        self.ids, self.block_size = topk_ids, block_size
        self.num_experts, self.expert_map = num_experts, expert_map

    def outputs(self) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, size = self.ids, self.block_size
        most = ids.shape[0] * ids.shape[1] + self.num_experts * (size - 1)
        most = (most + size - 1) // size * size
        new = functools.partial(ids.new_empty, dtype=torch.int32)
        return new((most,)), new((most // size,)), new((1,))


def align_fake(*args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _Alignment(*args, **kwargs).outputs()


def align_cuda(*args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Alignment(*args, **kwargs)
    made = call.outputs()
    sorted_ids, experts, total = made
    entries = call.ids.numel()
    sorted_ids.fill_(entries)
    experts.zero_()
    if entries == 0:
        total.zero_()
        return made
    most, blocks = _room(entries, call.block_size, call.num_experts)
    device = call.ids.device
    with on(device) as place:
        run_of, expert_of, here = tables(call.num_experts, call.num_experts, call.expert_map, device)
        table = (memory("run_of", run_of), optional_memory("expert_map", expert_of), here)
        ids = memory("topk_ids", aligned(call.ids))
        align = native("cuda_align")
        size, _, _ = align((place[0], 0), ids, call.block_size, table, None, None)
        room, _ = scratch(size, 0, device)
        outputs = (
            (memory("sorted_token_ids", sorted_ids)[0], most),
            (memory("expert_ids", experts)[0], blocks),
            memory("num_tokens_post_padded", total),
        )
        align(place, ids, call.block_size, table, (room.data_ptr(), size), outputs)
    return made


def align_cpu(*args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Alignment(*args, **kwargs)
    made = call.outputs()
    ids, experts, total = host.moe_align_block_size(
        call.ids, call.block_size, call.num_experts, call.expert_map, call.expert_map is not None
    )
    made[0].fill_(call.ids.numel())[: len(ids)] = ids
    made[1].zero_()[: len(experts)] = experts
    made[2].copy_(total)
    return made


def _halves(name: str, x: torch.Tensor, dims: int) -> torch.Tensor:
    return expect(name, x, HALVES, [None] * dims, x.device)


def _columns(width: int, activation: str) -> int:
    return width if activation.endswith("_no_mul") else width // 2


def activation_fake(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    _halves("gate_up", gate_up, 2)
    width = gate_up.shape[1]
    if not activation.endswith("_no_mul") and width % 2:
        raise Error(f"`gate_up`: found {width} columns, expected gate and up of one size")
    return gate_up.new_empty((gate_up.shape[0], _columns(width, activation)))


def activation_cuda(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    y = activation_fake(gate_up, activation)
    if y.numel() == 0:
        return y
    with on(gate_up.device) as place:
        x, out = memory("gate_up", aligned(gate_up)), memory("y", y)
        dtype = name_of(gate_up.dtype)
        native("cuda_activation")(place, dtype, activation, x, int(y.shape[1]), out)
    return y


def activation_cpu(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    y = activation_fake(gate_up, activation)
    if y.numel() == 0:
        return y
    return like(gate_up, _core.moe_activation(typed(gate_up, "gate_up"), activation))


def sum_fake(input: torch.Tensor) -> torch.Tensor:
    _halves("input", input, 3)
    return input.new_empty((input.shape[0], input.shape[2]))


def sum_cuda(input: torch.Tensor) -> torch.Tensor:
    y = sum_fake(input)
    if y.numel() == 0 or input.shape[1] == 0:
        return y.zero_()
    with on(input.device) as place:
        x, out = memory("input", aligned(input)), memory("y", y)
        sizes = (int(input.shape[1]), int(input.shape[2]))
        native("cuda_sum")(place, name_of(input.dtype), x, sizes, out)
    return y


def sum_cpu(input: torch.Tensor) -> torch.Tensor:
    y = sum_fake(input)
    if y.numel() == 0 or input.shape[1] == 0:
        return y.zero_()
    return like(input, _core.moe_sum(typed(input, "input")))
