"""Numbers to codes of a number format, and back."""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import like, typed

# ml_dtypes' names of types that vLLM names otherwise.
_ALIASES = {
    "float4_e2m1fn": "float4_e2m1f",
    "float6_e2m3fn": "float6_e2m3f",
    "float6_e3m2fn": "float6_e3m2f",
}


def type_name(dtype: Any) -> str:
    """The name of an element type or number format."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if name is None:
        # torch's types, and types as numpy and ml_dtypes export them.
        name = dtype.__name__ if isinstance(dtype, type) else str(dtype).replace("torch.", "")
    return _ALIASES.get(name, name)


def encode(
    values: Any, dtype: Any, rounding: str = "nearest_even", overflow: str = "infinity"
) -> Any:
    """The codes of floating-point numbers in a number format, rounded once.

    ``dtype`` is a type of numpy, ml_dtypes or torch, or a name: ``int4``, ``uint4b8``, ``float4_e2m1f``,
    ``float8_e4m3fn``, ``float8_e8m0fnu``, ``bfloat16``, ... Types without an element type of their own
    come as unsigned integers, the code in the low bits.

    ``rounding``: ``nearest_even``, ``nearest_away``, ``toward_zero``, ``away_from_zero``. ``overflow``, for
    infinities and values that are too large: ``infinity`` (NaN in types without one), ``saturate``,
    ``nan``. The results equal those of every processor: NaN keeps its sign and loses its payload.
    """
    made = _core.encode(typed(values, "values"), type_name(dtype), rounding, overflow)
    return like(values, made)


def decode(codes: Any, dtype: Any) -> Any:
    """The values of codes of a number format, as float64, exactly.

    ``codes`` are elements of any type with the format's width; formats of fewer than 8 bits are read from
    the low bits of a byte.
    """
    return like(codes, _core.decode(typed(codes, "codes"), type_name(dtype)))
