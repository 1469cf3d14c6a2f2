"""The operators of ``marlinspike.torch``: on the CPU everywhere, on CUDA where there is a device."""

import os
import pathlib
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import marlinspike  # noqa: E402
import marlinspike.torch as ours  # noqa: E402
from marlinspike import _core  # noqa: E402
from marlinspike.torch import _products, _tensors  # noqa: E402

opcheck = pytest.importorskip("torch.library").opcheck
ops = torch.ops.marlinspike
GOLDEN = pathlib.Path(__file__).parents[3] / "golden/data/cases"
HAS_CUDA = torch.cuda.is_available()
cuda = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
HALVES = [torch.float16, torch.bfloat16]


def same(a, b):
    """Whether two tensors have the same bits."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(a, b, what=""):
    if not same(a, b):
        wrong = (a.cpu().double() != b.cpu().double()).nonzero()
        first = tuple(wrong[0].tolist()) if len(wrong) else "bits"
        found = (a.cpu()[first], b.cpu()[first]) if len(wrong) else ""
        raise AssertionError(f"{what}: {len(wrong)} of {a.numel()} differ, first {first}: {found}")


def drawn(*shape, seed=0, low=-1.0, high=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) * (high - low) + low


def words(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)


def fp8_words(*shape, seed=0):
    """Codes without a NaN."""
    codes = words(*shape, seed=seed).view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x35, codes).view(torch.int32)


#: Name: quant_type, bits, group sizes, scale_bound.
KINDS = {
    "int4": ("uint4b8", 4, (32, 64, 128, -1)),
    "int4-zeros": ("uint4", 4, (64, -1)),
    "int8": ("uint8b128", 8, (64, -1)),
    "fp8": ("float8_e4m3fn", 8, (128, -1)),
    "mxfp4": ("float4_e2m1f", 4, (32,)),
}


class Packed:
    """Random tensors of a packed matrix, or of a stack of experts."""

    def __init__(self, kind, size_k, size_n, group_size, dtype, experts=None, bias=False, high=1 / 64, seed=0):
        self.quant_type, bits, _ = KINDS[kind]
        stack = [] if experts is None else [experts]
        groups = 1 if group_size == -1 else size_k // group_size
        make = fp8_words if kind == "fp8" else words
        self.q = make(*stack, size_k // 16, size_n * 16 * bits // 32, seed=seed)
        if kind == "mxfp4":
            codes = torch.randint(110, 128, (*stack, groups, size_n), dtype=torch.uint8)
            self.s = codes.view(torch.float8_e8m0fnu)
        else:
            self.s = drawn(*stack, groups, size_n, seed=seed + 1, low=high / 8, high=high).to(dtype)
            if kind == "fp8":
                # As the preparation of FP8 weights folds the difference of the exponents' biases into them.
                self.s = (self.s.double() * 2.0 ** (8 if dtype == torch.float16 else 120)).to(dtype)
        self.z = words(*stack, groups, size_n // 8, seed=seed + 2) if kind == "int4-zeros" else None
        self.bias = drawn(*stack, size_n, seed=seed + 3).to(dtype) if bias else None
        self.bound = ours.scale_bound(self.s, self.quant_type)

    def to(self, device):
        made = object.__new__(Packed)
        made.__dict__ = {k: v.to(device) if torch.is_tensor(v) else v for k, v in self.__dict__.items()}
        return made

    def times(self, x, bound=None):
        bound = self.bound if bound is None else bound
        return ops.marlin_gemm(x, self.q, self.s, self.z, self.bias, None, self.quant_type, bound)


class Layer:
    def __init__(self, kind, dtype, experts=8, hidden=256, inner=128, group_size=32, bias=False, gated=True, seed=0):
        width = 2 * inner if gated else inner
        self.w1 = Packed(kind, hidden, width, group_size, dtype, experts, bias, seed=seed)
        self.w2 = Packed(kind, inner, hidden, group_size, dtype, experts, bias, seed=seed + 10)
        self.experts, self.hidden, self.dtype = experts, hidden, dtype

    def to(self, device):
        made = object.__new__(Layer)
        made.__dict__ = dict(self.__dict__, w1=self.w1.to(device), w2=self.w2.to(device))
        return made

    def inputs(self, rows, top_k, seed=5, experts=None):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.hidden, generator=generator).to(self.dtype)
        scores = torch.rand(rows, experts or self.experts, generator=generator)
        ids = scores.topk(top_k).indices.to(torch.int32)
        return x, torch.rand(rows, top_k, generator=generator), ids

    def forward(self, x, weights, ids, **more):
        w1, w2 = self.w1, self.w2
        more = dict({"scale_bound1": w1.bound, "scale_bound2": w2.bound}, **more)
        return ops.fused_marlin_moe(
            x, w1.q, w2.q, w1.bias, w2.bias, w1.s, w2.s, weights, ids, w1.quant_type,
            w1_zeros=w1.z, w2_zeros=w2.z, **more,
        )  # fmt: skip


def every_call(device):
    """One call of each operator."""
    packed = Packed("int4", 128, 64, 32, torch.bfloat16).to(device)
    layer = Layer("int4", torch.bfloat16, experts=4, hidden=128, inner=64).to(device)
    w1, w2 = layer.w1, layer.w2
    x, weights, ids = (t.to(device) for t in layer.inputs(3, 2))
    yield "marlin_gemm", (x, packed.q, packed.s)
    yield "marlin_gemm_part", (x, 128, 0, 1, packed.q, packed.s)
    yield "add_ranks", (drawn(2, 3, 64).to(device), 256, torch.bfloat16, packed.q, packed.s)
    yield "fused_marlin_moe", (x, w1.q, w2.q, None, None, w1.s, w2.s, weights, ids)
    yield "gptq_marlin_repack", (words(16, 64).to(device), None, 128, 64, 4)
    yield "awq_marlin_repack", (words(128, 8).to(device), 128, 64, 4)
    yield "marlin_permute_scales", (packed.s, 128, 64, 32)
    yield "moe_align_block_size", (ids, 8, 4)
    yield "topk_router", (drawn(3, 16).to(device), 2, True)
    yield "moe_activation", (x,)
    yield "moe_sum", (x.reshape(3, 2, 64),)
    yield "per_token_quant_int8", (x,)
    yield "per_token_quant_fp8", (x,)


def int4_calls():
    q = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    scales = drawn(64, 1, low=0.01)
    packed = ops.dyn_quant_pack_4bit_weight(q, scales, None, 128, 128, 64)
    yield "dyn_quant_pack_4bit_weight", (q, scales, None, 128, 128, 64)
    yield "dyn_quant_matmul_4bit", (drawn(3, 128), packed, 128, 128, 64)


def overload(name):
    return getattr(ops, name).default


def test_every_operator_is_functional_and_called_here():
    calls = [name for name, _ in [*every_call("cpu"), *int4_calls()]]
    assert sorted(calls) == sorted(ours.OPERATORS)
    for name in calls:
        assert not overload(name)._schema.is_mutable, name
        keys = ["CPU", "Meta"] if name.startswith("dyn_quant") else ["CPU", "CUDA", "Meta"]
        for key in keys:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"marlinspike::{name}", key), (name, key)


@pytest.mark.parametrize("name, args", [*every_call("cpu"), *int4_calls()], ids=lambda v: v if isinstance(v, str) else "")
def test_fake_implementations_have_the_operators_shapes(name, args):
    results = opcheck(overload(name), args)
    assert set(results.values()) == {"SUCCESS"}, results
    made = overload(name)(*args)
    meta = overload(name)(*(a.to("meta") if torch.is_tensor(a) else a for a in args))
    for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (made, meta))):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def dequantized(packed, size_k):
    """The matrix in float64, unpacked by loops over positions."""
    perm = np.argsort(np.asarray(__import__("conftest").marlin_weight_perm(4)))
    q = packed.q.numpy().view(np.uint32)
    codes = np.stack([q >> np.uint32(4 * i) & np.uint32(15) for i in range(8)], -1).reshape(len(q), -1)
    codes = codes.reshape(-1, perm.size)[:, perm].reshape(len(q), -1, 16, 16)
    codes = codes.transpose(0, 2, 1, 3).reshape(size_k, -1)
    scales = packed.s.double().numpy()
    order = np.argsort([p % 8 * 8 + p // 8 for p in range(64)])
    scales = scales.reshape(-1, 64)[:, order].reshape(scales.shape)
    return (codes.astype(np.float64) - 8) * np.repeat(scales, size_k // len(scales), 0)


def test_a_product_is_that_of_the_dequantized_matrix():
    packed = Packed("int4", 256, 128, 64, torch.bfloat16)
    x = torch.randn(5, 256).bfloat16()
    y = packed.times(x).double().numpy()

    def is_product():
        # Dequantized weights are bfloat16, so is the result; the sums are float32.
        matrix = torch.from_numpy(dequantized(packed, 256)).bfloat16().double().numpy()
        exact, sizes = x.double().numpy() @ matrix, np.abs(x.double().numpy()) @ np.abs(matrix)
        bound = 256 * 2.0**-24 * sizes
        return (np.abs(y - exact) <= bound + 2.0**-8 * (np.abs(exact) + bound)).all()

    assert is_product()
    packed.q[3, 5] ^= 0x40
    assert not is_product()


GEMM_ERRORS = {
    "`a`: found torch.float32": lambda a, q, s: (a.float(), q, s),
    "`a`: found shape [3, 64]": lambda a, q, s: (a[:, :64], q, s),
    "`b.weight`: found torch.int64": lambda a, q, s: (a, q.long(), s),
    "`b.weight`: found a tensor on meta": lambda a, q, s: (a, q.to("meta"), s),
    "`b.scales`: found torch.float16": lambda a, q, s: (a, q, s.half()),
    "`b.scales`: found shape [4, 32]": lambda a, q, s: (a, q, s[:, :32]),
    "`b.zeros`": lambda a, q, s: (a, q, s, q),
    "`b.bias`: found shape [63]": lambda a, q, s: (a, q, s, None, a[0, :63].contiguous()),
    "`b.global_scale`": lambda a, q, s: (a, q, s, None, None, torch.ones(1)),
    "quant_type: found uint5": lambda a, q, s: (a, q, s, None, None, None, "uint5"),
    "scale_bound of b: found 3": lambda a, q, s: (a, q, s, None, None, None, "uint4b8", 3),
}


@pytest.mark.parametrize("message", GEMM_ERRORS)
def test_errors_of_a_product_name_the_tensor(message):
    packed = Packed("int4", 128, 64, 32, torch.bfloat16)
    a = torch.randn(3, 128).bfloat16()
    with pytest.raises(marlinspike.Error) as error:
        ops.marlin_gemm(*GEMM_ERRORS[message](a, packed.q, packed.s))
    assert message in str(error.value)
    assert ops.marlin_gemm(a, packed.q, packed.s).shape == (3, 64)


MOE_ERRORS = {
    "`hidden_states`: found shape [3, 64]": lambda a: a.update(x=a["x"][:, :64]),
    "`w1.scales`: found shape": lambda a: a["layer"].w1.__dict__.update(s=a["layer"].w1.s[:3]),
    "`w2.weight`: found shape": lambda a: a["layer"].w2.__dict__.update(q=a["layer"].w2.q[:3], s=a["layer"].w2.s[:3]),
    "`topk_ids`: found torch.int16": lambda a: a.update(ids=a["ids"].short()),
    "`topk_ids`: found shape [2, 2]": lambda a: a.update(ids=a["ids"][:2]),
    "`topk_weights`: found torch.bfloat16": lambda a: a.update(weights=a["weights"].bfloat16()),
    "`expert_map`: found None": lambda a: a["more"].update(global_num_experts=8),
    "`expert_map`: found shape [3]": lambda a: a["more"].update(expert_map=torch.zeros(3, dtype=torch.int32)),
    "activation: found sine": lambda a: a["more"].update(activation="sine"),
}


@pytest.mark.parametrize("message", MOE_ERRORS)
def test_errors_of_a_layer_name_the_tensor(message):
    layer = Layer("int4", torch.bfloat16, experts=4, hidden=128, inner=64)
    x, weights, ids = layer.inputs(3, 2)
    args = {"layer": layer, "x": x, "weights": weights, "ids": ids, "more": {}}
    MOE_ERRORS[message](args)
    with pytest.raises(marlinspike.Error) as error:
        args["layer"].forward(args["x"], args["weights"], args["ids"], **args["more"])
    assert message in str(error.value)


@pytest.mark.skipif(HAS_CUDA, reason="a CUDA device")
def test_without_a_driver_an_operator_names_it():
    sizes = ("uint4b8", "bits16", 1, 64, 64, 1)
    weight = (sizes, (0, 512), (0, 128), None, None, None)
    with pytest.raises(marlinspike.Error, match="no CUDA device"):
        _core.cuda_gemm((0, 0), "bfloat16", weight, (0, 64), (0, 64), None, None)


def test_products_of_no_rows():
    packed = Packed("int4", 128, 64, 32, torch.bfloat16)
    assert packed.times(torch.empty(0, 128).bfloat16()).shape == (0, 64)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_repacked_stacks_are_their_matrices(bits):
    if bits == 3:
        with pytest.raises(marlinspike.Error, match="num_bits: found 3"):
            ops.gptq_marlin_repack(words(16, 64), None, 128, 64, 3)
        return
    stack = words(3, 128 * bits // 32, 64)
    perm = torch.stack([torch.randperm(128) for _ in range(3)]).int()
    for order in [None, perm]:
        made = ops.gptq_marlin_repack(stack, order, 128, 64, bits)
        for e in range(3):
            one = ops.gptq_marlin_repack(stack[e], None if order is None else order[e], 128, 64, bits)
            assert torch.equal(made[e], one)


def test_block_scales_have_the_kernels_order():
    scales = torch.arange(128, dtype=torch.uint8).reshape(2, 64)
    # vLLM 0.21.0's steps: columns of a transposed 8 x 8 tile, then each four as 0, 2, 1, 3.
    expected = scales.reshape(2, 8, 8).transpose(1, 2).reshape(2, 16, 4)[:, :, [0, 2, 1, 3]].reshape(2, 64)
    assert torch.equal(ours.permute_block_scales(scales), expected)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden data")
@pytest.mark.parametrize("pattern", ["cw??", "gw??", "bc??", "bg??"])
def test_the_int4_path_has_the_bits_of_arm(pattern):
    """Recorded from torch's operators on an Arm CPU."""
    files = sorted(GOLDEN.glob(f"dyn_quant_linear-{pattern}.safetensors"))
    assert files
    for file in files:
        case = marlinspike.Case.read(file).torch()
        config, inputs = case.config, case.inputs
        size_n, size_k = config["size_n"], config["size_k"]
        q = inputs["weight_u4"]
        group = config.get("group_size", -1)
        block = size_k if group == -1 else group
        packed = ops.dyn_quant_pack_4bit_weight(q, inputs["weight_scale"], inputs.get("bias"), block, size_k, size_n)
        y = ops.dyn_quant_matmul_4bit(inputs["x"], packed, block, size_k, size_n)
        assert_same(y, case.outputs["y"], file.name)
        wrong = ops.dyn_quant_pack_4bit_weight(q ^ 1, inputs["weight_scale"], None, block, size_k, size_n)
        assert not same(ops.dyn_quant_matmul_4bit(inputs["x"], wrong, block, size_k, size_n), y)


