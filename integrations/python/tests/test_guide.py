"""The examples of the guide "Test a kernel from Python" run as they are printed: their kernel has a bug, which each of
them finds, and passes without it."""

import pathlib

import pytest

import marlinspike
from marlinspike import _fuzz

GUIDE = (pathlib.Path(__file__).parents[3] / "docs/src/guides/python.md").read_text()
BLOCKS = [block.split("```", 1)[0] for block in GUIDE.split("```python\n")[1:]]
BUG, RIGHT = "- 9) * scales", "- 8) * scales"


def block(text):
    """The one block that holds this text."""
    [found] = [block for block in BLOCKS if text in block]
    return found


@pytest.fixture
def names(monkeypatch, tmp_path):
    """The names of the guide's kernel, right or wrong, and of the blocks that hold these texts."""
    monkeypatch.setitem(_fuzz._settings, "root", str(tmp_path))
    monkeypatch.setitem(_fuzz._settings, "cases", 12)
    monkeypatch.setitem(_fuzz._settings, "findings", 1)

    def run(zero, *texts):
        source = block("def my_kernel(")
        assert source.count(BUG) == 1
        made = {"__name__": "test_mine"}
        exec("".join([source.replace(BUG, zero), *map(block, texts)]), made)  # noqa: S102
        return made

    return run


def test_the_first_example(names):
    with pytest.raises(marlinspike.FuzzFailure) as failure:
        names(BUG)["test_my_kernel"]()
    assert [finding.cause for finding in failure.value.summary.findings] == ["zero-off-by-one"]
    names(RIGHT)["test_my_kernel"]()


def test_one_case(names):
    with pytest.raises(AssertionError, match="zero-off-by-one"):
        names(BUG, "def test_one(")["test_one"]()
    names(RIGHT, "def test_one(")["test_one"]()


def test_the_strategy(names):
    pytest.importorskip("hypothesis")
    text = "strategies.cases("
    with pytest.raises(AssertionError):
        names(BUG, text)["test_my_kernel"]()
    names(RIGHT, text)["test_my_kernel"]()


def test_the_class(names):
    pytest.importorskip("hypothesis")
    made = names(RIGHT, "strategies.cases(", "SHORT = {")
    summary = marlinspike.run_fuzz(
        lambda inputs, config: made["my_kernel"](inputs["x"], inputs["qweight"], inputs["scales"]),
        "linear", made["WHERE"], cases=4, class_=made["SHORT"],
    )  # fmt: skip
    assert summary.passed and not summary.failed, summary
