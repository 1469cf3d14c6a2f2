#!/usr/bin/env python3
"""Spreads one campaign over the workers of a Ray cluster and merges the results.

    ray_campaign.py integrations/recipes/numpy_linear.py:kernel --op linear --where weight_type=uint4b8 --shards 8
    ray_campaign.py my_kernels.py:gemm --op linear --shards 64 --gpus 1 --seconds 3600 --seed 20260102
    ray_campaign.py integrations/recipes/numpy_linear.py:kernel --op linear --shards 2 --local

A worker runs one shard and returns its summary and its failing cases as bytes: the machines need no
shared file system. The kernel's file, marlinspike and the kernel's own packages must be installed on
every machine. Failing cases of --regressions run first, on the first shard, and new ones are added.
A shard whose worker died is reported as missing. Exit codes are those of `marlinspike fuzz merge`.
"""

import argparse
import concurrent.futures
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import marlinspike


def load(kernel):
    """The callable of ``FILE.py:NAME``."""
    path, _, name = kernel.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def run_shard(kernel, options, shard, kept):
    """Runs one shard; returns the files of its folder, by name, as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in kept.items():
            Path(folder, name).write_bytes(data)
        summary = marlinspike.run_fuzz(load(kernel), folder=folder, shard=shard, **options)
        summary.write(Path(folder, "summary.json"))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


class Local:
    """Processes of this machine."""

    def __init__(self, workers):
        # A forked process would lack the threads of its parent.
        context = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(workers, context)

    def submit(self, *arguments):
        return self.pool.submit(run_shard, *arguments)

    def result(self, task):
        return task.result()


class Ray:
    """Workers of a Ray cluster."""

    def __init__(self, address, cpus, gpus):
        import ray

        self.ray = ray
        ray.init(address=address)
        # A kernel that kills its worker does so again: no retries.
        self.remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(run_shard)

    def submit(self, *arguments):
        return self.remote.remote(*arguments)

    def result(self, task):
        return self.ray.get(task)


def campaign(executor, kernel, options, shards, regressions):
    """Runs all shards and merges them; one summary for each operation, here one."""
    folder = Path(regressions)
    kept = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    tasks = []
    for number in range(1, shards + 1):
        first = kept if number == 1 else {}
        tasks.append(executor.submit(kernel, options, f"{number}/{shards}", first))
    with tempfile.TemporaryDirectory() as results:
        summaries = []
        for number, task in enumerate(tasks, 1):
            try:
                files = executor.result(task)
            except Exception as error:
                print(f"shard {number}/{shards}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            place = Path(results, str(number))
            place.mkdir()
            for name, data in files.items():
                (place / name).write_bytes(data)
            summaries.append(place / "summary.json")
        return marlinspike.merge(summaries, folder)


def arguments(words):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", metavar="FILE.py:NAME", help="the kernel, as for marlinspike.run_fuzz")
    parser.add_argument("--op", required=True, help="operation")
    parser.add_argument("--where", default="", help="configurations to draw from")
    parser.add_argument("--output", action="append", default=[], help="an output that the kernel returns")
    parser.add_argument("--seed", type=lambda text: int(text, 0), default=0)
    parser.add_argument("--cases", type=int, default=200, help="cases of all shards together")
    parser.add_argument("--seconds", type=float, help="time of each shard")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--regressions", default=".marlinspike", help="folder of failing cases")
    parser.add_argument("--local", action="store_true", help="processes of this machine, without Ray")
    parser.add_argument("--address", help="the Ray cluster [default: start one here]")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each shard")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each shard")
    return parser.parse_args(words)


def main(words=None):
    args = arguments(words)
    executor = Local(os.cpu_count()) if args.local else Ray(args.address, args.cpus, args.gpus)
    path, _, name = args.kernel.rpartition(":")
    kernel = f"{Path(path).resolve()}:{name}"
    options = dict(
        op=args.op, where=args.where, cases=args.cases, seed=args.seed, seconds=args.seconds,
        outputs=args.output,
    )  # fmt: skip
    merged = campaign(executor, kernel, options, args.shards, args.regressions)
    for summary in merged:
        print(summary)
    return 0 if merged and all(summary.ok for summary in merged) else 1


if __name__ == "__main__":
    sys.exit(main())
