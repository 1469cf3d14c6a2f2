"""PyTorch's quantized products on the CPU as kernels of `marlinspike.run_fuzz`.

    pip install ./integrations/python torch
    python torch_cpu_operators.py weight_int4pack_mm --cases 20000

| operator | operation | output |
| --- | --- | --- |
| `dyn_quant_matmul_4bit` | `dyn_quant_linear` | `y`; on x86 the fallback, on Arm KleidiAI |
| `weight_int4pack_mm` | `linear`, uint4b8 without act-order | `y` |
| `weight_int8pack_mm` | `linear`, uint8b128 with one scale per column | `y` |
| `scaled_mm` | `cutlass_scaled_mm` | `y` |
| `int_mm` | none: against numpy's int64 | int32 sums |

The fallback of `_dyn_quant_matmul_4bit` does not promise KleidiAI's bits. `dyn_quant_matmul_4bit` therefore compares it with
the same integers in float64, within a bound that covers every order of the f32 steps; `dyn_quant_matmul_4bit_bits` compares bits.
"""

import argparse
import sys

import numpy as np
import torch

import marlinspike

aten = torch.ops.aten
INT8 = "checkpoint_format=gptq,weight_type=uint8b128,group_size=-1,input_dtype=null,desc_act=false,has_bias=false"
INT4 = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,has_bias=false"


def tensor(array):
    """A tensor in torch's own memory with the bits of a numpy or ml_dtypes array."""
    array, name = np.ascontiguousarray(array), array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        bits = torch.from_numpy(array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8))
        return bits.clone().view(getattr(torch, name))
    # `_weight_int8pack_mm` ends the process for bfloat16 at addresses that numpy gives: so the copy.
    return torch.from_numpy(array).clone()


