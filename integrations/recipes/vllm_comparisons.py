"""Operators of vLLM 0.21.0 that `gpu_campaigns.py` compares with a definition in numpy, element by element.

| comparison | rule |
| --- | --- |
| `static_scaled_fp8_quant`, `dynamic_scaled_fp8_quant`, `dynamic_per_token_scaled_fp8_quant` | `marlinspike.scaled_fp8_quant`, bit for bit |
| `dynamic_scaled_int8_quant`, `static_scaled_int8_quant` | x * (127 / max) and x / scale in f32, halves to even, bit for bit |
| `cutlass_scaled_mm_int8`, `cutlass_scaled_mm_azp` | the exact integers in float64, and a bound of the f32 steps behind them |
| `cutlass_scaled_mm`, `cutlass_scaled_mm_blocks` | e4m3 with drawn cases: `marlinspike.check` |
| `marlin_int8_sums` | int8 activations with K = 4096, where one block adds most of K: `marlinspike.check` |
| `every_activation` | every 16-bit gate, with several values of up: the bounds of `marlinspike.check` |
"""

import time

import numpy as np
import torch
import torch_operators as base
import vllm_operators as more

import marlinspike

F32 = np.float32
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def run(operator, *arguments):
    """Whether the operator ran; without a GPU, PyTorch has compared the call with its schema."""
    try:
        operator(*arguments)
    except NotImplementedError:
        if base.DEVICE != "cpu":
            raise
        return False
    return True


def tally(cases, seconds, one):
    """Calls `one`, which returns whether all is right (None: not judged) and a description."""
    start, result = time.monotonic(), {"cases": 0, "judged": 0, "wrong": 0, "first": None}
    for index in range(cases):
        if time.monotonic() - start > seconds:
            break
        right, describe = one(index)
        result["cases"] += 1
        result["judged"] += right is not None
        if right is not None and not right:
            result["wrong"] += 1
            result["first"] = result["first"] or describe()
    return result


def activations(random, kind):
    """Rows with ties, zeros, large and small values, on the host in f32 and as a tensor of a type."""
    rows, columns = int(random.integers(1, 20)), int(random.choice([1, 7, 16, 64, 120, 256, 1000]))
    x = random.standard_normal((rows, columns)) * 2.0 ** random.integers(-12, 8)
    form = random.integers(0, 6)
    if form == 0:
        x[random.integers(0, rows)] = 0
    elif form == 1:
        x = np.round(x * 8) / 8 * 2.0 ** random.integers(-3, 4)
    elif form == 2:
        x[random.integers(0, rows), random.integers(0, columns)] *= 1000
    elif form == 3:
        x = random.integers(-255, 256, (rows, columns)) / 2.0
    made = torch.from_numpy(np.clip(x, -60000, 60000)).to(kind).to(base.DEVICE)
    return made, made.float().cpu().numpy()


def differing(found, expected):
    """The first place where two arrays of bits differ, as text."""
    at = tuple(int(i) for i in np.argwhere(found != expected)[0])
    return f"[{', '.join(map(str, at))}]: found {found[at]}, expected {expected[at]}"


def bits(tensor):
    return tensor.cpu().view(torch.uint8 if tensor.element_size() == 1 else torch.int32).numpy()


def quantization(cases, seed, seconds, operator, quantize):
    """`quantize(random, x, host)` calls and returns pairs of found and expected bits; None: it did not run."""
    random = np.random.default_rng(seed)

    def one(index):
        kind = TYPES[int(random.integers(0, len(TYPES)))]
        x, host = activations(random, kind)
        pairs = quantize(random, x, host)
        if pairs is None:
            return None, None
        right = all(np.array_equal(found, expected) for found, expected in pairs)

        def describe():
            found, expected = next(pair for pair in pairs if not np.array_equal(*pair))
            return f"{operator}, {kind}, shape {list(host.shape)}, {differing(found, expected)}"

        return right, describe

    return tally(cases, seconds, one)


def expected_fp8(host, **keys):
    codes, scale = marlinspike.scaled_fp8_quant(host, **keys)
    return np.asarray(codes).view(np.uint8), np.asarray(scale).view(np.int32)


