"""integrations/vllm/examples/same_bits.py, without vLLM: its checkpoint, its hash, its check of experts."""

import importlib.util
import json
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from test_vllm_plugin import PLUGIN  # noqa: E402

EXAMPLE = PLUGIN / "examples" / "same_bits.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="no plugin next to the tests")


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("same_bits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HIDDEN, module.HEADS, module.KV_HEADS, module.HEAD = 128, 2, 1, 128
    module.LAYERS, module.EXPERTS, module.INNER, module.VOCABULARY = 1, 4, 128, 64
    return module


def test_the_checkpoint_is_the_same_everywhere(example, tmp_path):
    from safetensors.torch import load_file

    for name in ("a", "b"):
        example.checkpoint(tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert sorted(one) == sorted(two) and all(torch.equal(one[name], two[name]) for name in one)
    experts = [f"model.layers.0.mlp.experts.{i}.down_proj" for i in range(4)]
    assert one[f"{experts[0]}.qweight"].shape == (16, 128) and one[f"{experts[0]}.scales"].shape == (1, 128)
    assert len({one[f"{name}.qweight"].numpy().tobytes() for name in experts}) == 4
    assert not any(name.startswith("model.layers.0.mlp.gate.q") for name in one)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["bits"] == 4


def request(tokens, logprobs):
    found = [{t: types.SimpleNamespace(logprob=p)} for t, p in zip(tokens, logprobs)]
    return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens, logprobs=found)])


def test_the_hash_depends_on_every_bit(example):
    one = example.digest([request([3, 4], [-0.5, -1.0])])
    assert one == example.digest([request([3, 4], [-0.5, -1.0])])
    nudged = float(np.nextafter(np.float32(-1.0), np.float32(0.0)))
    assert one != example.digest([request([3, 4], [-0.5, nudged])])
    assert one != example.digest([request([3, 5], [-0.5, -1.0])])


def worker(example, first, local, of_weights=None):
    map_ = torch.full((example.EXPERTS,), -1, dtype=torch.int32)
    map_[first : first + local] = torch.arange(local, dtype=torch.int32)
    layer = torch.nn.Module()
    layer.w13_qweight = torch.ones(of_weights or local, 2, 2, dtype=torch.int32)
    layer._expert_map = map_
    model = torch.nn.ModuleList([layer])
    return types.SimpleNamespace(get_model=lambda: model)


def llm(*workers):
    return types.SimpleNamespace(collective_rpc=lambda work: [work(w) for w in workers])


def test_every_expert_is_on_one_rank(example):
    assert example.check_experts(llm(worker(example, 0, 2), worker(example, 2, 2))) == [2, 2]
    with pytest.raises(RuntimeError, match=r"layer 0: ranks have the experts \[0, 1, 1, 2\]"):
        example.check_experts(llm(worker(example, 0, 2), worker(example, 1, 2)))
    # A map that was overwritten: no expert is here, or fewer than weights.
    with pytest.raises(RuntimeError, match="0 experts on a rank with 2 weights"):
        example.check_experts(llm(worker(example, 0, 0, 2), worker(example, 2, 2)))
    empty = worker(example, 0, 2)
    empty.get_model()[0].w13_qweight[1] = 0
    with pytest.raises(RuntimeError, match="weights are all zero"):
        example.check_experts(llm(empty, worker(example, 2, 2)))
