#!/usr/bin/env python3
"""What two releases of vLLM decide for the same layers: kernels of experts and of linear layers, Marlin's shapes, act-order.

    upstream_drift.py OLD_DIR NEW_DIR reference/tests/data/upstream_drift.json

OLD_DIR and NEW_DIR hold the Python files of vLLM 0.21.0 and 0.33.0 (the folder `vllm` of each wheel). Each release runs in a
process of its own: `upstream_drift.py --release DIR`. The oracles, the experts' classes, the linear kernels, `marlin_utils.py`,
`gptq_utils.py` and the platform classes run unchanged; the rest of the package is an inert stand-in. Constants replace queries
for compiled or installed code, as in `moe_selection.py`; every package is installed (FlashInfer, DeepGEMM, Humming, Triton's
kernels), except Conch, QuTLASS and B12X. Requires torch 2.11.0 (CPU is enough).

An answer of `moe` and `linear` is an index into `kernels`.
"""

import ast
import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

DEVICES = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
PARALLEL = ["one", "tp2", "ep2"]
MOE = "vllm.model_executor.layers.fused_moe"
QUANT = "vllm.model_executor.layers.quantization.utils"
LINEAR = "vllm.model_executor.kernels.linear"
SHAPES_N = [64, 96, 128, 192, 1408, 2880]
SHAPES_K = [64, 96, 128, 192, 320, 704, 1408, 2880]
GROUPS = [-1, 32, 64, 128]
# Whole and this rank's K and N.
LAYERS = [((4096, 4096), (4096, 4096)), ((4096, 4096), (2048, 4096)), ((4096, 2880), (4096, 2880)), ((1408, 4096), (704, 4096)),
          ((2880, 4096), (2880, 4096)), ((4096, 96), (4096, 96))]


