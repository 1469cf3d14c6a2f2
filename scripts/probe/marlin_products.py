#!/usr/bin/env python3
"""Runs vLLM's Marlin operators on inputs that are a function of a seed, and stores the outputs.

    marlin_products.py LIB_DIR OUT_DIR [first | second]

LIB_DIR holds `_C.abi3.so` and `_moe_C.abi3.so` of vLLM 0.21.0's wheel; needs its torch and a GPU.
There are two sets of cases; the second was made after the rule had been derived from the first.
OUT_DIR receives `linear.safetensors` and `moe.safetensors`: one tensor `<case>.m<M>` for each
product, and in the metadata the cases (JSON) with checksums of their inputs. Inputs are not stored:
`reference/examples/marlin_products` recomputes them by the same rules and compares.

Every element of every input comes from `mix(seed, tag, index)`, a 32-bit hash (see `draw`).
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

MASK = 0xFFFFFFFF
X, CODES, SCALES, ZEROS, BIAS, ORDER, A_SCALES, ROUTE, ROUTER = range(1, 10)
TYPES = {
    "uint4": 1125899906843648,
    "uint4b8": 1125899907892224,
    "uint8b128": 1125899923621888,
    "float8_e4m3fn": 2814749767172868,
    "float4_e2m1f": 562949953487106,
}
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
GLOBAL_SCALE = 11 / 2048

ALL = [1, 8, 16, 17, 64, 65, 200]


def linear(name, format, weight_type, dtype, group, k, n, ms, **more):
    return dict(name=name, format=format, weight_type=weight_type, dtype=dtype, group_size=group,
                size_k=k, size_n=n, sizes_m=ms, **more)


def gptq(name, dtype, group, k, n, ms, bits=4, **more):
    return linear(name, "gptq", "uint4b8" if bits == 4 else "uint8b128", dtype, group, k, n, ms, **more)


F, B = "float16", "bfloat16"
LINEAR = [
    gptq("u4-g128-f16-1024x256", F, 128, 1024, 256, ALL),
    gptq("u4-g128-f16-2048x1024", F, 128, 2048, 1024, ALL),
    gptq("u4-g128-f16-4096x4096", F, 128, 4096, 4096, ALL),
    gptq("u4-g128-f16-8192x2048", F, 128, 8192, 2048, [1, 16, 64, 200]),
    gptq("u4-g128-f16-1024x8192", F, 128, 1024, 8192, [1, 17, 64, 200]),
    gptq("u4-g128-f16-8192x8192", F, 128, 8192, 8192, [1, 16, 65]),
    gptq("u4-g128-bf16-4096x2048-bias", B, 128, 4096, 2048, ALL, bias=True),
    gptq("u4-g128-bf16-8192x512", B, 128, 8192, 512, [1, 8, 64]),
    gptq("u4-g32-f16-2048x2048", F, 32, 2048, 2048, [1, 17, 64, 200]),
    gptq("u4-g32-bf16-8192x1024", B, 32, 8192, 1024, [8, 65]),
    gptq("u4-g64-f16-2048x1536", F, 64, 2048, 1536, [1, 16, 64, 200]),
    gptq("u4-channel-f16-4096x1024-bias", F, -1, 4096, 1024, ALL, bias=True),
    gptq("u4-channel-bf16-2048x4096", B, -1, 2048, 4096, [1, 64, 200]),
    gptq("u8-g128-f16-2048x2048", F, 128, 2048, 2048, [1, 16, 64, 200], bits=8),
    gptq("u8-g32-bf16-1024x1024", B, 32, 1024, 1024, [8, 65], bits=8),
    gptq("u8-channel-bf16-4096x1024", B, -1, 4096, 1024, [1, 17, 200], bits=8),
    gptq("u8-channel-f16-8192x512", F, -1, 8192, 512, [16, 64], bits=8),
    linear("awq-g128-f16-4096x1024", "awq", "uint4", F, 128, 4096, 1024, [1, 8, 64, 200]),
    linear("awq-g64-bf16-2048x2048", "awq", "uint4", B, 64, 2048, 2048, [1, 65]),
    linear("awq-channel-f16-2048x512", "awq", "uint4", F, -1, 2048, 512, [1, 64]),
    linear("fp8-channel-f16-4096x1024", "fp8", "float8_e4m3fn", F, -1, 4096, 1024, [1, 16, 64, 200]),
    linear("fp8-channel-bf16-2048x2048", "fp8", "float8_e4m3fn", B, -1, 2048, 2048, [1, 17, 65]),
    linear("fp8-g128-bf16-4096x1024", "fp8", "float8_e4m3fn", B, 128, 4096, 1024, [1, 64]),
    linear("fp8-g128-f16-2048x512", "fp8", "float8_e4m3fn", F, 128, 2048, 512, [8, 200]),
    linear("mxfp4-bf16-4096x1024", "mxfp4", "float4_e2m1f", B, 32, 4096, 1024, [1, 16, 65]),
    linear("mxfp4-bf16-2048x4096", "mxfp4", "float4_e2m1f", B, 32, 2048, 4096, [64]),
    linear("mxfp8-bf16-2048x1024", "mxfp8", "float8_e4m3fn", B, 32, 2048, 1024, [1, 64, 200]),
    linear("nvfp4-f16-4096x1024", "nvfp4", "float4_e2m1f", F, 16, 4096, 1024, [1, 17, 64]),
    linear("nvfp4-bf16-2048x2048", "nvfp4", "float4_e2m1f", B, 16, 2048, 2048, [8, 200]),
    gptq("int8-u4-g128-f16-4096x1024", F, 128, 4096, 1024, [1, 16, 17, 64, 65, 200], int8=True),
    gptq("int8-u4-g128-bf16-8192x1024", B, 128, 8192, 1024, [1, 64], int8=True),
    gptq("int8-u4-g32-f16-2048x512", F, 32, 2048, 512, [17, 64], int8=True),
    gptq("int8-u4-channel-f16-2048x2048", F, -1, 2048, 2048, [1, 16, 64, 200], int8=True),
    gptq("int8-u4-channel-bf16-1024x4096", B, -1, 1024, 4096, [8, 65], int8=True),
    linear("int8-awq-g64-bf16-2048x1024", "awq", "uint4", B, 64, 2048, 1024, [16, 200], int8=True),
    gptq("act-u4-g128-f16-4096x1024", F, 128, 4096, 1024, [1, 16, 64, 200], ranks=1, rank=0),
    gptq("act-u8-g32-bf16-2048x512", B, 32, 2048, 512, [8, 65], bits=8, ranks=1, rank=0),
    gptq("slice-u4-g128-f16-1024x256", F, 128, 1024, 256, [1, 16, 64], ranks=2, rank=0),
    gptq("slice-u4-g128-f16-4096x1024", F, 128, 4096, 1024, [1, 17, 64, 200], ranks=2, rank=1),
    gptq("slice-u4-g32-bf16-2048x512", B, 32, 2048, 512, [16, 65], ranks=2, rank=0),
    gptq("slice-u8-g64-f16-1024x512", F, 64, 1024, 512, [8, 64], bits=8, ranks=4, rank=3),
    gptq("reduce16-u4-g128-f16-4096x512", F, 128, 4096, 512, [1, 16, 64], reduce16=True),
    gptq("reduce16-u4-g128-bf16-2048x1024", B, 128, 2048, 1024, [8, 65], reduce16=True),
]

# Other tiles, biases on channel scales, many rows; sums beyond 2^31 (`aligned`), and below f32's
# normal numbers (`small`).
LINEAR_2 = [
    gptq("2-u4-channel-bf16-2048x1024-bias", B, -1, 2048, 1024, [1, 64], bias=True),
    gptq("2-u4-channel-f16-2048x512-bias", F, -1, 2048, 512, [8, 65], bias=True),
    gptq("2-u4-channel-f16-4096x1024", F, -1, 4096, 1024, [16]),
    linear("2-awq-channel-bf16-1024x512-bias", "awq", "uint4", B, -1, 1024, 512, [16, 64], bias=True),
    gptq("2-u8-channel-f16-2048x512-bias", F, -1, 2048, 512, [1, 64], bits=8, bias=True),
    linear("2-fp8-channel-bf16-1024x512-bias", "fp8", "float8_e4m3fn", B, -1, 1024, 512, [8, 64], bias=True),
    gptq("2-u4-g128-f16-1024x8192", F, 128, 1024, 8192, [512]),
    gptq("2-u4-g128-bf16-256x4352", B, 128, 256, 4352, [1088]),
    gptq("2-u4-g128-f16-1024x4096", F, 128, 1024, 4096, [704]),
    gptq("2-u4-g64-bf16-1088x512", B, 64, 1088, 512, [1, 8, 64]),
    gptq("2-u4-g128-bf16-1024x4480", B, 128, 1024, 4480, [16, 64, 130]),
    gptq("2-u4-g64-f16-1024x8256", F, 64, 1024, 8256, [16, 64]),
    gptq("2-u8-g64-bf16-2048x8192", B, 64, 2048, 8192, [8, 33], bits=8),
    gptq("2-int8-u4-g128-bf16-1024x8192", B, 128, 1024, 8192, [16, 130], int8=True),
    gptq("2-int8-u4-g64-f16-1088x512", F, 64, 1088, 512, [1, 64], int8=True),
    gptq("2-int8-u4-channel-f16-1024x8192", F, -1, 1024, 8192, [16, 200], int8=True),
    gptq("2-int8-u4-channel-f16-1024x512-bias", F, -1, 1024, 512, [16, 64], int8=True, bias=True),
    gptq("2-int8-u4-g128-bf16-1024x512-bias", B, 128, 1024, 512, [17], int8=True, bias=True),
    gptq("2-int8-u4-g128-f16-4096x8192-aligned", F, 128, 4096, 8192, [64], int8=True, aligned=True),
    gptq("2-slice-u4-g64-bf16-2048x4096", B, 64, 2048, 4096, [8, 64, 130], ranks=2, rank=1),
    gptq("2-slice-u4-g128-f16-8192x1024", F, 128, 8192, 1024, [16, 64], ranks=4, rank=2),
    gptq("2-slice-u4-g32-f16-1024x8192", F, 32, 1024, 8192, [16, 64], ranks=2, rank=0),
    gptq("2-slice-u8-g128-bf16-2048x512-bias", B, 128, 2048, 512, [17], bits=8, ranks=2, rank=0, bias=True),
    linear("2-fp8-channel-bf16-1024x512-small", "fp8", "float8_e4m3fn", B, -1, 1024, 512, [16, 64], small=True),
    linear("2-nvfp4-bf16-1024x512-small", "nvfp4", "float4_e2m1f", B, 16, 1024, 512, [16, 64], small=True),
    linear("2-nvfp4-bf16-4096x2048-bias", "nvfp4", "float4_e2m1f", B, 16, 4096, 2048, [1, 48], bias=True),
    linear("2-mxfp4-bf16-1024x512-small", "mxfp4", "float4_e2m1f", B, 32, 1024, 512, [16], small=True),
    linear("2-awq-g32-f16-8192x512", "awq", "uint4", F, 32, 8192, 512, [4, 24]),
]


def moe(name, format, weight_type, dtype, group, hidden, intermediate, ms, **more):
    return dict(name=name, format=format, weight_type=weight_type, dtype=dtype, group_size=group,
                hidden_size=hidden, intermediate_size=intermediate, sizes_m=ms, num_experts=8, top_k=2, **more)


MOE = [
    moe("moe-u4-g128-f16", "gptq", "uint4b8", F, 128, 2048, 1024, [1, 16, 64, 200]),
    moe("moe-u4-channel-bf16", "gptq", "uint4b8", B, -1, 1024, 512, [8, 65]),
    moe("moe-fp8-channel-bf16", "fp8", "float8_e4m3fn", B, -1, 1024, 1024, [16, 200]),
    moe("moe-mxfp4-bf16", "mxfp4", "float4_e2m1f", B, 32, 2048, 1024, [1, 64]),
    moe("moe-nvfp4-f16", "nvfp4", "float4_e2m1f", F, 16, 1024, 512, [17, 64]),
]

MOE_2 = [
    moe("2-moe-u4-channel-f16-bias", "gptq", "uint4b8", F, -1, 1024, 512, [16, 64], bias=True),
    moe("2-moe-u4-g128-bf16-bias", "gptq", "uint4b8", B, 128, 2048, 512, [8, 200], bias=True),
    moe("2-moe-nvfp4-bf16", "nvfp4", "float4_e2m1f", B, 16, 1024, 1024, [16, 65]),
    moe("2-moe-u8-g64-f16", "gptq", "uint8b128", F, 64, 1024, 512, [1, 128]),
]


def mix(seed, tag, count):
    """32-bit hashes of 0..count, as int64."""
    h = torch.arange(count, dtype=torch.int64, device="cuda") * 0x9E3779B1
    h = (h + seed * 0x85EBCA77 + tag * 0xC2B2AE3D) & MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & MASK
    return h ^ (h >> 16)


def bits16(values, dtype):
    return values.to(torch.int32).to(torch.int16).view(HALF[dtype])


def halves(h, dtype):
    """Floats of either sign in (2^-8, 2), the exponent falling off geometrically, all mantissas."""
    low = ((h >> 10) & 0xFF) | 0x80
    zeros = torch.log2((low & -low).float()).round().long()
    if dtype == F:
        return bits16(((h >> 31) << 15) | ((15 - zeros) << 10) | (h & 0x3FF), dtype)
    return bits16(((h >> 31) << 15) | ((127 - zeros) << 7) | (h & 0x7F), dtype)


def scale_halves(h, dtype, exponent):
    """Positive floats in [2^-(exponent + 1), 2^(1 - exponent))."""
    down = exponent + ((h >> 16) & 1)
    if dtype == F:
        return bits16(((15 - down) << 10) | (h & 0x3FF), dtype)
    return bits16(((127 - down) << 7) | (h & 0x7F), dtype)


def is_wide(c):
    return c["weight_type"] in ("uint8b128", "float8_e4m3fn")


def draw_codes(seed, c, k, n):
    codes = mix(seed, CODES, k * n).view(k, n) & (0xFF if is_wide(c) else 0xF)
    if c.get("aligned"):
        return torch.full_like(codes, 15)
    if c["weight_type"] == "float8_e4m3fn":
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
    return codes


def draw_scales(seed, c, groups, n):
    """Scales in the checkpoint's form: 16-bit floats, or bytes (int64) of e8m0 or e4m3."""
    h = mix(seed, SCALES, groups * n).view(groups, n)
    wide = is_wide(c)
    if c["format"] in ("mxfp4", "mxfp8"):
        return 127 - (12 if wide else 6) - (h & 3)
    if c["format"] == "nvfp4":
        return 0x28 + (h & 0x3F)
    exponent = {"fp8": 13, "gptq": 10 if wide else 6, "awq": 6}[c["format"]]
    return scale_halves(h, c["dtype"], exponent)


