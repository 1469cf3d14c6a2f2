"""Torch tensors in and out. The expected bytes come from numpy arrays of bits."""

import conftest
import numpy as np
import pytest

import marlinspike
from marlinspike import _arrays

torch = pytest.importorskip("torch")

TYPES = [
    ("float32", np.uint32, "F32"),
    ("float64", np.uint64, "F64"),
    ("float16", np.uint16, "F16"),
    ("bfloat16", np.uint16, "BF16"),
    ("float8_e4m3fn", np.uint8, "F8_E4M3"),
    ("float8_e5m2", np.uint8, "F8_E5M2"),
    ("float8_e4m3fnuz", np.uint8, "F8_E4M3FNUZ"),
    ("float8_e8m0fnu", np.uint8, "F8_E8M0"),
    ("float4_e2m1fn_x2", np.uint8, "U8"),
    ("int32", np.uint32, "I32"),
    ("uint32", np.uint32, "U32"),
    ("int64", np.uint64, "I64"),
    ("int16", np.uint16, "I16"),
    ("int8", np.uint8, "I8"),
    ("uint8", np.uint8, "U8"),
    ("bool", np.uint8, "BOOL"),
]
INTEGERS = {np.uint8: "uint8", np.uint16: "int16", np.uint32: "int32", np.uint64: "int64"}

# Each takes a numpy array and a torch tensor of shape [4, 6, 8] to the same elements.
VIEWS = {
    "contiguous": lambda a: a,
    "transposed": lambda a: a.swapaxes(0, 2),
    "sliced": lambda a: a[1:3, ::2, 3:7],
    "storage offset": lambda a: a[2],
    "expert": lambda a: a[3, :, 5:6],
    "no elements": lambda a: a[:0],
    "no columns": lambda a: a[:, :, 8:],
    "scalar": lambda a: a[1, 2, 3],
}


def dtype_of(name):
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return getattr(torch, name)


def bits_of(rng, kind, name):
    if name == "bool":
        return rng.integers(0, 2, (4, 6, 8), dtype=kind)
    return rng.integers(0, np.iinfo(kind).max, (4, 6, 8), dtype=kind, endpoint=True)


def of_bits(bits, dtype):
    """The tensor with these bits."""
    signed = bits if bits.dtype == np.uint8 else bits.view(bits.dtype.name[1:])
    return torch.from_numpy(signed).view(dtype)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name, kind, stored", TYPES)
def test_every_type_in_every_view(rng, name, kind, stored, view):
    bits = bits_of(rng, kind, name)
    tensor = VIEWS[view](of_bits(bits, dtype_of(name)))
    expected = VIEWS[view](bits)
    dtype, shape, data = _arrays.typed(tensor)
    assert (dtype, list(shape)) == (stored, list(expected.shape))
    assert data.tobytes() == expected.tobytes()
    # And back: the same type, except that bytes of two fp4 codes stay bytes.
    back = _arrays.like(tensor, (dtype, shape, data))
    assert back.shape == tensor.shape and back.device == tensor.device
    assert back.dtype == (torch.uint8 if name == "float4_e2m1fn_x2" else tensor.dtype)
    integers = getattr(torch, INTEGERS[kind])
    if back.dim():
        assert torch.equal(back.view(integers), of_bits(np.ascontiguousarray(expected), integers))


def test_contiguous_tensors_are_not_copied():
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    data = _arrays.typed(x)[2]
    assert data.ctypes.data == x.data_ptr()
    assert _arrays.typed(x[1:])[2].ctypes.data == x[1:].data_ptr()


def test_tensors_with_gradients_and_lazy_signs():
    x = torch.randn(3, 4, requires_grad=True)
    assert _arrays.typed(x)[2].tobytes() == x.detach().numpy().tobytes()
    assert _arrays.typed(torch.nn.Parameter(x))[2].tobytes() == x.detach().numpy().tobytes()
    lazy = torch._neg_view(x.detach())
    assert lazy.is_neg() and _arrays.typed(lazy)[2].tobytes() == (-x.detach().numpy()).tobytes()
    expanded = torch.arange(3, dtype=torch.int32).expand(2, 3)
    assert _arrays.typed(expanded)[2].tobytes() == np.array([0, 1, 2, 0, 1, 2], np.int32).tobytes()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: torch.zeros(2, 2, dtype=torch.complex64), "torch.complex64"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, 2, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "qint8"),
    ],
)
def test_tensors_without_plain_data_are_refused(make, words):
    try:
        tensor = make()
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch cannot make the tensor: {error}")
    with pytest.raises(marlinspike.Error, match=rf"`mine`: .*{words}"):
        _arrays.typed(tensor, "mine")


