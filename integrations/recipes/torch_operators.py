"""vLLM's and PyTorch's operators on a GPU as kernels of `marlinspike fuzz --persistent`.

    marlinspike fuzz --op linear --output y --timeout 300 --persistent \
        --cmd 'python3 torch_operators.py marlin_gemm FOLDER'

FOLDER holds `_C.abi3.so` and `_moe_C.abi3.so` of vLLM 0.21.0's wheel, or `_C_stable_libtorch.abi3.so` and
`_moe_C_stable_libtorch.abi3.so` of 0.33.0's, whose products have no act-order. The first call of a kernel without code
for the GPU is compiled from PTX, which takes up to a minute: hence the timeout.

| operator | --op | --output |
| --- | --- | --- |
| `marlin_gemm` | `linear` | `y` |
| `repack` | `linear` | `marlin_qweight` |
| `moe_gate_up`, `moe_down` (16-bit activations) | `moe` | `gate_up`, `down` |
| `moe_align_block_size` | `moe_align_block_size` | every output |
| `scaled_mm`, `scaled_mm_fast` (PyTorch; no FOLDER) | `cutlass_scaled_mm` | `y` |

`gpu_campaigns.py` runs these and the other operators of vLLM, without files between the processes.
"""

import json
import os
import struct
import sys

import torch

TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# Exponent bits, mantissa bits, sign, bias, finite values only, NaN: vLLM's scalar_type.py.
WEIGHTS = {
    "uint4": (0, 4, 0, 0, 0, 1),
    "uint8": (0, 8, 0, 0, 0, 1),
    "uint4b8": (0, 4, 0, 8, 0, 1),
    "uint8b128": (0, 8, 0, 128, 0, 1),
    "float8_e4m3fn": (4, 3, 1, 0, 1, 2),
    "float4_e2m1f": (2, 1, 1, 0, 1, 0),
}


DEVICE = "cuda"


def load(folder):
    """Loads the operators of vLLM that the folder holds: releases divide them among other libraries."""
    for name in ("_C_stable_libtorch", "_C", "_moe_C", "_moe_C_stable_libtorch"):
        if os.path.exists(file := os.path.join(folder, f"{name}.abi3.so")):
            torch.ops.load_library(file)


class Unsupported(Exception):
    """The operator is not defined for this case."""


def type_id(name):
    exponent, mantissa, sign, bias, finite, nan = WEIGHTS[name]
    return exponent | mantissa << 8 | sign << 16 | bias << 17 | finite << 49 | nan << 50


def read(path):
    data = open(path, "rb").read()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    metadata, tensors = header.pop("__metadata__"), {}
    for name, tensor in header.items():
        begin, stop = (end + at for at in tensor["data_offsets"])
        values = torch.frombuffer(bytearray(data[begin:stop] or b"\0"), dtype=torch.uint8)
        values = values[: stop - begin].view(TYPES[tensor["dtype"]])
        tensors[name] = values.reshape(tensor["shape"]).to(DEVICE)
    return json.loads(metadata["config"]), json.loads(metadata["outputs"]), tensors


def write(path, outputs, wanted):
    header, data = {}, b""
    for output in wanted:
        tensor = outputs[output["name"]].contiguous().cpu()
        values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        span = [len(data), len(data) + len(values)]
        header[output["name"]] = {"dtype": output["dtype"], "shape": list(tensor.shape), "data_offsets": span}
        data += values
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def in_kernel_type(scales, dtype):
    """Scales as the kernel reads them: int16 in the bits of the activation type, bytes as e8m0."""
    views = {torch.int16: dtype, torch.uint8: torch.float8_e8m0fnu}
    return scales.view(views[scales.dtype]) if scales.dtype in views else scales


def workspace():
    return torch.zeros(8192, dtype=torch.int32, device=DEVICE)