def checksum(t):
    """Sum of all bits, modulo 2^32."""
    if t.dtype in (torch.float16, torch.bfloat16):
        t = t.view(torch.int16).long() & 0xFFFF
    elif t.dtype == torch.float32:
        t = t.view(torch.int32).long() & MASK
    return int(t.long().sum().item()) & MASK


GROUPED = [(p % 8) * 8 + p // 8 for p in range(64)]
SINGLE = [2 * (p // 8) + (0, 1, 8, 9, 16, 17, 24, 25)[p % 8] for p in range(32)]


def permute(t, order):
    return t.reshape(-1, len(order))[:, order].reshape(t.shape).contiguous()


def pack(codes, bits):
    """GPTQ's words [K / pack, N]."""
    per = 32 // bits
    k, n = codes.shape
    words = codes.view(k // per, per, n) << (torch.arange(per, device="cuda") * bits).view(1, per, 1)
    words = words.sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def kernel_zeros(zeros, a8):
    groups, n = zeros.shape
    zeros = permute(zeros, GROUPED)
    if not a8:
        zeros = permute(zeros, [0, 2, 4, 6, 1, 3, 5, 7])
    words = (zeros.view(groups, n // 8, 8) << (torch.arange(8, device="cuda") * 4)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def kernel_scales(c, scales, k, a8):
    """Scales and global scale in kernel format."""
    group, dtype = c["group_size"], HALF[c["dtype"]]
    order = GROUPED if group != -1 and group < k and not a8 else SINGLE
    if c["format"] in ("mxfp4", "mxfp8"):
        s = permute(permute(scales, order), [0, 2, 1, 3])
        return s.to(torch.uint8).view(torch.float8_e8m0fnu), None
    if c["format"] == "nvfp4":
        s = scales.to(torch.uint8).view(torch.float8_e4m3fn).half()
        factor = 1.0
        if c["dtype"] == B:
            factor = (448 / s.float().max()).log2().floor().exp2().item()
        s = permute(permute(s.float() * factor * 128, order), [0, 2, 1, 3]).half()
        s = (s.view(torch.int16) << 1).view(torch.uint8)[:, 1::2].contiguous()
        power = 2.0 ** ((14 if c["dtype"] == F else 126) - 7)
        return s.view(torch.float8_e4m3fn), torch.tensor([GLOBAL_SCALE / factor * power], device="cuda")
    if a8 and scales.shape[0] > 1:
        scales = (scales / scales.max() * 4096).round().to(torch.int16).view(dtype)
    s = permute(scales.view(torch.int16), order).view(dtype)
    if c["format"] == "fp8":
        s = s * 2.0 ** (8 if c["dtype"] == F else 120)
    return s, None


def workspace():
    return torch.zeros(132 * 4, dtype=torch.int32, device="cuda")


def run_linear(index, c):
    seed, k, n = index + 1, c["size_k"], c["size_n"]
    a8, wide, group = bool(c.get("int8")), is_wide(c), c["group_size"]
    bits = 8 if wide else 4
    ranks, rank = c.get("ranks"), c.get("rank", 0)
    whole = k * (ranks or 1)
    groups = 1 if group == -1 else whole // group
    most = max(c["sizes_m"])
    codes = draw_codes(seed, c, k, n)
    scales = draw_scales(seed, c, groups, n)
    sums = {"codes": checksum(codes), "scales": checksum(scales)}
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    g_idx = perm = none
    if ranks:
        place = torch.argsort((mix(seed, ORDER, whole) << 26) | torch.arange(whole, device="cuda"))
        full = torch.empty(whole, dtype=torch.int64, device="cuda")
        full[place] = torch.arange(whole, device="cuda") // group
        part = full[rank * k:(rank + 1) * k]
        perm = torch.argsort(part, stable=True)
        g_idx, perm = part[perm].to(torch.int32).contiguous(), perm.to(torch.int32)
        sums["g_idx"] = checksum(part * torch.arange(k, device="cuda"))
    q = torch.ops._C.gptq_marlin_repack(pack(codes, bits), perm, k, n, bits, a8)
    s, global_scale = kernel_scales(c, scales, k, a8)
    zeros = bias = a_scales = None
    if c["format"] == "awq":
        drawn = mix(seed, ZEROS, groups * n).view(groups, n) & 15
        sums["zeros"] = checksum(drawn)
        zeros = kernel_zeros(drawn, a8)
    if c.get("bias"):
        drawn = halves(mix(seed, BIAS, n), c["dtype"])
        sums["bias"] = checksum(drawn)
        bias = permute(drawn, SINGLE)
    h = mix(seed, X, most * k).view(most, k)
    if a8:
        x = torch.full_like(h, 127) if c.get("aligned") else h % 255 - 127
        x = x.to(torch.int8)
        a_scales = ((((127 - 9) << 23) | (mix(seed, A_SCALES, most) & 0x7FFFFF)).to(torch.int32)).view(torch.float32)
        sums |= {"x": checksum(x), "a_scales": checksum(a_scales)}
        if groups > 1:
            a_scales = a_scales * (scales.max().float() / 4096)
        a_scales = a_scales.view(-1, 1)
    else:
        x = halves(h, c["dtype"])
        if c.get("small"):
            x = x * 2.0 ** -20
        sums["x"] = checksum(x)
    for m in c["sizes_m"]:
        for again in range(2):
            y = torch.ops._C.marlin_gemm(
                x[:m].contiguous(), None, q, bias, s, None if a_scales is None else a_scales[:m].contiguous(),
                global_scale, zeros if zeros is not None else none, g_idx, perm, workspace(),
                TYPES[c["weight_type"]], m, n, k, ranks in (None, 1), False, not c.get("reduce16"), False)
            if again:
                assert torch.equal(y.view(torch.int16), first.view(torch.int16)), "not deterministic"
            first = y
        yield m, y
    c["checksums"] = sums


def block_size(m, c):
    return next((b for b in (8, 16, 32, 48, 64) if m * c["top_k"] / c["num_experts"] / b < 0.9), 64)


def run_moe(index, c):
    base, experts, top_k = 1000 + 100 * index, c["num_experts"], c["top_k"]
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    bits, sums = 8 if is_wide(c) else 4, {}
    stages = []
    for stage, (k, n) in enumerate(((hidden, 2 * inner), (inner, hidden))):
        qs, ss, drawn, biases = [], [], [], []
        for e in range(experts):
            seed = base + 2 + stage * experts + e
            groups = 1 if c["group_size"] == -1 else k // c["group_size"]
            codes = draw_codes(seed, c, k, n)
            if c.get("bias"):
                biases.append(permute(halves(mix(seed, BIAS, n), c["dtype"]), SINGLE))
            drawn.append(draw_scales(seed, c, groups, n))
            none = torch.empty(0, dtype=torch.int32, device="cuda")
            qs.append(torch.ops._C.gptq_marlin_repack(pack(codes, bits), none, k, n, bits, False))
        for scales in drawn:
            s, g = kernel_scales(c, scales, k, False)
            ss.append(s)
        raw = torch.stack([s.view(torch.uint8) if s.element_size() == 1 else s for s in ss])
        stacked = raw.view(ss[0].dtype) if ss[0].element_size() == 1 else raw
        bias = torch.stack(biases) if biases else None
        stages.append((k, n, torch.stack(qs), stacked, None if g is None else g.repeat(experts), bias))
    most = max(c["sizes_m"])
    first = mix(base, ROUTE, most * 2).view(most, 2)
    ids = torch.stack([first[:, 0] % experts, (first[:, 0] % experts + 1 + first[:, 1] % (experts - 1)) % experts], 1)
    weights = ((126 << 23) | (mix(base, ROUTER, most * top_k) & 0x7FFFFF)).to(torch.int32).view(torch.float32)
    weights = weights.view(most, top_k)
    x = halves(mix(base, X, most * hidden).view(most, hidden), c["dtype"])
    act = halves(mix(base + 1, X, most * top_k * inner).view(most * top_k, inner), c["dtype"])
    sums = {"x": checksum(x), "activated": checksum(act), "topk_ids": checksum(ids), "topk_weights": checksum(weights)}
    for m in c["sizes_m"]:
        block, flat = block_size(m, c), ids[:m].flatten()
        order, owners = [], []
        for e in range(experts):
            mine = torch.nonzero(flat == e).flatten().tolist()
            padded = -(-len(mine) // block) * block
            order += mine + [m * top_k] * (padded - len(mine))
            owners += [e] * (padded // block)
        to = dict(dtype=torch.int32, device="cuda")
        order, owners, total = torch.tensor(order, **to), torch.tensor(owners, **to), torch.tensor([len(order)], **to)
        w = weights[:m].contiguous()
        for name, stage, a, top, mul in (("gate_up", 0, x[:m].contiguous(), top_k, False),
                                         ("down", 1, act[:m * top_k].contiguous(), 1, True)):
            k, n, q, s, g, bias = stages[stage]
            out = torch.zeros(m * top_k, n, dtype=a.dtype, device="cuda")
            torch.ops._moe_C.moe_wna16_marlin_gemm(
                a, out, q, bias, s, None, g, None, None, None, workspace(), order, owners, total, w, block, top, mul,
                TYPES[c["weight_type"]], m * top_k // top, n, k, True, False, True, False, -1, -1, -1)
            yield f"{m}.{name}", out
    c["checksums"] = sums


def main():
    lib, out = Path(sys.argv[1]), Path(sys.argv[2])
    properties = torch.cuda.get_device_properties(0)
    provenance = f"vllm 0.21.0, {properties.name}, {properties.multi_processor_count} multiprocessors"
    second = sys.argv[3:] == ["second"]
    linears, moes = (LINEAR_2, MOE_2) if second else (LINEAR, MOE)
    for file, library, cases, run, offset in (
        ("linear", "_C", linears, run_linear, 5000 if second else 0),
        ("moe", "_moe_C", moes, run_moe, 500 if second else 0),
    ):
        torch.ops.load_library(str(lib / f"{library}.abi3.so"))
        tensors, done = {}, []
        for index, c in enumerate(cases, offset):
            try:
                for m, y in run(index, c):
                    torch.cuda.synchronize()
                    tensors[f"{c['name']}.m{m}"] = y.cpu()
                done.append(dict(index=index, **c))
            except RuntimeError as e:
                print(c["name"], "refused:", str(e).splitlines()[0], flush=True)
            print(c["name"], flush=True)
        metadata = {"format": "marlin-products", "cases": json.dumps(done), "provenance": provenance}
        save_file(tensors, out / f"{file}.safetensors", metadata=metadata)


main()
