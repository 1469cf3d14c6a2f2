"""Fuzzing of a kernel that is a Python callable."""

from __future__ import annotations

import inspect
import json
import os
import traceback
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from . import _core
from ._arrays import Typed, array, tensor
from ._config import dumps
from ._case import Case, Class, stated, stored, typed_outputs, words

#: Folder of failing cases, below the root of the project.
FOLDER = ".marlinspike"

# What the pytest plugin sets: the project's root, and the options of the command line.
_settings: Dict[str, Any] = dict.fromkeys(("root", "seed", "cases", "seconds", "findings", "shard"))

#: Part ``i`` of ``n`` of a campaign's cases: ``"2/4"`` or ``(2, 4)``.
Shard = Union[str, Tuple[int, int]]


class Unsupported(Exception):
    """A kernel raises this for a config that it does not take; the case is skipped."""


class FuzzFailure(AssertionError):
    """A kernel is wrong; ``summary`` holds the findings."""

    def __init__(self, message: str, summary: "FuzzSummary"):
        super().__init__(message)
        self.summary = summary


@dataclass(frozen=True)
class Finding:
    """A distinct failure, shrunk to the smallest case that shows it."""

    #: The failing output and its cause, or the kind of fault.
    signature: str
    #: Number of the first failing case.
    index: int
    #: Short name of the cause; None where no known mistake explains the failure.
    cause: Optional[str]
    explanation: Optional[str]
    #: The minimal case's config, one ``key=value`` per key.
    minimal: List[str]
    #: Kernel runs that shrinking took.
    runs: int
    #: The minimal case's file.
    path: Optional[str]
    #: Why there are no outputs, such as the kernel's exception.
    fault: Optional[str] = None
    #: The wrong outputs of the smallest case, each with its first wrong value and their place.
    wrong: List[str] = field(default_factory=list)
    #: What the run stated about the kernel's arithmetic.
    convention: Optional[str] = None
    class_: Optional[Class] = None

    def case(self) -> Case:
        """The minimal case, with what the run stated about the kernel's arithmetic."""
        if self.path is None:
            raise ValueError("the case was not kept: no folder was given")
        return replace(Case.read(self.path), convention=self.convention, class_=self.class_)

    def __str__(self) -> str:
        lines = [f"{self.signature} (case {self.index})"]
        if self.cause:
            lines.append(f"  cause: {self.cause}: {self.explanation}")
        if self.fault:
            lines.append(f"  fault: {self.fault}")
        lines += [f"  {text}" for text in self.wrong]
        lines.append(f"  smallest case: {' '.join(self.minimal)}")
        if self.path:
            declared = words(self.convention, self.class_)
            lines.append(f"  kept in {self.path}: marlinspike.Case.read(...).check({declared})")
        return "\n".join(lines)


def _fault(fault: Optional[Mapping[str, Any]]) -> Optional[str]:
    """The text of a fault in a summary."""
    if not fault:
        return None
    return ", ".join(str(value) for key, value in fault.items() if key != "fault")


def _wrong(report: Optional[Mapping[str, Any]]) -> List[str]:
    """A line for each wrong output of a report."""
    lines = []
    for output in (report or {}).get("outputs", ()):
        if output["verdict"] != "fail":
            continue
        line = f"{output['name']}: {output['mismatches']} of {output['elements']} values are wrong"
        first = output["first_mismatch"]
        if first:
            line += f", the first at {first['index']}: expected {first['expected']}, found {first['found']}"
        diagnosis = output["diagnosis"]
        if diagnosis and diagnosis["strength"] == "place":
            line += f"; {diagnosis['text']}"
        lines.append(line)
    return lines


