"""The compiled part. A tensor is its element type's safetensors name, its shape and its bytes."""

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

Typed = Tuple[str, Sequence[int], np.ndarray]
Named = Tuple[str, Typed]
Packed = Tuple[
    Typed, Typed, Optional[Typed], Optional[Tuple[Typed, Typed]], Optional[Typed], Optional[Typed]
]
# The convention, and the class by name or as JSON.
Stated = Tuple[Optional[str], Optional[str]]
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
    op: str,
    config: str,
    inputs: List[Named],
    outputs: List[Named],
    text: Tuple[str, str],
    stated: Stated,
) -> str: ...
def expect_stated(stated: Stated) -> None: ...
def write_case(
    op: str, config: str, inputs: List[Named], outputs: List[Named], name: str, provenance: str
) -> bytes: ...
def read_case(bytes: bytes) -> Parts: ...
def draw(op: str, seed: int, index: int, config: Optional[str], schedule: bool) -> Parts: ...
def version() -> str: ...
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
    findings: int,
    stated: Stated,
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
def marlin_gemm_part(
    a: Typed, packed: Packed, quant_type: str, size_n: int, split: Tuple[int, int, int]
) -> Typed: ...
def add_ranks(
    sums: Typed, packed: Packed, quant_type: str, dtype: str, size_k: int
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
def moe_activation(gate_up: Typed, activation: str) -> Typed: ...
def moe_sum(down: Typed) -> Typed: ...
def dyn_quant_packed_len(block_size: int, size_k: int, size_n: int) -> int: ...
def dyn_quant_pack(
    weights: Typed,
    scales_zeros: Typed,
    bias: Optional[Typed],
    block_size: int,
    size_k: int,
    size_n: int,
) -> Typed: ...
def dyn_quant_matmul(
    inp: Typed, packed_weights: Typed, block_size: int, size_k: int, size_n: int
) -> Typed: ...

# With the feature `cuda`, on addresses of torch's tensors.

Place = Tuple[int, int]
Memory = Tuple[int, int]
Sizes = Tuple[str, str, int, int, int, int]
Weight = Tuple[
    Sizes, Memory, Memory, Optional[Memory], Optional[Memory], Optional[Memory]
]
Tables = Tuple[Memory, Optional[Memory], int]

def cuda_gemm(
    place: Place,
    dtype: str,
    weight: Weight,
    x: Memory,
    y: Memory,
    work: Optional[Tuple[int, int]],
    flags: Optional[Memory],
) -> Tuple[int, int]: ...
def cuda_gemm_part(
    place: Place,
    dtype: str,
    weight: Weight,
    split: Tuple[int, int, int],
    x: Memory,
    sums: Memory,
    work: Optional[Tuple[int, int]],
    flags: Optional[Memory],
) -> Tuple[int, int]: ...
def cuda_add_ranks(
    place: Place,
    dtype: str,
    weight: Weight,
    split: Tuple[int, int, int],
    sums: Memory,
    y: Memory,
) -> None: ...
def cuda_moe(
    place: Place,
    dtype: str,
    weights: Tuple[Weight, Weight],
    tables: Tables,
    activation: str,
    apply_router_weight_on_input: bool,
    tokens: Tuple[int, int],
    routed: Tuple[Memory, Memory, Memory, Memory],
    work: Optional[Tuple[int, int]],
    flags: Optional[Memory],
) -> Tuple[int, int]: ...
def cuda_repack(
    place: Place,
    is_awq: bool,
    qweight: Memory,
    perm: Optional[Memory],
    sizes: Tuple[int, int, int, int, bool],
    out: Memory,
) -> None: ...
def cuda_permute_scales(
    place: Place, scales: Memory, size_n: int, is_grouped: bool, out: Memory
) -> None: ...
def cuda_quantize(
    place: Place,
    dtype: str,
    rule: str,
    scale_ub: Optional[float],
    size_k: int,
    memory: Tuple[Memory, Memory, Memory],
) -> None: ...
def cuda_topk(
    place: Place,
    logits: Memory,
    experts: int,
    logits_type: str,
    rule: Tuple[int, bool, str, Optional[Tuple[int, int]], float],
    bias: Optional[Memory],
    outputs: Tuple[Memory, Memory],
) -> None: ...
def cuda_align(
    place: Place,
    topk_ids: Memory,
    block_size: int,
    tables: Tables,
    work: Optional[Tuple[int, int]],
    outputs: Optional[Tuple[Memory, Memory, Memory]],
) -> Tuple[int, int, int]: ...
def cuda_activation(
    place: Place, dtype: str, activation: str, gate_up: Memory, size_i: int, out: Memory
) -> None: ...
def cuda_sum(
    place: Place, dtype: str, down: Memory, sizes: Tuple[int, int], out: Memory
) -> None: ...
