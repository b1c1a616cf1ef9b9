"""
`shardkeep bench`: how fast checkpoints are saved and loaded here, compared with the raw disk or store and with torch.

Each contender runs in a process of its own, one after the other, in a new directory below the given path that is deleted
at the end, also after a failure. The process runs this module:

    python -m shardkeep.cli.bench CONTENDER PATH BYTES ROUNDS

CONTENDER is `raw` (large writes and reads of several files that bypass the page cache), `plain` (puts and gets of a store,
as many at once as a save makes), `shardkeep`, or a module with torch's `save` and `load`. It writes and reads the same
state several times and prints the seconds as JSON. Before every read, files of a disk are dropped from the page cache.
After it, the state is compared with what was written.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from shardkeep.cli import argument, command
from shardkeep.cli.output import Table, UsageError, echo_err, format_size, print_json, printable, styled
from shardkeep.errors import CheckpointError
from shardkeep.options import Options, available_memory
from shardkeep.storage.base import Root, Store, local_path, preferred_requests
from shardkeep.storage.resolve import open_root, open_store

if TYPE_CHECKING:
    import torch

_TORCH = "torch.distributed.checkpoint"
_TITLES = {"raw": "raw disk", "plain": "plain put and get", "shardkeep": "shardkeep", _TORCH: "torch DCP"}
_SPARE_NBYTES = 256 << 20
"""Space to leave free on the disk."""
_ARRIVES_S = 1.0
"""How long requests of a killed process may take to reach the service. What arrives later would not be deleted."""


class ContenderFailed(CheckpointError, RuntimeError):
    """A contender ended without a result."""


@dataclass
class Result:
    """The measurements of one contender. Speeds are those of the median round."""

    name: str
    nbytes: int
    write_s: list[float]
    read_s: list[float]
    write_gb_per_s: float = field(init=False)
    read_gb_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.write_gb_per_s = self.nbytes / median(self.write_s) / 1e9
        self.read_gb_per_s = self.nbytes / median(self.read_s) / 1e9


@command(
    argument("path", metavar="PATH", help="a directory on the disk to measure, or a URL in a store"),
    argument("--gb", type=float, default=2.0, help="size of the checkpoint (default: 2)"),
    argument("--rounds", type=int, default=3, help="measurements of each contender (default: 3)"),
    argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="also measure torch's DCP (default)"),
    examples="""
  shardkeep bench /scratch
  shardkeep bench s3://bucket/scratch --gb 1
  shardkeep bench /scratch --gb 16 --rounds 5
  shardkeep bench /scratch --no-torch --json
