"""
How much an asynchronous save of CPU tensors slows down a loop that runs beside it: `python bench/async_cpu.py [--loop matmul]`.

A pure Python loop needs the interpreter lock all the time; a loop of `torch.matmul` needs all cores. On two cores it runs alone, then from the return of the call
until the checkpoint is durable, then alone again. Its speed in the middle is given relative to the mean of the other two,
because other programs on the machine slow it down, too. Threads, a writer process and torch's asynchronous save take turns.
Without the loop, each is also measured from the call until durable, beside `sk.save` in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import workloads
from async_contenders import PATIENCE_S, TORCH, Contender, Flight, torch_thread

THREAD, PROCESS, SYNC = "shardkeep, thread", "shardkeep, process", "sk.save"
GOALS = {"python": 0.97, "matmul": 0.9}
"""Of the loop's own speed."""
TURNS = 20_000
"""Of the loop between two looks at the clock: about a millisecond."""
SIDE = 512
"""Of the matrices: a product takes some milliseconds on two cores."""
Turn = Callable[[], Any]


def python_turn() -> None:
    """Hold the interpreter lock."""
    total = 0
    for number in range(TURNS):
        total += number & 7


def matmul_turn() -> None:
    """Keep all cores busy."""
    torch.matmul(LEFT, LEFT, out=OUT)


LEFT, OUT = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)
LOOPS: dict[str, Turn] = {"python": python_turn, "matmul": matmul_turn}


def ours(**chosen: str) -> Contender:
    import shardkeep as sk

    def begin(state: Mapping[str, Any], where: str) -> Flight:
        handle = sk.async_save(state, where, **chosen)
        return Flight(handle.done, lambda: handle.result(PATIENCE_S).staged_s)

    return Contender(begin, sk.finish_saves)


@dataclass(frozen=True)
class Pace:
    turns_a_second: float
    for_lock: float
    """Part of the time in which the loop slept: it had no one to wait for but the interpreter's lock."""
    for_core: float
    """Part in which it could have run, had a core been free: other programs on a busy machine, and our own threads."""


def pace(turn: Turn, over: Callable[[], bool]) -> Pace:
    """Count turns until `over` says so."""
    on_core, queued = _scheduled()
    began, rounds = time.perf_counter(), 0
    while True:
        turn()
        rounds += 1
        if over():
            break
    seconds = time.perf_counter() - began
    on_core, queued = (now - then for now, then in zip(_scheduled(), (on_core, queued), strict=True))
    return Pace(rounds / seconds, max(0.0, 1 - (on_core + queued) / seconds), queued / seconds)


def _scheduled() -> tuple[float, float]:
    """Seconds this thread has run, and has waited for a core, as Linux counts them."""
    on_core, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(on_core) / 1e9, int(queued) / 1e9


def alone(turn: Turn, seconds: float) -> float:
    end = time.perf_counter() + seconds
    return pace(turn, lambda: time.perf_counter() >= end).turns_a_second


def beside(contender: Contender, turn: Turn, state: workloads.State, where: str, seconds: float) -> dict[str, float]:
    """Run the loop alone, beside a save that is under way, and alone."""
    os.sync()
    before = alone(turn, seconds)
    began = time.perf_counter()
    flight = contender.begin(state, where)
    blocked_s = time.perf_counter() - began
    during = pace(turn, flight.done)
    durable_s = time.perf_counter() - began
    flight.finish()
    after = alone(turn, seconds)
    return {
        "blocked_s": blocked_s,
        "beside_s": durable_s,
        "speed": during.turns_a_second / ((before + after) / 2),
        "for_lock": during.for_lock,
        "for_core": during.for_core,
    }


def until_durable(contender: Contender, state: workloads.State, where: str) -> float:
    os.sync()
    began = time.perf_counter()
    contender.begin(state, where).finish()
    return time.perf_counter() - began