def test_aten_is_replaced_when_asked():
    """In a process of its own, for it lasts."""
    script = """
import torch, marlinspike.torch
q, scales, x = torch.randint(0, 256, (64, 64), dtype=torch.uint8), torch.rand(64, 1) + 0.1, torch.randn(3, 128)
ops, aten = torch.ops.marlinspike, torch.ops.aten
args = (128, 128, 64)
def made():
    packed = aten._dyn_quant_pack_4bit_weight(q, scales, None, *args)
    return packed.numel(), aten._dyn_quant_matmul_4bit(x, packed, *args)
ours = ops.dyn_quant_pack_4bit_weight(q, scales, None, *args)
before = made()
marlinspike.torch.install_aten()
marlinspike.torch.install_aten()
after = made()
assert after[0] == ours.numel() and torch.equal(after[1], ops.dyn_quant_matmul_4bit(x, ours, *args))
assert torch.allclose(before[1], after[1], rtol=1e-2, atol=0.5)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# CUDA. Expectations are the CPU implementations' results: the reference.


@cuda
@pytest.mark.parametrize("name, args", [*every_call("cpu")], ids=lambda v: v if isinstance(v, str) else "")
def test_cuda_operators_pass_opcheck_and_have_the_cpus_bits(name, args):
    there = tuple(a.cuda() if torch.is_tensor(a) else a for a in args)
    results = opcheck(overload(name), there)
    assert set(results.values()) == {"SUCCESS"}, results
    made, expected = overload(name)(*there), overload(name)(*args)
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (made, expected)))
    if name == "moe_align_block_size":
        total = int(expected[2])
        pairs = [(made[0][:total], expected[0][:total]), (made[1][: total // 8], expected[1][: total // 8]), (made[2], expected[2])]
    for i, (one, other) in enumerate(pairs):
        assert one.device.type == "cuda"
        assert_same(one, other, f"{name} {i}")


@cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind, group_size", [(k, g) for k, row in KINDS.items() for g in row[2]])
def test_products_have_the_references_bits(kind, group_size, dtype):
    if kind == "mxfp4" and dtype == torch.float16:
        with pytest.raises(marlinspike.Error, match="float16"):
            packed = Packed(kind, 128, 64, group_size, dtype).to("cuda")
            packed.times(torch.ones(1, 128, dtype=dtype, device="cuda"))
        return
    for high, rows in [(1 / 64, (1, 7, 40)), (1 / 4, (3, 100)), (2.0, (17,))]:
        packed = Packed(kind, 256, 192, group_size, dtype, bias=rows[0] == 1, high=high)
        there = packed.to("cuda")
        for size_m in rows:
            x = torch.randn(size_m, 256).to(dtype)
            expected = packed.times(x)
            for bound in {0, packed.bound}:
                assert_same(there.times(x.cuda(), bound), expected, f"M {size_m}, bound {bound}")


#: The numbers of e2m1 codes.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array([*E2M1, *(-v for v in E2M1)])


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=cuda)]
)
@pytest.mark.parametrize("scale_type, block", [("float8_e8m0fnu", 32), ("float8_e4m3fn", 16)])
def test_products_of_4_bit_floats_are_those_of_their_numbers(rng, scale_type, block, device):
    if scale_type == "float8_e4m3fn" and device == "cpu":
        packed = Packed("mxfp4", 64, 64, 32, torch.bfloat16)
        scales = torch.ones(4, 64).to(torch.float8_e4m3fn)
        with pytest.raises(marlinspike.Error, match="`b.scales`: e4m3 scales"):
            ops.marlin_gemm(torch.ones(1, 64).bfloat16(), packed.q, scales, b_q_type="float4_e2m1f")
        return
    size_k, size_n = 256, 128
    codes = rng.integers(0, 16, (size_k, size_n))
    q = torch.from_numpy(__import__("conftest").marlin_pack(codes, 4)).to(device)
    if block == 32:
        bytes_ = torch.from_numpy(rng.integers(118, 126, (size_k // block, size_n)).astype(np.uint8))
        scales, global_scale = bytes_.view(torch.float8_e8m0fnu), None
        numbers = 2.0 ** (bytes_.double().numpy() - 127)
    else:
        scales = torch.from_numpy(rng.uniform(0.5, 400, (size_k // block, size_n))).to(torch.float8_e4m3fn)
        global_scale = torch.tensor([0.0037])
        numbers = scales.double().numpy() * global_scale.double().numpy()
        global_scale = global_scale.to(device)
    x = torch.randn(40, size_k).bfloat16()
    exact = x.double().numpy() @ (E2M1[codes] * np.repeat(numbers, block, axis=0))
    packed_scales = ours.permute_block_scales(scales).to(device)

    def times(s, rows=slice(None)):
        a = x[rows].to(device)
        return ops.marlin_gemm(a, q, s, global_scale=global_scale, b_q_type="float4_e2m1f")

    y = times(packed_scales)
    assert np.abs(y.double().cpu().numpy() - exact).max() <= np.abs(exact).max() * 2**-7
    assert_same(times(packed_scales, slice(17, 18)), y[17:18])
    # Scales in the checkpoint's order are wrong.
    assert np.abs(times(scales.to(device)).double().cpu().numpy() - exact).max() > np.abs(exact).max() * 2**-7


def many_rows(kind="int4", dtype=torch.bfloat16):
    """A product that a device with warpgroup instructions computes by its kernel for many rows."""
    packed = Packed(kind, 512, 1024, 64 if kind != "fp8" else 128, dtype, bias=True)
    return packed, torch.randn(2048, 512).to(dtype)


@cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_many_rows_have_the_bits_of_few(kind, dtype):
    packed, x = many_rows(kind, dtype)
    there, rows = packed.to("cuda"), [0, 1, 255, 256, 1000, 2047]
    y = there.times(x.cuda())
    assert_same(y[rows], packed.times(x[rows]))
    assert_same(y[rows], there.times(x[rows].cuda()))
    if torch.cuda.get_device_capability() == (9, 0):
        sizes = (packed.quant_type, "bits16", 1, 512, 1024, packed.s.shape[0])
        name = str(dtype).replace("torch.", "")
        assert _products._measure_gemm((0, 0), name, sizes, (False, True, False), 2048)[1] > 0


@cuda
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "mxfp4"])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu", "relu2_no_mul"])
def test_layers_have_the_references_bits(kind, activation):
    gated = not activation.endswith("_no_mul")
    group = {"fp8": 128, "mxfp4": 32}.get(kind, 64)
    layer = Layer(kind, torch.bfloat16, group_size=group, bias=True, gated=gated)
    there = layer.to("cuda")
    for size_m, top_k in [(1, 2), (5, 4), (70, 2), (1500, 4)]:
        inputs = layer.inputs(size_m, top_k)
        y = there.forward(*(t.cuda() for t in inputs), activation=activation)
        rows = slice(0, 40)
        expected = layer.forward(*(t[rows] for t in inputs), activation=activation)
        assert_same(y[rows], expected, f"M {size_m}, top_k {top_k}")


@cuda
def test_ranks_of_a_layer():
    layer = Layer("int4", torch.float16)
    there = layer.to("cuda")
    expert_map = torch.full((16,), -1, dtype=torch.int32)
    expert_map[[3, 1, 15, 8, 9, 0, 2, 4]] = torch.arange(8, dtype=torch.int32)
    for on_input in [False, True]:
        for size_m in [3, 400]:
            x, weights, ids = layer.inputs(size_m, 2, experts=16)
            more = {"global_num_experts": 16, "apply_router_weight_on_input": on_input}
            expected = layer.forward(x[:30], weights[:30], ids[:30], expert_map=expert_map, **more)
            more["expert_map"] = expert_map.cuda()
            y = there.forward(x.cuda(), weights.cuda(), ids.cuda(), **more)
            assert_same(y[:30], expected, f"M {size_m}")
            y = there.forward(x.cuda(), weights.cuda(), ids.cuda().long(), **more)
            assert_same(y[:30], expected, f"M {size_m}, int64")


@cuda
@pytest.mark.parametrize("bits", [4, 8])
def test_layouts_have_the_references_bits(bits):
    perm = torch.stack([torch.randperm(256) for _ in range(3)]).int()
    stack = words(3, 256 * bits // 32, 192)
    for order in [None, perm]:
        for a8 in [False, True]:
            made = ops.gptq_marlin_repack(stack.cuda(), None if order is None else order.cuda(), 256, 192, bits, a8)
            assert_same(made, ops.gptq_marlin_repack(stack, order, 256, 192, bits, a8))
    awq = words(256, 192 * bits // 32)
    assert_same(ops.awq_marlin_repack(awq.cuda(), 256, 192, bits), ops.awq_marlin_repack(awq, 256, 192, bits))
    scales = torch.randn(3, 4, 192).half()
    for group_size in [64, -1]:
        made = ops.marlin_permute_scales(scales.cuda(), 256, 192, group_size)
        assert_same(made, ops.marlin_permute_scales(scales, 256, 192, group_size))
    with pytest.raises(marlinspike.Error, match="`perm`: found entries from 0 to 256"):
        wrong = perm.clone()
        wrong[1, 7] = 256
        ops.gptq_marlin_repack(stack.cuda(), wrong.cuda(), 256, 192, bits)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_routing_has_the_references_bits(dtype):
    logits = torch.randn(60, 64).to(dtype)
    bias = torch.randn(64)
    for scoring in ["softmax", "sigmoid"]:
        for renormalize in [False, True]:
            for groups in [(0, 0, 1.0, None), (8, 3, 2.5, bias), (4, 2, 1.0, None)]:
                rule = (4, renormalize, scoring, *groups)
                there = [r.cuda() if torch.is_tensor(r) else r for r in rule]
                made, expected = ops.topk_router(logits.cuda(), *there), ops.topk_router(logits, *rule)
                for one, other in zip(made, expected):
                    assert_same(one, other, f"{scoring} {renormalize} {groups[:2]}")
    ids = torch.randint(0, 64, (700, 4), dtype=torch.int32)
    expert_map = torch.where(torch.rand(64) < 0.5, torch.arange(64), -1).int()
    for map_ in [None, expert_map]:
        made = ops.moe_align_block_size(ids.cuda(), 16, 64, None if map_ is None else map_.cuda())
        expected = ops.moe_align_block_size(ids, 16, 64, map_)
        total = int(expected[2])
        assert int(made[2]) == total
        assert_same(made[0][:total], expected[0][:total])
        assert_same(made[1][: total // 16], expected[1][: total // 16])


@cuda
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_quantizers_and_sums_have_the_references_bits(dtype):
    x = torch.randn(50, 328).to(dtype) * 3
    calls = {
        "per_token_quant_int8": [(x,), (x, "product")],
        "per_token_quant_fp8": [(x,), (x, 1.5)],
        "moe_sum": [(x.reshape(25, 2, 328),), (x.reshape(10, 5, 328),)],
        "moe_activation": [(x, a) for a in ("silu", "gelu", "gelu_tanh", "swigluoai", "silu_no_mul")],
    }
    for name, all_args in calls.items():
        for args in all_args:
            made = overload(name)(args[0].cuda(), *args[1:])
            expected = overload(name)(*args)
            for one, other in zip(*(v if isinstance(v, tuple) else (v,) for v in (made, expected))):
                assert_same(one, other, f"{name} {args[1:]}")


@cuda
@pytest.mark.parametrize("size_m", [1, 16, 700])
def test_graphs_replay_with_the_same_bits(size_m):
    layer = Layer("int4", torch.bfloat16, hidden=512, inner=256)
    packed = Packed("int4", 512, 1024, 64, torch.bfloat16)
    there, product = layer.to("cuda"), packed.to("cuda")
    x, weights, ids = (t.cuda() for t in layer.inputs(size_m, 2))

    def step():
        y = there.forward(x, weights, ids)
        return y, product.times(y)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for i in range(100):
        for one in made:
            one.fill_(float("nan"))
        graph.replay()
        for one, other in zip(made, expected):
            assert torch.equal(one, other), i
    # Other inputs at the same addresses.
    other = [t.cuda() for t in layer.inputs(size_m, 2, seed=77)]
    for old, new in zip((x, weights, ids), other):
        old.copy_(new)
    graph.replay()
    again = step()
    assert not torch.equal(again[0], expected[0])
    for one, two in zip(made, again):
        assert torch.equal(one, two)


@cuda
def test_compiled_functions_have_the_same_bits():
    layer = Layer("int4", torch.bfloat16).to("cuda")
    packed = Packed("int4", 256, 128, 64, torch.bfloat16).to("cuda")

    def step(x, logits):
        weights, ids = ops.topk_router(logits, 2, True)
        y = layer.forward(x, weights, ids) * 2 + x
        return packed.times(torch.relu(y))

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for size_m in [3, 64, 5]:
        x, logits = torch.randn(size_m, 256).bfloat16().cuda(), torch.randn(size_m, 8).cuda()
        assert torch.equal(compiled(x, logits), step(x, logits)), size_m


@cuda
def test_two_streams_at_once():
    packed, x = many_rows()
    there, x = packed.to("cuda"), x.cuda()
    other = x.flip(0).contiguous()
    expected = [there.times(x), there.times(other)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made = [[], []]
    for _ in range(30):
        for stream, results, rows in zip(streams, made, (x, other)):
            with torch.cuda.stream(stream):
                results.append(there.times(rows))
    torch.cuda.synchronize()
    for results, right in zip(made, expected):
        assert all(torch.equal(y, right) for y in results)


@cuda
def test_threads_may_call_at_once():
    packed, x = many_rows()
    there, x = packed.to("cuda"), x.cuda()
    expected, wrong = there.times(x), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                y = there.times(x)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(y, expected):
                    wrong.append(1)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_keeps_a_copy_alive():
    shifted = torch.zeros(64 + 1)[1:]
    copy = _tensors.aligned(shifted)
    assert copy.data_ptr() != shifted.data_ptr()
    kept, address = weakref.ref(copy), copy.data_ptr()
    memory = _tensors.memory("x", copy)
    size = _tensors.as_bytes(memory, copy)
    del copy
    assert kept() is not None and (tuple(memory), tuple(size)) == ((address, 64), (address, 256))
    del memory
    assert kept() is not None
    del size
    assert kept() is None


@cuda
def test_strided_and_shifted_tensors():
    packed = Packed("int4", 256, 128, 64, torch.bfloat16).to("cuda")
    x = torch.randn(300, 7).bfloat16().cuda()
    assert torch.equal(packed.times(x[8:264].t()), packed.times(x[8:264].t().contiguous()))
    long = torch.randn(1 + 4 * 256).bfloat16().cuda()
    assert torch.equal(packed.times(long[1:].view(4, 256)), packed.times(long[1:].clone().view(4, 256)))
    with pytest.raises(marlinspike.Error, match="`b.weight`: found strides"):
        ops.marlin_gemm(x[8:264].t().contiguous(), packed.q.t().contiguous().t(), packed.s)


@cuda
def test_a_kernel_that_is_not_loaded_is_refused_in_a_capture():
    # In a process of its own, which has not loaded this kernel.
    script = """
