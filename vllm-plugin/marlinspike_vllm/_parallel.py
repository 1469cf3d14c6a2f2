"""Row-parallel layers and experts over ranks with the bits of one GPU, where ``MARLINSPIKE_PARALLEL_INVARIANT=1`` asks
for them.

Only exact collectives are used: a gather, which moves bits, and a sum of rows of which all but one are zeros. What
rounds is added in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Optional, Sequence, Tuple

import torch

SWITCH = "MARLINSPIKE_PARALLEL_INVARIANT"
#: The model's K, the rank, the number of ranks.
Split = Tuple[int, int, int]


def is_parallel_invariant() -> bool:
    return os.environ.get(SWITCH, "0") == "1"


def refuse(what: str, reason: str) -> None:
    raise RuntimeError(f"{SWITCH}=1: the bits of {what} depend on the number of ranks: {reason}")


def split_of(layer: Any) -> Optional[Split]:
    """The part of k that a row-parallel layer has; None for other layers, and without the switch."""
    return getattr(layer, "_marlinspike_split", None)


def mark(layer: Any) -> None:
    """Notes the part of k of a layer that this plugin computes. Called once, after loading."""
    names = [cls.__name__ for cls in type(layer).__mro__]
    if is_parallel_invariant() and "RowParallelLinear" in names:
        layer._marlinspike_split = (layer.input_size, layer.tp_rank, layer.tp_size)


def sum_over_ranks(
    x: torch.Tensor,
    split: Split,
    q: torch.Tensor,
    s: torch.Tensor,
    z: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    quant_type: str,
) -> torch.Tensor:
    """The product of all ranks' x ``[M, K / ranks]`` and weights, on every rank."""
    from vllm.distributed import tensor_model_parallel_all_gather

    size_k, rank, ranks = split
    ops = torch.ops.marlinspike
    sums = ops.marlin_gemm_part(x, size_k, rank, ranks, q, s, z, bias, None, quant_type)
    if ranks > 1:
        sums = tensor_model_parallel_all_gather(sums, 0)
    sums = sums.reshape(ranks, x.shape[0], -1)
    return ops.add_ranks(sums, size_k, x.dtype, q, s, z, bias, None, quant_type)


def row_parallel_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``RowParallelLinear.forward``: the kernel returns the sum over ranks, with the bias."""

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        if split_of(self) is None:
            name = getattr(self, "prefix", "a row-parallel layer")
            refuse(name, f"{type(self.quant_method).__name__} computes it, not marlinspike")
        if not self.reduce_results:
            refuse(getattr(self, "prefix", "a row-parallel layer"), "others add its sums")
        if self.input_is_parallel or self.tp_size == 1:
            x = input_
        else:
            x = input_.chunk(self.tp_size, dim=-1)[self.tp_rank].contiguous()
        output = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    return forward


def expert_ranks(expert_map: Optional[torch.Tensor]) -> int:
    """The ranks that the experts are divided over; an error where K is divided, or tokens."""
    from vllm.distributed import get_dp_group, get_pcp_group, get_tensor_model_parallel_world_size

    if get_dp_group().world_size > 1 or get_pcp_group().world_size > 1:
        refuse("experts", "tokens are divided over ranks (data or context parallel)")
    ranks = get_tensor_model_parallel_world_size()
    if ranks > 1 and expert_map is None:
        refuse("experts", "each is divided over ranks: start vLLM with --enable-expert-parallel")
    return ranks


def check_owners(expert_map: torch.Tensor, local: int) -> None:
    """An error unless each expert is on one rank. Looked at once: later steps may be captured in graphs."""
    if getattr(expert_map, "_marlinspike_is_checked", False):
        return
    if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    from vllm.distributed import tensor_model_parallel_all_reduce

    here = (expert_map >= 0) & (expert_map < local)
    owners = tensor_model_parallel_all_reduce(here.to(torch.float32))
    for expert, ranks in enumerate(owners.tolist()):
        if ranks != 1:
            refuse("experts", f"found expert {expert} on {int(ranks)} ranks, expected 1")
    expert_map._marlinspike_is_checked = True  # type: ignore[attr-defined]


def compute_experts(
    x: torch.Tensor,
    weights: Sequence[Any],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    quant_type: str,
    apply_router_weight_on_input: bool,
    global_num_experts: int,
    activation: str,
    expert_map: Optional[torch.Tensor],
) -> torch.Tensor:
    """A layer of experts; with the switch, the sum over all ranks' experts."""
    ops = torch.ops.marlinspike
    rest = (quant_type, apply_router_weight_on_input, global_num_experts, activation, expert_map)
    if not is_parallel_invariant() or expert_ranks(expert_map) == 1:
        return ops.fused_marlin_moe(x, *weights, topk_weights, topk_ids, *rest)
    assert expert_map is not None
    check_owners(expert_map, weights[0].shape[0])
    from vllm.distributed import tensor_model_parallel_all_reduce

    # A row for each slot: zeros where another rank has the expert, so that the sum over ranks is exact. Rows have no
    # -0, which +0 would change: each is a sum that starts at +0.
    size_m, top_k = topk_ids.shape
    slots = x.repeat_interleave(top_k, 0)
    routing = (topk_weights.reshape(-1, 1), topk_ids.reshape(-1, 1))
    rows = tensor_model_parallel_all_reduce(ops.fused_marlin_moe(slots, *weights, *routing, *rest))
    return ops.moe_sum(rows.reshape(size_m, top_k, -1))


def fused_output_is_reduced(original: Any) -> Any:
    """``MoERunner._fused_output_is_reduced``: whether nobody has to add the ranks' outputs."""

    def is_reduced(self: Any) -> bool:
        if self.moe_config.tp_size == 1 and self.moe_config.ep_size == 1:
            return original.fget(self)
        method = self._quant_method
        kernel = getattr(method, "moe_kernel", None)
        experts = getattr(getattr(kernel, "impl", None), "fused_experts", None)
        names = {type(method).__name__, type(experts).__name__}
        if not names & {"MarlinExperts", "CompressedTensorsWNA16MarlinMoEMethod"}:
            refuse("experts", f"{type(method).__name__} computes them, not marlinspike")
        return True

    return property(is_reduced)
