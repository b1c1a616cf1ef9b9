"""
Time that training loses to asynchronous saves: `python bench/lost.py [--only LOOP] [--row ROW] [--dir FOLDER] [--saves 4]`.

Steps of one machine drift by more than a save costs, so a save is compared with steps that are next to it: while it is written, its
writers are stopped and let go in turn, for a few steps each. What the steps take longer while they run, than in the stops before and
after, is summed up over the save. The call, and what the step after it takes longer, are added: both are counted whole. Each row has
processes of its own, so its first three saves are the first of a process.

"no checkpoint" is the yardstick: a program that knows nothing of the trainer makes digests of as many bytes and writes them, on two
threads. "nothing" shows the noise. "little room" leaves so little memory on the device that 40 % of the state can be copied there.
`--calls` times only the calls, for states of many small tensors. Needs an accelerator; `--cpu` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkeep as sk
from shardkeep.engine.process.client import writer_manager
from shardkeep.storage.resolve import open_place
from shardkeep.storage.wrapper import StoreWrapper, WriterWrapper

FIRST = 3
"""Saves of a process that are shown apart."""
TURN = 6
"""Steps for which writers run, or are stopped. The first of them is not compared: the change takes effect in it."""
BYTES_EACH = 12
"""Of a parameter: a weight and two moments, all fp32."""


class Loop:
    """A stack of square layers with AdamW (fused): many small kernels if there are many layers and a small batch."""

    def __init__(self, gb: float, layers: int, batch: int, device: torch.device) -> None:
        width = max(8, int((gb * 1e9 / BYTES_EACH / layers) ** 0.5))
        with device:
            self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            self.x = torch.randn(batch, width) * 0.1
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device.type != "cpu")
        self.device, self.ends = device, list[Any]()
        for _ in range(3):
            self.step()

    def step(self) -> None:
        """One step; the host runs ahead of the device by one step at most, as a loop that logs its loss does."""
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type != "cpu":
            end = torch.Event(self.device)
            end.record()
            self.ends.append(end)
            if len(self.ends) > 1:
                self.ends.pop(0).synchronize()

    def timed(self, count: int) -> list[float]:
        """Return how long each of so many steps took."""
        times, began = [], time.perf_counter()
        for _ in range(count):
            self.step()
            now = time.perf_counter()
            times.append(now - began)
            began = now
        return times

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "step": 1}

    @property
    def nbytes(self) -> int:
        return BYTES_EACH * sum(each.numel() for each in self.model.parameters())


LOOPS = {"many": (9.67, 288, 64), "few": (9.66, 18, 512), "slow": (9.67, 288, 8192)}
"""Gigabytes, layers, batch: 864 large tensors and short steps, 54 tensors, 864 tensors and long steps."""
ROWS: dict[str, dict[str, Any]] = {
    "auto": {},
    "device": {"staging": "device"},
    "overlap": {"staging": "overlap"},
    "device, process": {"staging": "device", "writer": "process"},
    "auto, little room": {},
    "overlap, little room": {"staging": "overlap"},
    "no checkpoint": {},
    "nothing": {},
}


class Work:
    """What runs beside a loop, and can be stopped and let go."""

    def done(self) -> bool:
        raise NotImplementedError

    def go(self, on: bool) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Wait for it and clean up."""


class Nothing(Work):
    def __init__(self, turns: int = 30) -> None:
        self.turns = turns

    def done(self) -> bool:
        self.turns -= 1
        return self.turns < 0

    def go(self, on: bool) -> None:
        del on


class Threads(Work):
    """Threads of this process, which wait for `gate` between pieces of their work."""

    def __init__(self, count: int, work: Callable[[int, threading.Event], None]) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.threads = [threading.Thread(target=work, args=(at, self.gate), daemon=True) for at in range(count)]
        for each in self.threads:
            each.start()

    def done(self) -> bool:
        return not any(each.is_alive() for each in self.threads)

    def go(self, on: bool) -> None:
        self.gate.set() if on else self.gate.clear()


