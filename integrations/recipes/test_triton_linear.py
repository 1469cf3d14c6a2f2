"""A fuzz test of a Triton kernel: TRITON_INTERPRET=1 pytest integrations/recipes/test_triton_linear.py"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton_linear  # noqa: E402

import marlinspike  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@marlinspike.fuzz(op="linear", where=triton_linear.WHERE, device=DEVICE, cases=60)
def test_triton_linear(inputs, config):
    return triton_linear.kernel(inputs, config)
