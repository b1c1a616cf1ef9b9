"""
Time that training loses to asynchronous saves: `python bench/lost.py [--only LOOP] [--dir FOLDER] [--saves 5]`.

Lost time is the wall time of the steps from the one that calls `sk.async_save` to the first after the save is durable, minus the
wall time of as many steps without a save, by the median step of windows before and after. Each row has a process of its own, so
its first three saves are the first of a process. The call itself counts as lost. "no checkpoint" is the yardstick: a program that
knows nothing of the trainer makes digests of as many bytes and writes them, on two threads. `--calls` times only the calls, for
states of many small tensors. Needs an accelerator; `--cpu` shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkeep as sk

FIRST = 3
"""Saves of a process that are shown apart."""
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

    def timed(self, until: Any, least: int) -> list[float]:
        """Return how long each step took, for at least so many steps, until a condition holds."""
        times, began = [], time.perf_counter()
        while len(times) < least or not until():
            self.step()
            now = time.perf_counter()
            times.append(now - began)
            began = now
        return times

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "step": 1}


LOOPS = {"many": (9.67, 288, 64), "few": (9.66, 18, 512), "slow": (9.67, 288, 8192)}
"""Gigabytes, layers, batch: 864 tensors and short steps, 54 tensors, 864 tensors and long steps."""
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("auto", {}),
    ("device", {"staging": "device"}),
    ("overlap", {"staging": "overlap"}),
    ("device, process", {"staging": "device", "writer": "process"}),
    ("no checkpoint", {}),
]
PLAIN = """
import os, sys, threading, numpy, xxhash
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


class PlainWrite:
    """What stands in for a save's handle, of a program that writes as many bytes."""

    def __init__(self, where: Path, nbytes: int) -> None:
        where.mkdir()
        self.began = time.perf_counter()
        self.seconds = 0.0
        self.program = subprocess.Popen([sys.executable, "-c", PLAIN, str(where), str(nbytes), "2"])

    def done(self) -> bool:
        return self.program.poll() is not None

    def result(self) -> PlainWrite:
        self.seconds = time.perf_counter() - self.began
        return self


def measure(loop: Loop, saves: int, folder: str, row: str) -> dict[str, Any]:
    rows, how = [], dict(ROWS)[row]
    nbytes = BYTES_EACH * sum(each.numel() for each in loop.model.parameters())
    loop.timed(lambda: True, 20)
    for number in range(FIRST + saves):
        before = loop.timed(lambda: True, 25)
        where = Path(folder) / f"lost-{number}"
        shutil.rmtree(where, ignore_errors=True)
        began = time.perf_counter()
        handle: Any = PlainWrite(where, nbytes) if row == "no checkpoint" else sk.async_save(loop.state, where, **how)
        call = time.perf_counter() - began
        during = loop.timed(handle.done, 5)
        wall = time.perf_counter() - began
        report = handle.result()
        after = loop.timed(lambda: True, 25)
        usual = statistics.median(before + after)
        rows.append(
            {
                "call": call,
                "lost": wall - usual * len(during),
                "usual": usual,
                "worst": max(during[1:]),
                "steps": len(during),
                "durable": report.seconds,
                "estimate": getattr(report, "lost_s", None),
            }
        )
        shutil.rmtree(where, ignore_errors=True)
    sk.finish_saves()
    return {"rows": rows}


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if abs(seconds) >= 0.01 else f"{1000 * seconds:.1f}"


def show(loop: str, row: str, found: dict[str, Any]) -> None:
    first, later = found["rows"][:FIRST], found["rows"][FIRST:]
    lost = [each["lost"] for each in later]
    print(
        f"{loop:6} {row:18} first: "
        + "; ".join(ms(each["lost"]) for each in first)
        + f" (call {'; '.join(ms(each['call']) for each in first)}; worst {ms(max(each['worst'] for each in first))})"
        + f"  later: {ms(statistics.median(lost))} ({ms(min(lost))} to {ms(max(lost))})"
        + f" call {ms(statistics.median(each['call'] for each in later))}"
        + f" worst {ms(max(each['worst'] for each in later))} of {ms(statistics.median(each['usual'] for each in later))}"
        + f" durable {statistics.median(each['durable'] for each in later):.2f} s"
        + f" (the reports' estimates: {'; '.join(ms(each['estimate']) for each in later if each['estimate'] is not None)})",
        flush=True,
    )


def calls(device: torch.device, folder: str) -> None:
    """Print how long calls take for states of many small tensors, from the second save on."""
    for layers in (288, 1667):
        loop = Loop(layers * 12e-6, layers, 4, device)
        taken = []
        for number in range(8):
            loop.timed(lambda: True, 3)
            began = time.perf_counter()
            handle = sk.async_save(loop.state, Path(folder) / f"{layers}-{number}")
            taken.append(time.perf_counter() - began)
            handle.result()
        print(
            f"{3 * layers} tensors: blocked {ms(taken[0])} first, {ms(statistics.median(taken[1:]))} later", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--only", action="append", choices=LOOPS)
    parser.add_argument("--row", action="append", help="only these ways of staging")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--saves", type=int, default=5)
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
        folder = tempfile.mkdtemp(dir=args.dir)
        try:
            made = Loop(gb * args.scale, layers, batch, device)
            print(json.dumps(measure(made, args.saves, folder, row)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    print(f"milliseconds lost to a save, to {args.dir}; median of {args.saves} (lowest to highest)")
    for loop in args.only or LOOPS:
        for row, _ in ROWS:
            if args.row and row not in args.row:
                continue
            words = [
                sys.executable,
                __file__,
                "--child",
                f"{loop}/{row}",
                "--dir",
                args.dir,
                "--saves",
                str(args.saves),
            ]
            words += ["--scale", str(args.scale)] + ["--cpu"] * args.cpu
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(loop, row, "failed")
                continue
            show(loop, row, json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