PLAIN = """
import sys, threading, numpy, xxhash
from pathlib import Path
folder, nbytes, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def write(part):
    data = numpy.ones(32 << 20, numpy.uint8).data
    with open(folder / str(part), "wb", buffering=0) as file:
        for _ in range(nbytes // count // len(data)):
            for at in range(0, len(data), 1 << 20):
                xxhash.xxh3_128_digest(data[at : at + (1 << 20)])
            file.write(data)
threads = [threading.Thread(target=write, args=(part,)) for part in range(count)]
[each.start() for each in threads], [each.join() for each in threads]
"""


class PlainProgram(Work):
    """A program that writes as many bytes as a save."""

    def __init__(self, where: Path, nbytes: int, threads: int = 2) -> None:
        where.mkdir()
        self.where = where
        self.program = subprocess.Popen([sys.executable, "-c", PLAIN, str(where), str(nbytes), str(threads)])

    def done(self) -> bool:
        return self.program.poll() is not None

    def go(self, on: bool) -> None:
        if not self.done():
            self.program.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def end(self) -> None:
        self.program.wait()
        shutil.rmtree(self.where)


class Save(Work):
    def __init__(self, loop: Loop, where: Path, how: dict[str, Any]) -> None:
        self.where, self.gate, self.outside = where, threading.Event(), how.get("writer") == "process"
        self.gate.set()
        self.handle = sk.async_save(loop.state, where if self.outside else Gated(where, self.gate), **how)

    def done(self) -> bool:
        return self.handle.done()

    def go(self, on: bool) -> None:
        if not self.outside:
            self.gate.set() if on else self.gate.clear()
        elif (pid := writer_manager().pid) is not None:
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)

    def end(self) -> None:
        self.report = self.handle.result()
        shutil.rmtree(self.where, ignore_errors=True)


class Gated(StoreWrapper):
    """A store in which nothing is written while a gate is closed."""

    def __init__(self, where: Path, gate: threading.Event) -> None:
        super().__init__(open_place(where))
        self.gate = gate

    def wrap_writer(self, writer: Any, name: str) -> GatedWriter:
        return GatedWriter(writer, self, name)


class GatedWriter(WriterWrapper):
    def write_at(self, offset: int, data: memoryview) -> None:
        self.store.gate.wait()
        super().write_at(offset, data)


def mean_of_turn(times: list[float]) -> float:
    return statistics.fmean(times[1:])


def lost_beside(loop: Loop, begin: Callable[[], Work]) -> dict[str, Any]:
    """Return what a loop loses to some work beside it, in seconds, and how that was made up."""
    loop.timed(15)
    turns = [(False, loop.timed(TURN))]
    began = time.perf_counter()
    work = begin()
    call, on = time.perf_counter() - began, True
    while True:
        turns.append((on, loop.timed(TURN)))
        if work.done():
            break
        on = not on
        work.go(on)
    work.go(True)
    work.end()
    turns += [(False, loop.timed(TURN))] * (1 if turns[-1][0] else 0) + [(False, loop.timed(TURN))]
    more = [
        mean_of_turn(now) - (mean_of_turn(before) + mean_of_turn(after)) / 2
        for (_, before), (on, now), (_, after) in zip(turns, turns[1:], turns[2:], strict=False)
        if on
    ]
    usual = mean_of_turn(turns[0][1])
    first = turns[1][1][0] - usual  # of the step after the call
    report = getattr(work, "report", None)
    return {
        "lost": call + first + TURN * sum(more),
        "call": call,
        "first": first,
        "steps": TURN * len(more),
        "worst": max(max(times[1:]) for on, times in turns if on),
        "usual": usual,
        "staging": report.staging if report else "",
        "estimate": report.lost_s if report else None,
    }


def measure(loop: Loop, saves: int, folder: str, row: str) -> list[dict[str, Any]]:
    room = None
    if "little room" in row:
        free = torch.get_device_module(loop.device).mem_get_info(loop.device)[0]
        room = torch.empty(max(0, free - int(0.8 * loop.nbytes)), dtype=torch.uint8, device=loop.device)

    def begin() -> Work:
        where = Path(tempfile.mkdtemp(dir=folder)) / "checkpoint"
        if row == "nothing":
            return Nothing()
        return PlainProgram(where, loop.nbytes) if row == "no checkpoint" else Save(loop, where, ROWS[row])

    found = [lost_beside(loop, begin) for _ in range(FIRST + saves)]
    sk.finish_saves()
    del room
    return found


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if abs(seconds) >= 0.01 else f"{1000 * seconds:.1f}"


