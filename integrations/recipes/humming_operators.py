"""Humming 0.1.19 for `gpu_campaigns.py`: products of 16-bit activations with the library's own layout of the weights.

LIBRARIES is a folder with the package `humming` (`pip install --no-deps --target LIBRARIES humming-kernels==0.1.19`).
Every shape, format and group size is a kernel of its own, compiled by NVRTC at its first call, so campaigns have the shapes
`SIZES` alone. vLLM pads weights to 256 columns and 128 rows, and so does this file.
"""

import functools
import json

import torch
import torch_operators as base
from triton_kernels_operators import whole_scales

# Columns and rows.
SIZES = ((64, 128), (192, 128), (192, 384))
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def schema(config):
    from humming import dtypes
    from humming.schema import HummingWeightSchema

    group = max(config["group_size"], 0)
    made = {
        "uint4b8": lambda: HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=group),
        "uint8b128": lambda: HummingWeightSchema(b_dtype="uint8", weight_scale_group_size=group),
        "uint4": lambda: HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=group, has_zero_point=True),
        "float8_e4m3fn": lambda: HummingWeightSchema(b_dtype=dtypes.float8e4m3, weight_scale_group_size=group),
    }
    if config["checkpoint_format"] == "mxfp4":
        return HummingWeightSchema(b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32)
    if config["checkpoint_format"] == "nvfp4":
        return HummingWeightSchema(
            b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e4m3, weight_scale_group_size=16, weight_scale_2_type="tensor"
        )
    return made[config["weight_type"]]()


def awq_codes(words):
    """AWQ's words [rows, N / 8] as codes [rows, N]."""
    shifts = torch.tensor([4 * field for field in AWQ_ORDER], device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def packed(codes):
    """Eight codes of the last axis in a word, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int64)
    words = (codes.unflatten(-1, (-1, 8)).long() << shifts).sum(-1)
    return words.to(torch.int32) if words.numel() == 0 else (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def tensors(config, t):
    """The checkpoint's tensors in Humming's form: codes along K in words, scales [N, groups]."""
    made, form = {}, config["checkpoint_format"]
    if form == "gptq":
        made = {"weight": t["in.qweight"].T.contiguous(), "weight_scale": t["in.scales"].T.contiguous()}
    elif form == "awq":
        made = {"weight": packed(awq_codes(t["in.qweight"]).T), "weight_scale": t["in.scales"].T.contiguous()}
        made["zero_point"] = packed(awq_codes(t["in.qzeros"])).T.contiguous()
    elif form == "fp8":
        made = {"weight": t["in.weight"].view(torch.uint8).view(torch.int32)}
        made["weight_scale"] = t["in.weight_scale"].T.contiguous()
    else:
        kind = torch.float8_e8m0fnu if form == "mxfp4" else torch.float8_e4m3fn
        made = {"weight": t["in.weight"].view(torch.int32), "weight_scale": t["in.weight_scale"].view(kind)}
        if form == "nvfp4":
            made["weight_scale_2"] = t["in.weight_global_scale"].reshape(1)
    if "in.bias" in t:
        made["bias"] = t["in.bias"]
    return made


def layer(config, has_bias, dtype):
    """What a kernel is compiled for."""
    from humming.transform import prepare_layer_config

    return prepare_layer_config(
        shape_n=config["size_n"], shape_k=config["size_k"], weight_schema=schema(config), has_bias=has_bias,
        pad_n_to_multiple=256, pad_k_to_multiple=128, torch_dtype=dtype, device=0,
    )  # fmt: skip


@functools.lru_cache(maxsize=None)
def plan(text, size_m, invariant):
    from humming.config import LayerConfig
    from humming.tune import get_heuristics_config

    keys = {"use_batch_invariant": invariant, "gemm_type": "dense"}
    compute = {**keys, "use_f16_accum": False}
    tuning = get_heuristics_config(layer_config=LayerConfig(**json.loads(text)), shape_m=size_m, **keys)
    tuning = {key: list(value) if isinstance(value, tuple) else value for key, value in tuning.items()}
    return json.dumps(compute), json.dumps(tuning)


def product(config, t, invariant=False, every_scale=True, rows=0):
    """A product; with `rows`, the case's rows are repeated to that number, and the last ones are judged."""
    from humming.forward import humming_forward
    from humming.transform import check_and_pad_tensors, transform_humming_tensors

    if (config["size_n"], config["size_k"]) not in SIZES:
        raise base.Unsupported("a shape that is not compiled")
    if 0 < config["group_size"] < 16:
        raise base.Unsupported("groups of fewer than 16 rows")
    given, x = tensors(config, t), t["in.x"]
    if not every_scale:
        whole_scales(given["weight_scale"], given["weight"])
    if rows:
        x = x.repeat(-(-rows // len(x)), 1)[-rows:].contiguous()
    made = layer(config, "bias" in given, x.dtype)
    compute, tuning = plan(made.to_str(), len(x), invariant)
    given = check_and_pad_tensors(made, given)
    if base.DEVICE == "cpu":
        raise NotImplementedError
    weight = transform_humming_tensors(made, given, already_padded=True)
    y = torch.full((len(x), config["size_n"]), float("nan"), dtype=x.dtype, device=x.device)
    locks = torch.zeros(1 << 16, dtype=torch.int32, device=x.device)
    humming_forward(made, inputs=x, outputs=y, locks=locks, compute_config=compute, tuning_config=tuning, **weight)
    return {"y": y[-config["size_m"] :]}


def campaign(where, **keys):
    where = f"input_dtype=null,size_n=64|192,size_k=128|384,{where}"
    return ("linear", where, {}, ["y"], lambda config, t: product(config, t, **keys))


FORMS = {
    "uint4b8": "checkpoint_format=gptq,weight_type=uint4b8,desc_act=false",
    "uint8b128": "checkpoint_format=gptq,weight_type=uint8b128,desc_act=false",
}
PRODUCTS = {
    "humming_uint4b8": campaign(f"{FORMS['uint4b8']},dtype=bfloat16,group_size=64"),
    "humming_uint4b8_f16": campaign(f"{FORMS['uint4b8']},dtype=float16,group_size=128"),
    "humming_uint4b8_invariant": campaign(f"{FORMS['uint4b8']},dtype=bfloat16,group_size=-1", invariant=True),
    "humming_uint4b8_300": campaign(f"{FORMS['uint4b8']},dtype=bfloat16,group_size=32", rows=300),
    "humming_uint8b128": campaign(f"{FORMS['uint8b128']},dtype=bfloat16,group_size=64"),
    "humming_awq": campaign("checkpoint_format=awq,dtype=bfloat16,group_size=64"),
    "humming_fp8": campaign("checkpoint_format=fp8,dtype=bfloat16,group_size=-1"),
    "humming_mxfp4": campaign("checkpoint_format=mxfp4,dtype=bfloat16", every_scale=False),
    "humming_mxfp4_every_scale": campaign("checkpoint_format=mxfp4,dtype=bfloat16"),
    "humming_mxfp4_100": campaign("checkpoint_format=mxfp4,dtype=bfloat16", every_scale=False, rows=100),
    "humming_mxfp4_f16": campaign("checkpoint_format=mxfp4,dtype=float16", every_scale=False),
    "humming_nvfp4": campaign("checkpoint_format=nvfp4,dtype=bfloat16"),
}
COMPARISONS = {}
