"""vLLM's helpers in Python and torch, without a GPU, as kernels of `marlinspike.run_fuzz` and against numpy.

    pip install ./integrations/python torch && pip download --no-deps vllm==0.33.0
    python vllm_helpers.py vllm-0.33.0-*.whl                 # every helper
    python vllm_helpers.py vllm-0.33.0-*.whl routers --cases 20000

The modules of `REAL` run unchanged from the wheel; the rest of the package is replaced by inert stand-ins.

| subject | operation or comparison |
| --- | --- |
| `permute` | `linear`: `marlin_scales`, `marlin_zeros`, `marlin_bias`, `marlin_qweight` |
| `routers` | `router`: `grouped_topk`, and `fused_topk_bias` as it runs without its fused kernel |
| `swizzle` | `swizzle_blockscale` |
| `quantize` | `quantize_weights`: the nearest codes of the range of each group, in numpy |
| `pack` | `gptq_pack`, `awq_pack`, `pack_cols`, `unpack_cols` against plain loops |
| `mxfp8` | `_mxfp8_e4m3_quantize_torch`: scales that use the range of e4m3, nearest elements; `dequant_mxfp8_to_bf16` |
| `nvfp4` | `ref_nvfp4_quant`, `dequantize_to_dtype` |
| `types` | predicates of `scalar_types` |
"""

import argparse
import importlib
import importlib.abc
import importlib.util
import sys
import types
import unittest.mock
import zipfile
from unittest.mock import MagicMock

import numpy as np
import torch

import marlinspike

UTILS = "vllm.model_executor.layers.quantization.utils"
ROUTER = "vllm.model_executor.layers.fused_moe.router"
REAL = {
    "vllm.scalar_type",
    "vllm.utils.math_utils",
    f"{UTILS}.quant_utils",
    f"{UTILS}.marlin_utils",
    f"{UTILS}.marlin_utils_test",
    f"{UTILS}.mxfp8_utils",
    f"{UTILS}.nvfp4_utils",
    f"{UTILS}.nvfp4_emulation_utils",
    f"{ROUTER}.grouped_topk_router",
    f"{ROUTER}.fused_topk_bias_router",
}


class StandIn(types.ModuleType):
    """A module in which every name can be called, read and imported from."""

    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, path):
        self.files = zipfile.ZipFile(path)

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec):
        return None if spec.name in REAL else StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ in REAL:
            module.__package__ = module.__name__.rpartition(".")[0]
            path = module.__name__.replace(".", "/") + ".py"
            exec(compile(self.files.read(path), path, "exec"), module.__dict__)


class Vllm:
    """The modules by their last name."""

    def __init__(self, path):
        sys.meta_path.insert(0, Wheel(path))
        platform = importlib.import_module("vllm.platforms")
        platform.current_platform = MagicMock()
        platform.current_platform.fp8_dtype = lambda: torch.float8_e4m3fn
        for question in ("is_fp8_fnuz", "is_cuda", "is_cuda_alike", "is_rocm", "is_xpu"):
            setattr(platform.current_platform, question, lambda: False)
        platform.current_platform.has_device_capability = lambda *_: False
        envs = importlib.import_module("vllm.envs")
        envs.VLLM_USE_FUSED_MOE_GROUPED_TOPK = False
        # Sorts the experts of a token; otherwise their order is not defined.
        envs.VLLM_BATCH_INVARIANT = True
        compiled, torch.compile = torch.compile, lambda *_, **__: lambda function: function
        for name in REAL:
            setattr(self, name.rpartition(".")[2], importlib.import_module(name))
        torch.compile = compiled
        # The branch in torch of `fused_topk_bias` is the one for ROCm without a kernel for the case.
        self.fused_topk_bias_router.rocm_aiter_ops.is_fused_moe_enabled = lambda: True
        self.fused_topk_bias_router._aiter_can_use_biased_grouped_topk = lambda *_: False
        self.kinds = self.scalar_type.scalar_types


def tensor(array):
    """A tensor with the bits of a numpy or ml_dtypes array."""
    array, name = np.ascontiguousarray(array), array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"):
        return torch.from_numpy(array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)).clone().view(getattr(torch, name))
    return torch.from_numpy(array).clone()


