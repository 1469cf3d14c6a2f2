"""Helpers of kernel tests, named and shaped like vLLM's. Results have the kind of the first array:
torch tensors on its device, else numpy arrays."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from . import _core
from ._arrays import Typed, as_one_of, is_torch, like, optional, typed

_INT32 = ("I32",)


def _words(value: Any, name: str) -> Typed:
    return as_one_of(typed(value, name), _INT32)


def _optional_words(value: Optional[Any], name: str) -> Optional[Typed]:
    made = optional(value, name)
    return None if made is None else as_one_of(made, _INT32)


def _stack(values: list) -> Any:
    if is_torch(values[0]):
        import torch

        return torch.stack(values)
    return np.stack(values)


def gptq_marlin_repack(
    b_q_weight: Any,
    perm: Optional[Any],
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> Any:
    """GPTQ words ``[size_k / pack, size_n]`` in Marlin's layout ``[size_k / 16, size_n * 16 / pack]``.

    With act-order, row ``k`` of the packed matrix is row ``perm[k]``; ``perm`` may be empty or None.
    """
    order = _optional_words(perm, "perm")
    made = _core.gptq_marlin_repack(
        _words(b_q_weight, "b_q_weight"), order, size_k, size_n, num_bits, is_a_8bit
    )
    return like(b_q_weight, made)


def gptq_marlin_moe_repack(
    b_q_weight: Any,
    perm: Optional[Any],
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> Any:
    """``gptq_marlin_repack`` of each expert of a stack."""
    has_order = optional(perm, "perm") is not None
    return _stack(
        [
            gptq_marlin_repack(
                expert, perm[e] if has_order else None, size_k, size_n, num_bits, is_a_8bit
            )
            for e, expert in enumerate(b_q_weight)
        ]
    )


def awq_marlin_repack(
    b_q_weight: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Any:
    """AWQ words ``[size_k, size_n / pack]`` in Marlin's layout."""
    made = _core.awq_marlin_repack(
        _words(b_q_weight, "b_q_weight"), size_k, size_n, num_bits, is_a_8bit
    )
    return like(b_q_weight, made)


def awq_marlin_moe_repack(
    b_q_weight: Any,
    perm: Optional[Any],
    size_k: int,
    size_n: int,
    num_bits: int,
    is_a_8bit: bool = False,
) -> Any:
    """``awq_marlin_repack`` of each expert of a stack; ``perm`` is not read, as upstream."""
    del perm
    experts = [awq_marlin_repack(e, size_k, size_n, num_bits, is_a_8bit) for e in b_q_weight]
    return _stack(experts)


def marlin_permute_scales(
    s: Any, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
) -> Any:
    """Scales ``[groups, size_n]`` in the kernel's order. ``size_k`` is the matrix's own K."""
    made = _core.marlin_permute_scales(typed(s, "s"), size_k, size_n, group_size, is_a_8bit)
    return like(s, made)


def marlin_moe_permute_scales(
    s: Any, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False
) -> Any:
    """``marlin_permute_scales`` of each expert of a stack."""
    return _stack([marlin_permute_scales(e, size_k, size_n, group_size, is_a_8bit) for e in s])


def marlin_permute_bias(s: Any) -> Any:
    """A bias, or a stack of them, in the kernel's order."""
    return like(s, _core.marlin_permute_bias(typed(s, "s")))


def marlin_int4_fp8_preprocess(
    qweight: Any, qzeros_or_none: Optional[Any] = None, inplace: bool = False
) -> Any:
    """int4 codes rewritten for fp8 activations. With ``inplace``, ``qweight`` holds the result too."""
    zeros = _optional_words(qzeros_or_none, "qzeros_or_none")
    made = like(qweight, _core.marlin_int4_fp8_preprocess(_words(qweight, "qweight"), zeros))
    if inplace:
        qweight[...] = made
        return qweight
    return made


def moe_align_block_size(
    topk_ids: Any,
    block_size: int,
    num_experts: int,
    expert_map: Optional[Any] = None,
    ignore_invalid_experts: bool = False,
) -> Tuple[Any, Any, Any]:
    """Tokens sorted by expert and padded to blocks: ``sorted_token_ids``, ``expert_ids`` and
    ``num_tokens_post_padded``.

    The first two are trimmed to their valid length; upstream leaves the rest of its buffers undefined.
    """
    made = _core.moe_align_block_size(
        _words(topk_ids, "topk_ids"),
        block_size,
        num_experts,
        _optional_words(expert_map, "expert_map"),
        ignore_invalid_experts,
    )
    return tuple(like(topk_ids, one) for one in made)  # type: ignore[return-value]


