"""
A long run at scale: what `Checkpointer.step` costs when it saves nothing, and what many checkpoints in a root cost.

Steps: real Checkpointers over a real TCPStore, with signals, minutes and the request file on. Eighteen ranks are real;
those above only look at the store as often as a rank does that needs a decision. Training is a pause of the same length on
all ranks. Measured are rank 0 and rank 1, which have a process to themselves.

Checkpoints: a root of a directory on a real disk with copies of one tiny checkpoint, by number.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.distributed import TCPStore

import shardkeep as sk
from scale import exponent
from shardkeep.dist.kv import KVMailbox
from shardkeep.dist.world import World
from shardkeep.manage.decisions import StepDecisions

REAL = 18
"""Ranks that are Checkpointers: two in the main process, which are measured, and the others in one more process."""
TIMEOUT_S = 600.0
SAID = 100
"""After so many steps, rank 0 says how long they took."""


def connect(port: int) -> TCPStore:
    return TCPStore("localhost", port, is_master=False, wait_for_workers=False)


def take_steps(root: str, world: World, steps: int, step_s: float) -> list[float]:
    """Train without saving anything, and return how long each call of `step` took."""
    state, took = {"w": torch.zeros(4)}, list[float]()
    signals = ("SIGUSR1",) if threading.current_thread() is threading.main_thread() else ()
    how = {"every_minutes": 600, "save_last": False, "signals": signals, "group": world}
    ckpt = sk.Checkpointer(root, **how, options=sk.Options(timeout_s=TIMEOUT_S))
    # Ranks compare their arguments before their first decision: the simulated ones cannot.
    ckpt._ranks._decisions = StepDecisions(world, "bench", ckpt._requests.take, ckpt._decide)
    for step in range(steps):
        began = time.perf_counter()
        ckpt.step(step, state)
        took.append(time.perf_counter() - began)
        if signals and step % SAID == SAID - 1:
            last = 1e3 * statistics.median(took[-SAID:]), 1e3 * max(took[-SAID:])
            print(f"  step {step + 1}: median {last[0]:.3f} ms, longest {last[1]:.3f} ms", file=sys.stderr, flush=True)
        time.sleep(max(0.0, step_s - took[-1]))
    ckpt.close()
    return took


def follow(root: str, port: int, ranks: int, steps: int, step_s: float) -> None:
    """Be the real ranks that are not measured, and make the requests of those that are simulated, in one loop."""
    worlds = [World(rank, ranks, connect(port), TIMEOUT_S) for rank in range(2, min(REAL, ranks))]
    threads = [threading.Thread(target=take_steps, args=(root, world, steps, step_s)) for world in worlds]
    simulated = max(0, ranks - REAL)
    clients = [KVMailbox(connect(port), ranks, threading.Event()) for _ in range(min(simulated, MOST_CLIENTS))]
    print("ready", flush=True)
    sys.stdin.readline()
    for each in threads:
        each.start()
    every_s, began, asked = max(0.25, ranks / 8192), time.monotonic(), 0
    while any(each.is_alive() for each in threads):
        due = int((time.monotonic() - began) / every_s * simulated)
        for number in range(asked, due):
            clients[number % len(clients)].peek("bench")
        asked = due
        time.sleep(0.005)
    print(f"{asked / (time.monotonic() - began):.0f}")


MOST_CLIENTS = 100
"""Connections of the simulated ranks; if there are more, they share them."""


def measure_steps(ranks: int, steps: int, step_s: float) -> dict[str, float]:
    """Milliseconds of a step that saves nothing, on the slower of rank 0 and rank 1, after the first twenty."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    worlds = [World(0, ranks, server, TIMEOUT_S), World(1, ranks, connect(server.port), TIMEOUT_S)]
    found: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, __file__, "--follow", root, *map(str, (server.port, ranks, steps, step_s))]
        others = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        others.stdout.readline()
        others.stdin.write("\n")
        others.stdin.flush()
        follower = threading.Thread(target=lambda: found.update({1: take_steps(root, worlds[1], steps, step_s)}))
        follower.start()
        found[0] = take_steps(root, worlds[0], steps, step_s)
        follower.join()
        simulated = others.communicate()[0]
    later = [each[20:] for each in found.values()]
    return {
        "ranks": ranks,
        "steps": len(later[0]),
        "step_ms": 1e3 * step_s,
        "simulated requests a second": float(simulated),
        "median_ms": 1e3 * max(map(statistics.median, later)),
        "p99_ms": 1e3 * max(statistics.quantiles(each, n=100)[98] for each in later),
        "longest_ms": 1e3 * max(map(max, later)),
        "lost_percent": 100 * max(map(sum, later)) / (len(later[0]) * step_s),
    }


