"""Checks of tensors, torch's current stream, and memory from torch's allocator."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
from typing import Any, Optional, Sequence, Tuple

import torch

from .. import _core
from .._core import Error


class Memory(Tuple[int, int]):
    """Address and number of elements of a tensor, which it keeps alive."""

    tensor: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, elements: int) -> Memory:
        memory = cls((tensor.data_ptr(), elements))
        memory.tensor = tensor
        return memory


HALVES = (torch.float16, torch.bfloat16)
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def name_of(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def expect(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[Optional[int]],
    device: torch.device,
) -> torch.Tensor:
    """The tensor, if it has one of the types, the shape (None: any size) and the device."""
    if tensor.dtype not in dtypes:
        known = " or ".join(str(dtype) for dtype in dtypes)
        raise Error(f"`{name}`: found {tensor.dtype}, expected {known}")
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape)
    if not fits or any(want is not None and have != want for have, want in zip(sizes, shape)):
        wanted = ", ".join("_" if size is None else str(size) for size in shape)
        raise Error(f"`{name}`: found shape {list(sizes)}, expected [{wanted}]")
    if tensor.device != device:
        raise Error(f"`{name}`: found a tensor on {tensor.device}, expected {device}")
    return tensor


def memory(name: str, tensor: torch.Tensor) -> Memory:
    """Where a tensor's elements are; it must be contiguous, and its first element aligned."""
    if not tensor.is_contiguous():
        raise Error(f"`{name}`: found strides {list(tensor.stride())}, expected a contiguous tensor")
    offset = tensor.data_ptr() % 16
    if offset != 0:
        raise Error(f"`{name}`: found an address of {offset} modulo 16, expected 0")
    return Memory.of(tensor, tensor.numel())


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that kernels can read."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def optional_memory(name: str, tensor: Optional[torch.Tensor]) -> Optional[Memory]:
    return None if tensor is None else memory(name, tensor)


def as_bytes(place: Memory, tensor: torch.Tensor) -> Memory:
    return Memory.of(place.tensor, place[1] * tensor.element_size())


_prepared = False
_SHIPPED = os.path.join(os.path.dirname(os.path.dirname(__file__)), "modules")


def _preload_nvrtc() -> None:
    """Loads the NVRTC of torch's wheels, which the loader does not find by its name otherwise."""
    if os.environ.get("MARLINSPIKE_NVRTC"):
        return
    folder = os.path.dirname(os.path.dirname(torch.__file__))
    found = []
    for pattern in ("nvidia/*/lib/libnvrtc.so.1[0-9]", "torch/lib/libnvrtc*.so*"):
        found += glob.glob(os.path.join(folder, pattern))
    for path in sorted(found, reverse=True):
        if "builtins" in path:
            continue
        # A library that cannot be loaded is reported when a kernel is compiled.
        with contextlib.suppress(OSError):
            ctypes.CDLL(path)
            return


def native(name: str) -> Any:
    """A function of the extension for CUDA."""
    global _prepared
    function = getattr(_core, name, None)
    if function is None:
        raise Error("this build of marlinspike has no CUDA operators: build it with the feature `cuda`")
    if not _prepared:
        _preload_nvrtc()
        if os.path.isdir(_SHIPPED):
            # Read when the first device is opened.
            os.environ.setdefault("MARLINSPIKE_MODULES", _SHIPPED)
        _prepared = True
    return function


class on:
    """The ordinal of a device and the handle of its current stream; inside, it is the current device."""

    __slots__ = ("_device", "_guard")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard: Any = None

    def __enter__(self) -> Tuple[int, int]:
        index = self._device.index
        if torch.cuda.current_device() != index:
            self._guard = torch.cuda.device(index)
            self._guard.__enter__()
        return index, torch._C._cuda_getCurrentRawStream(index)

    def __exit__(self, *error: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*error)


def scratch(
    size: int, flags: int, device: torch.device
) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """Memory of the allocator: of a graph's pool while one is captured."""
    room = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
    return room, torch.zeros(flags, dtype=torch.int32, device=device) if flags else None
