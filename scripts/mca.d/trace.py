#!/usr/bin/env python3
"""Cycles of the instructions that a program executes, by llvm-mca's models.

  trace.py [--objdump PROGRAM] [--mca PROGRAM] [--cpus LIST] --macs N --function REGEX -- EXECUTABLE ARGUMENTS

Runs a static, fixed-address aarch64 executable under qemu, one instruction at a time, and records each
address within the functions whose names match REGEX. llvm-mca receives the instructions at those
addresses in the order of execution: loops are unrolled and branches taken as in the run. Its model has
perfect caches and perfect branch prediction.

Prints one line: instructions, MAC per instruction, and for each CPU MAC per cycle.
"""
import argparse
import concurrent.futures
import re
import subprocess
import sys
import tempfile


def symbols(nm, executable, pattern):
    """Address ranges of the functions whose names match."""
    listing = subprocess.run([nm, "-C", "-S", executable], check=True, capture_output=True, text=True).stdout
    ranges = []
    for line in listing.splitlines():
        parts = line.split(maxsplit=3)
        if len(parts) == 4 and parts[2] in "tT" and re.search(pattern, parts[3]):
            start, size = int(parts[0], 16), int(parts[1], 16)
            ranges.append((start, start + size))
    if not ranges:
        sys.exit(f"trace: no function of {executable} matches {pattern}")
    return ranges


def disassemble(objdump, executable, ranges):
    """Address to instruction, in llvm's syntax, with symbols as branch targets."""
    code = {}
    for start, stop in ranges:
        listing = subprocess.run(
            [objdump, "-d", "--no-show-raw-insn", "--mattr=+all", f"--start-address={start}",
             f"--stop-address={stop}", executable],
            check=True, capture_output=True, text=True).stdout
        for line in listing.splitlines():
            found = re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line)
            if found:
                text = re.sub(r"\s*(//|<).*", "", found[2]).replace("\t", " ")
                # The model ignores branch targets, but they must be symbols.
                text = re.sub(r"^((?:b|bl|b\..*|cbn?z|tbn?z|adrp?) .*?)0x[0-9a-f]+$", r"\1target", text)
                code[int(found[1], 16)] = text
    return code


def executed(qemu, command, ranges):
    """Addresses in the order of execution."""
    low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
    with tempfile.NamedTemporaryFile(mode="r", suffix=".trace") as log:
        subprocess.run(
            [*qemu, "-singlestep", "-d", "exec,nochain", "-dfilter", f"{low:#x}..{high:#x}", "-D", log.name,
             *command], check=True, stdout=subprocess.DEVNULL)
        for line in log:
            found = re.search(r"\[[0-9a-f]+/([0-9a-f]+)/", line)
            if found:
                address = int(found[1], 16)
                if any(start <= address < stop for start, stop in ranges):
                    yield address


def cycles(mca, cpu, instructions):
    """Cycles of the instructions, once, in order."""
    report = subprocess.run(
        [mca, "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+all", "-iterations=1", "-call-latency=1",
         "-instruction-info=false", "-resource-pressure=false", "-"],
        input="\n".join(instructions), capture_output=True, text=True)
    found = re.search(r"Total Cycles:\s+(\d+)", report.stdout)
    if not found:
        sys.exit(f"trace: {mca} gave no cycles: {report.stderr[:2000]}")
    return int(found[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--objdump", default="llvm-objdump")
    parser.add_argument("--nm", default="llvm-nm")
    parser.add_argument("--mca", default="llvm-mca")
    parser.add_argument("--cpus", default="neoverse-v1,neoverse-v2,neoverse-n2")
    parser.add_argument("--macs", type=int, required=True)
    parser.add_argument("--function", required=True)
    parser.add_argument("--dump", help="where to write the executed instructions")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    ranges = symbols(given.nm, given.command[0], given.function)
    code = disassemble(given.objdump, given.command[0], ranges)
    stream = [code[a] for a in executed(["qemu-aarch64", "-cpu", "max"], given.command, ranges)]
    if given.dump:
        with open(given.dump, "w") as out:
            out.write("\n".join(stream) + "\n")
    with concurrent.futures.ThreadPoolExecutor() as threads:
        counts = threads.map(lambda cpu: cycles(given.mca, cpu, stream), given.cpus.split(","))
        figures = [f"{given.macs / count:.1f}" for count in counts]
    print(len(stream), f"{given.macs / len(stream):.1f}", *figures)


if __name__ == "__main__":
    main()
