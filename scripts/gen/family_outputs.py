"""Writes what transformers computes for the tiny checkpoint of each family.

    python scripts/gen/family_outputs.py [FAMILY...]

Needs torch, transformers 5.23.0, safetensors and numpy; `inkling` also needs scipy. Rewrites
`model/tests/convert/family_outputs.json`, or the rows of the given families.

`model/tests/convert/families.json` has the names and shapes of each family's tensors. Their values are a sequence that
the tests repeat: FNV-1a of the family's name seeds a linear congruential generator, which is read once through all
tensors in the order of their names. The script stores these values in a checkpoint of a tiny model, loads it with
`from_pretrained`, and calls the block in float32. A row has the tokens that it kept (of 16; the others may change their
experts by rounding) and every eighth feature of the output. `golden/data/routers` has the blocks of LEFT_OUT.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import router_blocks as blocks
from router_blocks_families import FAMILIES

TESTS = Path(__file__).resolve().parents[2] / "model/tests/convert"
# Two widths of experts; one output, zero, for every token, and a bias that the class sets after reading it.
LEFT_OUT = ("ernie4_5_vl_moe", "zaya")
TOKENS, KEPT, STRIDE = 16, 4, 8
MASK = (1 << 64) - 1


class Noise:
    """`common::Noise` of the tests."""

    def __init__(self, seed):
        self.state = 0xCBF29CE484222325
        for byte in seed.encode():
            self.state = (self.state ^ byte) * 0x100000001B3 & MASK

    def values(self, count, size):
        """From -size to size, as bf16 represents them."""
        bits = np.empty(count, np.float32)
        state = self.state
        for i in range(count):
            state = (state * 6364136223846793005 + 1442695040888963407) & MASK
            bits[i] = state >> 33 & 0xFFFF
        self.state = state
        return torch.from_numpy((bits / 32768 - 1) * size).bfloat16().float()


def checkpoint_values(row):
    """Each tensor of the block by its full name."""
    noise, values = Noise(row["name"]), {}
    for name, shape in sorted(row["tensors"].items()):
        count, shape = (shape[0], shape[1:]) if "*" in name else (1, shape)
        for expert in range(count):
            full = row["prefix"] + name.replace("*", str(expert))
            values[full] = noise.values(int(np.prod(shape)), 0.25).reshape(shape)
    return values


def loaded(row, spec):
    """The block with the row's values, loaded from a checkpoint, and the model."""
    model, wide = blocks.build(row["name"])
    name, block = blocks.find_block(model, spec)
    blocks.fill(row["name"], blocks.parts(model, name, block, spec), spec, wide)
    tensors, config = blocks.saved(model, wide)
    values = checkpoint_values(row)
    stored, used = {}, set()
    for own, tensor in tensors.items():
        full = own
        for old, new in spec.get("rename", ()):
            full = full.replace(old, new)
        stored[own] = tensor.contiguous()
        if full in values:
            value = values[full]
            if spec.get("transpose") and full.endswith(spec["transpose"]):
                value = value.transpose(1, 2)
            if value.shape != tensor.shape:
                raise RuntimeError(f"{full}: {list(tensor.shape)} in the checkpoint, {list(value.shape)} in families.json")
            stored[own] = value.to(tensor.dtype).contiguous()
            used.add(full)
    if used != set(values):
        raise RuntimeError(f"not in the checkpoint: {sorted(set(values) - used)[:3]}")
    with tempfile.TemporaryDirectory() as folder:
        save_file(stored, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(config)
        model = type(model).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    model = model.float().eval()
    name, block = blocks.find_block(model, spec)
    # What a loader left out would still be random: the block has the file's values, each as often.
    held = torch.cat([t.detach().float().flatten() for t in blocks.parts(model, name, block, spec).values()])
    given = torch.cat([v.flatten() for v in values.values()])
    if not torch.equal(held.sort().values, given.sort().values):
        raise RuntimeError("the block does not have the checkpoint's values")
    return model, name, block


def outputs(row):
    spec = FAMILIES[row["name"]]
    model, name, block = loaded(row, spec)
    x = Noise(f"{row['name']} x").values(TOKENS * row["hidden"], 1.0).reshape(TOKENS, row["hidden"])
    parent = model.get_submodule(name.rpartition(".")[0])
    extra = {"siblings": {sibling: getattr(parent, sibling) for sibling in spec.get("siblings", ())}}
    keep = blocks.stable_tokens(block, spec, x, extra, row["name"]).nonzero()[:KEPT, 0]
    if len(keep) < 2:
        raise RuntimeError(f"only {len(keep)} stable tokens")
    y, _ = blocks.call(block, spec, x[keep], extra)
    kept = y[:, ::STRIDE].double()
    return {"tokens": keep.tolist(), "y": [[float(f"{v:.8g}") for v in line] for line in kept.tolist()]}


def main():
    torch.set_num_threads(1)
    rows = {row["name"]: row for row in json.loads((TESTS / "families.json").read_text())}
    path = TESTS / "family_outputs.json"
    made = json.loads(path.read_text()) if path.exists() and sys.argv[1:] else {}
    failed = []
    for name in sys.argv[1:] or [name for name in rows if name in FAMILIES and name not in LEFT_OUT]:
        try:
            made[name] = outputs(rows[name])
            print(f"ok   {name}: tokens {made[name]['tokens']}", flush=True)
        except Exception as error:  # one family must not stop the others
            failed.append(name)
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    lines = [f'"{name}":{json.dumps(row, separators=(",", ":"))}' for name, row in sorted(made.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
