"""
What each part of an asynchronous save costs a training loop: `python bench/lost_parts.py`, on an accelerator of CUDA.

The loop is that of `bench/lost.py` with many small kernels, and so is the measure: what runs beside the loop is stopped and let go in
turn. First saves from which parts are left out, then each part alone, for as many bytes.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import xxhash

import lost
from lost import PlainProgram, Save, Threads, Work, ms
from shardkeep.engine import staging
from shardkeep.format import data_file

WINDOW = 32 << 20
TIMES = 4


@contextmanager
def without_digests() -> Iterator[None]:
    with mock.patch.object(data_file, "block_digests", lambda data, block: bytes(16 * -(-len(data) // block))):
        yield


@contextmanager
def without_writes() -> Iterator[None]:
    with without_digests(), mock.patch.object(lost.GatedWriter, "write_at", lambda self, *_: self.store.gate.wait()):
        yield


class Parts:
    """The parts, each a function that begins it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.device = torch.device("cuda", 0)
        self.loop = lost.Loop(*lost.LOOPS["many"], self.device)
        self.count = self.loop.nbytes // WINDOW
        self.source = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        self.ring = [torch.ones(WINDOW, dtype=torch.uint8).pin_memory() for _ in range(4)]
        self.numbers = itertools.count()

    def path(self) -> Path:
        return self.folder / str(next(self.numbers))

    def save(self) -> Work:
        return Save(self.loop, self.path(), {})

    def plain_program(self) -> Work:
        return PlainProgram(self.path(), self.loop.nbytes)

    def copies(self) -> Work:
        def copy(number: int, gate: threading.Event) -> None:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                for at in range(self.count // 2):
                    gate.wait()
                    self.ring[number].copy_(self.source[at % 32 * WINDOW :][:WINDOW], non_blocking=True)
                    done = torch.cuda.Event(blocking=True)
                    done.record()
                    done.synchronize()

        return Threads(2, copy)

    def digests(self) -> Work:
        def digest(number: int, gate: threading.Event) -> None:
            data = memoryview(self.ring[number].numpy())
            for _ in range(self.count // 2):
                gate.wait()
                for at in range(0, WINDOW, 1 << 20):
                    xxhash.xxh3_128_digest(data[at : at + (1 << 20)])

        return Threads(2, digest)

    def writes(self) -> Work:
        def write(number: int, gate: threading.Event) -> None:
            path, data = self.path(), memoryview(self.ring[number].numpy())
            with open(path, "wb", buffering=0) as file:
                for _ in range(self.count // 2):
                    gate.wait()
                    file.write(data)
            path.unlink()

        return Threads(2, write)

    def python(self) -> Work:
        def work(_: int, gate: threading.Event) -> None:
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                gate.wait()
                sum(range(1000))

        return Threads(1, work)

    def pinning(self) -> Work:
        def pin(_: int, gate: threading.Event) -> None:
            torch.cuda.set_device(self.device)
            driver = torch.cuda.cudart()
            kept = [torch.zeros(WINDOW, dtype=torch.uint8) for _ in range(8)]
            for each in kept:
                gate.wait()
                driver.cudaHostRegister(each.data_ptr(), each.nbytes, 0)
            for each in kept:
                driver.cudaHostUnregister(each.data_ptr())

        return Threads(1, pin)

    def measure(self, name: str, begin: Callable[[], Work]) -> None:
        found = [lost.lost_beside(self.loop, begin) for _ in range(TIMES)]
        steps = sum(each["steps"] for each in found) / TIMES
        print(
            f"{name:36} {lost.mean_and_error([each['lost'] for each in found])}"
            f" ({'; '.join(ms(each['lost']) for each in found)}), {steps:.0f} steps of {ms(found[-1]['usual'])}",
            flush=True,
        )


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        parts = Parts(folder)
        parts.measure("nothing", lost.Nothing)
        lost.lost_beside(parts.loop, parts.save)
        parts.measure("a save", parts.save)
        with without_digests():
            parts.measure("without digests", parts.save)
        with without_writes():
            parts.measure("without digests and writes", parts.save)
        for threads in (1, 4):
            with mock.patch.object(staging, "_WRITERS_BESIDE_TRAINING", threads):
                parts.measure(f"by {threads} thread{'s' * (threads > 1)}", parts.save)
        parts.measure("another program", parts.plain_program)
        for part in (parts.copies, parts.digests, parts.writes):
            parts.measure(f"{part.__name__}, two threads", part)
        parts.measure("100 ms of Python", parts.python)
        parts.measure("256 MiB pinned", parts.pinning)


if __name__ == "__main__":
    main()
