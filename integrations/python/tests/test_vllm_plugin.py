"""The plugin for vLLM, on stand-ins of vLLM's modules with upstream's signatures.

``VLLM_SOURCE=DIR`` (a folder with vLLM's ``vllm/``, .py files are enough) compares the signatures with upstream's.
"""

import ast
import importlib
import logging
import os
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import marlinspike.torch  # noqa: E402, F401

PLUGIN = pathlib.Path(__file__).parents[2] / "vllm"
pytestmark = pytest.mark.skipif(not PLUGIN.is_dir(), reason="no plugin next to the tests")
SOURCE = os.environ.get("VLLM_SOURCE")


class Type:
    def __init__(self, id):
        self.id = id


class Envs(types.ModuleType):
    VLLM_BATCH_INVARIANT = False
    VLLM_TEST_FORCE_FP8_MARLIN = False


class Activation:
    def __init__(self, value):
        self.value = value


def module(monkeypatch, name, **members):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            made = types.ModuleType(path)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, path, made)
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made)
    for member, value in members.items():
        setattr(sys.modules[name], member, value)
    return sys.modules[name]


@pytest.fixture
def plugin(monkeypatch):
    """The plugin, freshly imported, with stand-ins of vLLM's modules."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "marlinspike_vllm")]:
        monkeypatch.delitem(sys.modules, name)
    signatures = importlib.import_module("marlinspike_vllm._signatures")
    called = []

    def stand_in(key):
        parameters = signatures.SIGNATURES[key]
        optional = parameters[parameters.index("quant_type_id") + 1 :] if "quant_type_id" in parameters else []
        optional = ["bias"] if parameters[-1:] == ["bias"] else optional
        text = ", ".join(p + "=None" if p in optional else p for p in parameters)
        scope = {"called": called, "key": key}
        exec(f"def made({text}): called.append(key); return 'upstream'", scope)  # noqa: S102
        return scope["made"]

    made = {key: stand_in(key) for key in signatures.SIGNATURES}
    experts = type(
        "MarlinExperts",
        (),
        {
            "apply": made[signatures.EXPERTS, "MarlinExperts.apply"],
            "_supports_batch_invariance": staticmethod(lambda: False),
        },
    )
    linear = type(
        "MarlinLinearKernel",
        (),
        {name: made[signatures.LINEAR, f"MarlinLinearKernel.{name}"] for name in ("process_weights_after_loading", "apply_weights")},
    )
    fp8_name = "MarlinFP8ScaledMMLinearKernel"
    members = {name: made[signatures.LINEAR_FP8, f"{fp8_name}.{name}"] for name in ("process_weights_after_loading", "apply_weights")}
    # As upstream: never in batch-invariant mode.
    members["is_supported"] = classmethod(lambda cls, compute_capability=None: (not envs.VLLM_BATCH_INVARIANT, "upstream's"))
    fp8 = type(fp8_name, (), members)
    method = type("Fp8LinearMethod", (), {"apply": made[signatures.FP8, "Fp8LinearMethod.apply"]})
    priorities = classmethod(lambda cls, vllm_config: types.SimpleNamespace(fused_add_rms_norm=["vllm_c", "native"]))
    cuda = type("CudaPlatformBase", (), {"get_default_ir_op_priority": priorities})
    rows = type("RowParallelLinear", (), {"forward": made[signatures.ROWS, "RowParallelLinear.forward"]})
    reduced = property(lambda self: called.append("reduced") or False)
    runner = type("MoERunner", (), {"_fused_output_is_reduced": reduced})
    machete = type("MacheteLinearKernel", (), {})
    first = type("CutlassW4A8LinearKernel", (), {})
    envs = Envs("vllm.envs")
    platform = types.SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    module(monkeypatch, "vllm", __version__="0.21.0", envs=envs)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    types_ = types.SimpleNamespace(uint4b8=Type(1), uint8b128=Type(2), uint4=Type(3))
    module(monkeypatch, "vllm.scalar_type", scalar_types=types_)
    module(monkeypatch, "vllm.platforms", current_platform=platform, PlatformEnum=types.SimpleNamespace(CUDA="cuda"))
    module(monkeypatch, signatures.EXPERTS, MarlinExperts=experts)
    moe = made[signatures.COMPRESSED, "fused_marlin_moe"]
    module(monkeypatch, signatures.COMPRESSED, fused_marlin_moe=moe)
    module(monkeypatch, signatures.LINEAR, MarlinLinearKernel=linear)
    module(monkeypatch, signatures.LINEAR_FP8, MarlinFP8ScaledMMLinearKernel=fp8)
    module(monkeypatch, signatures.FP8, Fp8LinearMethod=method)
    module(monkeypatch, signatures.PLATFORM, CudaPlatformBase=cuda)
    module(monkeypatch, signatures.ROWS, RowParallelLinear=rows)
    module(monkeypatch, signatures.RUNNER, MoERunner=runner)
    settings = "VLLM_ALLREDUCE_USE_SYMM_MEM=0 NCCL_MAX_NCHANNELS=1 NCCL_PROTO=Simple".split()
    override = lambda: os.environ.update(dict(setting.split("=") for setting in settings))  # noqa: E731
    module(monkeypatch, signatures.INVARIANT[0], override_envs_for_invariance=override)
    module(monkeypatch, signatures.KERNELS, _POSSIBLE_KERNELS={"cuda": [first, machete, linear]})
    return types.SimpleNamespace(
        register=importlib.import_module("marlinspike_vllm").register,
        signatures=signatures,
        replacements=importlib.import_module("marlinspike_vllm._replacements"),
        experts=experts,
        linear=linear,
        fp8=fp8,
        fp8_method=method,
        cuda=cuda,
        rows=rows,
        runner=runner,
        invariant=sys.modules[signatures.INVARIANT[0]],
        kernels=sys.modules[signatures.KERNELS]._POSSIBLE_KERNELS["cuda"],
        compressed=sys.modules[signatures.COMPRESSED],
        called=called,
        envs=envs,
        platform=platform,
        types=types_,
    )


def test_every_hook_is_replaced_once_and_the_log_says_so(plugin, caplog):
    with caplog.at_level(logging.INFO, "vllm.marlinspike"):
        plugin.register()
        apply, moe = plugin.experts.apply, plugin.compressed.fused_marlin_moe
        plugin.register()
    assert plugin.experts.apply is apply and plugin.compressed.fused_marlin_moe is moe
    assert plugin.experts._supports_batch_invariance() is True
    assert all("marlinspike_vllm" in f.__code__.co_filename for f in (apply, moe, plugin.linear.apply_weights))
    names = [kernel.__name__ for kernel in plugin.kernels]
    assert names == ["CutlassW4A8LinearKernel", "MarlinLinearKernel", "MacheteLinearKernel"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "marlinspike: replaced MarlinExperts.apply, fused_marlin_moe of compressed-tensors, "
        "MarlinLinearKernel, MarlinFP8ScaledMMLinearKernel (vLLM 0.21.0)"
    )


def test_another_signature_is_left_alone_or_an_error(plugin, caplog):
    original = plugin.experts.apply
    plugin.compressed.fused_marlin_moe = lambda hidden_states, w1, w2: None
    plugin.register()
    assert "fused_marlin_moe takes (hidden_states, w1, w2)" in caplog.text
    assert plugin.experts.apply is not original and plugin.compressed.fused_marlin_moe(1, 2, 3) is None


def test_batch_invariant_mode_needs_every_hook(plugin):
    plugin.envs.VLLM_BATCH_INVARIANT = True
    del plugin.linear.apply_weights
    with pytest.raises(RuntimeError, match="VLLM_BATCH_INVARIANT=1: .*apply_weights is missing"):
        plugin.register()


def layer(on_cuda):
    experts, hidden, inner = 4, 128, 64
    x = torch.randn(3, hidden).bfloat16()
    parts = [
        torch.randint(-(2**31), 2**31 - 1, (experts, hidden // 16, 4 * inner), dtype=torch.int32),
        torch.randint(-(2**31), 2**31 - 1, (experts, inner // 16, 2 * hidden), dtype=torch.int32),
        torch.rand(experts, 1, 2 * inner).bfloat16() / 64,
        torch.rand(experts, 1, hidden).bfloat16() / 64,
        torch.rand(3, 2),
        torch.tensor([[0, 1], [2, 3], [1, 3]], dtype=torch.int32),
    ]
    return [t.to("cuda" if on_cuda else "cpu") for t in (x, *parts)]


def quantized(scheme):
    schemes = ("int4_w4a16", "int8_w8a16", "mxfp4_w4a16", "fp8_w8a16", "nvfp4_w4a16")
    return types.SimpleNamespace(**{f"use_{name}": name == scheme for name in schemes})


def this_experts(plugin, s1, s2, **more):
    made = plugin.experts()
    none = "_lora_context input_dtype gemm1_clamp_limit w13_g_idx w2_g_idx g1_alphas g2_alphas w1_zp w2_zp w1_bias w2_bias"
    for name in none.split():
        setattr(made, name, None)
    made.quant_type_id, made.quant_config = 1, quantized("int4_w4a16")
    made.w1_scale, made.w2_scale = s1, s2
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def anywhere(plugin, monkeypatch):
    """The check of the device passes, so that the CPU's operators run."""
    if torch.cuda.is_available():
        return True
    checked = plugin.replacements.refusal

    class OnCuda:
        def __init__(self, x):
            self.is_cuda, self.dtype, self.device, self.shape = True, x.dtype, x.device, x.shape

    monkeypatch.setattr(plugin.replacements, "refusal", lambda x, *rest: checked(OnCuda(x), *rest))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return False


