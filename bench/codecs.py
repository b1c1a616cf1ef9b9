"""
Codecs on the bytes of a training state: compressed size, and GB/s of plain bytes encoded and decoded.

All contenders code the same memory in turn, and the best round counts. "CPU" is plain bytes per CPU second of all threads,
which is comparable on a busy machine. "x1", "x2" and so on are plain bytes per second of wall time with that many threads,
up to the number of cores; they mean little on a busy machine. As many processes, which share no interpreter lock, show what
threads could gain at most.
zipnn is measured if it can be imported (`pip install --no-deps --target DIR zipnn`, then `--zipnn DIR`), with all bytes in
one call, which is its fastest way. `--save DIR` instead saves and loads bf16 weights there with `float` and the same numbers
of threads.
"""

# ruff: noqa: A005 - the interpreter has imported its own `codecs` before it can find this one

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardkeep.codecs.base import FramePlace
from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import BATCH
from shardkeep.codecs.keys import KeyRing, new_key
from shardkeep.format.frames import FRAME_NBYTES

CHAINS = (["float"], ["zstd"], ["lz4"], ["aes"], ["float", "aes"])
CORES = len(os.sched_getaffinity(0))
THREADS = [1 << power for power in range(5) if 1 << power <= max(CORES, 2)]
"""One, two, and so on up to the cores there are, or 16."""


