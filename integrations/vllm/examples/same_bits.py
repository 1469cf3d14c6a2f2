"""Whether vLLM gives a token the same bits for every batch and number of GPUs, on a random quantized Qwen3-MoE.

    python same_bits.py                       # 1, 2 and 4 GPUs, as many as there are
    python same_bits.py --ranks 1,2 --mode eager
    python same_bits.py --one 2 --stock       # this process only, without the plugin

Makes a checkpoint (GPTQ's int4, experts divided over ranks), generates greedily and hashes all tokens and
log-probabilities, once for each size of a batch. Ends with 1 if two hashes differ. Each line printed is JSON.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import zlib

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, INNER, VOCABULARY, GROUP = 2048, 16, 4, 128, 4, 32, 768, 4096, 128
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": INNER, "intermediate_size": 4096,
    "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False,
        "dynamic": {"-:.*mlp\\.gate$": {}},
    },
}  # fmt: skip

GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256],
}
#: Prompts, their length, tokens for each; 1 token: the time of prompts.
WORK = ((1, 32, 64), (16, 32, 64), (64, 32, 64), (256, 32, 64), (16, 500, 1))


def checkpoint(folder: pathlib.Path) -> None:
    """A checkpoint of random values; each tensor's follow from its name alone."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    tensors = {}

    def uniform(name, shape, low, high):
        numbers = np.random.default_rng(zlib.crc32(name.encode())).random(shape, dtype=np.float32)
        tensors[name] = torch.from_numpy(numbers * np.float32(high - low) + np.float32(low)).bfloat16()

    def linear(name, size_k, size_n):
        words = np.random.default_rng(zlib.crc32(name.encode())).integers(
            -(2**31), 2**31, (size_k // 8, size_n), dtype=np.int32
        )
        tensors[f"{name}.qweight"] = torch.from_numpy(words)
        uniform(f"{name}.scales", (size_k // GROUP, size_n), 0.001, 0.005)
        tensors[f"{name}.qzeros"] = torch.full((size_k // GROUP, size_n // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{name}.g_idx"] = torch.arange(size_k, dtype=torch.int32) // GROUP

    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            linear(f"{layer}.self_attn.{name}_proj", HIDDEN, heads * HEAD)
        linear(f"{layer}.self_attn.o_proj", HEADS * HEAD, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                linear(f"{layer}.mlp.experts.{expert}.{name}_proj", HIDDEN, INNER)
            linear(f"{layer}.mlp.experts.{expert}.down_proj", INNER, HIDDEN)
        uniform(f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN), -0.04, 0.04)
        for name in ("input_layernorm", "post_attention_layernorm"):
            uniform(f"{layer}.{name}.weight", (HIDDEN,), 0.9, 1.1)
        for name in ("q_norm", "k_norm"):
            uniform(f"{layer}.self_attn.{name}.weight", (HEAD,), 0.9, 1.1)
    uniform("model.norm.weight", (HIDDEN,), 0.9, 1.1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        uniform(name, (VOCABULARY, HIDDEN), -0.04, 0.04)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def own_experts(worker):
    """The experts that a rank has, of each layer; runs in the rank's process."""
    import torch

    owned = []
    for module in worker.get_model().modules():
        weight = getattr(module, "w13_qweight", None)
        if weight is None:
            continue
        map_ = getattr(module, "_expert_map", None)
        if map_ is None:
            ids = list(range(weight.shape[0]))
        else:
            ids = [e for e, place in enumerate(map_.tolist()) if 0 <= place < weight.shape[0]]
        if len(ids) != weight.shape[0]:
            raise RuntimeError(f"{len(ids)} experts on a rank with {weight.shape[0]} weights")
        if not torch.all(weight.flatten(1).any(1)):
            raise RuntimeError("an expert's weights are all zero")
        owned.append(ids)
    return owned


def check_experts(llm):
    """The number of experts on each rank; an error unless every expert is on one."""
    of_ranks = llm.collective_rpc(own_experts)
    for layer in range(LAYERS):
        ids = [expert for owned in of_ranks for expert in owned[layer]]
        if sorted(ids) != list(range(EXPERTS)):
            raise RuntimeError(f"layer {layer}: ranks have the experts {ids}")
    return [len(owned[0]) for owned in of_ranks]


def prompts(count, low, high):
    numbers = random.Random(1)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(numbers.randrange(low, high))] for _ in range(count)]


def generate(llm, inputs, tokens, logprobs=None):
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs)
    return llm.generate([{"prompt_token_ids": p} for p in inputs], how, use_tqdm=False)


def digest(requests):
    """Of all tokens and of the bits of their and the next most probable tokens' log-probabilities."""
    import numpy as np

    values = []
    for request in requests:
        output = request.outputs[0]
        for token, found in zip(output.token_ids, output.logprobs):
            values += [token, *(v for t in sorted(found) for v in (t, found[t].logprob))]
    return hashlib.sha256(np.array(values, dtype=np.float64).tobytes()).hexdigest()[:16]


def times(llm, say):
    """Tokens a second, the better of two."""
    for batch, length, tokens in WORK:
        inputs, best = prompts(batch, length, length + 1), 0.0
        generate(llm, inputs, min(tokens, 4))
        for _ in range(2):
            start = time.perf_counter()
            generate(llm, inputs, tokens)
            best = max(best, batch * (tokens if tokens > 1 else length) / (time.perf_counter() - start))
        say(step="decode" if tokens > 1 else "prompts", batch=batch, tokens_per_second=round(best))


def one(options, folder):
    """One number of ranks, in this process."""
    if options.stock:
        os.environ["VLLM_PLUGINS"] = "none"
    elif options.plain:
        os.environ.update(VLLM_BATCH_INVARIANT="0", MARLINSPIKE_PARALLEL_INVARIANT="0")
    else:
        os.environ.update(VLLM_BATCH_INVARIANT="1", MARLINSPIKE_PARALLEL_INVARIANT="1")
    # The engine in this process, so that the driver can ask ranks for their experts.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    from vllm import LLM

    kernels = "vLLM" if options.stock else "plugin, no switch" if options.plain else "plugin"

    def say(**what):
        print(json.dumps({"kernels": kernels, "mode": options.mode, "ranks": options.one, **what}), flush=True)

    more = {
        "eager": {"enforce_eager": True},
        "graphs": {"compilation_config": GRAPHS},
        "default": {},
    }[options.mode]
    start = time.perf_counter()
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, seed=0,
        tensor_parallel_size=options.one, enable_expert_parallel=options.one > 1, enable_prefix_caching=False,
        **{**more, **json.loads(options.llm)},
    )  # fmt: skip
    say(loaded_seconds=round(time.perf_counter() - start, 1), experts=check_experts(llm))
    inputs = prompts(64, 8, 64)
    hashes = []
    for batch in map(int, options.batches.split(",")):
        start = time.perf_counter()
        done = []
        for first in range(0, len(inputs), batch):
            done += generate(llm, inputs[first : first + batch], 16, logprobs=4)
        hashes.append(digest(done))
        say(batch=batch, hash=hashes[-1], seconds=round(time.perf_counter() - start, 1))
    if options.times:
        times(llm, say)
    return 0 if len(set(hashes)) == 1 else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, help="where the checkpoint is or will be (a temporary folder)")
    parser.add_argument("--ranks", help="numbers of GPUs (1, 2 and 4, as many as there are)")
    parser.add_argument("--one", type=int, metavar="RANKS", help="this number of GPUs, in this process")
    parser.add_argument("--mode", choices=("eager", "graphs", "default"), default="graphs")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    parser.add_argument("--plain", action="store_true", help="with the plugin, without its switches")
    parser.add_argument("--make", action="store_true", help="only makes the checkpoint")
    parser.add_argument("--times", action="store_true", help="tokens a second, too")
    parser.add_argument("--llm", default="{}", help="further arguments of vLLM's LLM, in JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary) / "model"
        if not (folder / "config.json").exists():
            checkpoint(folder)
        if options.make:
            return 0
        if options.one:
            return one(options, folder)
        if options.ranks is None:
            import torch

            options.ranks = ",".join(str(n) for n in (1, 2, 4) if n <= torch.cuda.device_count())
        hashes = set()
        for ranks in options.ranks.split(","):
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--one", ranks]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
            print(*map(json.dumps, lines), sep="\n", flush=True)
            found = {line["hash"] for line in lines if "hash" in line}
            if not found:
                print(f"{ranks} ranks ended with {run.returncode}", file=sys.stderr)
                return 1
            hashes |= found
        print(json.dumps({"hashes": sorted(hashes), "same": len(hashes) == 1}))
        return 0 if len(hashes) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
