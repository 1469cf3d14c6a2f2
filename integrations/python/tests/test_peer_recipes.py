"""The recipes for libraries on a GPU: their conversions and their definitions, without the libraries."""

import pathlib
import sys
import types

import numpy as np
import pytest

import marlinspike

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))
import fbgemm_operators  # noqa: E402
import flashinfer_operators  # noqa: E402
import gpu_campaigns  # noqa: E402
import humming_operators  # noqa: E402
import triton_kernels_operators  # noqa: E402
import vllm_comparisons  # noqa: E402
from conftest import pack_awq, pack_rows  # noqa: E402

base = gpu_campaigns.base
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture
def on_host(monkeypatch):
    """Operators take tensors of the CPU, and calls are not cut off."""
    monkeypatch.setattr(base, "DEVICE", torch.device("cpu"))


def modules(monkeypatch, **contents):
    for name, members in contents.items():
        module = types.ModuleType(name.replace("__", "."))
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_names_are_unique():
    names = [name for peer in gpu_campaigns.PEERS for name in (*peer.PRODUCTS, *peer.COMPARISONS)]
    assert len(names) == len(set(names)) and set(names) <= {*gpu_campaigns.campaigns(), *gpu_campaigns.COMPARISONS}


def test_weights_for_humming(rng):
    codes, zeros = rng.integers(0, 16, (64, 32)), rng.integers(0, 16, (2, 32))
    scales = torch.ones(2, 32)
    gptq = {"in.qweight": torch.from_numpy(pack_rows(codes, 4)), "in.scales": scales}
    awq = {
        "in.qweight": torch.from_numpy(pack_awq(codes)),
        "in.qzeros": torch.from_numpy(pack_awq(zeros)),
        "in.scales": scales,
    }
    made = humming_operators.tensors({"checkpoint_format": "gptq"}, gptq)
    along_k = pack_rows(codes, 4).T
    assert np.array_equal(made["weight"].numpy(), along_k) and made["weight_scale"].shape == (32, 2)
    made = humming_operators.tensors({"checkpoint_format": "awq"}, awq)
    assert np.array_equal(made["weight"].numpy(), along_k)
    # Zero points are packed along n.
    assert np.array_equal(made["zero_point"].numpy(), pack_rows(zeros.T, 4))


def test_weights_for_fbgemm(rng):
    codes = rng.integers(0, 16, (128, 8))
    signed = fbgemm_operators.signed_codes(torch.from_numpy(pack_rows(codes, 4)).T).numpy().view(np.uint8)
    low, high = (((signed >> shift & 15).astype(np.int64) ^ 8) - 8 for shift in (0, 4))
    assert np.array_equal(np.stack([low, high], axis=-1).reshape(8, 128), codes.T - 8)


def test_scales_that_kernels_lose():
    scales, codes = torch.full((1, 4), 100, dtype=torch.uint8), torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, 0] = codes[0, 16] = 0x20
    scales[0, 3] = 0
    # The block of the small scale is zero.
    triton_kernels_operators.whole_scales(scales, codes)
    scales[0, 1] = 0
    # The other block is larger by 2^100.
    triton_kernels_operators.whole_scales(scales, codes)
    scales[0, 0] = 20
    with pytest.raises(base.Unsupported):
        triton_kernels_operators.whole_scales(scales, codes)


def blocks(host, largest, up):
    """Scale codes and e2m1 codes by a search over all codes, in exact arithmetic."""
    scales, codes = [], []
    for block in host.reshape(-1, 32).astype(np.float64):
        ratio = np.abs(block).max() / largest
        exponents = range(-127, 128)
        fitting = [e for e in exponents if (2.0**e >= ratio if up else 2.0**e <= ratio)]
        scale = (fitting[0] if up else fitting[-1]) if ratio else -127
        scales.append(scale + 127 if ratio else 0)
        for value in block / 2.0**scale:
            distance = [abs(abs(value) - one) for one in E2M1]
            # Of two nearest codes, the even one.
            best = min(range(8), key=lambda code: (distance[code], code % 2))
            codes.append(best | (8 if np.signbit(value) else 0))
    return np.array(scales).reshape(len(host), -1), np.array(codes).reshape(host.shape)


@pytest.mark.parametrize("up", [True, False])
def test_mxfp4_by_search(rng, up):
    host = (rng.standard_normal((6, 64)) * 2.0 ** rng.integers(-9, 9, (6, 1))).astype(np.float32)
    host[0] = rng.integers(-24, 25, 64) / 4
    host[1, :32] = 0
    scales, codes = blocks(host, 6 if up else 4, up)
    found = triton_kernels_operators.rounded_scales(host, torch.uint8, up)
    assert np.array_equal(found, scales)
    packed = triton_kernels_operators.scaled_codes(host, found, torch.uint8)
    plain = np.stack([packed & 15, packed >> 4], axis=-1).reshape(host.shape)
    judged = np.repeat(scales != 0, 32, axis=1)
    assert np.array_equal(plain[judged], codes[judged])


