"""Runs `marlinspike generate` and llama.cpp in turns on the models of models.py, and prints ratios.

    python compare.py DIR --marlinspike target/release/marlinspike --llama build/llama_speed

DIR/packed is the checkpoint converted with `--to kleidiai`; it is made if it is absent. Each pair of runs reads the
same prompt of DIR/prompt. Ratios are above 1 where marlinspike is faster. The peak memory is the largest resident set,
mapped files included.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

# What a token reads per layer, in weights: attention, and the experts of a token. lm_head follows.
HIDDEN, ATTENTION, EXPERTS, VOCAB = 2048, 2048 * (2 * 4096 + 2 * 512), 8 * 3 * 768 * 2048, 151936
BYTES_PER_WEIGHT = 0.5 + 2 / 32


def run(command):
    """The last line of the output as JSON, and the peak memory in bytes."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            raise SystemExit(f"{command[0]}: status {status}")
        out.seek(0)
        return json.loads(out.read().splitlines()[-1]), usage.ru_maxrss * 1024


def read_limit(program, threads):
    """Bytes per second that the machine reads, by `bench cpu`; None if the program lacks it."""
    command = [program, "bench", "cpu", "--shape", "2048x1536", "--tokens", "1", "--group", "32",
               "--threads", str(threads), "--seconds", "0.3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    return json.loads(done.stdout)["limits"][0]["read_gb_s"]["best"] * 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--marlinspike", required=True)
    parser.add_argument("--llama", required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    packed, model = args.dir / "packed", args.dir / "model.gguf"
    if not packed.exists():
        command = [args.marlinspike, "convert", args.dir / "checkpoint", packed, "--to", "kleidiai"]
        subprocess.run(command, check=True)
    ids = [(1 + i * 7919) % VOCAB for i in range(args.prompt)]
    numbers, text = args.dir / "prompt.ids", args.dir / "prompt.txt"
    numbers.write_text(" ".join(map(str, ids)))
    text.write_text(" ".join(f"t{i}" for i in ids))
    ours = [args.marlinspike, "generate", packed, "--prompt-file", text, "--json",
            "--max-tokens", str(args.tokens), "--threads", str(args.threads)]
    theirs = [args.llama, model, numbers, str(args.tokens), str(args.threads)]
    layers = json.loads((packed / "config.json").read_text())["num_hidden_layers"]
    read = BYTES_PER_WEIGHT * (layers * (ATTENTION + EXPERTS) + VOCAB * HIDDEN)
    files = {"marlinspike": sum(f.stat().st_size for f in packed.glob("*.safetensors")),
             "llama.cpp": model.stat().st_size}
    limit = read_limit(args.marlinspike, args.threads)
    found = {"marlinspike": [], "llama.cpp": []}
    memory = {"marlinspike": 0, "llama.cpp": 0}
    # One run of each warms the page cache.
    for pair in range(args.pairs + 1):
        order = [("marlinspike", ours), ("llama.cpp", theirs)]
        for name, command in order if pair % 2 == 0 else order[::-1]:
            report, peak = run(command)
            memory[name] = max(memory[name], peak)
            speeds = (report["tokens_per_second"], args.prompt / report["first_token_seconds"])
            if pair > 0:
                found[name].append((*speeds, report["tokens"], report["load_seconds"]))
    print(f"{args.threads} threads, {args.pairs} pairs, load {os.getloadavg()[0]:.1f}")
    for at, what in enumerate(["decode", f"prompt of {args.prompt}"]):
        mine, other = ([row[at] for row in found[name]] for name in ("marlinspike", "llama.cpp"))
        ratio = statistics.median(a / b for a, b in zip(mine, other))
        print(f"{what}, tokens/s: marlinspike best {max(mine):.2f} median {statistics.median(mine):.2f}; "
              f"llama.cpp best {max(other):.2f} median {statistics.median(other):.2f}; "
              f"ratio of best {max(mine) / max(other):.2f}, median of pairs {ratio:.2f}")
    best = max(row[0] for row in found["marlinspike"])
    print(f"decode reads {best * read / 1e9:.1f} GB/s of weights"
          + (f", {100 * best * read / limit:.0f} % of the read limit" if limit else ""))
    for name, peak in memory.items():
        load = statistics.median(row[3] for row in found[name])
        print(f"{name}: peak {peak / 1e9:.2f} GB, {peak / files[name]:.2f} of its files; loaded in {load:.2f} s")
    pairs = zip(found["marlinspike"][0][2], found["llama.cpp"][0][2])
    print(f"equal greedy tokens from the first on: {next((i for i, (a, b) in enumerate(pairs) if a != b), args.tokens)}")


if __name__ == "__main__":
    main()
