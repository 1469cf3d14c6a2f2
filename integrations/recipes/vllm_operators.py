"""Further operators of vLLM 0.21.0 and 0.33.0 for `gpu_campaigns.py`, as functions of a config and its tensors.

Tensors have the names of case files: `in.x`, and `ref.gate_up` for what the reference computed.
"""

import torch
import torch.nn.functional as functional
import torch_operators as base

ACTIVATIONS = {
    "silu": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "swigluoai": "swigluoai_and_mul",
}
# What vLLM calls where there is no up projection.
PLAIN = {
    "silu_no_mul": functional.silu,
    "gelu_no_mul": functional.gelu,
    "gelu_tanh_no_mul": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2_no_mul": lambda x: torch.square(functional.relu(x)),
}
E4M3 = torch.float8_e4m3fn


def empty(shape, dtype):
    """Bytes of 0xFF, which no operator here may leave."""
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.full((count,), 255, dtype=torch.uint8, device=base.DEVICE).view(dtype).reshape(shape)


def tensor(array):
    """A tensor with the bits of a numpy or ml_dtypes array."""
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"):
        array = array.view(f"uint{8 * array.dtype.itemsize}")
        return torch.from_numpy(array).to(base.DEVICE).view(getattr(torch, name))
    return torch.from_numpy(array).to(base.DEVICE)


def activation(kind, gate_up):
    if kind in PLAIN:
        return PLAIN[kind](gate_up)
    if kind not in ACTIVATIONS:
        raise base.Unsupported(f"no operator for {kind}")
    y = empty((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
    getattr(torch.ops._C, ACTIVATIONS[kind])(y, gate_up)
    return y


def moe_sum(config, down):
    y = empty((config["size_m"], config["hidden_size"]), down.dtype)
    torch.ops._moe_C.moe_sum(down.view(config["size_m"], config["top_k"], -1), y)
    return y


def expert_layer(config, t):
    """Both products, activation and sum; each stage from this layer's own stage before it."""
    gate_up = base.moe_gate_up(config, t)["gate_up"]
    activated = activation(config["activation"], gate_up)
    down = base.moe_down(config, {**t, "ref.activated": activated})["down"]
    return {"gate_up": gate_up, "activated": activated, "down": down, "y": moe_sum(config, down)}


def expert_layer_of_kept_scales(config, t):
    """Without block scales that packing loses, which change every output: other faults become visible."""
    for part in ("w13", "w2"):
        codes = t[f"in.{part}_weight_scale"].view(torch.uint8) & 0x7F
        if bool(((codes > 0) & (codes < 8)).any()):
            raise base.Unsupported("block scales below 2^-6")
    return expert_layer(config, t)


def topk(config, t):
    logits = t["in.router_logits"]
    shape = (len(logits), config["top_k"])
    weights, ids, indices = (empty(shape, dtype) for dtype in (torch.float32, torch.int32, torch.int32))
    operator = getattr(torch.ops._moe_C, f"topk_{config['scoring_func']}")
    more = (1.0,) if base.takes(operator, "routed_scaling_factor") else ()
    more += (None,) if base.takes(operator, "is_padding") else ()
    bias = t.get("in.e_score_correction_bias")
    operator(weights, ids, indices, logits, bool(config.get("renormalize")), bias, *more)
    return {"topk_weights": weights, "topk_ids": ids, "token_expert_indices": indices}


def grouped_topk(config, t):
    logits, bias = t["in.router_logits"], t.get("in.e_score_correction_bias")
    if bias is None:
        raise base.Unsupported("the operator needs a bias")
    if logits.dtype != torch.float32:
        raise base.Unsupported("the operator computes in f32, the operation rounds scores to 16 bits")
    inside = config["scoring_func"] == "sigmoid"
    scores = logits if inside else torch.softmax(logits, dim=-1)
    groups = (config["num_expert_group"], config["topk_group"], config["top_k"], bool(config.get("renormalize")))
    factor = config.get("routed_scaling_factor") or 1.0
    weights, ids = torch.ops._moe_C.grouped_topk(scores, *groups, factor, bias, int(inside))
    return {"topk_weights": weights.float(), "topk_ids": ids.int()}


def cutlass_scaled_mm(config, t):
    y = empty((config["size_m"], config["size_n"]), getattr(torch, config["dtype"]))
    by_row, by_column = t["in.a_scales"], t["in.weight_scale"]
    if by_row.dtype != torch.float32 or by_column.dtype != torch.float32:
        raise base.Unsupported("scales in f32")
    if config.get("weight_block_size"):
        # Rows of activations are next to each other in memory.
        by_row, by_column = by_row.t().contiguous().t(), by_column.t()
    torch.ops._C.cutlass_scaled_mm(y, t["in.a"], t["in.weight"].t(), by_row, by_column, t.get("in.bias"))
    return {"y": y}


def group_rule():
    """The rule of the release: 0.33.0, whose routers take a factor, multiplies with a scale's reciprocal."""
    newer = base.takes(torch.ops._moe_C.topk_softmax, "routed_scaling_factor")
    return "scale_inverse" if newer else "quotient"


def per_token_group_fp8_quant(config, t):
    if config["quantizer"] != group_rule():
        raise base.Unsupported(f"the operator's rule is {group_rule()}")
    x, group = t["in.x"], config["group_size"]
    rows, groups, layout = len(x), x.shape[1] // group, config.get("scale_layout", "row_major")
    codes, limits = empty(x.shape, E4M3), (1e-10, -448.0, 448.0)
    if layout == "packed_ue8m0":
        # The operator leaves padding as it is.
        memory = torch.zeros((-(-groups // 4), -(-rows // 4) * 4), dtype=torch.int32, device=base.DEVICE)
        scales = memory.as_strided((rows, len(memory)), (1, memory.shape[1]))
        torch.ops._C.per_token_group_fp8_quant_packed(x, codes, scales, group, *limits)
        return {"x_q": codes, "x_s": memory}
    padded = -(-rows // 4) * 4 if layout == "tma_aligned" else rows
    by_row = layout == "row_major"
    memory = empty((rows, groups) if by_row else (groups, padded), torch.float32)
    scales = memory if by_row else memory.as_strided((rows, groups), (1, padded))
    flags = (bool(config.get("use_ue8m0")), not by_row, layout == "tma_aligned")
    torch.ops._C.per_token_group_fp8_quant(x, codes, scales, group, *limits, *flags)
    return {"x_q": codes, "x_s": memory}


def int4_fp8_preprocess(config, t):
    del config
    return {"qweight": torch.ops._C.marlin_int4_fp8_preprocess(t["in.qweight"], t.get("in.qzeros"), False)}
