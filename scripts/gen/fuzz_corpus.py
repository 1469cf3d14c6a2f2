#!/usr/bin/env python3
"""Writes tools/fuzz/corpus/: small valid files and one file for each fault that a reader must name.

Requires only Python 3.9. `marlinspike vectors` writes the valid case (see VALID_CASE); each hostile
case differs from it by one fault.

    python3 scripts/gen/fuzz_corpus.py VALID_CASE.safetensors [REPOSITORY]
"""
import json
import pathlib
import struct
import sys


def pack(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="U8", shape="[4]", offsets="[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def containers() -> dict[str, bytes]:
    four = b"\0" * 4
    one = lambda **kw: pack('{"a":' + entry(**kw) + "}", four)
    two = lambda a, b: pack(
        '{"a":' + entry(offsets=a) + ',"b":' + entry(offsets=b) + "}", b"\0" * 8)
    return {
        "valid_one": one(),
        "valid_two": two("[0,4]", "[4,8]"),
        "valid_empty": pack("{}"),
        "valid_metadata": pack('{"__metadata__":{"k":"v"},"a":' + entry() + "}", four),
        "valid_scalar": pack('{"a":' + entry("F32", "[]", "[0,4]") + "}", four),
        "hostile_nothing": b"",
        "hostile_short_length": b"\x01\x02\x03",
        "hostile_huge_header": pack("{}", length=(1 << 64) - 1),
        "hostile_header_past_end": pack("{}", length=1 << 20),
        "hostile_not_utf8": struct.pack("<Q", 4) + b'{"\xff}',
        "hostile_not_an_object": pack("[1,2]"),
        "hostile_not_json": pack('{"a":'),
        "hostile_overlap": two("[0,4]", "[2,6]"),
        "hostile_gap": pack('{"a":' + entry() + ',"b":' + entry(offsets="[6,10]") + "}", b"\0" * 10),
        "hostile_past_end": pack('{"a":' + entry(shape="[400]", offsets="[0,400]") + "}", four),
        "hostile_negative_offset": one(offsets="[-4,0]"),
        "hostile_reversed_offsets": one(offsets="[4,0]"),
        "hostile_wrong_shape": one(shape="[5]"),
        "hostile_shape_overflow": one(shape="[4294967296,4294967296,4294967296]"),
        "hostile_fraction": one(shape="[4.5]"),
        "hostile_sub_byte": one(dtype="F4", shape="[8]"),
        "hostile_unknown_dtype": one(dtype="U3"),
        "hostile_duplicate_tensor": pack('{"a":' + entry() + ',"a":' + entry() + "}", four),
        "hostile_duplicate_key": pack(
            '{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', four),
        "hostile_duplicate_metadata": pack('{"__metadata__":{"k":"1","k":"2"}}'),
        "hostile_metadata_number": pack('{"__metadata__":{"k":1}}'),
        "hostile_missing_key": pack('{"a":{"dtype":"U8","shape":[4]}}', four),
        "hostile_unknown_key": pack(
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}', four),
        "hostile_entry_is_a_list": pack('{"a":[]}'),
        "hostile_trailing_bytes": pack('{"a":' + entry() + "}", b"\0" * 9),
        "hostile_deep": pack('{"a":' + "[" * 5000),
    }


class Case:
    def __init__(self, blob: bytes):
        n = struct.unpack("<Q", blob[:8])[0]
        header = json.loads(blob[8:8 + n])
        self.meta = header.pop("__metadata__")
        self.config = json.loads(self.meta.pop("config"))
        data = blob[8 + n:]
        self.tensors = {
            name: [e["dtype"], e["shape"], bytearray(data[slice(*e["data_offsets"])])]
            for name, e in header.items()}

    def bytes(self) -> bytes:
        header, data = {"__metadata__": {**self.meta, "config": self.text}}, b""
        for name, (dtype, shape, part) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape,
                            "data_offsets": [len(data), len(data) + len(part)]}
            data += part
        return pack(json.dumps(header), data)

    @property
    def text(self) -> str:
        return getattr(self, "raw", None) or json.dumps(self.config)


