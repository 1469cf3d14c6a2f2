"""What takes the place of vLLM's methods."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Optional, Sequence

import torch

from ._parallel import compute_experts, mark, split_of, sum_over_ranks

_log = logging.getLogger("vllm.marlinspike")
_HALVES = (torch.float16, torch.bfloat16)
_ACTIVATIONS = frozenset(
    "silu gelu gelu_tanh swigluoai silu_no_mul gelu_no_mul gelu_tanh_no_mul relu2_no_mul".split()
)


def is_batch_invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


@functools.lru_cache(maxsize=None)
def _keep(layer: str, reason: str) -> None:
    _log.warning("marlinspike: %s keeps vLLM's kernel: %s", layer, reason)


def keep(layer: str, reason: str) -> None:
    """Says that a layer keeps its kernel; an error in batch-invariant mode, which that kernel breaks."""
    if is_batch_invariant():
        raise RuntimeError(f"VLLM_BATCH_INVARIANT=1: marlinspike cannot compute {layer}: {reason}")
    _keep(layer, reason)


def _is_there(tensor: Optional[torch.Tensor]) -> bool:
    return tensor is not None and tensor.numel() > 0


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    """On one that the kernels are for."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def _type_name(quant_type_id: int) -> Optional[str]:
    from vllm.scalar_type import scalar_types

    names = {getattr(scalar_types, name).id: name for name in ("uint4b8", "uint8b128")}
    return names.get(quant_type_id)


def _experts_type(config: Any) -> Optional[str]:
    if config.use_int4_w4a16:
        return "uint4b8"
    if config.use_mxfp4_w4a16:
        return "float4_e2m1f"
    # Experts of this kind are new in 0.33.
    if getattr(config, "use_int8_w8a16", False):
        return "uint8b128"
    return "float8_e4m3fn" if config.use_fp8_w8a16 else None


def _clamp_limit(experts: Any, activation: Any) -> Any:
    """The limit of the first product before SiLU; other activations have limits of their own."""
    if activation.value != "silu":
        return None
    # In 0.33 in the configuration of the activation.
    config = getattr(experts, "activation_config", None)
    return experts.gemm1_clamp_limit if config is None else config.clamp_limit


def _scales_reason(quant_type: str, s: torch.Tensor, dtype: torch.dtype, size_k: int) -> Optional[str]:
    """Why a kernel cannot multiply with these scales ``[.., groups, N]``; None if it can."""
    if size_k % s.shape[-2]:
        return f"{s.shape[-2]} groups of {size_k} rows"
    group = size_k // s.shape[-2]
    if quant_type.startswith("float") and s.dtype == torch.float8_e8m0fnu:
        if dtype != torch.bfloat16 or group != 32:
            return f"e8m0 scales in groups of {group} with activations of {dtype}"
        return None
    if quant_type == "float4_e2m1f" or s.dtype != dtype:
        return f"scales of {s.dtype} with activations of {dtype}"
    if s.shape[-2] > 1 and group % 64 and (group != 32 or quant_type == "float8_e4m3fn"):
        return f"groups of {group}"
    return None


def refusal(
    x: torch.Tensor,
    quant_type: Optional[str],
    scales: Sequence[Optional[torch.Tensor]],
    activation: Any,
    absent: dict,
    w2: torch.Tensor,
) -> Optional[str]:
    """Why this layer's kernel cannot run; None if it can. Read from arguments alone: no element is looked at."""
    if quant_type is None:
        return "weights of another type than int4, int8, FP8 and MXFP4"
    for name, value in absent.items():
        if _is_there(value) if isinstance(value, torch.Tensor) else value is not None:
            return f"{name} is set"
    if not x.is_cuda or x.dtype not in _HALVES:
        return f"activations of {x.dtype} on {x.device}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "a device below capability 8.0"
    for scale, size_k in zip(scales, (x.shape[-1], w2.shape[1] * 16)):
        reason = "no scales" if scale is None else _scales_reason(quant_type, scale, x.dtype, size_k)
        if reason is not None:
            return reason
    if activation.value not in _ACTIVATIONS:
        return f"activation {activation.value}"
    if x.shape[-1] % 64 or w2.shape[1] * 16 % 64:
        return f"sizes {x.shape[-1]} and {w2.shape[1] * 16}, expected multiples of 64"
    return None


