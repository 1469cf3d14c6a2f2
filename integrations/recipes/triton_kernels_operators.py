"""OpenAI's triton_kernels (the copy in vLLM 0.21.0's wheel) for `gpu_campaigns.py`.

LIBRARIES is the folder that contains the package `triton_kernels`: `vllm/third_party` of the wheel. It needs the Triton
that PyTorch brings. `PRODUCTS` are kernels of `run_fuzz`; `COMPARISONS` compare with a definition in numpy.
"""

import numpy as np
import torch
import torch_operators as base
import vllm_comparisons as comparisons
import vllm_operators as more

import marlinspike

MXFP4 = "checkpoint_format=mxfp4,input_dtype=null"
# Triton compiles a kernel for each kind of size, so campaigns of products draw few sizes.
FEW = "size_n=64|192,size_k=128|384"
BLOCK = 32


def on_device():
    """Without a GPU, a call ends here: all its arguments are made."""
    if base.DEVICE == "cpu":
        raise NotImplementedError


def matmul_weight(codes, scales, warps=8):
    """A weight [E, N, K / 2] and its scales for `matmul_ogs`: swizzled for Hopper, or plain if `warps` is None."""
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    if warps is not None:
        # vLLM pads the scales in the same way.
        scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
    codes = wrap_torch_tensor(codes.transpose(-2, -1), dtype=FP4)
    scales = wrap_torch_tensor(scales.transpose(-2, -1))
    if warps is None:
        return codes, scales
    codes = convert_layout(codes, HopperMXValueLayout, mx_axis=1)
    return codes, convert_layout(scales, HopperMXScaleLayout, mx_axis=1, num_warps=warps)


def precision(scales, invariant=False):
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData

    context = FlexCtx(rhs_data=InFlexData())
    return PrecisionConfig(weight_scale=scales, flex_ctx=context, enforce_bitwise_invariance=invariant)


def bytes_of(scales):
    return scales if scales.dtype == torch.uint8 else scales.view(torch.uint8)


