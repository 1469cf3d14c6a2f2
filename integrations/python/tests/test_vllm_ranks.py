"""The vLLM plugin's sums over ranks, which are threads."""

import importlib
import os
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import marlinspike.torch  # noqa: E402
from test_torch_operators import Layer, Packed, same  # noqa: E402
from test_torch_ranks import part_of  # noqa: E402
from test_vllm_plugin import (  # noqa: E402, F401
    PLUGIN,
    Activation,
    anywhere,
    module,
    plugin,
    this_experts,
)

pytestmark = pytest.mark.skipif(not PLUGIN.is_dir(), reason="no plugin next to the tests")


class Group:
    """The collectives of ranks that are threads."""

    def __init__(self):
        self.here, self.ranks, self.exchanges = threading.local(), 1, 0

    def all_gather(self, x, dim):
        return torch.cat(self._all(x), dim)

    def all_reduce(self, x):
        # Each addition rounds to the tensor's type, from the last rank on: of rows of zeros it does not matter.
        *rest, total = self._all(x)
        for part in reversed(rest):
            total = total + part
        return total

    def all_to_all(self, received, rows, receives, sends, group):
        assert group == "ranks" and sum(sends) == rows.shape[0]
        parts = [sent.split(counts)[self.here.rank] for sent, counts in self._all((rows, sends))]
        assert [len(part) for part in parts] == receives
        received.copy_(torch.cat(parts))
        self.exchanges += 1

    def _all(self, x):
        self.sent[self.here.rank] = x
        self.barrier.wait(60)
        sent = list(self.sent)
        self.barrier.wait(60)
        return sent

    def over(self, ranks, work):
        """Each rank's result; the error of the first rank that has one."""
        self.ranks, self.sent, self.barrier = ranks, [None] * ranks, threading.Barrier(ranks)

        def run(rank):
            self.here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(ranks) as pool:
            futures = [pool.submit(run, rank) for rank in range(ranks)]
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


@pytest.fixture
def group(plugin, monkeypatch):  # noqa: F811
    made, alone = Group(), types.SimpleNamespace(world_size=1)
    module(
        monkeypatch, "vllm.distributed",
        tensor_model_parallel_all_gather=lambda x, dim: made.all_gather(x, dim),
        tensor_model_parallel_all_reduce=lambda x: made.all_reduce(x),
        get_tensor_model_parallel_world_size=lambda: made.ranks, get_tensor_model_parallel_rank=lambda: made.here.rank,
        get_tp_group=lambda: types.SimpleNamespace(device_group="ranks"),
        get_dp_group=lambda: alone, get_pcp_group=lambda: alone,
    )  # fmt: skip
    monkeypatch.setattr(torch.distributed, "all_to_all_single", made.all_to_all)
    made.alone = alone
    monkeypatch.setenv("MARLINSPIKE_PARALLEL_INVARIANT", "1")
    plugin.envs.VLLM_BATCH_INVARIANT = True
    return made


def test_the_switch_needs_batch_invariant_mode(plugin, group):  # noqa: F811
    plugin.envs.VLLM_BATCH_INVARIANT = False
    with pytest.raises(RuntimeError, match="PARALLEL_INVARIANT=1 needs VLLM_BATCH_INVARIANT=1"):
        plugin.register()


