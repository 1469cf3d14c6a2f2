"""What a new user writes first: the README's snippet, numpy numbers in configs, verdicts and cases in messages."""

import enum
import re
import types
from pathlib import Path

import marlinspike
import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"


class Dtype(str, enum.Enum):
    HALF = "float16"


CONFIG = {
    "checkpoint_format": "gptq",
    "weight_type": "uint4b8",
    "dtype": Dtype.HALF,
    "group_size": np.int64(64),
    "desc_act": np.bool_(False),
    "size_m": np.int32(3),
    "size_n": 128,
    "size_k": np.uint16(256),
}


def kernel(x, qweight, scales, zero=8):
    """An int4 product in numpy, with sums in another order than the canonical schedule's."""
    fields = [qweight.view(np.uint32) >> np.uint32(4 * i) & np.uint32(15) for i in range(8)]
    codes = np.stack(fields, axis=1).reshape(-1, qweight.shape[1])
    groups = np.arange(len(codes)) * len(scales) // len(codes)
    weight = (codes.astype(np.float64) - zero) * scales[groups].astype(np.float64)
    return (x.astype(np.float64) @ weight).astype(np.float16)


def test_the_first_snippet_of_the_readme_runs():
    snippet = re.search("```python\n(.*?)```", README.read_text(), re.S).group(1)
    module = types.ModuleType("snippet")
    module.my_kernel = kernel
    exec(snippet, module.__dict__)
    module.test_my_kernel()
    module.my_kernel = lambda x, qweight, scales: kernel(x, qweight, scales, zero=9)
    with pytest.raises(AssertionError, match="zero-off-by-one"):
        module.test_my_kernel()


def test_a_draw_declares_no_schedule_unless_asked():
    for op in marlinspike.operations():
        drawn = marlinspike.Case.draw(op, seed=5).config
        assert all(value is None for key, value in drawn.items() if key.startswith("schedule")), op
    case = marlinspike.Case.draw("linear", seed=1, config=CONFIG)
    assert case.check()["y"].verdict == "pass"
    case.outputs["y"] = kernel(**case.inputs)
    assert case.check().passed, str(case.check())
    asked = marlinspike.Case.draw("linear", seed=1, config=CONFIG, schedule=True)
    assert asked.config["schedule"] == "canonical"
    stated = marlinspike.Case.draw("linear", seed=1, config={**CONFIG, "schedule": "canonical"})
    assert stated.config["schedule"] == "canonical"
    # Another order of additions has other bits.
    for declared in (asked, stated):
        assert declared.check().passed
        declared.outputs["y"] = kernel(**declared.inputs)
        assert not declared.check().passed


def test_configs_take_numbers_and_types_of_numpy():
    case = marlinspike.Case.draw("linear", config={**CONFIG, "dtype": np.float16})
    assert (case.config["dtype"], case.config["size_k"]) == ("float16", 256)
    config = {**CONFIG, "size_m": np.int64(len(case.inputs["x"]))}
    report = marlinspike.check("linear", case.inputs, {"y": kernel(**case.inputs)}, config)
    assert report.passed, str(report)
    with pytest.raises(marlinspike.Error, match="config: `size_k`: found a value of type builtins.object"):
        marlinspike.check("linear", case.inputs, {}, {**CONFIG, "size_k": object()})
    with pytest.raises(marlinspike.Error, match="config: found str"):
        marlinspike.check("linear", case.inputs, {}, "size_k=256")


def test_a_report_prints_its_cause():
    case = marlinspike.Case.draw("linear", config=CONFIG)
    report = marlinspike.check("linear", case.inputs, {"y": kernel(**case.inputs, zero=9)}, case.config)
    assert repr(report) == str(report) and "zero-off-by-one" in repr(report)
    assert repr(report["y"]) == str(report["y"])


def test_a_case_prints_no_values():
    case = marlinspike.Case.draw("linear", config=CONFIG)
    text = repr(case)
    assert "qweight: int32[32, 128]" in text and "scales: float16[4, 128]" in text
    assert len(text) < 1000 and "array" not in text


def test_upstreams_names_are_operations():
    case = marlinspike.Case.draw("gptq_marlin_gemm", config=CONFIG)
    assert case.op == "linear"
    with pytest.raises(marlinspike.Error, match="found linaer, expected one of linear"):
        marlinspike.Case.draw("linaer")


def test_the_package_has_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", marlinspike.__version__)


def test_files_of_another_kind_are_recognized(tmp_path):
    np.savez(tmp_path / "case.npz", y=np.zeros(3))
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for name, kind in (("case.npz", "numpy archive"), ("pointer", "pointer of Git LFS")):
        with pytest.raises(marlinspike.Error, match=kind):
            marlinspike.Case.read(tmp_path / name)
