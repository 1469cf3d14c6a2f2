"""Dense products and expert layers of weights in Marlin's layout."""

from __future__ import annotations

import functools
from typing import Any, Dict, Optional, Tuple

import torch

from .. import _functions as host
from .._core import Error
from ._tensors import (
    HALVES,
    aligned,
    as_bytes,
    expect,
    memory,
    name_of,
    native,
    on,
    optional_memory,
    scratch,
)

_WORDS = (torch.int32,)
_E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
_E4M3 = getattr(torch, "float8_e4m3fn", torch.uint8)
_BITS = {"uint4b8": 4, "uint4": 4, "uint8b128": 8, "float8_e4m3fn": 8, "float4_e2m1f": 4}
_BOUNDS = {0: "bits16", 1: "bits16-below-half", 2: "bits16-below-32nd"}

#: Codes, scales, experts, K, N, groups.
Sizes = Tuple[str, str, int, int, int, int]


class Weight:
    """The tensors of a packed matrix or stack, checked."""

    def __init__(
        self,
        name: str,
        q: torch.Tensor,
        s: torch.Tensor,
        z: Optional[torch.Tensor],
        bias: Optional[torch.Tensor],
        global_scale: Optional[torch.Tensor],
        quant_type: str,
        bound: int,
        x: torch.Tensor,
        dims: int,
    ) -> None:
        bits = _BITS.get(quant_type)
        if bits is None:
            raise Error(f"quant_type: found {quant_type}, expected one of {', '.join(_BITS)}")
        if bound not in _BOUNDS:
            raise Error(f"scale_bound of {name}: found {bound}, expected 0, 1 or 2")
        device = x.device
        expect(f"{name}.weight", q, _WORDS, [None] * dims, device)
        size_k = q.shape[-2] * 16
        size_n = q.shape[-1] * 2 // bits
        stack = [q.shape[0]] if dims == 3 else []
        types, self.scales = _scales(quant_type, x.dtype, s.dtype, bound)
        expect(f"{name}.scales", s, types, [*stack, None, size_n], device)
        groups = s.shape[-2]
        if z is not None:
            expect(f"{name}.zeros", z, _WORDS, [*stack, groups, size_n // 8], device)
        if bias is not None:
            expect(f"{name}.bias", bias, (x.dtype,), [*stack, size_n], device)
        if global_scale is not None:
            count = q.shape[0] if dims == 3 else 1
            if global_scale.numel() != count:
                found = list(global_scale.shape)
                raise Error(f"`{name}.global_scale`: found shape {found}, expected [{count}]")
            shape = list(global_scale.shape)
            expect(f"{name}.global_scale", global_scale, (torch.float32,), shape, device)
        if (z is not None) != (quant_type == "uint4"):
            raise Error(f"`{name}.zeros`: of uint4, and of no other type: {quant_type}")
        if global_scale is not None and self.scales != "e4m3":
            raise Error(f"`{name}.global_scale`: only with e4m3 scales, found {s.dtype}")
        self.name, self.parts = name, (q, s, z, bias, global_scale)
        self.experts = q.shape[0] if dims == 3 else 1
        self.size_k, self.size_n, self.groups = size_k, size_n, groups
        self.quant_type = quant_type

    def sizes(self) -> Sizes:
        size_k, size_n = int(self.size_k), int(self.size_n)
        return self.quant_type, self.scales, int(self.experts), size_k, size_n, int(self.groups)

    def native(self) -> Tuple[Any, ...]:
        q, s, z, bias, global_scale = self.parts
        return (
            self.sizes(),
            memory(f"{self.name}.weight", q),
            as_bytes(memory(f"{self.name}.scales", s), s),
            optional_memory(f"{self.name}.zeros", z),
            optional_memory(f"{self.name}.bias", bias),
            optional_memory(f"{self.name}.global_scale", global_scale),
        )


def _scales(
    quant_type: str, dtype: torch.dtype, found: torch.dtype, bound: int
) -> Tuple[Tuple[torch.dtype, ...], str]:
    """Types that the scales may have, and their name."""
    if quant_type == "float4_e2m1f" and found == _E4M3 and _E4M3 != torch.uint8:
        return (_E4M3,), "e4m3"
    if quant_type == "float4_e2m1f" or (quant_type == "float8_e4m3fn" and found == _E8M0):
        return (_E8M0,), "e8m0" if bound == 0 else "e8m0-narrow"
    return (dtype,), _BOUNDS[bound]


def _null(sizes: Sizes, has: Tuple[bool, ...]) -> Tuple[Any, ...]:
    """A weight's parts at no address, to measure."""
    _, scales, experts, size_k, size_n, groups = sizes
    bits = _BITS[sizes[0]]
    width = 2 if scales.startswith("bits16") else 1
    lengths = [groups * size_n // 8, size_n, 1]
    rest = [(0, experts * length) if here else None for length, here in zip(lengths, has)]
    words = experts * size_k * size_n * bits // 32
    return (sizes, (0, words), (0, experts * groups * size_n * width), *rest)


def _has(weight: Weight) -> Tuple[bool, ...]:
    return tuple(part is not None for part in weight.parts[2:])


@functools.lru_cache(maxsize=4096)
def _measure_gemm(
    place: Tuple[int, int], dtype: str, sizes: Sizes, has: Tuple[bool, ...], rows: int
) -> Tuple[int, int]:
    x, y = (0, rows * sizes[3]), (0, rows * sizes[4])
    return native("cuda_gemm")(place, dtype, _null(sizes, has), x, y, None, None)


class _Dense:
    """The checked arguments of a product."""

    def __init__(
        self,
        a: torch.Tensor,
        b_q_weight: torch.Tensor,
        b_scales: torch.Tensor,
        b_zeros: Optional[torch.Tensor] = None,
        b_bias: Optional[torch.Tensor] = None,
        global_scale: Optional[torch.Tensor] = None,
        b_q_type: str = "uint4b8",
        scale_bound: int = 0,
    ) -> None:
        expect("a", a, HALVES, [None, None], a.device)
        parts = (b_q_weight, b_scales, b_zeros, b_bias, global_scale)
        self.a, self.weight = a, Weight("b", *parts, b_q_type, scale_bound, a, 2)
        expect("a", a, HALVES, [None, self.weight.size_k], a.device)


def gemm_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    product = _Dense(*args, **kwargs)
    return product.a.new_empty((product.a.shape[0], product.weight.size_n))


def gemm_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    product = _Dense(*args, **kwargs)
    a, weight = aligned(product.a), product.weight
    y = torch.empty((a.shape[0], weight.size_n), dtype=a.dtype, device=a.device)
    if a.shape[0] == 0:
        return y
    dtype = name_of(a.dtype)
    with on(a.device) as place:
        size, flags = _measure_gemm((place[0], 0), dtype, weight.sizes(), _has(weight), a.shape[0])
        room, ready = scratch(size, flags, a.device)
        work = (room.data_ptr(), size)
        x, out = memory("a", a), memory("y", y)
        native("cuda_gemm")(
            place, dtype, weight.native(), x, out, work, optional_memory("flags", ready)
        )
    return y


def gemm_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    product = _Dense(*args, **kwargs)
    a, weight = product.a, product.weight
    _no_nvfp4(weight)
    q, s, z, bias, _ = weight.parts
    sizes = (int(a.shape[0]), int(weight.size_n), int(weight.size_k))
    return host.gptq_marlin_gemm(
        a, None, q, bias, s, None, None, z, None, None, None, weight.quant_type, *sizes
    )


def _no_nvfp4(weight: Weight) -> None:
    if weight.scales == "e4m3":
        raise Error(f"`{weight.name}.scales`: e4m3 scales are multiplied on CUDA only")


# The tables of experts that are all here, by device and number. Not made while a graph is captured: its memory would
# belong to the graph.
_IDENTITY: Dict[Tuple[torch.device, int], torch.Tensor] = {}


def tables(
    num_experts: int, local: int, expert_map: Optional[torch.Tensor], device: torch.device
) -> Tuple[torch.Tensor, Optional[torch.Tensor], int]:
    """For each expert of all ranks its run and its number here, -1: neither; the number of experts here."""
    if expert_map is None:
        key = (device, num_experts)
        table = _IDENTITY.get(key)
        if table is None:
            if torch.cuda.is_current_stream_capturing():
                table = torch.arange(num_experts, dtype=torch.int32, device=device) * 65537
                return table, None, num_experts
            # Copied from the host, so that it is there for every stream when this returns.
            table = (torch.arange(num_experts, dtype=torch.int32) * 65537).to(device)
            _IDENTITY[key] = table
        return table, None, num_experts
    kept = getattr(expert_map, "_marlinspike_tables", None)
    if kept is not None and kept[:2] == (local, _version(expert_map)):
        return kept[2], kept[3], local
    return (*_tables_of(expert_map, local), local)


def _tables_of(expert_map: torch.Tensor, local: int) -> Tuple[torch.Tensor, torch.Tensor]:
    here = (expert_map >= 0) & (expert_map < local)
    return (
        torch.where(here, expert_map * 65537, -1).to(torch.int32),
        torch.where(here, expert_map, -1).to(torch.int32),
    )


def _version(tensor: torch.Tensor) -> int:
    """Counts the changes by torch's operations. Tensors of inference mode have no count."""
    return -1 if tensor.is_inference() else tensor._version


def keep_expert_map(expert_map: torch.Tensor, local: int) -> None:
    """Computes the operators' tables of this map of all experts to the ``local`` ones of a rank once and keeps them with the
    tensor, which saves six small kernels in each call.

    The values must not change as long as graphs recorded with the map are replayed. A change by torch's operations is
    noticed by the next call, except of a tensor made in inference mode. Without effect while a graph is recorded.
    """
    expect("expert_map", expert_map, _WORDS, [None], expert_map.device)
    if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    kept = getattr(expert_map, "_marlinspike_tables", None)
    if kept is None or kept[:2] != (local, _version(expert_map)):
        tables = _tables_of(expert_map, local)
        expert_map._marlinspike_tables = (local, _version(expert_map), *tables)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _measure_moe(
    place: Tuple[int, int],
    dtype: str,
    sizes: Tuple[Sizes, Sizes],
    has: Tuple[Tuple[bool, ...], Tuple[bool, ...]],
    experts: Tuple[int, int, bool],
    activation: str,
    tokens: Tuple[int, int],
) -> Tuple[int, int]:
    everywhere, here, has_map = experts
    weights = (_null(sizes[0], has[0]), _null(sizes[1], has[1]))
    table = ((0, everywhere), (0, everywhere) if has_map else None, here)
    none = (0, 0)
    routed = (none, none, none, none)
    return native("cuda_moe")(
        place, dtype, weights, table, activation, False, tokens, routed, None, None
    )


class _Layer:
    """The checked arguments of a layer."""

    def __init__(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        bias1: Optional[torch.Tensor],
        bias2: Optional[torch.Tensor],
        w1_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        quant_type: str = "uint4b8",
        apply_router_weight_on_input: bool = False,
        global_num_experts: int = -1,
        activation: str = "silu",
        expert_map: Optional[torch.Tensor] = None,
        w1_zeros: Optional[torch.Tensor] = None,
        w2_zeros: Optional[torch.Tensor] = None,
        global_scale1: Optional[torch.Tensor] = None,
        global_scale2: Optional[torch.Tensor] = None,
        scale_bound1: int = 0,
        scale_bound2: int = 0,
    ) -> None:
        x = hidden_states
        expect("hidden_states", x, HALVES, [None, None], x.device)
        self.w1 = Weight(
            "w1", w1, w1_scale, w1_zeros, bias1, global_scale1, quant_type, scale_bound1, x, 3
        )
        self.w2 = Weight(
            "w2", w2, w2_scale, w2_zeros, bias2, global_scale2, quant_type, scale_bound2, x, 3
        )
        expect("hidden_states", x, HALVES, [None, self.w1.size_k], x.device)
        shape = [self.w1.experts, None, None]
        expect("w2.weight", w2, _WORDS, shape, x.device)
        if self.w2.size_n != self.w1.size_k:
            found = f"{self.w2.size_n} columns, expected {self.w1.size_k} as in the rows of w1"
            raise Error(f"`w2.weight`: found {found}")
        expect("topk_ids", topk_ids, (torch.int32, torch.int64), [x.shape[0], None], x.device)
        routing = [x.shape[0], topk_ids.shape[1]]
        expect("topk_weights", topk_weights, (torch.float32,), routing, x.device)
        self.num_experts = self.w1.experts if global_num_experts == -1 else global_num_experts
        if expert_map is not None:
            expect("expert_map", expert_map, _WORDS, [self.num_experts], x.device)
        elif self.num_experts != self.w1.experts:
            raise Error(
                f"`expert_map`: found None, expected a map of {self.num_experts} experts "
                f"to the {self.w1.experts} of w1"
            )
        self.x, self.topk_weights, self.topk_ids = x, topk_weights, topk_ids
        self.activation, self.expert_map = activation, expert_map
        self.on_input = apply_router_weight_on_input


def moe_fake(*args: Any, **kwargs: Any) -> torch.Tensor:
    layer = _Layer(*args, **kwargs)
    return layer.x.new_empty((layer.x.shape[0], layer.w2.size_n))


def moe_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    layer = _Layer(*args, **kwargs)
    x, device = aligned(layer.x), layer.x.device
    y = torch.empty((x.shape[0], layer.w2.size_n), dtype=x.dtype, device=device)
    if y.shape[0] == 0:
        return y
    ids, weights = aligned(layer.topk_ids.to(torch.int32)), aligned(layer.topk_weights)
    top_k = int(ids.shape[1])
    if top_k == 0:
        return y.zero_()
    w1, w2 = layer.w1, layer.w2
    dtype = name_of(x.dtype)
    with on(device) as place:
        run_of, expert_of, here = tables(layer.num_experts, w1.experts, layer.expert_map, device)
        size, flags = _measure_moe(
            (place[0], 0),
            dtype,
            (w1.sizes(), w2.sizes()),
            (_has(w1), _has(w2)),
            (layer.num_experts, here, expert_of is not None),
            layer.activation,
            (int(x.shape[0]), top_k),
        )
        room, ready = scratch(size, flags, device)
        table = (memory("run_of", run_of), optional_memory("expert_map", expert_of), here)
        routed = (
            memory("hidden_states", x),
            memory("topk_weights", weights),
            memory("topk_ids", ids),
            memory("y", y),
        )
        native("cuda_moe")(
            place,
            dtype,
            (w1.native(), w2.native()),
            table,
            layer.activation,
            layer.on_input,
            (int(x.shape[0]), top_k),
            routed,
            (room.data_ptr(), size),
            optional_memory("flags", ready),
        )
    return y


def moe_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    layer = _Layer(*args, **kwargs)
    _no_nvfp4(layer.w1)
    (q1, s1, z1, b1, _), (q2, s2, z2, b2, _) = layer.w1.parts, layer.w2.parts
    return host.fused_marlin_moe(
        layer.x,
        q1,
        q2,
        b1,
        b2,
        s1,
        s2,
        layer.topk_weights,
        layer.topk_ids.to(torch.int32),
        layer.w1.quant_type,
        apply_router_weight_on_input=layer.on_input,
        global_num_experts=layer.num_experts,
        activation=layer.activation,
        expert_map=layer.expert_map,
        w1_zeros=z1,
        w2_zeros=z2,
    )
