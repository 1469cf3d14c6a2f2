"""Hypothesis strategies: ``pip install hypothesis``."""

from __future__ import annotations

import json
from typing import Any, Dict

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("marlinspike.strategies needs hypothesis: pip install hypothesis") from error

from . import _core
from ._case import Case


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


def cases(op: str, where: str = "") -> st.SearchStrategy[Case]:
    """Cases of an operation with the reference's outputs."""
    seeds = st.integers(0, 2**64 - 1)
    return st.builds(lambda config, seed: Case.draw(op, seed, config=config), configs(op, where), seeds)
