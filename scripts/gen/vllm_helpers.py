"""vLLM's own layout helpers, loaded from its wheel without a GPU and without the rest of it.

The modules named in REAL run unchanged. Everything else of the package is an
inert stand-in, except for two CUDA operators that the helpers call. Their
stand-ins use vLLM's pure-PyTorch helpers (the repack) or are written below
(the int4 to fp8 preprocess); `prove_operators` compares both with outputs of
the real operators before any golden file is written.
"""

import importlib
import json
import struct
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

import stand_ins
from common import GOLDEN

UTILS = "vllm.model_executor.layers.quantization.utils"
REAL = {
    "vllm.scalar_type",
    f"{UTILS}.quant_utils",
    f"{UTILS}.marlin_utils",
    f"{UTILS}.marlin_utils_fp8",
    f"{UTILS}.marlin_utils_fp4",
    f"{UTILS}.marlin_utils_test",
}


def load(wheel):
    """The helpers' modules: `quant`, `marlin`, `fp8`, `fp4`, `test`, `types`."""
    if "vllm-0.21.0-" not in str(wheel):
        raise SystemExit(f"{wheel}: expected the wheel of vllm 0.21.0")
    stand_ins.install({"vllm"}, REAL, stand_ins.from_wheels({"vllm": wheel}))
    platform = importlib.import_module("vllm.platforms")
    platform.current_platform = MagicMock()
    platform.current_platform.fp8_dtype = lambda: torch.float8_e4m3fn
    platform.current_platform.is_fp8_fnuz = lambda: False
    names = {"quant": "quant_utils", "marlin": "marlin_utils", "fp8": "marlin_utils_fp8",
             "fp4": "marlin_utils_fp4", "test": "marlin_utils_test"}
    v = SimpleNamespace(**{k: importlib.import_module(f"{UTILS}.{n}") for k, n in names.items()})
    v.types = importlib.import_module("vllm.scalar_type").scalar_types

    def unpack_rows(packed, bits, size_k, size_n):
        """[K/pack, N] to [K, N]: upstream's column unpacking, transposed."""
        return v.quant.unpack_cols(packed.T.contiguous(), bits, size_n, size_k).T.contiguous()

    def repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
        q_w = unpack_rows(b_q_weight, num_bits, size_k, size_n)
        if perm.numel():
            q_w = q_w[perm.long()]
        order = v.test.get_weight_perm(num_bits, is_a_8bit)
        return v.test.marlin_weights(q_w, size_k, size_n, num_bits, order, is_a_8bit=is_a_8bit)

    def preprocess(qweight, qzeros=None):
        """Nibble v to v - 8 if v >= 8, else 15 - v (unsigned int4 without zero points)."""
        assert qzeros is None
        words, out = qweight.numpy().view(np.uint32), 0
        for shift in range(0, 32, 4):
            nibble = (words >> shift) & 15
            out = out | (np.where(nibble >= 8, nibble - 8, 15 - nibble).astype(np.uint32) << shift)
        return torch.from_numpy(out.view(np.int32))

    ops = SimpleNamespace(gptq_marlin_repack=repack, marlin_int4_fp8_preprocess=preprocess)
    for module in (v.marlin, v.fp8, v.fp4, v.test):
        module.ops = ops
    for module in (v.fp8, v.fp4):
        module.marlin_make_workspace_new = lambda device: None
    v.fp8.replace_parameter = lambda layer, name, value: setattr(layer, name, value)
    v.unpack_rows, v.repack, v.preprocess = unpack_rows, repack, preprocess
    return v


def read_case(path):
    """Tensors of a golden case, through numpy."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
             "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            body = bytearray(data[8 + length + start : 8 + length + end])
            tensors[name] = torch.frombuffer(body, dtype=kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def same_bits(left, right):
    return left.shape == right.shape and torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


def prove_operators(v):
    """Compares the stand-ins of the CUDA operators with the operators' outputs on an H200."""
    empty = torch.empty(0, dtype=torch.int32)
    for name, bits, a8 in [
        ("f16_u4b8_g128_act0", 4, False),
        ("bf16_u8b128_g64_act0", 8, False),
        ("bf16_u4b8_int8act_g64", 4, True),
        ("f16_u4b8_g32_act1", 4, False),
        ("bf16_u8b128_g64_act1", 8, False),
    ]:
        case = read_case(GOLDEN / f"data/cases/linear-{name}.safetensors")
        packed = case["in.qweight"]
        size_k, size_n = packed.shape[0] * 32 // bits, packed.shape[1]
        perm = case.get("out.g_idx_sort_indices", empty)
        if not same_bits(v.repack(packed, perm, size_k, size_n, bits, is_a_8bit=a8), case["out.marlin_qweight"]):
            raise SystemExit(f"the stand-in of gptq_marlin_repack differs from the operator on {name}")
    case = read_case(GOLDEN / "data/cases/int4_fp8_preprocess-gptq.safetensors")
    if not same_bits(v.preprocess(case["in.qweight"]), case["out.qweight"]):
        raise SystemExit("the stand-in of marlin_int4_fp8_preprocess differs from the operator")


def marlin_integer(v, qweight, scales, bits, group_size, g_idx=None):
    """Marlin tensors of a GPTQ-packed module as `MarlinLinearKernel` makes them.

    With one difference: the sort is the stable one. Upstream's `marlin_sort_g_idx` calls an
    unstable argsort, whose result depends on the processor.
    """
    size_k, size_n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    out, perm = {}, torch.empty(0, dtype=torch.int32)
    if g_idx is not None:
        perm = torch.argsort(g_idx, stable=True).to(torch.int32)
        out["g_idx_sort_indices"], out["sorted_g_idx"] = perm, g_idx[perm]
        assert torch.equal(out["sorted_g_idx"], v.marlin.marlin_sort_g_idx(g_idx)[0])
    out["marlin_qweight"] = v.repack(qweight, perm, size_k, size_n, bits)
    out["marlin_scales"] = v.marlin.marlin_permute_scales(scales.contiguous(), size_k, size_n, group_size)
    return out