@dataclass(frozen=True)
class FuzzSummary:
    """What a run did."""

    op: str
    seed: int
    passed: int
    failed: int
    skipped: int
    unchecked: int
    unchecked_reason: Optional[str]
    #: The kernel's reason for the first skipped case.
    skipped_reason: Optional[str]
    findings: List[Finding]
    #: Whether cases were judged, and none failed or was left unchecked, kept cases included.
    ok: bool
    #: The part of the campaign that ran: ``1/1`` is all of it.
    shard: str = "1/1"
    #: Kept cases that failed again, with the reason.
    regressions: List[str] = field(default_factory=list)
    #: Cases judged, by config key and value.
    coverage: Dict[str, Dict[str, int]] = field(default_factory=dict)
    _text: str = field(default="", repr=False)

    @classmethod
    def _of(cls, text: str, convention: Optional[str], class_: Optional[Class]) -> "FuzzSummary":
        run = json.loads(text)
        raw = run["summary"]
        files = run["files"] or [None] * len(raw["findings"])
        findings = []
        for found, path in zip(raw["findings"], files):
            cause = found["cause"] or {}
            findings.append(
                Finding(
                    found["signature"], found["index"], cause.get("id"), cause.get("text"),
                    found["minimal"], found["runs"], path, _fault(found["failure"]["fault"]),
                    _wrong(found["failure"]["report"]), convention, class_,
                )
            )  # fmt: skip
        same = (
            "op", "seed", "passed", "failed", "skipped", "unchecked", "unchecked_reason",
            "skipped_reason", "shard",
        )  # fmt: skip
        return cls(
            **{key: raw[key] for key in same},
            findings=findings,
            ok=run["success"],
            regressions=[f"{k['path']}: {k['detail']}" for k in run["kept"] if k["result"] == "fail"],
            coverage=raw["coverage"]["axes"],
            _text=text,
        )

    def write(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the summary file that ``merge`` and ``marlinspike fuzz merge`` read."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._text)

    def __str__(self) -> str:
        lines = [
            f"{self.op}: {self.passed} passed, {self.failed} failed, {self.unchecked} unchecked, "
            f"{self.skipped} skipped; seed {self.seed:#x}"
            + ("" if self.shard == "1/1" else f", shard {self.shard}")
        ]
        if self.unchecked_reason:
            lines.append(f"unchecked: {self.unchecked_reason}")
        if self.skipped_reason:
            lines.append(f"skipped: {self.skipped_reason}")
        lines += [f"kept case fails: {text}" for text in self.regressions]
        lines += [str(finding) for finding in self.findings]
        return "\n".join(lines)


def _warn_of_bits(types: Mapping[str, str], arrays: Mapping[str, Any]) -> None:
    """Says once that a kernel is given the bits of numbers, because numpy lacks their type."""
    names = [name for name, dtype in types.items() if dtype == "BF16" and arrays[name].dtype == np.uint16]
    if names:
        warnings.warn(
            f"`{names[0]}` is bfloat16, which numpy lacks: the kernel is given its bits as uint16. "
            'pip install ml_dtypes, or use device="cpu" for torch tensors',
            stacklevel=2,
        )


def _adapted(kernel: Callable[..., Any], op: str, device: Optional[Any]) -> Callable[..., Any]:
    """The kernel as the extension calls it. Exceptions become faults; those that end the test run
    (KeyboardInterrupt, pytest's own) are raised."""
    takes_reference = "reference" in inspect.signature(kernel).parameters

    def arrays(tensors: Sequence[Tuple[str, Typed]]) -> Dict[str, Any]:
        if device is None:
            made_arrays = {name: array(*made) for name, made in tensors}
            _warn_of_bits({name: made[0] for name, made in tensors}, made_arrays)
            return made_arrays
        return {name: tensor(made, device) for name, made in tensors}

    def call(inputs: list, reference: list, config: str, wanted: Sequence[str]) -> Any:
        arguments: Dict[str, Any] = {}
        if takes_reference:
            arguments["reference"] = arrays(typed_outputs(op, reference))
        given = arrays(inputs)
        try:
            made = kernel(given, json.loads(config), **arguments)
        except (Unsupported, NotImplementedError) as error:
            return "unsupported", str(error)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"
            return "crashed", f"{type(error).__name__}: {error} ({place})"
        except BaseException as error:
            # pytest.skip in a kernel means that it does not take the config.
            if type(error).__name__ == "Skipped":
                return "unsupported", str(error)
            raise
        if not isinstance(made, Mapping):
            made = {wanted[0]: made}
        rules = {rule[0]: rule[1] for rule in _core.tensors(op, config, _local_experts(given))}
        try:
            return [
                (name, stored(op, "out", name, value, rules.get(f"out.{name}", ())))
                for name, value in made.items()
            ]
        except (ValueError, TypeError) as error:
            return "unreadable", str(error)

    return call


def _local_experts(inputs: Mapping[str, Any]) -> Optional[int]:
    for name in ("w13_qweight", "w13_weight"):
        if name in inputs:
            return int(inputs[name].shape[0])
    return None


def run_fuzz(
    kernel: Callable[..., Any],
    op: str,
    where: str = "",
    *,
    cases: int = 200,
    seed: int = 0,
    seconds: Optional[float] = None,
    outputs: Sequence[str] = (),
    config: Optional[Mapping[str, Any]] = None,
    folder: Optional[str] = None,
    shard: Shard = "1/1",
    device: Optional[Any] = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    findings: int = 8,
    convention: Optional[str] = None,
    class_: Optional[Class] = None,
) -> FuzzSummary:
    """Runs ``kernel(inputs, config)`` on generated cases of ``op`` and returns what was found.

    ``where`` filters configs: ``weight_type=uint4b8|uint8b128,dtype=bfloat16``. ``outputs`` names the
    outputs that the kernel returns; by default ``y``, or all outputs of an operation without one. A
    kernel with a parameter ``reference`` is given the reference's other outputs, such as packed
    weights. ``config`` sets keys in every case. Cases kept in ``folder`` run first, and each finding
    is kept there. ``shard="2/4"`` runs the second of four parts; each case belongs to one part, and
    ``merge`` puts the parts together.

    With ``device``, such as ``"cuda"``, the kernel is given torch tensors on it, else numpy arrays.
    ``deterministic`` also runs each case twice and compares the bits; ``batch_invariant`` compares the
    last row's bits with those that it has alone. The run ends after ``findings`` distinct findings.

    ``convention`` and ``class_`` state how the kernel computes products and layers, as ``check`` takes
    them. Without them every known convention passes, and sums in f32 in any order.
    """
    part = shard if isinstance(shard, str) else f"{shard[0]}/{shard[1]}"
    text = _core.fuzz(
        _adapted(kernel, op, device), op, where, seed, cases, seconds, list(outputs),
        dumps(config or {}), folder, part, deterministic, batch_invariant,
        findings, stated(convention, class_),
    )  # fmt: skip
    return FuzzSummary._of(text, convention, class_)


def _set_or(option: str, stated: Any) -> Any:
    """The value of an option of pytest, else the stated one."""
    return stated if _settings[option] is None else _settings[option]


def fuzz(
    op: str,
    where: str = "",
    *,
    cases: int = 200,
    seed: int = 0,
    seconds: Optional[float] = None,
    outputs: Sequence[str] = (),
    config: Optional[Mapping[str, Any]] = None,
    shard: Shard = "1/1",
    device: Optional[Any] = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    findings: int = 8,
    convention: Optional[str] = None,
    class_: Optional[Class] = None,
) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Makes a test of a kernel: ``@marlinspike.fuzz(op="linear", where="weight_type=uint4b8")``.

    The test fails with the cause and the smallest failing case, which is kept under ``.marlinspike``
    and runs first the next time. ``summary.json`` next to it is a summary for ``merge``. Arguments are
    those of ``run_fuzz``; pytest's options ``--marlinspike-seed``, ``--marlinspike-cases``,
    ``--marlinspike-seconds``, ``--marlinspike-findings`` and ``--marlinspike-shard`` override them.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[[], None]:
        def test() -> None:
            # pytest shows the finding and not this function.
            __tracebackhide__ = True
            used = _set_or("seed", seed)
            count = _set_or("cases", cases)
            part = _set_or("shard", shard)
            root = _settings["root"] or os.getcwd()
            folder = os.path.join(root, FOLDER, f"{kernel.__module__}.{kernel.__qualname__}")
            summary = run_fuzz(
                kernel, op, where, cases=count, seed=used, seconds=_set_or("seconds", seconds),
                outputs=outputs, config=config, folder=folder, shard=part, device=device,
                deterministic=deterministic, batch_invariant=batch_invariant,
                findings=_set_or("findings", findings), convention=convention, class_=class_,
            )  # fmt: skip
            os.makedirs(folder, exist_ok=True)
            summary.write(os.path.join(folder, "summary.json"))
            if summary.ok:
                return
            message = str(summary)
            if not summary.passed and not summary.failed and not summary.regressions:
                message += "\nno case was judged: the kernel skipped all, or their outputs cannot be judged"
            again = f"pytest -k {kernel.__name__} --marlinspike-seed {used:#x} --marlinspike-cases {count}"
            if summary.shard != "1/1":
                again += f" --marlinspike-shard {summary.shard}"
            raise FuzzFailure(f"{message}\nagain: {again}", summary)

        # No `__wrapped__`: pytest would take the kernel's parameters for fixtures.
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, attribute, getattr(kernel, attribute))
        test.kernel = kernel  # type: ignore[attr-defined]
        return test

    return decorate


