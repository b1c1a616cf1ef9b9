"""
`shardkeep bench`: how fast checkpoints are saved and loaded here, next to what the disk or the store can do and to torch.

Each contender runs in a process of its own (`cli.bench_job`), one after the other, in a new place below the one that was
asked for. That is removed at the end, whatever the end is.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardkeep.cli.output import Table, print_json, remark, say, shown, size_text, styled
from shardkeep.cli.problems import NotUsable
from shardkeep.errors import CheckpointError
from shardkeep.options import Options
from shardkeep.store.local_root import LocalRoot
from shardkeep.store.memory import MemoryRoot
from shardkeep.store.place import open_root
from shardkeep.store.roots import Root
from shardkeep.store.uploads import sweep

EXAMPLES = """
  shardkeep bench /scratch
  shardkeep bench s3://bucket/scratch --gb 1
  shardkeep bench /scratch --gb 16 --rounds 5
  shardkeep bench /scratch --no-torch --json
"""
_TORCH = "torch.distributed.checkpoint"
_SPARE_NBYTES = 256 << 20
"""Left free on the disk."""
_ARRIVES_S = 1.0
"""After that, what a process that was killed had sent to a service is there, and can be removed."""


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
    parser.add_argument(
        "path", metavar="PATH", help="a directory on the disk to measure, or the URL of a place in a store"
    )
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
    root = open_root(args.path, direct=False)
    on_disk = isinstance(root, LocalRoot)
    _check_memory(nbytes)
    _check_place(args.path, root, nbytes)
    if args.torch and not on_disk and not args.json:
        remark("torch DCP is left out: it is measured on disks", "dim")
    names = ["raw" if on_disk else "plain", "shardkeep", *([_TORCH] if args.torch and on_disk else [])]
    results: list[Result] = []
    with _own_place(root, root.url if on_disk else args.path) as where:
        for name in names:
            if not args.json:
                remark(f"measuring {_title(name)} …", "dim")
            try:
                results.append(_measure(name, where, nbytes, args.rounds))
            except ContenderFailed as exc:
                if name != _TORCH:
                    raise
                remark(str(exc), "yellow")
    shown = os.path.abspath(root.url) if on_disk else root.url
    if args.json:
        print_json(_document(shown, args, results))
    else:
        _print(shown, args, nbytes, results)
    return 0


def _check_place(where: str, root: Root, nbytes: int) -> None:
    if isinstance(root, MemoryRoot):
        raise NotUsable(
            f"{where}: what is in memory:// belongs to one process, and each contender is a process of its own",
            hint="measure a disk that is in memory: /dev/shm",
        )
    if not isinstance(root, LocalRoot):
        next(root.places(), None)  # a bucket that is not there, or keys that are not good, are told of here
        return
    if not os.path.isdir(root.url):
        raise NotUsable(f"{where} is no directory", hint="give a directory on the disk to measure, or a URL")
    free = shutil.disk_usage(root.url).free
    if free < nbytes + _SPARE_NBYTES:
        raise NotUsable(
            f"{where}: {size_text(free)} are free, and {size_text(nbytes + _SPARE_NBYTES)} are needed",
            hint="measure less: --gb",
        )


def _check_memory(nbytes: int) -> None:
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
def _own_place(root: Root, url: str) -> Iterator[str]:
    """Name a new place in one that has a URL, and remove it, also when the command is interrupted or told to end."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    name = f"shardkeep-bench-{secrets.token_hex(8)}"
    try:
        yield f"{url}{name}" if url.endswith("/") else f"{url}/{name}"
    except BaseException:
        if not isinstance(root, LocalRoot):
            time.sleep(_ARRIVES_S)
            with suppress(CheckpointError):  # it is logged
                sweep(root.place(name), lambda _: True)
        raise
    finally:
        try:
            root.remove(name)
        except CheckpointError as exc:
            remark(f"{root.url}/{name} could not be removed: {exc}", "yellow")
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
    return {"raw": "the disk alone", "plain": "plain put and get", _TORCH: "torch DCP"}.get(name, name)


def _document(where: str, args: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    return {
        "path": where,
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


def _print(where: str, args: argparse.Namespace, nbytes: int, results: list[Result]) -> None:
    raw = results[0]
    share = "of-disk" if raw.name == "raw" else "of-plain"
    say(f"{shown(where)}: a checkpoint of {size_text(nbytes)}, median of {args.rounds}\n")
    table = Table(["GB/s", "write", share, "read", share], right=f"write {share} read")
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
