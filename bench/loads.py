"""
Loads in the order a user works: save, then load, then load again, without warming anything by hand.

    python bench/loads.py [--gb 1.5] [--rounds 3] [--dir DIR] [--only one|sharded|replicated|start|s3]

One process, four ranks that each hold a shard, and ranks that all want the same bytes, cold and after a save. The limits are
what the page cache and the disk give to plain reads on a few threads. "cached" is how much of the checkpoint was in the page
cache when a load began, "read" is what the ranks made the disk read (/proc/self/io), "peak" is the most memory that a rank took
beyond what it had before the call, state included; `Options.host_budget_bytes`, by default 256 MiB, bounds it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/support has the S3 server and the pool of ranks

import torch
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server
from torch import distributed as dist

import pagecache

TENSORS = 24
KINDS = ("sk", "dcp", "torch")
"""`sk.load`, `shardkeep.dcp.load`, and torch's."""
PARTS = (("one", 1, 1.0), ("sharded", 4, 1.0), ("replicated", 4, 1 / 3), ("replicated", 8, 1 / 3))
"""Name, ranks, and the part of the size."""
_WINDOW = 8 << 20
_KEPT_S = 10.0
"""How long the newest save is given to get into the page cache."""


def _state(gb: float, *, sharded: bool, value: float) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    ranks = dist.get_world_size() if sharded else 1
    rows = max(1, int(gb * 1e9 / 4 / 1024 / TENSORS / ranks))
    local = [torch.full((rows, 1024), value + n) for n in range(TENSORS)]
    if not sharded or ranks == 1:
        return {f"w{n}": each for n, each in enumerate(local)}
    mesh = init_device_mesh("cpu", (ranks,))
    return {f"w{n}": DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for n, each in enumerate(local)}


def _call(kind: str, verb: str, state: dict[str, Any], where: str) -> Any:
    import shardkeep as sk
    from shardkeep import dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "sk":
            return getattr(sk, verb)(state, where)
        import torch.distributed.checkpoint as theirs

        return getattr(theirs if kind == "torch" else dcp, verb)(state, checkpoint_id=where)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _resident_now() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, begins anew
    return _resident("VmRSS")


def save(kind: str, where: str, gb: float, *, sharded: bool) -> dict[str, float]:
    """Save on every rank; return what it took."""
    state = _state(gb, sharded=sharded, value=1.0)
    dist.barrier()
    held, cpu, began = _resident_now(), time.process_time(), time.perf_counter()
    _call(kind, "save", state, where)
    took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "peak": _resident("VmHWM") - held}
    dist.barrier()
    if kind != "torch":
        _wait_until_cached(where)
    return took


def _wait_until_cached(where: str) -> None:
    until = time.monotonic() + _KEPT_S
    while pagecache.resident_fraction(where) < 0.99 and time.monotonic() < until:
        time.sleep(0.1)


def load(kind: str, where: str, gb: float, *, sharded: bool) -> dict[str, float]:
    """Load on every rank, check every number; return what it took."""
    state = _state(gb, sharded=sharded, value=-99.0)  # memory is touched before it is timed
    dist.barrier()
    held, before, began = _resident_now(), pagecache.io_counter("read_bytes"), time.perf_counter()
    report = _call(kind, "load", state, where)
    seconds, read = time.perf_counter() - began, pagecache.io_counter("read_bytes") - before
    peak = _resident("VmHWM") - held
    for n, each in enumerate(state.values()):
        local = each.to_local() if hasattr(each, "to_local") else each
        if not local.eq(1.0 + n).all():
            raise AssertionError(f"{kind}: tensor {n} is not what was saved")
    return {"seconds": seconds, "read": read, "fetched": getattr(report, "bytes_read", 0), "peak": peak}