def workloads(nbytes: int) -> dict[str, np.ndarray]:
    """Bytes as checkpoints hold them."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(nbytes // 4, dtype=np.float32)
    twice = rng.standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
    exact = twice.view(np.uint32)
    made = {
        "bf16 weights": ((exact + 0x7FFF + (exact >> 16 & 1)) >> 16).astype(np.uint16),  # rounded to even
        "fp32 first moments": normal * np.float32(1e-3),
        "fp32 second moments": np.square(normal * np.float32(1e-3)),
        "int64 counters": np.arange(nbytes // 8),
        "zeros": np.zeros(nbytes, np.uint8),
        "random bytes": rng.integers(0, 256, nbytes, dtype=np.uint8),
    }
    return {name: values.view(np.uint8) for name, values in made.items()}


@cache
def pool_of(threads: int) -> ThreadPoolExecutor:
    """Threads that stay: a save has its own for as long as it takes."""
    return ThreadPoolExecutor(threads)


class Ours:
    """A chain of codecs, frame by frame, on some threads; what is stored goes to memory that is there, as in a save."""

    def __init__(self, codecs: list[str], data: np.ndarray) -> None:
        self.chain = CodecChain.begin(codecs, keys=KeyRing.from_text(new_key()))
        starts = range(0, data.nbytes, FRAME_NBYTES)
        sizes = [min(FRAME_NBYTES, data.nbytes - start) for start in starts]
        self.places = [FramePlace("bench", n, start, sizes[n]) for n, start in enumerate(starts)]
        self.data = data
        self.batches = [range(len(sizes))[at : at + BATCH] for at in range(0, len(sizes), BATCH)]
        self.coded = np.ones((len(sizes), self.chain.bound(FRAME_NBYTES)), np.uint8)
        self.out = np.ones_like(data)
        self.filled = [self.out[place.offset :][: place.nbytes] for place in self.places]

    def encode(self, threads: int) -> list[np.ndarray]:
        return [stored for batch in self._on(threads, self._encode) for stored in batch]

    def decode(self, stored: list[np.ndarray], threads: int) -> np.ndarray:
        self._on(threads, lambda batch: [self._decode(stored[n], n) for n in batch])
        return self.out

    def size(self, stored: list[np.ndarray]) -> int:
        return sum(each.nbytes for each in stored)

    def _encode(self, batch: range) -> list[np.ndarray]:
        places = [self.places[n] for n in batch]
        data = self.data[places[0].offset : places[-1].offset + places[-1].nbytes].data
        kept = []
        for n, each in zip(batch, self.chain.encode(data, places), strict=True):
            stored = np.frombuffer(each, np.uint8)
            kept.append(self.coded[n, : stored.size])
            np.copyto(kept[-1], stored)
        return kept

    def _decode(self, stored: np.ndarray, n: int) -> None:
        self.chain.decode(stored.data, self.filled[n].data, self.places[n])

    def _on(self, threads: int, work: Callable[[range], Any]) -> list[Any]:
        if threads == 1:
            return [work(batch) for batch in self.batches]
        return list(pool_of(threads).map(work, self.batches))


class Zipnn:
    """The package zipnn, all bytes at once."""

    def __init__(self, module: Any, data: np.ndarray, kind: str) -> None:
        self._module = module
        self._data = data
        self._kind = "float32" if kind.startswith("fp32") else "bfloat16"

    def encode(self, threads: int) -> Any:
        # It changes what it is given.
        return self._made(threads).compress(bytearray(self._data))

    def decode(self, stored: Any, threads: int) -> np.ndarray:
        return np.frombuffer(self._made(threads).decompress(stored), np.uint8)

    def size(self, stored: Any) -> int:
        return len(stored)

    def _made(self, threads: int) -> Any:
        return self._module.ZipNN(input_format="byte", bytearray_dtype=self._kind, threads=threads)


def imported_zipnn(folder: str | None) -> Any:
    """The module, or None where it is not installed."""
    if folder:
        sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import zipnn
    except ImportError:
        return None
    return zipnn


def clocked(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returns, and the seconds it took: by the clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def measured(contenders: dict[str, Any], data: np.ndarray, rounds: int) -> dict[str, dict[str, float]]:
    """The best of some rounds, for each contender: GB/s, and the size as a part of the plain one."""
    best: dict[str, dict[str, float]] = {name: {} for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            mine = best[name]
            for threads in THREADS:
                stored, *coding = clocked(lambda c=contender, t=threads: c.encode(t))
                plain, *decoding = clocked(lambda c=contender, s=stored, t=threads: c.decode(s, t))
                if not np.array_equal(plain, data):
                    raise SystemExit(f"{name} gave other bytes than it was given")
                mine["size"] = contender.size(stored) / data.nbytes
                for what, (wall, cpu) in (("encode", coding), ("decode", decoding)):
                    _keep(mine, f"{what} x{threads}", data.nbytes / wall / 1e9)
                    if threads == 1:
                        _keep(mine, f"{what} CPU", data.nbytes / max(cpu, 1e-9) / 1e9)
    return best


def of_processes(data: np.ndarray, rounds: int) -> dict[tuple[str, int], float]:
    """How many times as much some processes do as one, encoding and decoding by `float`, each all of the data; at best."""
    context = multiprocessing.get_context("fork")
    best: dict[tuple[str, int], float] = {}
    for number in THREADS * rounds:
        together, results = context.Barrier(number, timeout=120), context.Queue()
        processes = [context.Process(target=_one_of, args=(data, together, results)) for _ in range(number)]
        for process in processes:
            process.start()
        found = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
        for what, seconds in zip(("encode", "decode"), map(max, zip(*found, strict=True)), strict=True):
            best[what, number] = min(seconds, best.get((what, number), seconds))
    return {(what, number): number * best[what, 1] / seconds for (what, number), seconds in best.items() if number > 1}


def _one_of(data: np.ndarray, together: Any, results: Any) -> None:
    ours = Ours(["float"], data)
    stored = ours.encode(1)  # warm
    together.wait()
    _, encoding, _ = clocked(lambda: ours.encode(1))
    together.wait()
    _, decoding, _ = clocked(lambda: ours.decode(stored, 1))
    results.put((encoding, decoding))


def _keep(best: dict[str, float], what: str, value: float) -> None:
    best[what] = max(best.get(what, 0.0), value)


def table(name: str, results: dict[str, dict[str, float]]) -> list[str]:
    """Lines of Markdown."""
    columns = [f"{what} {how}" for what in ("encode", "decode") for how in ("CPU", *(f"x{n}" for n in THREADS))]
    lines = [f"## {name}", "", f"| | size % | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for contender, one in results.items():
        speeds = " | ".join(f"{one[column]:.2f}" for column in columns)
        lines.append(f"| {contender} | {100 * one['size']:.2f} | {speeds} |")
    return [*lines, ""]


def targets(
    results: dict[str, dict[str, dict[str, float]]], ceiling: dict[tuple[str, int], float]
) -> list[tuple[str, float, float, bool]]:
    """What was aimed at: words, what was measured, what it should be, and whether less is better."""
    weights, zeros = results["bf16 weights"], results["zeros"]
    ours = weights["float"]
    found = [
        ("zeros: GB/s encoded, CPU", zeros["float"]["encode CPU"], 10.0, False),
        ("zeros: size %", 100 * zeros["float"]["size"], 0.01, True),
        ("random bytes: GB/s encoded, CPU", results["random bytes"]["float"]["encode CPU"], 3.0, False),
        ("encryption: GB/s a core", min(weights["aes"]["encode CPU"], weights["aes"]["decode CPU"]), 1.0, False),
        *(
            (f"bf16, {what}: {n} threads / one (as many processes: {most:.2f})", gained, 0.85 * most, False)
            for (what, n), most in ceiling.items()
            for gained in [ours[f"{what} x{n}"] / ours[f"{what} x1"]]
        ),
        ("bf16: encoding / plain zstd, CPU", ours["encode CPU"] / weights["zstd"]["encode CPU"], 1.0, False),
    ]
    if "zipnn" in weights:
        theirs = weights["zipnn"]
        found += [
            ("bf16: size / zipnn's", ours["size"] / theirs["size"], 1.03, True),
            ("bf16: encoding / zipnn, CPU", ours["encode CPU"] / theirs["encode CPU"], 1.0, False),
            ("bf16: decoding / zipnn, CPU", ours["decode CPU"] / theirs["decode CPU"], 1.0, False),
        ]
    return found


def saved(folder: Path, nbytes: int, rounds: int) -> dict[int, tuple[float, float]]:
    """GB/s of whole saves and loads of bf16 weights through `float`, for each number of threads; the best round."""
    import torch

    import shardkeep as sk

    data = torch.from_numpy(workloads(nbytes)["bf16 weights"]).view(torch.bfloat16)
    state = {str(n): part.clone() for n, part in enumerate(data.chunk(16))}
    best: dict[int, tuple[float, float]] = {}
    for threads in THREADS * rounds:
        options = sk.Options(io_threads=threads, host_budget_bytes=1 << 30)
        into = {key: torch.ones_like(value) for key, value in state.items()}
        try:
            _, saving, _ = clocked(lambda o=options: sk.save(state, folder / "codecs", codecs=["float"], options=o))
            _, loading, _ = clocked(lambda i=into, o=options: sk.load(i, folder / "codecs", options=o))
        finally:
            shutil.rmtree(folder / "codecs", ignore_errors=True)
        if not all(torch.equal(into[key].view(torch.int16), value.view(torch.int16)) for key, value in state.items()):
            raise SystemExit("other bytes were loaded than were saved")
        speeds = (nbytes / saving / 1e9, nbytes / loading / 1e9)
        best[threads] = tuple(map(max, speeds, best.get(threads, speeds)))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--mb", type=float, default=64, help="plain bytes of each workload")
    parser.add_argument("--only", help="the workloads whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--zipnn", metavar="DIR", help="where zipnn is installed, if not beside shardkeep")
    parser.add_argument("--save", type=Path, metavar="DIR", help="only save to a folder and load, by threads")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    asked = parser.parse_args()
    if asked.save:
        for threads, (saving, loading) in saved(asked.save, int(asked.mb * 1e6) // 8 * 8, asked.rounds).items():
            print(f"{threads} threads: save {saving:.2f}, load {loading:.2f} GB/s")
        return
    zipnn = imported_zipnn(asked.zipnn)
    results: dict[str, dict[str, dict[str, float]]] = {}
    load = os.getloadavg()[0]
    made = workloads(int(asked.mb * 1e6) // 8 * 8)
    for name, data in made.items():
        if not name.startswith(asked.only or ""):
            continue
        contenders: dict[str, Any] = {", ".join(codecs): Ours(codecs, data) for codecs in CHAINS}
        if zipnn is not None and name.startswith(("bf16", "fp32")):
            contenders["zipnn"] = Zipnn(zipnn, data, name)
        results[name] = measured(contenders, data, asked.rounds)
        print("\n".join(table(name, results[name])), flush=True)
    if zipnn is None:
        print("zipnn is not installed: not compared with it")
    judged = [] if asked.only else targets(results, of_processes(made["bf16 weights"], asked.rounds))
    for words, value, wanted, less in judged:
        met = value <= wanted if less else value >= wanted
        print(f"{'ok   ' if met else 'MISS '} {words}: {value:.3g} ({'at most' if less else 'at least'} {wanted:g})")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
    if asked.json:
        asked.json.write_text(json.dumps({"results": results, "targets": judged, "load": load}, indent=1))


if __name__ == "__main__":
    main()
