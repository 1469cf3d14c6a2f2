"""The entry point."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Callable, List, Tuple

from . import _parallel as parallel
from . import _replacements as ours
from ._signatures import (
    COMPRESSED,
    COMPRESSED_BY_EXPERTS,
    EXPERTS,
    FP8,
    INVARIANT,
    KERNELS,
    KNOWN,
    LINEAR,
    LINEAR_FP8,
    PLATFORM,
    ROWS,
    RUNNER,
    Module,
    difference,
    exists,
    found,
    resolve,
)

_log = logging.getLogger("vllm.marlinspike")

#: Name in the log; what must be as expected: module, name and its replacement.
_Hook = Tuple[str, List[Tuple[Module, str, Callable[[Any], Any]]]]
_HOOKS: List[_Hook] = [
    (
        "MarlinExperts.apply",
        [
            (EXPERTS, "MarlinExperts.apply", ours.experts_apply),
            (
                EXPERTS,
                "MarlinExperts._supports_batch_invariance",
                lambda original: staticmethod(lambda: True),
            ),
        ],
    ),
    (
        "fused_marlin_moe of compressed-tensors",
        [(COMPRESSED, "fused_marlin_moe", ours.compressed_moe)],
    ),
    (
        "MarlinLinearKernel",
        [
            (
                LINEAR,
                "MarlinLinearKernel.process_weights_after_loading",
                ours.linear_process,
            ),
            (LINEAR, "MarlinLinearKernel.apply_weights", ours.linear_apply),
        ],
    ),
    (
        "MarlinFP8ScaledMMLinearKernel",
        [
            (LINEAR_FP8, "MarlinFP8ScaledMMLinearKernel.is_supported", ours.fp8_is_supported),
            (
                LINEAR_FP8,
                "MarlinFP8ScaledMMLinearKernel.process_weights_after_loading",
                ours.fp8_process,
            ),
            (LINEAR_FP8, "MarlinFP8ScaledMMLinearKernel.apply_weights", ours.fp8_apply),
            (FP8, "Fp8LinearMethod.apply", ours.fp8_method_apply),
        ],
    ),
]
#: In batch-invariant mode only.
_INVARIANT: List[_Hook] = [
    (
        "the order of norms",
        [(PLATFORM, "CudaPlatformBase.get_default_ir_op_priority", ours.norms_priority)],
    ),
]
#: With MARLINSPIKE_PARALLEL_INVARIANT=1.
_PARALLEL: List[_Hook] = [
    (
        "sums over ranks",
        [
            (ROWS, "RowParallelLinear.forward", parallel.row_parallel_forward),
            (RUNNER, "MoERunner._fused_output_is_reduced", parallel.fused_output_is_reduced),
            (INVARIANT, "override_envs_for_invariance", parallel.keep_nccl_settings),
        ],
    ),
]

_is_done = False


def _replace(module: Module, name: str, make: Callable[[Any], Any]) -> None:
    *parents, last = name.split(".")
    if parents:
        owner = found(module, ".".join(parents))
    else:
        owner = importlib.import_module(resolve(module))
    setattr(owner, last, make(getattr(owner, last)))


def _prefer_marlin() -> None:
    """Chooses Marlin's kernel, now ours, before Machete."""
    from vllm.platforms import PlatformEnum

    kernels = found(KERNELS, "_POSSIBLE_KERNELS")[PlatformEnum.CUDA]
    names = [kernel.__name__ for kernel in kernels]
    if "MacheteLinearKernel" in names and names.index("MarlinLinearKernel") > names.index(
        "MacheteLinearKernel"
    ):
        marlin = kernels.pop(names.index("MarlinLinearKernel"))
        kernels.insert(names.index("MacheteLinearKernel"), marlin)


def _on_cuda(version: str) -> None:
    # Registers the operators.
    import marlinspike.torch  # noqa: F401

    hooks = list(_HOOKS)
    if ours.is_batch_invariant():
        hooks += _INVARIANT
    if parallel.is_parallel_invariant():
        if not ours.is_batch_invariant():
            raise RuntimeError(f"{parallel.SWITCH}=1 needs VLLM_BATCH_INVARIANT=1")
        hooks += _PARALLEL
    done, left = [], []
    for name, parts in hooks:
        if parts[0][0] == COMPRESSED and not exists(COMPRESSED) and exists(COMPRESSED_BY_EXPERTS):
            continue
        differences = [difference(module, part) for module, part, _ in parts]
        reasons = [reason for reason in differences if reason is not None]
        if reasons:
            left += reasons
            continue
        for module, part, make in parts:
            _replace(module, part, make)
        if name == "MarlinLinearKernel":
            _prefer_marlin()
        done.append(name)
    for reason in left:
        _log.warning("marlinspike: not replaced: %s", reason)
    if left and ours.is_batch_invariant():
        raise RuntimeError(
            f"VLLM_BATCH_INVARIANT=1: marlinspike knows vLLM {', '.join(KNOWN)}, found {version}: "
            + "; ".join(left)
        )
    _log.info("marlinspike: replaced %s (vLLM %s)", ", ".join(done) or "nothing", version)


def register() -> None:
    """Called by vLLM in every process. A second call changes nothing."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    try:
        import vllm
        from vllm.platforms import current_platform

        version = getattr(vllm, "__version__", "of an unknown version")
        if current_platform.is_cuda():
            _on_cuda(version)
        elif current_platform.is_cpu():
            import marlinspike.torch

            marlinspike.torch.install_aten()
            _log.info("marlinspike: replaced aten::_dyn_quant_* on the CPU (vLLM %s)", version)
    except ImportError as error:
        if ours.is_batch_invariant():
            raise
        _log.warning("marlinspike: nothing replaced: %s", error)
