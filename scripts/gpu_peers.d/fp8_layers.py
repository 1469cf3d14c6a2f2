"""Peers of expert layers with e4m3 weights and activations: the two products with SiLU between them.

Rows are gathered and quantized, and the experts sorted, before anything is timed; the sum over a token's experts is left
out. `libs` is a folder with files of vLLM's wheel: _C_stable_libtorch.abi3.so (cutlass_moe_mm), fused_moe.py and the
JSON files of its `configs` folder (Triton experts), `deep_gemm` (from third_party; it compiles with CUDA_HOME's nvcc).
"""

import ast
import functools
import json
import os
import sys
import tempfile

import torch
import torch.nn.functional as F

BLOCK = 128
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def codes(*shape):
    """e4m3 codes."""
    return (torch.randn(*shape, device=DEVICE) * 40).clamp(-448, 448).to(torch.float8_e4m3fn)


def ones(*shape):
    return torch.ones(shape, device=DEVICE)


def silu_times_up(gate_up):
    gate, up = gate_up.chunk(2, -1)
    F.silu(gate).mul_(up)


@functools.cache
def triton_kernel(libs):
    """vLLM's `fused_moe_kernel`, without the package around it."""
    with open(os.path.join(libs, "fused_moe.py")) as file:
        tree = ast.parse(file.read())
    names = ("write_zeros_to_output", "fused_moe_kernel")
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    # Triton reads a function's source from its file.
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as out:
        out.write("import triton\nimport triton.language as tl\n\n")
        out.write("\n\n".join(map(ast.unparse, kept)))
    scope = {"__name__": "vllm_fused_moe", "__file__": out.name}
    exec(compile(open(out.name).read(), out.name, "exec"), scope)
    return scope["fused_moe_kernel"]


