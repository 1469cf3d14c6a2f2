"""Arrays of numpy, torch and DLPack as typed bytes, and back."""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence, Tuple

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
    "float8_e4m3fnuz": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
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
_BY_SAFETENSORS = {name: ours for ours, name in _NAMES.items() if ours != "float8_e4m3fnuz"}
# Types that numpy lacks, and the integers that hold their bits.
_BITS = {"BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8}
_WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_WIDTHS.update({"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4})
_WIDTHS.update({"F64": 8, "I64": 8, "U64": 8})


def is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _flat_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array; a view where the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def typed(value: Any, name: str = "array") -> Typed:
    """The element type, shape and bytes of an array: numpy (ml_dtypes included), torch on any device,
    anything with ``__dlpack__``, or a pair of an element type's name and an array of its bits."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return _stated(value[0], value[1], name)
    if is_torch(value):
        torch = sys.modules["torch"]
        dtype = _NAMES.get(str(value.dtype).replace("torch.", ""))
        if dtype is None:
            raise Error(f"`{name}`: found torch type {value.dtype}, expected one of {', '.join(_NAMES)}")
        host = value.detach().cpu().contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
        return dtype, list(value.shape), data
    if not isinstance(value, np.ndarray):
        if hasattr(value, "__array__"):
            value = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            value = np.from_dlpack(value)
        else:
            value = np.asarray(value)
    dtype = _NAMES.get(value.dtype.name)
    if dtype is None:
        raise Error(f"`{name}`: found numpy type {value.dtype}, expected one of {', '.join(_NAMES)}")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return dtype, list(value.shape), _flat_bytes(value)


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


def like(template: Any, made: Typed) -> Any:
    """A result as the caller's kind of array: torch on the template's device, else numpy."""
    dtype, shape, data = made
    if not is_torch(template):
        return array(dtype, shape, data)
    torch = sys.modules["torch"]
    flat = torch.from_numpy(data).view(getattr(torch, _BY_SAFETENSORS[dtype]))
    return flat.reshape(tuple(shape)).to(template.device)


def optional(value: Optional[Any], name: str) -> Optional[Typed]:
    """``typed`` of a tensor that may be absent, or empty as upstream's callers write it."""
    if value is None:
        return None
    made = typed(value, name)
    return made if made[2].size else None
