"""
`shardkeep bench`: how fast checkpoints are saved and loaded here, compared with the raw disk or store and with torch.

Each contender runs in a process of its own, one after the other, in a new directory below the given path that is deleted
at the end, also after a failure. The process runs this module:

    python -m shardkeep.cli.bench CONTENDER PATH BYTES ROUNDS THREADS

CONTENDER is `raw` (large writes and reads of several files that bypass the page cache), `plain` (puts and gets of a store,
as many at once as a save makes), `shardkeep`, or a module with torch's `save` and `load`. It writes and reads the same
state several times and prints the seconds as JSON. Before every read, files of a disk are dropped from the page cache.
After it, the state is compared with what was written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median
from typing import Any

from shardkeep.cli import Command
from shardkeep.cli.output import Table, UsageError, echo, echo_err, format_size, print_json, printable, styled
from shardkeep.errors import CheckpointError
from shardkeep.options import Options
from shardkeep.storage.base import Root, Store, local_path, preferred_requests
from shardkeep.storage.local import available_memory
from shardkeep.storage.resolve import open_root, open_store

_TORCH = "torch.distributed.checkpoint"
_SPARE_NBYTES = 256 << 20
"""Space to leave free on the disk."""
_ARRIVES_S = 1.0
"""How long requests of a killed process may take to reach the service. What arrives later would not be deleted."""


class ContenderFailed(CheckpointError, RuntimeError):
    """A contender ended without a result."""


@dataclass(frozen=True)
class Result:
    """The measurements of one contender."""

    name: str
    nbytes: int
    write_s: list[float]
    read_s: list[float]

    @property
    def write_gb_per_s(self) -> float:
        """Median of all rounds."""
        return self.nbytes / median(self.write_s) / 1e9

    @property
    def read_gb_per_s(self) -> float:
        """Median of all rounds."""
        return self.nbytes / median(self.read_s) / 1e9


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a directory on the disk to measure, or a URL in a store")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender (default: 3)")
    parser.add_argument(
        "--torch", action=argparse.BooleanOptionalAction, default=True, help="also measure torch's DCP (default)"
    )


def _run(args: argparse.Namespace) -> int:
    nbytes = int(args.gb * 1e9)
    if nbytes < 1 << 24 or args.rounds < 1:
        raise UsageError(f"--gb {args.gb} --rounds {args.rounds}", hint="at least 0.02 GB and 1 round")
    root = open_root(args.path, direct=False)
    on_disk = local_path(root) is not None
    _check_memory(nbytes)
    _check_place(args.path, root, nbytes)
    if args.torch and not on_disk and not args.json:
        echo_err("torch DCP is left out: it is only measured on disks", "dim")
    names = ["raw" if on_disk else "plain", "shardkeep", *([_TORCH] if args.torch and on_disk else [])]
    results: list[Result] = []
    with _scratch_place(root, root.url if on_disk else args.path) as where:
        for name in names:
            if not args.json:
                echo_err(f"measuring {_title(name)} …", "dim")
            try:
                results.append(_measure(name, where, nbytes, args.rounds))
            except ContenderFailed as exc:
                if name != _TORCH:
                    raise
                echo_err(str(exc), "yellow")
    url = os.path.abspath(root.url) if on_disk else root.url
    if args.json:
        print_json(_results_json(url, args, results))
    else:
        _print(url, args, nbytes, results)
    return 0


def _check_place(where: str, root: Root, nbytes: int) -> None:
    if where.lower().startswith("memory://"):
        raise UsageError(
            f"{where}: memory:// belongs to one process, and each contender is a process of its own",
            hint="measure a disk in memory: /dev/shm",
        )
    if local_path(root) is None:
        next(root.places(), None)  # reports a missing bucket or wrong credentials before anything is measured
        return
    if not os.path.isdir(root.url):
        raise UsageError(f"{where} is not a directory", hint="give a directory on the disk to measure, or a URL")
    free = shutil.disk_usage(root.url).free
    if free < nbytes + _SPARE_NBYTES:
        raise UsageError(
            f"{where}: {format_size(free)} are free, but {format_size(nbytes + _SPARE_NBYTES)} are needed",
            hint="choose a smaller --gb",
        )


def _check_memory(nbytes: int) -> None:
    memory = available_memory()
    if memory < nbytes * 1.2 + 1e9:
        raise UsageError(
            f"a state of {format_size(nbytes)} does not fit into the {format_size(memory)} of free memory",
            hint="choose a smaller --gb",
        )


@contextmanager
def _scratch_place(root: Root, url: str) -> Iterator[str]:
    """Name a new directory below a URL, and delete it at the end, also after Ctrl-C or SIGTERM."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    name = f"shardkeep-bench-{secrets.token_hex(8)}"
    try:
        yield f"{url}{name}" if url.endswith("/") else f"{url}/{name}"
    except BaseException:
        if local_path(root) is None:
            time.sleep(_ARRIVES_S)
        raise
    finally:
        try:
            root.remove(name)
        except CheckpointError as exc:
            echo_err(f"{root.url}/{name} could not be deleted: {exc}", "yellow")
        signal.signal(signal.SIGTERM, before)


