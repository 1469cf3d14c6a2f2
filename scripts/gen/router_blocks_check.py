"""Recomputes a MoE block in float64 from its checkpoint-named tensors and config.json. Uses numpy only, no transformers."""

import numpy as np

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
SCALE = (
    "routed_scaling_factor",
    "route_scale",
    "router_scaling_factor",
    "moe_router_scaling_factor",
    "moe_routed_scaling_factor",
)
RENORM = ("norm_topk_prob", "moe_renormalize", "route_norm")


def first(config, keys, default=None):
    return next((config[key] for key in keys if config.get(key) is not None), default)


def array(tensor):
    return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x, eps, weight=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def soft_cap(x, cap):
    return cap * np.tanh(x / cap)


def glu(rule, config, layer, shared=False):
    """The function of gate and up between the two products."""
    kind = rule.get("shared_act" if shared and "shared_act" in rule else "act", "silu")
    if kind == "silu":
        return lambda g, u: silu(g) * u
    if kind == "gelu_tanh":
        return lambda g, u: gelu_tanh(g) * u
    if kind == "clamp":
        limit = config["swiglu_limit"]
        return lambda g, u: silu(np.minimum(g, limit)) * np.clip(u, -limit, limit)
    if kind == "clamp_after":
        limits = config.get("swiglu_limits_shared" if shared else "swiglu_limits")
        limit = limits[layer] if limits and limits[layer] else np.inf
        return lambda g, u: np.minimum(silu(g), limit) * np.clip(u, -limit, limit)
    if kind == "oai":
        limit, alpha = config["swiglu_limit"], config["swiglu_alpha"]

        def oai(g, u):
            g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
            return (u + 1) * g * sigmoid(alpha * g)

        return oai
    if kind == "soft_cap":
        a, b = config["mlp_gate_softcap"], config["mlp_up_softcap"]
        return lambda g, u: soft_cap(g, a) * sigmoid(g) * soft_cap(u, b)
    raise ValueError(kind)


def route(logits, config, rule, bias, layer=0):
    """Ids and final weights per token, unsorted."""
    k = rule.get("top_k") or first(config, TOP_K)
    k = k[layer] if isinstance(k, list) else k
    kind = rule["score"]
    if kind == "topk_softmax":
        ids = np.argsort(-logits, 1, kind="stable")[:, :k]
        return ids, softmax(np.take_along_axis(logits, ids, 1))
    score = {
        "softmax": softmax,
        "sigmoid": sigmoid,
        "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
    }[kind](logits)
    choice = logits if rule.get("choose_by_logit") else score
    if bias is not None:
        choice = choice + bias
    groups = first(config, ("n_group", "num_expert_group"), 1) if rule.get("groups") else 1
    if groups and groups > 1:
        runs = choice.reshape(len(choice), groups, -1)
        best = np.sort(runs, 2)
        group_score = best[..., -2:].sum(2) if rule["groups"] == "sum2" else best[..., -1]
        chosen = np.argsort(-group_score, 1, kind="stable")[:, : config["topk_group"]]
        mask = np.zeros(group_score.shape, bool)
        np.put_along_axis(mask, chosen, True, 1)
        choice = np.where(np.repeat(mask, runs.shape[2], 1), choice, rule.get("masked", -np.inf))
    ids = np.argsort(-choice, 1, kind="stable")[:, :k]
    weights = np.take_along_axis(score, ids, 1)
    renorm = rule.get("renorm", "config")
    if renorm == "config":
        renorm = first(config, RENORM, rule.get("renorm_default"))
    if renorm:
        weights = weights / (weights.sum(1, keepdims=True) + rule.get("eps", 0.0))
    scale = first(config, SCALE, 1.0) if rule.get("scale") else 1.0
    return ids, weights * scale


def sparsemixer(logits, jitter):
    ids, weights = [], []
    remaining = logits.copy()
    for _ in range(2):
        chosen = remaining.argmax(1)
        top = remaining.max(1, keepdims=True)
        factor = np.maximum(np.abs(logits), top)
        masked = np.where((top - logits) / factor > 2 * jitter, -np.inf, remaining)
        weights.append(np.take_along_axis(softmax(masked), chosen[:, None], 1)[:, 0])
        ids.append(chosen)
        remaining[np.arange(len(chosen)), chosen] = -np.inf
    return np.stack(ids, 1), np.stack(weights, 1)


