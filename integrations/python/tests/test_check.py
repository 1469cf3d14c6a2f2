"""Verdicts on kernels written with numpy: the right one passes, planted bugs are caught and named."""

import threading
import time

import conftest
import numpy as np
import pytest

import marlinspike


def test_a_right_kernel_passes(linear):
    outputs = {"y": linear.product(), "marlin_qweight": conftest.marlin_pack(linear.codes, 4)}
    report = marlinspike.assert_correct("linear", linear.inputs, outputs, linear.config)
    assert report.passed and {o.name for o in report.outputs} == {"y", "marlin_qweight"}
    assert report["y"].max_error_over_bound <= 1
    assert report["y"].power["rejects"]["zeros"] is True


def test_wrong_nibble_order_is_named(linear):
    swapped = linear.codes.reshape(-1, 2, linear.shape[1])[:, ::-1].reshape(linear.codes.shape)
    outputs = {"marlin_qweight": conftest.marlin_pack(swapped, 4), "y": linear.product(swapped)}
    with pytest.raises(AssertionError) as raised:
        marlinspike.assert_correct("linear", linear.inputs, outputs, linear.config)
    report = marlinspike.check("linear", linear.inputs, outputs, linear.config)
    assert report["marlin_qweight"].cause == "nibble-order"
    assert report["y"].cause == "nibbles-swapped" and report["y"].strength == "explains"
    assert "nibble-order" in str(raised.value) and "first:" in str(raised.value)


def test_forgotten_scale_permutation_is_named(linear):
    outputs = {"marlin_scales": linear.scales}
    report = marlinspike.check("linear", linear.inputs, outputs, linear.config)
    assert report.verdict == "fail" and "permut" in report["marlin_scales"].cause


def test_zero_point_off_by_one_is_named(linear):
    report = marlinspike.check("linear", linear.inputs, {"y": linear.product(zero=9)}, linear.config)
    assert report.verdict == "fail" and report.causes == ["zero-off-by-one"]


def test_zeros_are_rejected_and_one_bit_counts(linear):
    zeros = np.zeros(linear.shape[:2], np.float16)
    report = marlinspike.check("linear", linear.inputs, {"y": zeros}, linear.config)
    assert report.causes == ["all-zeros"]
    packed = conftest.marlin_pack(linear.codes, 4)
    packed[3, 17] ^= 1 << 9
    report = marlinspike.check("linear", linear.inputs, {"marlin_qweight": packed}, linear.config)
    assert report["marlin_qweight"].mismatches == 1


def test_unchecked_outputs_do_not_pass(linear):
    inputs = dict(linear.inputs, x=np.zeros_like(linear.x))
    outputs = {"y": np.zeros(linear.shape[:2], np.float16)}
    report = marlinspike.check("linear", inputs, outputs, linear.config)
    if report.verdict == "unchecked":
        with pytest.raises(AssertionError):
            marlinspike.assert_correct("linear", inputs, outputs, linear.config)
    nothing = marlinspike.check("linear", linear.inputs, {}, linear.config)
    assert nothing.verdict == "unchecked" and not nothing.passed
    with pytest.raises(AssertionError):
        marlinspike.assert_correct("linear", linear.inputs, {}, linear.config, allow_unchecked=True)


def test_errors_have_the_text_of_the_program(linear):
    with pytest.raises(marlinspike.Error, match="`size_q` is unknown|size_q.*did you mean"):
        marlinspike.check("linear", linear.inputs, {}, dict(linear.config, size_q=1))
    with pytest.raises(marlinspike.Error, match=r"in\.scales.*missing"):
        inputs = {k: v for k, v in linear.inputs.items() if k != "scales"}
        marlinspike.check("linear", inputs, {}, linear.config)
    with pytest.raises(marlinspike.Error, match=r"in\.x.*found dtype F32, expected F16"):
        inputs = dict(linear.inputs, x=linear.x.astype(np.float32))
        marlinspike.check("linear", inputs, {}, linear.config)
    with pytest.raises(marlinspike.Error, match="found lineer, expected one of linear"):
        marlinspike.check("lineer", linear.inputs, {}, linear.config)
    with pytest.raises(marlinspike.Error, match="complex64"):
        marlinspike.check("linear", dict(linear.inputs, x=linear.x.astype(np.complex64)), {}, linear.config)
    assert issubclass(marlinspike.Error, ValueError)


def test_report_in_a_notebook(linear):
    report = marlinspike.check("linear", linear.inputs, {"y": linear.product(zero=9)}, linear.config)
    page = report._repr_html_()
    assert "zero-off-by-one" in page and page.count("<tr>") == 2 and "fail" in page
    named = marlinspike.Case("linear", linear.config, linear.inputs, {"y": linear.product()}, "<b>")
    assert "<b>\n" not in named.check()._repr_html_() and "&lt;b&gt;" in named.check()._repr_html_()


def test_other_threads_run_meanwhile(rng):
    big = conftest.Linear(rng, size_m=64, size_n=1024, size_k=1024)
    done = threading.Event()

    def judge():
        marlinspike.check("linear", big.inputs, {"y": big.product()}, big.config)
        done.set()

    start = time.perf_counter()
    thread = threading.Thread(target=judge)
    thread.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.001)
    thread.join()
    # With the GIL held, this thread would run before and after the check alone.
    assert turns > 20 * (time.perf_counter() - start)
