#!/usr/bin/env python3
"""The MoE backend that vLLM 0.21.0 chooses and each kernel's refusal, over a lattice of deployments.

    VLLM_DIR=... moe_selection.py reference/tests/data/moe_selection.json

VLLM_DIR holds vLLM's Python files (`model_executor/` and the rest). The oracles (`oracle/fp8.py`,
`nvfp4.py`, `mxfp8.py`, `int_wna16.py`), the experts' classes, `modular_kernel.py`,
`platforms/cuda.py`, `envs.py` and `utils/deep_gemm.py` run unchanged; the rest of the package is
an inert stand-in. The platform is upstream's class with its capability query overridden. Four
constants replace queries for compiled or installed code: `cutlass_group_gemm_supported` (true from 9.0 in
vLLM's wheel; recorded on an H200), and whether FlashInfer's three kernel
families and DeepGEMM can be imported. Requires torch 2.11.0 (CPU).

The lattice is a list of sections, each the product of a few axes around one base deployment. An
answer is an index into `outcomes`: the chosen backend and class, or the error's kind, and one
letter for each class of the method, in order: its first reason to refuse, `.` for none.
"""

import importlib
import itertools
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import torch

import stand_ins

if len(sys.argv) != 2 or "VLLM_DIR" not in os.environ:
    sys.exit(__doc__)
VLLM = Path(os.environ["VLLM_DIR"])
MOE = "vllm.model_executor.layers.fused_moe"
QUANT = "vllm.model_executor.layers.quantization.utils"
EXPERTS = ["trtllm_fp8_moe", "flashinfer_cutlass_moe", "deep_gemm_moe", "batched_deep_gemm_moe", "cutlass_moe",
           "triton_moe", "marlin_moe", "trtllm_nvfp4_moe", "flashinfer_cutedsl_moe",
           "flashinfer_cutedsl_batched_moe", "nvfp4_emulation_moe", "rocm_aiter_moe", "xpu_moe", "cpu_moe"]
REAL = {
    "vllm.scalar_type", "vllm.envs", "vllm.platforms.interface", "vllm.platforms.cuda", "vllm.platforms.cpu",
    "vllm.platforms.xpu", "vllm.utils.deep_gemm",
    f"{QUANT}.quant_utils", f"{QUANT}.w8a8_utils",
    *(f"{MOE}.{m}" for m in ("activation", "config", "modular_kernel", "fallback", "triton_cutlass_moe",
                             "triton_deep_gemm_moe", "fused_batched_moe", "lora_experts_mixin")),
    *(f"{MOE}.oracle.{m}" for m in ("fp8", "nvfp4", "mxfp8", "int_wna16")),
    *(f"{MOE}.experts.{m}" for m in EXPERTS),
}


for key in list(os.environ):
    if key.startswith("VLLM_") and key != "VLLM_DIR":
        del os.environ[key]
stand_ins.install({"vllm", "flashinfer", "vllm_xpu_kernels"}, REAL,
                  lambda path: VLLM.joinpath(*path.split("/")[1:]).read_text())
platforms = stand_ins.Stub("vllm.platforms")
platforms.current_platform = MagicMock()
platforms.current_platform.fp8_dtype = lambda: torch.float8_e4m3fn
platforms.current_platform.is_cuda = lambda: False
sys.modules["vllm.platforms"] = platforms
# NVIDIA's management library reports no GPU.
importlib.import_module("vllm.utils.import_utils").import_pynvml = lambda: MagicMock(nvmlDeviceGetCount=lambda: 0)
interface = importlib.import_module("vllm.platforms.interface")
cuda, cpu, xpu = (importlib.import_module(f"vllm.platforms.{m}") for m in ("cuda", "cpu", "xpu"))


class Cuda(cuda.CudaPlatformBase):
    device_name = "a GPU"
    capability = None

    @classmethod
    def get_device_capability(cls, device_id=0):
        return cls.capability


Cuda.capability = interface.DeviceCapability(9, 0)


class Current:
    """Replaces `current_platform` in modules; forwards to the current platform."""

    now = Cuda()

    def __getattr__(self, name):
        return getattr(Current.now, name)


platforms.current_platform = Current()
config = importlib.import_module(f"{MOE}.config")
activation = importlib.import_module(f"{MOE}.activation")
quant = importlib.import_module(f"{QUANT}.quant_utils")
mk = importlib.import_module(f"{MOE}.modular_kernel")
oracle = {m: importlib.import_module(f"{MOE}.oracle.{m}") for m in ("fp8", "nvfp4", "mxfp8", "int_wna16")}
experts = {m: importlib.import_module(f"{MOE}.experts.{m}") for m in EXPERTS}
deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
envs = importlib.import_module("vllm.envs")

