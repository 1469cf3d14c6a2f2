#!/usr/bin/env python3
"""Writes fuzz/corpus/: small valid files and one file for each flaw that a reader must name.

Requires: Python 3.9, nothing else. The valid case is `marlinspike vectors`' own (see VALID_CASE);
hostile cases are that file with one thing changed, so that nothing else is wrong with them.

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
            # What an input's flaw does not need would only make the file large.
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


def main() -> None:
    valid = pathlib.Path(sys.argv[1]).read_bytes()
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    for target, files in {
            "container": containers(), "case": cases(valid), "config": configs(),
            "index": indexes()}.items():
        folder = root / "fuzz" / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, blob in files.items():
            (folder / name).write_bytes(blob)
        print(target, len(files), sum(map(len, files.values())), "bytes")


if __name__ == "__main__":
    main()