import pytest, torch, marlinspike
from test_torch_operators import Packed, assert_same
packed = Packed("int8", 64, 64, -1, torch.float16, bias=True).to("cuda")
x = torch.randn(2, 64).half().cuda()
# Another kernel, which opens the device.
Packed("int4", 64, 64, 64, torch.float16).to("cuda").times(x)
torch.cuda.synchronize()
with pytest.raises(marlinspike.Error, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
    packed.times(x)
torch.cuda.synchronize()
assert_same(packed.times(x), packed.to("cpu").times(x.cpu()))
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_the_tables_of_a_kept_expert_map_are_made_once_and_again_after_a_change():
    from marlinspike.torch import _products, keep_expert_map

    expert_map = torch.tensor([-1, 0, 5, 1], dtype=torch.int32)

    def tables(local=2):
        return _products.tables(4, local, expert_map, expert_map.device)

    run_of, expert_of, local = tables()
    assert run_of.tolist() == [-1, 0, -1, 65537] and expert_of.tolist() == [-1, 0, -1, 1] and local == 2
    assert tables()[0] is not run_of
    keep_expert_map(expert_map, 2)
    kept = tables()
    assert kept[0] is tables()[0] and same(kept[0], run_of) and same(kept[1], expert_of)
    # Of another number of experts here, and after a change.
    assert tables(1)[1].tolist() == [-1, 0, -1, -1]
    expert_map[0] = 1
    assert tables()[1].tolist() == [1, 0, -1, 1]
    keep_expert_map(expert_map, 2)
    assert tables()[0] is tables()[0] and tables()[1].tolist() == [1, 0, -1, 1]
    with pytest.raises(marlinspike.Error, match="expert_map"):
        keep_expert_map(expert_map.float(), 2)