PACKAGES = {"flashinfer": True, "deep_gemm": True}
for module, name in [("trtllm_fp8_moe", "has_flashinfer_trtllm_fused_moe"),
                     ("trtllm_nvfp4_moe", "has_flashinfer_trtllm_fused_moe"),
                     ("flashinfer_cutlass_moe", "has_flashinfer_cutlass_fused_moe"),
                     ("flashinfer_cutedsl_moe", "has_flashinfer_cutedsl_moe_nvfp4"),
                     ("flashinfer_cutedsl_batched_moe", "has_flashinfer_cutedsl_grouped_gemm_nt_masked")]:
    assert hasattr(experts[module], name), name
    setattr(experts[module], name, lambda: PACKAGES["flashinfer"])
deep_gemm.has_deep_gemm = lambda: PACKAGES["deep_gemm"]
# A ROCm-only class; this lattice has no ROCm device.
experts["rocm_aiter_moe"].rocm_aiter_ops = types.SimpleNamespace(is_fused_moe_enabled=lambda: False)
w8a8 = importlib.import_module(f"{QUANT}.w8a8_utils")
# `_custom_ops` limits the operator's answer to capabilities below 11.0.
w8a8.ops = types.SimpleNamespace(cutlass_group_gemm_supported=lambda c: 90 <= c < 110)
source = VLLM.joinpath("_custom_ops.py").read_text()
assert "if cuda_device_capability < 90 or cuda_device_capability >= 110:\n        return False" in source
# The module imports FlashInfer's enumeration and query, both plain Python.
flashinfer_utils = VLLM.joinpath("model_executor/layers/quantization/utils/flashinfer_utils.py").read_text()
scope = {"envs": envs, "current_platform": platforms.current_platform, "logger": MagicMock(), "Enum": __import__("enum").Enum}
for start, stop in [("class FlashinferMoeBackend", "\n\n\n"), ("def get_flashinfer_moe_backend", "\n\n\n")]:
    begin = flashinfer_utils.index(start)
    exec(flashinfer_utils[begin : flashinfer_utils.index(stop, begin)], scope)
for m in ("fp8", "nvfp4"):
    oracle[m].FlashinferMoeBackend = scope["FlashinferMoeBackend"]
    oracle[m].get_flashinfer_moe_backend = scope["get_flashinfer_moe_backend"]
# Built on import, from the names above.
oracle["nvfp4"].fi_2_vllm_backend_map = {
    scope["FlashinferMoeBackend"].CUTLASS: oracle["nvfp4"].NvFp4MoeBackend.FLASHINFER_CUTLASS,
    scope["FlashinferMoeBackend"].TENSORRT_LLM: oracle["nvfp4"].NvFp4MoeBackend.FLASHINFER_TRTLLM,
    scope["FlashinferMoeBackend"].CUTEDSL: oracle["nvfp4"].NvFp4MoeBackend.FLASHINFER_CUTEDSL,
}

Q = quant
other_block = Q.create_fp8_quant_key(True, Q.GroupShape(64, 128))
SCHEMES = {
    "fp8": {
        "block128 x dynamic128": (Q.kFp8Static128BlockSym, Q.kFp8Dynamic128Sym),
        "other_block x dynamic128": (other_block, Q.kFp8Dynamic128Sym),
        "channel x dynamic_token": (Q.kFp8StaticChannelSym, Q.kFp8DynamicTokenSym),
        "tensor x static_tensor": (Q.kFp8StaticTensorSym, Q.kFp8StaticTensorSym),
        "tensor x dynamic_tensor": (Q.kFp8StaticTensorSym, Q.kFp8DynamicTensorSym),
        "tensor x dynamic_token": (Q.kFp8StaticTensorSym, Q.kFp8DynamicTokenSym),
        "tensor x dynamic128": (Q.kFp8StaticTensorSym, Q.kFp8Dynamic128Sym),
    },
    "nvfp4": {"nvfp4 x nvfp4": (Q.kNvfp4Static, Q.kNvfp4Dynamic), "nvfp4 x none": (Q.kNvfp4Static, None)},
    "mxfp8": {"mxfp8 x mxfp8": (Q.kMxfp8Static, Q.kMxfp8Dynamic)},
    "int_wna16": {"int4 x none": (Q.kInt4Static, None), "int8 x none": (Q.kInt8Static, None)},
}
METHODS = [(m, s) for m, schemes in SCHEMES.items() for s in schemes]
DEVICES = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1", "cpu", "xpu"]
GENERATIONS = ["7.5", "8.0", "8.9", "9.0", "10.0", "12.0"]
ALL2ALL = ["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "flashinfer_all2allv",
           "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided", "mori", "nixl_ep"]