def test_experts_are_computed_by_the_operator_or_by_upstream(plugin, anywhere, caplog):
    plugin.register()
    x, w1, w2, s1, s2, weights, ids = layer(anywhere)
    rest = (Activation("silu"), 4, None, None, None, None, None, None, False)
    out = torch.empty_like(x)
    plugin.experts.apply(this_experts(plugin, s1, s2), out, x, w1, w2, weights, ids, *rest)
    expected = torch.ops.marlinspike.fused_marlin_moe(x, w1, w2, None, None, s1, s2, weights, ids)
    assert torch.equal(out, expected) and not plugin.called
    y = plugin.compressed.fused_marlin_moe(
        x, w1, w2, None, None, s1, s2, weights, ids, quant_type_id=1, activation=Activation("silu"),
        global_num_experts=4, g_idx1=torch.empty(0), workspace=torch.empty(1), inplace=False,
    )  # fmt: skip
    assert torch.equal(y, expected) and not plugin.called
    refused = {
        "LoRA is set": dict(_lora_context=object()),
        "w13_g_idx is set": dict(w13_g_idx=torch.zeros(4, 128)),
        "8-bit activations is set": dict(input_dtype=torch.int8),
        "weights of another type": dict(quant_config=quantized("nvfp4_w4a16")),
        "scales of torch.bfloat16 with": dict(quant_config=quantized("mxfp4_w4a16")),
        "scales of torch.float16 with": dict(w2_scale=s2.half()),
        "no scales": dict(w1_scale=None),
        "3 groups of 128 rows": dict(w1_scale=s1.repeat(1, 3, 1).contiguous()),
    }
    for reason, more in refused.items():
        this = this_experts(plugin, s1, s2, **more)
        assert plugin.experts.apply(this, out, x, w1, w2, weights, ids, *rest) == "upstream"
        assert reason in caplog.text
    assert len(plugin.called) == len(refused)
    plugin.envs.VLLM_BATCH_INVARIANT = True
    with pytest.raises(RuntimeError, match="cannot compute MarlinExperts: LoRA is set"):
        this = this_experts(plugin, s1, s2, _lora_context=object())
        plugin.experts.apply(this, out, x, w1, w2, weights, ids, *rest)
    odd = (Activation("swiglustep"), *rest[1:])
    with pytest.raises(RuntimeError, match="activation swiglustep"):
        plugin.experts.apply(this_experts(plugin, s1, s2), out, x, w1, w2, weights, ids, *odd)
    plugin.experts.apply(this_experts(plugin, s1, s2), out, x, w1, w2, weights, ids, *rest)


