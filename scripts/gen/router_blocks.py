"""Writes one tiny MoE block per model family, computed in float32 by transformers.

    python scripts/gen/router_blocks.py OUT [FAMILY...]

Needs torch, transformers 5.23.0, safetensors and numpy; `inkling` also needs scipy.

Each file OUT/FAMILY.safetensors holds the block's tensors under their checkpoint names, the input, the routing and the
output. The script builds a model with tiny sizes, sets the block's weights to seeded bf16 values, saves it with
`save_pretrained`, and reads the block's tensors from the saved file. `router_blocks_check.py` recomputes the outputs
from these tensors; only a file that agrees is written. Two runs write the same bytes.
"""

import copy
import hashlib
import json
import os
import sys
import tempfile
import traceback
import zlib
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import router_blocks_check as check
from common import write_sorted
from router_blocks_families import FAMILIES, TINY, TINY_VISION

BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")
ROUTER_WEIGHTS = ("weight", "wg.weight", "gate.weight", "layer.weight", "proj.weight", "classifier.weight")
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
NOISE = 0.002


def seed_of(family):
    return zlib.crc32(family.encode())


def generator(family, name):
    """Values depend on the family's seed and the tensor's name only."""
    digest = hashlib.sha256(f"{seed_of(family)}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def shrink(default, overrides, tiny):
    """The tiny values for the keys that `default` has, nested configurations included."""
    values = {}
    for key, value in default.items():
        if isinstance(value, dict) and "model_type" in value:
            nested = TINY_VISION if "vision" in key or "audio" in key else tiny
            values[key] = shrink(value, overrides.get(key, {}), nested) | {"model_type": value["model_type"]}
        elif key in overrides or key in tiny:
            values[key] = overrides.get(key, tiny.get(key))
    return {key: value for key, value in overrides.items() if key not in values} | values


def build(family):
    """The model in bf16's types with float32 values, and the names of the tensors that a checkpoint keeps in float32."""
    spec = FAMILIES[family]
    config_class = CONFIG_MAPPING[spec.get("model_type", family)]
    default = config_class().to_dict()
    overrides = spec.get("config", {})
    nested = spec.get("text", {})
    values = shrink(default, overrides, TINY | nested)
    config = config_class(**values)
    if "architecture" in spec:
        model_class = getattr(transformers, spec["architecture"])
    else:
        model_class = next(m[config_class] for m in (getattr(modeling_auto, n) for n in MAPPINGS) if config_class in m)
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    torch.manual_seed(0)
    model = model_class._from_config(
        config, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    patterns = set()
    for module in model.modules():
        # A bf16 model heeds the strict list only; the other one is for float16.
        patterns |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    wide = set()
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        parts = f".{name}."
        if tensor.dtype == torch.float32 or name.endswith(BIASES) or any(f".{p}." in parts for p in patterns):
            wide.add(name)
    return model.float().eval(), wide


def find_block(model, spec):
    """The last module that owns the experts."""
    kind = spec.get("module")
    found = None
    for name, module in model.named_modules():
        if kind:
            if type(module).__name__ == kind:
                found = name, module
        elif (
            "vision" not in name
            and any(hasattr(module, attribute) for attribute in ("experts", "input_linear"))
            and any(hasattr(module, attribute) for attribute in ("gate", "router"))
        ):
            found = name, module
    if found is None:
        raise RuntimeError("no MoE block in the model")
    return found


def find_router(block):
    return next(getattr(block, name) for name in ("gate", "router") if hasattr(block, name))


def parts(model, block_name, block, spec):
    """Every tensor of the block by its name in the model, with siblings such as granite's shared MLP."""
    tensors = {}
    roots = [block_name] if not spec.get("only") else [f"{block_name}.{n}" for n in spec["only"]]
    parent = block_name.rpartition(".")[0]
    roots += [f"{parent}.{n}" for n in spec.get("siblings", ())]
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        if any(name.startswith(root + ".") or name == root for root in roots):
            tensors[name] = tensor
    return tensors


def fill(family, model_tensors, spec, wide):
    """Seeded values: bf16 numbers, float32 for correction biases."""
    std = spec.get("std", 0.1)
    for name, tensor in model_tensors.items():
        leaf = name.rpartition(".")[2]
        random = torch.randn(tensor.shape, generator=generator(family, name))
        if tensor.dtype in (torch.int64, torch.int32):
            # Hash routing: distinct experts for every token id.
            count, rows = spec["text"].get("n_routed_experts", 8), tensor.shape[0]
            order = torch.rand(rows, count, generator=generator(family, name)).argsort(dim=1)
            tensor.data.copy_(order[:, : tensor.shape[1]])
            continue
        if leaf in BIASES:
            tensor.data.copy_(random * spec.get("bias_std", 0.15) + spec.get("bias_mean", 0.0))
            continue
        if leaf == "global_scale":
            value = torch.full(tensor.shape, 0.875)
        elif "norm" in name and leaf == "weight":
            value = random * 0.1 + (0.0 if spec.get("centered_norm") else 1.0)
        elif leaf in ("scale", "per_expert_scale", "router_states_scale", "layer_scalar"):
            value = 1.0 + 0.25 * random
        elif leaf.endswith("bias"):
            value = random * spec.get("linear_bias_std", 0.2)
        elif is_router(name):
            value = random * spec.get("router_std", 0.15)
        else:
            value = random * std
        tensor.data.copy_(value.bfloat16().float())


def is_router(name):
    tail = name.split(".")[-3:]
    return tail[-1] == "weight" and any(part in ("gate", "router", "wg", "classifier") for part in tail[:-1])


def saved(model, wide):
    """The checkpoint that `save_pretrained` writes with bf16 weights, and its configuration."""
    copied = copy.deepcopy(model)
    for name, tensor in list(copied.named_parameters()) + list(copied.named_buffers()):
        if tensor.is_floating_point() and name not in wide:
            tensor.data = tensor.data.bfloat16()
    copied.config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        copied.save_pretrained(folder)
        tensors = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, "pt") as source:
                tensors |= {key: source.get_tensor(key) for key in source.keys()}
        return tensors, (Path(folder) / "config.json").read_text()


class Recorder:
    """What the router and the experts saw and returned during one call of the block."""

    def __init__(self, block, spec):
        self.ids = self.weights = self.logits = self.experts_out = self.latent = None
        router = find_router(block)
        self.handles = [router.register_forward_hook(self.on_router)]
        if spec.get("logits_from"):
            self.handles.append(router.get_submodule(spec["logits_from"]).register_forward_hook(self.on_logits))
        self.keep_logits = bool(spec.get("logits_from"))
        if hasattr(block, "experts"):
            self.handles.append(block.experts.register_forward_pre_hook(self.before_experts, with_kwargs=True))
            self.handles.append(block.experts.register_forward_hook(self.on_experts))

    def on_router(self, module, args, out):
        outs = out if isinstance(out, tuple) else (out,)
        if len(outs) == 5 and isinstance(outs[3], list):  # jetmoe
            order, _, gates, _, self.logits = outs
            k = order.numel() // self.logits.shape[0]
            flat = torch.empty_like(gates)
            flat[order] = gates
            self.weights = flat.view(-1, k)
            self.ids = self.logits.topk(k, dim=1).indices
            return
        if not self.keep_logits:
            self.logits = outs[0]

    def on_logits(self, module, args, out):
        self.logits = out

    def before_experts(self, module, args, kwargs):
        named = dict(zip(("hidden_states", "ids", "weights"), args))
        self.ids = named.get("ids", kwargs.get("top_k_index", kwargs.get("router_indices")))
        self.weights = named.get("weights", kwargs.get("top_k_weights", kwargs.get("routing_weights")))

    def on_experts(self, module, args, out):
        self.experts_out = out

    def close(self):
        for handle in self.handles:
            handle.remove()


def call(block, spec, x, extra):
    """Runs the block on tokens [T, H]; returns y and the recorder."""
    if spec.get("token_types"):
        return call_two_modalities(block, spec, x, extra["token_types"].bool())
    recorder = Recorder(block, spec)
    with torch.no_grad():
        out = spec["call"](block, x, extra) if "call" in spec else block(x[None])
    recorder.close()
    y = out[0] if isinstance(out, tuple) else out
    return y.reshape(x.shape[0], -1), recorder


def call_two_modalities(block, spec, x, vision):
    """ernie4_5_vl_moe: text tokens and vision tokens have a router and experts each."""
    recorders = [Recorder(block.text_moe, spec), Recorder(block.vision_moe, spec)]
    with torch.no_grad():
        y = block(x[None], vision[None])[0]
    merged = recorders[0]
    for name in ("ids", "weights", "logits", "experts_out"):
        values = [getattr(recorder, name) for recorder in recorders]
        both = values[0].new_zeros(x.shape[0], values[0].shape[-1])
        both[~vision], both[vision] = values[0].reshape(-1, both.shape[1]), values[1].reshape(-1, both.shape[1])
        setattr(merged, name, both)
    for recorder in recorders:
        recorder.close()
    return y.reshape(x.shape[0], -1), merged


def stable_tokens(block, spec, x, extra, family):
    """The tokens whose choice and weights survive noise on the input."""
    _, base = call(block, spec, x, extra)
    keep = torch.ones(x.shape[0], dtype=torch.bool)
    draws = torch.Generator().manual_seed(7)
    order = base.ids.sort(dim=1)
    weights = base.weights.gather(1, order.indices)
    for _ in range(12):
        noisy = x * (1 + NOISE * torch.randn(x.shape, generator=draws))
        _, other = call(block, spec, noisy, extra)
        other_order = other.ids.sort(dim=1)
        other_weights = other.weights.gather(1, other_order.indices)
        keep &= (order.values == other_order.values).all(1)
        keep &= ((other_weights - weights).abs() <= 0.1 * weights.abs() + 1e-6).all(1)
    return keep


def same_bytes(a, b):
    """Equality for tensors that may hold NaN: transformers leaves some experts uninitialized."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def make(family, out):
    spec = FAMILIES[family]
    model, wide = build(family)
    block_name, block = find_block(model, spec)
    model_tensors = parts(model, block_name, block, spec)
    before, _ = saved(model, wide)
    fill(family, model_tensors, spec, wide)
    after, config = saved(model, wide)
    for old, new in spec.get("rename", ()):
        after, before = ({n.replace(old, new): t for n, t in tensors.items()} for tensors in (after, before))
    # The block's tensors in the checkpoint are those that changed with the block's values.
    if spec.get("transpose"):
        after = {n: t.transpose(1, 2).contiguous() if n.endswith(spec["transpose"]) else t for n, t in after.items()}
        before = {n: t.transpose(1, 2) if n.endswith(spec["transpose"]) else t for n, t in before.items()}
    names = [n for n in after if not same_bytes(after[n], before[n])]
    config_json = json.loads(config)
    marks = [n for n in names if "layers." in n or "blocks." in n]
    layer = next(p for p in ("layers.", "blocks.") if any(p in n for n in marks))
    head, _, rest = marks[0].partition(layer)
    prefix = f"{head}{layer}{rest.split('.')[0]}."
    bad = [n for n in names if not n.startswith(prefix)]
    if bad:
        raise RuntimeError(f"tensors outside {prefix}: {bad[:4]}")
    tensors = {f"in.{n[len(prefix) :]}": after[n].contiguous() for n in names}

    hidden, tokens = spec["tokens"][1], spec["tokens"][0]
    candidates = (torch.randn(tokens * 4, hidden, generator=generator(family, "x")) * spec.get("x_std", 1.0)).bfloat16()
    extra = {
        "token_ids": torch.randint(0, spec["text"].get("vocab_size", TINY["vocab_size"]), (tokens * 4,), generator=generator(family, "ids")),
        "token_types": torch.randint(0, 2, (tokens * 4,), generator=generator(family, "types")),
    }
    parent = model.get_submodule(block_name.rpartition(".")[0])
    extra["siblings"] = {name: getattr(parent, name) for name in spec.get("siblings", ())}
    keep = stable_tokens(block, spec, candidates.float(), extra, family).nonzero()[:tokens, 0]
    if len(keep) < min(tokens, 12):
        raise RuntimeError(f"only {len(keep)} stable tokens")
    x = candidates[keep].contiguous()
    extra = {name: value[keep] if torch.is_tensor(value) else value for name, value in extra.items()}
    y, record = call(block, spec, x.float(), extra)
    scale = spec.get("output_scale", lambda config: None)(model.config.get_text_config())
    weights, ids = record.weights.float(), record.ids
    routed = record.experts_out
    routed = routed.reshape(x.shape[0], -1) if routed is not None else y - block.bias.detach()
    if scale is not None:
        weights, routed = weights * scale, routed * scale
    order = weights.sort(dim=1, descending=True, stable=True).indices
    tensors |= {
        "in.hidden_states": x,
        "out.router_logits": record.logits.reshape(x.shape[0], -1).float().contiguous(),
        "out.topk_ids": ids.gather(1, order).int().contiguous(),
        "out.topk_weights": weights.gather(1, order).contiguous(),
        "out.y": y.float().contiguous(),
    }
    if routed.shape != y.shape or not torch.equal(routed, y):
        tensors["out.y_experts"] = routed.float().contiguous()
    metadata = {
        "family": family,
        "model_type": config_json["model_type"],
        "config.json": shortened(config) if spec.get("small") else config,
        "layer_prefix": prefix,
        "module": block_name,
        "seed": str(seed_of(family)),
        "compute_dtype": "float32",
        "y": spec.get("y", "whole MoE block, shared experts included"),
        "order": "ids and weights of a token sorted by weight, descending",
        "tie_free": "tokens whose choice flips under 0.2% noise were dropped",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    if scale is not None:
        metadata["routed_scale_on_output"] = str(scale)
    router = find_router(block.text_moe if spec.get("token_types") else block)
    own = dict(router.named_parameters())
    router_weight = next((own[n] for n in spec.get("router_weights", ROUTER_WEIGHTS) if n in own), None)
    copy_of(tensors, metadata, "router_weight", router_weight)
    bias = next((t for n, t in model_tensors.items() if n.endswith(BIASES)), None)
    if spec.get("token_types"):
        metadata["topk_ids"] = "the expert of a vision token is topk_ids + moe_num_experts"
        bias = next(t for n, t in tensors.items() if n.endswith(BIASES))
    if bias is not None:
        copy_of(tensors, metadata, "correction_bias", bias)
        tensors["in.correction_bias"] = tensors["in.correction_bias"].reshape(-1).contiguous()
    if spec.get("token_ids"):
        tensors["in.token_ids"] = extra["token_ids"]
    if spec.get("token_types"):
        tensors["in.token_types"] = extra["token_types"]
    report = check.check(family, tensors, config_json, prefix, spec)
    path = Path(out) / f"{family}.safetensors"
    partial = path.with_suffix(".partial")
    write_sorted(partial, tensors, metadata)
    size = partial.stat().st_size
    os.replace(partial, path)
    return size, x.shape[0], report


def shortened(config):
    """The keys of the text model with plain values; lists have at most one entry for each layer."""
    config = json.loads(config)
    plain = lambda value: value is not None and not isinstance(value, dict) and len(str(value)) < 40
    kept = {key: value for key, value in config.items() if key == "model_type" or "text_config" not in config}
    if "text_config" in config:
        kept["text_config"] = {key: value for key, value in config["text_config"].items() if plain(value)}
    return json.dumps({k: v for k, v in kept.items() if k == "text_config" or plain(v)}, separators=(",", ":"))


def copy_of(tensors, metadata, key, value):
    """Copies the stored tensor that equals the model's `value`."""
    if value is None:
        return
    for name, tensor in list(tensors.items()):
        for form in (value, value.T if value.dim() == 2 else value):
            if tensor.numel() == form.numel() and torch.equal(tensor.float().reshape(-1), form.float().reshape(-1)):
                tensors[f"in.{key}"], metadata[key] = tensor.clone(), name
                return
    raise RuntimeError(f"{key} is not in the checkpoint")


def main():
    torch.set_num_threads(1)
    out = sys.argv[1]
    os.makedirs(out, exist_ok=True)
    failed = 0
    for family in sys.argv[2:] or FAMILIES:
        try:
            size, tokens, report = make(family, out)
            print(f"ok   {family}: {size} bytes, {tokens} tokens, {report}", flush=True)
        except Exception as error:  # one family must not stop the others
            failed += 1
            print(f"FAIL {family}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if os.environ.get("TRACE"):
                traceback.print_exc()
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