def make_root(path: Path, count: int) -> None:
    """Make a root with `count` tiny checkpoints, which are copies of one another but for their steps."""
    with sk.Checkpointer(path, asynchronous=False) as ckpt:
        ckpt.save(1, {"w": torch.zeros(4)})
    for step in range(2, count):
        shutil.copytree(path / "step-1", path / f"step-{step}", copy_function=shutil.copyfile)
    with sk.Checkpointer(path, asynchronous=False) as ckpt:  # what `latest` names has a step of its own
        ckpt.save(count, {"w": torch.zeros(4)})


def sweep(ckpt: sk.Checkpointer) -> None:
    """Wait until the directories of all checkpoints were looked at, as they are once."""
    ckpt.wait()
    while not all(each.done() for each in ckpt._saves._pruner._others):
        ckpt.wait()


def measure_root(count: int, saves: int = 15) -> dict[str, float]:
    """Milliseconds of CPU, which do not depend on the disk, of what a job does under a root with `count` checkpoints: medians."""
    found: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        began = time.process_time()
        work()
        found.setdefault(what, []).append(1e3 * (time.process_time() - began))

    state = {"w": torch.zeros(4)}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = Path(folder) / "run"
        make_root(root, count)
        policy = sk.KeepLast(count) | sk.KeepEvery(10)
        with sk.Checkpointer(root, asynchronous=False, retention=policy) as ckpt:
            for _ in range(saves):
                timed("latest_step", ckpt.latest_step)
                timed("restore_latest", lambda: ckpt.restore_latest(state))
            timed("first save", lambda: ckpt.save(count + 1, state))
            timed("all after the first save", lambda: sweep(ckpt))
            for step in range(count + 2, count + 2 + saves):
                timed("save", lambda: ckpt.save(step, state))  # noqa: B023
                timed("all after a save", ckpt.wait)
        for _ in range(saves):
            timed("Catalog.latest", lambda: sk.Catalog(root).latest())
        with sk.Checkpointer(root, keep_last=count // 2, asynchronous=False) as ckpt:
            ckpt.restore_latest(state)
            ckpt.save(count + saves + 9, state)
            timed("prune half", lambda: sweep(ckpt))
    return {"checkpoints": count, **{what: statistics.median(each) for what, each in found.items()}}


def show(measured: Iterator[dict[str, float]], law: str) -> None:
    """Print rows as a table, each when it is measured, and then how each cost grows with the first column."""
    rows: list[dict[str, float]] = []
    for row in measured:
        if not rows:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(f"{value:,.4g}" for value in row.values()) + " |", flush=True)
        rows.append(row)
    if len(rows) > 1:
        names = list(rows[0])
        sizes, costs = [row[law] for row in rows], {name: [row[name] for row in rows] for name in names[1:]}
        laws = [f"{name} {exponent(sizes, each):.2f}" for name, each in costs.items() if min(each) > 0]
        print(f"exponent in {law}: " + ", ".join(laws))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024, 16384])
    parser.add_argument("--steps", type=int, default=1020)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[10, 5000])
    args = parser.parse_args(arguments)
    if args.ranks:
        show((measure_steps(ranks, args.steps, args.step_ms / 1e3) for ranks in args.ranks), "ranks")
    if args.checkpoints:
        show((measure_root(count) for count in args.checkpoints), "checkpoints")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--follow"]:
        root, port, ranks, steps, step_s = sys.argv[2:]
        follow(root, int(port), int(ranks), int(steps), float(step_s))
    else:
        main()
