"""The recipes behind the page of findings: each must judge, find its finding, and find nothing else."""

import pathlib
import sys

import numpy as np
import pytest

import marlinspike

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))
import conversions  # noqa: E402
import ggml_blocks  # noqa: E402


def wrong(tallies):
    assert tallies and all(tally.judged for tally in tallies)
    return [tally.what for tally in tallies if tally.wrong]


def test_conversions_of_ml_dtypes():
    pytest.importorskip("ml_dtypes")
    library = conversions.MlDtypes()
    library.types = ["float8_e5m2", "float4_e2m1fn"]
    assert wrong(conversions.run(library)) == ["f64 -> float8_e5m2", "f64 -> float4_e2m1fn"]


def test_a_wrong_conversion_is_seen():
    """The codes of marlinspike, as a library with one fault."""

    class Wrong:
        types, version = ["float8_e5m2"], "wrong"

        def encode(self, values, name):
            made = np.asarray(marlinspike.encode(values, name)).view(np.uint8).astype(np.int64)
            return np.where(values == 1.0, made + 1, made)

        def recode(self, bits, source, name):
            raise TypeError

        def decode(self, bits, name, dtype):
            return np.asarray(marlinspike.decode(bits, name)).astype(dtype)

    assert wrong(conversions.run(Wrong())) == ["f32 -> float8_e5m2", "f64 -> float8_e5m2"]


def test_blocks_of_gguf():
    pytest.importorskip("gguf")
    assert wrong(ggml_blocks.run(ggml_blocks.Gguf(), count=500)) == ["MXFP4 scales"]


def test_a_wrong_block_is_seen():
    """Q8_0 by the definition, with codes that are cut off instead of rounded."""

    class Wrong:
        version = "wrong"

        def has(self, name):
            return name == "Q8_0"

        def encode(self, name, values):
            step = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
            codes = np.trunc(np.divide(values, step, out=np.zeros_like(values), where=step != 0))
            scales = np.asarray(marlinspike.encode(step, "float16")).view(np.uint8)
            return np.concatenate([scales, codes.astype(np.int8).view(np.uint8)], axis=1)

        def decode(self, name, blocks):
            return ggml_blocks.decoded(name, blocks).astype(np.float32)

    assert wrong(ggml_blocks.run(Wrong(), count=200)) == ["Q8_0 elements"]


def test_operators_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    import torch_cpu_operators

    torch.set_num_threads(1)
    for name in ("weight_int4pack_mm", "weight_int8pack_mm", "scaled_mm", "dyn_quant_matmul_4bit_f32"):
        summary = torch_cpu_operators.campaign(name, 20)
        assert summary.passed and not summary.failed, summary
    assert torch_cpu_operators.int_mm(20, 1) == (0, None)
    # On Arm, the operator is KleidiAI's.
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        summary = torch_cpu_operators.campaign("dyn_quant_matmul_4bit", 20)
        assert [found.cause for found in summary.findings] == ["output-truncated"]


def test_campaigns_of_gpu_operators(tmp_path):
    """Shares of a right and of a wrong operator, and their sum, without a GPU."""
    torch = pytest.importorskip("torch")
    import types

    import gpu_campaigns

    gpu_campaigns.base.DEVICE = "cpu"

    def align(off):
        def adapter(config, t):
            if config["block_size"] == 8:
                raise gpu_campaigns.base.Unsupported("blocks of 8")
            ids, experts = t["in.topk_ids"], t.get("in.expert_map")
            made = marlinspike.moe_align_block_size(ids, config["block_size"], config["num_experts"], experts)
            names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
            return {name: one + (off if name == "expert_ids" else 0) for name, one in zip(names, made)}

        return adapter

    for name, off in (("moe_align_block_size", 0), ("topk", 1)):
        for part in (1, 2):
            options = types.SimpleNamespace(
                out=tmp_path, stand_ins=True, worker=f"{part}/2", cases=40, seed=22, seconds=60.0, limits={}
            )
            entry = ("moe_align_block_size", "", {}, [], align(off))
            reasons = gpu_campaigns.campaign(options, name, entry)
            (tmp_path / f"{name}-{part}.extra").write_text(f'{{"skipped": {{"x": {sum(reasons.values())}}}, "seconds": 1.0}}')
        total = gpu_campaigns.summed(name, tmp_path, 0)
        # Shrinking tries configurations that are refused, too.
        assert total["passed"] + total["failed"] + total["skipped"] == 40 and total["reasons"]["x"] >= total["skipped"] > 0
        assert bool(total["failed"]) == bool(off) == bool(total["findings"])
    comparison = gpu_campaigns.comparisons
    assert comparison.tally(3, 60.0, lambda index: (index != 1, lambda: "second")) == {
        "cases": 3, "judged": 3, "wrong": 1, "first": "second",
    }  # fmt: skip
    assert torch.equal(gpu_campaigns.more.tensor(np.array([1, -2], np.int32)), torch.tensor([1, -2], dtype=torch.int32))


def test_long_int8_sums(monkeypatch):
    """An operator with exact sums, and one in which sums wrap at 2^32; the check of a large y judges a sample."""
    torch = pytest.importorskip("torch")
    import gpu_campaigns

    comparison = gpu_campaigns.comparisons
    monkeypatch.setattr(gpu_campaigns.base, "DEVICE", "cpu")
    seen = []

    def operator(wrapped, config, t):
        rows = config["size_m"]
        assert [len(t[name]) for name in ("in.x", "in.a_q", "in.a_scales")] == [rows] * 3
        y = t["ref.y"].repeat(rows // len(t["ref.y"]), 1).float()
        seen.append(rows)
        y[:, wrapped] -= 2.0**32 * t["in.a_scales"]
        return {"y": y.to(t["ref.y"].dtype)}

    for wrapped in ([], range(0, 1024, 3)):
        monkeypatch.setattr(comparison.base, "marlin_gemm", lambda config, t: operator(wrapped, config, t))
        result = comparison.marlin_int8_sums(3, 1, 60.0)
        assert result["cases"] == result["judged"] == 3 and result["wrong"] == 3 * bool(wrapped), result
        assert bool(wrapped) == bool(result["first"]) and ("largest integer sum" in (result["first"] or "")) == bool(wrapped)
    assert all(900 < rows <= 1024 for rows in seen)
