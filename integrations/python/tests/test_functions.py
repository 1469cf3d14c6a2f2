"""Helpers named like vLLM's, against numpy code of their own."""

import json

import conftest
import numpy as np
import pytest

import marlinspike
from marlinspike import _core
from marlinspike._arrays import typed


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 64), (128, 192)])
def test_gptq_marlin_repack(rng, bits, shape):
    codes = rng.integers(0, 2**bits, shape)
    words = conftest.pack_rows(codes, bits)
    for perm in (None, rng.permutation(shape[0]).astype(np.int32), np.empty(0, np.int32)):
        ordered = codes if perm is None or not perm.size else codes[perm]
        packed = marlinspike.gptq_marlin_repack(words, perm, *shape, bits)
        assert packed.dtype == np.int32
        assert np.array_equal(packed, conftest.marlin_pack(ordered, bits))
    stack = marlinspike.gptq_marlin_moe_repack(np.stack([words, words]), None, *shape, bits)
    assert stack.shape[0] == 2 and np.array_equal(stack[1], conftest.marlin_pack(codes, bits))
    with pytest.raises(marlinspike.Error, match="size_n"):
        marlinspike.gptq_marlin_repack(words, None, shape[0], 48, bits)
    with pytest.raises(marlinspike.Error, match="b_q_weight"):
        marlinspike.gptq_marlin_repack(words[1:], None, *shape, bits)


def test_awq_marlin_repack(rng):
    codes = rng.integers(0, 16, (64, 128))
    packed = marlinspike.awq_marlin_repack(conftest.pack_awq(codes), 64, 128, 4)
    assert np.array_equal(packed, conftest.marlin_pack(codes, 4))


def test_marlin_permute_scales(rng):
    scales = rng.standard_normal((4, 128)).astype(np.float16)
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    expected = scales.reshape(-1, 64)[:, grouped].reshape(scales.shape)
    assert np.array_equal(marlinspike.marlin_permute_scales(scales, 256, 128, 64), expected)
    expected = scales[:1].reshape(-1, 32)[:, single].reshape(1, 128)
    assert np.array_equal(marlinspike.marlin_permute_scales(scales[:1], 256, 128, -1), expected)
    stack = marlinspike.marlin_moe_permute_scales(np.stack([scales, scales]), 256, 128, 64)
    assert np.array_equal(stack[1], scales.reshape(-1, 64)[:, grouped].reshape(scales.shape))
    assert np.array_equal(marlinspike.marlin_permute_bias(scales[0]), expected[0])


def test_marlin_int4_fp8_preprocess(rng):
    codes = rng.integers(0, 16, (64, 64))
    rewritten = np.where(codes >= 8, codes - 8, 15 - codes)
    words = conftest.pack_rows(codes, 4)
    made = marlinspike.marlin_int4_fp8_preprocess(words)
    assert np.array_equal(made, conftest.pack_rows(rewritten, 4))
    zeros = rng.integers(0, 16, (2, 64))
    full = np.repeat(zeros, 32, axis=0)
    rewritten = np.where(codes >= full, codes - full, 15 - codes)
    words = conftest.pack_awq(codes)
    made = marlinspike.marlin_int4_fp8_preprocess(words, conftest.pack_awq(zeros), inplace=True)
    assert made is words and np.array_equal(made, conftest.pack_awq(rewritten))


def test_moe_align_block_size(rng):
    ids = np.stack([rng.permutation(6)[:2] for _ in range(9)]).astype(np.int32)
    sorted_ids, experts, length = marlinspike.moe_align_block_size(ids, 4, 6)
    expected, blocks = [], []
    for expert in range(6):
        run = [i for i, e in enumerate(ids.ravel()) if e == expert]
        run += [ids.size] * (-len(run) % 4)
        expected += run
        blocks += [expert] * (len(run) // 4)
    assert sorted_ids.tolist() == expected and experts.tolist() == blocks
    assert length.tolist() == [len(expected)]


def test_fused_topk(rng):
    logits = rng.standard_normal((7, 16)).astype(np.float32)
    weights, ids, indices = marlinspike.fused_topk(None, logits, 3, True)
    wide = np.exp(logits.astype(np.float64))
    scores = wide / wide.sum(axis=1, keepdims=True)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :3]
    assert np.array_equal(ids, expected)
    chosen = np.take_along_axis(scores, expected, axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=1e-6)
    assert indices[2].tolist() == [2, 2 + 7, 2 + 14]
    with pytest.raises(marlinspike.Error, match="scoring_func"):
        marlinspike.fused_topk(None, logits, 3, True, "relu")


