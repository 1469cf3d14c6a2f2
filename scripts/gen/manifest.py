#!/usr/bin/env python3
"""Rebuilds golden/manifest.json from golden/data and golden/fragments.

Standard library only. Cases describe themselves (safetensors `__metadata__`);
fragments, which the producer scripts wrote, describe the checkpoints. A file
without a description is an error.
"""

import hashlib
import json
import re
import struct
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
# Cases whose outputs are wrong because of a known fault of their producer, and `check`'s diagnosis.
KNOWN_FAULTS = [(re.compile(r"/linear-tp2_\w+\.safetensors$"), "upstream-k-slice-scales")]
LIMIT = 25 * 1024 * 1024
PRODUCERS = [
    (re.compile(r"^vllm (\S+) "), "vllm"),
    (re.compile(r"^flashinfer (\S+) "), "flashinfer"),
    (re.compile(r"^KleidiAI (\S+) "), "kleidiai"),
    (re.compile(r"^torch (\S+) on "), "torch"),
    (re.compile(r"^numpy (\S+) with "), "numpy"),
    (re.compile(r"^NVIDIA H200 \(sm_90a\), CUDA (\S+), "), "cuda"),
]


def metadata(path: Path) -> dict:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))["__metadata__"]


def producer(provenance: str) -> tuple[str, str]:
    for pattern, name in PRODUCERS:
        if match := pattern.match(provenance):
            return name, match.group(1)
    raise SystemExit(f"no known producer in the provenance {provenance!r}")


def file_entry(path: Path) -> dict:
    data = path.read_bytes()
    return {
        "path": path.relative_to(GOLDEN).as_posix(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }


def case_entry(path: Path) -> dict:
    meta = metadata(path)
    if meta["format"] != "marlinspike-case":
        raise SystemExit(f"{path} is not a case file")
    name, version = producer(meta["provenance"])
    entry = file_entry(path)
    faults = [fault for pattern, fault in KNOWN_FAULTS if pattern.search(entry["path"])]
    known = {"known_fault": faults[0]} if faults else {}
    return {
        "path": entry["path"],
        "op": meta["op"],
        "name": meta["name"],
        "producer": name,
        "version": version,
        "sha256": entry["sha256"],
        "bytes": entry["bytes"],
        "provenance": meta["provenance"],
        **known,
    }


def table_entry(path: Path) -> dict:
    meta = metadata(path)
    name, version = producer(meta["provenance"])
    entry = file_entry(path)
    return {
        "path": entry["path"],
        "name": meta["name"],
        "producer": name,
        "version": version,
        "sha256": entry["sha256"],
        "bytes": entry["bytes"],
        "provenance": meta["provenance"],
    }


def router_entry(path: Path) -> dict:
    meta = metadata(path)
    entry = file_entry(path)
    return {
        "path": entry["path"],
        "name": meta["family"],
        "producer": "transformers",
        "version": meta["transformers"],
        "sha256": entry["sha256"],
        "bytes": entry["bytes"],
        "provenance": f"transformers {meta['transformers']}, torch {meta['torch']} CPU, seed {meta['seed']}",
    }


def scalar_entry(path: Path) -> dict:
    meta = json.loads(path.read_text())["producer"]
    entry = file_entry(path)
    return {
        "path": entry["path"],
        "name": path.stem,
        "producer": "torch",
        "version": meta["torch"],
        "sha256": entry["sha256"],
        "bytes": entry["bytes"],
        "provenance": f"torch {meta['torch']} CPU ({meta['machine']}, {meta['cpu_capability']})",
    }


def checkpoint_entry(fragment: Path) -> dict:
    entry = json.loads(fragment.read_text())
    for file in entry["files"] + entry["expected"]:
        if file != file_entry(GOLDEN / file["path"]):
            raise SystemExit(f"{fragment}: {file['path']} is not the file that the fragment describes")
    return entry


def main() -> None:
    cases = [case_entry(path) for path in sorted((GOLDEN / "data/cases").glob("*.safetensors"))]
    tables = [table_entry(path) for path in sorted((GOLDEN / "data/tables").glob("*.safetensors"))]
    tables += [scalar_entry(path) for path in sorted((GOLDEN / "data/scalar").glob("*.json"))]
    tables += [router_entry(path) for path in sorted((GOLDEN / "data/routers").glob("*.safetensors"))]
    checkpoints = [checkpoint_entry(path) for path in sorted((GOLDEN / "fragments").glob("*.json"))]
    models = [checkpoint_entry(path) for path in sorted((GOLDEN / "fragments/models").glob("*.json"))]
    listed = {entry["path"] for entry in cases + tables}
    for checkpoint in checkpoints + models:
        listed |= {file["path"] for file in checkpoint["files"] + checkpoint["expected"]}
    present = {path.relative_to(GOLDEN).as_posix() for path in (GOLDEN / "data").rglob("*") if path.is_file()}
    if listed != present:
        raise SystemExit(f"files that nothing describes: {sorted(present - listed)}, missing: {sorted(listed - present)}")
    total = sum((GOLDEN / path).stat().st_size for path in listed)
    if total >= LIMIT:
        raise SystemExit(f"golden data hold {total} bytes, the limit is {LIMIT}")
    manifest = {"version": 1, "cases": cases, "tables": tables, "checkpoints": checkpoints, "models": models}
    (GOLDEN / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(cases)} cases, {len(tables)} tables, {len(checkpoints)} checkpoints, {len(models)} models, {total} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
