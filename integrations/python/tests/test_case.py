"""Case files."""

import pathlib

import conftest
import numpy as np
import pytest

import marlinspike

GOLDEN = pathlib.Path(__file__).parents[3] / "golden" / "data" / "cases"


def test_write_then_read(linear, tmp_path):
    outputs = {"y": linear.product()}
    case = marlinspike.Case("linear", linear.config, linear.inputs, outputs, "mine", "numpy")
    path = tmp_path / "case.safetensors"
    case.write(path)
    read = marlinspike.Case.read(path)
    assert (read.op, read.name, read.provenance) == ("linear", "mine", "numpy")
    assert {k: read.config[k] for k in linear.config} == linear.config
    for name, value in linear.inputs.items():
        assert np.array_equal(read.inputs[name], value) and read.inputs[name].dtype == value.dtype
    assert read.check().passed
    assert list(tmp_path.iterdir()) == [path]
    case.inputs["x"] = linear.x[:2]
    with pytest.raises(marlinspike.Error, match=r"in\.x"):
        case.write(path)
    assert marlinspike.Case.read(path).check().passed


def test_safetensors_reads_the_file(linear, tmp_path):
    from safetensors.numpy import load_file

    path = tmp_path / "case.safetensors"
    marlinspike.Case("linear", linear.config, linear.inputs, {"y": linear.product()}).write(path)
    assert np.array_equal(load_file(path)["in.qweight"], linear.inputs["qweight"])


@pytest.mark.parametrize("op", marlinspike.operations())
def test_generated_cases_of_every_operation(op):
    case = marlinspike.Case.draw(op, seed=3, index=1)
    assert case.op == op and case.inputs
    again = marlinspike.Case.draw(op, seed=3, index=1)
    assert all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(case.inputs.values(), again.inputs.values()))
    if case.outputs:
        report = case.check()
        assert not [o for o in report.outputs if o.verdict == "fail"], report


def test_golden_cases_of_vllm():
    files = sorted(GOLDEN.glob("linear-*u4b8*.safetensors"))[:4] + sorted(GOLDEN.glob("moe-*.safetensors"))[:1]
    assert len(files) >= 2
    for path in files:
        report = marlinspike.Case.read(path).check()
        assert report.passed, report


def test_reference_outputs_are_those_of_generated_cases():
    case = marlinspike.Case.draw("moe", seed=1, index=0)
    made = case.reference()
    assert set(made) == set(case.outputs)
    for name, value in made.items():
        assert np.array_equal(value.view(np.uint8), case.outputs[name].view(np.uint8)), name


def test_schema_names_keys_and_tensors():
    schema = marlinspike.schema("linear")
    config = schema["properties"]["config"]
    assert "size_k" in config["required"] and "schedule" in config["properties"]
    assert "qweight" in schema["properties"]["inputs"]["properties"]
