"""Verdicts."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional


@dataclass(frozen=True, repr=False)
class OutputReport:
    """The verdict on one output."""

    name: str
    #: ``pass``, ``fail`` or ``unchecked``.
    verdict: str
    elements: int
    mismatches: int
    equal_bits: Optional[float]
    max_ulp: Optional[float]
    #: Largest error over its derived bound; above 1 the output is proven wrong.
    max_error_over_bound: Optional[float]
    first_mismatch: Optional[Dict[str, Any]]
    #: Short name of the known mistake, or of the place, that explains the mismatches.
    cause: Optional[str]
    #: The cause in a sentence.
    explanation: Optional[str]
    #: ``explains``, ``consistent`` or ``place``.
    strength: Optional[str]
    note: Optional[str]
    #: Which wrong answers the verdict would have rejected.
    power: Optional[Dict[str, Any]]
    conventions: List[str] = field(default_factory=list)

    @classmethod
    def _of(cls, raw: Dict[str, Any]) -> "OutputReport":
        diagnosis = raw.get("diagnosis") or {}
        same = ("name", "verdict", "elements", "mismatches", "equal_bits", "max_ulp")
        rest = ("max_error_over_bound", "first_mismatch", "note", "power", "conventions")
        return cls(
            **{key: raw[key] for key in same + rest},
            cause=diagnosis.get("id"),
            explanation=diagnosis.get("text"),
            strength=diagnosis.get("strength"),
        )

    def __str__(self) -> str:
        line = f"{self.verdict:<9} {self.name}: {self.mismatches} of {self.elements} values wrong"
        if self.verdict == "pass":
            line = f"{self.verdict:<9} {self.name}: {self.elements} values"
        if self.max_error_over_bound is not None:
            line += f", largest error / bound {self.max_error_over_bound:.3g}"
        if self.first_mismatch:
            line += f"\n          first: {_first(self.first_mismatch)}"
        if self.cause:
            line += f"\n          cause: {self.cause}: {self.explanation}"
        if self.note:
            line += f"\n          note: {self.note}"
        if self.power and self.verdict != "fail":
            line += f"\n          power: {_power(self.power)}"
        return line

    __repr__ = __str__


def _first(mismatch: Dict[str, Any]) -> str:
    shown = [f"{key} {value}" for key, value in mismatch.items() if value not in (None, [], "")]
    return ", ".join(shown)


def _power(power: Dict[str, Any]) -> str:
    rejects = power.get("rejects", {})
    names = [name.replace("_", " ") for name, rejected in rejects.items() if rejected is True]
    words = [f"rejects {', '.join(names)}"] if names else []
    for key, value in power.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            words.append(f"{key.replace('_', ' ')} {value:.3g}")
    return "; ".join(words) or "none"


@dataclass(frozen=True, repr=False)
class Report:
    """The verdict on a case."""

    op: str
    name: str
    #: ``pass``, ``fail`` or ``unchecked``.
    verdict: str
    outputs: List[OutputReport]

    @classmethod
    def _of(cls, text: str) -> "Report":
        raw = json.loads(text)
        outputs = [OutputReport._of(output) for output in raw["outputs"]]
        return cls(raw["op"], raw["name"], raw["verdict"], outputs)

    @property
    def passed(self) -> bool:
        """Whether every output was checked and is right."""
        return self.verdict == "pass"

    @property
    def causes(self) -> List[str]:
        """The causes of all failures."""
        return [o.cause for o in self.outputs if o.verdict == "fail" and o.cause]

    def __getitem__(self, name: str) -> OutputReport:
        """The report on one output."""
        for output in self.outputs:
            if output.name == name:
                return output
        raise KeyError(name)

    def __str__(self) -> str:
        title = f"{self.op} {self.name}".strip()
        return "\n".join([f"{self.verdict}: {title}"] + [str(output) for output in self.outputs])

    # What `assert report.passed, report` prints; pytest without -v shortens it to 240 characters.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        colors = {"pass": "#1a7f37", "fail": "#cf222e", "unchecked": "#9a6700"}
        rows = []
        for o in self.outputs:
            why = o.explanation or o.note or ""
            bound = "" if o.max_error_over_bound is None else f"{o.max_error_over_bound:.3g}"
            first = _first(o.first_mismatch) if o.first_mismatch else ""
            cells = [o.name, f"{o.mismatches} / {o.elements}", bound, first, o.cause or "", why]
            shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            verdict = f'<td style="color:{colors[o.verdict]}"><b>{o.verdict}</b></td>'
            rows.append(f"<tr>{verdict}{shown}</tr>")
        head = "".join(
            f"<th>{text}</th>"
            for text in ("", "output", "wrong", "error / bound", "first mismatch", "cause", "explanation")
        )
        title = html.escape(f"{self.op} {self.name}".strip())
        return (
            f'<p><b style="color:{colors[self.verdict]}">{self.verdict}</b> {title}</p>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )
