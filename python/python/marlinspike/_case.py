"""Cases: inputs, configuration and outputs of one operation."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from . import _core
from ._arrays import Typed, array, as_one_of, typed
from ._report import Report

Tensors = Mapping[str, Any]


def _local_experts(inputs: Tensors) -> Optional[int]:
    for name in ("w13_qweight", "w13_weight"):
        if name in inputs:
            return int(typed(inputs[name], name)[1][0])
    return None


def _named(op: str, config: str, inputs: Tensors, outputs: Tensors) -> Tuple[list, list]:
    """Tensors as the extension takes them: bits that numpy has no type for become the type that the
    operation demands."""
    rules = {rule[0]: rule[1] for rule in _core.tensors(op, config, _local_experts(inputs))}

    def named(prefix: str, tensors: Tensors) -> List[Tuple[str, Typed]]:
        made = []
        for name, value in tensors.items():
            full = f"{prefix}.{name}"
            made.append((name, as_one_of(typed(value, full), rules.get(full, ()))))
        return made

    return named("in", inputs), named("out", outputs)


@dataclass
class Case:
    """One operation's inputs, configuration and outputs.

    Tensors have their bare names (``qweight``). They may be numpy or torch arrays, or pairs of an
    element type's name and an array of its bits.
    """

    op: str
    config: Dict[str, Any]
    inputs: Dict[str, Any] = field(default_factory=dict)
    outputs: Dict[str, Any] = field(default_factory=dict)
    name: str = ""
    provenance: str = ""

    @classmethod
    def _of(cls, parts: tuple) -> "Case":
        op, config, inputs, outputs, name, provenance = parts

        def arrays(tensors: list) -> Dict[str, np.ndarray]:
            return {name: array(*tensor) for name, tensor in tensors}

        return cls(op, json.loads(config), arrays(inputs), arrays(outputs), name, provenance)

    @classmethod
    def read(cls, path: Union[str, "os.PathLike[str]"]) -> "Case":
        """Reads a case file."""
        with open(path, "rb") as file:
            return cls._of(_core.read_case(file.read()))

    @classmethod
    def draw(
        cls, op: str, seed: int = 0, index: int = 0, config: Optional[Mapping[str, Any]] = None
    ) -> "Case":
        """Case ``index`` of the generator, the same on every machine; with ``config``, a case of that
        config. Outputs are the reference's."""
        stated = None if config is None else json.dumps(dict(config))
        return cls._of(_core.draw(op, seed, index, stated))

    def _parts(self, outputs: Tensors) -> tuple:
        config = json.dumps(self.config)
        return (self.op, config, *_named(self.op, config, self.inputs, outputs))

    def write(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes a case file, whole or not at all."""
        data = _core.write_case(*self._parts(self.outputs), self.name, self.provenance)
        folder = os.path.dirname(os.fspath(path)) or "."
        handle, part = tempfile.mkstemp(dir=folder, prefix=".marlinspike-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(part, 0o644)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise

    def check(self) -> Report:
        """The verdict on the outputs."""
        return Report._of(_core.check(*self._parts(self.outputs), self.name, self.provenance))

    def reference(self) -> Dict[str, np.ndarray]:
        """The outputs that the reference computes: of products and layers, the bits of the config's
        schedule, else of the canonical arithmetic."""
        op, config, inputs, _ = self._parts({})
        return {name: array(*tensor) for name, tensor in _core.reference(op, config, inputs)}


def check(op: str, inputs: Tensors, outputs: Tensors, config: Mapping[str, Any]) -> Report:
    """Recomputes the outputs of an operation from its inputs and compares.

    ``marlinspike.schema(op)`` and the page "Case schema" list each operation's config keys and tensors.
    Outputs that are absent are not checked.
    """
    return Case(op, dict(config), dict(inputs), dict(outputs)).check()


def assert_correct(
    op: str,
    inputs: Tensors,
    outputs: Tensors,
    config: Mapping[str, Any],
    *,
    allow_unchecked: bool = False,
) -> Report:
    """Raises ``AssertionError`` with the verdicts, the causes and the first mismatches unless every
    output is checked and right.

    An output is unchecked where its bound would accept a trivial wrong answer, such as zeros.
    """
    report = check(op, inputs, outputs, config)
    if report.passed or (allow_unchecked and report.verdict == "unchecked" and report.outputs):
        return report
    raise AssertionError(str(report))


def reference(op: str, inputs: Tensors, config: Mapping[str, Any]) -> Dict[str, np.ndarray]:
    """The outputs that the reference computes for an operation's inputs."""
    return Case(op, dict(config), dict(inputs)).reference()
