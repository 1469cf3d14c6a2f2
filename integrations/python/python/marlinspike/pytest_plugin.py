"""pytest's options for ``@marlinspike.fuzz``."""

from __future__ import annotations

import random
from typing import Any

from . import _fuzz


def _seed(text: str) -> int:
    return random.getrandbits(64) if text == "random" else int(text, 0)


def pytest_addoption(parser: Any) -> None:
    """Adds the options ``--marlinspike-...``."""
    group = parser.getgroup("marlinspike", "fuzzing of quantized kernels")
    group.addoption(
        "--marlinspike-seed", type=_seed, metavar="SEED", help="seed of every fuzz test, or `random`"
    )
    group.addoption(
        "--marlinspike-cases", type=int, metavar="N", help="cases of every fuzz test"
    )
    group.addoption(
        "--marlinspike-seconds", type=float, metavar="S", help="time of every fuzz test"
    )
    group.addoption(
        "--marlinspike-findings", type=int, metavar="N", help="end every fuzz test after N distinct findings"
    )
    group.addoption(
        "--marlinspike-shard", metavar="I/N", help="part I of N of the cases of every fuzz test"
    )


def pytest_configure(config: Any) -> None:
    """Passes options and the root folder on to the fuzz tests."""
    for option in ("seed", "cases", "seconds", "findings", "shard"):
        _fuzz._settings[option] = config.getoption(f"--marlinspike-{option}")
    _fuzz._settings["root"] = str(config.rootpath)


def pytest_report_header(config: Any) -> "list[str]":
    """Prints a seed that was given or drawn, so that a run can be repeated."""
    seed = config.getoption("--marlinspike-seed")
    return [] if seed is None else [f"marlinspike: seed {seed:#x}"]
