"""Cases of fourteen operations, made from the page "Case schema" and the pages that it links to, with numpy alone: the
module `case_file` of the page writes them, this file computes the outputs, and each is checked right and with one
wrong element."""

import pathlib

import numpy as np
import pytest

import marlinspike

PAGE = (pathlib.Path(__file__).parents[3] / "docs/src/reference/schema.md").read_text()
CASE_FILE = {}
exec(PAGE.split("```python\n", 1)[1].split("```", 1)[0], CASE_FILE)  # noqa: S102
write_case = CASE_FILE["write_case"]


def linear(rng):
    """W = (code - 8) * scale; 8 consecutive k in a word of qweight, the first in its lowest bits."""
    codes, scales = rng.integers(0, 16, (64, 64)), rng.uniform(0.5, 1.5, (2, 64)).astype(np.float16)
    x = rng.standard_normal((3, 64)).astype(np.float16)
    words = np.zeros((8, 64), np.uint32)
    for i in range(8):
        words |= codes[i::8].astype(np.uint32) << np.uint32(4 * i)
    weight = (codes - 8) * np.repeat(scales.astype(np.float64), 32, axis=0)
    config = {"checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": "float16", "group_size": 32}
    config.update(size_m=3, size_n=64, size_k=64)
    inputs = {"qweight": ("I32", words.view(np.int32)), "scales": ("F16", scales), "x": ("F16", x)}
    return config, inputs, {"y": ("F16", (x.astype(np.float64) @ weight).astype(np.float16))}


