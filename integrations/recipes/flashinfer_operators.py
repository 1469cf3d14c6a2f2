"""FlashInfer 0.7.2 for `gpu_campaigns.py`: layouts, routing, activations and conversions that run on Hopper.

`pip install flashinfer-python==0.7.2`; the operators are compiled at their first call. LIBRARIES may contain the package instead.
"""

import numpy as np
import torch
import torch_operators as base
import vllm_comparisons as comparisons

import marlinspike

EPILOGUE = 128


def on_device():
    """Without a GPU, a call ends here: all its arguments are made."""
    if base.DEVICE == "cpu":
        raise NotImplementedError


def interleaved(scales):
    import flashinfer

    on_device()
    return flashinfer.block_scale_interleave(scales)


def block_scales(config, t):
    scales = t["in.scale"]
    if config["sf_layout"] != "128x4":
        raise base.Unsupported("tiles of 128 x 4")
    shape = [*scales.shape[:-2], -(-scales.shape[-2] // 128) * 128, -(-scales.shape[-1] // 4) * 4]
    given = scales if scales.dtype == torch.bfloat16 else scales.view(torch.uint8)
    return {"swizzled_scale": interleaved(given.contiguous()).view(scales.dtype).reshape(shape)}


def mxint4(config, t):
    """The steps of vLLM's preparation with FlashInfer's orders of rows."""
    from flashinfer.fused_moe import convert_to_block_layout
    from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices, get_w2_permute_indices_with_cache

    outputs, cache = {}, {}
    for name, permute in (("gemm1", _maybe_get_cached_w3_w1_permute_indices), ("gemm2", get_w2_permute_indices_with_cache)):
        codes = t[f"in.{name}_weights"].view(torch.uint8) ^ 0x88
        scales = t[f"in.{name}_scales"]
        if name == "gemm1":
            codes, scales = (torch.cat(tensor.chunk(2, 1)[::-1], 1) for tensor in (codes, scales))
        made = {"weights": [], "scales": []}
        for expert_codes, expert_scales in zip(codes, scales):
            rows = permute(cache, expert_codes, EPILOGUE).to(codes.device)
            made["weights"].append(convert_to_block_layout(expert_codes[rows].contiguous(), 128))
            rows = permute(cache, expert_scales, EPILOGUE, num_elts_per_sf=32).to(codes.device)
            made["scales"].append(interleaved(expert_scales[rows].contiguous()).flatten())
        outputs.update((f"{name}_{kind}", torch.stack(parts)) for kind, parts in made.items())
    return outputs


def topk_deepseek(config, t, in_parts=False):
    """DeepSeek's routing. More than 128 experts in one group are searched in parts, which is a campaign of its own."""
    from flashinfer.fused_moe import fused_topk_deepseek

    logits, bias = t["in.router_logits"], t.get("in.e_score_correction_bias")
    if logits.dtype != torch.float32 or bias is None or not config["renormalize"]:
        raise base.Unsupported("f32 logits with a bias, renormalized")
    parts = config["num_expert_group"] == 1 and logits.shape[1] > 128 and config["top_k"] < 8
    if parts != in_parts:
        raise base.Unsupported("one group of more than 128 experts, fewer than 8 of them" if parts else "groups")
    shape = (len(logits), config["top_k"])
    weights = torch.full(shape, float("nan"), dtype=torch.float32, device=logits.device)
    ids = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    groups = (config["num_expert_group"], config["topk_group"], config["top_k"])
    on_device()
    try:
        fused_topk_deepseek(logits, bias, *groups, config.get("routed_scaling_factor") or 1.0, weights, ids)
    except ValueError as error:
        raise base.Unsupported(str(error).splitlines()[0][:120]) from None
    return {"topk_weights": weights, "topk_ids": ids}


PRODUCTS = {
    "flashinfer_block_scale_interleave": ("swizzle_blockscale", "", {}, ["swizzled_scale"], block_scales),
    "flashinfer_mxint4_layout": (
        "prepare_static_weights_for_trtllm_mxint4_moe", "", {},
        ["gemm1_weights", "gemm1_scales", "gemm2_weights", "gemm2_scales"], mxint4,
    ),
    "flashinfer_topk_deepseek": (
        "router", "use_grouped_topk=true,scoring_func=sigmoid,renormalize=true", {}, ["topk_weights", "topk_ids"],
        topk_deepseek,
    ),
    "flashinfer_topk_deepseek_parts": (
        "router", "use_grouped_topk=true,scoring_func=sigmoid,renormalize=true,num_expert_group=1", {},
        ["topk_weights", "topk_ids"], lambda config, t: topk_deepseek(config, t, True),
    ),
}  # fmt: skip


def activation(name):
    def activate(kind, both):
        import flashinfer

        if base.DEVICE == "cpu":
            return None
        return getattr(flashinfer, f"{kind}_and_mul")(both.to(base.DEVICE))

    return lambda cases, seed, seconds: comparisons.every_activation(cases, seed, seconds, [name], activate)


def dequantized(codes, scales):
    """e2m1 codes [M, K / 2] times 2^(scale - 127) for each 32, exact."""
    plain = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    values = np.asarray(marlinspike.decode(plain, "float4_e2m1f"), np.float64)
    return np.ldexp(values, np.repeat(scales.astype(np.int64) - 127, 32, axis=1))


def dequantize(cases, seed, seconds, swizzled):
    """`mxfp4_dequantize_host` (scales in rows) or `mxfp4_dequantize` (interleaved): every code with scales up to 252."""
    random = np.random.default_rng(seed)

    def one(index):
        import flashinfer

        rows, blocks = int(random.integers(1, 140)), int(random.integers(1, 9))
        scales = random.integers(0, 253, (rows, blocks)).astype(np.uint8)
        codes = random.integers(0, 256, (rows, blocks * 16)).astype(np.uint8)
        if base.DEVICE == "cpu":
            return None, None
        if swizzled:
            given = flashinfer.block_scale_interleave(torch.from_numpy(scales).to(base.DEVICE))
            found = flashinfer.mxfp4_dequantize(torch.from_numpy(codes).to(base.DEVICE), given).cpu().double().numpy()
        else:
            found = flashinfer.mxfp4_dequantize_host(torch.from_numpy(codes), torch.from_numpy(scales)).double().numpy()
        expected = dequantized(codes, scales)
        wrong = found != expected

        def describe():
            row, column = np.argwhere(wrong)[0]
            kinds = sorted({int(code) for code in np.repeat(scales, 32, axis=1)[wrong]})
            return (
                f"shape {codes.shape}, [{row}, {column}], scale code {scales[row, column // 32]}: found {found[row, column]}, "
                f"expected {expected[row, column]}; wrong scale codes {kinds[:8]}"
            )

        return not wrong.any(), describe

    return comparisons.tally(cases, seconds, one)


def quantize(cases, seed, seconds):
    """`mxfp4_quantize`'s codes and scales in rows: whether there is a result for any block on this GPU."""
    random = np.random.default_rng(seed)

    def one(index):
        import flashinfer

        x = torch.from_numpy(random.standard_normal((16, 64)) * 4).to(torch.bfloat16).to(base.DEVICE)
        if base.DEVICE == "cpu":
            return None, None
        scale = torch.ones(1, device=base.DEVICE)
        codes, scales = flashinfer.fp4_quantize(x, scale, 16, False, False)
        found = codes.cpu().view(torch.uint8).numpy()
        sign = x.float().cpu().numpy().reshape(16, 32, 2) < 0
        # A code has the sign of its number.
        wrong = (found >> 3 & 1 != sign[..., 0]) | (found >> 7 != sign[..., 1])
        return not wrong.any(), lambda: (
            f"x {x[0, :4].tolist()}: codes {found[0, :8].tolist()}, scales {scales.flatten()[:8].tolist()}"
        )

    return comparisons.tally(cases, seconds, one)


COMPARISONS = {
    "flashinfer_silu": activation("silu"),
    "flashinfer_gelu": activation("gelu"),
    "flashinfer_gelu_tanh": activation("gelu_tanh"),
    "flashinfer_mxfp4_dequantize_host": lambda cases, seed, seconds: dequantize(cases, seed, seconds, False),
    "flashinfer_mxfp4_dequantize": lambda cases, seed, seconds: dequantize(cases, seed, seconds, True),
    "flashinfer_fp4_quantize": quantize,
}