def whole_scales(scales, codes):
    """Refuses weights with rows where a block scale of 2^-127, which kernels read as zero, has a share in the sum."""
    scales, codes = bytes_of(scales), codes.view(torch.uint8)
    used = (codes.reshape(*scales.shape, BLOCK // 2) & 0x77 != 0).any(-1)
    most = torch.where(used, scales, 0).amax(-1)
    if bool((((scales == 0) & used).any(-1) & (most < 64)).any()):
        raise base.Unsupported("a block scale of 2^-127 among small ones")


def product(config, t, warps=8, every_scale=False, invariant=False, rows=0):
    """A product; with `rows`, the case's rows are repeated to that number, and the last ones are judged."""
    from triton_kernels.matmul_ogs import matmul_ogs

    x, scales = t["in.x"], bytes_of(t["in.weight_scale"])
    if warps is not None and x.dtype != torch.bfloat16:
        raise base.Unsupported("the swizzled layout takes bfloat16")
    if not every_scale:
        whole_scales(scales, t["in.weight"])
    if rows:
        x = x.repeat(-(-rows // len(x)), 1)[-rows:].contiguous()
    if warps is not None and config["size_m"] % 2:
        warps = 4
    codes, scales = matmul_weight(t["in.weight"][None], scales[None], warps)
    bias = t["in.bias"].float()[None] if "in.bias" in t else None
    on_device()
    y = matmul_ogs(x, codes, bias, precision_config=precision(scales, invariant))
    return {"y": y[-config["size_m"] :]}


def routing(ids, weights, experts):
    """Routing data of chosen experts, and the order of rows by expert."""
    from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx
    from triton_kernels.tensor import make_ragged_tensor_metadata
    from triton_kernels.topk import topk

    scores = torch.zeros((len(ids), experts), dtype=torch.float32, device=ids.device)
    scores.scatter_(1, ids.long(), weights)
    on_device()
    chosen = topk(scores, ids.shape[1], apply_softmax=False, y_indx=ids.to(torch.int16))
    mask = chosen.mask_metadata
    place, order = mask.row_sorted_indx, mask.col_sorted_indx
    ragged = make_ragged_tensor_metadata(mask.col_sum, ids.numel())
    gates = chosen.vals.flatten()[order]
    data = RoutingData(gates, ragged.slice_sizes, experts, ids.shape[1], ragged)
    return data, GatherIndx(order, place), ScatterIndx(place, order), order.long()


def expert_layer(config, t):
    """gpt-oss's layer: gate and up, SwiGLU, down, and the sum over a token's experts; each stage from the one before it."""
    from triton_kernels.matmul_ogs import matmul_ogs
    from triton_kernels.swiglu import PrecisionConfig, swiglu

    parts = {}
    for part in ("w13", "w2"):
        scales = bytes_of(t[f"in.{part}_weight_scale"])
        whole_scales(scales, t[f"in.{part}_weight"])
        codes, scales = matmul_weight(t[f"in.{part}_weight"], scales)
        bias = t[f"in.{part}_bias"].float() if f"in.{part}_bias" in t else None
        parts[part] = (codes, bias), {"precision_config": precision(scales)}
    (w13, w13_keys), (w2, w2_keys) = parts["w13"], parts["w2"]
    data, gather, scatter, order = routing(t["ref.topk_ids"], t["ref.topk_weights"], config["num_experts"])
    rows = matmul_ogs(t["in.x"], *w13, data, gather_indx=gather, **w13_keys)
    active = swiglu(rows, 1.702, PrecisionConfig(limit=7.0))
    down = matmul_ogs(active, *w2, data, gammas=data.gate_scal, **w2_keys)
    y = matmul_ogs(active, *w2, data, scatter_indx=scatter, gammas=data.gate_scal, **w2_keys)
    stages = {"gate_up": rows, "activated": active, "down": down}
    # The operators keep rows in the order of their experts.
    return {**{name: torch.empty_like(v).index_copy_(0, order, v) for name, v in stages.items()}, "y": y}


def topk(config, t):
    from triton_kernels.topk import topk as operator

    logits = t["in.router_logits"]
    if logits.dtype != torch.float32 or "in.e_score_correction_bias" in t:
        raise base.Unsupported("f32 logits without a bias")
    if config["top_k"] not in (1, 2, 4, 8):
        raise base.Unsupported("a power of two for each token")
    on_device()
    chosen = operator(logits, config["top_k"], apply_softmax=True)
    # The operator sorts by expert.
    weights, order = torch.sort(chosen.vals, dim=1, descending=True, stable=True)
    return {"topk_weights": weights, "topk_ids": torch.gather(chosen.indx.int(), 1, order)}


PRODUCTS = {
    "triton_mxfp4": ("linear", f"{MXFP4},{FEW},dtype=bfloat16", {}, ["y"], product),
    "triton_mxfp4_every_scale": (
        "linear", f"{MXFP4},{FEW},dtype=bfloat16", {}, ["y"], lambda c, t: product(c, t, every_scale=True),
    ),
    "triton_mxfp4_invariant": (
        "linear", f"{MXFP4},{FEW},dtype=bfloat16", {}, ["y"], lambda c, t: product(c, t, invariant=True),
    ),
    "triton_mxfp4_plain": ("linear", f"{MXFP4},{FEW}", {}, ["y"], lambda c, t: product(c, t, None)),
    "triton_mxfp4_300": ("linear", f"{MXFP4},{FEW},dtype=bfloat16", {}, ["y"], lambda c, t: product(c, t, rows=300)),
    "triton_moe": (
        "moe", f"{MXFP4},dtype=bfloat16,activation=swigluoai,ep_size=1,hidden_size=256,has_bias=true", {},
        ["gate_up", "activated", "down", "y"], expert_layer,
    ),
    "triton_topk": (
        "router", "use_grouped_topk=false,scoring_func=softmax,renormalize=true", {}, ["topk_weights", "topk_ids"], topk,
    ),
}  # fmt: skip


# Largest code, its largest power of two, name of the format.
FORMATS = {
    torch.uint8: (6.0, 4.0, "float4_e2m1f"),
    torch.float8_e4m3fn: (448.0, 256.0, "float8_e4m3fn"),
    torch.float8_e5m2: (57344.0, 32768.0, "float8_e5m2"),
}


def rounded_scales(host, kind, up):
    """Codes of the block scales: the next power of two above max / largest code, or below max / its power of two."""
    most = np.abs(host).reshape(len(host), -1, BLOCK).max(axis=2).astype(np.float64)
    mantissa, exponent = np.frexp(most / FORMATS[kind][0 if up else 1])
    exponent = exponent - 1 + (up & (mantissa > 0.5))
    return np.where(most == 0, 0, np.clip(exponent + 127, 0, 254)).astype(np.uint8)


def scaled_codes(host, scales, kind):
    steps = np.repeat(np.ldexp(1.0, scales.astype(np.int64) - 127), BLOCK, axis=1)
    # Quotients by a power of two within the format's range are exact.
    codes = marlinspike.encode(host.astype(np.float64) / steps, FORMATS[kind][2], overflow="saturate")
    codes = np.asarray(codes).view(np.uint8)
    return codes if kind != torch.uint8 else codes[:, ::2] | codes[:, 1::2] << 4


def drawn_blocks(random, kind):
    """Rows of blocks on the device and on the host: normal values, ties of e2m1, zeros, the whole range of the type."""
    shape = (int(random.integers(1, 40)), BLOCK * int(random.integers(1, 9)))
    x, form = random.standard_normal(shape), random.integers(0, 5)
    if form == 1:
        x = random.integers(-24, 25, shape) / 4.0 * 2.0 ** random.integers(-9, 9, (shape[0], 1))
    elif form == 2:
        x *= 2.0 ** random.uniform(-14, 14, shape)
    elif form == 3:
        x[:, : BLOCK] = 0
    elif form == 4 and kind != torch.float16:
        x = np.clip(x, -3, 3) * 2.0 ** random.integers(-100, 125, (shape[0], 1))
    if kind == torch.float16:
        # Infinite values have no block scale.
        x = np.clip(x, -65504, 65504)
    made = torch.from_numpy(x).to(kind).to(base.DEVICE)
    return made, made.float().cpu().numpy()


def downcast(cases, seed, seconds):
    """`downcast_to_mxfp`: block scales and codes, bit for bit."""
    from triton_kernels.numerics_details.mxfp import DequantScaleRoundingMode, downcast_to_mxfp

    random = np.random.default_rng(seed)

    def one(index):
        kind, target = comparisons.TYPES[int(random.integers(0, 3))], list(FORMATS)[int(random.integers(0, 3))]
        x, host = drawn_blocks(random, kind)
        mode = DequantScaleRoundingMode(int(random.integers(0, 2)))
        scales = rounded_scales(host, target, mode == DequantScaleRoundingMode.ROUND_UP)
        expected = scaled_codes(host, scales, target)
        # Blocks with a scale of zero have no codes.
        read = np.repeat(scales != 0, BLOCK // (2 if target == torch.uint8 else 1), axis=1)
        if base.DEVICE == "cpu":
            return None, None
        codes, found = downcast_to_mxfp(x, target, 1, mode)
        codes, found = np.where(read, comparisons.bits(codes), expected), comparisons.bits(found)

        def describe():
            pair = (found, scales) if not np.array_equal(found, scales) else (codes, expected)
            at = np.argwhere(pair[0] != pair[1])[0]
            block = host[at[0]].reshape(-1, BLOCK)
            column = at[1] if pair[0] is found else at[1] * (2 if target == torch.uint8 else 1) // BLOCK
            values = block[column].tolist()
            return f"{kind} to {target}, {mode}, {comparisons.differing(*pair)}, scale {scales[at[0], column]}, {values}"

        return np.array_equal(codes, expected) and np.array_equal(found, scales), describe

    return comparisons.tally(cases, seconds, one)


def upcast(cases, seed, seconds, least=1):
    """`upcast_from_mxfp`: every code with every scale of a finite product; scale code 0 only with `least` 0."""
    from triton_kernels.numerics_details.mxfp import upcast_from_mxfp

    random = np.random.default_rng(seed)

    def one(index):
        kind, source = comparisons.TYPES[int(random.integers(0, 3))], list(FORMATS)[int(random.integers(0, 3))]
        rows, blocks = int(random.integers(1, 40)), int(random.integers(1, 9))
        most = 142 if kind == torch.float16 else 255
        scales = random.integers(112 if kind == torch.float16 else least, most, (rows, blocks)).astype(np.uint8)
        if least == 0:
            scales[random.integers(0, rows), random.integers(0, blocks)] = 0
        width = BLOCK // (2 if source == torch.uint8 else 1)
        codes = random.integers(0, 256, (rows, blocks * width)).astype(np.uint8)
        plain = codes if source != torch.uint8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, -1)
        values = np.asarray(marlinspike.decode(plain, FORMATS[source][2]), np.float64)
        exact = np.ldexp(values, np.repeat(scales.astype(np.int64) - 127, BLOCK, axis=1))
        finite = torch.finfo(kind)
        expected = torch.from_numpy(exact).to(kind)
        read = torch.from_numpy(np.isfinite(exact) & (np.abs(exact) <= finite.max))
        if base.DEVICE == "cpu":
            return None, None
        tensor = torch.from_numpy(codes).to(base.DEVICE)
        tensor = tensor if source == torch.uint8 else tensor.view(source)
        found = upcast_from_mxfp(tensor, torch.from_numpy(scales).to(base.DEVICE), kind, 1).cpu()
        wrong = read & (found != expected)

        def describe():
            row, column = (int(i) for i in wrong.nonzero()[0])
            scale = int(scales[row, column // BLOCK])
            return (
                f"{source} to {kind}, scale code {scale}, value {values[row, column]}: found {float(found[row, column])}, "
                f"expected {float(expected[row, column])}; {int(wrong.sum())} values with scale codes "
                f"{sorted(set(np.repeat(scales, BLOCK, axis=1)[wrong.numpy()].tolist()))[:8]}"
            )

        return not bool(wrong.any()), describe

    return comparisons.tally(cases, seconds, one)


def swiglu(cases, seed, seconds):
    from triton_kernels.swiglu import PrecisionConfig, swiglu as operator

    def activate(kind, both):
        if base.DEVICE == "cpu":
            return None
        return operator(both.to(base.DEVICE), 1.702, PrecisionConfig(limit=7.0))

    return comparisons.every_activation(cases, seed, seconds, ["swigluoai"], activate)


COMPARISONS = {
    "triton_downcast_to_mxfp": downcast,
    "triton_upcast_from_mxfp": upcast,
    "triton_upcast_scale_code_0": lambda cases, seed, seconds: upcast(cases, seed, seconds, 0),
    "triton_swiglu": swiglu,
}