def static_scaled_fp8_quant(random, x, host):
    scale = float(F32(2.0 ** random.uniform(-10, 6)))
    codes = more.empty(x.shape, torch.float8_e4m3fn)
    if not run(torch.ops._C.static_scaled_fp8_quant, codes, x, torch.tensor([scale], device=base.DEVICE)):
        return None
    return [(bits(codes), expected_fp8(host, scale=scale)[0])]


def dynamic_scaled_fp8_quant(random, x, host):
    codes, scale = more.empty(x.shape, torch.float8_e4m3fn), more.empty([1], torch.float32)
    # Zeros alone give a scale of zero, so any code is right.
    if not run(torch.ops._C.dynamic_scaled_fp8_quant, codes, x, scale) or not host.any():
        return None
    expected = expected_fp8(host)
    return [(bits(codes), expected[0]), (bits(scale), expected[1])]


def dynamic_per_token_scaled_fp8_quant(random, x, host):
    codes, scale = more.empty(x.shape, torch.float8_e4m3fn), more.empty([len(x), 1], torch.float32)
    upper = float(F32(2.0 ** random.uniform(-4, 4))) if random.integers(0, 4) == 0 else None
    limit = None if upper is None else torch.tensor([upper], device=base.DEVICE)
    if not run(torch.ops._C.dynamic_per_token_scaled_fp8_quant, codes, x, scale, limit):
        return None
    expected = expected_fp8(host, scale_ub=upper, use_per_token_if_dynamic=True)
    return [(bits(codes), expected[0]), (bits(scale), expected[1])]


def int8_codes(values):
    return np.clip(np.rint(values), -128, 127).astype(np.int8).view(np.uint8)


def dynamic_scaled_int8_quant(random, x, host):
    codes, scale = more.empty(x.shape, torch.int8), more.empty([len(x), 1], torch.float32)
    if not run(torch.ops._C.dynamic_scaled_int8_quant, codes, x, scale, None):
        return None
    most = np.abs(host).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        factor = np.where(most == 0, F32(0), F32(127) / most)
    return [(bits(codes), int8_codes(host * factor)), (bits(scale), (most / F32(127)).view(np.int32))]


def static_scaled_int8_quant(random, x, host):
    codes, scale = more.empty(x.shape, torch.int8), F32(2.0 ** random.uniform(-8, 4))
    if not run(torch.ops._C.static_scaled_int8_quant, codes, x, torch.tensor([scale], device=base.DEVICE), None):
        return None
    return [(bits(codes), int8_codes(host / scale))]