def fused_topk(
    hidden_states: Any,
    gating_output: Any,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
) -> Tuple[Any, Any, Any]:
    """Experts of each token: ``topk_weights``, ``topk_ids``, ``token_expert_indices``.

    ``hidden_states`` is not read, as upstream; it may be None.
    """
    del hidden_states
    made = _core.topk(
        typed(gating_output, "gating_output"), topk, renormalize, scoring_func, None, 1.0, None
    )
    return tuple(like(gating_output, one) for one in made)  # type: ignore[return-value]


def grouped_topk(
    hidden_states: Any,
    gating_output: Any,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Optional[Any] = None,
) -> Tuple[Any, Any]:
    """Groups of experts first, then experts in them: ``topk_weights`` and ``topk_ids``."""
    del hidden_states
    weights, ids, _ = _core.topk(
        typed(gating_output, "gating_output"),
        topk,
        renormalize,
        scoring_func,
        (num_expert_group, topk_group),
        routed_scaling_factor,
        optional(e_score_correction_bias, "e_score_correction_bias"),
    )
    return like(gating_output, weights), like(gating_output, ids)


def gptq_quantize_weights(
    w: Any,
    quant_type: str,
    group_size: int,
    act_order: bool,
    test_perm: Optional[Any] = None,
) -> Tuple[Any, Any, Any, Any, Any]:
    """Symmetric integer weights of ``w`` ``[size_k, size_n]``: ``w_ref``, ``w_q`` (unpacked codes),
    ``w_s``, ``g_idx`` and the permutation; the last two are empty without act-order."""
    size_k = int(w.shape[0])
    perm = None
    if act_order:
        drawn = np.random.permutation(size_k) if test_perm is None else np.asarray(test_perm)
        perm = np.ascontiguousarray(drawn.astype(np.int32))
    order = None if perm is None else typed(perm, "test_perm")
    size = size_k if group_size == -1 else group_size
    stated = -1 if size == size_k else group_size
    made = _core.gptq_quantize_weights(typed(w, "w"), str(quant_type), stated, order)
    w_ref, w_q, w_s, g_idx = (like(w, one) for one in made)
    rand_perm = like(w, typed(np.empty(0, np.int32) if perm is None else perm))
    return w_ref, w_q, w_s, g_idx, rand_perm


def per_token_quant_int8(x: Any, rule: str = "quotient") -> Tuple[Any, Any]:
    """int8 codes and one scale per row ``[M, 1]``.

    ``rule`` is ``quotient`` (x / scale, ties to even: what compiled kernels compute) or ``product``
    (x * (127 / max), ties away: upstream's source text).
    """
    codes, scales = _core.per_token_int8(typed(x, "x"), rule)
    return like(x, codes), like(x, scales)


def scaled_fp8_quant(
    input: Any,
    scale: Optional[float] = None,
    scale_ub: Optional[float] = None,
    use_per_token_if_dynamic: bool = False,
) -> Tuple[Any, Any]:
    """e4m3fn codes and their scales: ``[M, 1]`` per token, else one."""
    if scale is None and use_per_token_if_dynamic:
        made = _core.per_token_fp8(typed(input, "input"), scale_ub)
    else:
        value = None if scale is None else float(scale)
        made = _core.per_tensor_fp8(typed(input, "input"), value)
    return like(input, made[0]), like(input, made[1])


def scaled_fp4_quant(
    input: Any, input_global_scale: Any, is_sf_swizzled_layout: bool = True
) -> Tuple[Any, Any]:
    """NVFP4 codes ``[M, K / 2]`` and their e4m3 block scales, interleaved in tiles of 128x4."""
    from ._case import Case

    dtype, shape, _ = typed(input, "input")
    names = {"F16": "float16", "BF16": "bfloat16"}
    if dtype not in names or len(shape) != 2:
        raise _core.Error(f"`input`: found {dtype} {list(shape)}, expected F16 or BF16 [M, K]")
    config = {
        "dtype": names[dtype],
        "size_m": shape[0],
        "size_k": shape[1],
        "is_sf_swizzled_layout": is_sf_swizzled_layout,
    }
    scale = np.asarray(float(input_global_scale), np.float32).reshape(1)
    case = Case("scaled_fp4_quant", config, {"x": input, "input_global_scale": scale})
    op, text, inputs, _ = case._parts({})
    made = dict(_core.reference(op, text, inputs))
    return like(input, made["x_fp4"]), like(input, made["x_scale"])


#: Types of scales that arrays may hold as unsigned integers: of e2m1 codes, by their global scale.
_BLOCK_SCALES = {True: ("F8_E4M3",), False: ("F8_E8M0", "U8")}


