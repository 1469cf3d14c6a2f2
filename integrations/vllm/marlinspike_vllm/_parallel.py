"""Row-parallel layers and experts over ranks with the bits of one GPU, where ``MARLINSPIKE_PARALLEL_INVARIANT=1`` asks
for them.

Only exact collectives are used: a gather and an exchange, which move bits, and a sum of rows of which all but one are
zeros. What rounds is added in an order that does not depend on the number of ranks.

With many rows (prompts) each rank completes a share of the rows and the results are gathered, so that a rank receives
f32 sums and slots' rows for its share only. With few rows (decoding) one collective is quicker than two.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

SWITCH = "MARLINSPIKE_PARALLEL_INVARIANT"
#: The model's K, the rank, the number of ranks.
Split = Tuple[int, int, int]
#: From this number of rows on, each rank completes a share of them. vLLM records graphs of up to 512 rows. Before a graph is
#: recorded, the same rows are computed once to load the kernels, so both must take the same way.
MANY_ROWS = 1024
#: NCCL's settings with which vLLM's batch-invariant mode fixes the order of its sums.
NCCL_SETTINGS = (
    "NCCL_LAUNCH_MODE NCCL_COLLNET_ENABLE NCCL_NVLS_ENABLE NCCL_P2P_NET_DISABLE NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS "
    "NCCL_PROTO NCCL_ALGO NCCL_NTHREADS NCCL_SOCKET_NTHREADS"
).split()


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


def keep_nccl_settings(original: Callable[[], None]) -> Callable[[], None]:
    """``override_envs_for_invariance`` without NCCL's settings: no collective here rounds, and one channel is slow."""

    @functools.wraps(original)
    def override() -> None:
        before = {name: os.environ.get(name) for name in NCCL_SETTINGS}
        original()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return override


def shares_rows(size_m: int, x: torch.Tensor) -> bool:
    """Whether each rank completes a share of the rows. In a recorded graph, sizes must not follow the routing."""
    return size_m >= MANY_ROWS and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def shares(size_m: int, ranks: int) -> List[int]:
    """Rows of each rank; together ``size_m``. The first ranks may have one more than the others."""
    return [size_m // ranks + (rank < size_m % ranks) for rank in range(ranks)]


def exchange(rows: torch.Tensor, sends: List[int], receives: List[int]) -> torch.Tensor:
    """Sends ``sends[r]`` rows to each rank r, in order. Returns the received rows, by the rank that sent them."""
    from torch.distributed import all_to_all_single
    from vllm.distributed import get_tp_group

    received = rows.new_empty(sum(receives), *rows.shape[1:])
    all_to_all_single(received, rows.contiguous(), receives, sends, group=get_tp_group().device_group)
    return received


def gather_shares(rows: torch.Tensor, sizes: List[int]) -> torch.Tensor:
    """All ranks' rows, in the order of ranks; this rank has ``rows`` of them."""
    from vllm.distributed import tensor_model_parallel_all_gather

    most = sizes[0]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, most - rows.shape[0]))
    gathered = tensor_model_parallel_all_gather(rows, 0)
    if sizes[-1] == most:
        return gathered
    return torch.cat([gathered[rank * most :][:size] for rank, size in enumerate(sizes)])


@torch.library.custom_op("marlinspike_vllm::add_over_ranks", mutates_args=())
def add_over_ranks(
    sums: torch.Tensor,
    size_k: int,
    rank: int,
    ranks: int,
    dtype: torch.dtype,
    q: torch.Tensor,
    s: torch.Tensor,
    z: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    quant_type: str,
) -> torch.Tensor:
    """``y [M, N]`` from each rank's f32 sums ``[M, N]``. One operator, since a compiled model must not choose by M."""
    from vllm.distributed import tensor_model_parallel_all_gather

    rest = (size_k, dtype, q, s, z, bias, None, quant_type)
    size_m, size_n = sums.shape
    if not shares_rows(size_m, sums):
        gathered = tensor_model_parallel_all_gather(sums, 0)
        return torch.ops.marlinspike.add_ranks(gathered.reshape(ranks, size_m, size_n), *rest)
    sizes = shares(size_m, ranks)
    own = exchange(sums, sizes, [sizes[rank]] * ranks)
    y = torch.ops.marlinspike.add_ranks(own.reshape(ranks, sizes[rank], size_n), *rest)
    return gather_shares(y, sizes)


