"""An int4 GPTQ product in Triton, with act-order, as an example of a kernel under test.

    pytest test_triton_linear.py                        on a GPU
    TRITON_INTERPRET=1 pytest test_triton_linear.py     on any machine, by Triton's interpreter

Weights are rounded to the activation type after scaling, as Marlin does; sums are in float32.
Triton's interpreter does not compute in bfloat16, so it is given float16 only.
"""

import os

import torch
import triton
import triton.language as tl

#: The configurations that the kernel takes.
WHERE = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,has_bias=false"
if os.environ.get("TRITON_INTERPRET") == "1":
    WHERE += ",dtype=float16"


@triton.jit
def product_kernel(
    x, qweight, scales, g_idx, y, size_m, size_n, size_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, size_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + m * size_k + k[None, :], mask=(m < size_m) & (k[None, :] < size_k), other=0.0)
        inside = (k[:, None] < size_k) & (n < size_n)
        words = tl.load(qweight + k[:, None] // 8 * size_n + n, mask=inside, other=0)
        codes = (words >> (k[:, None] % 8 * 4)) & 15
        group = tl.load(g_idx + k, mask=k < size_k, other=0)
        s = tl.load(scales + group[:, None] * size_n + n, mask=inside, other=0.0)
        acc = tl.dot(a, (codes - 8).to(s.dtype) * s, acc)
    tl.store(y + m * size_n + n, acc.to(y.dtype.element_ty), mask=(m < size_m) & (n < size_n))


def kernel(inputs, config):
    """y ``[M, N]`` of torch tensors."""
    x, scales = inputs["x"], inputs["scales"]
    size_m, size_n, size_k = (config[key] for key in ("size_m", "size_n", "size_k"))
    g_idx = inputs.get("g_idx")
    if g_idx is None:
        group_size = size_k if config["group_size"] == -1 else config["group_size"]
        g_idx = torch.arange(size_k, dtype=torch.int32, device=x.device) // group_size
    y = torch.empty(size_m, size_n, dtype=x.dtype, device=x.device)
    block_m, block_n, block_k = 16, 64, 64
    grid = (triton.cdiv(size_m, block_m), triton.cdiv(size_n, block_n))
    product_kernel[grid](
        x, inputs["qweight"], scales, g_idx, y, size_m, size_n, size_k, block_m, block_n, block_k
    )
    return {"y": y}