PARALLEL = ["one", "tp2", "ep2", "ep2 eplb"] + [f"dp2 ep2 {a}" for a in ALL2ALL] + ["dp2 ep2 eplb allgather_reducescatter", "dp2 deepep_low_latency"]
RUNNERS = ["triton", "deep_gemm", "cutlass", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl",
           "marlin", "aiter", "emulation"]
SWITCHES = ["VLLM_USE_FLASHINFER_MOE_FP8=0", "VLLM_USE_FLASHINFER_MOE_FP8=1", "VLLM_USE_FLASHINFER_MOE_FP4=0",
            "VLLM_USE_FLASHINFER_MOE_FP4=1",
            *(f"VLLM_USE_FLASHINFER_MOE_FP8=1 VLLM_USE_FLASHINFER_MOE_FP4=1 VLLM_FLASHINFER_MOE_BACKEND={b}"
              for b in ("throughput", "latency", "masked_gemm")),
            "VLLM_FLASHINFER_MOE_BACKEND=latency",
            "VLLM_USE_DEEP_GEMM=0", "VLLM_USE_DEEP_GEMM=1", "VLLM_MOE_USE_DEEP_GEMM=0", "VLLM_MOE_USE_DEEP_GEMM=1",
            "VLLM_USE_DEEP_GEMM=1 VLLM_MOE_USE_DEEP_GEMM=0", "VLLM_TEST_FORCE_FP8_MARLIN=1",
            "VLLM_USE_FLASHINFER_MOE_FP8=0 VLLM_USE_DEEP_GEMM=0", "VLLM_BATCH_INVARIANT=1"]
BASE = {"method": None, "device": "9.0", "parallel": "one", "activation": "silu", "routing": "Renormalize",
        "runner": "auto", "switches": "", "lora": 0, "allow_vllm_cutlass": 0, "packages": "flashinfer deep_gemm"}
METHOD_AXIS = [f"{m}: {s}" for m, s in METHODS]
SECTIONS = [
    {"method": METHOD_AXIS, "device": DEVICES, "allow_vllm_cutlass": [0, 1]},
    {"method": METHOD_AXIS, "device": GENERATIONS, "parallel": PARALLEL, "allow_vllm_cutlass": [0, 1]},
    {"method": METHOD_AXIS, "device": GENERATIONS, "activation": [a.value for a in activation.MoEActivation]},
    {"method": METHOD_AXIS, "device": ["10.0"], "routing": [r.name for r in config.RoutingMethodType],
     "parallel": ["one", "ep2 eplb"]},
    {"method": METHOD_AXIS, "device": GENERATIONS, "runner": RUNNERS, "parallel": ["one", "dp2 ep2 deepep_low_latency"],
     "allow_vllm_cutlass": [0, 1]},
    {"method": METHOD_AXIS, "device": GENERATIONS, "switches": SWITCHES, "parallel": ["one", "dp2 ep2 deepep_low_latency"]},
    {"method": METHOD_AXIS, "device": GENERATIONS, "lora": [0, 1], "packages": ["", "flashinfer", "deep_gemm"]},
]


def classes(method):
    """The classes of a method, in the order of its backends."""
    if method == "mxfp8":
        backends, lookup = oracle["mxfp8"]._SUPPORTED_BACKENDS, oracle["mxfp8"].backend_to_kernel_cls
    elif method == "fp8":
        backends, lookup = [b for b in oracle["fp8"].Fp8MoeBackend if b.value != "NONE"], oracle["fp8"].backend_to_kernel_cls
    else:
        enum = {"nvfp4": "NvFp4MoeBackend", "int_wna16": "WNA16MoEBackend"}[method]
        backends, lookup = list(getattr(oracle[method], enum)), oracle[method].backend_to_kernel_cls
    return [(b.value, c) for b in backends for c in lookup(b)]


CLASSES = {m: classes(m) for m in SCHEMES}
LETTERS = [("current device", "D"), ("no act_and_mul", "U"), (" activation format", "F"), (" activation", "A"),
           ("quantization scheme", "Q"), ("parallel config", "P"), ("routing method", "R"), ("router logits", "L"),
           ("hidden dim", "H"), ("batch invariance", "B"), ("LoRA", "O")]