""",
)
def bench(args: argparse.Namespace) -> int:
    nbytes = int(args.gb * 1e9)
    if nbytes < 1 << 24 or args.rounds < 1:
        raise UsageError(f"--gb {args.gb} --rounds {args.rounds}", hint="at least 0.02 GB and 1 round")
    root = open_root(args.path, direct=False)
    on_disk = local_path(root) is not None
    _check_room(args.path, root, nbytes)
    if args.torch and not on_disk and not args.json:
        echo_err("torch DCP is left out: it is only measured on disks", "dim")
    names = ["raw" if on_disk else "plain", "shardkeep", *([_TORCH] if args.torch and on_disk else [])]
    results: list[Result] = []
    with _scratch_place(root, root.url if on_disk else args.path) as where:
        for name in names:
            if not args.json:
                echo_err(f"measuring {_TITLES[name]} …", "dim")
            try:
                results.append(_measure(name, where, nbytes, args.rounds))
            except ContenderFailed as exc:
                if name != _TORCH:
                    raise
                echo_err(str(exc), "yellow")
    url = os.path.abspath(root.url) if on_disk else root.url
    if args.json:
        print_json({"path": url, "gb": args.gb, "rounds": args.rounds, "results": list(map(asdict, results))})
        return 0
    print(f"{printable(url)}: a checkpoint of {format_size(nbytes)}, median of {args.rounds}\n")
    raw = results[0]
    share = "of-disk" if on_disk else "of-plain"
    table = Table(["GB/s", "write", share, "read", share], right={"write", share, "read"})
    for each in results:
        speeds = ((each.write_gb_per_s, raw.write_gb_per_s), (each.read_gb_per_s, raw.read_gb_per_s))
        table.add(_TITLES[each.name], *(cell for own, of in speeds for cell in (f"{own:.2f}", f"{own / of:.0%}")))
    table.print()
    if results[-1].name == _TORCH:
        ours, theirs = results[-2:]
        write, read = ours.write_gb_per_s / theirs.write_gb_per_s, ours.read_gb_per_s / theirs.read_gb_per_s
        print(f"\n{styled(f'shardkeep saves {write:.1f}x and loads {read:.1f}x as fast as torch DCP here', 'bold')}")
    return 0


def _check_room(where: str, root: Root, nbytes: int) -> None:
    """Raise `UsageError` if memory or the disk is too small, or the place is not one to measure."""
    memory = available_memory()
    if memory < nbytes * 1.2 + 1e9:
        raise UsageError(
            f"a state of {format_size(nbytes)} does not fit into the {format_size(memory)} of free memory",
            hint="choose a smaller --gb",
        )
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
    words = [sys.executable, "-m", "shardkeep.cli.bench", name, where, str(nbytes), str(rounds)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:  # noqa: S603 - ours
        try:
            out, err = job.communicate()
        except BaseException:
            job.kill()
            raise
    if job.returncode:
        last = err.strip().splitlines()[-1:] or [f"exit code {job.returncode}"]
        raise ContenderFailed(f"{_TITLES[name]} could not be measured: {last[0]}")
    return Result(name, **json.loads(out.strip().splitlines()[-1]))


# -- one contender, in its own process

_TENSOR_NBYTES = 64 << 20
_REQUEST_NBYTES = 8 << 20
_MAX_FILES = 4


class Contender(NamedTuple):
    """Something to measure."""

    nbytes: int
    """Bytes that are written: the requested size, rounded down."""
    write: Callable[[str], object]
    """Writes everything below a path or URL, durable on return."""
    read: Callable[[str], object]
    tensors: Sequence[torch.Tensor] = ()
    """The state in memory that `read` restores; none for a disk or store."""

    def digest(self) -> str:
        """Return a hash of the state in memory."""
        found = xxhash.xxh3_128()
        for tensor in self.tensors:
            found.update(tensor.numpy().data)
        return found.hexdigest()


def raw_disk(nbytes: int) -> Contender:
    """Measure the disk without a checkpoint library: large transfers of several files that bypass the page cache."""
    files = max(1, min(_MAX_FILES, Options().io_threads, nbytes // _REQUEST_NBYTES))
    file_nbytes = max(_REQUEST_NBYTES, nbytes // files // _REQUEST_NBYTES * _REQUEST_NBYTES)
    buffers = [mmap.mmap(-1, _REQUEST_NBYTES) for _ in range(files)]
    for buffer in buffers:
        buffer[:] = os.urandom(_REQUEST_NBYTES)

    def transfer(path: str, flags: int, move: Callable[[int, memoryview, int], int]) -> None:
        def one(number: int, buffer: mmap.mmap) -> None:
            file = os.path.join(path, f"raw-{number}")
            try:
                fd = os.open(file, flags | getattr(os, "O_DIRECT", 0), 0o644)
            except OSError:  # the file system has no direct I/O
                fd = os.open(file, flags, 0o644)
            try:
                at = 0
                while at < file_nbytes:
                    moved = move(fd, memoryview(buffer)[at % _REQUEST_NBYTES :], at)
                    if not moved:
                        raise OSError(f"{file} ends at {at}")
                    at += moved
                if flags & os.O_WRONLY:
                    os.fsync(fd)
            finally:
                os.close(fd)

        os.makedirs(path, exist_ok=True)
        with ThreadPoolExecutor(files) as pool:
            list(pool.map(one, range(files), buffers))

    return Contender(
        files * file_nbytes,
        lambda path: transfer(path, os.O_WRONLY | os.O_CREAT, os.pwrite),
        lambda path: transfer(path, os.O_RDONLY, lambda fd, into, at: os.preadv(fd, [into], at)),
    )


def plain_store(nbytes: int) -> Contender:
    """Measure a store without a checkpoint library: puts and gets, as many at once as a save makes."""
    data = os.urandom(_REQUEST_NBYTES)
    names = [f"plain-{i}" for i in range(max(1, nbytes // _REQUEST_NBYTES))]

    def each(path: str, work: Callable[[Store, str], object]) -> None:
        store = open_store(path, direct=False)
        with ThreadPoolExecutor(preferred_requests(store, Options().io_threads)) as pool:
            list(pool.map(partial(work, store), names))

    return Contender(
        len(names) * _REQUEST_NBYTES,
        lambda path: each(path, lambda store, name: store.put(name, data, replace=True)),
        lambda path: each(path, lambda store, name: store.get(name, limit=_REQUEST_NBYTES)),
    )


def saved_state(module: str, nbytes: int) -> Contender:
    """Measure a state that a module saves and loads: shardkeep, or one with the `save` and `load` of torch's DCP."""
    import torch  # noqa: PLC0415 - the raw contenders do not need it

    found: Any = import_module(module)
    count = max(1, nbytes // _TENSOR_NBYTES)
    size = nbytes // count // 4096 * 1024
    tensors = [torch.frombuffer(bytearray(os.urandom(4 * size)), dtype=torch.float32) for _ in range(count)]
    state = {"model": {f"layer{i}.weight": tensor for i, tensor in enumerate(tensors)}}

    def call(function: Callable[..., object], path: str) -> None:
        function(state, path) if module == "shardkeep" else function(state, checkpoint_id=path, no_dist=True)

    return Contender(4 * size * count, partial(call, found.save), partial(call, found.load), tensors)


_CONTENDERS = {"raw": raw_disk, "plain": plain_store}


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
        for tensor in contender.tensors:
            tensor.zero_()
        began = time.perf_counter()
        contender.read(path)
        read.append(time.perf_counter() - began)
        if contender.digest() != before:
            raise SystemExit("the state that was read is not the one that was written")
        root.remove(f"round-{number}")
    return written, read


def main(name: str, where: str, nbytes: str, rounds: str) -> int:
    """Measure one contender."""
    make = _CONTENDERS.get(name) or partial(saved_state, name)
    try:
        measure(make(1 << 20), where, 1)  # so that imports and other costs per process are not measured
        contender = make(int(nbytes))
        written, read = measure(contender, where, int(rounds))
    except CheckpointError as exc:
        print(" ".join(exc.message.split()), file=sys.stderr)  # the parent shows the last line
        return 2
    print(json.dumps({"nbytes": contender.nbytes, "write_s": written, "read_s": read}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
