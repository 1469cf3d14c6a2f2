"""Correctness oracle for quantized MoE kernels.

>>> import marlinspike
>>> case = marlinspike.Case.draw("linear", seed=1)
>>> case.check().verdict
'pass'

``check`` and ``assert_correct`` judge a kernel's outputs: packed and integer outputs bit for bit,
products and layers within a bound that is derived, not chosen. Failures name their cause. The other
functions are helpers of kernel tests, named and shaped like vLLM's.
"""

import json as _json
from typing import Any as _Any
from typing import Dict as _Dict

from . import _core
from ._case import Case, assert_correct, check, reference
from ._core import Error
from ._functions import (
    awq_marlin_moe_repack,
    awq_marlin_repack,
    fused_marlin_moe,
    fused_topk,
    gptq_marlin_gemm,
    gptq_marlin_moe_repack,
    gptq_marlin_repack,
    gptq_quantize_weights,
    grouped_topk,
    marlin_int4_fp8_preprocess,
    marlin_moe_permute_scales,
    marlin_permute_bias,
    marlin_permute_scales,
    moe_align_block_size,
    per_token_quant_int8,
    scaled_fp4_quant,
    scaled_fp8_quant,
)
from ._fuzz import (
    Finding,
    FuzzFailure,
    FuzzSummary,
    MergedFinding,
    MergedSummary,
    Unsupported,
    fuzz,
    merge,
    run_fuzz,
)
from ._numbers import decode, encode
from ._report import OutputReport, Report

__version__ = _core.version()


def operations() -> "list[str]":
    """The operations that a case can hold."""
    return _core.operations()


def schema(op: str) -> _Dict[str, _Any]:
    """JSON Schema of an operation's config keys and tensors."""
    return _json.loads(_core.schema(op))


__all__ = [
    "__version__",
    "Case",
    "Error",
    "Finding",
    "FuzzFailure",
    "FuzzSummary",
    "MergedFinding",
    "MergedSummary",
    "OutputReport",
    "Report",
    "Unsupported",
    "assert_correct",
    "awq_marlin_moe_repack",
    "awq_marlin_repack",
    "check",
    "decode",
    "encode",
    "fused_marlin_moe",
    "fused_topk",
    "fuzz",
    "gptq_marlin_gemm",
    "gptq_marlin_moe_repack",
    "gptq_marlin_repack",
    "gptq_quantize_weights",
    "grouped_topk",
    "marlin_int4_fp8_preprocess",
    "marlin_moe_permute_scales",
    "marlin_permute_bias",
    "marlin_permute_scales",
    "merge",
    "moe_align_block_size",
    "operations",
    "per_token_quant_int8",
    "reference",
    "run_fuzz",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "schema",
]