def codes(inputs, config, bits):
    """GPTQ codes ``[K, N]``."""
    words = inputs["qweight"].view(np.uint32)
    fields = [words >> np.uint32(bits * i) & np.uint32((1 << bits) - 1) for i in range(32 // bits)]
    return np.stack(fields, axis=1).reshape(config["size_k"], config["size_n"]).astype(np.int32)


def in_float32(inputs, largest):
    """Skips scales at which a weight, `largest` times a scale, is not a float32 number."""
    size = np.abs(inputs["scales"].astype(np.float64))
    if (size * largest >= 2.0**128).any():
        raise marlinspike.Unsupported("weights beyond float32")


def weight_int4pack_mm(inputs, config):
    size_k, size_n = config["size_k"], config["size_n"]
    group_size = len(inputs["scales"]) and size_k // len(inputs["scales"])
    if group_size not in (32, 64, 128, 256) or size_n % 16:
        raise marlinspike.Unsupported("groups of 32, 64, 128 or 256, N a multiple of 16")
    in_float32(inputs, 8)
    weight = tensor(codes(inputs, config, 4).T)
    packed = aten._convert_weight_to_int4pack_for_cpu(weight, 1)
    scales = tensor(inputs["scales"])
    # Weights are (code - 8) * scale + zero.
    both = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()
    y = aten._weight_int4pack_mm_for_cpu(tensor(inputs["x"]), packed, group_size, both)
    return {"y": y}


def weight_int8pack_mm(inputs, config):
    if len(inputs["scales"]) != 1:
        raise marlinspike.Unsupported("one scale for each column")
    in_float32(inputs, 128)
    weight = tensor((codes(inputs, config, 8) - 128).T.astype(np.int8))
    y = aten._weight_int8pack_mm(tensor(inputs["x"]), weight, tensor(inputs["scales"]).reshape(-1))
    return {"y": y}


def scaled_mm(inputs, config):
    a, b = tensor(inputs["a"]), tensor(inputs["weight"]).t()
    by_row, by_column = tensor(inputs["a_scales"]), tensor(inputs["weight_scale"])
    if config.get("weight_block_size"):
        raise marlinspike.Unsupported("scales of blocks")
    if config.get("per_act_token_quant") or config.get("per_out_ch_quant"):
        by_row = by_row.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        by_column = by_column.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    else:
        by_row, by_column = by_row.reshape(()), by_column.reshape(())
    bias = tensor(inputs["bias"]) if config.get("has_bias") else None
    dtype = getattr(torch, config["dtype"])
    return {"y": torch._scaled_mm(a, b, scale_a=by_row, scale_b=by_column, bias=bias, out_dtype=dtype)}


def dyn_quant_matmul_4bit_bits(inputs, config):
    x, sizes = tensor(inputs["x"]), (config["size_k"], config["size_n"])
    group = config["size_k"] if config["group_size"] == -1 else config["group_size"]
    bias = tensor(inputs["bias"]) if config.get("has_bias") else None
    weight, scales = tensor(inputs["weight_u4"]), tensor(inputs["weight_scale"])
    packed = aten._dyn_quant_pack_4bit_weight(weight, scales, bias, group, *sizes)
    try:
        return {"y": aten._dyn_quant_matmul_4bit(x, packed, group, *sizes)}
    except RuntimeError as error:
        raise marlinspike.Unsupported(str(error).splitlines()[0]) from error


def quantized_rows(x):
    """int8 codes, zero points and reciprocal scales of f32 rows, by the fallback's definition in f32."""
    one, low, high = np.float32(1), np.float32(-128), np.float32(127)
    least = np.minimum(x.min(axis=1), np.float32(0))
    most = np.maximum(x.max(axis=1), np.float32(0))
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.where(least == most, one, (high - low) / (most - least))
        reciprocal = np.where(scale != 0, one / scale, np.float32(0))
    least, most = least * scale, most * scale
    zero = np.where((low + least) + (high + most) > 0, low - least, high - most)
    zero = np.rint(np.clip(zero, low, high)).astype(np.int64)
    product = x * scale[:, None]
    # Halves are rounded away from zero.
    rounded = np.trunc(product)
    rounded += np.where(np.abs(product - rounded) >= 0.5, np.sign(product), 0)
    return np.clip(rounded.astype(np.int64) + zero[:, None], -128, 127), zero, reciprocal


def dyn_quant_bounds(inputs, config):
    """y in float64 and the largest error of f32 steps, for finite activations."""
    packed = inputs["weight_u4"]
    weight = np.stack([packed & 15, packed >> 4], axis=-1).reshape(config["size_n"], -1).astype(np.int64) - 8
    x = inputs["x"].astype(np.float32)
    rows, zero, reciprocal = quantized_rows(x)
    scales = inputs["weight_scale"].astype(np.float64).reshape(config["size_n"], -1)
    groups = scales.shape[1]
    centred = (rows - zero[:, None]).reshape(len(rows), groups, -1)
    sums = np.einsum("mgk,ngk->mng", centred, weight.reshape(len(weight), groups, -1))
    terms = sums * scales * reciprocal.astype(np.float64)[:, None, None]
    bias = inputs["bias"].astype(np.float64) if config.get("has_bias") else np.zeros(config["size_n"])
    y, size = terms.sum(axis=2) + bias, np.abs(terms).sum(axis=2) + np.abs(bias)
    return y, size * (groups + 4) * 2.0**-24 + 2.0**-140


def dyn_quant_matmul_4bit(inputs, config):
    """KleidiAI's y where the fallback's is within the bound, elsewhere the fallback's: the campaign then judges, shrinks and
    names what is outside."""
    made = dyn_quant_matmul_4bit_bits(inputs, config)["y"]
    y, bound = dyn_quant_bounds(inputs, config)
    if config["dtype"] == "bfloat16":
        # Half a unit in the last place, for the rounding to nearest.
        bound = bound + np.ldexp(1.0, np.frexp(np.abs(y) + bound)[1] - 9)
    inside = torch.from_numpy(np.abs(made.double().numpy() - y) <= bound)
    right = tensor(np.asarray(marlinspike.reference("dyn_quant_linear", inputs, config)["y"]))
    return {"y": torch.where(inside, right.to(made.dtype).reshape(made.shape), made)}


OPERATORS = {
    "weight_int4pack_mm": ("linear", weight_int4pack_mm, INT4),
    "weight_int8pack_mm": ("linear", weight_int8pack_mm, INT8),
    "scaled_mm": ("cutlass_scaled_mm", scaled_mm, ""),
    "dyn_quant_matmul_4bit": ("dyn_quant_linear", dyn_quant_matmul_4bit, ""),
    "dyn_quant_matmul_4bit_f32": ("dyn_quant_linear", dyn_quant_matmul_4bit, "dtype=float32"),
    "dyn_quant_matmul_4bit_bits": ("dyn_quant_linear", dyn_quant_matmul_4bit_bits, ""),
}


def int_mm(cases, seed):
    """The number of cases with a wrong sum, and the first one's sizes."""
    random, wrong, first = np.random.default_rng(seed), 0, None
    for _ in range(cases):
        m, n, k = random.integers(1, 70), random.integers(1, 70), random.integers(1, 300)
        extreme = random.integers(0, 3) == 0
        draw = (lambda shape: random.choice([-128, 127], shape)) if extreme else (lambda shape: random.integers(-128, 128, shape))
        a, b = draw((m, k)), draw((k, n))
        y = torch._int_mm(torch.from_numpy(a.astype(np.int8)), torch.from_numpy(b.astype(np.int8))).numpy()
        if not np.array_equal(y, a @ b):
            wrong, first = wrong + 1, first or (m, n, k)
    return wrong, first


def campaign(name, cases, seed=22, folder=None, shard="1/1"):
    op, kernel, where = OPERATORS[name]
    return marlinspike.run_fuzz(kernel, op, where, cases=cases, seed=seed, folder=folder, shard=shard)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=[*OPERATORS, "int_mm"])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--keep", help="folder for the smallest failing cases")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.operator == "int_mm":
        wrong, first = int_mm(options.cases, options.seed)
        print(f"int_mm: {options.cases} cases, {wrong} wrong" + (f", the first with M, N, K = {first}" if wrong else ""))
        return int(wrong > 0)
    summary = campaign(options.operator, options.cases, options.seed, options.keep)
    print(summary)
    return int(not summary.ok)


if __name__ == "__main__":
    sys.exit(main())
