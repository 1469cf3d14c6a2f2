"""Times `marlinspike generate` beside llama.cpp on models of one shape, in turns.

    run.py LLAMA_CPP [--model qwen3-30b-a3b|gpt-oss-20b] [--work DIR] [--threads 2] [--prompt 512] [--new 64] [--rounds 5]

LLAMA_CPP is llama.cpp's source folder (the crate `llama-cpp-sys-2` carries one). Needs cmake, ninja, a C++
compiler, and Python with numpy and gguf. Both programs read their weights through the page cache, warm. Each
round runs both once with each number of threads; the table has medians, and the quickest in parentheses.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def build_llama(source, work):
    build = work / "llama"
    off = ["COMMON", "TOOLS", "TESTS", "EXAMPLES", "SERVER", "APP"]
    options = [f"-DLLAMA_BUILD_{name}=OFF" for name in off] + ["-DLLAMA_CURL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    configure = ["cmake", "-G", "Ninja", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
    subprocess.run(configure + options, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", build], check=True, stdout=subprocess.DEVNULL)
    libraries = ["src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a"]
    program = work / "llama-times"
    compiler = ["c++", "-O2", "-o", program, HERE / "llama.cpp", f"-I{source}/include", f"-I{source}/ggml/include"]
    subprocess.run(compiler + [build / name for name in libraries] + ["-fopenmp", "-lpthread", "-ldl"], check=True)
    return program


def build_ours():
    command = ["cargo", "build", "-q", "--profile", "dist", "-p", "marlinspike-cli", "--features", "generate"]
    subprocess.run(command, check=True, cwd=ROOT)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / "dist/marlinspike"


def call(command):
    """What the program printed as JSON, and its peak memory in bytes."""
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out = process.stdout.read()
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} failed: {errors.decode()}")
    return json.loads(out), usage.ru_maxrss * 1024


def ours(program, folder, prompt, threads, new):
    command = [program, "generate", folder, "--prompt-file", prompt, "--max-tokens", new, "--threads", threads, "--pin"]
    made, memory = call(command + ["--json"])
    return {
        "prompt_tokens": len(made["prompt_tokens"]),
        "prompt_seconds": made["first_token_seconds"],
        "tokens_per_second": made["tokens_per_second"],
        "load_seconds": made["load_seconds"],
        "memory": memory,
    }


def theirs(program, model, prompt_tokens, threads, new):
    made, memory = call([program, model, threads, prompt_tokens, new])
    return made | {"memory": memory}


def table(runs, weights):
    print("| threads | | ours | llama.cpp | ours / llama.cpp |\n| --- | --- | --- | --- | --- |")
    for threads, pairs in runs.items():
        tokens = pairs[0][0]["prompt_tokens"]
        prompts = [[tokens / run["prompt_seconds"] for run in side] for side in zip(*pairs)]
        decode = [[run["tokens_per_second"] for run in side] for side in zip(*pairs)]
        for name, (a, b) in [(f"prompt of {tokens}, tokens/s", prompts), ("decode, tokens/s", decode)]:
            middle = [statistics.median(side) for side in (a, b)]
            cells = [f"{m:.1f} ({max(side):.1f})" for m, side in zip(middle, (a, b))]
            print(f"| {threads} | {name} | {cells[0]} | {cells[1]} | {middle[0] / middle[1]:.2f} |")
    pairs = next(reversed(runs.values()))
    memory = [max(run["memory"] for run in side) for side in zip(*pairs)]
    load = statistics.median(run["load_seconds"] for run, _ in pairs)
    print(f"\nPeak memory: ours {memory[0] / weights[0]:.3f}, llama.cpp {memory[1] / weights[1]:.3f} of the files' bytes. ", end="")
    print(f"Ours opens the folder in {load:.3f} s.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=pathlib.Path)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/bench_generate"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    work = options.work / options.model
    work.mkdir(parents=True, exist_ok=True)
    ours_program, llama_program = build_ours(), build_llama(options.llama_cpp, work)
    if not (work / "model.gguf").exists():
        subprocess.run([sys.executable, HERE / "models.py", work, "--model", options.model], check=True)
    packed = work / "packed"
    subprocess.run([ours_program, "convert", work / "checkpoint", packed, "--to", "kleidiai"], check=True)
    # Letters and digits that the tokenizer has no merges for: about a token for each.
    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789,.;:!?", k=options.prompt + 32))
    prompt = work / "prompt.txt"
    prompt.write_text(text)

    runs = {threads: [] for threads in sorted({1, options.threads})}
    for _ in range(options.rounds):
        for threads, pairs in runs.items():
            a = ours(ours_program, packed, prompt, threads, options.new)
            pairs.append((a, theirs(llama_program, work / "model.gguf", a["prompt_tokens"], threads, options.new)))
    size = lambda path: sum(f.stat().st_size for f in path.rglob("*")) if path.is_dir() else path.stat().st_size  # noqa: E731
    table(runs, (size(packed), size(work / "model.gguf")))


if __name__ == "__main__":
    main()
