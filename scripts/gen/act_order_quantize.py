#!/usr/bin/env python3
"""Act-order quantization by vLLM's own `gptq_quantize_weights`, as a small table.

Usage: act_order_quantize.py VLLM_SOURCE_DIR OUT.json

Reads only `vllm/scalar_type.py` and the functions named below from the source tree, so vLLM need not
be built. Needs torch.
"""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import torch

FUNCTIONS = {"permute_rows", "quantize_weights", "gptq_quantize_weights"}
CONSTANTS = {"SUPPORTED_GPTQ_QUANT_TYPES", "SUPPORTED_GROUP_SIZES"}


def upstream(root: Path):
    """The source tree's functions and scalar types."""
    spec = importlib.util.spec_from_file_location("scalar_type", root / "scalar_type.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["scalar_type"] = module
    spec.loader.exec_module(module)
    path = root / "model_executor/layers/quantization/utils/quant_utils.py"
    tree = ast.parse(path.read_text())

    def wanted(node):
        if isinstance(node, ast.FunctionDef):
            return node.name in FUNCTIONS
        return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in CONSTANTS

    names = {"torch": torch, "ScalarType": module.ScalarType, "scalar_types": module.scalar_types}
    body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign)) and wanted(node)]
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return names


def main():
    names = upstream(Path(sys.argv[1]) / "vllm")
    generator = torch.Generator().manual_seed(7)
    w = torch.randn((128, 3), generator=generator)
    w[:, 2] *= 1e-3
    perm = torch.randperm(128, generator=generator)
    cases = []
    for type_name in ("uint4b8", "uint8b128"):
        for dtype in ("float16", "bfloat16"):
            ty = getattr(names["scalar_types"], type_name)
            half = w.to(getattr(torch, dtype))
            _, q, s, g_idx, _ = names["gptq_quantize_weights"](half, ty, 32, True, perm)
            cases.append(
                {
                    "weight_type": type_name,
                    "dtype": dtype,
                    "q": q.flatten().tolist(),
                    "s": s.view(torch.int16).flatten().tolist(),
                    "g_idx": g_idx.tolist(),
                }
            )
    facts = {
        "producer": f"vllm 0.21.0 gptq_quantize_weights, torch {torch.__version__}, CPU",
        "w": w.view(torch.int32).flatten().tolist(),
        "perm": perm.tolist(),
        "cases": cases,
    }
    Path(sys.argv[2]).write_text(json.dumps(facts, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
