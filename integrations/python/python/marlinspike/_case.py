"""Cases: inputs, configuration and outputs of one operation."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _core
from ._arrays import Typed, array, as_one_of, is_torch, like_any, tensor, typed
from ._config import dumps, plain
from ._report import Report

Tensors = Mapping[str, Any]


def _local_experts(inputs: Tensors) -> Optional[int]:
    for name in ("w13_qweight", "w13_weight"):
        if name in inputs:
            return int(typed(inputs[name], name)[1][0])
    return None


#: A class of summation orders: its name, or an object with the fields of its JSON.
Class = Union[str, Mapping[str, Any]]


def stated(convention: Optional[str], class_: Optional[Class]) -> Tuple[Optional[str], Optional[str]]:
    """What is stated about a kernel's arithmetic, as the extension takes it."""
    if convention is not None and not isinstance(convention, str):
        raise _core.Error(f"convention: found {convention!r}, expected a name, such as 'marlin'")
    if class_ is None or isinstance(class_, str):
        return convention, class_
    if not isinstance(class_, Mapping):
        expected = "expected a name, such as 'fused-f32', or a dict of a class's fields"
        raise _core.Error(f"class_: found {class_!r}, {expected}")
    return convention, json.dumps(dict(class_))


def words(convention: Optional[str], class_: Optional[Class]) -> str:
    """What is stated, as arguments of a call."""
    both = (("convention", convention), ("class_", class_))
    return ", ".join(f"{key}={value!r}" for key, value in both if value is not None)


#: The one tensor of e4m3fnuz codes. Case files store it as F8_E4M3.
_FNUZ = ("normalize_e4m3fn_to_e4m3fnuz", "weight")


def stored(op: str, prefix: str, name: str, value: Any, allowed: Sequence[str]) -> Typed:
    """An array as a case file stores it: bits that numpy has no type for become the type that the
    operation demands."""
    made = typed(value, f"{prefix}.{name}")
    if prefix == "out" and (op, name) == _FNUZ and made[0] == "F8_E4M3FNUZ":
        made = ("F8_E4M3", *made[1:])
    return as_one_of(made, allowed)


def typed_outputs(op: str, tensors: List[Tuple[str, Typed]]) -> List[Tuple[str, Typed]]:
    """Outputs of the extension with the type that their bits mean."""
    return [
        (name, ("F8_E4M3FNUZ", *made[1:]) if (op, name) == _FNUZ else made) for name, made in tensors
    ]


def _named(op: str, config: str, inputs: Tensors, outputs: Tensors) -> Tuple[list, list]:
    """Tensors as the extension takes them."""
    rules = {rule[0]: rule[1] for rule in _core.tensors(op, config, _local_experts(inputs))}

    def named(prefix: str, tensors: Tensors) -> List[Tuple[str, Typed]]:
        return [
            (name, stored(op, prefix, name, value, rules.get(f"{prefix}.{name}", ())))
            for name, value in tensors.items()
        ]

    return named("in", inputs), named("out", outputs)


def _described(value: Any) -> str:
    """The type and shape of a tensor."""
    kind, bits = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    kind = kind or str(getattr(bits, "dtype", type(bits).__name__)).replace("torch.", "")
    return f"{kind}{list(getattr(bits, 'shape', []))}"


