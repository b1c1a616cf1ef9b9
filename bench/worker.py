"""
A process that measures one family of contenders, driven by JSON lines on stdin, so that its peak memory is its own.

It holds the state in memory for all rounds. Building, overwriting and comparing the state are not timed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import workloads
from contenders import CONTENDERS


def build(family: str, workload: str, gb: float, tensors: int) -> workloads.State:
    """Make the state, full of random bytes; the raw families get the same bytes in one piece."""
    state = workloads.large(gb) if workload == "large" else workloads.small(tensors)
    if family.startswith("raw"):
        state = workloads.flat(workloads.nbytes_of(state), direct=family == "raw-direct")
    workloads.fill(state)
    return state


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(work: Callable[[], object]) -> dict[str, float]:
    """Time one call, and find how far resident memory rose above where it stood before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return {"seconds": wall, "cpu_s": cpu, "peak_extra_bytes": max(0, status_bytes("VmHWM") - before)}


def load_and_check(contender: str, state: workloads.State, where: str, expected: list[str]) -> dict[str, float]:
    load = CONTENDERS[contender].load
    sample = measure(lambda: load(state, where))
    if workloads.digests(state) != expected:
        raise ValueError(f"{contender}: what was loaded from {where} is not what was saved")
    return sample


def rehearse(family: str, scratch: str) -> None:
    """Save and load a tiny state once, so that no first import is timed."""
    tiny = build(family, "small", gb=0, tensors=2)
    for name, contender in CONTENDERS.items():
        if contender.family == family:
            where = f"{scratch}/rehearsal-{name.replace(' ', '-')}"
            contender.save(tiny, where)
            if contender.load:
                contender.load(tiny, where)
            shutil.rmtree(where)


def main() -> None:
    family, workload, gb, tensors, scratch = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a contender prints must not mix with our replies
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rehearse(family, scratch)
    state = build(family, workload, float(gb), int(tensors))
    expected = workloads.digests(state)
    replies.write(json.dumps({"nbytes": workloads.nbytes_of(state), "tensors": len(state)}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        name, where = order["contender"], order["where"]
        if order["op"] == "poison":
            workloads.poison(state)
            sample = {}
        elif order["op"] == "save":
            sample = measure(lambda: CONTENDERS[name].save(state, where))  # noqa: B023 - called at once
        else:
            sample = load_and_check(name, state, where, expected)
        replies.write(json.dumps(sample) + "\n")


if __name__ == "__main__":
    main()