def child(root):
    import torch

    import stand_ins

    root = Path(root).resolve()
    os.chdir(root.parent)  # Triton reads the sources of its functions by their paths.
    new = (root / "model_executor/layers/quantization/auto_gptq.py").exists()
    names = [p.stem for p in (root / "model_executor/layers/fused_moe/experts").glob("*.py") if p.stem != "__init__"]
    skip = {"trtllm_bf16_moe", "moonep_experts", "flashinfer_moe_ep"}
    experts = [n for n in names if n not in skip]
    mixed = [p.stem for p in (root / "model_executor/kernels/linear/mixed_precision").glob("*.py")]
    real = {
        "vllm.scalar_type", "vllm.envs", "vllm.platforms.interface", "vllm.platforms.cuda", "vllm.utils.deep_gemm",
        "vllm.utils.math_utils", f"{QUANT}.quant_utils", f"{QUANT}.w8a8_utils", f"{QUANT}.marlin_utils", f"{QUANT}.humming.priority",
        f"{QUANT}.gptq_utils", f"{QUANT}.machete_utils", f"{QUANT}.allspark_utils", "vllm.distributed.utils",
        *(f"{MOE}.{m}" for m in ("activation", "config", "modular_kernel", "fallback", "triton_cutlass_moe", "triton_deep_gemm_moe",
                                 "fused_batched_moe", "lora_experts_mixin", "hpc_moe", "fused_humming_moe")),
        *(f"{MOE}.oracle.{p.stem}" for p in (root / "model_executor/layers/fused_moe/oracle").glob("*.py") if p.stem != "unquantized"),
        *(f"{MOE}.experts.{m}" for m in experts),
        *(f"{LINEAR}.mixed_precision.{m}" for m in mixed if m not in ("rdna3_w4a16", "rdna_hybrid_w4a16", "xpu", "zentorch", "cpu", "dynamic_4bit")),
    } - {f"{MOE}.oracle.__init__"}
    read = lambda path: root.joinpath(*path.split("/")[1:]).read_text()  # noqa: E731
    for key in list(os.environ):
        if key.startswith("VLLM_"):
            del os.environ[key]
    stand_ins.install({"vllm", "flashinfer", "vllm_xpu_kernels", "compressed_tensors", "deep_gemm", "humming", "triton_kernels"}, real, read)
    # Names that classes derive from or that `isinstance` reads have to be types.
    args = importlib.import_module("compressed_tensors.quantization")
    args.QuantizationArgs = type("QuantizationArgs", (), {})
    args.QuantizationStrategy = types.SimpleNamespace(GROUP="group", CHANNEL="channel")
    for name, cls in [("auto_gptq", "AutoGPTQConfig"), ("auto_awq", "AutoAWQConfig"), ("moe_wna16", "MoeWNA16Config")]:
        setattr(importlib.import_module(f"vllm.model_executor.layers.quantization.{name}"), cls, type(cls, (), {}))
    for module in ("vllm.config", "vllm.config.vllm"):
        importlib.import_module(module).get_current_vllm_config_or_none = lambda: None
    importlib.import_module("vllm.config.quantization").QuantizationConfigArgs = type("QuantizationConfigArgs", (), {})
    # ROCm's kernels: nothing is enabled.
    none = type("Nothing", (), {"__getattr__": lambda self, name: lambda *args, **keys: False})()
    importlib.import_module("vllm._aiter_ops").rocm_aiter_ops = none
    platforms = stand_ins.Stub("vllm.platforms")
    platforms.current_platform = MagicMock()
    platforms.current_platform.fp8_dtype = lambda: torch.float8_e4m3fn
    for kind in ("is_cuda", "is_rocm", "is_xpu", "is_cpu"):
        setattr(platforms.current_platform, kind, lambda: False)
    sys.modules["vllm.platforms"] = platforms
    importlib.import_module("vllm.utils.import_utils").import_pynvml = lambda: MagicMock(nvmlDeviceGetCount=lambda: 0)
    interface = importlib.import_module("vllm.platforms.interface")
    cuda = importlib.import_module("vllm.platforms.cuda")

    class Cuda(cuda.CudaPlatformBase):
        device_name = "a GPU"
        capability = interface.DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id=0):
            return cls.capability

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 132

    platforms.current_platform = Cuda()
    utils = importlib.import_module("vllm.utils.import_utils")
    present = {"has_humming": True, "has_deep_gemm": True, "has_triton_kernels": True, "has_flashinfer": True}
    for name, value in present.items():
        setattr(utils, name, lambda value=value: value)
    utils.get_triton_kernels_version = lambda: "3.7"
    # Names of Humming's enumeration.
    gemm_types = {n.upper(): types.SimpleNamespace(value=n) for n in ("dense", "indexed", "grouped_contiguous", "grouped_masked")}
    importlib.import_module("vllm.utils.humming").GemmType = types.SimpleNamespace(**gemm_types)
    fi = importlib.import_module("vllm.utils.flashinfer")
    for name in ("has_flashinfer", "has_flashinfer_trtllm_fused_moe", "has_flashinfer_cutlass_fused_moe", "has_flashinfer_cutedsl_moe_nvfp4",
                 "has_flashinfer_cutedsl_grouped_gemm_nt_masked", "has_flashinfer_cubin", "has_flashinfer_comm"):
        setattr(fi, name, lambda: True)
    for name in ("has_flashinfer_b12x_moe", "has_b12x"):
        setattr(fi, name, lambda: False)
    config, activation, quant, mk, marlin = (importlib.import_module(m) for m in (
        f"{MOE}.config", f"{MOE}.activation", f"{QUANT}.quant_utils", f"{MOE}.modular_kernel", f"{QUANT}.marlin_utils"))
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    deep_gemm.has_deep_gemm = lambda: True
    w8a8 = importlib.import_module(f"{QUANT}.w8a8_utils")
    assert "if cuda_device_capability < 90 or cuda_device_capability >= 110:\n        return False" in (root / "_custom_ops.py").read_text()
    w8a8.ops = types.SimpleNamespace(cutlass_group_gemm_supported=lambda c: 90 <= c < 110)
    if new:
        priority = importlib.import_module(f"{QUANT}.humming.priority")
        package = importlib.import_module(f"{QUANT}.humming")
        package.prioritize_humming, package.prefers_humming = priority.prioritize_humming, priority.prefers_humming
    oracle = {p.stem: importlib.import_module(f"{MOE}.oracle.{p.stem}")
              for p in (root / "model_executor/layers/fused_moe/oracle").glob("*.py") if p.stem not in ("unquantized", "__init__", "base", "int8")}

    q = quant
    scalar = importlib.import_module("vllm.scalar_type").scalar_types
    schemes = {
        "fp8": {
            "block128 x dynamic128": (q.kFp8Static128BlockSym, q.kFp8Dynamic128Sym),
            "channel x dynamic_token": (q.kFp8StaticChannelSym, q.kFp8DynamicTokenSym),
            "tensor x static_tensor": (q.kFp8StaticTensorSym, q.kFp8StaticTensorSym),
            "tensor x dynamic_tensor": (q.kFp8StaticTensorSym, q.kFp8DynamicTensorSym),
            "tensor x dynamic128": (q.kFp8StaticTensorSym, q.kFp8Dynamic128Sym),
        },
        "nvfp4": {"nvfp4 x nvfp4": (q.kNvfp4Static, q.kNvfp4Dynamic), "nvfp4 x none": (q.kNvfp4Static, None)},
        "mxfp8": {"mxfp8 x mxfp8": (q.kMxfp8Static, q.kMxfp8Dynamic)},
        "int_wna16": {name: (None, None) for name in ("gptq 4", "gptq 8", "awq 4", "ct 4 group 32", "ct 4 group 128", "ct 4 zeros", "ct 8")},
        "mxfp4": {"mxfp4 x none": (None, None)},
        "w4a8": {"int4 x dynamic_token": (q.kInt4Static, q.kFp8DynamicTokenSym)},
    }
    kernels = {}

    def integers(scheme, moe):
        """What the methods of the three containers ask (`auto_gptq.py`, `auto_awq.py`, `compressed_tensors_moe_wna16.py`)."""
        oracle_ = oracle["int_wna16"]
        bits = 8 if "8" in scheme.split()[1] else 4
        if not new:
            if not scheme.startswith("gptq"):
                return None
            return oracle_.select_wna16_moe_backend(moe, q.kInt4Static if bits == 4 else q.kInt8Static, bits)
        methods = "vllm.model_executor.layers.quantization"
        zeros, scale = scheme in ("awq 4", "ct 4 zeros"), q.kInt4StaticGroupScale if bits == 4 else q.kInt8StaticGroupScale
        ty = scalar.uint4 if zeros else scalar.uint4b8 if bits == 4 else scalar.uint8b128
        if scheme.startswith("ct"):
            quant_config = args.QuantizationArgs()
            quant_config.group_size = 32 if scheme.endswith("32") else 128
            quant_config.actorder, quant_config.strategy = None, "group"
            scale = q.kInt4Static32GroupScale if scheme.endswith("32") else scale
            key, bias = q.QuantKey(ty, scale, symmetric=not zeros), False
        elif scheme.startswith("awq"):
            quant_config = sys.modules[f"{methods}.auto_awq"].AutoAWQConfig()
            quant_config.group_size, key, bias = 128, q.kInt4Static, True
        else:
            quant_config = sys.modules[f"{methods}.auto_gptq"].AutoGPTQConfig()
            quant_config.group_size, quant_config.desc_act = 128, False
            key, bias = q.QuantKey(ty, scale), True
        return oracle_.select_wna16_moe_backend(moe, key, quant_config, zeros, bias, allow_tile_padding=True)

    def select(method, scheme, device, parallel, cutlass):
        weight, act = schemes[method][scheme]
        Cuda.capability = interface.DeviceCapability(*map(int, device.split(".")))
        for cached in (deep_gemm.is_deep_gemm_supported, getattr(deep_gemm, "is_deep_gemm_e8m0_used", None)):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        ep, size = parallel == "ep2", 1 if parallel == "one" else 2
        layout = config.FusedMoEParallelConfig(
            tp_size=1 if ep else size, pcp_size=1, dp_size=1, ep_size=size if ep else 1, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0,
            sp_size=1, use_ep=ep, all2all_backend="allgather_reducescatter", enable_eplb=False)
        kind = activation.MoEActivation("swigluoai" if method == "mxfp4" else "silu")
        inner = {"intermediate_size": 2048 if size == 2 and not ep else 1024} if new else {"intermediate_size_per_partition": 1024}
        moe = config.FusedMoEConfig(
            num_experts=8, experts_per_token=2, hidden_dim=4096, num_local_experts=8, num_logical_experts=8, activation=kind, device="cpu",
            routing_method=config.RoutingMethodType.Renormalize, moe_parallel_config=layout, in_dtype=torch.bfloat16, moe_backend="auto",
            max_num_tokens=256, is_lora_enabled=False, **inner, **({} if new else {"is_act_and_mul": True}))
        try:
            if method == "fp8":
                got = oracle["fp8"].select_fp8_moe_backend(moe, weight, act, allow_vllm_cutlass=cutlass)
            elif method == "nvfp4":
                got = oracle["nvfp4"].select_nvfp4_moe_backend(moe, weight, act)
            elif method == "mxfp8":
                got = oracle["mxfp8"].select_mxfp8_moe_backend(moe)
            elif method == "mxfp4":
                got = oracle["mxfp4"].select_mxfp4_moe_backend(moe)
            elif method == "w4a8":
                if "w4a8" not in oracle:
                    return "no oracle"
                got = oracle["w4a8"].select_w4a8_moe_backend(moe, weight, act)
            else:
                got = integers(scheme, moe)
        except (ValueError, NotImplementedError) as error:
            expected = ("backend supports the deployment", "No MXFP8 MoE backends", "does not support the deployment")
            assert any(part in str(error) for part in expected), error
            return "none"
        if got is None:
            return "no oracle"
        return "none" if got[1] is None else f"{got[0].value}/{got[1].__name__}"

    def index(name):
        return kernels.setdefault(name, len(kernels))

    moe_axis = [f"{m}: {s}" for m, rows in schemes.items() for s in rows]
    moe = [index(select(*m.split(": "), d, p, c)) for m, d, p, c in itertools.product(moe_axis, DEVICES, PARALLEL, (False, True))]

    # Linear layers of integers.
    types_ = {"uint4b8": False, "uint8b128": False, "uint4": True}
    table = ast.parse((root / "model_executor/kernels/linear/__init__.py").read_text())
    order = next(n.value for n in ast.walk(table) if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "_POSSIBLE_KERNELS")
    order = next([e.id for e in v.elts] for k, v in zip(order.keys, order.values) if k.attr == "CUDA")
    modules = [importlib.import_module(f"{LINEAR}.mixed_precision.{m}") for m in mixed if f"{LINEAR}.mixed_precision.{m}" in real and m != "__init__"]
    classes = [next(getattr(m, n) for m in modules if isinstance(getattr(m, n, None), type)) for n in order]
    base = importlib.import_module(f"{LINEAR}.mixed_precision.MPLinearKernel")

    def linear(ty, group, device, shape, part, act_order):
        Cuda.capability = interface.DeviceCapability(*map(int, device.split(".")))
        fields = {"full_weight_shape": shape, "partition_weight_shape": part, "weight_type": getattr(scalar, ty), "act_type": torch.bfloat16,
                  "group_size": group, "zero_points": types_[ty]}
        if not new:
            fields["has_g_idx"] = act_order
        elif act_order:
            return "no act-order"
        row = classes
        if new:
            row = priority.prioritize_humming(classes)
        c = base.MPLinearLayerConfig(**fields)
        for kernel in row:
            if kernel.get_min_capability() <= Cuda.capability.to_int() and kernel.can_implement(c)[0]:
                return kernel.__name__
        return "none"

    layers = LAYERS
    answers = [index(linear(t, g, d, *shapes, a)) for t, g, d, shapes, a in itertools.product(types_, GROUPS, DEVICES, layers, (False, True))]

    def shape_ok(n, k, g, whole):
        """Whether Marlin's linear kernel takes a rank's part of N columns and K rows of `whole`."""
        Cuda.capability = interface.DeviceCapability(9, 0)
        kernel = next(c for c in classes if c.__name__ == "MarlinLinearKernel")
        fields = {"full_weight_shape": (whole, n), "partition_weight_shape": (k, n), "weight_type": scalar.uint4b8,
                  "act_type": torch.bfloat16, "group_size": g, "zero_points": False, **({} if new else {"has_g_idx": False})}
        return kernel.can_implement(base.MPLinearLayerConfig(**fields))[0]

    grid = list(itertools.product(SHAPES_N, SHAPES_K, GROUPS))
    shapes = [int(shape_ok(n, k, g, whole)) for n, k, g in grid for whole in (k, 2 * k)]
    padded = [list(marlin.marlin_padded_nk(n, k, g)) for n, k, g in grid] if new else None
    experts_padded = [marlin.marlin_moe_padded_intermediate(k, g) for k in SHAPES_K for g in GROUPS] if new else None

    def experts_ok(hidden, inner, g):
        if not new:
            layer = types.SimpleNamespace(hidden_size=hidden, intermediate_size_per_partition=inner, apply_router_weight_on_input=False)
            return marlin.check_moe_marlin_supports_layer(layer, g)
        layer = types.SimpleNamespace(hidden_dim=hidden, intermediate_size_per_partition_unpadded=inner)
        return marlin.check_moe_marlin_supports_config(layer, g, True)

    experts_shape = [int(experts_ok(h, k, g)) for h in (2048, 2880) for k in SHAPES_K for g in GROUPS]

    # FP8 activations with 4-bit weights: the devices that Marlin accepts.
    def fp8_inputs(device):
        Cuda.capability = interface.DeviceCapability(*map(int, device.split(".")))
        saved, marlin.envs = marlin.envs, types.SimpleNamespace(VLLM_MARLIN_INPUT_DTYPE="fp8")
        try:
            return int(marlin.get_marlin_input_dtype("layer") is not None)
        except ValueError:
            return 0
        finally:
            marlin.envs = saved

    # Arguments of the CPU operators' calls, read from the source.
    def call(name):
        counts = set()
        for path in root.rglob("*.py"):
            text = path.read_text()
            if name not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                    counts.add(len(node.args) + len(node.keywords))
        return sorted(counts)

    def desc_act(group):
        if not new:
            source = (root / "model_executor/layers/quantization/gptq_marlin.py").read_text()
            assert "if desc_act and group_size == -1:" in source and "desc_act = False" in source
            return "kept" if group != -1 else "off"
        module = importlib.import_module(f"{QUANT}.gptq_utils")
        try:
            return "off" if not module.normalize_and_validate_gptq_desc_act(True, group, {}) else "kept"
        except ValueError:
            return "refused"

    print(json.dumps({
        "kernels": list(kernels), "moe": {"methods": moe_axis, "answers": moe}, "linear": {"answers": answers},
        "shapes": shapes, "padded": padded, "experts_padded": experts_padded, "experts_shape": experts_shape,
        "fp8_inputs": [fp8_inputs(d) for d in DEVICES], "dynamic_4bit_int_moe": call("dynamic_4bit_int_moe"),
        "marlin_gemm": call("marlin_gemm"), "desc_act": [desc_act(g) for g in GROUPS],
    }))


if len(sys.argv) == 3 and sys.argv[1] == "--release":
    child(sys.argv[2])
elif len(sys.argv) == 4:
    releases = {}
    for name, folder in zip(("0.21.0", "0.33.0"), sys.argv[1:3]):
        out = subprocess.run([sys.executable, __file__, "--release", folder], check=True, stdout=subprocess.PIPE).stdout
        files = sorted(p for p in Path(folder).rglob("*.py") if "fused_moe" in p.parts or "kernels" in p.parts or p.name == "marlin_utils.py")
        digest = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
        releases[name] = {"sha256": digest, **json.loads(out)}
    result = {"producer": "scripts/gen/upstream_drift.py", "devices": DEVICES, "parallel": PARALLEL, "types": ["uint4b8", "uint8b128", "uint4"],
              "groups": GROUPS, "layers": LAYERS, "sizes_n": SHAPES_N, "sizes_k": SHAPES_K, "releases": releases}
    Path(sys.argv[3]).write_text(json.dumps(result, separators=(",", ":")) + "\n")
else:
    sys.exit(__doc__)
