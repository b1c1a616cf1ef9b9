"""
Exports, conversions and verification by one process and by several, on one machine: `python bench/exports.py`.

    jobs       `shardkeep export --jobs N` and `convert --jobs N`: what the command says that the work took, and how long the
               whole command took, with Python and torch's import
    torchrun   `sk.export`, `sk.convert` and `verify` on N ranks over gloo; the processes are started before

One and several processes take turns. Printed are medians of the rounds: seconds, seconds of CPU of all processes together,
the ratio of one process to several, and what the disk takes for the same bytes, written and read back without anything else.
A process has four threads already: where it keeps the disk or all cores busy, more processes bring nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

import shardkeep as sk

WORK = {
    "export": ["export", "{from}", "{to}", "--shard-size", "{shard}"],
    "export, bf16": ["export", "{from}", "{to}", "--shard-size", "{shard}", "--dtype", "bf16"],
    "convert, native": ["convert", "{from}", "{to}"],
}
WINDOW = 8 << 20


def make(where: Path, gb: float, tensors: int) -> None:
    each = int(gb * 1e9 / 4 / tensors)
    sk.save({"model": {f"layers.{at}.weight": torch.randn(each) for at in range(tensors)}}, where)


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of some work, and the seconds of CPU of this process and of its children that have ended."""

    def cpu_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    before, began = cpu_s(), time.perf_counter()
    work()
    return time.perf_counter() - began, cpu_s() - before


def raw(folder: Path, gb: float) -> tuple[float, float]:
    """Seconds that the disk takes to write so many bytes to eight files by four threads, and to read them."""
    block = mmap.mmap(-1, WINDOW)
    block.write(os.urandom(WINDOW))
    each = max(1, int(gb * 1e9 / 8 / WINDOW))
    direct, took = getattr(os, "O_DIRECT", 0), []
    for flags, move in ((os.O_WRONLY | os.O_CREAT, "pwrite"), (os.O_RDONLY, "preadv")):
        files = [os.open(folder / f"raw-{number}", flags | direct, 0o600) for number in range(8)]
        if move == "pwrite":
            for file in files:
                os.posix_fallocate(file, 0, each * WINDOW)

        def step(at: int, files: list[int] = files, move: str = move) -> None:
            if move == "pwrite":
                os.pwrite(files[at % 8], block, at // 8 * WINDOW)
            else:
                with mmap.mmap(-1, WINDOW) as into:
                    os.preadv(files[at % 8], [into], at // 8 * WINDOW)

        began = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(step, range(8 * each)))
        for file in files:
            os.fsync(file)
            os.close(file)
        took.append(time.perf_counter() - began)
    return took[0], took[1]


def command(words: list[str], jobs: int, *, threads: int = 0) -> tuple[float, float, float]:
    """Run the command line; return what it says it took, how long it took in all, and its seconds of CPU."""
    said: list[bytes] = []
    env = os.environ | ({"SHARDKEEP_IO_THREADS": str(threads)} if threads else {})
    line = [sys.executable, "-m", "shardkeep", *words, "--jobs", str(jobs), "--json"]
    whole_s, cpu_s = measured(
        lambda: said.append(subprocess.run(line, check=True, capture_output=True, env=env).stdout)
    )
    return json.loads(said[0])["seconds"], whole_s, cpu_s


def report(name: str, alone: list[tuple[float, ...]], shared: list[tuple[float, ...]], many: int) -> None:
    one, several = ([median(each) for each in zip(*rows, strict=True)] for rows in (alone, shared))
    ratios = sorted(a[0] / b[0] for a, b in zip(alone, shared, strict=True))
    whole = f"; whole command {one[1]:.2f} and {several[1]:.2f} s" if len(one) > 2 else ""
    print(
        f"{name}: 1 process {one[0]:.2f} s (CPU {one[-1]:.2f}), {many} processes {several[0]:.2f} s (CPU {several[-1]:.2f}),"
        f" ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}){whole}",
        flush=True,
    )


def run_jobs(folder: Path, args: argparse.Namespace) -> None:
    for name, words in WORK.items():
        one_thread, alone, shared = ([], [], [])  # type: ignore[var-annotated]
        for _ in range(args.rounds):
            for rows, jobs, threads in ((one_thread, 1, 1), (alone, 1, 0), (shared, args.processes, 0)):
                to = folder / "to"
                names = {"from": folder / "from", "to": to, "shard": args.shard_size}
                rows.append(command([word.format(**names) for word in words], jobs, threads=threads))
                shutil.rmtree(to)
        print(f"one process with one thread: {median(row[0] for row in one_thread):.2f} s")
        report(f"shardkeep {name}", alone, shared, args.processes)


def run_ranks(folder: Path, args: argparse.Namespace) -> None:
    """Be one rank of torchrun."""
    torch.distributed.init_process_group("gloo")
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    source, to = folder / "from", folder / "to"
    kinds: dict[str, Callable[[object], object]] = {
        "sk.export": lambda ranks: sk.export(source, to, max_shard_bytes=args.shard_size, group=ranks),
        "sk.convert": lambda ranks: sk.convert(source, to, group=ranks),
        "verify": lambda ranks: sk.open(source).verify(group=ranks),
    }
    ranks = os.environ["LOCAL_WORLD_SIZE"]
    for name, work in kinds.items():
        rows: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
        for _ in range(args.rounds):
            for shares, found in rows.items():
                torch.distributed.barrier()
                os.environ["LOCAL_WORLD_SIZE"] = ranks if shares else "1"  # alone, a process takes all cores
                took = torch.tensor(measured(lambda: work(group) if shares else rank or work(None)))  # noqa: B023
                every = [torch.empty_like(took) for _ in range(group.size())]
                torch.distributed.all_gather(every, took)
                found.append((max(float(each[0]) for each in every), sum(float(each[1]) for each in every)))
                if rank == 0:
                    shutil.rmtree(to, ignore_errors=True)
        if rank == 0:
            report(f"{name}, torchrun", rows[False], rows[True], args.processes)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--tensors", type=int, default=80)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shard-size", default="250MB", help="of the files: each process writes some of them")
    parser.add_argument("--folder", default=".", help="on the disk to measure, or /dev/shm for none")
    parser.add_argument("--only", choices=["jobs", "torchrun"])
    parser.add_argument("--ranks-in", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks_in:
        run_ranks(Path(args.ranks_in), args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        if not args.folder.startswith("/dev/shm"):
            wrote, read = raw(folder, args.gb)
            print(f"the disk alone: {args.gb:g} GB written in {wrote:.2f} s, read in {read:.2f} s", flush=True)
            for file in folder.glob("raw-*"):
                file.unlink()
        make(folder / "from", args.gb, args.tensors)
        if args.only != "torchrun":
            run_jobs(folder, args)
        if args.only != "jobs":
            more = ["--ranks-in", str(folder), "--rounds", str(args.rounds), "--shard-size", args.shard_size]
            launch = ["-m", "torch.distributed.run", f"--nproc-per-node={args.processes}", __file__, *more]
            subprocess.run([sys.executable, *launch, "--processes", str(args.processes)], check=True)


if __name__ == "__main__":
    main()
