"""Kernels written with numpy under the fuzzing kit: the right ones pass, planted bugs are caught,
named and shrunk."""

import sys

import conftest
import numpy as np
import pytest

import marlinspike

WHERE = (
    "checkpoint_format=gptq,weight_type=uint4b8,dtype=float16,input_dtype=null,desc_act=false,"
    "has_bias=false,tensor_parallel.size=null"
)
LAYOUT = WHERE


def unpack(qweight):
    words = qweight.view(np.uint32)
    fields = [(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)]
    return np.stack(fields, axis=1).reshape(-1, words.shape[1]).astype(np.int64)


def product(inputs, config, zero=8, order=slice(None)):
    codes = unpack(inputs["qweight"])
    codes = codes.reshape(-1, 2, codes.shape[1])[:, order].reshape(codes.shape)
    scales = inputs["scales"].astype(np.float64)
    w = (codes - zero) * np.repeat(scales, config["size_k"] // len(scales), axis=0)
    with np.errstate(over="ignore"):
        return {"y": (inputs["x"].astype(np.float64) @ w).astype(np.float16)}


def run(kernel, cases=24, where=WHERE, **more):
    return marlinspike.run_fuzz(kernel, "linear", where, cases=cases, seed=5, **more)


def size(finding, key):
    return next(int(p.split("=")[1]) for p in finding.minimal if p.startswith(f"{key}="))


def test_a_right_kernel_passes():
    summary = run(product)
    assert summary.ok and summary.passed > 12 and summary.failed == 0, summary
    assert len(summary.coverage["group_size"]) > 2


def widened(bits):
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values):
    """bfloat16 bits of finite values, to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.filterwarnings("ignore:.*is bfloat16")
def test_a_right_bfloat16_kernel_passes_and_nothing_is_left_unchecked():
    def kernel(inputs, config):
        codes, scales = unpack(inputs["qweight"]), widened(inputs["scales"])
        w = (codes - 8) * np.repeat(scales, config["size_k"] // len(scales), axis=0)
        return {"y": rounded(widened(inputs["x"]) @ w)}

    # Scales of every size are among them: with larger ones, partial sums may overflow.
    for seed in (0, 2, 5):
        where = WHERE.replace("float16", "bfloat16")
        summary = marlinspike.run_fuzz(kernel, "linear", where, cases=40, seed=seed)
        assert summary.ok and summary.passed == 40, summary


def test_zero_point_off_by_one():
    summary = run(lambda inputs, config: product(inputs, config, zero=9))
    assert [f.cause for f in summary.findings] == ["zero-off-by-one"], summary
    finding = summary.findings[0]
    assert (size(finding, "size_m"), size(finding, "size_n")) == (1, 64), finding
    assert size(finding, "size_k") <= 128


def test_an_exception_is_in_the_finding():
    def kernel(inputs, config):
        raise RuntimeError(f"no tile for {config['size_n']} columns")

    summary = run(kernel, findings=1)
    [finding] = summary.findings
    assert summary.failed == 1 and finding.cause is None
    assert "RuntimeError: no tile for 64 columns (test_fuzz.py:" in str(finding), finding


def test_a_run_ends_after_its_findings():
    def kernel(inputs, config):
        made = product(inputs, config, zero=9)["y"]
        return {"y": np.zeros_like(made) if config["size_n"] > 64 else made}

    assert len(run(kernel).findings) > 1
    summary = run(kernel, findings=1)
    assert len(summary.findings) == 1 and summary.failed < 24


def test_bits_are_announced(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    seen = []

    def kernel(inputs, config):
        seen.append(inputs["x"].dtype)
        raise marlinspike.Unsupported("this is about its inputs")

    with pytest.warns(UserWarning, match="`scales` is bfloat16|`x` is bfloat16"):
        run(kernel, cases=1, where=WHERE.replace("float16", "bfloat16"))
    assert seen == [np.uint16]


def test_a_finding_without_a_cause_says_what_is_wrong():
    def kernel(inputs, config):
        y = product(inputs, config)["y"]
        y[-1, 7] = 3.75
        return y

    [finding] = run(kernel, findings=1).findings
    assert finding.cause is None, finding
    assert "1 of 64 values are wrong, the first at [0, 7]: expected 0x" in finding.wrong[0], finding
    assert finding.wrong[0] in str(finding) and "n 7" in finding.wrong[0]


def test_wrong_nibble_order():
    summary = run(lambda inputs, config: product(inputs, config, order=slice(None, None, -1)))
    assert [f.cause for f in summary.findings] == ["nibbles-swapped"], summary


def test_forgotten_scale_permutation(tmp_path):
    def kernel(inputs, config):
        return {"marlin_scales": inputs["scales"]}

    summary = run(kernel, outputs=["marlin_scales"], folder=str(tmp_path))
    assert len(summary.findings) >= 1 and "permut" in summary.findings[0].cause, summary
    # Nothing smaller shows it: one group of scales, the narrowest matrix.
    assert size(summary.findings[0], "size_n") == 64
    case = summary.findings[0].case()
    assert case.check()["marlin_scales"].verdict == "fail"


def test_failures_are_kept_and_run_first(tmp_path):
    folder = str(tmp_path / "kept")
    wrong = run(lambda inputs, config: product(inputs, config, zero=9), cases=4, folder=folder)
    assert wrong.findings and wrong.findings[0].path.startswith(folder)
    calls = []

    def counted(inputs, config):
        calls.append(inputs["x"].shape[0])
        return product(inputs, config, zero=9)

    again = run(counted, cases=1, folder=folder)
    assert again.regressions and "zero-off-by-one" in again.regressions[0] or again.regressions
    assert calls[0] == 1
    mended = run(product, cases=4, folder=folder)
    assert mended.ok, mended


def test_crashes_and_absent_outputs_are_findings():
    def crashes(inputs, config):
        if config["size_k"] > 128:
            raise IndexError("row 129")
        return product(inputs, config)

    summary = run(crashes)
    assert any("crash" in f.signature for f in summary.findings), summary
    summary = run(lambda inputs, config: {}, cases=2)
    assert summary.findings and not summary.ok
    summary = run(lambda inputs, config: {"y": np.zeros((1, 1), np.float16)}, cases=2)
    assert summary.findings and not summary.ok


def test_unsupported_configs_are_skipped():
    def kernel(inputs, config):
        if config["group_size"] == -1:
            raise marlinspike.Unsupported("no channel-wise scales")
        return product(inputs, config)

    summary = run(kernel)
    assert summary.ok and summary.skipped > 0

    def none(inputs, config):
        raise marlinspike.Unsupported("nothing")

    assert not run(none, cases=3).ok


def test_unchecked_cases_are_no_success():
    def kernel(inputs, config):
        try:
            made = marlinspike.reference("router", inputs, config)
        except marlinspike.Error as error:
            raise marlinspike.Unsupported(str(error)) from error
        return {name: made[name] for name in ("topk_ids", "topk_weights")}

    summary = marlinspike.run_fuzz(kernel, "router", cases=40, seed=7, outputs=["topk_ids", "topk_weights"])
    assert summary.passed and summary.unchecked and not summary.failed, summary
    assert not summary.ok
    assert "unchecked: " in str(summary)


def test_shards_make_up_the_campaign(tmp_path):
    def names(shard):
        seen = []

        def kernel(inputs, config):
            seen.append((tuple(sorted(config.items(), key=str).__repr__()), inputs["x"].tobytes()))
            return product(inputs, config)

        return seen, run(kernel, cases=13, shard=shard)

    whole, all_of_it = names("1/1")
    parts = [names(shard) for shard in ("1/3", (2, 3), "3/3")]
    assert sorted(sum((seen for seen, _ in parts), [])) == sorted(whole)
    assert [summary.passed for _, summary in parts] == [5, 4, 4]
    for i, (_, summary) in enumerate(parts):
        summary.write(tmp_path / f"{i}.json")
    [merged] = marlinspike.merge([tmp_path / f"{i}.json" for i in range(3)])
    assert merged.ok and merged.coverage == all_of_it.coverage and merged.passed == 13
    [merged] = marlinspike.merge([tmp_path / "0.json", tmp_path / "2.json"])
    assert not merged.ok and merged.missing == ["2/3 of seed 0x5"]
    for shard in ("0/3", "4/3", (0, 1), "x"):
        with pytest.raises(marlinspike.Error, match="I from 1 to N"):
            run(product, shard=shard)


def test_regressions_of_several_machines(tmp_path):
    paths = []
    for i in (1, 2):
        folder = tmp_path / str(i)
        wrong = lambda inputs, config: product(inputs, config, zero=9)  # noqa: E731
        summary = run(wrong, cases=4, folder=str(folder), shard=(i, 2))
        summary.write(folder / "summary.json")
        paths.append(folder / "summary.json")
    [merged] = marlinspike.merge(paths, tmp_path / "regressions")
    assert not merged.ok and [(f.cause, f.runs) for f in merged.findings] == [("zero-off-by-one", 2)]
    kept = list((tmp_path / "regressions").iterdir())
    assert kept and all(marlinspike.Case.read(str(path)).check().verdict == "fail" for path in kept)
    assert run(product, cases=1, folder=str(tmp_path / "regressions")).ok


def test_wrong_seconds_are_refused():
    with pytest.raises(marlinspike.Error, match="seconds: found -1"):
        run(product, seconds=-1.0)


def test_an_interrupt_ends_the_run():
    def kernel(inputs, config):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kernel, cases=3)


def test_wrong_filters_are_refused():
    with pytest.raises(marlinspike.Error, match="weight_tipe"):
        run(product, where="weight_tipe=uint4b8")


def test_kernels_may_take_packed_weights():
    def kernel(inputs, config, reference):
        assert np.array_equal(reference["marlin_qweight"], conftest.marlin_pack(unpack(inputs["qweight"]), 4))
        return product(inputs, config)

    assert run(kernel, cases=6).ok


def added_in_order(inputs, config, step):
    """The product with f32 sums over k forwards (step 1) or backwards (-1)."""
    weight = (unpack(inputs["qweight"]) - 8).astype(np.float32)
    weight *= np.repeat(inputs["scales"].astype(np.float32), len(weight) // len(inputs["scales"]), axis=0)
    x = inputs["x"].astype(np.float32)
    with np.errstate(over="ignore"):
        rows = [np.cumsum((row[:, None] * weight)[::step], axis=0, dtype=np.float32)[-1] for row in x]
        return {"y": np.stack(rows).astype(np.float16)}


# Sums that are long enough for another order to show in float16.
LONG = WHERE + ",size_k=384,size_n=192|320"

#: An accumulator of 20 bits that truncates.
SHORT = {
    "name": "20-bit accumulator",
    "adder": {"matrix_unit": {"products": 1, "fraction_bits": 30, "kept_bits": 20}},
    "order": "any",
    "reduction": {"f32": {"steps": 1}},
}


def truncated(values, bits):
    """Values with the highest bits of their fractions, toward zero."""
    fractions, exponents = np.frexp(values)
    return np.ldexp(np.trunc(np.ldexp(fractions, bits)), exponents - bits)


def short_sums(inputs, config, zero=8):
    """A product of weights in float16, whose sum is truncated to 20 bits after each product."""
    scales = np.repeat(inputs["scales"].astype(np.float64), config["size_k"] // len(inputs["scales"]), axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        weight = ((unpack(inputs["qweight"]) - zero) * scales).astype(np.float16).astype(np.float64)
        x = inputs["x"].astype(np.float64)
        sums = np.zeros((len(x), weight.shape[1]))
        for k, row in enumerate(weight):
            sums = truncated(sums + x[:, k, None] * row, 20)
        return {"y": sums.astype(np.float16)}


def test_a_class_admits_the_sums_that_it_states():
    stated = {"convention": "canonical", "class_": SHORT}
    summary = run(short_sums, 12, LONG, **stated)
    assert summary.ok and summary.passed == 12, summary
    # Without it, the sums are too far off.
    summary = run(short_sums, 12, LONG, findings=1)
    assert not summary.ok and summary.failed, summary
    summary = run(lambda i, c: short_sums(i, c, zero=9), 12, LONG, findings=1, **stated)
    assert [f.cause for f in summary.findings] == ["zero-off-by-one"], summary


def test_a_convention_excludes_the_others(tmp_path):
    for convention in (None, "unrounded"):
        summary = run(product, 12, LONG, convention=convention)
        assert summary.ok and summary.passed == 12, summary
    folder = str(tmp_path)
    summary = run(product, 12, LONG, convention="marlin", findings=1, folder=folder)
    [finding] = summary.findings
    assert not summary.ok and ".check(convention='marlin')" in str(finding), finding
    # The kept case is judged as the run judged it.
    case = finding.case()
    assert case.check().verdict == "fail"
    assert case.check(convention="unrounded").passed
    assert marlinspike.Case.read(finding.path).check().passed
    again = run(product, 1, LONG, convention="marlin", findings=1, folder=folder)
    assert again.regressions and not again.ok


def test_the_decorator_states_the_arithmetic(tmp_path, monkeypatch):
    from marlinspike import _fuzz

    monkeypatch.setitem(_fuzz._settings, "root", str(tmp_path))

    def test(kernel, **stated):
        return marlinspike.fuzz("linear", LONG, cases=6, seed=5, findings=1, **stated)(kernel)

    test(product, convention="unrounded")()
    test(short_sums, convention="canonical", class_=SHORT)()
    for kernel, stated in [(product, {"convention": "marlin"}), (short_sums, {"convention": "canonical"})]:
        with pytest.raises(marlinspike.FuzzFailure, match=r"check\(convention='"):
            test(kernel, **stated)()


@pytest.mark.parametrize("op", ["check", "fuzz", "strategy"])
def test_unknown_conventions_and_classes_are_refused(op, linear):
    def state(**stated):
        if op == "check":
            marlinspike.check("linear", linear.inputs, {"y": linear.product()}, linear.config, **stated)
        elif op == "fuzz":
            run(product, 1, **stated)
        else:
            pytest.importorskip("hypothesis")
            from marlinspike import strategies

            strategies.cases("linear", WHERE, **stated)

    for stated, text in [
        ({"convention": "marlon"}, "convention: found `marlon`, expected one of marlin, stepwise"),
        ({"convention": 3}, "convention: found 3, expected a name"),
        ({"class_": "f32"}, "class_: found `f32`, expected one of f32-any-order"),
        ({"class_": 3}, "class_: found 3, expected a name"),
        ({"class_": {"name": "mine"}}, "class_ `.*` is not supported: missing field `adder`"),
        (
            {"class_": {**SHORT, "adder": {"matrix_unit": {"products": 0, "fraction_bits": 30, "kept_bits": 20}}}},
            "class_ `20-bit accumulator`: products: found 0, expected 1 to 4096",
        ),
    ]:
        with pytest.raises(marlinspike.Error, match=text):
            state(**stated)


def test_promises_of_bits():
    promises = {"deterministic": True, "batch_invariant": True}
    summary = run(lambda inputs, config: added_in_order(inputs, config, 1), 12, LONG, **promises)
    assert summary.ok and summary.passed == 12, summary


def test_an_order_that_depends_on_the_batch():
    def kernel(inputs, config):
        return added_in_order(inputs, config, -1 if len(inputs["x"]) > 1 else 1)

    # Only the promise tells the two orders apart: both sums are right.
    assert run(kernel, 12, LONG, deterministic=True).ok
    summary = run(kernel, 12, LONG, batch_invariant=True)
    assert [f.signature for f in summary.findings] == ["batch dependence"], summary


def test_an_order_that_changes_between_runs():
    calls = []

    def kernel(inputs, config):
        calls.append(1)
        return added_in_order(inputs, config, 1 if len(calls) % 2 else -1)

    assert run(kernel, 12, LONG).ok
    summary = run(kernel, 12, LONG, deterministic=True)
    assert [f.signature for f in summary.findings] == ["nondeterminism"], summary


def test_outputs_that_cannot_be_read_are_findings():
    for value in (np.zeros((1, 1), np.complex64), object()):
        summary = run(lambda inputs, config: {"y": value}, cases=2)
        assert [f.signature for f in summary.findings] == ["unreadable outputs"], summary


def test_the_reason_of_skipped_cases():
    def kernel(inputs, config):
        raise marlinspike.Unsupported("only on Tuesdays")

    summary = run(kernel, cases=3)
    assert summary.skipped_reason == "only on Tuesdays" and "skipped: only on Tuesdays" in str(summary)


pytest_plugins = ["pytester"]


def test_the_decorator_in_pytest(pytester):
    pytester.makepyfile(
        test_mine="""
        import numpy as np
        import marlinspike
        WHERE = "%s"

        @marlinspike.fuzz(op="linear", where=WHERE, cases=6, outputs=["marlin_scales"])
        def test_scales(inputs, config):
            k, n, g = config["size_k"], config["size_n"], config["group_size"]
            return {"marlin_scales": marlinspike.marlin_permute_scales(inputs["scales"], k, n, g)}

        @marlinspike.fuzz(op="linear", where=WHERE, cases=6, outputs=["marlin_scales"])
        def test_forgotten(inputs, config):
            return {"marlin_scales": inputs["scales"]}
        """
        % LAYOUT
    )
    first = pytester.runpytest_subprocess("--marlinspike-seed", "0x2a")
    first.assert_outcomes(passed=1, failed=1)
    text = first.stdout.str()
    assert "run_fuzz(" not in text, "the kit's own source is no part of the message"
    assert "seed 0x2a" in text and "smallest case: " in text and "permut" in text
    assert "again: pytest -k test_forgotten --marlinspike-seed 0x2a" in text
    kept = list((pytester.path / ".marlinspike").rglob("*.safetensors"))
    assert len(kept) >= 1
    second = pytester.runpytest_subprocess("--marlinspike-cases", "1", "-k", "forgotten")
    second.assert_outcomes(failed=1, deselected=1)
    assert "kept case fails" in second.stdout.str()
    shard = pytester.runpytest_subprocess("--marlinspike-shard", "2/3", "--marlinspike-seconds", "60")
    shard.assert_outcomes(passed=1, failed=1)
    assert "--marlinspike-shard 2/3" in shard.stdout.str()
    [summary] = [p for p in (pytester.path / ".marlinspike").rglob("summary.json") if "scales" in str(p)]
    [merged] = marlinspike.merge([summary])
    assert merged.passed == 2 and merged.missing == ["1/3 of seed 0x0", "3/3 of seed 0x0"]


def test_hypothesis_strategies():
    pytest.importorskip("hypothesis")
    from hypothesis import given, settings

    from marlinspike import strategies

    seen = []

    @settings(max_examples=5, deadline=None, database=None)
    @given(strategies.cases("router", "scoring_func=softmax,use_grouped_topk=false"))
    def holds(case):
        seen.append(case)
        assert case.config["scoring_func"] == "softmax"
        report = marlinspike.check(case.op, case.inputs, case.reference(), case.config)
        assert report["topk_ids"].verdict == "pass" and report.verdict != "fail"

    holds()
    assert seen
    with pytest.raises(marlinspike.Error, match="no config"):
        strategies.cases("router", "scoring_func=relu")


def test_hypothesis_cases_are_judged_as_stated():
    pytest.importorskip("hypothesis")
    from hypothesis import given, settings

    from marlinspike import strategies

    def verdicts(kernel, **stated):
        seen = []

        @settings(max_examples=8, deadline=None, database=None, derandomize=True)
        @given(strategies.cases("linear", LONG, **stated))
        def judged(case):
            case.outputs = kernel(case.inputs, case.config)
            seen.append(case.check().verdict)

        judged()
        return set(seen)

    assert verdicts(product) == {"pass"}
    assert verdicts(product, convention="unrounded") == {"pass"}
    assert "fail" in verdicts(product, convention="marlin")
    assert verdicts(short_sums, convention="canonical", class_=SHORT) == {"pass"}
    assert "fail" in verdicts(short_sums)