def test_linear_layers(plugin, monkeypatch, caplog):
    plugin.register()
    size_k, size_n = 128, 64
    q = torch.randint(-(2**31), 2**31 - 1, (size_k // 16, size_n * 2), dtype=torch.int32)
    s = torch.rand(2, size_n).bfloat16() / 64
    config = types.SimpleNamespace(
        zero_points=False, weight_type=plugin.types.uint4b8, act_type=torch.bfloat16, has_g_idx=False,
        partition_weight_shape=(size_k, size_n),
    )  # fmt: skip
    kernel = plugin.linear()
    kernel.config, kernel._get_weight_params = config, lambda layer: (q, s, None, torch.empty(0))
    x = torch.randn(2, 3, size_k).bfloat16()
    # On the CPU, the layer keeps upstream's kernel.
    kernel.process_weights_after_loading(None)
    assert kernel.apply_weights(None, x) == "upstream" and "below capability" in caplog.text
    kernel._marlinspike_type = "uint4b8"
    y = kernel.apply_weights(None, x)
    assert torch.equal(y, torch.ops.marlinspike.marlin_gemm(x.reshape(6, -1), q, s).reshape(2, 3, -1))
    config.has_g_idx = True
    plugin.envs.VLLM_BATCH_INVARIANT = True
    with pytest.raises(RuntimeError, match="MarlinLinearKernel: act-order"):
        kernel.process_weights_after_loading(None)


def test_fp8_linear_layers(plugin, monkeypatch, caplog):
    plugin.register()
    size_k, size_n = 128, 64
    q = torch.randint(0, 0x77, (size_k // 16, size_n * 16), dtype=torch.uint8).view(torch.int32)
    scale = ((torch.rand(1, size_n) / 64).double() * 2.0**120).bfloat16()
    layer = types.SimpleNamespace(
        weight=q, weight_scale=scale, orig_dtype=torch.bfloat16, input_size_per_partition=size_k,
        output_size_per_partition=size_n,
    )  # fmt: skip
    kernel = plugin.fp8()
    kernel.block_quant, kernel.marlin_input_dtype = False, None
    x = torch.randn(2, 3, size_k).bfloat16()
    # On the CPU, the layer keeps upstream's kernel.
    kernel.process_weights_after_loading(layer)
    assert kernel.apply_weights(layer, x) == "upstream" and "below capability" in caplog.text
    monkeypatch.setattr(plugin.replacements, "_is_on_gpu", lambda tensor: True)
    kernel.process_weights_after_loading(layer)
    y = kernel.apply_weights(layer, x)
    expected = torch.ops.marlinspike.marlin_gemm(x.reshape(6, -1), q, scale, b_q_type="float8_e4m3fn")
    assert torch.equal(y, expected.reshape(2, 3, -1))
    layer.weight_scale = scale.half()
    plugin.envs.VLLM_BATCH_INVARIANT = True
    with pytest.raises(RuntimeError, match="MarlinFP8ScaledMMLinearKernel: scales of torch.float16"):
        kernel.process_weights_after_loading(layer)
    # Upstream's method would widen the packed weights in this mode.
    method = plugin.fp8_method()
    method.use_marlin, method.fp8_linear = True, types.SimpleNamespace(apply_weights=lambda *_: "the kernel's")
    assert method.apply(layer, x) == "the kernel's"
    method.use_marlin = False
    assert method.apply(layer, x) == "upstream"


def test_fp8_kernels_are_chosen_as_upstream_does_but_in_batch_invariant_mode_too(plugin):
    supported = plugin.fp8.is_supported
    plugin.register()
    assert plugin.fp8.is_supported(90) == supported(90)
    plugin.envs.VLLM_BATCH_INVARIANT = True
    assert plugin.fp8.is_supported(86) == plugin.fp8.is_supported() == (True, None)
    assert plugin.fp8.is_supported(75) == (False, "upstream's")
    assert "VLLM_TEST_FORCE_FP8_MARLIN=1" in plugin.fp8.is_supported(90)[1]
    plugin.envs.VLLM_TEST_FORCE_FP8_MARLIN = True
    assert plugin.fp8.is_supported(90) == (True, None)


@pytest.mark.parametrize("is_invariant", [False, True])
def test_norms_of_sums_leave_vllms_kernel_in_batch_invariant_mode(plugin, is_invariant, caplog):
    plugin.envs.VLLM_BATCH_INVARIANT = is_invariant
    with caplog.at_level(logging.INFO, "vllm.marlinspike"):
        plugin.register()
    chosen = plugin.cuda.get_default_ir_op_priority(None).fused_add_rms_norm
    assert chosen == (["native", "vllm_c"] if is_invariant else ["vllm_c", "native"])
    assert ("the order of norms" in caplog.text) == is_invariant


def test_on_a_cpu_atens_operators_are_replaced(plugin, monkeypatch):
    calls = []
    monkeypatch.setattr(marlinspike.torch, "install_aten", lambda: calls.append(1))
    plugin.platform.is_cuda, plugin.platform.is_cpu = (lambda: False), (lambda: True)
    before = plugin.experts.apply
    plugin.register()
    assert calls == [1] and plugin.experts.apply is before


def test_modules_as_in_0_33_are_replaced_too(plugin, anywhere, monkeypatch, caplog):
    signatures = plugin.signatures
    # The method of compressed-tensors calls MarlinExperts; settings of invariance have another place.
    monkeypatch.delitem(sys.modules, signatures.COMPRESSED)
    module(monkeypatch, signatures.COMPRESSED_BY_EXPERTS)
    settings = sys.modules[signatures.INVARIANT[0]].override_envs_for_invariance
    monkeypatch.delitem(sys.modules, signatures.INVARIANT[0])
    module(monkeypatch, signatures.INVARIANT[1], override_envs_for_invariance=settings)
    plugin.envs.VLLM_BATCH_INVARIANT = True
    monkeypatch.setenv("MARLINSPIKE_PARALLEL_INVARIANT", "1")
    plugin.register()
    assert sys.modules[signatures.INVARIANT[1]].override_envs_for_invariance is not settings

    monkeypatch.setenv("MARLINSPIKE_PARALLEL_INVARIANT", "0")
    x, w1, w2, s1, s2, weights, ids = layer(anywhere)
    out, one = torch.empty_like(x), torch.empty_like(x)
    rest = (Activation("silu"), 4, None, None, None, None, None, None, False)
    plugin.experts.apply(this_experts(plugin, s1, s2), one, x, w1, w2, weights, ids, *rest)

    def experts(limit):
        made = this_experts(plugin, s1, s2, activation_config=types.SimpleNamespace(clamp_limit=limit))
        for name in ("gemm1_clamp_limit", "w13_g_idx", "w2_g_idx"):
            delattr(made, name)
        return made

    plugin.experts.apply(experts(None), out, x, w1, w2, weights, ids, *rest)
    assert torch.equal(out.view(torch.int16), one.view(torch.int16)) and not plugin.called
    with pytest.raises(RuntimeError, match="gemm1_clamp_limit is set"):
        plugin.experts.apply(experts(7.0), out, x, w1, w2, weights, ids, *rest)

    # int8: twice the words of int4.
    eight = experts(None)
    eight.quant_config = quantized("int8_w8a16")
    words = [torch.randint(-(2**31), 2**31 - 1, (4, w.shape[1], 2 * w.shape[2]), dtype=torch.int32).to(w.device) for w in (w1, w2)]
    plugin.experts.apply(eight, out, x, *words, weights, ids, *rest)
    expected = torch.ops.marlinspike.fused_marlin_moe(x, *words, None, None, s1, s2, weights, ids, "uint8b128")
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16)) and not plugin.called


def test_a_module_that_cannot_be_imported_is_not_taken_for_a_moved_one(plugin, monkeypatch):
    signatures, load = plugin.signatures, importlib.import_module
    module(monkeypatch, signatures.COMPRESSED_BY_EXPERTS)

    def broken(name, *rest):
        if name == signatures.COMPRESSED:
            raise ImportError("no symbol")
        return load(name, *rest)

    monkeypatch.setattr(importlib, "import_module", broken)
    plugin.envs.VLLM_BATCH_INVARIANT = True
    with pytest.raises(RuntimeError, match="fused_marlin_moe is missing: no symbol"):
        plugin.register()


@pytest.mark.skipif(not SOURCE, reason="VLLM_SOURCE is not set")
def test_signatures_are_upstreams(plugin):
    for (name, path), expected in plugin.signatures.SIGNATURES.items():
        names = [name] if isinstance(name, str) else name
        files = [pathlib.Path(SOURCE, *name.split(".")).with_suffix(".py") for name in names]
        file = next((file for file in files if file.exists()), None)
        if file is None and name == plugin.signatures.COMPRESSED:
            names = [plugin.signatures.COMPRESSED_BY_EXPERTS]
            assert pathlib.Path(SOURCE, *names[0].split(".")).with_suffix(".py").exists()
            continue
        tree = ast.parse(file.read_text())
        *owner, function = path.split(".")
        bodies = [tree.body]
        for cls in owner:
            [node] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls]
            bodies = [node.body]
        defined = [n for body in bodies for n in body if isinstance(n, ast.FunctionDef) and n.name == function]
        if not defined:
            # Imported by name, or inherited.
            base = {"fused_marlin_moe": plugin.signatures.EXPERTS, "_supports_batch_invariance": plugin.signatures.EXPERTS.rsplit(".", 2)[0] + ".modular_kernel"}
            file = pathlib.Path(SOURCE, *base[function].split(".")).with_suffix(".py")
            assert function in file.read_text()
            tree = ast.parse(file.read_text())
            defined = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
        args = defined[0].args
        names = [a.arg for a in args.posonlyargs + args.args + args.kwonlyargs]
        assert (names[1:] if names[:1] == ["cls"] else names) == expected, path
    # What the hooks of sums over ranks read.
    rows = pathlib.Path(SOURCE, *plugin.signatures.ROWS.split(".")).with_suffix(".py").read_text()
    for name in "input_is_parallel reduce_results skip_bias_add return_bias tp_rank tp_size input_size".split():
        assert f"self.{name} = " in rows, name
    kernels = pathlib.Path(SOURCE, *plugin.signatures.KERNELS.split("."), "__init__.py").read_text()
    order = kernels[kernels.index("\n_POSSIBLE_KERNELS") :]
    assert order.index("        MacheteLinearKernel,") < order.index("        MarlinLinearKernel,")


def test_the_entry_point_is_the_packages():
    text = (PLUGIN / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nmarlinspike = "marlinspike_vllm:register"' in text
