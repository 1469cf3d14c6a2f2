"""Configs as JSON."""

from __future__ import annotations

import json
from typing import Any, Mapping

import numpy as np

from ._arrays import is_dtype
from ._core import Error
from ._numbers import type_name


def _plain(value: Any, name: str) -> Any:
    """A value of a config as JSON has it. Numbers may be numpy's or one-element tensors, and types
    those of numpy, ml_dtypes or torch."""
    if value is None or isinstance(value, (bool, int, float, str)):
        # A subclass, such as an enum of strings or numpy's float64, may print otherwise.
        if isinstance(value, str):
            return str.__str__(value)
        return next((kind(value) for kind in (bool, int, float) if isinstance(value, kind)), None)
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{name}.{key}" if name else str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, f"{name}[{i}]") for i, one in enumerate(value)]
    if is_dtype(value):
        return type_name(value)
    if isinstance(value, np.generic) or hasattr(value, "item"):
        try:
            number = value.item()
        except (TypeError, ValueError, RuntimeError):
            number = value
        if isinstance(number, (bool, int, float, str)):
            return number
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Error(f"config: `{name}`: found a value of type {kind}, expected a number, a text, a list or a dict")


def plain(config: Mapping[str, Any]) -> "dict[str, Any]":
    """A config with the values of JSON."""
    if not isinstance(config, Mapping):
        raise Error(f"config: found {type(config).__name__}, expected a dict of config keys")
    return _plain(config, "")


def dumps(config: Mapping[str, Any]) -> str:
    """A config as JSON."""
    return json.dumps(plain(config))
