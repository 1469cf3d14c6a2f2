"""What takes the place of vLLM's methods."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Optional

import torch

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


def _type_name(quant_type_id: int) -> Optional[str]:
    from vllm.scalar_type import scalar_types

    names = {getattr(scalar_types, name).id: name for name in ("uint4b8", "uint8b128")}
    return names.get(quant_type_id)


def refusal(
    x: torch.Tensor,
    quant_type: Optional[str],
    scale: Optional[torch.Tensor],
    activation: Any,
    absent: dict,
    w2: torch.Tensor,
) -> Optional[str]:
    """Why this layer's kernel cannot run; None if it can. Read from arguments alone: no element is looked at."""
    if quant_type is None:
        return "weights of another type than uint4b8 and uint8b128"
    for name, value in absent.items():
        if _is_there(value) if isinstance(value, torch.Tensor) else value is not None:
            return f"{name} is set"
    if not x.is_cuda or x.dtype not in _HALVES or scale is None or scale.dtype != x.dtype:
        return f"activations of {x.dtype} on {x.device}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "a device below capability 8.0"
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
        quant_type = _type_name(self.quant_type_id) if self.quant_config.use_int4_w4a16 else None
        absent = {
            "LoRA": self._lora_context,
            "8-bit activations": self.input_dtype,
            "gemm1_clamp_limit": self.gemm1_clamp_limit,
            "w13_g_idx": self.w13_g_idx,
            "w2_g_idx": self.w2_g_idx,
            "g1_alphas": self.g1_alphas,
            "g2_alphas": self.g2_alphas,
            "w1_zp": self.w1_zp,
            "w2_zp": self.w2_zp,
        }
        reason = refusal(hidden_states, quant_type, self.w1_scale, activation, absent, w2)
        if reason is not None:
            keep("MarlinExperts", reason)
            return original(
                self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation,
                global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2,
                expert_tokens_meta, apply_router_weight_on_input,
            )  # fmt: skip
        y = torch.ops.marlinspike.fused_marlin_moe(
            hidden_states, w1, w2, self.w1_bias, self.w2_bias, self.w1_scale, self.w2_scale,
            topk_weights.to(torch.float32), topk_ids, quant_type, apply_router_weight_on_input,
            global_num_experts, activation.value, expert_map,
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
        reason = reason or refusal(hidden_states, kind, w1_scale, activation, absent, w2)
        if reason is not None:
            keep("compressed-tensors WNA16 experts", reason)
            more = dict(rest) if activation is None else dict(rest, activation=activation)
            return original(
                hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights, topk_ids,
                quant_type_id, apply_router_weight_on_input=apply_router_weight_on_input,
                global_num_experts=global_num_experts, expert_map=expert_map, **more,
            )  # fmt: skip
        y = torch.ops.marlinspike.fused_marlin_moe(
            hidden_states, w1, w2, bias1, bias2, w1_scale, w2_scale, topk_weights.to(torch.float32),
            topk_ids, kind, apply_router_weight_on_input, global_num_experts, activation.value, expert_map,
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
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (8, 0):
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

    return process_weights_after_loading


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
        y = torch.ops.marlinspike.marlin_gemm(
            x.reshape(-1, x.shape[-1]), q, s, z if kind == "uint4" else None, bias, None, kind
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return apply_weights
