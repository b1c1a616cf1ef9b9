"""
What each part of an asynchronous save costs a training loop alone: `python bench/lost_parts.py`, on an accelerator of CUDA.

The loop is that of `bench/lost.py` with many small kernels. Beside it runs one thing at a time: copies, digests, writes, Python.
Lost time is the wall time of the steps beside it, minus that of as many steps before and after. "nothing" shows the noise.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

import lost

TOTAL = 9 << 30
RING = 128 << 20
Done = Callable[[], bool]


def threads(count: int, work: Callable[[int], None]) -> Done:
    started = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for each in started:
        each.start()
    return lambda: not any(each.is_alive() for each in started)


class Parts:
    """The parts, each a function that begins it and returns whether it is done."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.device = torch.device("cuda", 0)
        self.loop = lost.Loop(*lost.LOOPS["many"], self.device)
        self.source = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        self.target = torch.empty_like(self.source)
        self.ring = [torch.ones(RING, dtype=torch.uint8).pin_memory() for _ in range(8)]
        self.side = torch.cuda.Stream(self.device)
        self.numbers = itertools.count()

    def nothing(self) -> Done:
        until = time.perf_counter() + 0.5
        return lambda: time.perf_counter() > until

    def copies_queued_at_once(self) -> Done:
        with torch.cuda.stream(self.side):
            for number in range(TOTAL // RING):
                at = number % 8 * RING
                self.ring[number % 8].copy_(self.source[at : at + RING], non_blocking=True)
            return self.side.record_event().query

    def copies_by_a_thread(self, nbytes: int) -> Done:
        def copy(_: int) -> None:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                for at in range(0, TOTAL, nbytes):
                    low = at % RING
                    source = self.source[at % (1 << 30) :][:nbytes]
                    self.ring[at // RING % 8][low : low + nbytes].copy_(source, non_blocking=True)
                    done = torch.cuda.Event(blocking=True)
                    done.record()
                    done.synchronize()

        return threads(1, copy)

    def copy_on_the_device(self) -> Done:
        with torch.cuda.stream(self.side):
            for _ in range(TOTAL >> 30):
                self.target.copy_(self.source)
            event = self.side.record_event()
        torch.cuda.current_stream(self.device).wait_event(event)
        return event.query

    def digests(self, block: int) -> Done:
        def digest(number: int) -> None:
            data = memoryview(self.ring[number].numpy())
            for at in range(0, TOTAL // 4, block):
                xxhash.xxh3_128_digest(data[at % RING :][:block])

        return threads(4, digest)

    def writes(self, count: int) -> Done:
        def write(number: int) -> None:
            path = self.folder / str(next(self.numbers))
            data = memoryview(self.ring[number].numpy())[: 32 << 20]
            with open(path, "wb", buffering=0) as file:
                file.writelines(data for _ in range(TOTAL // len(data) // count))
            os.unlink(path)

        return threads(count, write)

    def another_process(self) -> Done:
        where = self.folder / str(next(self.numbers))
        where.mkdir()
        program = subprocess.Popen([sys.executable, "-c", lost.PLAIN, str(where), str(TOTAL), "4"])
        return lambda: program.poll() is not None

    def python(self, seconds: float) -> Done:
        def work(_: int) -> None:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                sum(range(1000))

        return threads(1, work)

    def pinning(self) -> Done:
        kept = []

        def pin(_: int) -> None:
            torch.cuda.set_device(self.device)
            driver = torch.cuda.cudart()
            for _ in range(8):
                kept.append(torch.zeros(32 << 20, dtype=torch.uint8))
                driver.cudaHostRegister(kept[-1].data_ptr(), kept[-1].nbytes, 0)
            for each in kept:
                driver.cudaHostUnregister(each.data_ptr())

        return threads(1, pin)

    def measure(self, name: str, begin: Callable[[], Done]) -> None:
        found = []
        for _ in range(3):
            before = self.loop.timed(lambda: True, 20)
            began = time.perf_counter()
            during = self.loop.timed(begin(), 5)
            wall = time.perf_counter() - began
            usual = statistics.median(before + self.loop.timed(lambda: True, 20))
            found.append(wall - usual * len(during))
        print(f"{name:36} lost {'; '.join(map(lost.ms, found))} ms, steps of {lost.ms(usual)}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        parts = Parts(folder)
        parts.loop.timed(lambda: True, 40)
        parts.measure("nothing", parts.nothing)
        parts.measure("copies queued at once", parts.copies_queued_at_once)
        for nbytes in (32 << 20, 128 << 20):
            parts.measure(
                f"copies of {nbytes >> 20} MiB by a thread", lambda size=nbytes: parts.copies_by_a_thread(size)
            )
        parts.measure("copy on the device", parts.copy_on_the_device)
        for block in (1 << 20, 32 << 20):
            parts.measure(f"digests of {block >> 20} MiB, 4 threads", lambda size=block: parts.digests(size))
        for count in (1, 4):
            parts.measure(f"writes by {count} threads", lambda count=count: parts.writes(count))
        parts.measure("digests and writes, another process", parts.another_process)
        parts.measure("30 ms of Python", lambda: parts.python(0.03))
        parts.measure("256 MiB pinned", parts.pinning)


if __name__ == "__main__":
    main()