def _measure(name: str, where: str, nbytes: int, rounds: int) -> Result:
    threads = Options().io_threads
    words = [sys.executable, "-m", "shardkeep.cli.bench", name, where, str(nbytes), str(rounds), str(threads)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603 - ours
    try:
        out, err = job.communicate()
    except BaseException:
        job.kill()
        job.wait()
        raise
    if job.returncode:
        last = err.strip().splitlines()[-1:] or [f"exit code {job.returncode}"]
        raise ContenderFailed(f"{_title(name)} could not be measured: {last[0]}")
    found = json.loads(out.strip().splitlines()[-1])
    return Result(name, found["nbytes"], found["write_s"], found["read_s"])


def _title(name: str) -> str:
    return {"raw": "raw disk", "plain": "plain put and get", _TORCH: "torch DCP"}.get(name, name)


def _results_json(where: str, args: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    return {
        "path": where,
        "gb": args.gb,
        "rounds": args.rounds,
        "results": [
            {**asdict(each), "write_gb_per_s": each.write_gb_per_s, "read_gb_per_s": each.read_gb_per_s}
            for each in results
        ],
    }


def _print(where: str, args: argparse.Namespace, nbytes: int, results: list[Result]) -> None:
    raw = results[0]
    share = "of-disk" if raw.name == "raw" else "of-plain"
    echo(f"{printable(where)}: a checkpoint of {format_size(nbytes)}, median of {args.rounds}\n")
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
        echo(f"\n{styled(f'shardkeep saves {write:.1f}x and loads {read:.1f}x as fast as torch DCP here', 'bold')}")


# -- one contender, in its own process

_TENSOR_NBYTES = 64 << 20
_REQUEST_NBYTES = 8 << 20
_MAX_FILES = 4


class Contender:
    """Something to measure. One without a state in memory overrides only `write` and `read`."""

    nbytes: int
    """Bytes that are written: the requested size, rounded down."""

    def write(self, path: str) -> None:
        """Write everything, durable on return."""
        raise NotImplementedError

    def read(self, path: str) -> None:
        """Read everything."""
        raise NotImplementedError

    def digest(self) -> int:
        """Return a hash of the state in memory."""
        return 0

    def forget(self) -> None:
        """Clear the state in memory, so that only a read restores it."""


class RawDisk(Contender):
    """The disk without a checkpoint library."""

    def __init__(self, nbytes: int, threads: int) -> None:
        files = max(1, min(_MAX_FILES, threads, nbytes // _REQUEST_NBYTES))
        self._file_nbytes = max(_REQUEST_NBYTES, nbytes // files // _REQUEST_NBYTES * _REQUEST_NBYTES)
        self._buffers = [mmap.mmap(-1, _REQUEST_NBYTES) for _ in range(files)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(_REQUEST_NBYTES)
        self.nbytes = self._file_nbytes * files

    def write(self, path: str) -> None:
        os.makedirs(path)
        self._transfer(path, os.O_WRONLY | os.O_CREAT, os.pwrite)

    def read(self, path: str) -> None:
        self._transfer(path, os.O_RDONLY, lambda fd, into, at: os.preadv(fd, [into], at))

    def _transfer(self, path: str, flags: int, move: Callable[[int, memoryview, int], int]) -> None:
        def transfer(number: int, buffer: mmap.mmap) -> None:
            fd = _open_direct(os.path.join(path, f"raw-{number}"), flags)
            try:
                at = 0
                while at < self._file_nbytes:
                    moved = move(fd, memoryview(buffer)[at % _REQUEST_NBYTES :], at)
                    if not moved:
                        raise OSError(f"{path}/raw-{number} ends at {at}")
                    at += moved
                if flags & os.O_WRONLY:
                    os.fsync(fd)
            finally:
                os.close(fd)

        with ThreadPoolExecutor(len(self._buffers)) as pool:
            list(pool.map(transfer, itertools.count(), self._buffers))


def _open_direct(path: str, flags: int) -> int:
    """Open a file, bypassing the page cache if the file system supports it."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError:
        return os.open(path, flags, 0o644)


class PlainStore(Contender):
    """The store without a checkpoint library."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._threads = threads
        self._data = os.urandom(_REQUEST_NBYTES)
        self._names = [f"plain-{i}" for i in range(max(1, nbytes // _REQUEST_NBYTES))]
        self.nbytes = len(self._names) * _REQUEST_NBYTES

    def write(self, path: str) -> None:
        self._each(path, lambda store, name: store.put(name, self._data, replace=True))

    def read(self, path: str) -> None:
        self._each(path, lambda store, name: store.get(name, limit=_REQUEST_NBYTES))

    def _each(self, path: str, work: Callable[[Store, str], object]) -> None:
        store = open_store(path, direct=False)
        with ThreadPoolExecutor(preferred_requests(store, self._threads)) as pool:
            list(pool.map(lambda name: work(store, name), self._names))


class StateContender(Contender):
    """A state that a module saves and loads: shardkeep's, or one with the `save` and `load` of torch's DCP."""

    def __init__(self, nbytes: int, module: str) -> None:
        import numpy as np  # noqa: PLC0415 - the raw contenders do not need torch and numpy
        import torch  # noqa: PLC0415

        self._module: Any = import_module(module)
        self._native = module == "shardkeep"
        random = np.random.default_rng(0)
        count = max(1, nbytes // _TENSOR_NBYTES)
        size = nbytes // count // 4096 * 1024
        self.state = {
            "model": {
                f"layer{i}.weight": torch.from_numpy(np.frombuffer(bytearray(random.bytes(4 * size)), np.float32))
                for i in range(count)
            }
        }
        self.nbytes = 4 * size * count

    def write(self, path: str) -> None:
        self._call(self._module.save, path)

    def read(self, path: str) -> None:
        self._call(self._module.load, path)

    def _call(self, function: Callable[..., object], path: str) -> None:
        function(self.state, path) if self._native else function(self.state, checkpoint_id=path, no_dist=True)

    def digest(self) -> int:
        import xxhash  # noqa: PLC0415

        found = xxhash.xxh3_64()
        for tensor in self.state["model"].values():
            found.update(tensor.numpy().data)
        return found.intdigest()

    def forget(self) -> None:
        for tensor in self.state["model"].values():
            tensor.zero_()


def drop_cached(path: str) -> None:
    """Drop the files below a path from the page cache; otherwise a read would measure memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for folder, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def measure(contender: Contender, where: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each write and each read."""
    written, read = [], []
    root = open_root(where, direct=False)
    for number in range(rounds):
        path = f"{where}/round-{number}"
        before = contender.digest()
        began = time.perf_counter()
        contender.write(path)
        written.append(time.perf_counter() - began)
        drop_cached(path)  # does nothing for a URL
        contender.forget()
        began = time.perf_counter()
        contender.read(path)
        read.append(time.perf_counter() - began)
        if contender.digest() != before:
            raise SystemExit("the state that was read is not the one that was written")
        root.remove(f"round-{number}")
    return written, read


def _contender(name: str, nbytes: int, threads: int) -> Contender:
    raw = {"raw": RawDisk, "plain": PlainStore}.get(name)
    return raw(nbytes, threads) if raw else StateContender(nbytes, name)


def main(argv: list[str]) -> int:
    """Measure one contender."""
    name, where, nbytes, rounds, threads = argv[0], argv[1], int(argv[2]), int(argv[3]), int(argv[4])
    # A small round first, so that imports and other costs per process are not measured.
    try:
        measure(_contender(name, 1 << 20, threads), where, 1)
        contender = _contender(name, nbytes, threads)
        written, read = measure(contender, where, rounds)
    except CheckpointError as exc:
        print(" ".join(exc.message.split()), file=sys.stderr)  # the parent shows the last line
        return 2
    print(json.dumps({"nbytes": contender.nbytes, "write_s": written, "read_s": read}))
    return 0


COMMANDS = {
    "bench": Command(
        _configure,
        _run,
        examples="""
  shardkeep bench /scratch
  shardkeep bench s3://bucket/scratch --gb 1
  shardkeep bench /scratch --gb 16 --rounds 5
  shardkeep bench /scratch --no-torch --json
""",
    )
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