def _packed(
    weight: Any,
    scales: Any,
    zeros: Any,
    g_idx: Any,
    perm: Any,
    bias: Any,
    quant_type: str,
    global_scale: Any = None,
) -> Tuple[
    Typed, Typed, Optional[Typed], Optional[Tuple[Typed, Typed]], Optional[Typed], Optional[Typed]
]:
    scale = optional(global_scale, "global_scale")
    if quant_type != "float4_e2m1f" and scale is not None:
        raise _core.Error(f"`global_scale` is not supported for {quant_type}: only float4_e2m1f has one")
    block = _BLOCK_SCALES[scale is not None] if quant_type == "float4_e2m1f" else ()
    order = (_optional_words(g_idx, "g_idx"), _optional_words(perm, "perm"))
    both = order if order[0] is not None and order[1] is not None else None
    return (
        _words(weight, "weight"),
        as_one_of(typed(scales, "scales"), block),
        _optional_words(zeros, "zeros"),
        both,  # type: ignore[return-value]
        optional(bias, "bias"),
        scale,
    )


def gptq_marlin_gemm(
    a: Any,
    c: Optional[Any],
    b_q_weight: Any,
    b_bias: Optional[Any],
    b_scales: Any,
    a_scales: Optional[Any],
    global_scale: Optional[Any],
    b_zeros: Optional[Any],
    g_idx: Optional[Any],
    perm: Optional[Any],
    workspace: Optional[Any],
    b_q_type: str,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool = True,
    use_atomic_add: bool = False,
    use_fp32_reduce: bool = True,
    is_zp_float: bool = False,
) -> Any:
    """The product of activations ``a`` and a packed weight, by the canonical arithmetic.

    A kernel sums in another order: compare with ``assert_correct``, not for equality. ``b_q_type`` is
    ``uint4b8``, ``uint8b128``, ``uint4``, ``uint8``, ``float8_e4m3fn`` or ``float4_e2m1f`` (NVFP4 with a
    global scale, MXFP4 without). ``c``, ``workspace`` and the flags are not read; 8-bit activations and
    float zero points are refused.
    """
    del c, workspace, is_k_full, use_atomic_add, use_fp32_reduce
    if optional(a_scales, "a_scales") is not None:
        raise _core.Error("`a_scales` is not supported: only 16-bit activations are")
    if is_zp_float:
        raise _core.Error("`is_zp_float` is not supported: zero points are integers")
    if int(a.shape[0]) != size_m:
        raise _core.Error(f"`a`: found {int(a.shape[0])} rows, expected size_m {size_m}")
    packed = _packed(b_q_weight, b_scales, b_zeros, g_idx, perm, b_bias, str(b_q_type), global_scale)
    made = _core.marlin_gemm(typed(a, "a"), packed, str(b_q_type), size_n, size_k)
    return like(a, made)


def fused_marlin_moe(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    bias1: Optional[Any],
    bias2: Optional[Any],
    w1_scale: Any,
    w2_scale: Any,
    topk_weights: Any,
    topk_ids: Any,
    quant_type: str,
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    activation: str = "silu",
    expert_map: Optional[Any] = None,
    g_idx1: Optional[Any] = None,
    g_idx2: Optional[Any] = None,
    sort_indices1: Optional[Any] = None,
    sort_indices2: Optional[Any] = None,
    w1_zeros: Optional[Any] = None,
    w2_zeros: Optional[Any] = None,
    global_scale1: Optional[Any] = None,
    global_scale2: Optional[Any] = None,
) -> Any:
    """A layer of packed experts, by the canonical arithmetic: y ``[M, H]``.

    ``quant_type`` is a name as for ``gptq_marlin_gemm``; other arguments are upstream's, for 16-bit
    activations.
    """
    quant_type = str(quant_type)
    experts = int(w1.shape[0]) if global_num_experts == -1 else global_num_experts
    made = _core.fused_marlin_moe(
        typed(hidden_states, "hidden_states"),
        _packed(w1, w1_scale, w1_zeros, g_idx1, sort_indices1, bias1, quant_type, global_scale1),
        _packed(w2, w2_scale, w2_zeros, g_idx2, sort_indices2, bias2, quant_type, global_scale2),
        typed(topk_weights, "topk_weights"),
        _words(topk_ids, "topk_ids"),
        quant_type,
        activation,
        # w2 is packed in rows of 16 k.
        int(w2.shape[1]) * 16,
        experts,
        _optional_words(expert_map, "expert_map"),
        apply_router_weight_on_input,
    )
    return like(hidden_states, made)