class Exported:
    """A tensor of a library that only speaks DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "int8", "bool"])
def test_dlpack(rng, name):
    kind = {row[0]: row[1] for row in TYPES}[name]
    bits = bits_of(rng, kind, name)
    tensor = of_bits(bits, dtype_of(name))[1:, ::3]
    dtype, shape, data = _arrays.typed(Exported(tensor))
    assert (list(shape), data.tobytes()) == ([3, 2, 8], bits[1:, ::3].tobytes())
    assert dtype == {row[0]: row[2] for row in TYPES}[name]


def test_dlpack_of_a_foreign_device_is_refused():
    class Elsewhere:
        def __dlpack__(self, **options):
            raise BufferError("the data are on a device of another kind")

        def __dlpack_device__(self):
            return (99, 0)

    with pytest.raises(marlinspike.Error, match="`mine`: .*another kind"):
        _arrays.typed(Elsewhere(), "mine")


def torch_inputs(linear, dtype=torch.float16):
    return {
        "qweight": torch.from_numpy(linear.inputs["qweight"]),
        "scales": torch.from_numpy(linear.scales).to(dtype),
        "x": torch.from_numpy(linear.x).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_verdicts_and_references_of_torch_tensors(rng, dtype):
    linear = conftest.Linear(rng, group_size=-1)
    inputs = torch_inputs(linear, dtype)
    config = dict(linear.config, dtype=str(dtype).replace("torch.", ""))
    weight = torch.from_numpy(linear.codes - 8).double() * inputs["scales"].double()
    y = (inputs["x"].double() @ weight).to(dtype)
    assert marlinspike.check("linear", inputs, {"y": y}, config).passed
    # The same elements in another order in memory, on a tensor with gradients.
    inputs["x"] = inputs["x"].t().contiguous().t().requires_grad_()
    inputs["qweight"] = torch.stack([inputs["qweight"], inputs["qweight"]])[1]
    assert marlinspike.check("linear", inputs, {"y": y.t().contiguous().t()}, config).passed
    wrong = (inputs["x"].double() @ (weight + inputs["scales"].double())).to(dtype)
    assert marlinspike.check("linear", inputs, {"y": wrong}, config).causes == ["zero-off-by-one"]
    made = marlinspike.reference("linear", inputs, config)
    assert made["y"].dtype == dtype and made["marlin_qweight"].dtype == torch.int32
    assert torch.equal(made["marlin_qweight"], torch.from_numpy(conftest.marlin_pack(linear.codes, 4)))
    host = {name: value.detach().numpy() for name, value in torch_inputs(linear).items()}
    assert isinstance(marlinspike.reference("linear", host, linear.config)["y"], np.ndarray)


def test_functions_return_the_callers_kind(rng):
    linear = conftest.Linear(rng)
    inputs = torch_inputs(linear)
    size_m, size_n, size_k = linear.shape
    packed = marlinspike.gptq_marlin_repack(inputs["qweight"], torch.empty(0), size_k, size_n, 4)
    assert torch.equal(packed, torch.from_numpy(conftest.marlin_pack(linear.codes, 4)))
    permuted = marlinspike.marlin_permute_scales(inputs["scales"], size_k, size_n, 64)
    bits = permuted.view(torch.int16).numpy()
    expected = marlinspike.marlin_permute_scales(linear.scales, size_k, size_n, 64)
    assert permuted.dtype == torch.float16 and np.array_equal(bits, expected.view(np.int16))
    sorted_ids, experts, count = marlinspike.moe_align_block_size(torch.tensor([[1, 0], [1, 2]]).int(), 4, 3)
    assert all(t.dtype == torch.int32 for t in (sorted_ids, experts, count)) and int(count) == 12
    assert experts.tolist() == [0, 1, 2]
    codes, scales = marlinspike.per_token_quant_int8(inputs["x"])
    largest = inputs["x"].float().abs().amax(1, keepdim=True)
    assert codes.dtype == torch.int8 and torch.allclose(scales, largest / 127)
    codes, scales = marlinspike.scaled_fp8_quant(inputs["x"], use_per_token_if_dynamic=True)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (size_m, 1)
    assert torch.allclose(codes.float() * scales, inputs["x"].float(), rtol=0.07, atol=1e-2)


def test_fnuz_weights_keep_their_type():
    dtype_of("float8_e4m3fnuz")
    op = "normalize_e4m3fn_to_e4m3fnuz"
    config = {"size_n": 2, "size_k": 16, "num_scales": 1}
    weight = torch.linspace(-16, 16, 32).reshape(2, 16).to(torch.float8_e4m3fn)
    inputs = {"weight": weight, "weight_scale": torch.tensor([0.5])}
    made = marlinspike.reference(op, inputs, config)
    # The bits mean half as much as e4m3fnuz, and the scale is doubled.
    assert made["weight"].dtype == torch.float8_e4m3fnuz and made["weight_scale"].item() == 1.0
    assert torch.equal(made["weight"].float() * 2, weight.float())
    outputs = {"weight": (weight.float() / 2).to(torch.float8_e4m3fnuz), "weight_scale": torch.tensor([1.0])}
    assert marlinspike.check(op, inputs, outputs, config).passed
    # Elsewhere such bits would mean twice what they are.
    with pytest.raises(marlinspike.Error, match="in.weight.*F8_E4M3FNUZ"):
        marlinspike.check(op, dict(inputs, weight=outputs["weight"]), outputs, config)


def test_cases_with_torch_tensors(tmp_path):
    drawn = marlinspike.Case.draw("linear", seed=4, index=2)
    case = drawn.torch()
    assert all(isinstance(t, torch.Tensor) for t in (*case.inputs.values(), *case.outputs.values()))
    assert case.check().verdict == drawn.check().verdict
    case.write(tmp_path / "torch.safetensors")
    drawn.write(tmp_path / "numpy.safetensors")
    assert (tmp_path / "torch.safetensors").read_bytes() == (tmp_path / "numpy.safetensors").read_bytes()
    assert not isinstance(next(iter(drawn.inputs.values())), torch.Tensor)


WHERE = "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,has_bias=false"


def product(inputs, config, zero=8):
    words = inputs["qweight"].long() & 0xFFFFFFFF
    codes = torch.stack([words >> (4 * i) & 15 for i in range(8)], 1).reshape(config["size_k"], -1)
    scales = inputs["scales"].double().repeat_interleave(config["size_k"] // len(inputs["scales"]), 0)
    return {"y": (inputs["x"].double() @ ((codes - zero) * scales)).to(inputs["x"].dtype)}


def run(kernel, **more):
    return marlinspike.run_fuzz(kernel, "linear", WHERE, seed=5, device="cpu", **more)


def test_fuzzing_a_torch_kernel():
    types = set()

    def kernel(inputs, config):
        types.add(inputs["x"].dtype)
        return product(inputs, config)

    summary = run(kernel, cases=16)
    assert summary.ok and types == {torch.float16, torch.bfloat16}, summary
    summary = run(lambda inputs, config: product(inputs, config, zero=9), cases=12)
    assert [f.cause for f in summary.findings] == ["zero-off-by-one"], summary
    summary = run(lambda inputs, config: {"y": torch.zeros(1, dtype=torch.complex64)}, cases=2)
    assert summary.findings[0].signature == "unreadable outputs", summary


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors(rng):
    linear = conftest.Linear(rng)
    inputs = {name: t.cuda() for name, t in torch_inputs(linear).items()}
    assert marlinspike.check("linear", inputs, {"y": torch.from_numpy(linear.product()).cuda()}, linear.config).passed
    assert marlinspike.reference("linear", inputs, linear.config)["y"].device.type == "cuda"
