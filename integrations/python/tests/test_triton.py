"""The Triton recipe: on a GPU, or by Triton's interpreter."""

import os
import pathlib
import sys

import pytest

import marlinspike

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))
import triton_linear  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(kernel, where=triton_linear.WHERE, cases=12):
    return marlinspike.run_fuzz(kernel, "linear", where, cases=cases, seed=3, device=DEVICE)


def test_the_kernel_passes():
    summary = run(triton_linear.kernel)
    assert summary.ok and summary.passed == 12, summary


def test_a_forgotten_g_idx_is_named():
    def kernel(inputs, config):
        return triton_linear.kernel({k: v for k, v in inputs.items() if k != "g_idx"}, config)

    summary = run(kernel, triton_linear.WHERE + ",desc_act=true,tensor_parallel.size=null", cases=6)
    assert [f.cause for f in summary.findings] == ["act-order-ignored"], summary
