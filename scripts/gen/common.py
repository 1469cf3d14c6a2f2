"""Shared by the producer scripts: seeded weights, tiny model directories, fragments."""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def seeded(name: str, *shape: int, dtype=torch.float32, scale: float = 0.05) -> torch.Tensor:
    """Normal values that depend on `name` and the shape only."""
    digest = hashlib.sha256(f"{name}{shape}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def seeded_ints(name: str, low: int, high: int, *shape: int, dtype=torch.int32) -> torch.Tensor:
    """Uniform integers in [low, high) that depend on `name` and the shape only."""
    digest = hashlib.sha256(f"{name}{shape}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def write_sorted(path: Path, tensors: dict, metadata: dict) -> None:
    """A safetensors file whose bytes depend on its contents only.

    The package writes several metadata keys in hash order, so that two runs
    give two files; here everything is sorted.
    """
    header, offset, bodies = {"__metadata__": dict(sorted(metadata.items()))}, 0, []
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        body = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(body)],
        }
        offset += len(body)
        bodies.append(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bodies))


def file_entry(path: Path) -> dict:
    data = path.read_bytes()
    return {
        "path": path.relative_to(GOLDEN).as_posix(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
}


class Checkpoint:
    """Builds a one-layer model directory."""

    def __init__(self, name, base, hidden, intermediate, dtype, *, script, producer, version, fmt, about):
        self.name, self.hidden, self.intermediate, self.dtype = name, hidden, intermediate, dtype
        self.meta = {"format": fmt, "about": about, "producer": producer, "version": version, "script": script}
        self.dir = GOLDEN / "data/checkpoints" / name
        self.expected_path = GOLDEN / "data/expected" / f"{name}.safetensors"
        self.tensors, self.expected, self.notes = {}, {}, []
        self.heads = hidden // 64
        experts = base.get("num_local_experts") or base.get("num_experts")
        self.config = {
            **base,
            "dtype": str(dtype).removeprefix("torch."),
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-5,
            "vocab_size": 8,
            "tie_word_embeddings": True,
        }
        if base["model_type"] == "qwen3_moe":
            self.config["moe_intermediate_size"] = intermediate
        q = self.heads * 64
        attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
        self.linears = {
            attention + "q_proj": (q, hidden),
            attention + "k_proj": (64, hidden),
            attention + "v_proj": (64, hidden),
            attention + "o_proj": (hidden, q),
        }
        gate_up_down = ("gate_proj", "up_proj", "down_proj")
        prefixes = [mlp]
        if base["model_type"] == "mixtral":
            gate_up_down = ("w1", "w3", "w2")
            mlp = "model.layers.0.block_sparse_moe."
        if experts:
            prefixes = [f"{mlp}experts.{e}." for e in range(experts)]
            self.plain(mlp + "gate.weight", experts, hidden)
        for prefix in prefixes:
            self.linears[prefix + gate_up_down[0]] = (intermediate, hidden)
            self.linears[prefix + gate_up_down[1]] = (intermediate, hidden)
            self.linears[prefix + gate_up_down[2]] = (hidden, intermediate)
        self.plain("model.embed_tokens.weight", 8, hidden)
        for norm in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
            self.plain(norm + ".weight", hidden)

    def plain(self, name, *shape):
        """An unquantized tensor."""
        self.tensors[name] = seeded(f"{self.name}/{name}", *shape, dtype=self.dtype, scale=1.0)

    def weight(self, module, dtype=torch.float32):
        """The float weight [N, K] for a packer."""
        return seeded(f"{self.name}/{module}", *self.linears[module], dtype=dtype)

    def add(self, module, tensors):
        """A packer's tensors of one module."""
        for name, tensor in tensors.items():
            self.tensors[f"{module}.{name}"] = tensor.detach().clone().contiguous()

    def expect(self, module, **tensors):
        """Expected values of one module, from the package or from vLLM's helpers."""
        for name, tensor in tensors.items():
            self.expected[f"{module}.{name}"] = tensor.detach().clone().contiguous()

    def write(self, quantization_config, shards=1):
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True)
        config = {**self.config, "quantization_config": quantization_config}
        (self.dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        names = sorted(self.tensors)
        if shards == 1:
            save_file(self.tensors, self.dir / "model.safetensors", metadata={"format": "pt"})
        else:
            weight_map, total = {}, 0
            for shard in range(shards):
                # Contiguous runs of names, so that a module's tensors may be split over two files.
                part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
                file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
                save_file({n: self.tensors[n] for n in part}, self.dir / file, metadata={"format": "pt"})
                weight_map |= {n: file for n in part}
                total += sum(self.tensors[n].nbytes for n in part)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        write_sorted(self.expected_path, self.expected, {"about": " ".join(self.notes)})
        fragment = {
            "name": self.name,
            "dir": self.dir.relative_to(GOLDEN).as_posix(),
            **self.meta,
            "files": [file_entry(path) for path in sorted(self.dir.iterdir())],
            "expected": [file_entry(self.expected_path)],
        }
        path = GOLDEN / "fragments" / f"{self.name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(fragment, indent=1) + "\n")
        size = sum(file["bytes"] for file in fragment["files"])
        print(f"{self.name}: {size} bytes, expected {fragment['expected'][0]['bytes']} bytes")