class Block:
    """The tensors of one block by name, without `in.`."""

    def __init__(self, tensors):
        self.t = {n[3:]: array(t) for n, t in tensors.items() if n.startswith("in.")}

    def __contains__(self, name):
        return name in self.t

    def get(self, suffix):
        """The only tensor with this name or ending in it after a dot."""
        hits = [n for n in self.t if n == suffix or n.endswith("." + suffix)]
        if len(hits) != 1:
            raise KeyError(f"{suffix}: {hits}")
        return self.t[hits[0]]

    def has(self, suffix):
        return any(n == suffix or n.endswith("." + suffix) for n in self.t)

    def linear(self, name, x):
        y = x @ self.get(f"{name}.weight").T
        return y + self.get(f"{name}.bias") if self.has(f"{name}.bias") else y


def experts(block, rule, config):
    """A function expert(id) -> (gate [I,H], up [I,H], down [H,I], gate bias, up bias, down bias)."""
    none = (0.0, 0.0, 0.0)
    layout = rule.get("layout")
    if layout in ("fused", "fused_interleaved", "fused_t", "fused_bias", "input_linear", "fc", "w13"):
        names = {
            "input_linear": ("input_linear.weight", "output_linear.weight"),
            "fc": ("experts.fc1.weight", "experts.fc2.weight"),
            "w13": ("experts.w13_weight", "experts.w2_weight"),
        }.get(layout, ("experts.gate_up_proj", "experts.down_proj"))
        if layout == "input_linear":
            names = tuple(rule.get("prefix", "") + n for n in names)
        gate_up, down = block.get(names[0]), block.get(names[1])
        if layout in ("fused_t", "fused_bias", "fc"):
            gate_up, down = gate_up.transpose(0, 2, 1), down.transpose(0, 2, 1)
        half = gate_up.shape[1] // 2
        odd_even = layout in ("fused_interleaved", "w13")
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if odd_even else (gate_up[:, :half], gate_up[:, half:])
        if layout == "fused_bias":
            b = block.get("experts.gate_up_proj_bias")
            d = block.get("experts.down_proj_bias")
            return lambda e: (gate[e], up[e], down[e], b[e, :half], b[e, half:], d[e])
        return lambda e: (gate[e], up[e], down[e], *none)
    if layout == "dbrx":
        width = config["ffn_config"]["ffn_hidden_size"]
        w1, v1, w2 = (block.get(f"experts.mlp.{n}") for n in ("w1", "v1", "w2"))
        w1, v1, w2 = (w.reshape(-1, width, w.shape[1]) for w in (w1, v1, w2))
        return lambda e: (w1[e], v1[e], w2[e].T, *none)
    if layout == "moe":
        gate, up, down = (block.get(f"moe.{n}_proj.weight") for n in ("gate", "up", "down"))
        return lambda e: (gate[e], up[e], down[e], *none)
    names = ("w1", "w3", "w2") if layout == "w123" else ("gate_proj", "up_proj", "down_proj")
    root = "experts" if layout != "bare" else rule["root"]

    def one(e):
        if layout == "up_down":
            return (None, block.get(f"{root}.{e}.up_proj.weight"), block.get(f"{root}.{e}.down_proj.weight"), *none)
        return (*(block.get(f"{root}.{e}.{n}.weight") for n in names), *none)

    return one


def run_experts(x, ids, weights, expert, act, count, finish=None):
    y = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(ids[t], weights[t]):
            if e >= count:  # identity experts
                y[t] += w * x[t]
                continue
            if w == 0:
                continue
            gate, up, down, gb, ub, db = expert(e)
            u = up @ x[t] + ub
            mid = act(gate @ x[t] + gb, u) if gate is not None else np.maximum(u, 0) ** 2
            out = down @ mid + db
            y[t] += w * (finish(out) if finish else out)
    return y


def shared(block, rule, config, x, layer):
    """The shared experts' output, or 0."""
    name = rule.get("shared")
    if not name:
        return 0.0
    act = glu(rule, config, layer, shared=True)
    if rule.get("layout") == "up_down":
        return np.maximum(block.linear(f"{name}.up_proj", x), 0) ** 2 @ block.get(f"{name}.down_proj.weight").T
    form = rule.get("shared_form", "gate_up_down")
    if form == "input_linear":
        both = block.linear(f"{name}.input_linear", x)
        g, u = np.split(both, 2, 1)
        y = block.linear(f"{name}.output_linear", act(g, u))
    else:
        g, u, d = {
            "gate_up_down": ("gate_proj", "up_proj", "down_proj"),
            "w123": ("w1", "w3", "w2"),
            "linear_gate": ("linear_gate", "up_proj", "down_proj"),
        }[form]
        y = block.linear(f"{name}.{d}", act(block.linear(f"{name}.{g}", x), block.linear(f"{name}.{u}", x)))
    if rule.get("shared_gate"):
        y = y * sigmoid(block.linear(rule["shared_gate"], x))
    return y


