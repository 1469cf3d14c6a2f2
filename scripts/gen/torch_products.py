#!/usr/bin/env python3
"""Cases `torch-*`: products as torch and Triton compute them on an H200.

    python3 scripts/gen/torch_products.py [FOLDER]

Needs an H200, torch 2.11.0 and triton 3.6.0. Inputs are functions of the tensors' names. For a
product with a long k, some rows and columns are stored; they do not depend on the others.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from common import GOLDEN, seeded, seeded_ints, write_sorted

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN / "data/cases"
DEVICE = torch.cuda.get_device_name(0)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def product(a, w, sa, sw, y, M, N, K, BLOCK_K: tl.constexpr, INSIDE: tl.constexpr):
    m = tl.program_id(0) * 64 + tl.arange(0, 64)
    n = tl.program_id(1) * 64 + tl.arange(0, 64)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((64, 64), tl.float32)
    for i in range(0, K, BLOCK_K):
        x = tl.load(a + m[:, None] * K + (i + k)[None, :], mask=(m < M)[:, None], other=0.0)
        v = tl.load(w + n[None, :] * K + (i + k)[:, None], mask=(n < N)[None, :], other=0.0)
        if INSIDE:
            acc = tl.dot(x, v, acc, max_num_imprecise_acc=0)
        else:
            acc += tl.dot(x, v)
    scale = tl.load(sa + m, mask=m < M, other=0.0)[:, None]
    r = acc * scale * tl.load(sw + n, mask=n < N, other=0.0)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], r.to(y.dtype.element_ty), mask=mask)
"""


def write(name, op, config, inputs, y):
    tensors = {f"in.{k}": v.cpu() for k, v in inputs.items()} | {"out.y": y.cpu()}
    provenance = f"torch {torch.__version__} on {DEVICE}, triton {triton.__version__}"
    metadata = {"format": "marlinspike-case", "version": "1", "op": op, "name": f"torch-{name}"}
    metadata |= {"config": json.dumps(config), "provenance": provenance}
    write_sorted(OUT / f"{op}-torch-{name}.safetensors", tensors, metadata)


def quantized(name, rows, size_k, by_row):
    x = seeded(name, rows, size_k, scale=1.0).cuda()
    s = x.abs().amax(1, keepdim=True) / 448
    codes = (x / s).to(torch.float8_e4m3fn)
    return codes, s if by_row else s.max().reshape(1, 1)


def scaled(fast):
    def of(a, w, sa, sw):
        sw = sw.t().contiguous()
        if sa.numel() == 1:
            sa, sw = sa.reshape(()), sw.reshape(())
        how = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return torch._scaled_mm(a, w.t(), scale_a=sa, scale_b=sw, **how)

    return of


def dot(block_k, inside):
    def of(a, w, sa, sw):
        path = Path(tempfile.mkdtemp()) / "kernel.py"
        path.write_text(KERNEL)
        spec = importlib.util.spec_from_file_location("kernel", path)
        kernel = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel)
        (m, k), n = a.shape, w.shape[0]
        y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
        kernel.product[grid](a, w, sa, sw, y, m, n, k, block_k, inside, num_warps=4)
        return y

    return of


def fp8(name, size_k, by_row, product, keep=(16, 64)):
    a, sa = quantized(f"{name}.a", 16, size_k, by_row)
    w, sw = quantized(f"{name}.w", 64, size_k, by_row)
    y = product(a, w, sa, sw)[: keep[0], : keep[1]]
    a, w = a[: keep[0]], w[: keep[1]]
    sa, sw = (sa[: keep[0]], sw[: keep[1]]) if by_row else (sa.reshape(1), sw.reshape(1))
    config = {"dtype": "bfloat16", "size_m": keep[0], "size_n": keep[1], "size_k": size_k}
    config |= {"per_act_token_quant": by_row, "per_out_ch_quant": by_row, "has_bias": False}
    inputs = {"a": a, "weight": w, "a_scales": sa, "weight_scale": sw}
    write(name, "cutlass_scaled_mm", config, inputs, y)


def linear(how, dtype, group_size, m=5, n=128, k=256):
    name, ty = f"linear_{how}_{dtype}", DTYPES[dtype]
    codes = seeded_ints(f"{name}.q", 0, 16, k, n)
    groups = 1 if group_size < 0 else k // group_size
    s = (seeded(f"{name}.s", groups, n, scale=0.005).abs() + 0.005).to(ty).cuda()
    x = seeded(f"{name}.x", m, k, dtype=ty, scale=1.0).cuda()
    b = seeded(f"{name}.b", n, dtype=ty, scale=1.0).cuda()
    q = codes.cuda().float() - 8
    w = q * s.float().repeat_interleave(k // groups, 0)
    y = {
        "f32": lambda: (x.float() @ w + b.float()).to(ty),
        "fused": lambda: F.linear(x, w.to(ty).t().contiguous(), b),
        "separate": lambda: x @ w.to(ty) + b,
        "late": lambda: x @ q.to(ty) * s + b,
    }[how]()
    packed = sum(codes[i::8].long() << (4 * i) for i in range(8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    config = {"checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": dtype}
    config |= {"input_dtype": None, "group_size": group_size, "desc_act": False}
    config |= {"is_k_full": True, "has_bias": True, "size_m": m, "size_n": n, "size_k": k}
    inputs = {"x": x, "qweight": packed, "scales": s, "bias": b}
    write(name, "linear", config, inputs, y)


torch.backends.cuda.matmul.allow_tf32 = False
for half in ("bf16", "fp16"):
    setattr(torch.backends.cuda.matmul, f"allow_{half}_reduced_precision_reduction", False)
for fast in (True, False):
    sums = "fast" if fast else "promoted"
    fp8(f"fp8_row_{sums}", 512, True, scaled(fast))
    fp8(f"fp8_tensor_{sums}", 512, False, scaled(fast))
fp8("fp8_tensor_split_k", 7168, False, scaled(True), keep=(4, 16))
fp8("fp8_triton_block_k_64", 512, True, dot(64, False))
fp8("fp8_triton_precise", 512, True, dot(128, True))
linear("f32", "bfloat16", 128)
linear("fused", "bfloat16", 32)
linear("separate", "float16", 128)
linear("late", "bfloat16", -1)