@dataclass(frozen=True)
class MergedFinding:
    """A finding of one run or of several."""

    signature: str
    #: Short name of the cause; None where no known mistake explains the failure.
    cause: Optional[str]
    explanation: Optional[str]
    #: The minimal case's config, one ``key=value`` per key.
    minimal: List[str]
    #: The first run that found it, and its first failing case.
    seed: int
    index: int
    #: Number of runs that found it.
    runs: int


@dataclass(frozen=True)
class MergedSummary:
    """The runs of one operation, added up."""

    op: str
    #: Seed, filter and shard of each run.
    runs: List[Dict[str, Any]]
    #: Shards without a summary: ``2/4 of seed 0x1``.
    missing: List[str]
    passed: int
    failed: int
    skipped: int
    unchecked: int
    unchecked_reason: Optional[str]
    findings: List[MergedFinding]
    #: Kept cases that failed again.
    regressions: List[str]
    coverage: Dict[str, Dict[str, int]]
    #: Whether cases were judged, none failed or was left unchecked, and no shard is missing.
    ok: bool

    @classmethod
    def _of(cls, raw: Dict[str, Any]) -> "MergedSummary":
        findings = []
        for found in raw["findings"]:
            cause = found["cause"] or {}
            same = {key: found[key] for key in ("signature", "minimal", "seed", "index", "runs")}
            findings.append(MergedFinding(cause=cause.get("id"), explanation=cause.get("text"), **same))
        same = ("op", "runs", "passed", "failed", "skipped", "unchecked", "unchecked_reason")
        return cls(
            **{key: raw[key] for key in same},
            missing=[f"{lost['shard']} of seed {lost['seed']:#x}" for lost in raw["missing"]],
            findings=findings,
            regressions=raw["kept_that_fail"],
            coverage=raw["coverage"]["axes"],
            ok=raw["success"],
        )

    def __str__(self) -> str:
        lines = [
            f"{self.op}: {len(self.runs)} runs, {self.passed} passed, {self.failed} failed, "
            f"{self.unchecked} unchecked, {self.skipped} skipped"
        ]
        lines += [f"missing: shard {text}" for text in self.missing]
        for found in self.findings:
            lines.append(f"{found.signature} ({found.runs} runs): {' '.join(found.minimal)}")
        return "\n".join(lines)


def merge(
    summaries: Iterable[Union[str, "os.PathLike[str]"]],
    regressions: Optional[Union[str, "os.PathLike[str]"]] = None,
) -> List[MergedSummary]:
    """Merges summary files of several machines into one summary for each operation.

    ``regressions`` is a folder to which the failing cases are copied, without duplicates; a case is
    looked for next to its summary, then at its path from the summary's folder.
    """
    folder = None if regressions is None else os.fspath(regressions)
    text = _core.merge([os.fspath(path) for path in summaries], folder)
    return [MergedSummary._of(raw) for raw in json.loads(text)["campaigns"]]
