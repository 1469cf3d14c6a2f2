#!/usr/bin/env python3
"""GPTQ checkpoints packed by GPTQModel's own `TorchLinear`.

    python3 gptq.py --gptqmodel-source gptqmodel-7.7.0 --vllm-wheel vllm-0.21.0-….whl

Quantization is round-to-nearest with min/max scales, which the packer accepts as
any others; packing, the v2 to v1 conversion of the zero
points and the dequantization are the package's.
"""

import argparse
import importlib
import re
import sys
import types
from pathlib import Path

import torch

from common import LLAMA, Checkpoint, seeded
from vllm_helpers import load, marlin_integer, prove_operators

VERSION = "7.7.0"


def gptqmodel(source):
    """`TorchLinear` and the conversion, without the package's model zoo and its dependencies."""
    root = source / "gptqmodel"
    if f"Version: {VERSION}" not in (source / "PKG-INFO").read_text():
        raise SystemExit(f"{source}: expected the source distribution of gptqmodel {VERSION}")
    for name in ("gptqmodel", "gptqmodel.models"):
        module = types.ModuleType(name)
        module.__path__ = [str(root / name.partition(".")[2])]
        sys.modules[name] = module
    sys.modules["gptqmodel"].DEBUG_ON = False
    linear = importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    convert = importlib.import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    return linear, convert


def pack(linear_class, weight, bits, group_size, desc_act, name):
    """A packed module, zero points in the v2 convention."""
    size_n, size_k = weight.shape
    groups = size_k // group_size
    g_idx = torch.arange(size_k, dtype=torch.int32) // group_size
    if desc_act:
        # The activations' magnitudes determine which columns are quantized together.
        order = seeded(name + "/activations", size_k).argsort(stable=True)
        g_idx = g_idx[order.argsort(stable=True)].contiguous()
    half = 1 << (bits - 1)
    scales = torch.stack(
        [weight[:, g_idx == g].abs().amax(dim=1) / (half - 1) for g in range(groups)], dim=1
    ).half().float()
    module = linear_class(
        bits=bits, group_size=group_size, sym=True, desc_act=desc_act,
        in_features=size_k, out_features=size_n, bias=False, pack_dtype=torch.int32, register_buffers=True,
    )
    linear = torch.nn.Linear(size_k, size_n, bias=False)
    linear.weight.data = weight.clone()
    module.pack_original(linear, scales, torch.full((size_n, groups), float(half)), g_idx)
    module.post_init()
    return module


def dequantize(module):
    """[N, K] in float32, by the package; with float32 scales, nothing is rounded to float16."""
    stored = module.scales
    module.scales = stored.float()
    weight = module.dequantize_weight().T.float()
    module.scales = stored
    return weight


def quantize_config(**extra):
    return {
        "quant_method": "gptq", "sym": True, "lm_head": False, "pack_dtype": "int32",
        "meta": {"quantizer": [f"gptqmodel:{VERSION}"]}, **extra,
    }


def fill(v, linear_class, convert, ckpt, rules, v1, truths):
    """Packs every linear layer; `rules(module)` gives (bits, group_size, desc_act), or None to skip it."""
    for name in ckpt.linears:
        rule = rules(name)
        if rule is None:
            ckpt.tensors[name + ".weight"] = ckpt.weight(name, ckpt.dtype)
            continue
        bits, group_size, desc_act = rule
        module = pack(linear_class, ckpt.weight(name), bits, group_size, desc_act, f"{ckpt.name}/{name}")
        if name in truths:
            g_idx = module.g_idx if desc_act else None
            ckpt.expect(name, weight=dequantize(module),
                        **marlin_integer(v, module.qweight, module.scales, bits, group_size, g_idx))
        if v1:
            convert(module, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        ckpt.add(name, {key: getattr(module, key) for key in ("qweight", "qzeros", "scales", "g_idx")})
    ckpt.notes = [
        f"weight: gptqmodel {VERSION} TorchLinear.dequantize_weight with float32 scales;",
        "Marlin tensors: vllm 0.21.0 pure-PyTorch helpers, torch 2.11.0 CPU",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gptqmodel-source", type=Path, required=True)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    args = parser.parse_args()
    v = load(args.vllm_wheel)
    prove_operators(v)
    linear_class, convert = gptqmodel(args.gptqmodel_source)
    common = {"script": "scripts/gen/gptq.py", "producer": "gptqmodel", "version": VERSION, "fmt": "gptq"}
    k_proj, down = "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"

    ckpt = Checkpoint("gptq-actorder", LLAMA, 256, 128, torch.float16, **common,
                      about="4 bits, groups of 32, act-order, zero points stored minus one (v1)")
    fill(v, linear_class, convert, ckpt, lambda name: (4, 32, True), True, [k_proj])
    ckpt.write(quantize_config(bits=4, group_size=32, desc_act=True, checkpoint_format="gptq"))

    ckpt = Checkpoint("gptq-v2-8bit", LLAMA, 128, 128, torch.float16, **common,
                      about="8 bits, groups of 64, zero points stored as they are (v2)")
    fill(v, linear_class, convert, ckpt, lambda name: (8, 64, False), False, [k_proj])
    ckpt.write(quantize_config(bits=8, group_size=64, desc_act=False, checkpoint_format="gptq_v2"))

    # Lookaround, as in real files: 8 bits for every q/k/v/o projection except o_proj, and no
    # quantization for down_proj.
    dynamic = {
        r"+:.*\.self_attn\.(?!o_proj)\w+_proj$": {"bits": 8, "group_size": 32},
        r"-:.*(?<=mlp\.)down_proj": {},
    }

    def rules(name):
        for pattern, rule in dynamic.items():
            if re.match(pattern[2:], name):
                return (rule["bits"], rule["group_size"], False) if pattern.startswith("+:") else None
        return (4, 64, False)

    ckpt = Checkpoint("gptq-dynamic", LLAMA, 128, 128, torch.float16, **common,
                      about="per-module rules with lookaround: 4 and 8 bits mixed, one module skipped")
    fill(v, linear_class, convert, ckpt, rules, True, [k_proj])
    assert down + ".weight" in ckpt.tensors
    ckpt.write(quantize_config(bits=4, group_size=64, desc_act=False, checkpoint_format="gptq", dynamic=dynamic))


if __name__ == "__main__":
    main()
