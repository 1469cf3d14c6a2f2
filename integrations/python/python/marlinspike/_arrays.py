"""Arrays of numpy, torch and DLPack as typed bytes, and back."""

from __future__ import annotations

import sys
from typing import Any, Iterable, Optional, Sequence, Tuple

import numpy as np

from ._core import Error

#: Element type's safetensors name, shape, bytes.
Typed = Tuple[str, Sequence[int], np.ndarray]

# numpy's and ml_dtypes' names, and torch's.
_NAMES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    # Two codes in a byte, the first in the low bits.
    "float4_e2m1fn_x2": "U8",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "bool": "BOOL",
}
_BY_SAFETENSORS = {name: ours for ours, name in _NAMES.items() if ours != "float4_e2m1fn_x2"}
# Types that numpy lacks, and the integers that hold their bits.
_BITS = {"BF16": np.uint16}
_BITS.update(dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E8M0"), np.uint8))
_WIDTHS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E8M0"), 1)
_WIDTHS.update({"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4})
_WIDTHS.update({"F64": 8, "I64": 8, "U64": 8})


def is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_dtype(value: Any) -> bool:
    """Whether a value is an element type of numpy, ml_dtypes or torch."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return True
    return isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array; a view where the array is contiguous and aligned."""
    return np.require(array, requirements=["C", "A"]).reshape(-1).view(np.uint8)


def typed(value: Any, name: str = "array") -> Typed:
    """The element type, shape and bytes of an array: numpy (ml_dtypes included), torch on any device,
    anything with ``__dlpack__``, or a pair of an element type's name and an array of its bits."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return _stated(value[0], value[1], name)
    if is_torch(value):
        return _of_torch(value, name)
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__array__"):
            value = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            return _of_dlpack(value, name)
        else:
            value = np.asarray(value)
    dtype = _NAMES.get(value.dtype.name)
    if dtype is None:
        raise Error(f"`{name}`: found numpy type {value.dtype}, expected one of {', '.join(_NAMES)}")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return dtype, list(value.shape), _flat_bytes(value)


def _of_dlpack(value: Any, name: str) -> Typed:
    torch = sys.modules.get("torch")
    try:
        return typed(np.from_dlpack(value), name)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        # numpy has neither bfloat16 nor devices.
        problem = error
    if torch is not None:
        try:
            return _of_torch(torch.from_dlpack(value), name)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            problem = error
    raise Error(f"`{name}`: found a DLPack tensor that cannot be read on the host: {problem}")


def _of_torch(value: Any, name: str) -> Typed:
    torch = sys.modules["torch"]
    dtype = _NAMES.get(str(value.dtype).replace("torch.", ""))
    if dtype is None:
        raise Error(f"`{name}`: found torch type {value.dtype}, expected one of {', '.join(_NAMES)}")
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        kind = "a meta" if value.device.type == "meta" else f"a {value.layout}"
        raise Error(f"`{name}`: found {kind} tensor, expected a dense tensor with data")
    host = value.detach().resolve_neg()
    # Types of one byte lack most operations; their bytes have all.
    if host.element_size() == 1 and host.dtype != torch.uint8:
        host = host.view(torch.uint8)
    host = host.cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
    return dtype, list(value.shape), data


def _stated(dtype: str, bits: Any, name: str) -> Typed:
    dtype = _NAMES.get(dtype, dtype)
    found, shape, data = typed(bits, name)
    if _WIDTHS.get(dtype) != _WIDTHS[found]:
        raise Error(f"`{name}`: found an array of {found}, expected the bits of {dtype}")
    return dtype, shape, data


def as_one_of(value: Typed, allowed: Sequence[str]) -> Typed:
    """The same bits as an allowed type, where the array holds a type's bits as unsigned integers, or
    signed integers as unsigned ones."""
    dtype, shape, data = value
    if dtype in allowed or dtype not in ("U8", "U16", "U32", "I16"):
        return value
    fitting = [other for other in allowed if _WIDTHS[other] == _WIDTHS[dtype]]
    return (fitting[0], shape, data) if fitting else value


def array(dtype: str, shape: Sequence[int], data: np.ndarray) -> np.ndarray:
    """A numpy array. Types that numpy lacks come as ml_dtypes', where that is installed, else as the
    unsigned integers of their bits."""
    if dtype in _BITS:
        try:
            import ml_dtypes

            element = np.dtype(getattr(ml_dtypes, _BY_SAFETENSORS[dtype]))
        except (ImportError, AttributeError):
            element = np.dtype(_BITS[dtype])
    else:
        element = np.dtype(_BY_SAFETENSORS[dtype])
    return data.view(element).reshape(shape)


def tensor(made: Typed, device: Any) -> Any:
    """A torch tensor on a device. Types that an old torch lacks come as uint8 or signed integers."""
    import torch

    dtype, shape, data = made
    element = getattr(torch, _BY_SAFETENSORS[dtype], None)
    if element is None:
        element = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[_WIDTHS[dtype]]
    if not data.size:
        return torch.empty(tuple(shape), dtype=element, device=device)
    return torch.from_numpy(data).view(element).reshape(tuple(shape)).to(device)


def like(template: Any, made: Typed) -> Any:
    """A result as the caller's kind of array: torch on the template's device, else numpy."""
    return tensor(made, template.device) if is_torch(template) else array(*made)


def like_any(given: Iterable[Any], made: Typed) -> Any:
    """A result like the first torch tensor among the caller's arrays, else a numpy array."""
    return like(next(filter(is_torch, given), None), made)


def optional(value: Optional[Any], name: str) -> Optional[Typed]:
    """``typed`` of a tensor that may be absent, or empty as upstream's callers write it."""
    if value is None:
        return None
    made = typed(value, name)
    return made if made[2].size else None
