"""The compiled part. A tensor is its element type's safetensors name, its shape and its bytes."""

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

Typed = Tuple[str, Sequence[int], np.ndarray]
Named = Tuple[str, Typed]
Packed = Tuple[
    Typed, Typed, Optional[Typed], Optional[Tuple[Typed, Typed]], Optional[Typed], Optional[Typed]
]
Parts = Tuple[str, str, List[Named], List[Named], str, str]

class Error(ValueError):
    """An input that marlinspike refuses."""

def operations() -> List[str]: ...
def schema(op: str) -> str: ...
def schema_text(op: str) -> str: ...
def tensors(
    op: str, config: str, local_experts: Optional[int]
) -> List[Tuple[str, List[str], List[int], bool]]: ...
def check(
    op: str, config: str, inputs: List[Named], outputs: List[Named], name: str, provenance: str
) -> str: ...
def write_case(
    op: str, config: str, inputs: List[Named], outputs: List[Named], name: str, provenance: str
) -> bytes: ...
def read_case(bytes: bytes) -> Parts: ...
def draw(op: str, seed: int, index: int, config: Optional[str]) -> Parts: ...
def fuzz(
    kernel: Callable[..., Any],
    op: str,
    filter: str,
    seed: int,
    cases: int,
    seconds: Optional[float],
    outputs: List[str],
    set: str,
    folder: Optional[str],
    shard: str,
    deterministic: bool,
    batch_invariant: bool,
) -> str: ...
def merge(summaries: List[str], regressions: Optional[str]) -> str: ...
def lattice(op: str) -> List[str]: ...
def reference(op: str, config: str, inputs: List[Named]) -> List[Named]: ...
def gptq_marlin_repack(
    b_q_weight: Typed, perm: Optional[Typed], size_k: int, size_n: int, num_bits: int, is_a_8bit: bool
) -> Typed: ...
def awq_marlin_repack(
    b_q_weight: Typed, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool
) -> Typed: ...
def marlin_permute_scales(
    s: Typed, size_k: int, size_n: int, group_size: int, is_a_8bit: bool
) -> Typed: ...
def marlin_permute_bias(s: Typed) -> Typed: ...
def marlin_int4_fp8_preprocess(qweight: Typed, qzeros_or_none: Optional[Typed]) -> Typed: ...
def moe_align_block_size(
    topk_ids: Typed,
    block_size: int,
    num_experts: int,
    expert_map: Optional[Typed],
    ignore_invalid_experts: bool,
) -> List[Typed]: ...
def topk(
    gating_output: Typed,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    groups: Optional[Tuple[int, int]],
    routed_scaling_factor: float,
    e_score_correction_bias: Optional[Typed],
) -> List[Typed]: ...
def per_token_int8(x: Typed, rule: str) -> List[Typed]: ...
def per_token_fp8(x: Typed, scale_ub: Optional[float]) -> List[Typed]: ...
def per_tensor_fp8(x: Typed, scale: Optional[float]) -> List[Typed]: ...
def gptq_quantize_weights(
    w: Typed, quant_type: str, group_size: int, perm: Optional[Typed]
) -> List[Typed]: ...
def marlin_gemm(
    a: Typed, packed: Packed, quant_type: str, size_n: int, size_k: int
) -> Typed: ...
def fused_marlin_moe(
    hidden_states: Typed,
    w1: Packed,
    w2: Packed,
    topk_weights: Typed,
    topk_ids: Typed,
    quant_type: str,
    activation: str,
    intermediate_size: int,
    num_experts: int,
    expert_map: Optional[Typed],
    apply_router_weight_on_input: bool,
) -> Typed: ...
def encode(values: Typed, dtype: str, rounding: str, overflow: str) -> Typed: ...
def decode(codes: Typed, dtype: str) -> Typed: ...
