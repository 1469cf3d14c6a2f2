"""The signatures of what is replaced, as vLLM 0.21.0 and 0.33.0 have them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Dict, List, Optional, Tuple, Union

#: Releases with these signatures. The plugin has run inside 0.21.0.
KNOWN = ("0.21.0", "0.33.0")
#: A module's name, or its names in different releases.
Module = Union[str, Tuple[str, ...]]

_LAYERS = "vllm.model_executor.layers"
EXPERTS = f"{_LAYERS}.fused_moe.experts.marlin_moe"
COMPRESSED = (
    f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_wna16_marlin"
)
#: The same method in releases whose method calls MarlinExperts.
COMPRESSED_BY_EXPERTS = COMPRESSED.replace("_wna16_marlin", "_wna16")
KERNELS = "vllm.model_executor.kernels.linear"
LINEAR = f"{KERNELS}.mixed_precision.marlin"
LINEAR_FP8 = f"{KERNELS}.scaled_mm.marlin"
FP8 = f"{_LAYERS}.quantization.fp8"
INVARIANT = (f"{_LAYERS}.batch_invariant", "vllm.model_executor.determinism.batch_invariant")
PLATFORM = "vllm.platforms.cuda"
ROWS = f"{_LAYERS}.linear"
RUNNER = f"{_LAYERS}.fused_moe.runner.moe_runner"

#: Module and name: parameters.
SIGNATURES: Dict[Tuple[Module, str], List[str]] = {
    (EXPERTS, "MarlinExperts.apply"): (
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map "
        "a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
    ).split(),
    (EXPERTS, "MarlinExperts._supports_batch_invariance"): [],
    (COMPRESSED, "fused_marlin_moe"): (
        "hidden_states w1 w2 bias1 bias2 w1_scale w2_scale topk_weights topk_ids quant_type_id "
        "apply_router_weight_on_input global_num_experts activation activation_func moe_sum expert_map "
        "input_global_scale1 input_global_scale2 global_scale1 global_scale2 g_idx1 g_idx2 sort_indices1 "
        "sort_indices2 w1_zeros w2_zeros workspace intermediate_cache13 intermediate_cache2 is_k_full "
        "output input_dtype inplace clamp_limit"
    ).split(),
    (PLATFORM, "CudaPlatformBase.get_default_ir_op_priority"): ["vllm_config"],
    (LINEAR, "MarlinLinearKernel.process_weights_after_loading"): ["self", "layer"],
    (LINEAR, "MarlinLinearKernel.apply_weights"): ["self", "layer", "x", "bias"],
    (LINEAR_FP8, "MarlinFP8ScaledMMLinearKernel.is_supported"): ["compute_capability"],
    (LINEAR_FP8, "MarlinFP8ScaledMMLinearKernel.process_weights_after_loading"): ["self", "layer"],
    (LINEAR_FP8, "MarlinFP8ScaledMMLinearKernel.apply_weights"): ["self", "layer", "x", "bias"],
    (FP8, "Fp8LinearMethod.apply"): ["self", "layer", "x", "bias"],
    (ROWS, "RowParallelLinear.forward"): ["self", "input_"],
    (INVARIANT, "override_envs_for_invariance"): [],
    (RUNNER, "MoERunner._fused_output_is_reduced"): ["self"],
}


def resolve(module: Module) -> str:
    """The name that this release has; the first one if it has none."""
    names = (module,) if isinstance(module, str) else module
    return next((name for name in names if exists(name)), names[0])


def exists(module: str) -> bool:
    """Whether this release has the module. One that cannot be imported for want of another is there."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return not f"{module}.".startswith(f"{error.name}.")
    except ImportError:
        return True
    return True


def found(module: Module, name: str) -> Any:
    value = importlib.import_module(resolve(module))
    for part in name.split("."):
        value = getattr(value, part)
    return value


def difference(module: Module, name: str) -> Optional[str]:
    """Why a name cannot be replaced; None if it can."""
    here = resolve(module)
    try:
        value = found(module, name)
    except (ImportError, AttributeError) as error:
        return f"{here}.{name} is missing: {error}"
    if isinstance(value, property):
        value = value.fget
    parameters = list(inspect.signature(value).parameters)
    expected = SIGNATURES[module, name]
    if parameters != expected:
        return f"{here}.{name} takes ({', '.join(parameters)}), expected ({', '.join(expected)})"
    return None
