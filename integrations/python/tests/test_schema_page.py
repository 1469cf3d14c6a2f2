"""A case of every operation from the page "Case schema" alone, with the package and without it."""

import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

import marlinspike

PAGE = (pathlib.Path(__file__).parents[3] / "docs/src/reference/schema.md").read_text()
SECTIONS = {part.split("`", 1)[0]: part for part in PAGE.split("\n## `")[1:]}


def python_block(text):
    return text.split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def example(tmp_path, request, monkeypatch):
    """An example, its variables after it ran, and the file that it wrote."""
    (tmp_path / "case_file.py").write_text(python_block(PAGE))
    program = python_block(SECTIONS[request.param])
    (tmp_path / "example.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "case_file", raising=False)
    variables = runpy.run_path("example.py")
    return request.param, program, variables, tmp_path / "case.safetensors"


def test_the_page_has_every_operation():
    assert set(SECTIONS) == set(marlinspike.operations())


@pytest.mark.parametrize("example", marlinspike.operations(), indirect=True)
def test_an_example_becomes_a_checked_case(example, tmp_path):
    op, program, variables, path = example
    read = marlinspike.Case.read(path)
    assert read.op == op
    # The page's config and inputs, as they are, in the package.
    case = marlinspike.Case(op, variables["config"], variables["inputs"])
    case.write(tmp_path / "mine.safetensors")
    mine = marlinspike.Case.read(tmp_path / "mine.safetensors")
    assert mine.config == read.config and set(mine.inputs) == set(read.inputs)
    for name, value in read.inputs.items():
        assert mine.inputs[name].tobytes() == value.tobytes(), name
    # The page names the outputs that a kernel can add, with their types and shapes.
    listed = re.findall(r'^#   "(\w+)": (\w+) \[(.*)\]$', program, re.MULTILINE)
    outputs = case.reference()
    assert {name for name, _, _ in listed} == set(outputs)
    for name, dtype, shape in listed:
        found = marlinspike._arrays.typed(outputs[name])
        assert found[0] == dtype or (dtype, found[0]) == ("F8_E4M3", "F8_E4M3FNUZ"), name
        sizes = shape.split(", ")
        assert len(sizes) == len(found[1]), name
        assert all(size in ("any", str(n)) for size, n in zip(sizes, found[1])), (name, found)
    # With those outputs the case is checked; with one bit of another value it fails.
    case.outputs = outputs
    report = case.check()
    verdicts = [output.verdict for output in report.outputs]
    assert len(verdicts) >= len(listed) and "fail" not in verdicts and "pass" in verdicts, report
    for output in report.outputs:
        if output.verdict != "pass" or not outputs[output.name].size:
            continue
        wrong = np.ascontiguousarray(outputs[output.name]).copy()
        wrong.reshape(-1).view(np.uint8)[-1] ^= 0x40
        case.outputs = dict(outputs, **{output.name: wrong})
        try:
            assert case.check()[output.name].verdict == "fail", output.name
        except marlinspike.Error as error:
            # An expert out of range is refused.
            assert f"out.{output.name}" in str(error)
