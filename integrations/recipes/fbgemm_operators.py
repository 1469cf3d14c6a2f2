"""FBGEMM GenAI 1.6.0 for `gpu_campaigns.py`: products of int4 and FP8 weights, quantizers and the order of tokens by expert.

LIBRARIES contains `fbgemm_gpu_experimental_gen_ai.so` of the wheel `fbgemm-gpu-genai`, which needs PyTorch 2.11. The wheel's
Python is not needed.
"""

import numpy as np
import torch
import torch_operators as base
import vllm_comparisons as comparisons
import vllm_operators as more

import marlinspike

SIGNED = 0x88  # The top bits of two codes: an offset of 8 becomes two's complement.
GPTQ = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,dtype=bfloat16,group_size=128"
FP8 = "dtype=bfloat16,has_bias=false"


def load(libraries):
    if (file := libraries / "fbgemm_gpu_experimental_gen_ai.so").exists():
        torch.ops.load_library(file)


def call(name, *arguments):
    """Calls an operator; without a GPU, compares the arguments with its schema."""
    operator = getattr(torch.ops.fbgemm, name).default
    if base.DEVICE != "cpu":
        return operator(*arguments)
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    if len(arguments) > len(kinds) or any(
        isinstance(value, torch.Tensor) != kind.endswith("Tensor") and kind == "Tensor" for value, kind in zip(arguments, kinds)
    ):
        raise TypeError(f"{name}: {operator._schema}")
    raise NotImplementedError


def signed_codes(words):
    """uint4b8 codes [N, K / 8] of words as two's complement, two in a byte, the first in the low bits."""
    codes = words.contiguous().view(torch.uint8) ^ SIGNED
    return codes.view(torch.int8)


def int4_weight(words, scales):
    """GPTQ's words [K / 8, N] and scales [K / 128, N]."""
    codes = signed_codes(words.T)
    if codes.shape[1] * 2 != len(scales) * 128:
        raise base.Unsupported("groups of 128")
    return codes, scales.contiguous()


def bf16i4(config, t, shuffled):
    codes, scales = int4_weight(t["in.qweight"], t["in.scales"])
    zeros = torch.zeros_like(scales)
    if not shuffled:
        return {"y": call("bf16i4bf16_rowwise", t["in.x"], codes, scales, zeros)}
    codes, scales = call("preshuffle_i4", codes, scales)
    return {"y": call("bf16i4bf16_shuffled", t["in.x"], codes, scales, zeros)}


