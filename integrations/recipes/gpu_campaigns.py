"""Campaigns of `marlinspike.run_fuzz` on the GPU operators of other projects, spread over processes.

    pip install ./integrations/python torch==2.11.0 ml_dtypes
    python gpu_campaigns.py LIBRARIES --out RESULTS                       # every operator of vLLM 0.21.0
    python gpu_campaigns.py LIBRARIES --out RESULTS marlin_nvfp4 topk --cases 20000 --seconds 60
    python gpu_campaigns.py LIBRARIES --out RESULTS humming_uint4b8:20 triton_mxfp4:45    # seconds of each
    python gpu_campaigns.py LIBRARIES --out RESULTS marlin_awq --where dtype=bfloat16     # fewer configurations

LIBRARIES is a folder with `_C.abi3.so`, `_moe_C.abi3.so` and `_C_stable_libtorch.abi3.so` of vLLM 0.21.0's wheel, or
with both `*_stable_libtorch.abi3.so` of 0.33.0's, which load in PyTorch 2.11, or with what `triton_kernels_operators.py`, `humming_operators.py`, `fbgemm_operators.py` and
`flashinfer_operators.py` name. RESULTS gets `summary.json` (for each operator: cases, failures by class, seed, the smallest
case of each finding), `OPERATOR-I.json` of each process for `python -m marlinspike merge`, and `kept/`.

A product gets the reference's packed weights; a stage of a layer gets the operators' own output of the stage before it. With
`--stand-ins`, a machine without a GPU goes through everything but the kernels: PyTorch compares each call with
the operator's schema, and the reference's outputs are returned.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import time

import fbgemm_operators
import flashinfer_operators
import humming_operators
import torch
import torch_operators as base
import triton_kernels_operators
import vllm_comparisons as comparisons
import vllm_operators as more

import marlinspike

GPTQ, SIXTEEN = "checkpoint_format=gptq", "input_dtype=null"
WEIGHTS = {
    "uint4b8": f"{GPTQ},weight_type=uint4b8,{SIXTEEN},desc_act=false",
    "uint8b128": f"{GPTQ},weight_type=uint8b128,{SIXTEEN},desc_act=false",
    "act_order": f"{GPTQ},{SIXTEEN},desc_act=true,is_k_full=true",
    "k_slices": f"{GPTQ},{SIXTEEN},desc_act=true,is_k_full=false",
    "awq": f"checkpoint_format=awq,{SIXTEEN}",
    "fp8": f"checkpoint_format=fp8,{SIXTEEN}",
    "mxfp8": f"checkpoint_format=mxfp8,{SIXTEEN}",
    "mxfp4": f"checkpoint_format=mxfp4,{SIXTEEN}",
    "nvfp4": f"checkpoint_format=nvfp4,{SIXTEEN}",
}
# Libraries whose packages are in the folder LIBRARIES.
PEERS = (triton_kernels_operators, humming_operators, fbgemm_operators, flashinfer_operators)
COMPARISONS = {**comparisons.ALL, **{name: call for peer in PEERS for name, call in peer.COMPARISONS.items()}}
ROUTED = ("topk_weights", "topk_ids")
STAGES = ("gate_up", "activated", "down", "y")


def campaigns():
    """Operation, filter, keys that every case gets, outputs and adapter of each campaign."""
    made = {}
    for name, where in WEIGHTS.items():
        made[f"marlin_{name}"] = ("linear", where, {}, ["y"], base.marlin_gemm)
    made["marlin_int8"] = ("linear", "input_dtype=int8", {}, ["y"], base.marlin_gemm)
    for name, where in WEIGHTS.items():
        if name != "mxfp8":
            made[f"moe_{name}"] = ("moe", where, {}, STAGES, more.expert_layer)
    made["moe_nvfp4_no_bias"] = ("moe", f"{WEIGHTS['nvfp4']},has_bias=false", {}, STAGES, more.expert_layer)
    biased = f"{WEIGHTS['nvfp4']},has_bias=true,dtype=float16,apply_router_weight_on_input=false"
    made["moe_nvfp4_bias"] = ("moe", biased, {}, STAGES, more.expert_layer_of_kept_scales)
    made["gptq_marlin_repack"] = ("linear", GPTQ, {}, ["marlin_qweight"], base.repack)
    made["awq_marlin_repack"] = ("linear", "checkpoint_format=awq", {}, ["marlin_qweight"], base.repack)
    made["int4_fp8_preprocess"] = ("int4_fp8_preprocess", "", {}, ["qweight"], more.int4_fp8_preprocess)
    aligned = ("moe_align_block_size", "", {}, [], base.moe_align_block_size)
    made["moe_align_block_size"] = aligned
    plain = (*ROUTED, "token_expert_indices")
    made["topk"] = ("router", "use_grouped_topk=false", {}, plain, more.topk)
    made["grouped_topk"] = ("router", "use_grouped_topk=true", {}, ROUTED, more.grouped_topk)
    by_quotient = "quantizer=quotient|scale_inverse"
    group = ("per_token_group_fp8_quant", by_quotient, {}, ["x_q", "x_s"], more.per_token_group_fp8_quant)
    made["per_token_group_fp8_quant"] = group
    return made | {name: entry for peer in PEERS for name, entry in peer.PRODUCTS.items()}


class Kernel:
    """An operator as a kernel of `run_fuzz`."""

    def __init__(self, name, entry, out, stand_ins):
        self.name, self.out, self.stand_ins = name, out, stand_ins
        self.op, _, _, self.outputs, self.adapter = entry
        self.reasons = collections.Counter()

    def __call__(self, inputs, config, reference):
        tensors = {f"in.{name}": more.tensor(array) for name, array in inputs.items()}
        tensors.update((f"ref.{name}", more.tensor(array)) for name, array in reference.items())
        try:
            outputs = self.adapter(config, tensors)
            if not self.stand_ins:
                torch.cuda.synchronize()
            return outputs
        except base.Unsupported as reason:
            return self.skip(str(reason))
        except NotImplementedError:
            if not self.stand_ins:
                raise
            made = marlinspike.reference(self.op, inputs, config)
            return {name: made[name] for name in self.outputs or made}
        except RuntimeError as error:
            if "CUDA error" in str(error):
                # The device does not go on: this process ends, which is a finding.
                case = marlinspike.Case(self.op, config, inputs, {}, self.name, "ended the process")
                case.write(self.out / f"ended-{self.name}-{os.getpid()}.safetensors")
                print(f"{self.name}: {error}", file=sys.stderr, flush=True)
                os._exit(3)
            return self.skip(str(error).splitlines()[0][:160])

    def skip(self, reason):
        self.reasons[reason] += 1
        raise marlinspike.Unsupported(reason)


def work(options, names):
    """One process: its share of every operator's cases."""
    part, parts = (int(number) for number in options.worker.split("/"))
    sys.path.insert(0, str(options.libraries))
    base.load(options.libraries)
    fbgemm_operators.load(options.libraries)
    torch.set_num_threads(1)
    known = campaigns()
    for name, (op, where, *rest) in known.items():
        known[name] = (op, ",".join(filter(None, (where, options.where))), *rest)
    for name in names:
        start = time.monotonic()
        file = options.out / f"{name}-{part}.json"
        if name in COMPARISONS:
            shared = {"cases": -(-options.cases // parts), "seed": options.seed + part, "seconds": limit(options, name)}
            result = COMPARISONS[name](**shared)
            file.write_text(json.dumps({"comparison": result, "seconds": time.monotonic() - start}))
            continue
        reasons = campaign(options, name, known[name])
        file.with_suffix(".extra").write_text(json.dumps({"skipped": reasons, "seconds": time.monotonic() - start}))


def campaign(options, name, entry):
    """This process's share of one campaign; returns how often the operator refused a case for which reason."""
    op, where, keys, outputs, _ = entry
    if not options.stand_ins:
        # The first calls compile and load the kernels, other kernels in each process.
        first, parts = Kernel(name, entry, options.out, False), int(options.worker.split("/")[1])
        marlinspike.run_fuzz(
            lambda inputs, config, reference: first(inputs, config, reference), op, where, cases=16 * parts,
            seconds=6.0, seed=options.seed + 1, outputs=list(outputs), config=keys, shard=options.worker)  # fmt: skip
    kernel, part = Kernel(name, entry, options.out, options.stand_ins), options.worker.split("/")[0]
    summary = marlinspike.run_fuzz(
        lambda inputs, config, reference: kernel(inputs, config, reference), op, where, cases=options.cases,
        seed=options.seed, seconds=limit(options, name), outputs=list(outputs), config=keys, shard=options.worker,
        folder=str(options.out / "kept" / f"{name}-{part}"))  # fmt: skip
    summary.write(options.out / f"{name}-{part}.json")
    return dict(kernel.reasons)


def summed(name, out, ended):
    """An operator's results over all processes."""
    files = sorted(out.glob(f"{name}-[0-9]*.json"))
    results = [json.loads(file.read_text()) for file in files]
    if name in COMPARISONS:
        parts = [result["comparison"] for result in results]
        first = next((part["first"] for part in parts if part["wrong"]), None)
        total = {key: sum(part[key] for part in parts) for key in ("cases", "judged", "wrong")}
        return {**total, "first": first, "seconds": max((r["seconds"] for r in results), default=0), "ended": ended}
    if not files:
        return {"ended": ended}
    (merged,) = marlinspike.merge(files)
    reasons, seconds = collections.Counter(), 0.0
    for file in files:
        extra = json.loads(file.with_suffix(".extra").read_text())
        reasons.update(extra["skipped"])
        seconds = max(seconds, extra["seconds"])
    findings = [
        {"class": f.signature, "minimal": f.minimal, "seed": f.seed, "case": f.index, "processes": f.runs}
        for f in merged.findings
    ]
    counts = {key: getattr(merged, key) for key in ("passed", "failed", "unchecked", "skipped")}
    return {**counts, "unchecked_reason": merged.unchecked_reason, "reasons": dict(reasons.most_common(8)),
            "findings": findings, "seconds": round(seconds, 1), "ended": ended}  # fmt: skip


def share(options, names):
    """Runs the processes, and a process that ended again with the operators after the one that ended it."""
    ended, running = collections.Counter(), {}

    def start(part, rest):
        timed = [f"{name}:{limit(options, name)}" for name in rest]
        command = [sys.executable, __file__, str(options.libraries), "--out", str(options.out), *timed]
        numbers = {"cases": options.cases, "seed": options.seed}
        command += [text for key, value in numbers.items() for text in (f"--{key}", str(value))]
        command += ["--where", options.where] * bool(options.where)
        command += ["--worker", f"{part}/{options.jobs}"] + ["--stand-ins"] * options.stand_ins
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        running[part] = subprocess.Popen(command, env=environment), rest

    for part in range(1, options.jobs + 1):
        start(part, names)
    while running:
        time.sleep(0.2)
        for part, (process, rest) in list(running.items()):
            if process.poll() is None:
                continue
            del running[part]
            left = [name for name in rest if not (options.out / f"{name}-{part}.json").exists()]
            if process.returncode and left:
                ended[left[0]] += 1
                print(f"process {part} ended with {process.returncode} in {left[0]}", file=sys.stderr, flush=True)
                if left[1:]:
                    start(part, left[1:])
    return ended


def limit(options, name):
    """Seconds of a campaign."""
    return options.limits.get(name, options.seconds)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", type=pathlib.Path)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR[:SECONDS]")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for each operator")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--where", default="", help="a further filter of every campaign: dtype=bfloat16")
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    known = [*campaigns(), *COMPARISONS]
    of_peers = {name for peer in PEERS for name in (*peer.PRODUCTS, *peer.COMPARISONS)}
    given = [name.partition(":") for name in options.operators]
    options.limits = {name: float(seconds) for name, _, seconds in given if seconds}
    names = [name for name, _, _ in given] or [name for name in known if name not in of_peers]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"operator {unknown[0]!r}: expected one of {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stand_ins:
        base.DEVICE = "cpu"
    if options.worker:
        work(options, names)
        return 0
    ended = share(options, names)
    summary = {name: summed(name, options.out, ended[name]) for name in names}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    for name, result in summary.items():
        found = [finding["class"] for finding in result.get("findings", [])] or result.get("first") or ""
        counts = {key: value for key, value in result.items() if isinstance(value, (int, float)) and value}
        print(name, *(f"{key} {value}" for key, value in counts.items()), found)
    return int(any(result["ended"] or result.get("failed") or result.get("wrong") for result in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
