"""
Many small tensors in one process: what Python costs for each, in seconds of CPU.

    python bench/scale.py --only tensors [--tensors 10000 30000 100000 300000] [--dir DIR]

"Blocked" is the second `sk.async_save` of a state, on the thread that calls it; the others are the best of three saves of a state after
the first one, and a load, on all threads of the process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable

import torch

import shardkeep as sk
from scale import exponent
from shardkeep import dcp


def cpu_s(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    work()
    return clock() - began


def measure(tensors: int, directory: str) -> dict[str, float]:
    state = {f"layers.{n}.weight": torch.full((8,), float(n)) for n in range(tensors)}
    handles: list[sk.SaveHandle[sk.SaveReport]] = []
    with tempfile.TemporaryDirectory(prefix="shardkeep-tensors-", dir=directory) as where:
        for number in range(2):
            blocked = cpu_s(lambda: handles.append(sk.async_save(state, f"{where}/a{number}")), time.thread_time)  # noqa: B023
            handles[-1].result()
        # Not in turn: each would pay for what the other has left in memory.
        native = min([cpu_s(lambda: sk.save(state, f"{where}/s{number}")) for number in range(4)][1:])  # noqa: B023
        drop_in = min([cpu_s(lambda: dcp.save(state, checkpoint_id=f"{where}/d{number}")) for number in range(4)][1:])  # noqa: B023
        loaded = cpu_s(lambda: sk.load(state, f"{where}/s0"))
        drop_in_loaded = cpu_s(lambda: dcp.load(state, checkpoint_id=f"{where}/d0"))
    sk.finish_saves()
    return {
        "blocked": blocked,
        "sk.save": native,
        "dcp.save": drop_in,
        "dcp.save / sk.save": drop_in / native,
        "sk.load": loaded,
        "dcp.load": drop_in_loaded,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000])
    parser.add_argument("--dir", default=".")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows = {tensors: measure(tensors, args.dir) for tensors in (2, *args.tensors)}
    del rows[2]  # which imported everything
    names = list(next(iter(rows.values())))
    print("| tensors | " + " | ".join(names) + " |\n|" + "---|" * (1 + len(names)))
    for tensors, row in rows.items():
        print(f"| {tensors:,} | " + " | ".join(f"{each:.3f}" for each in row.values()) + " |")
    if len(rows) > 1:
        laws = [f"{name} {exponent(list(rows), [row[name] for row in rows.values()]):.2f}" for name in names]
        print("exponent in tensors: " + ", ".join(laws))


if __name__ == "__main__":
    main()