@pytest.mark.parametrize("fault", [None, "scale", "code"])
def test_downcast_is_judged(monkeypatch, on_host, fault):
    import enum

    Mode = enum.Enum("Mode", {"ROUND_UP": 0, "ROUND_DOWN": 1})
    recipe = triton_kernels_operators

    def downcast(x, kind, axis, mode):
        host = x.float().numpy()
        scales = recipe.rounded_scales(host, kind, mode == Mode.ROUND_UP)
        codes = recipe.scaled_codes(host, scales, kind)
        if fault == "scale":
            scales = scales + 1
        if fault == "code":
            codes = codes ^ 1
        return torch.from_numpy(codes), torch.from_numpy(scales)

    name = "triton_kernels__numerics_details__mxfp"
    modules(monkeypatch, **{name: {"DequantScaleRoundingMode": Mode, "downcast_to_mxfp": downcast}})
    result = recipe.downcast(20, 1, 60.0)
    assert result["judged"] == 20 and (result["wrong"] == 0) == (fault is None)


@pytest.mark.parametrize("least, lost, wrong", [(1, False, False), (0, False, False), (0, True, True), (1, True, False)])
def test_upcast_is_judged(monkeypatch, on_host, least, lost, wrong):
    def upcast(tensor, scale, kind, axis):
        recipe = triton_kernels_operators
        codes = tensor.view(torch.uint8).numpy()
        if tensor.dtype == torch.uint8:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
        values = np.asarray(marlinspike.decode(codes, recipe.FORMATS[tensor.dtype][2])).astype(np.float64)
        power = np.ldexp(1.0, scale.numpy().astype(np.int64) - 127)
        if lost:
            power = np.where(scale.numpy() == 0, 0.0, power)
        return torch.from_numpy(values * np.repeat(power, 32, axis=1)).to(kind)

    modules(monkeypatch, triton_kernels__numerics_details__mxfp={"upcast_from_mxfp": upcast})
    result = triton_kernels_operators.upcast(20, 1, 60.0, least)
    # float16 has no scale code 0 unless it is put in.
    assert result["judged"] == 20 and bool(result["wrong"]) == wrong


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_quantizers_of_fbgemm_are_judged(monkeypatch, on_host, factor):
    def quantize(name, x):
        host = x.float().numpy()
        scale = np.abs(host).max(axis=1, keepdims=True) / np.float32(448) * np.float32(factor)
        codes = np.asarray(marlinspike.encode(host / np.where(scale > 0, scale, 1), "float8_e4m3fn", overflow="saturate"))
        return torch.from_numpy(codes.view(np.uint8)), torch.from_numpy(scale[:, 0].copy())

    monkeypatch.setattr(fbgemm_operators, "call", quantize)
    result = fbgemm_operators.COMPARISONS["fbgemm_quantize_fp8_per_row"](40, 1, 60.0)
    # Rows of a number of columns that the operator does not take are left out.
    assert result["judged"] > 20 and bool(result["wrong"]) == (factor != 1.0)


@pytest.mark.parametrize("fault", [False, True])
def test_order_of_tokens_is_judged(monkeypatch, on_host, fault):
    def shuffle(name, scores, start, end, count, top_k):
        chosen = scores.float().topk(top_k, dim=1).indices
        order = torch.argsort(chosen.flatten(), stable=True)
        ids, rows = chosen.flatten()[order], order // top_k
        counts = torch.bincount(ids, minlength=scores.shape[1])
        return counts, ids, rows.flip(0) if fault else rows

    monkeypatch.setattr(fbgemm_operators, "call", shuffle)
    result = fbgemm_operators.index_shuffling(20, 1, 60.0)
    assert result["judged"] == 20 and bool(result["wrong"]) == fault


def test_values_for_flashinfer(rng):
    codes, scales = rng.integers(0, 256, (3, 32)).astype(np.uint8), rng.integers(0, 253, (3, 2)).astype(np.uint8)
    found = flashinfer_operators.dequantized(codes, scales)
    for row in range(3):
        for column in range(64):
            code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
            value = E2M1[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert found[row, column] == value
    assert vllm_comparisons.differing(np.array([1, 2]), np.array([1, 3])) == "[1]: found 2, expected 3"


def test_layouts_for_flashinfer(monkeypatch, on_host):
    """Interleaved scales by their formula: n mod 32, a quarter of 128 rows, four scales of a row."""

    def interleave(scales):
        stack = scales.reshape(-1, *scales.shape[-2:])
        parts = []
        for one in stack:
            padded = torch.nn.functional.pad(one, (0, -one.shape[1] % 4, 0, -one.shape[0] % 128))
            tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
            parts.append(tiles.reshape(-1))
        return torch.cat(parts)

    monkeypatch.setattr(flashinfer_operators, "interleaved", interleave)
    op, where, keys, outputs, adapter = flashinfer_operators.PRODUCTS["flashinfer_block_scale_interleave"]
    kernel = gpu_campaigns.Kernel("x", (op, where, keys, outputs, adapter), pathlib.Path("."), True)
    run = lambda: marlinspike.run_fuzz(  # noqa: E731
        lambda inputs, config, reference: kernel(inputs, config, reference), op, where, cases=40, seed=1, outputs=outputs
    )
    assert (summary := run()).passed and not summary.failed
    monkeypatch.setattr(flashinfer_operators, "interleaved", lambda scales: interleave(scales).flip(0))
    assert run().failed
