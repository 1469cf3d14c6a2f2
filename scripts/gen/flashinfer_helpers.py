"""FlashInfer's and vLLM's own weight preparation, loaded from their wheels without a GPU.

The modules named in REAL run unchanged; the rest of both packages is an inert stand-in.
`block_scale_interleave` is FlashInfer's C++ operator with its CPU branch, compiled unchanged from
the wheel by `build_fp4op.sh`. Its Python wrapper queries the GPU's capability, which is replaced here.
"""

import importlib
import zipfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

import stand_ins

QUANT = "vllm.model_executor.layers.quantization.utils"
REAL = {
    "vllm.utils.math_utils",
    "vllm.model_executor.layers.fused_moe.config",
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
    f"{QUANT}.quant_utils",
    f"{QUANT}.nvfp4_utils",
    f"{QUANT}.flashinfer_utils",
    f"{QUANT}.flashinfer_fp4_moe",
    f"{QUANT}.flashinfer_mxint4_moe",
    "vllm.scalar_type",
    "flashinfer.utils",
    "flashinfer.tllm_enums",
    "flashinfer.fused_moe.core",
    "flashinfer.quantization.fp4_quantization",
    "flashinfer.cute_dsl.utils",
    "flashinfer.quantization.quantization_cute_dsl_utils",
}
VERSIONS = {"vllm": "0.21.0", "flashinfer": "0.6.8.post1"}


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU, for functions that check the device and then only compute."""

    is_cuda = True


def load(vllm_wheel, flashinfer_wheel, fp4op):
    """Functions of the two packages that the scripts of this folder call."""
    for name, wheel in (("vllm", vllm_wheel), ("flashinfer", flashinfer_wheel)):
        if VERSIONS[name] not in str(wheel):
            raise SystemExit(f"{wheel}: expected the wheel of {name} {VERSIONS[name]}")
    import tvm_ffi

    operator = tvm_ffi.load_module(str(fp4op))
    wheels = {"vllm": vllm_wheel, "flashinfer": flashinfer_wheel}
    # Their imports besides torch.
    others = {"einops", "ninja", "cutlass", "cuda", "pynvml", "triton"}
    stand_ins.install(others.union(wheels), REAL, stand_ins.from_wheels(wheels))
    logging = importlib.import_module("flashinfer.api_logging")
    logging.flashinfer_api = lambda function: function
    platform = importlib.import_module("vllm.platforms")
    platform.current_platform = MagicMock()
    platform.current_platform.fp8_dtype = lambda: torch.float8_e4m3fn
    platform.current_platform.is_fp8_fnuz = lambda: False

    fi_utils = importlib.import_module("flashinfer.utils")
    core = importlib.import_module("flashinfer.fused_moe.core")
    fp4 = importlib.import_module("flashinfer.quantization.fp4_quantization")
    fp4.get_compute_capability = lambda device: (10, 0)

    def interleave(scales):
        rows, cols = scales.shape[-2:]
        experts = scales.shape[0] if scales.dim() == 3 else 1
        size = experts * fp4._compute_swizzled_layout_sf_size(rows, cols)
        out = torch.zeros(size, dtype=scales.dtype)
        operator.block_scale_interleave_sm100(scales, out)
        return out

    fp4.get_fp4_quantization_module = lambda arch: SimpleNamespace(block_scale_interleave_sm100=interleave)
    top, moe = importlib.import_module("flashinfer"), importlib.import_module("flashinfer.fused_moe")
    top.block_scale_interleave = top.nvfp4_block_scale_interleave = fp4.block_scale_interleave
    moe.convert_to_block_layout = core.convert_to_block_layout

    # Index arithmetic that is usually compiled for a GPU, run as plain Python.
    cutlass = importlib.import_module("cutlass")
    cutlass.Int32, cutlass.cute = int, importlib.import_module("cutlass.cute")
    cutlass.cute.jit = lambda function: function

    nvfp4 = importlib.import_module(f"{QUANT}.nvfp4_utils")
    # `.cuda()` at the end of the swizzle only moves a tensor.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    quant = importlib.import_module(f"{QUANT}.quant_utils")
    convert = quant.convert_packed_uint4b8_to_signed_int4_inplace
    quant.convert_packed_uint4b8_to_signed_int4_inplace = lambda t: convert(t.as_subclass(OnGpu))
    return SimpleNamespace(
        vllm=zipfile.ZipFile(vllm_wheel),
        cute=importlib.import_module("flashinfer.quantization.quantization_cute_dsl_utils"),
        core=core,
        fi_utils=fi_utils,
        fp4=fp4,
        quant=quant,
        nvfp4=nvfp4,
        fp4_moe=importlib.import_module(f"{QUANT}.flashinfer_fp4_moe"),
        align=importlib.import_module(f"{QUANT}.flashinfer_utils"),
        mxint4=importlib.import_module(f"{QUANT}.flashinfer_mxint4_moe"),
        enums=importlib.import_module("flashinfer.tllm_enums"),
        oracle=importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.nvfp4"),
        moe_config=importlib.import_module("vllm.model_executor.layers.fused_moe.config"),
    )