def whole_groups(scales, size_k):
    """Fewer than 16 rows for each scale end the process: an integer division by zero in `marlin_mm`."""
    if 1 < scales.shape[-2] and size_k // scales.shape[-2] < 16:
        raise Unsupported("groups of fewer than 16 rows")


def takes(operator, *names):
    """Whether an operator has one of these arguments: other releases have other ones."""
    return any(argument.name in names for argument in operator.default._schema.arguments)


def arguments_of_order(operator, config, *order):
    """The arguments for act-order and the flag for slices of K, where the release has them."""
    if takes(operator, "is_k_full", "is_full_k"):
        return order if config.get("desc_act") else (None,) * len(order), (config.get("is_k_full", True),)
    if config.get("desc_act"):
        raise Unsupported("this release has no act-order")
    return (), ()


def marlin_gemm(config, t):
    operator = torch.ops._C.marlin_gemm
    dtype, sizes = getattr(torch, config["dtype"]), [config[key] for key in ("size_m", "size_n", "size_k")]
    x, a_scales = t.get("in.x"), None
    if config.get("input_dtype"):
        # The case's scales already hold `input_global_scale`.
        x, a_scales = t["in.a_q"], t["in.a_scales"]
    order, full = arguments_of_order(operator, config, t.get("ref.sorted_g_idx"), t.get("ref.g_idx_sort_indices"))
    y = torch.full(sizes[:2], float("nan"), dtype=dtype, device=DEVICE)
    scales, global_scale = in_kernel_type(t["ref.marlin_scales"], dtype), t.get("ref.marlin_global_scale")
    packed, bias = t["ref.marlin_qweight"], t.get("ref.marlin_bias")
    whole_groups(scales, config["size_k"])
    weight = (packed, bias, scales, a_scales, global_scale, t.get("ref.marlin_zeros"), *order)
    # No atomic additions, reduction in f32, integer zero points.
    flags = (*full, False, True, False)
    return {"y": operator(x, y, *weight, workspace(), type_id(config["weight_type"]), *sizes, *flags)}


def repack(config, t):
    eight = config.get("input_dtype") is not None
    if config.get("input_dtype") == "float8_e4m3fn" and config["weight_type"] in ("uint4", "uint4b8"):
        raise Unsupported("codes are preprocessed for e4m3 activations")
    bits = WEIGHTS[config["weight_type"]]
    sizes = (config["size_k"], config["size_n"], 4 if sum(bits[:3]) == 4 else 8, eight)
    if config["checkpoint_format"] == "awq":
        return {"marlin_qweight": torch.ops._C.awq_marlin_repack(t["in.qweight"], *sizes)}
    operator = torch.ops._C.gptq_marlin_repack
    perm = torch.empty(0, dtype=torch.int32, device=DEVICE)
    if config.get("desc_act") and "in.g_idx" in t:
        perm = torch.argsort(t["in.g_idx"], stable=True).int()
    words = t.get("in.qweight")
    if words is None:
        words = t["in.weight"].view(torch.uint8).view(torch.int32).T.contiguous()
    if takes(operator, "perm"):
        return {"marlin_qweight": operator(words, perm, *sizes)}
    if len(perm):
        raise Unsupported("this release has no act-order")
    return {"marlin_qweight": operator(words, *sizes)}


