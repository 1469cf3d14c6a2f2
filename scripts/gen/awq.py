#!/usr/bin/env python3
"""An AWQ checkpoint packed by AutoAWQ's `WQLinear_GEMM.from_linear`.

    python3 awq.py --autoawq-source autoawq-0.2.9 --vllm-wheel vllm-0.21.0-….whl
"""

import argparse
import importlib
import sys
import types
from pathlib import Path

import torch

from common import LLAMA, Checkpoint
from vllm_helpers import load, prove_operators

VERSION = "0.2.9"
BITS, GROUP = 4, 64


def autoawq(source):
    """The packer and the naive dequantization, without the package's model zoo."""
    if f"Version: {VERSION}" not in (source / "PKG-INFO").read_text():
        raise SystemExit(f"{source}: expected the source distribution of autoawq {VERSION}")
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        module = types.ModuleType(name)
        module.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = module
    gemm = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    return gemm, importlib.import_module("awq.utils.packing_utils").dequantize_gemm


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--autoawq-source", type=Path, required=True)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    args = parser.parse_args()
    v = load(args.vllm_wheel)
    prove_operators(v)
    gemm, dequantize_gemm = autoawq(args.autoawq_source)
    ckpt = Checkpoint("awq", LLAMA, 128, 128, torch.float16, fmt="awq", script="scripts/gen/awq.py",
                      producer="autoawq", version=VERSION, about="4 bits, groups of 64, zero points")
    for name, (size_n, size_k) in ckpt.linears.items():
        weight = ckpt.weight(name) + 0.01  # off centre, so that zero points differ from 8
        grouped = weight.reshape(size_n, -1, GROUP)
        high, low = grouped.amax(2), grouped.amin(2)
        scales = ((high - low).clamp(min=1e-5) / 15).half().float()
        zeros = (-torch.round(low / scales)).clamp(0, 15)
        linear = torch.nn.Linear(size_k, size_n, bias=False)
        # The packer does not clamp; it expects a weight that is already on the grid.
        steps = (torch.round(grouped / scales[:, :, None]) + zeros[:, :, None]).clamp(0, 15)
        linear.weight.data = ((steps - zeros[:, :, None]) * scales[:, :, None]).reshape(size_n, size_k)
        packed = gemm.from_linear(linear, BITS, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
        ckpt.add(name, {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")})
        if name.endswith("k_proj"):
            truth = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), BITS, GROUP)
            codes = steps.reshape(size_n, size_k).T.to(torch.int32).contiguous()
            ckpt.expect(
                name, weight=truth.T,
                marlin_qweight=v.test.marlin_weights(codes, size_k, size_n, BITS, v.test.get_weight_perm(BITS)),
                marlin_scales=v.marlin.marlin_permute_scales(packed.scales, size_k, size_n, GROUP),
                marlin_zeros=v.marlin.awq_to_marlin_zero_points(packed.qzeros, size_k // GROUP, size_n, BITS),
            )
    ckpt.notes = [
        f"weight: autoawq {VERSION} dequantize_gemm with float32 scales;",
        "Marlin tensors: vllm 0.21.0 pure-PyTorch helpers, torch 2.11.0 CPU",
    ]
    ckpt.write({"quant_method": "awq", "version": "gemm", "bits": BITS, "group_size": GROUP,
                "zero_point": True, "modules_to_not_convert": None})


if __name__ == "__main__":
    main()