def int8_product(cases, seed, seconds, zero_points):
    """(a - zero point) · b in exact integers; scales and bias in f32 behind them."""
    random = np.random.default_rng(seed)

    def on_device(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(base.DEVICE)

    def one(index):
        m, n, k = int(random.integers(1, 40)), 16 * int(random.integers(1, 9)), 16 * int(random.integers(1, 33))
        extreme = random.integers(0, 4) == 0
        draw = (lambda shape: random.choice([-128, 127], shape)) if extreme else (lambda s: random.integers(-128, 128, s))
        a, b = draw((m, k)), draw((n, k))
        rows, columns = ((m if random.integers(0, 2) else 1), (n if random.integers(0, 2) else 1))
        by_row, by_column = (2.0 ** random.uniform(-9, -5, (size, 1)) for size in (rows, columns))
        by_row, by_column = by_row.astype(F32), by_column.astype(F32)
        kind = TYPES[int(random.integers(1, 3))]
        bias = on_device(random.standard_normal(n).astype(F32)).to(kind) if random.integers(0, 2) else None
        y, sums = more.empty((m, n), kind), a @ b.T
        tensors = [on_device(a.astype(np.int8)), on_device(b.astype(np.int8)).t(), on_device(by_row), on_device(by_column)]
        if zero_points:
            per_row = rows == m and m > 1
            zeros = random.integers(-128, 128, (m, 1)) if per_row else np.full((m, 1), random.integers(-128, 128))
            totals = b.sum(axis=1)
            adjust = totals if per_row else totals * zeros[0, 0]
            sums = sums - zeros * totals
            azp = on_device(zeros[:, 0].astype(np.int32)) if per_row else None
            ran = run(torch.ops._C.cutlass_scaled_mm_azp, y, *tensors, on_device(adjust.astype(np.int32)), azp, bias)
        else:
            ran = run(torch.ops._C.cutlass_scaled_mm, y, *tensors, bias)
        if not ran:
            return None, None
        product = sums * by_row.astype(np.float64) * by_column.astype(np.float64).T
        added = bias.double().cpu().numpy() if bias is not None else np.zeros(n)
        # The sum in f32, two products, one addition: each at most 2^-24 of its result.
        error = (np.abs(product) * 3 + np.abs(product + added)) * 2.0**-24 * (1 + 2.0**-20) + 2.0**-149
        ends = [torch.from_numpy((product + added + side * error).astype(F32)).to(kind).double() for side in (-1, 1)]
        found = y.double().cpu()
        right = (found >= ends[0]) & (found <= ends[1])

        def describe():
            at = tuple(int(i) for i in (~right).nonzero()[0])
            exact = (product + added)[at]
            return f"M, N, K = {m, n, k}, {kind}, [{at[0]}, {at[1]}]: found {float(found[at])}, expected {exact}"

        return bool(right.all()), describe

    return tally(cases, seconds, one)


def scaled_mm(cases, seed, seconds, blocks):
    random = np.random.default_rng(seed)

    def one(index):
        config = {"dtype": str(random.choice(["float16", "bfloat16"])), "size_m": int(random.integers(1, 40))}
        if blocks:
            config |= {"size_n": 128 * int(random.integers(1, 4)), "size_k": 128 * int(random.integers(1, 6))}
            # The operator takes multiples of 4.
            config["size_m"] = 4 * int(random.integers(1, 12))
            config["weight_block_size"] = [128, 128]
        else:
            config |= {"size_n": 16 * int(random.integers(1, 9)), "size_k": 32 * int(random.integers(1, 20))}
            for flag in ("per_act_token_quant", "per_out_ch_quant", "has_bias"):
                config[flag] = bool(random.integers(0, 2))
        case = marlinspike.Case.draw("cutlass_scaled_mm", seed, index, config)
        tensors = {f"in.{name}": more.tensor(np.asarray(array)) for name, array in case.inputs.items()}
        made = {}
        try:
            if not run(lambda: made.update(more.cutlass_scaled_mm(case.config, tensors))):
                return None, None
        except base.Unsupported:
            return None, None
        report = marlinspike.check("cutlass_scaled_mm", case.inputs, {"y": made["y"].cpu()}, {**case.config, "schedule": None})
        right = None if report.verdict == "unchecked" else report.passed
        return right, lambda: f"{config}: {report['y']}; again: Case.draw('cutlass_scaled_mm', {seed}, {index}, config)"

    return tally(cases, seconds, one)


def marlin_int8_sums(cases, seed, seconds):
    """Drawn cases with long sums. Their rows are repeated, because a block adds more of K if there are more rows."""
    size_n, size_k, group = 1024, 4096, 128
    config = {
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "input_dtype": "int8", "desc_act": False, "is_k_full": True,
        "group_size": group, "size_m": 1, "size_n": size_n, "size_k": size_k, "has_bias": False,
    }  # fmt: skip

    def one(index):
        case = marlinspike.Case.draw("linear", seed, index, {**config, "dtype": ("float16", "bfloat16")[index % 2]})
        given = {f"in.{name}": more.tensor(np.asarray(array)) for name, array in case.inputs.items()}
        packed = {f"ref.{name}": more.tensor(np.asarray(array)) for name, array in case.outputs.items()}
        rows = len(given["in.x"])
        for name in ("in.x", "in.a_q", "in.a_scales"):
            given[name] = given[name].repeat(1024 // rows, 1)
        made, tensors = {}, {**given, **packed}
        if not run(lambda: made.update(base.marlin_gemm({**case.config, "size_m": len(given["in.x"])}, tensors))):
            return None, None
        y = made["y"][:rows].cpu()
        report = marlinspike.check("linear", case.inputs, {"y": y}, {**case.config, "schedule": None})

        def describe():
            words = np.asarray(case.inputs["qweight"]).view(np.uint32)
            codes = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15).reshape(size_k, size_n)
            scales = np.asarray(case.inputs["scales"]).astype(np.float64)
            weight = (codes - 8.0) * np.repeat(np.rint(scales / scales.max() * 4096), group, axis=0)
            most = np.abs(np.asarray(case.inputs["a_q"]).astype(np.float64) @ weight).max() / 2**31
            again = f"Case.draw('linear', {seed}, {index}, ...)"
            return f"largest integer sum {most:.2f} * 2^31, y finite: {bool(y.isfinite().all())}, {report['y']}; {again}"

        return None if report["y"].verdict == "unchecked" else report["y"].verdict == "pass", describe

    return tally(cases, seconds, one)


def activated(kind, both):
    made = more.empty((len(both), both.shape[1] // 2), both.dtype)
    return made if run(getattr(torch.ops._C, more.ACTIVATIONS[kind]), made, both.to(base.DEVICE)) else None


def every_activation(cases, seed, seconds, names=tuple(more.ACTIVATIONS), activate=activated):
    """Each case is 65536 gates and one value of up; the first cases are all kinds and both types."""
    random = np.random.default_rng(seed)
    kinds = [(kind, dtype) for kind in names for dtype in ("float16", "bfloat16")]
    keys = {
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "group_size": -1, "size_m": 256, "num_experts": 2, "top_k": 1,
        "hidden_size": 64, "intermediate_size": 256, "scoring_func": "softmax", "block_size_m": 64,
    }  # fmt: skip

    def one(index):
        kind, dtype = kinds[(seed + index) % len(kinds)]
        case = marlinspike.Case.draw("moe", 0, 0, {**keys, "dtype": dtype, "activation": kind})
        gate = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype)).reshape(256, 256)
        value = float(random.choice([1.0, -1.0, 0.0, 2.0 ** random.uniform(-20, 14), -(2.0 ** random.uniform(-6, 8))]))
        up = torch.full_like(gate, value)
        both = torch.stack([gate, up], dim=-1).reshape(256, 512) if kind == "swigluoai" else torch.cat([gate, up], dim=1)
        made = activate(kind, both)
        if made is None:
            return None, None
        outputs = {"gate_up": both, "activated": made.cpu()}
        # A drawn case has its own number of rows.
        rows = {name: np.resize(case.inputs[name], (256, case.inputs[name].shape[1])) for name in ("x", "router_logits")}
        config = {**case.config, "size_m": 256, "schedule_w13": None, "schedule_w2": None}
        report = marlinspike.check("moe", {**case.inputs, **rows}, outputs, config)
        (judged,) = [output for output in report.outputs if output.name == "activated"]
        return judged.verdict != "fail", lambda: f"{kind}, {dtype}, up = {value}: {judged}"

    return tally(cases, seconds, one)


def named(quantize):
    return lambda cases, seed, seconds: quantization(cases, seed, seconds, quantize.__name__, quantize)


ALL = {
    quantize.__name__: named(quantize)
    for quantize in (
        static_scaled_fp8_quant,
        dynamic_scaled_fp8_quant,
        dynamic_per_token_scaled_fp8_quant,
        dynamic_scaled_int8_quant,
        static_scaled_int8_quant,
    )
}
ALL["cutlass_scaled_mm_int8"] = lambda cases, seed, seconds: int8_product(cases, seed, seconds, False)
ALL["cutlass_scaled_mm_azp"] = lambda cases, seed, seconds: int8_product(cases, seed, seconds, True)
ALL["cutlass_scaled_mm"] = lambda cases, seed, seconds: scaled_mm(cases, seed, seconds, False)
ALL["cutlass_scaled_mm_blocks"] = lambda cases, seed, seconds: scaled_mm(cases, seed, seconds, True)
ALL["marlin_int8_sums"] = marlin_int8_sums
ALL["every_activation"] = every_activation