class Layer:
    """Weights of a layer, and the calls of its peers for one routing."""

    def __init__(self, kind, libs, experts, top_k, h, i):
        self.kind, self.libs, self.experts, self.top_k, self.h, self.i = kind, libs, experts, top_k, h, i
        self.w13 = codes(experts * 2 * i, h).view(experts, 2 * i, h)
        self.w2 = codes(experts * h, i).view(experts, h, i)

    def route(self, m):
        """Experts of tokens, and the number of entries of each expert."""
        ids = torch.rand(m, self.experts, device=DEVICE).topk(self.top_k, 1).indices
        return ids, ids.flatten().bincount(minlength=self.experts)

    def peers(self):
        """Name and maker of each peer; a maker takes M and makes a call from a routing."""
        if self.kind != "fp8-block":
            found = {"cutlass-grouped-products": self.torch_grouped}
            if self.kind == "fp8-fast" and self.libs:
                found["vllm-cutlass-moe-products"] = self.vllm_cutlass
            return found
        found = {"deepgemm-products": self.deep_gemm}
        if self.libs:
            found["vllm-triton-products"] = self.vllm_triton
        return found

    def torch_grouped(self, m):
        entries = m * self.top_k
        x, activated, of_rows = codes(entries, self.h), codes(entries, self.i), ones(entries)
        of_w13, of_w2 = ones(self.experts, 2 * self.i), ones(self.experts, self.h)

        def product(rows, weight, scales, ends):
            options = {"offs": ends, "out_dtype": BF16, "use_fast_accum": self.kind == "fp8-fast"}
            return torch._scaled_grouped_mm(rows, weight.transpose(1, 2), of_rows, scales, **options)

        def call(routing):
            ends = routing[1].cumsum(0).to(torch.int32)

            def layer():
                silu_times_up(product(x, self.w13, of_w13, ends))
                product(activated, self.w2, of_w2, ends)

            return layer

        return call

    def vllm_cutlass(self, m):
        e, h, i, entries = self.experts, self.h, self.i, m * self.top_k
        x, activated, of_rows = codes(entries, h), codes(entries, i), ones(entries, 1)
        gate_up = torch.empty(entries, 2 * i, dtype=BF16, device=DEVICE)
        down = torch.empty(entries, h, dtype=BF16, device=DEVICE)
        strides = {n: torch.full((e,), n, dtype=torch.int64, device=DEVICE) for n in (h, i, 2 * i)}
        ops = torch.ops._C

        def product(out, rows, weight, offsets, sizes):
            n, k = weight.shape[1:]
            scales, of = ones_of(e, n), strides
            ops.cutlass_moe_mm(
                out, rows, weight, of_rows, scales, offsets, sizes, of[k], of[k], of[n], True, True
            )

        ones_of = functools.cache(lambda e, n: ones(e, n, 1))

        def call(routing):
            starts = F.pad(routing[1].cumsum(0), (1, 0)).to(torch.int64)
            sizes = [torch.empty(e, 3, dtype=torch.int32, device=DEVICE) for _ in range(2)]
            of_offsets = ops.get_cutlass_moe_mm_problem_sizes_from_expert_offsets
            of_offsets(starts, *sizes, i, h, entries <= 64)

            def layer():
                product(gate_up, x, self.w13, starts[:-1], sizes[0])
                silu_times_up(gate_up)
                product(down, activated, self.w2, starts[:-1], sizes[1])

            return layer

        return call

    def scales_of_blocks(self):
        e, h, i = self.experts, self.h, self.i
        return ones(e, 2 * i // BLOCK, h // BLOCK), ones(e, h // BLOCK, i // BLOCK)

    def deep_gemm(self, m):
        if self.libs and self.libs not in sys.path:
            sys.path.insert(0, self.libs)
        import deep_gemm

        of_w13, of_w2 = self.scales_of_blocks()
        product = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        aligned = getattr(deep_gemm, "get_mn_major_tma_aligned_tensor", lambda scales: scales)

        def call(routing):
            padded = -(-routing[1] // BLOCK) * BLOCK
            of_rows = torch.arange(self.experts, device=DEVICE, dtype=torch.int32).repeat_interleave(padded)
            count = len(of_rows)
            x, activated = codes(count, self.h), codes(count, self.i)
            x_scales, scales = (aligned(ones(count, k // BLOCK)) for k in (self.h, self.i))
            gate_up = torch.empty(count, 2 * self.i, dtype=BF16, device=DEVICE)
            down = torch.empty(count, self.h, dtype=BF16, device=DEVICE)

            def layer():
                product((x, x_scales), (self.w13, of_w13), gate_up, of_rows)
                silu_times_up(gate_up)
                product((activated, scales), (self.w2, of_w2), down, of_rows)

            return layer

        return call

    def config(self, m):
        name = f"E={self.experts},N={self.i},device_name={torch.cuda.get_device_name().replace(' ', '_')}"
        with open(os.path.join(self.libs, name + ",dtype=fp8_w8a8,block_shape=[128,128].json")) as file:
            all_sizes = json.load(file)
        return dict(all_sizes[min((size for size in all_sizes if size.isdigit()), key=lambda size: abs(int(size) - m))])

    def vllm_triton(self, m):
        import triton
        import triton.language as tl

        kernel, config, entries = triton_kernel(self.libs), self.config(m), m * self.top_k
        block, step = config["BLOCK_SIZE_M"], min(config.pop("BLOCK_SIZE_K"), BLOCK)
        config["SPLIT_K"] = 1
        x, activated = codes(m, self.h), codes(entries, self.i)
        of_x, of_activated = ones(m, self.h // BLOCK), ones(entries, self.i // BLOCK)
        of_w13, of_w2 = self.scales_of_blocks()
        gate_up = torch.empty(entries, 2 * self.i, dtype=BF16, device=DEVICE)
        down = torch.empty(entries, self.h, dtype=BF16, device=DEVICE)
        gates = torch.rand(entries, device=DEVICE)

        def product(a, a_scales, w, w_scales, y, order, of_block, total, top_k, is_weighted):
            n, k = w.shape[1:]
            room = order.numel() if len(a) >= block else min(order.numel(), len(a) * top_k * block)
            grid = (triton.cdiv(room, block) * triton.cdiv(n, config["BLOCK_SIZE_N"]),)
            strides = (*a.stride(), w.stride(0), w.stride(2), w.stride(1), *y.stride(), *a_scales.stride())
            of_scales = (w_scales.stride(0), w_scales.stride(2), w_scales.stride(1))
            kernel[grid](
                a, w, y, None, a_scales, w_scales, gates, order, of_block, total,
                n, k, room, entries, *strides, *of_scales, 0, 0, BLOCK, BLOCK,
                naive_block_assignment=False, MUL_ROUTED_WEIGHT=is_weighted, top_k=top_k, compute_type=tl.bfloat16,
                use_fp8_w8a8=True, use_int8_w8a8=False, use_int8_w8a16=False, per_channel_quant=False,
                HAS_BIAS=False, BLOCK_SIZE_K=step, **config,
            )

        def call(routing):
            ids, counts = routing
            padded = -(-counts // block) * block
            # Most entries that any routing needs, as vLLM's alignment makes room for.
            room = min(entries + self.experts * (block - 1), entries * block)
            order = torch.full((room,), entries, dtype=torch.int32, device=DEVICE)
            starts, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
            sorted_ids, by_expert = ids.flatten().sort(stable=True)
            places = starts[sorted_ids] + torch.arange(entries, device=DEVICE) - first[sorted_ids]
            order[places] = by_expert.to(torch.int32)
            of_block = torch.arange(self.experts, device=DEVICE, dtype=torch.int32)
            of_block = F.pad(of_block.repeat_interleave(padded // block), (0, -(-room // block)))
            total = padded.sum().to(torch.int32).view(1)

            def layer():
                product(x, of_x, self.w13, of_w13, gate_up, order, of_block, total, self.top_k, False)
                silu_times_up(gate_up)
                product(activated, of_activated, self.w2, of_w2, down, order, of_block, total, 1, True)

            return layer

        return call
