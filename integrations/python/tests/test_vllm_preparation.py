"""The plugin's replacements on weights that vLLM 0.21.0 itself has prepared, against products in double precision.

Needs vLLM's Python files and what they import; without a GPU, the operators of this package repack.
"""

import pathlib
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

import marlinspike.torch  # noqa: E402, F401

PLUGIN = pathlib.Path(__file__).parents[2] / "vllm"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16


@pytest.fixture
def upstream(monkeypatch):
    """vLLM's modules, with memory and repacking where there is no GPU."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    utils = "vllm.model_executor.layers.quantization.utils"
    import importlib

    fp8 = importlib.import_module(f"{utils}.marlin_utils_fp8")
    fp4 = importlib.import_module(f"{utils}.marlin_utils_fp4")
    if DEVICE == "cpu":

        def repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
            return torch.ops.marlinspike.gptq_marlin_repack(b_q_weight, None, size_k, size_n, num_bits, is_a_8bit)

        for module in (fp8, fp4):
            monkeypatch.setattr(module, "ops", types.SimpleNamespace(gptq_marlin_repack=repack))
            monkeypatch.setattr(module, "marlin_make_workspace_new", lambda device, blocks=1: None)
    linear = importlib.import_module("vllm.model_executor.kernels.linear.scaled_mm.marlin")
    experts = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.marlin_moe")
    ours = importlib.import_module("marlinspike_vllm._replacements")
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        checked = ours.refusal
        on_cuda = lambda x: types.SimpleNamespace(is_cuda=True, dtype=x.dtype, device=x.device, shape=x.shape)  # noqa: E731
        monkeypatch.setattr(ours, "refusal", lambda x, *rest: checked(on_cuda(x), *rest))
        monkeypatch.setattr(ours, "_is_on_gpu", lambda tensor: True)
    return types.SimpleNamespace(fp8=fp8, fp4=fp4, linear=linear, experts=experts, ours=ours)


def drawn(*shape, seed, scale=1.0):
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (made * scale).to(DEVICE)


def close(y, exact, magnitude):
    """Within the roundings to bf16 of the output and of each weight times its scale; the terms' magnitudes add up to
    ``magnitude``."""
    assert y.dtype == BF16 and torch.isfinite(y).all()
    error = (y.double() - exact).abs()
    allowed = exact.abs() * 2.0**-8 + magnitude * 2.0**-9
    assert (error <= allowed).all(), float((error / allowed).max())


class Fp8Layer(torch.nn.Module):
    def __init__(self, size_k, size_n, block):
        super().__init__()
        self.input_size_per_partition, self.output_size_per_partition = size_k, size_n
        self.orig_dtype, self.logical_widths = BF16, [size_n]
        self.weight_block_size = [128, 128] if block else None
        codes = drawn(size_n, size_k, seed=1).to(torch.float8_e4m3fn)
        parameter = lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)  # noqa: E731
        self.weight = parameter(codes)
        self.bias = parameter(drawn(size_n, seed=3).to(BF16))
        shape = (-(-size_n // 128), -(-size_k // 128)) if block else (size_n, 1)
        scales = drawn(*shape, seed=2).abs() / 16 + 0.01
        setattr(self, "weight_scale_inv" if block else "weight_scale", parameter(scales))
        # Scales are rounded to the activations' type; the definition multiplies by them.
        spread = scales.to(BF16).double()
        if block:
            spread = spread.repeat_interleave(128, 0)[:size_n].repeat_interleave(128, 1)[:, :size_k]
        self.exact = codes.double() * spread


@pytest.mark.parametrize("block", [False, True])
def test_fp8_linear_layers(upstream, block):
    size_k, size_n = 256, 384
    layer = Fp8Layer(size_k, size_n, block)
    bias = layer.bias.double()
    kernel = object.__new__(upstream.linear.MarlinFP8ScaledMMLinearKernel)
    kernel.block_quant, kernel.size_k_first, kernel.marlin_input_dtype = block, not block, None
    if block:
        upstream.linear.process_fp8_weight_block_strategy = lambda weight, scale: (weight, scale)
    kernel._get_layer_params = lambda layer: (layer.weight,)
    original = type(kernel).process_weights_after_loading
    upstream.ours.fp8_process(original)(kernel, layer)
    assert kernel._is_marlinspike and layer.weight.dtype == torch.int32
    x = drawn(2, 5, size_k, seed=4).to(BF16)
    y = upstream.ours.fp8_apply(type(kernel).apply_weights)(kernel, layer, x, layer.bias)
    assert y.shape == (2, 5, size_n)
    close(y, x.double() @ layer.exact.T + bias, x.double().abs() @ layer.exact.abs().T + bias.abs())
    one = upstream.ours.fp8_apply(type(kernel).apply_weights)(kernel, layer, x[1:, 2:3], layer.bias)
    assert torch.equal(one[0, 0], y[1, 2])


def activated(name, gate_up):
    if name == "silu":
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def layer_of(x, w1, w2, b1, b2, ids, weights, activation):
    """A layer in double precision, with the roundings to bf16 between its steps."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            e = ids[token, slot]
            inner = (w1[e] @ x[token].double() + b1[e]).to(BF16).double()
            inner = activated(activation, inner).to(BF16).double()
            out[token] += (w2[e] @ inner + b2[e]) * weights[token, slot].double()
    return out


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def mxfp4_weights(e, size_n, size_k, seed):
    """Codes, e8m0 scales, values."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (e, size_n, size_k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (e, size_n, size_k // 32), dtype=torch.uint8, generator=generator)
    values = FP4[torch.stack((codes & 15, codes >> 4), -1).long()].reshape(e, size_n, size_k)
    values = values * (2.0 ** (scales.double() - 127)).repeat_interleave(32, 2)
    return codes.to(DEVICE), scales.to(DEVICE), values.to(DEVICE)


def routed(tokens, experts):
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)])
    return ids.int().to(DEVICE), (drawn(tokens, 2, seed=9).abs() + 0.1)


def applied(upstream, config, x, w1, w2, ids, weights, activation):
    """``MarlinExperts.apply`` with the replacement, on an object that has what upstream's constructor sets."""
    cls = upstream.experts.MarlinExperts
    made = object.__new__(cls)
    made.quant_config, made.input_dtype, made._lora_context = config, None, None
    made.w13_g_idx = made.w2_g_idx = None
    made.gemm1_clamp_limit = config.gemm1_clamp_limit
    out = torch.empty_like(x)
    apply = upstream.ours.experts_apply(lambda *_: pytest.fail("upstream's kernel was called"))
    rest = (w1.shape[0], None, None, None, None, None, None, False)
    apply(made, out, x, w1, w2, weights, ids, types.SimpleNamespace(value=activation), *rest)
    return out