def grouped_gate_up(config, t):
    """The first product of a layer: rows in the order of their experts."""
    ids, experts = t["ref.topk_ids"].flatten().long(), config["num_experts"]
    order = torch.argsort(ids, stable=True)
    sizes = torch.bincount(ids, minlength=experts).int()
    parts = [int4_weight(words, scales) for words, scales in zip(t["in.w13_qweight"], t["in.w13_scales"])]
    parts = [call("preshuffle_i4", *part) for part in parts]
    codes, scales = (torch.stack(list(kind)).contiguous() for kind in zip(*parts))
    x = t["in.x"][order // config["top_k"]].contiguous()
    rows = call("bf16i4bf16_shuffled_grouped", x, codes, scales, torch.zeros_like(scales), sizes)
    return {"gate_up": torch.empty_like(rows).index_copy_(0, order, rows)}


def f8i4(config, t):
    if config["group_size"] != 128 or config["size_k"] % 128 or config["size_n"] % 16:
        raise base.Unsupported("groups of 128, a multiple of 16 columns")
    codes = signed_codes(t["in.weight_packed"])
    groups = t["ref.weight_scale"].T.contiguous()
    codes, groups = call("preshuffle_i4", codes, groups)
    by_row, by_column = t["in.a_scales"].reshape(-1), t["ref.weight_chan_scale"].reshape(-1)
    return {"y": call("f8i4bf16_shuffled", t["in.a"], codes, by_row, by_column, groups)}


def f8f8(config, t, fast=False):
    by_row, by_column = t["in.a_scales"].reshape(-1), t["in.weight_scale"].reshape(-1)
    if by_row.numel() != config["size_m"] or by_column.numel() != config["size_n"]:
        raise base.Unsupported("a scale for each row and column")
    return {"y": call("f8f8bf16_rowwise", t["in.a"], t["in.weight"], by_row, by_column, None, fast)}


def f8f8_groups(config, t):
    if t["in.a_scales"].dtype != torch.float32 or t["in.weight_scale"].dtype != torch.float32:
        raise base.Unsupported("scales in f32")
    if config["size_n"] % 128 or config["size_m"] % 4:
        raise base.Unsupported("whole blocks of 128 columns, a multiple of 4 rows")
    by_row, by_column = t["in.a_scales"].T.contiguous(), t["in.weight_scale"].T.contiguous()
    return {"y": call("f8f8bf16_groupwise", t["in.a"], t["in.weight"], by_row, by_column)}


PRODUCTS = {
    "fbgemm_bf16i4_rowwise": ("linear", f"{GPTQ},has_bias=false", {}, ["y"], lambda c, t: bf16i4(c, t, False)),
    "fbgemm_bf16i4_shuffled": ("linear", f"{GPTQ},has_bias=false", {}, ["y"], lambda c, t: bf16i4(c, t, True)),
    "fbgemm_bf16i4_grouped": ("moe", f"{GPTQ},has_bias=false,ep_size=1", {}, ["gate_up"], grouped_gate_up),
    "fbgemm_f8i4_shuffled": ("cutlass_w4a8_mm", "dtype=bfloat16,group_size=128", {}, ["y"], f8i4),
    "fbgemm_f8f8_rowwise": (
        "cutlass_scaled_mm", f"{FP8},per_act_token_quant=true,per_out_ch_quant=true", {}, ["y"], f8f8,
    ),
    "fbgemm_f8f8_rowwise_fast": (
        "cutlass_scaled_mm", f"{FP8},per_act_token_quant=true,per_out_ch_quant=true", {}, ["y"],
        lambda c, t: f8f8(c, t, True),
    ),
}  # fmt: skip


def f8f8_blocks(cases, seed, seconds):
    """`f8f8bf16_groupwise` with drawn cases of whole blocks, judged by `marlinspike.check`."""
    random = np.random.default_rng(seed)

    def one(index):
        config = {
            "dtype": "bfloat16", "size_m": int(random.integers(1, 40)), "size_n": 128 * int(random.integers(1, 4)),
            "size_k": 128 * int(random.integers(1, 6)), "weight_block_size": [128, 128],
        }  # fmt: skip
        case = marlinspike.Case.draw("cutlass_scaled_mm", seed, index, config)
        tensors = {f"in.{name}": more.tensor(array) for name, array in case.inputs.items()}
        try:
            outputs = f8f8_groups(case.config, tensors)
        except (base.Unsupported, NotImplementedError):
            return None, None
        report = marlinspike.check("cutlass_scaled_mm", case.inputs, {"y": outputs["y"].cpu()}, case.config)
        return None if report.verdict == "unchecked" else report.verdict != "fail", lambda: f"{case.config}: {report}"

    return comparisons.tally(cases, seconds, one)


def near(values, scales, codes):
    """Whether each code is nearest to value / scale, within the rounding of two f32 operations."""
    quotients = values.astype(np.float64) / scales.astype(np.float64)
    allowed = [np.asarray(marlinspike.encode(quotients * (1 + side * 2.0**-22), "float8_e4m3fn", overflow="saturate"))
               for side in (-1, 0, 1)]  # fmt: skip
    return np.any([codes == one.view(np.uint8) for one in allowed], axis=0)


def fp8_quantizer(axis, kinds):
    """`quantize_fp8_per_tensor`, `_per_row` or `_per_col`: scale max / 448, codes nearest to x / scale."""

    def compare(cases, seed, seconds):
        random = np.random.default_rng(seed)
        name = {None: "tensor", 1: "row", 0: "col"}[axis]

        def one(index):
            kind = kinds[int(random.integers(0, len(kinds)))]
            x, host = comparisons.activations(random, kind)
            if x.shape[1] % 8:
                return None, None
            try:
                codes, scale = call(f"quantize_fp8_per_{name}", x)
            except NotImplementedError:
                return None, None
            codes = codes.cpu().view(torch.uint8).numpy()
            most = np.abs(host).max(axis=axis, keepdims=True)
            scale = scale.cpu().double().numpy().reshape(most.shape)
            # Rows of very small numbers have the library's least scale.
            judged = most > 2.0**-9
            wrong_scale = judged & ~(np.abs(scale * 448 / np.where(judged, most, 1) - 1) <= 2.0**-22)
            wrong_code = judged & ~near(host, np.where(scale > 0, scale, 1), codes)

            def describe():
                at = np.argwhere(wrong_scale if wrong_scale.any() else wrong_code)[0]
                if wrong_scale.any():
                    return f"{kind}, shape {host.shape}, scale {scale[tuple(at)]}, largest {most[tuple(at)]}"
                found = scale[tuple(np.minimum(at, np.array(scale.shape) - 1))]
                return f"{kind}, shape {host.shape}, x {host[tuple(at)]}, scale {found}, code {codes[tuple(at)]}"

            return not wrong_scale.any() and not wrong_code.any(), describe

        return comparisons.tally(cases, seconds, one)

    return compare


def index_shuffling(cases, seed, seconds):
    """Tokens in the order of their experts, for scores without ties: counts, experts, and the tokens of each expert."""
    random = np.random.default_rng(seed)

    def one(index):
        tokens, experts = int(random.integers(1, 260)), int(random.choice([16, 32, 128]))
        top_k = int(random.choice([1, 2, 4])) if random.integers(0, 2) else 1
        scores = random.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1).astype(np.float32) / 8
        chosen = np.argsort(-scores, axis=1)[:, :top_k]
        tensor = torch.from_numpy(scores).to(torch.bfloat16).to(base.DEVICE)
        try:
            counts, ids, rows = call("index_shuffling", tensor, None, None, None, top_k)
        except NotImplementedError:
            return None, None
        counts, ids, rows = (tensor.cpu().numpy().reshape(-1) for tensor in (counts, ids, rows))
        expected = np.bincount(chosen.reshape(-1), minlength=experts)
        pairs = sorted((int(e), row) for row in range(tokens) for e in chosen[row])
        found = sorted(zip(ids[: len(pairs)].tolist(), rows[: len(pairs)].tolist()))
        right = np.array_equal(counts[:experts], expected) and np.array_equal(ids, np.sort(ids)) and found == pairs
        return bool(right), lambda: (
            f"{tokens} tokens, {experts} experts, top {top_k}: counts {counts.tolist()}, expected {expected.tolist()}; "
            f"pairs {found[:8]}, expected {pairs[:8]}"
        )

    return comparisons.tally(cases, seconds, one)


COMPARISONS = {
    "fbgemm_f8f8_groupwise": f8f8_blocks,
    "fbgemm_quantize_fp8_per_tensor": fp8_quantizer(None, [torch.bfloat16]),
    "fbgemm_quantize_fp8_per_row": fp8_quantizer(1, [torch.bfloat16]),
    "fbgemm_quantize_fp8_per_tensor_f32": fp8_quantizer(None, [torch.float32]),
    "fbgemm_quantize_fp8_per_row_other_types": fp8_quantizer(1, [torch.float16, torch.float32]),
    "fbgemm_quantize_fp8_per_col": fp8_quantizer(0, [torch.bfloat16]),
    "fbgemm_index_shuffling": index_shuffling,
}