def test_without_the_switch_nothing_is_replaced(plugin, group, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MARLINSPIKE_PARALLEL_INVARIANT", "0")
    forward, reduced = plugin.rows.forward, plugin.runner._fused_output_is_reduced
    plugin.register()
    assert plugin.rows.forward is forward and plugin.runner._fused_output_is_reduced is reduced
    layer = plugin.rows()
    layer.input_size, layer.tp_rank, layer.tp_size = 128, 0, 1
    plugin.replacements.mark(layer)
    assert plugin.replacements.split_of(layer) is None


@pytest.fixture(params=["few rows", "many rows"])
def many(request, plugin, monkeypatch):  # noqa: F811
    """Whether each rank completes a share of the rows."""
    is_many = request.param == "many rows"
    monkeypatch.setattr(importlib.import_module("marlinspike_vllm._parallel"), "MANY_ROWS", 2 if is_many else 1 << 20)
    return is_many


def test_the_switch_keeps_the_settings_of_nccl(plugin, group, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    monkeypatch.delenv("NCCL_MAX_NCHANNELS", raising=False)
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "1")
    plugin.invariant.override_envs_for_invariance()
    assert os.environ.pop("NCCL_MAX_NCHANNELS") == "1" and os.environ["NCCL_PROTO"] == "Simple"
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "1")
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    plugin.register()
    plugin.invariant.override_envs_for_invariance()
    assert "NCCL_MAX_NCHANNELS" not in os.environ and os.environ["NCCL_PROTO"] == "LL128"
    assert os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"