def cases(valid: bytes) -> dict[str, bytes]:
    out = {"valid_linear": valid}

    def make(name, change):
        case = Case(valid)
        if name.startswith("hostile"):
            # Parts that the fault does not need would only enlarge the file.
            for tensor in [t for t in case.tensors if t.startswith("out.") or t == "in.x"]:
                del case.tensors[tensor]
        change(case)
        out[name] = case.bytes()

    def scale(case, bits):
        case.tensors["in.scales"][2][6:8] = struct.pack("<H", bits)

    def g_idx(case, value):
        case.tensors["in.g_idx"][2][20:24] = struct.pack("<i", value)

    def set_config(key, value):
        return lambda c: c.config.__setitem__(key, value)

    make("hostile_no_op", lambda c: c.meta.pop("op"))
    make("hostile_format", lambda c: c.meta.__setitem__("format", "marlin"))
    make("hostile_version", lambda c: c.meta.__setitem__("version", "2"))
    make("hostile_op", lambda c: c.meta.__setitem__("op", "conv"))
    make("hostile_config_json", lambda c: setattr(c, "raw", '{"size_k":'))
    make("hostile_config_twice", lambda c: setattr(
        c, "raw", json.dumps(c.config)[:-1] + ', "size_k": 128}'))
    make("hostile_config_missing", lambda c: c.config.pop("size_n"))
    make("hostile_group_zero", set_config("group_size", 0))
    make("hostile_group_minus_two", set_config("group_size", -2))
    make("hostile_size_huge", set_config("size_k", 1 << 40))
    make("hostile_size_negative", set_config("size_n", -64))
    make("hostile_weight_type", set_config("weight_type", "uint4"))
    make("hostile_group_not_dividing", set_config("group_size", 96))
    make("hostile_nan_scale", lambda c: scale(c, 0x7e00))
    make("hostile_infinite_scale", lambda c: scale(c, 0x7c00))
    make("hostile_g_idx_too_large", lambda c: g_idx(c, 4))
    make("hostile_g_idx_negative", lambda c: g_idx(c, -1))
    make("hostile_missing_input", lambda c: c.tensors.pop("in.scales"))
    make("hostile_unknown_tensor", lambda c: c.tensors.__setitem__(
        "in.qzeros2", ["U8", [1], b"\0"]))
    make("hostile_tensor_prefix", lambda c: c.tensors.__setitem__("weights", ["U8", [1], b"\0"]))
    make("hostile_shape", lambda c: c.tensors["in.qweight"].__setitem__(1, [8, 128]))
    make("hostile_dtype", lambda c: c.tensors["in.qweight"].__setitem__(0, "F32"))
    make("valid_wrong_sort", lambda c: c.tensors["out.g_idx_sort_indices"][2].__setitem__(
        slice(0, 4), struct.pack("<i", -7)))
    make("valid_all_zero_output", lambda c: c.tensors["out.marlin_qweight"].__setitem__(
        2, bytearray(len(c.tensors["out.marlin_qweight"][2]))))
    out["hostile_truncated"] = valid[: len(valid) // 2]
    return out


def configs() -> dict[str, bytes]:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True,
            "lm_head": False}
    ct = {"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
              "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
              "group_size": 128}}},
          "ignore": ["lm_head"]}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model = lambda c: json.dumps({"quantization_config": c}).encode()
    change = lambda c, **kw: model({**c, **kw})
    without = lambda c, key: model({k: v for k, v in c.items() if k != key})
    return {
        "valid_gptq": model(gptq),
        "valid_gptq_dynamic": change(gptq, dynamic={
            "+:.*\\.(?:q|k)_proj(?!x)": {"bits": 8}, "-:.*lm_head.*": {}}),
        "valid_awq": model({"quant_method": "awq", "bits": 4, "group_size": 64,
                            "zero_point": True, "version": "gemm"}),
        "valid_ct": model(ct),
        "valid_fp8": model(fp8),
        "valid_modelopt": model({"quant_method": "modelopt", "quant_algo": "NVFP4",
                                 "group_size": 16, "exclude_modules": ["lm_head"]}),
        "valid_mxfp4": model({"quant_method": "mxfp4"}),
        "hostile_not_json": b'{"quantization_config":',
        "hostile_absent_method": model({"bits": 4}),
        "hostile_unknown_method": model({"quant_method": "magic"}),
        "hostile_bits_type": change(gptq, bits="four"),
        "hostile_bits_3": change(gptq, bits=3),
        "hostile_bits_missing": without(gptq, "bits"),
        "hostile_group_zero": change(gptq, group_size=0),
        "hostile_pattern": change(gptq, dynamic={"+:(": {"bits": 8}}),
        "valid_pattern_blowup": change(gptq, dynamic={
            "+:(?=(a|a)*$)(a+)+(a+)+$" : {"bits": 8}, "-:^(([a-z])+.)+[A-Z]([a-z])+$": {}}),
        "valid_ct_no_groups": without(ct, "config_groups"),
        "hostile_ct_list": change(ct, config_groups=[]),
        "hostile_fp8_block": change(fp8, weight_block_size=[0, -1]),
        "hostile_deep": b'{"quantization_config":' + b"[" * 3000,
        "hostile_number": b"1e999",
    }


