"""Hypothesis strategies: ``pip install hypothesis``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Dict, Optional

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("marlinspike.strategies needs hypothesis: pip install hypothesis") from error

from . import _core
from ._case import Case, Class, stated


def _axes(config: Dict[str, Any], prefix: str = "") -> Dict[str, str]:
    axes: Dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            axes.update(_axes(value, f"{prefix}{key}."))
        else:
            axes[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return axes


def configs(op: str, where: str = "") -> st.SearchStrategy[Dict[str, Any]]:
    """Configs of an operation's lattice that pass a filter such as ``weight_type=uint4b8|uint4``."""
    demands = [part.split("=", 1) for part in where.split(",") if part.strip()]
    fitting = []
    for config in map(json.loads, _core.lattice(op)):
        axes = _axes(config)
        if all(axes.get(key.strip(), "null") in values.split("|") for key, values in demands):
            fitting.append(config)
    if not fitting:
        raise _core.Error(f"where: no config of `{op}` meets {where}")
    return st.sampled_from(fitting)


def cases(
    op: str, where: str = "", *, convention: Optional[str] = None, class_: Optional[Class] = None
) -> st.SearchStrategy[Case]:
    """Cases of an operation with the reference's outputs.

    As in ``marlinspike.fuzz``, a config declares no schedule, even where one of the operation's lattice
    does: ``check`` judges a product by its bound and not by every bit. ``convention`` and ``class_`` narrow the bound to what is known about the
    kernel; ``case.check()`` uses them.
    """
    # Refuses unknown names here, and not when the first case is judged.
    _core.expect_stated(stated(convention, class_))

    def drawn(config: Dict[str, Any], seed: int) -> Case:
        undeclared = {key: value for key, value in config.items() if not key.startswith("schedule")}
        case = Case.draw(op, seed, config=undeclared)
        return replace(case, convention=convention, class_=class_)

    return st.builds(drawn, configs(op, where), st.integers(0, 2**64 - 1))
