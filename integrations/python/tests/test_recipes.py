"""The recipes of the repository, and merging from the command line."""

import pathlib
import subprocess
import sys

import pytest

import marlinspike
from marlinspike.__main__ import main as command

RECIPES = pathlib.Path(__file__).resolve().parents[2] / "recipes"

# Processes import these modules by name.
sys.path.insert(0, str(RECIPES))
import numpy_linear  # noqa: E402
import ray_campaign  # noqa: E402

WRONG = """
import importlib.util
import os
spec = importlib.util.spec_from_file_location("right", {path!r})
right = importlib.util.module_from_spec(spec)
spec.loader.exec_module(right)

def kernel(inputs, config):
    # One scale too large by a step, in one configuration only.
    scales = inputs["scales"].copy()
    scales.view("uint16")[0, 0] += 1
    return right.kernel({{**inputs, "scales": scales}}, config)

def dies(inputs, config):
    os._exit(7)
"""


def campaign(kernel, tmp_path, *more):
    words = [kernel, "--op", "linear", "--where", numpy_linear.WHERE, "--shards", "3", "--cases", "9"]
    return ray_campaign.main([*words, "--local", "--regressions", str(tmp_path / "kept"), *more])


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(WRONG.format(path=str(RECIPES / "numpy_linear.py")))
    return str(path)


def test_a_right_kernel_passes_in_shards(tmp_path, capsys):
    assert campaign(f"{RECIPES}/numpy_linear.py:kernel", tmp_path) == 0
    assert "3 runs, 9 passed, 0 failed" in capsys.readouterr().out


def test_failing_cases_of_all_shards_are_kept(tmp_path, wrong, capsys):
    assert campaign(f"{wrong}:kernel", tmp_path) == 1
    assert "y: " in capsys.readouterr().out
    kept = list((tmp_path / "kept").glob("*.safetensors"))
    assert kept and marlinspike.Case.read(str(kept[0])).check().verdict == "fail"
    # They run first the next time, on one shard: no drawn case is needed.
    assert campaign(f"{wrong}:kernel", tmp_path, "--cases", "0") == 1
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == len(kept)


def test_a_worker_that_dies_is_a_missing_shard(tmp_path, wrong, capsys):
    assert campaign(f"{wrong}:dies", tmp_path) == 1
    assert "shard 1/3: BrokenProcessPool" in capsys.readouterr().err


def test_the_example_kernel_as_a_program(tmp_path):
    seen = []

    def kernel(inputs, config):
        seen.append((inputs, config))
        return numpy_linear.kernel(inputs, config)

    assert marlinspike.run_fuzz(kernel, "linear", numpy_linear.WHERE, cases=1).ok
    inputs, config = seen[0]
    marlinspike.Case("linear", config, inputs).write(tmp_path / "in.safetensors")
    words = [sys.executable, str(RECIPES / "numpy_linear.py"), "in.safetensors", "out.safetensors"]
    subprocess.run(words, check=True, cwd=tmp_path)
    data = (tmp_path / "out.safetensors").read_bytes()
    assert data.endswith(numpy_linear.kernel(inputs, config)["y"].tobytes()) and b'"y"' in data


def test_merging_from_the_command_line(tmp_path, capsys):
    kernel = numpy_linear.kernel
    where = numpy_linear.WHERE
    for i in (1, 2):
        summary = marlinspike.run_fuzz(kernel, "linear", where, cases=4, shard=(i, 2))
        summary.write(tmp_path / f"{i}.json")
    both = [str(tmp_path / "1.json"), str(tmp_path / "2.json")]
    assert command(["merge", *both]) == 0
    assert "2 runs, 4 passed" in capsys.readouterr().out
    assert command(["merge", both[0]]) == 1
    assert "missing: shard 2/2" in capsys.readouterr().out
    assert command(["merge", both[0], both[0]]) == 2
    assert "1/2" in capsys.readouterr().err