def raw(where: str, *, direct: bool, touched: bool = True) -> float:
    """Return the seconds that plain reads of all files take, into memory that was touched before, or into new memory."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = [(os.open(path, flags), path.stat().st_size) for path in pagecache.files_of(where)]
    total = sum(nbytes for _, nbytes in files)
    memory = mmap(-1, total + len(files) * _WINDOW, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    view = memoryview(memory)
    for at in range(0, len(memory) if touched else 0, 4096):
        memory[at] = 1

    def reads() -> Iterator[tuple[int, int, int]]:
        base = 0
        for fd, nbytes in files:
            for at in range(0, nbytes, _WINDOW):
                yield fd, at, base + at
            base += -(-nbytes // _WINDOW) * _WINDOW

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda read: os.preadv(read[0], [view[read[2] : read[2] + _WINDOW]], read[1]), reads()):
            pass
    seconds = time.perf_counter() - began
    for fd, _ in files:
        os.close(fd)
    view.release()
    return seconds


def measure(pool: RankPool, directory: str, gb: float, rounds: int, *, ranks: int, sharded: bool) -> list[str]:
    """Let all kinds take turns; return the lines of a table."""
    took: dict[tuple[str, str], list[float]] = {}
    facts: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            where = f"{directory}/{kind}-{number}"
            saved = pool.run(ranks, save, kind, where, gb, sharded=sharded, timeout_s=600)
            took.setdefault((kind, "save"), []).append(max(each["seconds"] for each in saved))
            facts.setdefault((kind, "save"), []).append(sum(each["cpu"] for each in saved))
            facts.setdefault((kind, "save peak"), []).append(max(each["peak"] for each in saved))
            for op in ("after save", "again", "cold"):
                if op == "cold":
                    pagecache.chill(where)
                    if kind == "sk":
                        took.setdefault(("raw", "cold"), []).append(raw(where, direct=True))
                        pagecache.chill(where)
                elif op == "again" and kind == "sk":
                    took.setdefault(("raw", "again"), []).append(raw(where, direct=False))
                cached = pagecache.resident_fraction(where)
                loaded = pool.run(ranks, load, kind, where, gb, sharded=sharded, timeout_s=600)
                took.setdefault((kind, op), []).append(max(each["seconds"] for each in loaded))
                read = sum(each["read"] for each in loaded) / (gb * 1e9)
                facts.setdefault((kind, op), []).append(cached)
                facts.setdefault((kind, f"{op} read"), []).append(read)
                facts.setdefault((kind, f"{op} peak"), []).append(max(each["peak"] for each in loaded))
            shutil.rmtree(where)
    moved = gb * (1 if sharded else ranks)
    best = {key: min(each) for key, each in took.items()}
    lines = [
        f"{'':<26}{'best s':>9}{'median s':>10}{'GB/s':>8}{'of torch':>10}{'cached':>9}{'read x':>9}{'peak MiB':>10}"
    ]
    for (kind, op), each in took.items():
        times_torch = "" if kind == "raw" else f"{best['torch', op] / min(each):.2f}x"
        in_cache = f"{median(facts[kind, op]):8.0%}" if op != "save" and kind != "raw" else ""
        read = f"{median(facts[kind, f'{op} read']):8.2f}" if in_cache else ""
        peak = f"{max(facts[kind, f'{op} peak']) / 2**20:10.0f}" if kind != "raw" else ""
        size = gb if op == "save" else moved
        if kind == "raw":
            size = gb
        cpu = f"  CPU {median(facts[kind, op]):.2f} s" if op == "save" else ""
        lines.append(
            f"{kind + ', ' + op:<26}{min(each):9.3f}{median(each):10.3f}{size / min(each):8.2f}{times_torch:>10}{in_cache:>9}{read:>9}{peak:>10}{cpu}"
        )
    return lines


def load_from_bucket(where: str, gb: float, environment: dict[str, str], share: str) -> dict[str, float]:
    os.environ.update(environment, SHARDKEEP_SHARE_READS=share)
    return load("sk", where, gb, sharded=False)


def save_to_bucket(where: str, gb: float, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    _call("sk", "save", _state(gb, sharded=False, value=1.0), where)


def measure_bucket(pool: RankPool, gb: float, rounds: int, server: S3Server) -> list[str]:
    """Four replicas load from a bucket: each for itself, and shared."""
    where = server.url("loads")
    pool.run(1, save_to_bucket, where, gb, server.environment, timeout_s=600)
    took: dict[str, list[list[dict[str, float]]]] = {"alone": [], "shared": []}
    for number in range(rounds):
        for how in ("alone", "shared") if number % 2 else ("shared", "alone"):
            share = "" if how == "shared" else "0"
            took[how].append(pool.run(4, load_from_bucket, where, gb, server.environment, share, timeout_s=600))
    lines = []
    for how, runs in took.items():
        seconds = [max(each["seconds"] for each in run) for run in runs]
        fetched = median(sum(each["fetched"] for each in run) for run in runs) / (gb * 1e9)
        lines.append(
            f"4 replicas, {how:<7} best {min(seconds):.2f} s, median {median(seconds):.2f} s, {fetched:.2f}x fetched"
        )
    return lines


START = """
import sys, time
import torch
began = time.perf_counter()
import shardkeep as sk
imported = time.perf_counter()
with torch.device("meta"):
    state = {f"w{n}": torch.empty(int(sys.argv[2]), 1024) for n in range(int(sys.argv[3]))}