def indexes() -> dict[str, bytes]:
    index = lambda weight_map, **more: json.dumps({**more, "weight_map": weight_map}).encode()
    one = "model-00001-of-00002.safetensors"
    at = lambda file: index({"b": one, "a": file})
    return {
        "valid_two": index({"a": one, "b": one.replace("00001", "00002", 1)},
                           metadata={"total_size": 12}),
        "valid_one_file": index({"model.layers.0.mlp.gate.weight": one, "lm_head.weight": one}),
        "valid_empty": index({}),
        "valid_unicode": index({"\u00e9": "mod\u00e8le.safetensors"}),
        "valid_odd_names": index({"": "a b.safetensors", "../x": "a..safetensors"}),
        "valid_nested_metadata": index({"a": one}, metadata={"a": [[{"weight_map": {"a": 1}}]]}),
        "hostile_nothing": b"",
        "hostile_truncated": index({"a": one})[:-8],
        "hostile_not_utf8": b'{"weight_map": {"\xff": "a.safetensors"}}',
        "valid_deep_metadata": b'{"metadata":' + b"[" * 2000 + b"]" * 2000 + b',"weight_map":{}}',
        "hostile_deep": b"[" * 2000,
        "hostile_deep_map": b'{"weight_map":' + b'{"a":' * 200,
        "hostile_not_an_object": b"17",
        "hostile_no_map": b'{"metadata": {}}',
        "hostile_two_maps": b'{"weight_map": {}, "weight_map": {"a": "a.safetensors"}}',
        "hostile_map_is_a_list": index([["a", one]]),
        "hostile_file_is_a_number": at(1),
        "hostile_file_is_null": at(None),
        "hostile_twice": b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
        "hostile_twice_escaped":
            b'{"weight_map": {"a": "a.safetensors", "\\u0061": "a.safetensors"}}',
        "hostile_parent": at("../a.safetensors"),
        "hostile_parent_escaped": b'{"weight_map": {"a": "\\u002e.\\u002fa.safetensors"}}',
        "hostile_absolute": at("/a.safetensors"),
        "hostile_folder": at("a/b.safetensors"),
        "hostile_backslash": at("..\\a.safetensors"),
        "hostile_drive": at("C:a.safetensors"),
        "hostile_hidden": at(".a.safetensors"),
        "hostile_zero_byte": at("a\0.safetensors"),
        "hostile_line_break": at("a\n.safetensors"),
        "hostile_itself": at("model.safetensors.index.json"),
        "hostile_long": at("a" * 300 + ".safetensors"),
        "hostile_empty_name": at(""),
    }


def tensors(entries, metadata=None) -> bytes:
    """A container of (name, dtype, shape, data)."""
    header, blob = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    return pack(json.dumps(header), blob)


def noise(seed: str, count: int) -> bytes:
    """Bytes that depend only on the seed."""
    out, state = bytearray(), 0
    for byte in seed.encode():
        state = (state * 131 + byte + 1) % (1 << 64)
    while len(out) < count:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out.append(state >> 56)
    return bytes(out)


