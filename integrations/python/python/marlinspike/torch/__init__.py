"""Operators for torch: the project's kernels on torch's tensors, streams and graphs.

They are registered as ``torch.ops.marlinspike.*`` when this module is imported. On CUDA tensors they launch this
project's kernels on the current stream, in memory from torch's allocator; on CPU tensors they compute the reference.
Both give the same bits.
"""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import torch

from .._core import Error
from . import _int4, _layouts, _products, _ranks, _routing
from ._int4 import install_aten
from ._products import keep_expert_map

_WEIGHT = "Tensor b_q_weight, Tensor b_scales, Tensor? b_zeros=None, Tensor? b_bias=None"
_REPACK = "int size_k, int size_n, int num_bits, bool is_a_8bit=False"
_BLOCKS = "int block_size, int in_features, int out_features"

#: Schema; fake, CPU and CUDA implementation.
_OPERATORS: List[Tuple[str, Callable[..., Any], Callable[..., Any], Any]] = [
    (
        f"marlin_gemm(Tensor a, {_WEIGHT}, Tensor? global_scale=None, str b_q_type='uint4b8', "
        "int scale_bound=0) -> Tensor",
        _products.gemm_fake,
        _products.gemm_cpu,
        _products.gemm_cuda,
    ),
    (
        f"marlin_gemm_part(Tensor a, int size_k, int rank, int ranks, {_WEIGHT}, "
        "Tensor? global_scale=None, str b_q_type='uint4b8', int scale_bound=0) -> Tensor",
        _ranks.part_fake,
        _ranks.part_cpu,
        _ranks.part_cuda,
    ),
    (
        f"add_ranks(Tensor sums, int size_k, ScalarType dtype, {_WEIGHT}, Tensor? global_scale=None, "
        "str b_q_type='uint4b8') -> Tensor",
        _ranks.add_fake,
        _ranks.add_cpu,
        _ranks.add_cuda,
    ),
    (
        "fused_marlin_moe(Tensor hidden_states, Tensor w1, Tensor w2, Tensor? bias1, Tensor? bias2, "
        "Tensor w1_scale, Tensor w2_scale, Tensor topk_weights, Tensor topk_ids, "
        "str quant_type='uint4b8', bool apply_router_weight_on_input=False, int global_num_experts=-1, "
        "str activation='silu', Tensor? expert_map=None, Tensor? w1_zeros=None, Tensor? w2_zeros=None, "
        "Tensor? global_scale1=None, Tensor? global_scale2=None, int scale_bound1=0, "
        "int scale_bound2=0) -> Tensor",
        _products.moe_fake,
        _products.moe_cpu,
        _products.moe_cuda,
    ),
    (
        f"gptq_marlin_repack(Tensor b_q_weight, Tensor? perm, {_REPACK}) -> Tensor",
        _layouts.gptq_fake,
        _layouts.gptq_cpu,
        _layouts.gptq_cuda,
    ),
    (
        f"awq_marlin_repack(Tensor b_q_weight, {_REPACK}) -> Tensor",
        _layouts.awq_fake,
        _layouts.awq_cpu,
        _layouts.awq_cuda,
    ),
    (
        "marlin_permute_scales(Tensor s, int size_k, int size_n, int group_size, bool is_a_8bit=False) "
        "-> Tensor",
        _layouts.scales_fake,
        _layouts.scales_cpu,
        _layouts.scales_cuda,
    ),
    (
        "moe_align_block_size(Tensor topk_ids, int block_size, int num_experts, "
        "Tensor? expert_map=None) -> (Tensor, Tensor, Tensor)",
        _routing.align_fake,
        _routing.align_cpu,
        _routing.align_cuda,
    ),
    (
        "topk_router(Tensor gating_output, int topk, bool renormalize, str scoring_func='softmax', "
        "int num_expert_group=0, int topk_group=0, float routed_scaling_factor=1.0, "
        "Tensor? e_score_correction_bias=None) -> (Tensor, Tensor)",
        _routing.topk_fake,
        _routing.topk_cpu,
        _routing.topk_cuda,
    ),
    (
        "moe_activation(Tensor gate_up, str activation='silu') -> Tensor",
        _routing.activation_fake,
        _routing.activation_cpu,
        _routing.activation_cuda,
    ),
    ("moe_sum(Tensor input) -> Tensor", _routing.sum_fake, _routing.sum_cpu, _routing.sum_cuda),
    (
        "per_token_quant_int8(Tensor x, str rule='quotient') -> (Tensor, Tensor)",
        _layouts.int8_fake,
        _layouts.int8_cpu,
        _layouts.int8_cuda,
    ),
    (
        "per_token_quant_fp8(Tensor x, float? scale_ub=None) -> (Tensor, Tensor)",
        _layouts.fp8_fake,
        _layouts.fp8_cpu,
        _layouts.fp8_cuda,
    ),
    (
        f"dyn_quant_pack_4bit_weight(Tensor weights, Tensor scales_zeros, Tensor? bias, {_BLOCKS}) -> Tensor",
        _int4.pack_fake,
        _int4.pack_cpu,
        None,
    ),
    (
        f"dyn_quant_matmul_4bit(Tensor inp, Tensor packed_weights, {_BLOCKS}) -> Tensor",
        _int4.matmul_fake,
        _int4.matmul_cpu,
        None,
    ),
]

# Kept alive: the operators go with it.
_library = torch.library.Library("marlinspike", "DEF")


def _register() -> List[str]:
    names = []
    for schema, fake, cpu, cuda in _OPERATORS:
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, cpu, "CPU")
        if cuda is not None:
            _library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"marlinspike::{name}", fake, lib=_library)
        names.append(name)
    return names


#: Names of the operators.
OPERATORS = _register()


def scale_bound(scales: torch.Tensor, quant_type: str = "uint4b8") -> int:
    """The argument ``scale_bound`` of products with these scales: with it, the kernel is faster and the bits are the
    same. Reads the scales once, so call it when weights are loaded, and again if they change."""
    e8m0 = getattr(torch, "float8_e8m0fnu", None)
    if scales.dtype in (e8m0, torch.uint8):
        most = int(scales.view(torch.uint8).max())
        return int(most <= (134 if quant_type == "float8_e4m3fn" else 128))
    if scales.dtype != torch.bfloat16 or quant_type not in ("uint4b8", "uint8b128"):
        return 0
    most = float(scales.abs().amax())
    return 2 if most < 1 / 32 else 1 if most < 1 / 2 else 0


def permute_block_scales(scales: torch.Tensor) -> torch.Tensor:
    """8-bit scales ``[.., groups, N]`` of a checkpoint (e8m0 or e4m3) in the order of the product's kernel."""
    columns = [position % 8 * 8 + position // 8 for position in range(64)]
    columns = [columns[position // 4 * 4 + (0, 2, 1, 3)[position % 4]] for position in range(64)]
    size_n = scales.shape[-1]
    if scales.element_size() != 1 or size_n % 64:
        raise Error(f"`scales`: found {scales.dtype} {list(scales.shape)}, expected 8 bits and 64 columns")
    runs = scales.view(torch.uint8).reshape(-1, 64)[:, columns]
    return runs.reshape(scales.shape).view(scales.dtype)


__all__ = ["OPERATORS", "install_aten", "keep_expert_map", "permute_block_scales", "scale_bound"]