def experts_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MarlinExperts.apply``."""

    @functools.wraps(original)
    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Optional[torch.Tensor],
        a1q_scale: Optional[torch.Tensor],
        a2_scale: Optional[torch.Tensor],
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        quant_type = _experts_type(self.quant_config)
        absent = {
            "LoRA": self._lora_context,
            "8-bit activations": self.input_dtype,
            "gemm1_clamp_limit": _clamp_limit(self, activation),
            # 0.33 keeps act-order from these experts.
            "w13_g_idx": getattr(self, "w13_g_idx", None),
            "w2_g_idx": getattr(self, "w2_g_idx", None),
            "g1_alphas": self.g1_alphas,
            "g2_alphas": self.g2_alphas,
            "w1_zp": self.w1_zp,
            "w2_zp": self.w2_zp,
        }
        scales = (self.w1_scale, self.w2_scale)
        reason = refusal(hidden_states, quant_type, scales, activation, absent, w2)
        if reason is not None:
            keep("MarlinExperts", reason)
            return original(
                self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
                global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
                expert_tokens_meta, apply_router_weight_on_input,
            )  # fmt: skip
        weights = (w1, w2, self.w1_bias, self.w2_bias, self.w1_scale, self.w2_scale)
        y = compute_experts(
            hidden_states, weights, topk_weights.to(torch.float32), topk_ids, quant_type,
            apply_router_weight_on_input, global_num_experts, activation.value, expert_map,
        )  # fmt: skip
        output.copy_(y)

    return apply


def compressed_moe(original: Callable[..., Any]) -> Callable[..., Any]:
    """``fused_marlin_moe`` as the method of compressed-tensors calls it."""

    @functools.wraps(original)
    def fused_marlin_moe(
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        bias1: Optional[torch.Tensor],
        bias2: Optional[torch.Tensor],
        w1_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        quant_type_id: int,
        apply_router_weight_on_input: bool = False,
        global_num_experts: int = -1,
        activation: Any = None,
        expert_map: Optional[torch.Tensor] = None,
        **rest: Any,
    ) -> torch.Tensor:
        # Memory and switches of Marlin alone.
        ignored = ("workspace", "is_k_full", "inplace", "intermediate_cache13", "intermediate_cache2")
        absent = {name: value for name, value in rest.items() if name not in (*ignored, "output")}
        absent.pop("sort_indices1", None)
        absent.pop("sort_indices2", None)
        kind = _type_name(quant_type_id)
        reason = "no activation" if activation is None else None
        reason = reason or refusal(hidden_states, kind, (w1_scale, w2_scale), activation, absent, w2)
        if reason is not None:
            keep("compressed-tensors WNA16 experts", reason)
            more = dict(rest) if activation is None else dict(rest, activation=activation)
            return original(
                hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights, topk_ids,
                quant_type_id, apply_router_weight_on_input=apply_router_weight_on_input,
                global_num_experts=global_num_experts, expert_map=expert_map, **more,
            )  # fmt: skip
        weights = (w1, w2, bias1, bias2, w1_scale, w2_scale)
        y = compute_experts(
            hidden_states, weights, topk_weights.to(torch.float32), topk_ids, kind,
            apply_router_weight_on_input, global_num_experts, activation.value, expert_map,
        )  # fmt: skip
        output = rest.get("output")
        if output is None and rest.get("inplace"):
            output = hidden_states
        return y if output is None else output.copy_(y)

    return fused_marlin_moe


def _linear_type(config: Any) -> Optional[str]:
    from vllm.scalar_type import scalar_types

    names = ("uint4",) if config.zero_points else ("uint4b8", "uint8b128")
    return next((n for n in names if config.weight_type == getattr(scalar_types, n)), None)


def _linear_refusal(kernel: Any, layer: Any) -> Optional[str]:
    config = kernel.config
    q, s, _, g_idx = kernel._get_weight_params(layer)
    if _linear_type(config) is None:
        return f"weights of type {config.weight_type}"
    if config.act_type not in _HALVES or s.dtype != config.act_type:
        return f"activations of {config.act_type}"
    if _is_there(g_idx) or config.has_g_idx:
        return "act-order"
    size_k, size_n = config.partition_weight_shape
    if size_k % 64 or size_n % 64:
        return f"sizes {size_k} and {size_n}, expected multiples of 64"
    if not _is_on_gpu(q):
        return "a device below capability 8.0"
    return None


def linear_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MarlinLinearKernel.process_weights_after_loading``: decides, so that traced code does not."""

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        original(self, layer)
        reason = _linear_refusal(self, layer)
        self._marlinspike_type = _linear_type(self.config) if reason is None else None
        if reason is not None:
            keep("MarlinLinearKernel", reason)
        else:
            mark(layer)

    return process_weights_after_loading


