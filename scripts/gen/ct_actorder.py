#!/usr/bin/env python3
"""A pack-quantized checkpoint with act-order, by `compressed-tensors` 0.11.0.

    PYTHONPATH=<folder with compressed-tensors 0.11.0> python3 ct_actorder.py --vllm-wheel vllm-0.21.0-….whl

Later releases of the package dropped `weight_g_idx`. Files that hold it are still
in use, and vLLM reads them.
"""

import argparse
from pathlib import Path

import compressed_tensors
import torch
from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from common import LLAMA, Checkpoint, seeded
from vllm_helpers import load, marlin_integer, prove_operators

VERSION = "0.11.0"
GROUP = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-wheel", type=Path, required=True)
    v = load(parser.parse_args().vllm_wheel)
    prove_operators(v)
    if compressed_tensors.__version__ != VERSION:
        raise SystemExit(f"expected compressed-tensors {VERSION}, found {compressed_tensors.__version__}")
    ckpt = Checkpoint("ct-pack-actorder", LLAMA, 128, 128, torch.bfloat16, fmt="pack-quantized",
                      script="scripts/gen/ct_actorder.py", producer="compressed-tensors", version=VERSION,
                      about="4 bits, groups of 32, act-order with weight_g_idx")
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP,
                            actorder="group")
    compressor = PackedQuantizationCompressor()
    for name, (size_n, size_k) in ckpt.linears.items():
        weight = ckpt.weight(name, torch.bfloat16)
        order = seeded(f"{ckpt.name}/{name}/activations", size_k).argsort(stable=True)
        g_idx = (torch.arange(size_k, dtype=torch.int32) // GROUP)[order.argsort(stable=True)].contiguous()
        grouped = weight[:, order].reshape(size_n, -1, GROUP)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        state = compressor.compress_weight(weight, scale, args, zero_point=zero, g_idx=g_idx)
        state |= {"weight_scale": scale, "weight_g_idx": g_idx}
        ckpt.add(name, state)
        if name.endswith("k_proj"):
            wide = {**state, "weight_scale": scale.float()}
            packed, scales = state["weight_packed"].T.contiguous(), scale.T.contiguous()
            ckpt.expect(name, weight=compressor.decompress_weight(wide, args).float(),
                        **marlin_integer(v, packed, scales, 4, GROUP, g_idx))
    ckpt.notes = [
        f"weight: compressed-tensors {VERSION} decompress_weight with float32 scales;",
        "Marlin tensors: vllm 0.21.0 pure-PyTorch helpers, torch 2.11.0 CPU",
    ]
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=args)},
        format="pack-quantized", quantization_status="compressed", ignore=["lm_head"],
    ).model_dump(mode="json")
    ckpt.write({**config, "version": VERSION})


if __name__ == "__main__":
    main()