def worst(name, got, want):
    want = array(want)
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
    if not error <= 1e-5:
        raise AssertionError(f"{name}: relative error {error:.2e}")
    return error


def check(family, tensors, config, prefix, spec):
    """Raises if the recomputed block differs; returns a one-line report."""
    rule = spec["rule"]
    for nested in (rule.get("branch", "thinker_config"), "text_config"):
        config = config.get(nested, config)
    config = config | (config.get("ffn_config") or {})
    block = Block(tensors)
    layer = int(prefix.rstrip(".").rpartition(".")[2])
    x = block.get("hidden_states")
    bias = block.t.get("correction_bias")
    if "special" in rule:
        return rule["special"](block, config, tensors, rule, layer)
    router = block.get("router_weight")
    if router.shape[1] != x.shape[1]:
        router = router.T
    seen = x
    logits = seen @ router.T
    if rule.get("router_bias"):
        logits = logits + block.get(rule["router_bias"])
    if rule.get("logit_cap") and config[rule["logit_cap"]] > 0:
        logits = soft_cap(logits, config[rule["logit_cap"]])
    errors = [worst("logits", logits, tensors["out.router_logits"])]
    if rule["score"] == "sparsemixer":
        ids, weights = sparsemixer(logits, config["router_jitter_noise"])
    elif rule["score"] == "dbrx":
        scores = softmax(logits)
        ids = np.argsort(-scores, 1, kind="stable")[:, : config["moe_top_k"]]
        weights = np.take_along_axis(scores, ids, 1)
        p = config["moe_normalize_expert_weights"]
        if p is not None:
            weights = weights / (weights**p).sum(1, keepdims=True) ** (1 / p)
    elif rule["score"] == "hash":
        ids = block.get("tid2eid")[block.get("token_ids")]
        scores = np.sqrt(np.log1p(np.exp(logits)))
        weights = np.take_along_axis(scores, ids, 1)
        weights = weights / weights.sum(1, keepdims=True) * config["routed_scaling_factor"]
    else:
        ids, weights = route(logits, config, rule, bias, layer)
    errors += compare_routing(ids, weights, tensors)
    act = glu(rule, config, layer)
    count = rule["experts"](config) if "experts" in rule else 1 << 30
    inner = block.linear(rule["before"], x) if "before" in rule else x
    routed = run_experts(inner, ids, weights, experts(block, rule, config), act, count)
    if "out.y_experts" in tensors:
        errors.append(worst("y_experts", routed, tensors["out.y_experts"]))
    if "after" in rule:
        routed = block.linear(rule["after"], routed)
    y = routed + shared(block, rule, config, x, layer)
    if "combine" in rule:
        y = rule["combine"](block, config, routed, y)
    errors.append(worst("y", y, tensors["out.y"]))
    return f"relative error {max(errors):.1e}" + clamped(
        block, rule, config, x, ids, experts(block, rule, config), layer
    )


def compare_routing(ids, weights, tensors):
    order = np.argsort(-weights, 1, kind="stable")
    ids, weights = np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)
    want = array(tensors["out.topk_ids"])
    if not (np.sort(ids, 1) == np.sort(want, 1)).all():
        raise AssertionError("ids differ")
    return [worst("weights", weights, tensors["out.topk_weights"])]


def clamped(block, rule, config, x, ids, expert, layer):
    """The share of gate and up values that the limit changes, for families with limits."""
    kind = rule.get("act")
    if kind not in ("clamp", "clamp_after", "oai"):
        return ""
    limit = (config.get("swiglu_limits") or [np.inf] * 99)[layer] if kind == "clamp_after" else config["swiglu_limit"]
    gates, ups = [], []
    for t in range(len(x)):
        for e in ids[t]:
            gate, up, _, gb, ub, _ = expert(e)
            gates.append(gate @ x[t] + gb)
            ups.append(up @ x[t] + ub)
    return f", above the limit: gate {np.mean(np.array(gates) > limit):.1%}, up {np.mean(np.abs(ups) > limit):.1%}"