def kernels(v):
    """Kernels of `run_fuzz` by subject: operation, filter, outputs, kernel."""
    sixteen = "input_dtype=null"

    def scales(inputs, config):
        groups = len(inputs["scales"])
        group_size = config["size_k"] // groups if groups > 1 else -1
        return v.marlin_utils.marlin_permute_scales(tensor(inputs["scales"]), config["size_k"], config["size_n"], group_size)

    def zeros(inputs, config):
        zeros = tensor(inputs["qzeros"])
        return v.marlin_utils.awq_to_marlin_zero_points(zeros, len(zeros), config["size_n"], 4, False)

    def bias(inputs, config):
        return v.marlin_utils.marlin_permute_bias(tensor(inputs["bias"]))

    def qweight(inputs, config):
        bits = 8 if "8" in config["weight_type"].replace("b8", "") else 4
        words = inputs["qweight"].view(np.uint32)
        fields = [words >> np.uint32(bits * i) & np.uint32((1 << bits) - 1) for i in range(32 // bits)]
        codes = np.stack(fields, axis=1).reshape(config["size_k"], config["size_n"]).astype(np.int32)
        perm = v.marlin_utils_test.get_weight_perm(bits)
        return v.marlin_utils_test.marlin_weights(torch.from_numpy(codes), config["size_k"], config["size_n"], bits, perm)

    def router(inputs, config, biased):
        if config.get("model_type") or config.get("routing") or "expert_scale" in inputs:
            raise marlinspike.Unsupported("a model's own routing")
        groups = config.get("num_expert_group") if config.get("use_grouped_topk") else None
        # The operation is that of vLLM's kernels, which differ from torch for 16-bit logits: with groups in what they
        # round, without groups they compute in f32.
        logits = tensor(inputs["router_logits"])
        if groups and logits.dtype != torch.float32:
            raise marlinspike.Unsupported("groups with 16-bit logits")
        logits = logits.float()
        correction = tensor(inputs["e_score_correction_bias"]) if "e_score_correction_bias" in inputs else None
        hidden, factor = torch.empty(len(logits), 1), config.get("routed_scaling_factor") or 1.0
        scores = logits.softmax(dim=-1) if config["scoring_func"] == "softmax" else logits.sigmoid()
        chosen = (scores if correction is None else scores + correction).sort(dim=-1, descending=True).values
        # With groups, an expert of any rank may be among the chosen ones.
        chosen = chosen if groups else chosen[:, : config["top_k"] + 1]
        if (chosen[:, 1:] == chosen[:, :-1]).any():
            raise marlinspike.Unsupported("ties: torch.topk does not say which expert it takes")
        if correction is not None and groups and logits.shape[1] // groups < 2:
            raise marlinspike.Unsupported("groups of one expert with a bias")
        scoring, top_k, renormalize = config["scoring_func"], config["top_k"], config.get("renormalize", False)
        if biased:
            if groups is not None:
                raise marlinspike.Unsupported("expert groups")
            weights, ids = v.fused_topk_bias_router.fused_topk_bias(
                hidden, logits, scoring, correction, top_k, renormalize, routed_scaling_factor=factor)
        else:
            weights, ids = v.grouped_topk_router.grouped_topk(
                hidden, logits, top_k, renormalize, groups or 1, config.get("topk_group") or 1, scoring, factor, correction)
        return {"topk_weights": weights.float(), "topk_ids": ids.int()}

    def swizzle(inputs, config):
        if config["scale_type"] != "float8_e4m3fn" or config["sf_layout"] != "128x4":
            raise marlinspike.Unsupported("e4m3 scales in tiles of 128x4")
        scale = tensor(inputs["scale"])
        with unittest.mock.patch.object(torch.Tensor, "cuda", lambda self: self):
            return {"swizzled_scale": v.nvfp4_utils.swizzle_blockscale(scale)}

    gptq = f"checkpoint_format=gptq,{sixteen},desc_act=false"
    return {
        "permute": [
            ("linear", gptq, "marlin_scales", scales),
            ("linear", f"checkpoint_format=awq,{sixteen}", "marlin_zeros", zeros),
            ("linear", f"{gptq},has_bias=true", "marlin_bias", bias),
            ("linear", gptq, "marlin_qweight", qweight),
        ],
        "routers": [
            ("router", "", None, lambda inputs, config: router(inputs, config, False)),
            ("router", "use_grouped_topk=false", None, lambda inputs, config: router(inputs, config, True)),
        ],
        "swizzle": [("swizzle_blockscale", "", None, swizzle)],
    }


class Tally:
    def __init__(self, what):
        self.what, self.judged, self.wrong, self.first = what, 0, 0, None

    def add(self, right, describe):
        self.judged += 1
        if not right:
            self.wrong += 1
            self.first = self.first or describe()

    def __str__(self):
        return f"{self.what}: {self.judged} judged, {self.wrong} wrong" + (f"; first: {self.first}" if self.wrong else "")


def quantize(v, cases, random):
    """Every weight must be within half a step of its value, where the group's range has a step."""
    tallies = {}
    for _ in range(cases):
        name, zero_points = random.choice(["uint4b8", "uint8b128", "uint4", "uint8"]), False
        kind = getattr(v.kinds, name)
        zero_points = name in ("uint4", "uint8")
        group, groups, size_n = int(random.choice([32, 64])), int(random.integers(1, 4)), 8
        shift = float(random.choice([0.0, 0.0, 0.5, 2.0]))
        w = torch.from_numpy(random.standard_normal((group * groups, size_n)) + shift).float()
        if random.integers(0, 8) == 0:
            w[:group, 0] = 0
        what = f"quantize_weights {name}"
        _, codes, scales, zeros = v.quant_utils.quantize_weights(w, kind, group, zero_points)
        steps = scales.double().repeat_interleave(group, 0)
        base = zeros.double().repeat_interleave(group, 0) if zero_points else float(kind.bias)
        error = (steps * (codes.double() - base) - w.double()).abs()
        if not zero_points:
            # uint4b8 has one code more below zero than above it; the scale covers the larger need.
            bound = steps * 0.5 * (1 + 2.0**-10) + 1e-6
        else:
            # Codes and zero point are rounded: a step.
            bound = steps * (1 + 2.0**-10) + 1e-6
        worst = int((error - bound).argmax())
        own = w[worst // size_n // group * group :][:group, worst % size_n]
        tally = tallies.setdefault(what, Tally(what))
        tally.add(bool((error <= bound).all()), lambda: f"w = {w.flatten()[worst]}, its group from "
                  f"{own.min()} to {own.max()}: an error of {error.flatten()[worst]}")
    return list(tallies.values())


def pack(v, cases, random):
    q, tallies = v.quant_utils, [Tally(name) for name in ("gptq_pack", "pack_cols", "awq_pack", "unpack_cols")]
    for _ in range(cases):
        bits = int(random.choice([4, 8]))
        per, k, n = 32 // bits, 8 * int(random.integers(1, 9)), 8 * int(random.integers(1, 9))
        codes = random.integers(0, 1 << bits, (k, n))
        given, wide = torch.from_numpy(codes.astype(np.int32)), codes.astype(object)
        rows = sum(wide[i::per] << bits * i for i in range(per))
        columns = sum(wide[:, i::per] << bits * i for i in range(per))
        order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
        awq = sum(wide.reshape(k, -1, per)[:, :, order[i]] << bits * i for i in range(per))
        same = lambda found, right: np.array_equal(found.numpy().view(np.uint32), right.astype(np.uint32))  # noqa: E731
        packed = q.pack_cols(given, bits, k, n)
        found = [same(q.gptq_pack(given, bits, k, n), rows), same(packed, columns), same(q.awq_pack(given, bits, k, n), awq)]
        found.append(bool((q.unpack_cols(packed, bits, k, n) == given).all()))
        for tally, right in zip(tallies, found):
            tally.add(right, lambda: f"{bits} bits, K = {k}, N = {n}")
    return tallies


def mxfp8(v, cases, random):
    elements, reach = Tally("_mxfp8_e4m3_quantize_torch elements"), Tally("_mxfp8_e4m3_quantize_torch scales")
    dequantized = Tally("dequant_mxfp8_to_bf16")
    for _ in range(cases):
        x = random.standard_normal((1, 32)) * 2.0 ** float(random.integers(-124, 120))
        x = x.astype(np.float32) * (random.integers(0, 10) != 0)
        codes, scales = v.mxfp8_utils._mxfp8_e4m3_quantize_torch(torch.from_numpy(x))
        values = np.asarray(marlinspike.decode(codes.view(torch.uint8).numpy(), "float8_e4m3fn"))
        scale = np.asarray(marlinspike.decode(scales.numpy(), "float8_e8m0fnu"))
        # The nearest code of each number, saturated; the scale is a power of two that reaches the largest one.
        right = np.asarray(marlinspike.encode(x / scale, "float8_e4m3fn", overflow="saturate")).view(np.uint8)
        largest = np.abs(x).max()
        fits = largest <= 464 * scale[0, 0] and (largest > 223 * scale[0, 0] or scales[0, 0] == 0)
        elements.add(np.array_equal(codes.view(torch.uint8).numpy(), right), lambda: f"x = {x.tolist()}, scale code {scales[0, 0]}")
        top = np.abs(values).max()
        reach.add(fits, lambda: f"largest value {largest!r}: scale code {scales[0, 0]}, so the largest code's value is {top}")
        code = int(random.integers(0, 256))
        made = v.mxfp8_utils.dequant_mxfp8_to_bf16(codes, torch.tensor([[code]], dtype=torch.uint8))
        step = np.asarray(marlinspike.decode(np.array([code], np.uint8), "float8_e8m0fnu"))
        expected = np.asarray(marlinspike.encode(values * step, "bfloat16")).view(np.uint16)
        found, nan = made.view(torch.uint16).numpy(), np.isnan(values * step)
        dequantized.add(np.array_equal(np.where(nan, made.isnan().numpy(), found), np.where(nan, 1, expected)),
                        lambda: f"scale code {code}: {made.flatten()[:2].tolist()} from {values.flatten()[:2].tolist()}")
    return [elements, reach, dequantized]


def encoded(values):
    """The nearest e4m3 numbers, saturated."""
    codes = np.asarray(marlinspike.encode(values, "float8_e4m3fn", overflow="saturate")).view(np.uint8)
    return np.asarray(marlinspike.decode(codes, "float8_e4m3fn"))


def nvfp4(v, cases, random):
    tallies = [Tally("ref_nvfp4_quant scales"), Tally("ref_nvfp4_quant elements"), Tally("dequantize_to_dtype")]
    e = v.nvfp4_emulation_utils
    for _ in range(cases):
        x = torch.from_numpy((random.standard_normal((2, 32)) * 2.0 ** float(random.integers(-20, 20))).astype(np.float32))
        top = float(x.abs().max()) or 1.0
        factor = torch.tensor(448 * 6 / top * float(random.choice([1.0, 1.0, 0.01, 4.0])), dtype=torch.float32)
        values, scales = e.ref_nvfp4_quant(x, factor, 16)
        exact = np.abs(x.double().numpy()).reshape(2, 2, 16).max(axis=2) / 6 * float(factor)
        # The f32 product may be a few units off: either code next to the exact scale.
        near = [encoded(exact * f) for f in (1 - 2.0**-21, 1 + 2.0**-21)]
        found = scales.double().numpy()
        tallies[0].add(((found == near[0]) | (found == near[1])).all(), lambda: f"{exact.tolist()}: {scales.tolist()}")
        step = scales.double().numpy()[..., None] / float(factor)
        grid = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
        with np.errstate(all="ignore"):
            target = np.minimum(np.abs(x.double().numpy()).reshape(2, 2, 16) / step, 6)
        error = np.abs(np.abs(values.double().numpy()).reshape(2, 2, 16) - target)
        best = np.abs(grid - target[..., None]).min(axis=-1)
        zero = step == 0
        tallies[1].add(((error <= best + 2.0**-20) | zero).all(), lambda: f"x = {x.flatten().tolist()}, factor {float(factor)}")
        codes, stored = random.integers(0, 256, (3, 16)).astype(np.uint8), random.integers(0, 127, (3, 2)).astype(np.uint8)
        scale = torch.tensor(float(2.0 ** random.integers(-8, 8)))
        made = e.dequantize_to_dtype(torch.from_numpy(codes), torch.from_numpy(stored), scale, torch.float32, 16, swizzle=False)
        signed = np.concatenate([grid, -grid])[np.stack([codes & 15, codes >> 4], axis=-1).reshape(3, 32)]
        right = signed * np.repeat(np.asarray(marlinspike.decode(stored, "float8_e4m3fn")), 16, axis=1) * float(scale)
        tallies[2].add(np.array_equal(made.double().numpy(), right), lambda: f"scale codes {stored.tolist()}")
    return tallies


def predicates(v, cases, random):
    """Infinities, NaN and IEEE 754's rules by the formats' definitions."""
    del cases, random
    tally = Tally("scalar_types")
    right = {
        "float8_e4m3fn": (False, True, False), "float8_e5m2": (True, True, True), "float16_e8m7": (True, True, True),
        "float16_e5m10": (True, True, True), "float6_e3m2f": (False, False, False), "float4_e2m1f": (False, False, False),
    }  # fmt: skip
    for name, expected in right.items():
        kind = getattr(v.kinds, name)
        found = (kind.has_infs(), kind.has_nans(), kind.is_ieee_754())
        tally.add(found == expected, lambda: f"{name}: has_infs, has_nans, is_ieee_754 are {found}, expected {expected}")
    return [tally]


COMPARISONS = {"quantize": quantize, "pack": pack, "mxfp8": mxfp8, "nvfp4": nvfp4, "types": predicates}


def run(v, subject, cases, seed=22, folder=None):
    """The lines of a report, and whether nothing was found."""
    if subject in COMPARISONS:
        tallies = COMPARISONS[subject](v, cases, np.random.default_rng(seed))
        return [str(tally) for tally in tallies], not any(tally.wrong for tally in tallies)
    lines, right = [], True
    for op, where, output, kernel in kernels(v)[subject]:
        outputs = [output] if output else ["topk_weights", "topk_ids"] if op == "router" else []
        summary = marlinspike.run_fuzz(kernel, op, where, cases=cases, seed=seed, outputs=outputs, folder=folder)
        lines.append(f"{subject} {output or ''}: {summary}")
        right = right and summary.ok
    return lines, right


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", help="vLLM's wheel")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--keep", help="folder for the smallest failing cases")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    v, all_right = Vllm(options.wheel), True
    for subject in options.subjects or ["permute", "routers", "swizzle", *COMPARISONS]:
        lines, right = run(v, subject, options.cases, folder=options.keep)
        print("\n".join(lines), flush=True)
        all_right = all_right and right
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