@dataclass(repr=False)
class Case:
    """One operation's inputs, configuration and outputs.

    Tensors have their bare names (``qweight``). They may be numpy or torch arrays, or pairs of an
    element type's name and an array of its bits. ``convention`` and ``class_`` state how a kernel
    computes products, for ``check``; case files do not hold them.
    """

    op: str
    config: Dict[str, Any]
    inputs: Dict[str, Any] = field(default_factory=dict)
    outputs: Dict[str, Any] = field(default_factory=dict)
    name: str = ""
    provenance: str = ""
    convention: Optional[str] = None
    class_: Optional[Class] = None

    def __repr__(self) -> str:
        """The operation and config, and the type and shape of each tensor, without its values."""
        parts = [repr(self.op)]
        parts += [f"name={self.name!r}"] if self.name else []
        parts.append(f"config={self.config!r}")
        for what, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            shown = (f"{name}: {_described(value)}" for name, value in tensors.items())
            parts.append(f"{what}={{{', '.join(shown)}}}")
        for what, value in (("convention", self.convention), ("class_", self.class_)):
            parts += [] if value is None else [f"{what}={value!r}"]
        return f"Case({', '.join(parts)})"

    @classmethod
    def _of(cls, parts: tuple) -> "Case":
        op, config, inputs, outputs, name, provenance = parts

        def arrays(tensors: list) -> Dict[str, np.ndarray]:
            return {name: array(*tensor) for name, tensor in tensors}

        made = arrays(typed_outputs(op, outputs))
        return cls(op, json.loads(config), arrays(inputs), made, name, provenance)

    @classmethod
    def read(cls, path: Union[str, "os.PathLike[str]"]) -> "Case":
        """Reads a case file."""
        with open(path, "rb") as file:
            return cls._of(_core.read_case(file.read()))

    @classmethod
    def draw(
        cls,
        op: str,
        seed: int = 0,
        index: int = 0,
        config: Optional[Mapping[str, Any]] = None,
        *,
        schedule: bool = False,
    ) -> "Case":
        """Case ``index`` of the generator, the same on every machine; with ``config``, a case of that
        config, whose number of rows (``size_m``) is drawn: ``case.config`` has it. Outputs are the
        reference's.

        ``schedule=True`` declares the schedule of these outputs in the config, for a kernel that has
        the same bits. Without it, and unless ``config`` states a schedule, a kernel may sum in any
        order of its class.
        """
        stated = None if config is None else dumps(config)
        return cls._of(_core.draw(op, seed, index, stated, schedule))

    def torch(self, device: Any = "cpu") -> "Case":
        """The case with torch tensors on a device."""

        def moved(tensors: Tensors) -> Dict[str, Any]:
            return {
                name: value.to(device) if is_torch(value) else tensor(typed(value, name), device)
                for name, value in tensors.items()
            }

        return replace(self, inputs=moved(self.inputs), outputs=moved(self.outputs))

    def _parts(self, outputs: Tensors) -> tuple:
        config = dumps(self.config)
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

    def check(self, *, convention: Optional[str] = None, class_: Optional[Class] = None) -> Report:
        """The verdict on the outputs, for a kernel of this convention and class: by default those of
        the case."""
        arithmetic = stated(
            self.convention if convention is None else convention,
            self.class_ if class_ is None else class_,
        )
        text = (self.name, self.provenance)
        return Report._of(_core.check(*self._parts(self.outputs), text, arithmetic))

    def reference(self) -> Dict[str, Any]:
        """The outputs that the reference computes: of products and layers, the bits of the config's
        schedule, else of the canonical arithmetic. They are torch tensors if an input is one."""
        op, config, inputs, _ = self._parts({})
        made = typed_outputs(op, _core.reference(op, config, inputs))
        return {name: like_any(self.inputs.values(), one) for name, one in made}


def check(
    op: str,
    inputs: Tensors,
    outputs: Tensors,
    config: Mapping[str, Any],
    *,
    convention: Optional[str] = None,
    class_: Optional[Class] = None,
) -> Report:
    """Recomputes the outputs of an operation from its inputs and compares.

    ``marlinspike.schema(op)`` and the page "Case schema" list each operation's config keys and tensors.
    Outputs that are absent are not checked.

    ``convention`` and ``class_`` state how a kernel computes products and layers; they are those of
    ``marlinspike check --convention`` and ``--class``. A class is a name or a dict of its fields.
    """
    case = Case(op, plain(config), dict(inputs), dict(outputs))
    return case.check(convention=convention, class_=class_)


def assert_correct(
    op: str,
    inputs: Tensors,
    outputs: Tensors,
    config: Mapping[str, Any],
    *,
    allow_unchecked: bool = False,
    convention: Optional[str] = None,
    class_: Optional[Class] = None,
) -> Report:
    """Raises ``AssertionError`` with the verdicts, the causes and the first mismatches unless every
    output is checked and right.

    An output is unchecked where its bound would accept a trivial wrong answer, such as zeros.
    ``convention`` and ``class_`` are those of ``check``.
    """
    report = check(op, inputs, outputs, config, convention=convention, class_=class_)
    if report.passed or (allow_unchecked and report.verdict == "unchecked" and report.outputs):
        return report
    raise AssertionError(str(report))


def reference(op: str, inputs: Tensors, config: Mapping[str, Any]) -> Dict[str, Any]:
    """The outputs that the reference computes for an operation's inputs: torch tensors if an input is
    one, else numpy arrays."""
    return Case(op, plain(config), dict(inputs)).reference()