@pytest.mark.parametrize("activation", ["swigluoai", "silu"])
def test_mxfp4_experts(upstream, activation):
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config

    e, hidden, inner, tokens = 4, 256, 128, 6
    (c1, s1, v1), (c2, s2, v2) = mxfp4_weights(e, 2 * inner, hidden, 1), mxfp4_weights(e, hidden, inner, 2)
    b1, b2 = drawn(e, 2 * inner, seed=3).to(BF16), drawn(e, hidden, seed=4).to(BF16)
    layer = types.SimpleNamespace(params_dtype=BF16)
    w1, w2, q1, q2, p1, p2 = upstream.fp4.prepare_moe_mxfp4_layer_for_marlin(layer, c1, c2, s1, s2, b1, b2)
    limit = 7.0 if activation == "swigluoai" else None
    config = mxfp4_w4a16_moe_quant_config(q1, q2, p1, p2, gemm1_clamp_limit=limit)
    x, (ids, weights) = drawn(tokens, hidden, seed=5).to(BF16), routed(tokens, e)
    out = applied(upstream, config, x, w1, w2, ids, weights, activation)
    exact = layer_of(x, v1, v2, b1.double(), b2.double(), ids, weights, activation)
    assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()
    alone = applied(upstream, config, x[3:4], w1, w2, ids[3:4], weights[3:4], activation)
    assert torch.equal(alone[0], out[3])


@pytest.mark.parametrize("block", [False, True])
def test_fp8_experts(upstream, block):
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a16_moe_quant_config

    e, hidden, inner, tokens = 4, 256, 128, 6
    c1 = drawn(e, 2 * inner, hidden, seed=1).to(torch.float8_e4m3fn)
    c2 = drawn(e, hidden, inner, seed=2).to(torch.float8_e4m3fn)
    shapes = [(e, 2, 2), (e, 2, 1)] if block else [(e, 2 * inner, 1), (e, hidden, 1)]
    scales = [drawn(*shape, seed=6 + i).abs() / 16 + 0.02 for i, shape in enumerate(shapes)]
    layer = types.SimpleNamespace(
        num_experts=e, hidden_size=hidden, intermediate_size_per_partition=inner, orig_dtype=BF16,
        weight_block_size=[128, 128] if block else None, w13_weight=c1,
    )  # fmt: skip
    w1, w2, s1, s2 = upstream.fp8.prepare_fp8_moe_layer_for_marlin(layer, c1, c2, *scales)
    config = fp8_w8a16_moe_quant_config(s1, s2, block_shape=layer.weight_block_size)
    values = []
    for codes, scale in zip((c1, c2), scales):
        spread = scale.to(BF16).double()
        if block:
            spread = spread.repeat_interleave(128, 1).repeat_interleave(128, 2)
        values.append(codes.double() * spread)
    x, (ids, weights) = drawn(tokens, hidden, seed=5).to(BF16), routed(tokens, e)
    out = applied(upstream, config, x, w1, w2, ids, weights, "silu")
    zeros = [torch.zeros(e, n, dtype=torch.float64, device=DEVICE) for n in (2 * inner, hidden)]
    exact = layer_of(x, *values, *zeros, ids, weights, "silu")
    assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()
    wrong = layer_of(x, values[0], values[1].flip(1), *zeros, ids, weights, "silu")
    assert (out.double() - wrong).abs().max() > 0.2 * exact.abs().max()