def expert_product(config, t, part, x, sizes, top_k, weighted):
    if config.get("input_dtype"):
        raise Unsupported("8-bit activations")
    operator = torch.ops._moe_C.moe_wna16_marlin_gemm
    dtype, ref = getattr(torch, config["dtype"]), lambda name: t.get(f"ref.{part}_{name}")
    order, full = arguments_of_order(operator, config, ref("sorted_g_idx"), ref("g_idx_sort_indices"))
    # Rows without an expert of this rank are not written.
    y = torch.zeros((config["size_m"] * config["top_k"], sizes[1]), dtype=dtype, device=DEVICE)
    scales, global_scale = in_kernel_type(ref("marlin_scales"), dtype), ref("marlin_global_scale")
    whole_groups(scales, sizes[2])
    weight = (ref("marlin_qweight"), ref("marlin_bias"), scales, None, global_scale, ref("marlin_zeros"), *order)
    blocks = [t[f"ref.{name}"] for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")]
    routing = (*blocks, t["ref.topk_weights"], config["block_size_m"], top_k, weighted)
    flags = (*full, False, True, False, -1, -1, -1)
    kind = type_id(config["weight_type"])
    operator(x, y, *weight, workspace(), *routing, kind, *sizes, *flags)
    return y


def moe_gate_up(config, t):
    sizes = (config["size_m"], t["ref.w13_marlin_scales"].shape[-1], config["hidden_size"])
    weighted = bool(config.get("apply_router_weight_on_input"))
    return {"gate_up": expert_product(config, t, "w13", t["in.x"], sizes, config["top_k"], weighted)}


def moe_down(config, t):
    sizes = (config["size_m"] * config["top_k"], config["hidden_size"], config["intermediate_size"])
    weighted = not config.get("apply_router_weight_on_input")
    return {"down": expert_product(config, t, "w2", t["ref.activated"], sizes, 1, weighted)}


def moe_align_block_size(config, t):
    ids, experts, block = t["in.topk_ids"], config["num_experts"], config["block_size"]
    most = ids.numel() + experts * (block - 1)
    if ids.numel() < experts:
        most = min(most, ids.numel() * block)
    blocks = -(-most // block)
    sizes = (most, blocks, 1)
    sorted_ids, expert_ids, count = (torch.empty(n, dtype=torch.int32, device=DEVICE) for n in sizes)
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, sorted_ids, expert_ids, count, None)
    used = int(count)
    expert_ids = expert_ids[: used // block]
    if "in.expert_map" in t:
        expert_ids = t["in.expert_map"][expert_ids.long()]
    return {"sorted_token_ids": sorted_ids[:used], "expert_ids": expert_ids, "num_tokens_post_padded": count}


def scaled_mm(config, t, fast=False):
    if config["size_k"] % 16 or config["size_n"] % 16:
        raise Unsupported("cuBLASLt takes multiples of 16")
    a, b, by_row, by_column = t["in.a"], t["in.weight"].t(), t["in.a_scales"], t["in.weight_scale"]
    dtype = getattr(torch, config["dtype"])
    if config.get("per_act_token_quant") or config.get("per_out_ch_quant"):
        if dtype != torch.bfloat16:
            raise Unsupported("scales of rows need bfloat16")
        by_row = by_row.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        by_column = by_column.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    else:
        by_row, by_column = by_row.reshape(()), by_column.reshape(())
    scales = {"scale_a": by_row, "scale_b": by_column}
    return {"y": torch._scaled_mm(a, b, **scales, bias=t.get("in.bias"), out_dtype=dtype, use_fast_accum=fast)}


OPERATORS = {
    "marlin_gemm": marlin_gemm,
    "repack": repack,
    "moe_gate_up": moe_gate_up,
    "moe_down": moe_down,
    "moe_align_block_size": moe_align_block_size,
    "scaled_mm": scaled_mm,
    "scaled_mm_fast": lambda config, t: scaled_mm(config, t, fast=True),
}


def answer(operator, source, target):
    config, wanted, tensors = read(source)
    try:
        outputs = operator(config, tensors)
    except Unsupported as reason:
        return f"skip {reason}"
    except RuntimeError as error:
        # The operator's own checks. An error of the device ends the process, which is a finding.
        if "CUDA error" in str(error):
            raise
        return f"skip {str(error).splitlines()[0]}"
    torch.cuda.synchronize()
    write(target, outputs, wanted)
    return "ok"


def main():
    operator = OPERATORS[sys.argv[1]]
    for folder in sys.argv[2:3]:
        load(folder)
    for line in sys.stdin:
        print(answer(operator, *line.rstrip("\n").split("\t")), flush=True)


if __name__ == "__main__":
    main()