def save(state: workloads.State, where: str) -> float:
    import shardkeep as sk

    os.sync()
    began = time.perf_counter()
    sk.save(state, where)
    return time.perf_counter() - began


def measure(state: workloads.State, turn: Turn, scratch: str, rounds: int, seconds: float) -> dict[str, Any]:
    everyone = {THREAD: ours(), PROCESS: ours(writer="process"), TORCH: torch_thread()}
    where = f"{scratch}/checkpoint"
    results: dict[str, Any] = {name: {"rounds": []} for name in everyone}
    results[SYNC] = []
    for name, contender in list(everyone.items()):  # a first save: threads, a process and memory are made
        try:
            began = time.perf_counter()
            flight = contender.begin(state, where)
            results[name]["first_blocked_s"] = time.perf_counter() - began
            flight.finish()
        except Exception:  # noqa: BLE001 - the others are still worth having
            traceback.print_exc()
            del everyone[name], results[name]
        shutil.rmtree(where, ignore_errors=True)
    for _ in range(rounds):
        results[SYNC].append(save(state, where))
        shutil.rmtree(where)
        for name, contender in everyone.items():
            row = beside(contender, turn, state, where, seconds)
            shutil.rmtree(where)
            row["durable_s"] = until_durable(contender, state, where)
            shutil.rmtree(where)
            results[name]["rounds"].append(row)
    for contender in everyone.values():
        contender.close()
    return results


def table(results: Mapping[str, Any], nbytes: int, goal: float) -> list[str]:
    def middle(name: str, what: str) -> float:
        return float(median(row[what] for row in results[name]["rounds"]))

    lines = [
        "| | loop's speed (lowest) | waits for lock / core | blocked, first / later, s | durable, GB/s | of sk.save |",
        "|---|---|---|---|---|---|",
    ]
    sync = median(results[SYNC])
    for name in (THREAD, PROCESS, TORCH):
        if name not in results:
            lines.append(f"| {name} | fails | | | | |")
            continue
        lowest = min(row["speed"] for row in results[name]["rounds"])
        ratio = median(s / row["durable_s"] for s, row in zip(results[SYNC], results[name]["rounds"], strict=True))
        lines.append(
            f"| {name} | {middle(name, 'speed'):.1%} ({lowest:.1%})"
            f" | {middle(name, 'for_lock'):.1%} / {middle(name, 'for_core'):.1%}"
            f" | {results[name]['first_blocked_s']:.3f} / {middle(name, 'blocked_s'):.3f}"
            f" | {nbytes / middle(name, 'durable_s') / 1e9:.2f} | {ratio:.2f} |"
        )
    lines.append(f"| {SYNC} | | | {sync:.3f} | {nbytes / sync / 1e9:.2f} | 1 |")
    lines.append("")
    for name in (THREAD, PROCESS):
        speed = middle(name, "speed") if name in results else 0.0
        lines.append(f"{name}: loop's speed {speed:.1%} >= {goal:.0%}  {'ok' if speed >= goal else 'SHORT'}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state (default %(default)s)")
    parser.add_argument(
        "--loop", choices=LOOPS, default="python", help="what runs beside the save (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (default %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="use so many (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="that the loop runs alone (default %(default)s)")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="a folder on the disk (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write every sample there")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    warnings.simplefilter("ignore")
    state = workloads.large(args.gb)
    workloads.fill(state)
    nbytes = workloads.nbytes_of(state)
    print(f"{nbytes / 1e9:.2f} GB in {len(state)} tensors, {args.cores} cores, load {os.getloadavg()[0]:.1f}\n")
    scratch = tempfile.mkdtemp(prefix="shardkeep-bench-", dir=args.dir)
    try:
        results = measure(state, LOOPS[args.loop], scratch, args.rounds, args.seconds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("\n".join(table(results, nbytes, GOALS[args.loop])))
    if args.json:
        args.json.write_text(json.dumps({"nbytes": nbytes, **results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