@add_over_ranks.register_fake
def _(sums, size_k, rank, ranks, dtype, q, s, z, bias, quant_type):  # type: ignore[no-untyped-def]
    return sums.new_empty(sums.shape, dtype=dtype)


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
    size_k, rank, ranks = split
    ops = torch.ops.marlinspike
    sums = ops.marlin_gemm_part(x, size_k, rank, ranks, q, s, z, bias, None, quant_type)
    sums = sums.reshape(x.shape[0], -1)
    if ranks == 1:
        return ops.add_ranks(sums[None], size_k, x.dtype, q, s, z, bias, None, quant_type)
    return add_over_ranks(sums, size_k, rank, ranks, x.dtype, q, s, z, bias, quant_type)


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


def find_owners(expert_map: torch.Tensor, local: int) -> Optional[torch.Tensor]:
    """The rank of each expert; an error unless each is on one rank. Found once: later steps may be captured in graphs. None
    where the first step is."""
    found: Optional[torch.Tensor] = getattr(expert_map, "_marlinspike_owners", None)
    if found is not None:
        return found
    if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce

    here = ((expert_map >= 0) & (expert_map < local)).to(torch.float32)
    owners, ranks = tensor_model_parallel_all_reduce(
        torch.stack((here * get_tensor_model_parallel_rank(), here))
    )
    for expert, count in enumerate(ranks.tolist()):
        if count != 1:
            refuse("experts", f"found expert {expert} on {int(count)} ranks, expected 1")
    expert_map._marlinspike_owners = owners.to(torch.int64)  # type: ignore[attr-defined]
    return expert_map._marlinspike_owners  # type: ignore[attr-defined, no-any-return]


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
    if expert_map is not None:
        from marlinspike.torch import keep_expert_map

        # vLLM makes another map where experts move.
        keep_expert_map(expert_map, weights[0].shape[0])
    ranks = expert_ranks(expert_map) if is_parallel_invariant() else 1
    if ranks == 1:
        return ops.fused_marlin_moe(x, *weights, topk_weights, topk_ids, *rest)
    assert expert_map is not None
    owners = find_owners(expert_map, weights[0].shape[0])

    def rows_of(tokens: torch.Tensor, chosen: Any) -> torch.Tensor:
        """A row for each slot, with its router weight: an expert and its token, without a sum."""
        routing = (topk_weights.flatten()[chosen, None], topk_ids.flatten()[chosen, None])
        return ops.fused_marlin_moe(tokens, *weights, *routing, *rest)

    size_m, top_k = topk_ids.shape
    if owners is not None and shares_rows(size_m, x):
        return sum_shares(x, topk_ids, owners, ranks, rows_of)
    from vllm.distributed import tensor_model_parallel_all_reduce

    # Zeros where another rank has the expert, so that the sum over ranks is exact. Rows have no -0, which +0 would
    # change: each is a sum that starts at +0.
    rows = rows_of(x.repeat_interleave(top_k, 0), slice(None))
    return ops.moe_sum(tensor_model_parallel_all_reduce(rows).reshape(size_m, top_k, -1))


def sum_shares(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    owners: torch.Tensor,
    ranks: int,
    rows_of: Callable[[torch.Tensor, Any], torch.Tensor],
) -> torch.Tensor:
    """Each rank computes its experts' slots and sends a slot's row to the rank that has the token in its share, which adds
    the rows of a token in the order of slots. All ranks know all tokens' experts, hence all counts."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank, (size_m, top_k) = get_tensor_model_parallel_rank(), topk_ids.shape
    sizes = shares(size_m, ranks)
    # An id outside the experts has no row anywhere: it counts as rank `ranks`.
    known = (topk_ids >= 0) & (topk_ids < owners.shape[0])
    computes = torch.where(known, owners[topk_ids.clamp(0, owners.shape[0] - 1).long()], ranks).flatten()
    adds = torch.repeat_interleave(
        torch.arange(ranks, device=x.device), torch.tensor(sizes, device=x.device) * top_k, output_size=size_m * top_k
    )
    counts = torch.bincount(computes * ranks + adds, minlength=(ranks + 1) * ranks).reshape(ranks + 1, ranks).tolist()
    sends, receives = counts[rank], [counts[sender][rank] for sender in range(ranks)]
    own = (computes == rank).nonzero().flatten()
    if own.shape[0] > 0:
        rows = rows_of(x[own // top_k], own)
    else:
        rows = x.new_empty(0, x.shape[1])
    received = exchange(rows, sends, receives)

    first = sum(sizes[:rank]) * top_k
    mine = computes[first : first + sizes[rank] * top_k]
    slots = x.new_zeros(mine.shape[0], x.shape[1])
    slots[mine.argsort(stable=True)[: received.shape[0]]] = received
    y = torch.ops.marlinspike.moe_sum(slots.reshape(sizes[rank], top_k, -1))
    return gather_shares(y, sizes)


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