def test_grouped_topk(rng):
    logits = rng.standard_normal((5, 16)).astype(np.float32)
    weights, ids = marlinspike.grouped_topk(None, logits, 2, False, 4, 1, "sigmoid", 2.5)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    best = scores.reshape(5, 4, 4).max(axis=2).argmax(axis=1)
    for row in range(5):
        inside = range(4 * best[row], 4 * best[row] + 4)
        expected = sorted(inside, key=lambda e: -scores[row, e])[:2]
        assert ids[row].tolist() == expected
        np.testing.assert_allclose(weights[row], 2.5 * scores[row, expected], rtol=1e-6)


def test_gptq_quantize_weights(rng):
    w = rng.standard_normal((64, 64)).astype(np.float16)
    w_ref, codes, scales, g_idx, perm = marlinspike.gptq_quantize_weights(w, "uint4b8", 32, False)
    assert codes.dtype == np.int32 and codes.min() >= 0 and codes.max() <= 15 and g_idx.size == 0
    product = (codes - 8) * np.repeat(scales.astype(np.float64), 32, axis=0)
    assert np.array_equal(w_ref, product.astype(np.float16))
    assert np.abs(w.astype(float) - w_ref).max() <= scales.astype(float).max() * 0.51
    order = rng.permutation(64)
    *_, g_idx, used = marlinspike.gptq_quantize_weights(w, "uint4b8", 32, True, order)
    assert np.array_equal(used, order) and np.array_equal(g_idx, order // 32)


def test_activation_quantizers(rng):
    x = rng.standard_normal((3, 64)).astype(np.float32)
    codes, scales = marlinspike.per_token_quant_int8(x)
    assert codes.dtype == np.int8 and scales.shape == (3, 1)
    assert np.abs(codes * scales - x).max() <= scales.max() * 0.5001
    assert (np.abs(codes).max(axis=1) == 127).all()
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    assert not unaligned.flags.aligned
    assert np.array_equal(marlinspike.per_token_quant_int8(unaligned)[0], codes)
    codes, scales = marlinspike.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert codes.shape == x.shape and scales.shape == (3, 1)
    assert np.abs(codes.astype(np.float32) * scales - x).max() < 0.07 * np.abs(x).max()
    codes, scales = marlinspike.scaled_fp4_quant(x.astype(np.float16), np.float32(100))
    assert codes.dtype == np.uint8 and codes.shape == (3, 32) and scales.shape == (128, 4)


@pytest.mark.parametrize("group_size", [-1, 64])
def test_gptq_marlin_gemm(rng, group_size):
    linear = conftest.Linear(rng, group_size=group_size)
    m, n, k = linear.shape
    packed = conftest.marlin_pack(linear.codes, 4)
    scales = marlinspike.marlin_permute_scales(linear.scales, k, n, group_size)
    empty = np.empty(0, np.int32)
    y = marlinspike.gptq_marlin_gemm(
        linear.x, None, packed, None, scales, None, None, None, empty, empty, None, "uint4b8", m, n, k
    )
    assert marlinspike.check("linear", linear.inputs, {"y": y}, linear.config).passed
    exact = linear.product().astype(np.float64)
    np.testing.assert_allclose(y.astype(np.float64), exact, atol=0.02)
    with pytest.raises(marlinspike.Error, match="quant_type"):
        marlinspike.gptq_marlin_gemm(
            linear.x, None, packed, None, scales, None, None, None, empty, empty, None, "int3", m, n, k
        )


def test_fused_marlin_moe_gives_the_bits_of_a_generated_case():
    config = {
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": "float16", "group_size": 64,
        "size_m": 4, "num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128,
        "activation": "silu", "scoring_func": "softmax", "renormalize": True, "block_size_m": 16,
    }  # fmt: skip
    case = marlinspike.Case.draw("moe", seed=4, config=config)
    out = case.outputs
    y = marlinspike.fused_marlin_moe(
        case.inputs["x"], out["w13_marlin_qweight"], out["w2_marlin_qweight"], None, None,
        out["w13_marlin_scales"], out["w2_marlin_scales"], out["topk_weights"], out["topk_ids"], "uint4b8",
    )  # fmt: skip
    assert np.array_equal(y.view(np.uint16), out["y"].view(np.uint16))


def lattice(op, **values):
    configs = map(json.loads, marlinspike._core.lattice(op))
    return [c for c in configs if all(c.get(key) == value for key, value in values.items())]


def flushes(scales):
    """Whether the kernel's format flushes one of the scales, so that y differs from the checkpoint's."""
    return scales.view(np.uint8).min() < 48


def bits(values):
    return np.ascontiguousarray(values).view(np.uint16)


@pytest.mark.parametrize("checkpoint_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gptq_marlin_gemm_of_four_bit_floats(checkpoint_format, dtype):
    configs = lattice("linear", checkpoint_format=checkpoint_format, dtype=dtype, input_dtype=None)
    seen = 0
    for seed, config in enumerate(configs[:12]):
        case = marlinspike.Case.draw("linear", seed=seed, config=config)
        out, size = case.outputs, case.config
        if flushes(case.inputs["weight_scale"]):
            continue
        seen += 1
        y = marlinspike.gptq_marlin_gemm(
            case.inputs["x"], None, out["marlin_qweight"], out.get("marlin_bias"), out["marlin_scales"], None,
            out.get("marlin_global_scale"), None, None, None, None, "float4_e2m1f",
            size["size_m"], size["size_n"], size["size_k"],
        )  # fmt: skip
        assert np.array_equal(bits(y), bits(out["y"])), config
    assert seen >= 6


def test_a_global_scale_is_only_for_four_bit_floats(rng):
    linear = conftest.Linear(rng, group_size=64)
    m, n, k = linear.shape
    one = np.ones(1, np.float32)
    with pytest.raises(marlinspike.Error, match="global_scale"):
        marlinspike.gptq_marlin_gemm(
            linear.x, None, conftest.marlin_pack(linear.codes, 4), None, linear.scales, None, one,
            None, None, None, None, "uint4b8", m, n, k,
        )  # fmt: skip


@pytest.mark.parametrize("checkpoint_format", ["nvfp4", "mxfp4"])
def test_fused_marlin_moe_of_four_bit_floats(checkpoint_format):
    config = lattice("moe", checkpoint_format=checkpoint_format, input_dtype=None, ep_size=1)[0]
    # What the function has no argument for.
    for key in ("gate_up_layout", "swiglu_limit", "swiglu_alpha", "swiglu_beta", "router_weight_on"):
        config.pop(key, None)
    config["activation"] = "silu"
    case = marlinspike.Case.draw("moe", seed=4, config=config)
    for name in ("w13_weight_scale", "w2_weight_scale"):
        scales = case.inputs[name]
        case.inputs[name] = np.maximum(scales.view(np.uint8), 120).view(scales.dtype)
        assert not flushes(case.inputs[name])
    stated = {key: value for key, value in case.config.items() if not key.startswith("scale_factor")}
    out = marlinspike.reference("moe", case.inputs, stated)
    y = marlinspike.fused_marlin_moe(
        case.inputs["x"], out["w13_marlin_qweight"], out["w2_marlin_qweight"],
        out.get("w13_marlin_bias"), out.get("w2_marlin_bias"),
        out["w13_marlin_scales"], out["w2_marlin_scales"], out["topk_weights"], out["topk_ids"], "float4_e2m1f",
        case.config.get("apply_router_weight_on_input", False),
        global_scale1=out.get("w13_marlin_global_scale"), global_scale2=out.get("w2_marlin_global_scale"),
    )  # fmt: skip
    assert np.array_equal(bits(y), bits(out["y"]))


@pytest.mark.parametrize("ranks, rows_of_k", [(1, 64), (2, 512)])
def test_add_ranks_without_rows_and_with_another_type(rng, ranks, rows_of_k):
    words = conftest.pack_rows(rng.integers(0, 16, (rows_of_k, 64)), 4)
    packed = marlinspike.gptq_marlin_repack(words, None, rows_of_k, 64, 4)
    # A column's scale is one, so y is the sum.
    parts = (typed(packed), typed(np.ones((1, 64), np.float16)), None, None, None, None)

    def added(sums, dtype):
        return _core.add_ranks(typed(sums, "sums"), parts, "uint4b8", dtype, ranks * rows_of_k)

    sums = rng.integers(-64, 64, (ranks, 3, 64)).astype(np.float32)
    for rows in (0, 2, 3):
        name, shape, data = added(sums[:, :rows], "float16")
        assert (name, list(shape)) == ("F16", [rows, 64])
        assert np.array_equal(np.frombuffer(data, np.float16).reshape(shape), sums[:, :rows].sum(axis=0))
    with pytest.raises(marlinspike.Error, match="dtype: found float32, expected float16 or bfloat16"):
        added(sums, "float32")