def mean_and_error(numbers: list[float]) -> str:
    """Return the mean and its standard error."""
    if len(numbers) == 1:
        return ms(numbers[0])
    return f"{ms(statistics.fmean(numbers))} ± {ms(statistics.stdev(numbers) / math.sqrt(len(numbers)))}"


def show(loop: str, row: str, found: list[list[dict[str, Any]]]) -> None:
    """Print a row, of the saves of some processes."""
    later = [each for rows in found for each in rows[FIRST:]]
    usual = statistics.median(each["usual"] for each in later)
    first = "; ".join(mean_and_error([rows[at]["lost"] for rows in found]) for at in range(FIRST))
    calls = "; ".join(ms(statistics.median(rows[at]["call"] for rows in found)) for at in range(FIRST))
    print(
        f"{loop:5} {row:20} first: {first} (call {calls})  later: {mean_and_error([each['lost'] for each in later])}"
        f" ({'; '.join(ms(each['lost']) for each in later)}), median {ms(statistics.median(each['lost'] for each in later))},"
        f" call {ms(statistics.median(each['call'] for each in later))},"
        f" step after it +{ms(statistics.median(each['first'] for each in later))},"
        f" worst step {ms(max(each['worst'] for each in later))} of {ms(usual)},"
        f" {statistics.fmean(each['steps'] for each in later):.0f} steps = {usual * statistics.fmean(each['steps'] for each in later):.1f} s"
        f" {later[-1]['staging']}",
        flush=True,
    )


def calls(device: torch.device, folder: str) -> None:
    """Print how long calls take for states of many small tensors, from the second save on."""
    for layers in (216, 1250):
        loop = Loop(layers * 12e-6, layers, 4, device)
        count = 4 * layers  # a weight, two moments and the number of steps
        taken = []
        for number in range(10):
            loop.timed(3)
            began = time.perf_counter()
            handle = sk.async_save(loop.state, Path(folder) / f"{layers}-{number}")
            taken.append(time.perf_counter() - began)
            handle.result()
        print(
            f"{count} tensors: blocked {ms(taken[0])} first, {ms(statistics.median(taken[1:]))} later"
            f" ({ms(min(taken[1:]))} to {ms(max(taken[1:]))})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--only", action="append", choices=LOOPS)
    parser.add_argument("--row", action="append", choices=ROWS, help="only these ways of staging")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--saves", type=int, default=4, help="of each process, after the first three")
    parser.add_argument("--processes", type=int, default=1, help="of each row, one after another")
    parser.add_argument("--scale", type=float, default=1.0, help="of the size of the state")
    parser.add_argument("--calls", action="store_true", help="time only the calls, for many small tensors")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cpu") if args.cpu else torch.accelerator.current_accelerator()
    if args.calls:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            calls(device, folder)
        return
    if args.child:
        loop, row = args.child.split("/")
        gb, layers, batch = LOOPS[loop]
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            print(json.dumps(measure(Loop(gb * args.scale, layers, batch, device), args.saves, folder, row)))
        return
    print(f"milliseconds lost to a save, to {args.dir}: mean ± standard error")
    for loop in args.only or LOOPS:
        for row in args.row or ROWS:
            words = [sys.executable, __file__, "--child", f"{loop}/{row}", "--dir", args.dir]
            words += ["--saves", str(args.saves), "--scale", str(args.scale)] + ["--cpu"] * args.cpu
            runs = [
                subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False) for _ in range(args.processes)
            ]
            if any(each.returncode for each in runs):
                print(loop, row, "failed", flush=True)
                continue
            show(loop, row, [json.loads(each.stdout.splitlines()[-1]) for each in runs])


if __name__ == "__main__":
    main()