def _product(layer: Any, x: torch.Tensor, *weight: Any) -> torch.Tensor:
    """x · W: codes, scales, zero points, bias, type."""
    rows, split = x.reshape(-1, x.shape[-1]), split_of(layer)
    if split is None:
        *tensors, quant_type = weight
        y = torch.ops.marlinspike.marlin_gemm(rows, *tensors, None, quant_type)
    else:
        y = sum_over_ranks(rows, split, *weight)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def linear_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MarlinLinearKernel.apply_weights``."""

    @functools.wraps(original)
    def apply_weights(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        kind = getattr(self, "_marlinspike_type", None)
        if kind is None:
            return original(self, layer, x, bias)
        q, s, z, _ = self._get_weight_params(layer)
        return _product(layer, x, q, s, z if kind == "uint4" else None, bias, kind)

    return apply_weights


def _fp8_refusal(kernel: Any, layer: Any) -> Optional[str]:
    scale = layer.weight_scale_inv if kernel.block_quant else layer.weight_scale
    size_k, size_n = layer.input_size_per_partition, layer.output_size_per_partition
    if kernel.marlin_input_dtype is not None or layer.orig_dtype not in _HALVES:
        return f"activations of {kernel.marlin_input_dtype or layer.orig_dtype}"
    if size_k % 64 or size_n % 64:
        return f"sizes {size_k} and {size_n}, expected multiples of 64"
    if not _is_on_gpu(scale):
        return "a device below capability 8.0"
    return _scales_reason("float8_e4m3fn", scale, layer.orig_dtype, size_k)


def fp8_is_supported(original: Callable[..., Any]) -> Any:
    """``MarlinFP8ScaledMMLinearKernel.is_supported``: ours in batch-invariant mode, too. Where the device has FP8
    arithmetic, upstream's switch still decides, since this kernel rounds no activation."""

    def is_supported(cls: Any, compute_capability: Optional[int] = None) -> Any:
        from vllm import envs

        # None: the caller has asked for the device before.
        capability = 80 if compute_capability is None else compute_capability
        if not is_batch_invariant() or capability < 80:
            return original(compute_capability)
        if capability >= 89 and not envs.VLLM_TEST_FORCE_FP8_MARLIN:
            return False, "FP8 Marlin needs VLLM_TEST_FORCE_FP8_MARLIN=1 on this device."
        return True, None

    return classmethod(is_supported)


def fp8_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MarlinFP8ScaledMMLinearKernel.process_weights_after_loading``."""

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        original(self, layer)
        reason = _fp8_refusal(self, layer)
        self._is_marlinspike = reason is None
        if reason is not None:
            keep("MarlinFP8ScaledMMLinearKernel", reason)
        else:
            mark(layer)

    return process_weights_after_loading


def fp8_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MarlinFP8ScaledMMLinearKernel.apply_weights``."""

    @functools.wraps(original)
    def apply_weights(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        if not getattr(self, "_is_marlinspike", False):
            return original(self, layer, x, bias)
        scale = layer.weight_scale_inv if self.block_quant else layer.weight_scale
        return _product(layer, x, layer.weight, scale, None, bias, "float8_e4m3fn")

    return apply_weights


def fp8_method_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Fp8LinearMethod.apply``, which in batch-invariant mode would widen weights that are packed."""

    @functools.wraps(original)
    def apply(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        if self.use_marlin:
            return self.fp8_linear.apply_weights(layer, x, bias)
        return original(self, layer, x, bias)

    return apply


def norms_priority(original: Callable[..., Any]) -> Any:
    """``CudaPlatformBase.get_default_ir_op_priority``: in batch-invariant mode, the norm of a sum without vLLM's kernel,
    whose order of additions depends on whether there are 256 tokens."""

    def get_default_ir_op_priority(cls: Any, vllm_config: Any) -> Any:
        priority = original(vllm_config)
        if is_batch_invariant():
            rest = [name for name in priority.fused_add_rms_norm if name != "native"]
            priority.fused_add_rms_norm = ["native", *rest]
        return priority

    return classmethod(get_default_ir_op_priority)