called = time.perf_counter()
report = sk.load(state, sys.argv[1])
ended = time.perf_counter()
read = next(span for span in report.phases if span.name == "read")
print(*(f"{1000 * s:.0f}" for s in (imported - began, ended - called - (report.seconds - read.begin_s), ended - called)))
"""


def measure_start(directory: str, gb: float, rounds: int) -> Iterator[str]:
    """Load into the meta device in a new process: what comes before the first byte of data is read."""
    rows = max(1, int(gb * 1e9 / 4 / 1024 / TENSORS))
    where = f"{directory}/start"
    _call("sk", "save", {f"w{n}": torch.ones(rows, 1024) for n in range(TENSORS)}, where)
    command = [sys.executable, "-c", START, where, str(rows), str(TENSORS)]
    for how in ("after save", "cold"):
        runs, plain = [], []
        for _ in range(rounds):
            _wait_until_cached(where) if how == "after save" else pagecache.chill(where)
            plain.append(1000 * raw(where, direct=how == "cold", touched=False))
            if how == "cold":
                pagecache.chill(where)  # also of what a process imports, if we may
            runs.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        imported, first, all_of_it = (median(map(float, each)) for each in zip(*runs, strict=True))
        yield (
            f"a new process, {gb:.2f} GB into the meta device, {how}: import {imported:.0f} ms after torch, the call until"
            f" the first read {first:.0f} ms, the whole call {all_of_it:.0f} ms; plain reads into new memory {median(plain):.0f} ms"
        )
    shutil.rmtree(where)


def run(directory: str, gb: float, rounds: int, only: str | None = None) -> None:
    """Measure and print everything, or one part."""
    with RankPool(8) as pool:
        for part, ranks, size in PARTS:
            if only in (None, part):
                print(f"loads, {part}, ranks: {ranks}, {gb * size:.2f} GB", flush=True)
                sharded = part == "sharded"
                print("\n".join(measure(pool, directory, gb * size, rounds, ranks=ranks, sharded=sharded)), flush=True)
        if only in (None, "start"):
            print("\n".join(measure_start(directory, gb, rounds)), flush=True)
        if only in (None, "s3"):
            with S3Server(Path(directory) / "s3") as server:
                print("an object store (SeaweedFS)\n" + "\n".join(measure_bucket(pool, gb / 6, rounds, server)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--only", choices=("one", "sharded", "replicated", "s3", "start"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardkeep-loads-", dir=args.dir) as directory:
        run(directory, args.gb, args.rounds, args.only)


if __name__ == "__main__":
    main()