def router(rng):
    """Sigmoid; groups by the sum of their two best biased scores; the bias is for the choice alone."""
    tokens, experts, groups, kept, top_k = 5, 16, 4, 2, 3
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    bias = rng.standard_normal(experts).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    choice = scores + bias
    of_groups = np.sort(choice.reshape(tokens, groups, -1), axis=2)[:, :, -2:].sum(axis=2)
    chosen = np.argsort(-of_groups, axis=1)[:, :kept]
    inside = np.zeros((tokens, groups), bool)
    np.put_along_axis(inside, chosen, True, axis=1)
    choice[~np.repeat(inside, experts // groups, axis=1)] = -np.inf
    ids = np.argsort(-choice, axis=1)[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    weights *= 2.5 / weights.sum(axis=1, keepdims=True)
    config = {"scoring_func": "sigmoid", "top_k": top_k, "renormalize": True, "use_grouped_topk": True}
    config.update(num_expert_group=groups, topk_group=kept, routed_scaling_factor=2.5)
    inputs = {"router_logits": ("F32", logits), "e_score_correction_bias": ("F32", bias)}
    ids, weights = ids.astype(np.int32), weights.astype(np.float32)
    return config, inputs, {"topk_ids": ("I32", ids), "topk_weights": ("F32", weights)}


def moe_align_block_size(rng):
    """Entries (token * top_k + slot) by expert; padding is the number of entries."""
    tokens, experts, top_k, block = 7, 5, 2, 4
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    order, of_blocks = [], []
    for expert in range(experts):
        entries = np.flatnonzero(ids.ravel() == expert).tolist()
        blocks = -(-len(entries) // block)
        order += entries + [tokens * top_k] * (blocks * block - len(entries))
        of_blocks += [expert] * blocks
    config = {"num_experts": experts, "top_k": top_k, "block_size": block}
    outputs = {"sorted_token_ids": order, "expert_ids": of_blocks, "num_tokens_post_padded": [len(order)]}
    outputs = {name: ("I32", np.array(values, np.int32)) for name, values in outputs.items()}
    return config, {"topk_ids": ("I32", ids)}, outputs


CODE = np.arange(127)
E4M3 = np.where(CODE < 8, CODE / 512.0, (1 + (CODE & 7) / 8) * 2.0 ** ((CODE >> 3) - 7))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values, table):
    """Codes of the magnitudes nearest to values, ties to even, saturating: by comparing with every code."""
    distance = np.abs(np.minimum(np.abs(values.astype(np.float64)), table[-1])[..., None] - table)
    best = distance == distance.min(axis=-1, keepdims=True)
    even = best & (np.arange(len(table)) % 2 == 0)
    return np.where(even.any(axis=-1), even.argmax(axis=-1), best.argmax(axis=-1))


def e4m3(values):
    return (nearest(values, E4M3) + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def nibbles(codes):
    """Two codes in a byte, even k in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def per_token_group_fp8_quant(rng):
    """Rule `quotient`: scale = max(m, 1e-10) / 448, code = x / scale, in float32."""
    x = rng.standard_normal((4, 256)).astype(np.float16)
    groups = x.astype(np.float32).reshape(4, 2, 128)
    scale = np.maximum(np.abs(groups).max(axis=2), np.float32(1e-10)) / np.float32(448)
    codes = e4m3((groups / scale[..., None]).astype(np.float64)).reshape(4, 256)
    config = {"dtype": "float16", "size_m": 4, "size_k": 256, "group_size": 128, "quantizer": "quotient"}
    config.update(scale_layout="column_major")
    outputs = {"x_q": ("F8_E4M3", codes), "x_s": ("F32", np.ascontiguousarray(scale.T))}
    return config, {"x": ("F16", x)}, outputs


def swizzled(scale):
    """Tiles of 128 rows and 4 groups: row r and group g are at (r % 32) * 16 + (r % 128) // 32 * 4 + g % 4."""
    rows, groups = scale.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-groups // 4) * 4), np.uint8)
    tiles = padded.reshape(len(padded) // 128, padded.shape[1] // 4, 512)
    for row in range(rows):
        for group in range(groups):
            at = row % 32 * 16 + row % 128 // 32 * 4 + group % 4
            tiles[row // 128, group // 4, at] = scale[row, group]
    return padded


def swizzle_blockscale(rng):
    rows, groups = 130, 6
    scale = rng.integers(0, 0x7F, (rows, groups), dtype=np.uint8)
    config = {"scale_type": "float8_e4m3fn", "sf_layout": "128x4", "size_n": rows, "groups": groups}
    return config, {"scale": ("F8_E4M3", scale)}, {"swizzled_scale": ("F8_E4M3", swizzled(scale))}


def cutlass_scaled_mm(rng):
    """y = a_scale * weight_scale * (a . weight^T) + bias, of e4m3 codes."""
    a, w = (e4m3(rng.standard_normal(shape)) for shape in ((5, 64), (32, 64)))
    a_scales = rng.uniform(0.5, 1.5, (5, 1)).astype(np.float32)
    w_scales = rng.uniform(0.5, 1.5, (32, 1)).astype(np.float32)
    bias = rng.standard_normal(32).astype(np.float16)

    def value(code):
        exponent, fraction = code >> 3 & 15, code & 7
        size = np.where(exponent == 0, fraction / 512.0, (1 + fraction / 8) * 2.0 ** (exponent.astype(int) - 7))
        return np.where(code > 127, -size, size)

    y = value(a) @ value(w).T * a_scales * w_scales.T + bias
    config = {"dtype": "float16", "size_m": 5, "size_n": 32, "size_k": 64, "has_bias": True}
    config.update(per_act_token_quant=True, per_out_ch_quant=True)
    inputs = {"a": ("F8_E4M3", a), "a_scales": ("F32", a_scales), "weight": ("F8_E4M3", w)}
    inputs.update(weight_scale=("F32", w_scales), bias=("F16", bias))
    return config, inputs, {"y": ("F16", y.astype(np.float16))}


def dynamic_scaled_int8_quant(rng):
    """Not symmetric: scale = (largest - smallest) / 255, azp = round(-128 - smallest / scale), and
    code = round(x * (1 / scale)) + azp, in float32 with ties to even."""
    x = rng.standard_normal((4, 96)).astype(np.float16)
    wide = x.astype(np.float32)
    smallest = wide.min(axis=1, keepdims=True)
    scale = (wide.max(axis=1, keepdims=True) - smallest) / np.float32(255)
    azp = np.rint(np.float32(-128) - smallest / scale)
    codes = np.clip(np.rint(wide * (np.float32(1) / scale)) + azp, -128, 127)
    outputs = {"x_q": ("I8", codes.astype(np.int8)), "x_s": ("F32", scale), "x_azp": ("I32", azp.astype(np.int32))}
    return {"dtype": "float16", "size_m": 4, "size_k": 96, "symmetric": False}, {"x": ("F16", x)}, outputs


def cutlass_scaled_mm_azp(rng):
    """y = a_scales * weight_scale * (a . weight^T - azp * azp_adj) + bias, with one azp for each row."""
    a, w = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((5, 64), (32, 64)))
    a_scales, w_scales = (rng.uniform(0.5, 1.5, (n, 1)).astype(np.float32) / 256 for n in (5, 32))
    azp, bias = rng.integers(-20, 20, (5, 1)).astype(np.int32), rng.standard_normal(32).astype(np.float16)
    adj = w.astype(np.int32).sum(axis=1)
    sums = a.astype(np.int64) @ w.astype(np.int64).T - azp.astype(np.int64) * adj
    y = sums * a_scales.astype(np.float64) * w_scales.astype(np.float64).T + bias
    config = {"dtype": "float16", "size_m": 5, "size_n": 32, "size_k": 64, "has_bias": True, "azp": "token"}
    config.update(per_act_token_quant=True, per_out_ch_quant=True)
    inputs = {"a": ("I8", a), "a_scales": ("F32", a_scales), "weight": ("I8", w), "weight_scale": ("F32", w_scales)}
    inputs.update(azp=("I32", azp), azp_adj=("I32", adj.astype(np.int32)), bias=("F16", bias))
    return config, inputs, {"y": ("F16", y.astype(np.float16))}


def normalize_e4m3fn_to_e4m3fnuz(rng):
    """The bits stay, except those of -0, and mean half as much: scales are doubled."""
    weight = rng.integers(0, 256, (6, 32)).astype(np.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0x80
    scales, static = rng.uniform(0.5, 1.5, 2).astype(np.float32), np.array([0.75], np.float32)
    inputs = {"weight": ("F8_E4M3", weight), "weight_scale": ("F32", scales), "input_scale": ("F32", static)}
    normal = np.where(weight == 0x80, 0, weight).astype(np.uint8)
    outputs = {"weight": ("F8_E4M3", normal), "weight_scale": ("F32", scales * 2), "input_scale": ("F32", static * 2)}
    return {"size_n": 6, "size_k": 32, "num_scales": 2}, inputs, outputs


def scaled_fp4_quant(rng):
    """scale = e4m3(g * (max * fl(1/6))), code = e2m1(x * (1 / (scale * (1 / g)))), all in float32."""
    x, g, one = rng.standard_normal((3, 96)).astype(np.float16), np.float32(90), np.float32(1)
    blocks = x.astype(np.float32).reshape(3, 6, 16)
    scale = nearest(np.minimum(np.float32(448), g * (np.abs(blocks).max(axis=2) * (one / np.float32(6)))), E4M3)
    factor = one / (E4M3[scale].astype(np.float32) * (one / g))
    codes = nearest(blocks * factor[..., None], E2M1) + 8 * np.signbit(blocks)
    outputs = {"x_fp4": ("U8", nibbles(codes.reshape(3, 96))), "x_scale": ("F8_E4M3", swizzled(scale))}
    inputs = {"x": ("F16", x), "input_global_scale": ("F32", np.array([g]))}
    return {"dtype": "float16", "size_m": 3, "size_k": 96}, inputs, outputs


def cutlass_scaled_fp4_mm(rng):
    """y = alpha * sum of (a * a_scale) * (w * w_scale); alpha is the product of the global scales."""
    values = np.concatenate([E2M1, -E2M1])
    a, w = (rng.integers(0, 16, (rows, 64)) for rows in (5, 24))
    a_scale, w_scale = (rng.integers(0x28, 0x48, (rows, 4)).astype(np.uint8) for rows in (5, 24))
    a_global, w_global = np.array([0.375], np.float32), np.array([0.0625, 0.03125], np.float32)
    left, right = (values[c] * np.repeat(E4M3[s], 16, axis=1) for c, s in ((a, a_scale), (w, w_scale)))
    y = left @ right.T * np.repeat((a_global * w_global).astype(np.float64), [8, 16])
    config = {"dtype": "float16", "size_m": 5, "size_n": 24, "size_k": 64, "logical_widths": [8, 16]}
    inputs = {"a": ("U8", nibbles(a)), "a_scale": ("F8_E4M3", a_scale), "a_global_scale": ("F32", a_global)}
    inputs.update(weight=("U8", nibbles(w)), weight_scale=("F8_E4M3", w_scale))
    inputs.update(weight_global_scale=("F32", w_global))
    return config, inputs, {"y": ("F16", y.astype(np.float16))}


def int4_fp8_preprocess(rng):
    """A code v becomes v - z from the zero point z on, otherwise 15 - v; AWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, zeros = rng.integers(0, 16, (32, 16)), rng.integers(0, 16, (2, 16))
    above = codes - np.repeat(zeros, 16, axis=0)

    def packed(values):
        words = np.zeros((len(values), 2), np.uint32)
        for field, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * field)
        return ("I32", words.view(np.int32))

    inputs = {"qweight": packed(codes), "qzeros": packed(zeros)}
    outputs = {"qweight": packed(np.where(above >= 0, above, 15 - codes))}
    return {"checkpoint_format": "awq", "size_k": 32, "size_n": 16}, inputs, outputs


def mxfp4_int8_linear(rng):
    """q = rint(x * (127 / max)) of each 32 k; y = bias + fma over groups of (sum of q * 2w) * (max / 127 / 2 * 2^e).
    Doubles hold each product and sum exactly here, so that one rounding to float32 is the fma's."""
    m, n, k = 3, 20, 96
    x, bias = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    codes, exponents = rng.integers(0, 16, (n, k)), rng.integers(125, 130, (n, k // 32)).astype(np.uint8)
    largest = np.abs(x.reshape(m, -1, 32)).max(axis=2)
    q = np.rint(x * np.repeat(np.float32(127) / largest, 32, axis=1)).astype(np.int64)
    doubled = (2 * np.concatenate([E2M1, -E2M1])).astype(np.int64)[codes]
    y = np.zeros((m, n), np.float32)
    for group in range(k // 32):
        sums = q[:, 32 * group :][:, :32] @ doubled[:, 32 * group :][:, :32].T
        step = (largest[:, group] / np.float32(127) / np.float32(2)).astype(np.float64)
        factor = step[:, None] * 2.0 ** (exponents[:, group].astype(int) - 127)
        y = (sums * factor + y).astype(np.float32)
    # Blocks of 16 columns: for each group 256 bytes of codes and 16 of scales, then the biases.
    wide = [np.concatenate([t, np.zeros((12, *t.shape[1:]), t.dtype)]) for t in (codes, exponents, bias)]
    packed = b""
    for block in (slice(0, 16), slice(16, 32)):
        for group in range(k // 32):
            low, high = (wide[0][block, at : at + 16].reshape(16, 4, 4) for at in (32 * group, 32 * group + 16))
            packed += (low | high << 4).transpose(1, 0, 2).astype(np.uint8).tobytes()
            packed += wide[1][block, group].tobytes()
        packed += wide[2][block].tobytes()
    config = {"dtype": "float32", "has_bias": True, "size_m": m, "size_n": n, "size_k": k}
    inputs = {"x": ("F32", x), "weight": ("U8", nibbles(codes)), "weight_scale": ("U8", exponents)}
    outputs = {"y": ("F32", y + bias), "rhs_packed": ("U8", np.frombuffer(packed, np.uint8))}
    return config, {**inputs, "bias": ("F32", bias)}, outputs


def convert_to_nvfp4_moe_kernel_format(rng):
    """FLASHINFER_CUTLASS: up before gate, scales in tiles, one activation scale for all experts: the largest."""
    experts, sizes = 2, {"w13": (128, 64), "w2": (64, 64)}
    inputs, outputs, scales = {}, {}, {}
    for name, (n, k) in sizes.items():
        shards = n // 64
        weight = rng.integers(0, 256, (experts, n, k // 2), dtype=np.uint8)
        scale = rng.integers(0, 0x7F, (experts, n, k // 16), dtype=np.uint8)
        of_weight = np.repeat(rng.uniform(0.5, 1.5, (experts, 1)), shards, axis=1).astype(np.float32)
        of_input = rng.uniform(0.5, 1.5, (experts, shards)).astype(np.float32)
        inputs.update({f"{name}_weight": ("U8", weight), f"{name}_weight_scale": ("F8_E4M3", scale)})
        inputs.update({f"{name}_weight_scale_2": ("F32", of_weight), f"{name}_input_scale": ("F32", of_input)})
        if shards == 2:
            weight, scale = (np.roll(t, 64, axis=1) for t in (weight, scale))
        scales[name] = np.full(experts, of_input.max()), of_weight[:, 0]
        outputs[f"{name}_weight"] = "U8", weight
        outputs[f"{name}_weight_scale"] = "F8_E4M3", np.stack([swizzled(s) for s in scale])
        outputs[f"{name}_input_scale"], outputs[f"{name}_weight_scale_2"] = (("F32", s) for s in scales[name])
    g1, g2 = (of_input * of_weight for of_input, of_weight in scales.values())
    scale_c = g1 * (np.float32(1) / scales["w2"][0])
    outputs.update(g1_alphas=("F32", g1), g2_alphas=("F32", g2), g1_scale_c=("F32", scale_c))
    config = {"backend": "FLASHINFER_CUTLASS", "num_experts": experts, "hidden_size": 64, "intermediate_size": 64}
    return config, inputs, outputs


MADE = [
    linear, router, moe_align_block_size, per_token_group_fp8_quant, swizzle_blockscale, cutlass_scaled_mm,
    dynamic_scaled_int8_quant, cutlass_scaled_mm_azp, normalize_e4m3fn_to_e4m3fnuz, scaled_fp4_quant,
    cutlass_scaled_fp4_mm, int4_fp8_preprocess, mxfp4_int8_linear, convert_to_nvfp4_moe_kernel_format,
]  # fmt: skip


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_case_by_hand(make, tmp_path):
    config, inputs, outputs = make(np.random.default_rng(3))
    path = tmp_path / "case.safetensors"
    write_case(path, make.__name__, config, inputs, outputs)
    report = marlinspike.Case.read(path).check()
    assert report.verdict == "pass", report
    for name, (dtype, values) in outputs.items():
        wrong = values.copy()
        # The highest bit but one of an element: another number, and no NaN.
        flat = wrong.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[wrong.itemsize])
        flat[flat.size // 2] ^= flat.dtype.type(1 << (8 * wrong.itemsize - 3 if dtype[0] == "F" else 1))
        write_case(path, make.__name__, config, inputs, {**outputs, name: (dtype, wrong)})
        try:
            report = marlinspike.Case.read(path).check()
        except marlinspike.Error as error:
            assert f"out.{name}" in str(error)
            continue
        assert report[name].verdict == "fail", report