def letter(supported, reason):
    return "." if supported else next(code for text, code in LETTERS if text in reason)


def parallel(text):
    words = text.split()
    dp = 2 if "dp2" in words else 1
    use_ep = "ep2" in words
    backend = next((w for w in words if w in ALL2ALL), "allgather_reducescatter")
    size = 2 if "tp2" in words or use_ep else 1
    return config.FusedMoEParallelConfig(
        tp_size=1 if use_ep else size, pcp_size=1, dp_size=dp, ep_size=2 if use_ep else 1, tp_rank=0, pcp_rank=0,
        dp_rank=0, ep_rank=0, sp_size=1, use_ep=use_ep, all2all_backend=backend, enable_eplb="eplb" in words)


def ask(point):
    method, scheme = point["method"].split(": ")
    weight, act = SCHEMES[method][scheme]
    if point["device"] in ("cpu", "xpu"):
        Current.now = {"cpu": cpu.CpuPlatform, "xpu": xpu.XPUPlatform}[point["device"]]()
    else:
        Cuda.capability = interface.DeviceCapability(*map(int, point["device"].split(".")))
        Current.now = Cuda()
    for name in PACKAGES:
        PACKAGES[name] = name in point["packages"].split()
    switches = dict(s.split("=") for s in point["switches"].split())
    os.environ.update(switches)
    deep_gemm.is_deep_gemm_supported.cache_clear()
    kind = activation.MoEActivation(point["activation"])
    moe = config.FusedMoEConfig(
        num_experts=8, experts_per_token=2, hidden_dim=4096, intermediate_size_per_partition=1024, num_local_experts=8,
        num_logical_experts=8, activation=kind, device="cpu", routing_method=config.RoutingMethodType[point["routing"]],
        moe_parallel_config=parallel(point["parallel"]), in_dtype=torch.bfloat16, moe_backend=point["runner"],
        max_num_tokens=256, is_act_and_mul=kind.is_gated, is_lora_enabled=bool(point["lora"]))
    batched = moe.moe_parallel_config.use_batched_activation_format
    layout = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
    letters = "".join(letter(*c.is_supported_config(c, moe, weight, act, layout)) for _, c in CLASSES[method])
    try:
        if method == "fp8":
            got = oracle["fp8"].select_fp8_moe_backend(moe, weight, act, allow_vllm_cutlass=bool(point["allow_vllm_cutlass"]))
        elif method == "nvfp4":
            got = oracle["nvfp4"].select_nvfp4_moe_backend(moe, weight, act)
        elif method == "mxfp8":
            got = oracle["mxfp8"].select_mxfp8_moe_backend(moe)
        else:
            got = oracle["int_wna16"].select_wna16_moe_backend(moe, weight, 4 if scheme.startswith("int4") else 8)
        chosen = "none" if got[1] is None else f"{got[0].value}/{got[1].__name__}"
    except (ValueError, NotImplementedError) as error:
        text = str(error)
        chosen = next((code for part, code in [
            ("is not supported for", "!runner"), ("is disabled for", "!cutlass"), ("does not support the", "!refused"),
            ("No supported MXFP8", "!refused"), ("but no ", "!flashinfer"), ("does not support FP8 MoE", "!flashinfer_backend"),
            ("backend supports the deployment", "!none"), ("No MXFP8 MoE backends", "!none"),
        ] if part in text), None) or sys.exit(f"unknown error {text!r}")
    for name in switches:
        del os.environ[name]
    return f"{chosen} {letters}"


outcomes, sections = {}, []
for section in SECTIONS:
    answers = []
    for values in itertools.product(*section.values()):
        point = {**BASE, **dict(zip(section, values))}
        # Switches, lists and runners that the method ignores would only repeat results.
        answers.append(outcomes.setdefault(ask(point), len(outcomes)))
    sections.append({"order": list(section), "axes": section, "answers": answers})
result = {
    "producer": "scripts/gen/moe_selection.py, vLLM 0.21.0",
    "base": BASE,
    "classes": {m: [f"{b}/{c.__name__}" for b, c in rows] for m, rows in CLASSES.items()},
    "outcomes": list(outcomes),
    "sections": sections,
}
Path(sys.argv[1]).write_text(json.dumps(result, separators=(",", ":")) + "\n")
print(len(outcomes), "outcomes of", sum(len(s["answers"]) for s in sections), "deployments")
