"""
`shardkeep bench`: how fast checkpoints are saved and loaded here, next to what the disk can do and to torch.

Each contender runs in a process of its own (`cli.bench_job`), one after the other, in a new directory below the one that
was asked for. That is removed at the end, whatever the end is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardkeep.cli.output import Table, print_json, remark, say, shown, size_text, styled
from shardkeep.cli.problems import NotUsable
from shardkeep.errors import CheckpointError
from shardkeep.options import Options

EXAMPLES = """
  shardkeep bench /scratch
  shardkeep bench /scratch --gb 16 --rounds 5
  shardkeep bench /scratch --no-torch --json
"""
_TORCH = "torch.distributed.checkpoint"
_SPARE_NBYTES = 256 << 20
"""Left free on the disk."""


class ContenderFailed(CheckpointError, RuntimeError):
    """A contender ended without a result."""


@dataclass(frozen=True)
class Result:
    """What one contender did."""

    name: str
    nbytes: int
    write_s: list[float]
    read_s: list[float]

    @property
    def write_gb_per_s(self) -> float:
        """The median of all rounds."""
        return self.nbytes / median(self.write_s) / 1e9

    @property
    def read_gb_per_s(self) -> float:
        """The median of all rounds."""
        return self.nbytes / median(self.read_s) / 1e9


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("dir", metavar="DIR", help="a directory on the disk to measure")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default: 3)")
    parser.add_argument(
        "--torch", action=argparse.BooleanOptionalAction, default=True, help="measure torch's DCP, too (default)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    nbytes = int(args.gb * 1e9)
    if nbytes < 1 << 24 or args.rounds < 1:
        raise NotUsable(f"--gb {args.gb} --rounds {args.rounds}", hint="at least 0.02 GB and 1 round")
    _check_room(args.dir, nbytes)
    names = ["raw", "shardkeep", *([_TORCH] if args.torch else [])]
    results: list[Result] = []
    with _own_directory(args.dir) as where:
        for name in names:
            if not args.json:
                remark(f"measuring {_title(name)} …", "dim")
            try:
                results.append(_measure(name, where, nbytes, args.rounds))
            except ContenderFailed as exc:
                if name != _TORCH:
                    raise
                remark(f"{_title(name)}: {exc}", "yellow")
    if args.json:
        print_json(_document(args, results))
    else:
        _print(args, nbytes, results)
    return 0


def _check_room(where: str, nbytes: int) -> None:
    if not os.path.isdir(where):
        raise NotUsable(f"{where} is no directory", hint="give a directory on the disk to measure")
    free = shutil.disk_usage(where).free
    if free < nbytes + _SPARE_NBYTES:
        raise NotUsable(
            f"{where}: {size_text(free)} are free, and {size_text(nbytes + _SPARE_NBYTES)} are needed",
            hint="measure less: --gb",
        )
    memory = _free_memory()
    if memory is not None and memory < nbytes * 1.2 + 1e9:
        raise NotUsable(
            f"a state of {size_text(nbytes)} does not fit the {size_text(memory)} of memory that are free",
            hint="measure less: --gb",
        )


def _free_memory() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
    return int(found.split()[1]) * 1024 if found else None


@contextmanager
def _own_directory(where: str) -> Iterator[str]:
    """Make a directory and remove it, also when the command is interrupted or told to end."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    made = tempfile.mkdtemp(prefix="shardkeep-bench-", dir=where)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _measure(name: str, where: str, nbytes: int, rounds: int) -> Result:
    threads = Options().io_threads
    words = [sys.executable, "-m", "shardkeep.cli.bench_job", name, where, str(nbytes), str(rounds), str(threads)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603 - ours
    try:
        out, err = job.communicate()
    except BaseException:
        job.kill()
        job.wait()
        raise
    if job.returncode:
        last = err.strip().splitlines()[-1:] or [f"it ended with {job.returncode}"]
        raise ContenderFailed(f"{_title(name)} could not be measured: {last[0]}")
    found = json.loads(out.strip().splitlines()[-1])
    return Result(name, found["nbytes"], found["write_s"], found["read_s"])


def _title(name: str) -> str:
    return {"raw": "the disk alone", _TORCH: "torch DCP"}.get(name, name)


def _document(args: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    return {
        "dir": args.dir,
        "gb": args.gb,
        "rounds": args.rounds,
        "results": [
            {
                "name": each.name,
                "nbytes": each.nbytes,
                "write_gb_per_s": each.write_gb_per_s,
                "read_gb_per_s": each.read_gb_per_s,
                "write_s": each.write_s,
                "read_s": each.read_s,
            }
            for each in results
        ],
    }


def _print(args: argparse.Namespace, nbytes: int, results: list[Result]) -> None:
    raw = results[0]
    say(f"{shown(os.path.abspath(args.dir))}: a checkpoint of {size_text(nbytes)}, median of {args.rounds}\n")
    table = Table(["GB/s", "write", "of-disk", "read", "of-disk"], right="write of-disk read")
    for each in results:
        table.add(
            _title(each.name),
            f"{each.write_gb_per_s:.2f}",
            f"{each.write_gb_per_s / raw.write_gb_per_s:.0%}",
            f"{each.read_gb_per_s:.2f}",
            f"{each.read_gb_per_s / raw.read_gb_per_s:.0%}",
        )
    table.print()
    by_name = {each.name: each for each in results}
    if _TORCH in by_name:
        ours, theirs = by_name["shardkeep"], by_name[_TORCH]
        write, read = ours.write_gb_per_s / theirs.write_gb_per_s, ours.read_gb_per_s / theirs.read_gb_per_s
        say(f"\n{styled(f'shardkeep saves {write:.1f}x and loads {read:.1f}x as fast as torch DCP here', 'bold')}")