def row_layer(plugin, packed, rank, ranks, size_k, **more):  # noqa: F811
    """vLLM's layer with this project's kernel, after loading."""
    own = part_of(packed, rank, ranks)
    kernel, layer = plugin.linear(), plugin.rows()
    kernel.config = types.SimpleNamespace(
        zero_points=False, weight_type=plugin.types.uint4b8, act_type=torch.bfloat16, has_g_idx=False,
        partition_weight_shape=(size_k // ranks, own.s.shape[1]),
    )  # fmt: skip
    kernel._get_weight_params = lambda layer: (own.q, own.s, None, torch.empty(0))
    members = dict(
        prefix="model.layers.0.self_attn.o_proj", input_size=size_k, tp_rank=rank, tp_size=ranks, input_is_parallel=True,
        reduce_results=True, skip_bias_add=False, return_bias=True, bias=own.bias,
        quant_method=types.SimpleNamespace(apply=kernel.apply_weights),
    )  # fmt: skip
    layer.__dict__.update({**members, **more})
    kernel.process_weights_after_loading(layer)
    return layer


def test_row_parallel_layers_have_the_bits_of_one_rank(plugin, group, many, monkeypatch):  # noqa: F811
    monkeypatch.setattr(plugin.replacements, "_is_on_gpu", lambda tensor: True)
    plugin.register()
    size_k = 2048
    packed = Packed("int4", size_k, 128, 64, torch.bfloat16, bias=True)
    x = torch.randn(3, 3, size_k).bfloat16()

    def result(ranks, **more):
        def work(rank):
            columns = x.chunk(ranks, -1)[rank] if more.get("input_is_parallel", True) else x
            return row_layer(plugin, packed, rank, ranks, size_k, **more).forward(columns.contiguous())

        return group.over(ranks, work)

    [(one, none)] = result(1)
    assert none is None and one.shape == (3, 3, 128)
    for ranks in (2, 4, 8):
        assert all(same(y, one) for y, _ in result(ranks)), ranks
        assert group.exchanges == (ranks if many else 0)
        group.exchanges = 0
    assert all(same(y, one) for y, _ in result(2, input_is_parallel=False))
    assert all(same(y, one) for y in result(2, return_bias=False))
    plain = result(2, skip_bias_add=True)
    assert not same(plain[0][0], one) and same(plain[0][1], packed.bias)
    with pytest.raises(RuntimeError, match="self_attn.o_proj .*: others add its sums"):
        result(2, reduce_results=False)
    with pytest.raises(RuntimeError, match="o_proj depend on the number of ranks: UnquantizedLinearMethod computes it"):
        method = type("UnquantizedLinearMethod", (), {})()
        layer = plugin.rows()
        layer.prefix, layer.quant_method = "o_proj", method
        layer.forward(x)
    with pytest.raises(marlinspike.Error, match="ranks: found 3, expected 1 or 2 or 4 or 8"):
        packed = Packed("int4", 3072, 128, 64, torch.bfloat16)
        row_layer(plugin, packed, 0, 3, 3072).forward(torch.ones(1, 1024).bfloat16())


@pytest.mark.parametrize("way", ["MarlinExperts", "compressed-tensors"])
def test_experts_have_the_bits_of_one_rank(plugin, group, anywhere, many, way):  # noqa: F811
    plugin.register()
    experts, top_k = 8, 3
    layer = Layer("int4", torch.bfloat16, experts=experts, hidden=128, inner=64)
    # Experts 6 and 7 have no tokens: of 4 and 8 ranks, the last ones compute nothing. One slot has no expert.
    x, weights, ids = layer.inputs(11, top_k, experts=6)
    ids[4, 1] = -1
    if anywhere:
        layer, x, weights, ids = layer.to("cuda"), x.cuda(), weights.cuda(), ids.cuda()
    one = layer.forward(x, weights, ids)

    def work(rank, has_map=True, lost=None, twice=None):
        local = experts // group.ranks
        here = slice(rank * local, (rank + 1) * local)
        map_ = torch.full((experts,), -1, dtype=torch.int32)
        map_[here] = torch.arange(local, dtype=torch.int32)
        if lost is not None and map_[lost] >= 0:
            map_[lost] = 1 << 20
        if twice is not None and map_[twice] < 0:
            map_[twice] = 0
        map_ = map_.to(x.device) if has_map else None
        w1, w2 = layer.w1.q[here], layer.w2.q[here]
        s1, s2 = layer.w1.s[here], layer.w2.s[here]
        if way == "MarlinExperts":
            out = torch.empty_like(x)
            rest = (Activation("silu"), experts, map_, None, None, None, None, None, False)
            plugin.experts.apply(this_experts(plugin, s1, s2), out, x, w1, w2, weights, ids, *rest)
            return out
        return plugin.compressed.fused_marlin_moe(
            x, w1, w2, None, None, s1, s2, weights, ids, quant_type_id=1, activation=Activation("silu"),
            global_num_experts=experts, expert_map=map_,
        )  # fmt: skip

    for ranks in (1, 2, 4, 8):
        assert all(same(y, one) for y in group.over(ranks, work)), ranks
        assert group.exchanges == (ranks if many and ranks > 1 else 0)
        group.exchanges = 0
    with pytest.raises(RuntimeError, match="--enable-expert-parallel"):
        group.over(2, lambda rank: work(rank, has_map=False))
    for wrong, found in [({"lost": 5}, "expert 5 on 0 ranks"), ({"twice": 1}, "expert 1 on 2 ranks")]:
        with pytest.raises(RuntimeError, match=found):
            group.over(2, lambda rank: work(rank, **wrong))
    group.alone.world_size = 2
    with pytest.raises(RuntimeError, match="tokens are divided over ranks"):
        group.over(2, work)


def test_the_runner_adds_nothing_to_sums_over_ranks(plugin, group):  # noqa: F811
    plugin.register()
    runner = plugin.runner()
    runner.moe_config = types.SimpleNamespace(tp_size=1, ep_size=1)
    assert runner._fused_output_is_reduced is False and plugin.called == ["reduced"]
    runner.moe_config = types.SimpleNamespace(tp_size=1, ep_size=4)
    kernel = types.SimpleNamespace(impl=types.SimpleNamespace(fused_experts=plugin.experts()))
    runner._quant_method = types.SimpleNamespace(moe_kernel=kernel)
    assert runner._fused_output_is_reduced is True
    runner._quant_method = type("CompressedTensorsWNA16MarlinMoEMethod", (), {})()
    assert runner._fused_output_is_reduced is True
    runner._quant_method = type("UnquantizedFusedMoEMethod", (), {})()
    with pytest.raises(RuntimeError, match="experts depend on .*: UnquantizedFusedMoEMethod computes them"):
        runner._fused_output_is_reduced  # noqa: B018
