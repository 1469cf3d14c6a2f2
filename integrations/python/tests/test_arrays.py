"""Arrays in and out."""

import conftest
import ml_dtypes
import numpy as np
import pytest

import marlinspike
from marlinspike import _arrays


def test_contiguous_arrays_are_not_copied(rng):
    x = rng.standard_normal((3, 4)).astype(np.float32)
    dtype, shape, data = _arrays.typed(x)
    assert (dtype, shape) == ("F32", [3, 4]) and np.shares_memory(x, data)
    assert not np.shares_memory(x, _arrays.typed(x.T)[2])
    assert np.array_equal(_arrays.array("F32", [4, 3], _arrays.typed(x.T)[2]), x.T)


def test_big_endian_arrays_keep_their_values():
    x = np.arange(6, dtype=">i4")
    assert _arrays.array(*_arrays.typed(x)).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "name, ours",
    [("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2"), ("float8_e8m0fnu", "F8_E8M0")],
)
def test_types_that_numpy_lacks(name, ours):
    values = np.array([1.0, 2.0, 4.0], np.float32).astype(getattr(ml_dtypes, name))
    dtype, shape, data = _arrays.typed(values)
    assert dtype == ours
    back = _arrays.array(dtype, shape, data)
    assert back.dtype == values.dtype and back.astype(np.float32).tolist() == [1.0, 2.0, 4.0]


def test_bits_stand_for_types_that_numpy_lacks(rng):
    linear = conftest.Linear(rng, group_size=-1)
    config = dict(linear.config, dtype="bfloat16")
    bits = conftest.bf16_bits(linear.x.astype(np.float32))
    scales = conftest.bf16_bits(linear.scales.astype(np.float32))
    reference = {}
    for x, s in [
        (bits, scales),
        (("bfloat16", bits), ("BF16", scales)),
        (bits.view(ml_dtypes.bfloat16), scales.view(ml_dtypes.bfloat16)),
    ]:
        inputs = {"qweight": linear.inputs["qweight"], "x": x, "scales": s}
        y = marlinspike.reference("linear", inputs, config)["y"]
        reference.setdefault("y", y)
        assert np.array_equal(y.view(np.uint16), reference["y"].view(np.uint16))
        assert marlinspike.check("linear", inputs, {"y": y.view(np.uint16)}, config).passed
    with pytest.raises(marlinspike.Error, match="expected the bits of BF16"):
        _arrays.typed(("bfloat16", linear.x.astype(np.float32)))


def test_scalars_and_empty_arrays():
    assert _arrays.typed(np.float32(2))[1] == []
    assert _arrays.typed(np.empty((0, 4), np.int32))[2].size == 0


def test_arrays_with_dlpack_only(rng):
    class Exported:
        """A tensor of a library that is neither numpy nor torch."""

        def __init__(self, values):
            self.values = values

        def __dlpack__(self, **options):
            return self.values.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.values.__dlpack_device__()

    linear = conftest.Linear(rng)
    exported = {name: Exported(value) for name, value in linear.inputs.items()}
    assert marlinspike.check("linear", exported, {"y": Exported(linear.product())}, linear.config).passed
    dtype, shape, data = _arrays.typed(Exported(linear.x[:, ::2]))
    assert (dtype, list(shape)) == ("F16", list(linear.x[:, ::2].shape))
    assert data.tobytes() == linear.x[:, ::2].tobytes()


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    linear = conftest.Linear(rng)
    inputs = {name: torch.from_numpy(value) for name, value in linear.inputs.items()}
    outputs = {"y": torch.from_numpy(linear.product())}
    assert marlinspike.check("linear", inputs, outputs, linear.config).passed
    packed = marlinspike.gptq_marlin_repack(inputs["qweight"], None, 256, 128, 4)
    assert torch.equal(packed, torch.from_numpy(conftest.marlin_pack(linear.codes, 4)))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        made = _arrays.typed(torch.ones(2, 3).to(dtype))
        assert torch.equal(_arrays.like(torch.ones(1), made).float(), torch.ones(2, 3))
