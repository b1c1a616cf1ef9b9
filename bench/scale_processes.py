"""
Real processes on this machine, sharded tensors of a few bytes: what meetings, plans and Python cost each rank, and torch's.

    python bench/scale.py --only processes [--processes 8 16 32 64] [--tensors 150] [--rounds 3] [--dir DIR]

Every contender saves in the same processes in turn, and loads what it saved. The figures are seconds of the slowest rank: of the
first save of a process, the median of the later ones, and the median of the loads; in brackets milliseconds of CPU of the median rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/support has the pool of ranks

import torch
from tests.support.rank_pool import RankPool
from torch import distributed as dist

from scale import exponent

KINDS = ("sk", "dcp", "torch")
"""`sk`, `shardkeep.dcp` and torch's `distributed.checkpoint`."""


def _state(tensors: int, value: float) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = [torch.full((4, 8), value + n) for n in range(tensors)]
    return {f"layers.{n}": DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for n, each in enumerate(local)}


def call(kind: str, verb: str, where: str, tensors: int) -> tuple[float, float]:
    """Save or load on every rank; return the seconds, and those of CPU."""
    import torch.distributed.checkpoint as theirs

    import shardkeep as sk
    from shardkeep import dcp

    warnings.simplefilter("ignore")
    saving = verb == "save"
    state = _state(tensors, 1.0 if saving else -99.0)
    dist.barrier()
    began, cpu_s = time.perf_counter(), time.process_time()
    if kind == "sk":
        getattr(sk, verb)(state, where)
    else:
        getattr(theirs if kind == "torch" else dcp, verb)(state, checkpoint_id=where)
    took = time.perf_counter() - began, time.process_time() - cpu_s
    dist.barrier()
    for n, each in enumerate(state.values()):
        if not each.to_local().eq(1.0 + n).all():
            raise AssertionError(f"{kind}: tensor {n} is not what was saved")
    return took


def measure(pool: RankPool, ranks: int, tensors: int, rounds: int, directory: str) -> dict[str, tuple[float, float]]:
    took: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="shardkeep-ranks-", dir=directory) as scratch:
        for number in range(rounds):
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                where = f"{scratch}/{kind}-{number}"
                for verb in ("save", "load"):
                    os.sync()  # a save that is durable must not wait for what another contender wrote, or deleted
                    seconds, cpu_s = zip(*pool.run(ranks, call, kind, verb, where, tensors, timeout_s=600), strict=True)
                    took.setdefault(f"{kind} {verb}", []).append((max(seconds), median(cpu_s)))
                shutil.rmtree(where)
    found = {}
    for what, runs in took.items():
        if what.endswith("save"):
            found[f"{what}, first"] = runs[0]
        later = runs[1:] or runs
        found[what] = median(each for each, _ in later), median(each for _, each in later)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".")
    args = parser.parse_args(arguments)
    rows: dict[int, dict[str, tuple[float, float]]] = {}
    with RankPool(max(args.processes)) as pool:
        for ranks in args.processes:
            rows[ranks] = found = measure(pool, ranks, args.tensors, args.rounds, args.dir)
            if len(rows) == 1:
                print("| processes | " + " | ".join(found) + " |\n|" + "---|" * (1 + len(found)))
            print(
                f"| {ranks} | "
                + " | ".join(f"{seconds:.3f} ({1e3 * cpu_s:.0f})" for seconds, cpu_s in found.values())
                + " |",
                flush=True,
            )
    for what in next(iter(rows.values())) if len(rows) > 2 else ():
        costs = [row[what][0] for row in rows.values()]
        print(f"exponent in processes, {what}: {exponent(list(rows), costs):.2f}")
    last = rows[args.processes[-1]]
    for what in last:
        kind, verb = what.split(" ", 1)
        if kind != "torch":
            print(
                f"{args.processes[-1]} processes, {what}: {last[f'torch {verb}'][0] / last[what][0]:.1f} x as fast as torch"
            )


if __name__ == "__main__":
    main()
