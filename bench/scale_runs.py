"""
A long run at scale: what `Checkpointer.step` costs when it saves nothing, and what many checkpoints in a root cost.

Steps: real Checkpointers over a real TCPStore, with signals, minutes and the request file on. Simulated is that ranks are
threads, in a few processes of one machine, and that training is a pause of the same length on all ranks. Measured are rank 0
and rank 1, which have the main process to themselves.

Checkpoints: a root of a directory on a real disk with copies of one tiny checkpoint, by number.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import TCPStore

import shardkeep as sk
from shardkeep.dist.world import World

PROBES = 2
"""Ranks of the main process."""
TIMEOUT_S = 600.0


def take_steps(root: str, world: World, steps: int, step_s: float, *, signals: tuple[str, ...] = ()) -> list[float]:
    """Train without saving anything, and return how long each call of `step` took."""
    options, state, took = sk.Options(timeout_s=TIMEOUT_S), {"w": torch.zeros(4)}, []
    how = {"every_minutes": 600, "save_last": False, "group": world, "options": options, "signals": signals}
    ckpt = sk.Checkpointer(root, **how)
    for step in range(steps):
        began = time.perf_counter()
        ckpt.step(step, state)
        took.append(time.perf_counter() - began)
        time.sleep(max(0.0, step_s - took[-1]))
    ckpt.close()
    return took


def client(port: int, rank: int, ranks: int) -> World:
    return World(rank, ranks, TCPStore("localhost", port, is_master=False, wait_for_workers=False), TIMEOUT_S)


def worker(root: str, port: int, first: int, last: int, ranks: int, steps: int, step_s: float) -> None:
    """Be the ranks from `first` to before `last`."""
    worlds = [client(port, rank, ranks) for rank in range(first, last)]
    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=take_steps, args=(root, world, steps, step_s)) for world in worlds]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


@contextmanager
def other_ranks(root: str, port: int, ranks: int, steps: int, step_s: float, processes: int) -> Iterator[None]:
    """Have all ranks but the first ones in other processes, which begin inside."""
    bounds = [PROBES + (ranks - PROBES) * each // processes for each in range(processes + 1)]
    command = [sys.executable, __file__, "--worker", root, str(port)]
    started = []
    for first, last in zip(bounds, bounds[1:], strict=False):
        words = [*command, *map(str, (first, last, ranks, steps, step_s))]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for each in started:
        each.stdout.readline()
    for each in started:
        each.stdin.write("\n")
        each.stdin.flush()
    yield
    for each in started:
        each.communicate()


def measure_steps(ranks: int, steps: int, step_s: float, processes: int = 4) -> dict[str, float]:
    """Milliseconds of a step that saves nothing, on the slower of rank 0 and rank 1, after the first twenty."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    worlds = [World(0, ranks, server, TIMEOUT_S), client(server.port, 1, ranks)]
    found: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as root, other_ranks(root, server.port, ranks, steps, step_s, processes):

        def follow() -> None:
            found[1] = take_steps(root, worlds[1], steps, step_s)

        follower = threading.Thread(target=follow)
        follower.start()
        found[0] = take_steps(root, worlds[0], steps, step_s, signals=("SIGUSR1",))
        follower.join()
    later = [each[20:] for each in found]
    return {
        "ranks": ranks,
        "steps": len(later[0]),
        "step_ms": 1e3 * step_s,
        "median_ms": 1e3 * max(map(statistics.median, later)),
        "p99_ms": 1e3 * max(statistics.quantiles(each, n=100)[98] for each in later),
        "longest_ms": 1e3 * max(map(max, later)),
        "lost_percent": 100 * max(map(sum, later)) / (len(later[0]) * step_s),
    }


def make_root(path: Path, count: int) -> None:
    """Make a root with `count` tiny checkpoints, which are copies of one another but for their steps."""
    with sk.Checkpointer(path, asynchronous=False) as ckpt:
        ckpt.save(1, {"w": torch.zeros(4)})
    for step in range(2, count + 1):
        shutil.copytree(path / "step-1", path / f"step-{step}", copy_function=shutil.copyfile)
    (path / "latest").write_text(f"step-{count}\n")


def measure_root(count: int, saves: int = 5) -> dict[str, float]:
    """Milliseconds of what a job does under a root with `count` checkpoints: medians, the first save apart."""
    found: dict[str, list[float]] = {}

    def timed(what: str, work: object) -> object:
        began = time.perf_counter()
        done = work()  # type: ignore[operator]
        found.setdefault(what, []).append(1e3 * (time.perf_counter() - began))
        return done

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
            timed("all after the first save", ckpt.wait)
            for step in range(count + 2, count + 2 + saves):
                timed("save", lambda: ckpt.save(step, state))  # noqa: B023
                timed("all after a save", ckpt.wait)
        for _ in range(saves):
            timed("Catalog.latest", lambda: sk.Catalog(root).latest())
        with sk.Checkpointer(root, keep_last=count // 2, asynchronous=False) as ckpt:
            ckpt.restore_latest(state)
            ckpt.save(count + saves + 9, state)
            timed("prune half", ckpt.wait)
    return {"checkpoints": count, **{what: statistics.median(each) for what, each in found.items()}}


def show(rows: list[dict[str, float]]) -> None:
    """Print rows as a table."""
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(f"{row[name]:,.4g}" for name in names) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=1020)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[10, 5000])
    args = parser.parse_args()
    if args.ranks:
        show([measure_steps(ranks, args.steps, args.step_ms / 1e3) for ranks in args.ranks])
    if args.checkpoints:
        show([measure_root(count) for count in args.checkpoints])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        root, port, first, last, ranks, steps, step_s = sys.argv[2:]
        worker(root, int(port), int(first), int(last), int(ranks), int(steps), float(step_s))
    else:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        main()