def bf16(values) -> bytes:
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def floats(values) -> bytes:
    return b"".join(struct.pack("<f", v) for v in values)


def rhs(seed: str, size_k: int, size_n: int, group: int, nr: int) -> bytes:
    """A weight of the int4 path: blocks of nr columns; per group codes and bf16 scales, then sums
    and biases; with one group per column f32 sums, scales and biases."""
    out = b""
    if group == size_k:
        group = -1
    for block in range(-(-size_n // nr)):
        for g in range(size_k // group if group > 0 else 1):
            rows = group if group > 0 else size_k
            out += noise(f"{seed}{block}{g}", nr * rows // 2)
            if group > 0:
                out += bf16([(n + 1) / 64 for n in range(nr)])
        out += floats([n / 8 for n in range(nr)])
        if group <= 0:
            out += floats([(n + 1) / 64 for n in range(nr)])
        out += floats([0.5] * nr)
    return out


def packed() -> dict[str, bytes]:
    key = "marlinspike.w4a8."
    linear = {"version": 1, "layer": "linear", "size_k": 64, "size_n": 12, "group_size": 32, "nr": 8}
    moe = {"version": 1, "layer": "moe", "hidden_size": 64, "intermediate_size": 32,
           "num_experts": 3, "group_size": 32, "nr": 8, "top_k": 2, "scoring_func": "softmax",
           "renormalize": True, "activation": "silu", "apply_router_weight_on_input": False}

    def one(text, data=None, shape=None) -> bytes:
        data = rhs("a", 64, 12, 32, 8) if data is None else data
        shape = [len(data)] if shape is None else shape
        text = text if isinstance(text, str) else json.dumps(text)
        return tensors([("m.rhs_packed", "U8", shape, data)], {key + "m": text})

    def experts(text, count=3, names=("w13", "w2"), dtype="U8") -> bytes:
        w13 = b"".join(rhs(f"g{e}", 64, 64, 32, 8) for e in range(count))
        w2 = b"".join(rhs(f"d{e}", 32, 64, 32, 8) for e in range(count))
        return tensors([(f"m.{name}_packed", dtype, [count, len(data) // count], data)
                        for name, data in zip(names, (w13, w2))], {key + "m": json.dumps(text)})

    channel = {**linear, "group_size": -1}
    spread = {**moe, "num_experts": 4, "expert_map": [-1, 2, 0, 1]}
    return {
        "valid_linear": one(linear),
        "valid_linear_nr4": one({**linear, "nr": 4}, rhs("a", 64, 12, 32, 4)),
        "valid_channel": one(channel, rhs("c", 64, 12, -1, 8)),
        "valid_experts": experts(moe),
        "valid_spread": experts(spread),
        "valid_input_weights": experts({**moe, "apply_router_weight_on_input": True, "top_k": 1}),
        "hostile_not_json": one("{"),
        "hostile_list": one("[]"),
        "hostile_version": one({**linear, "version": 2}),
        "hostile_layer": one({**linear, "layer": "conv"}),
        "hostile_unknown_key": one({**linear, "bias": True}),
        "hostile_missing_key": one({k: v for k, v in linear.items() if k != "nr"}),
        "hostile_nr_zero": one({**linear, "nr": 0}),
        "hostile_group_zero": one({**linear, "group_size": 0}),
        "hostile_sizes_overflow": one({**linear, "size_k": 1 << 62, "size_n": 1 << 62}),
        "hostile_size_negative": one({**linear, "size_n": -1}),
        "hostile_bytes_missing": one(linear, rhs("a", 64, 12, 32, 8)[:-1]),
        "hostile_no_tensor": tensors([], {key + "m": json.dumps(linear)}),
        "hostile_shape": one(linear, shape=[1, len(rhs("a", 64, 12, 32, 8))]),
        "hostile_dtype": experts(moe, dtype="I8"),
        "hostile_no_w2": experts(moe, names=("w13", "w3")),
        "hostile_experts_many": experts({**moe, "num_experts": 1 << 31}),
        "hostile_experts_fewer": experts({**moe, "num_experts": 2}),
        "hostile_top_k": experts({**moe, "top_k": 4}),
        "hostile_map_twice": experts({**spread, "expert_map": [0, 0, 1, 2]}),
        "hostile_map_short": experts({**spread, "expert_map": [0, 1, 2]}),
        "hostile_map_negative": experts({**spread, "expert_map": [-2, 0, 1, 2]}),
        "hostile_activation": experts({**moe, "activation": "tanh"}),
        "hostile_no_bytes": tensors(
            [("m.w13_packed", "U8", [0, 8 * ((1 << 23) * 144 + 64)], b""),
             ("m.w2_packed", "U8", [0, (1 << 25) * 224], b"")],
            {key + "m": json.dumps({**moe, "hidden_size": 1 << 28, "expert_map": [-1] * 3})}),
        "hostile_doubled": experts({**moe, "intermediate_size": (1 << 63)}),
    }


def inputs() -> dict[str, bytes]:
    """Activations of a layer with K = 32 and four experts, or of a linear one."""
    half = lambda count: bf16([(i % 16) / 8 - 1 for i in range(count)])
    x = ("x", "BF16", [3, 32], half(96))
    x32 = ("in.x", "F32", [3, 32], floats([(i % 16) / 8 - 1 for i in range(96)]))
    logits = ("router_logits", "F32", [3, 4], floats([i / 4 for i in range(12)]))
    ints = lambda values: b"".join(struct.pack("<i", v) for v in values)
    ids = ("topk_ids", "I32", [3, 2], ints([0, 1, 2, 3, 1, 0]))
    weights = ("topk_weights", "F32", [3, 2], floats([0.5] * 6))
    return {
        "valid_logits": tensors([x, logits]),
        "valid_f32": tensors([x32, logits]),
        "valid_half": tensors([("x", "F16", [3, 32], half(96)), logits]),
        "valid_routed": tensors([x, ids, weights]),
        "hostile_x_missing": tensors([logits]),
        "hostile_x_width": tensors([("x", "BF16", [3, 31], half(93)), logits]),
        "hostile_x_rank": tensors([("x", "BF16", [96], half(96)), logits]),
        "hostile_x_empty": tensors([("x", "BF16", [0, 32], b""), logits]),
        "hostile_x_dtype": tensors([("x", "I32", [3, 32], ints(range(96))), logits]),
        "hostile_no_routing": tensors([x]),
        "hostile_logits_shape": tensors([x, ("router_logits", "F32", [4, 3], logits[3])]),
        "hostile_logits_dtype": tensors([x, ("router_logits", "BF16", [3, 4], half(12))]),
        "hostile_ids_rows": tensors([x, ("topk_ids", "I32", [2, 3], ids[3]), weights]),
        "hostile_ids_rank": tensors([x, ("topk_ids", "I32", [6], ids[3]), weights]),
        "hostile_weights_missing": tensors([x, ids]),
        "hostile_weights_shape": tensors([x, ids, (
            "topk_weights", "F32", [3, 1], floats([0.5] * 3))]),
        "hostile_ids_outside": tensors([x, ("topk_ids", "I32", [3, 2], ints(
            [0, 1, 2, 4, 1, 0])), weights]),
        "hostile_ids_negative": tensors([x, ("topk_ids", "I32", [3, 2], ints(
            [0, 1, -2, 3, 1, 0])), weights]),
        "hostile_top_k": tensors([x, ("topk_ids", "I32", [3, 0], b""), (
            "topk_weights", "F32", [3, 0], b"")]),
    }


def folder(files: dict[str, bytes]) -> bytes:
    """Files of a model folder, each after a line with its name."""
    return b"\n".join(b"== " + name.encode() + b"\n" + data for name, data in files.items())


def models() -> dict[str, bytes]:
    words = lambda seed, count: noise(seed, 4 * count)
    ones = lambda count: bf16([(i % 7 + 1) / 64 for i in range(count)])
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    linear = lambda module: [
        (module + ".qweight", "I32", [16, 64], words(module, 16 * 64)),
        (module + ".scales", "BF16", [1, 64], ones(64)),
        (module + ".qzeros", "I32", [1, 8], b"\x77" * 32),
        (module + ".g_idx", "I32", [128], b"\0" * 512),
    ]
    attention = linear("model.layers.0.self_attn.o_proj")
    config = lambda quant, **kw: json.dumps(
        {"model_type": "mixtral", "torch_dtype": "bfloat16", "hidden_act": "silu",
         "hidden_size": 64, "num_experts_per_tok": 1, "num_local_experts": 2,
         "quantization_config": quant, **kw}).encode()
    ct = {"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
              "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
              "group_size": 32}}}, "ignore": ["re:.*gate$"]}
    moe = "model.layers.0.block_sparse_moe"
    experts = [(f"{moe}.gate.weight", "BF16", [2, 64], ones(128))]
    for e in range(2):
        for w in ("w1", "w2", "w3"):
            name = f"{moe}.experts.{e}.{w}"
            experts += [
                (name + ".weight_packed", "I32", [64, 8], words(name, 512)),
                (name + ".weight_scale", "BF16", [64, 2], ones(128)),
                (name + ".weight_shape", "I64", [2], struct.pack("<qq", 64, 64)),
            ]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    e4m3 = lambda seed, count: bytes(b & 0xbf for b in noise(seed, count))
    block = [("model.layers.0.mlp.down_proj.weight", "F8_E4M3", [64, 128], e4m3("w", 8192)),
             ("model.layers.0.mlp.down_proj.weight_scale", "F32", [], floats([0.01]))]
    one = lambda quant, entries, **kw: folder(
        {"config.json": config(quant, **kw), "model.safetensors": tensors(entries)})
    index = lambda files: json.dumps({"weight_map": files}).encode()
    names = lambda entries, file: {name: file for name, *_ in entries}
    shards = {"config.json": config(gptq), "a.safetensors": tensors(attention[:2]),
              "b.safetensors": tensors(attention[2:])}
    both = {**names(attention[:2], "a.safetensors"), **names(attention[2:], "b.safetensors")}
    key = "model.safetensors.index.json"
    without = lambda name: [t for t in attention if not t[0].endswith(name)]
    return {
        "valid_gptq": one(gptq, attention),
        "valid_experts": one(ct, experts),
        "valid_fp8": one(fp8, block),
        "valid_shards": folder({**shards, key: index(both)}),
        "valid_own_config": folder({
            "config.json": json.dumps({"torch_dtype": "float16"}).encode(),
            "quantize_config.json": json.dumps(gptq).encode(),
            "model.safetensors": tensors(attention)}),
        "hostile_nothing": b"",
        "hostile_no_config": folder({"model.safetensors": tensors(attention)}),
        "hostile_no_tensors": folder({"config.json": config(gptq)}),
        "hostile_config_list": folder({"config.json": b"[]", "model.safetensors": tensors([])}),
        "hostile_config_cut": folder({"config.json": config(gptq)[:-9],
                                      "model.safetensors": tensors(attention)}),
        "hostile_config_deep": folder({"config.json": b"[" * 4000,
                                       "model.safetensors": tensors(attention)}),
        "hostile_shard_missing": folder({
            "config.json": config(gptq), key: index(both), "a.safetensors": shards["a.safetensors"]}),
        "hostile_shard_other": folder({**shards, key: index({**both, "x": "a.safetensors"})}),
        "hostile_shard_outside": folder({**shards, key: index({"x": "../a.safetensors"})}),
        "valid_in_two": folder({**shards, "b.safetensors": tensors(attention), key: index(both)}),
        "hostile_cut": folder({"config.json": config(gptq),
                               "model.safetensors": tensors(attention)[:-7]}),
        "hostile_scales_missing": one(gptq, without("scales")),
        "hostile_shape": one(gptq, without("scales") + [
            (attention[1][0], "BF16", [1, 63], ones(63))]),
    }


def main() -> None:
    valid = pathlib.Path(sys.argv[1]).read_bytes()
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    for target, files in {
            "container": containers(), "case": cases(valid), "config": configs(),
            "index": indexes(), "packed": packed(), "input": inputs(), "model": models()}.items():
        folder = root / "tools" / "fuzz" / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, blob in files.items():
            (folder / name).write_bytes(blob)
        print(target, len(files), sum(map(len, files.values())), "bytes")


if __name__ == "__main__":
    main()
