"""
`shardkeep bench`: how fast checkpoints are saved and loaded here, compared with the raw disk or store and with torch.

Everything goes into a new directory below the given path that is deleted at the end, also after a failure. Before every
read, files of a disk are dropped from the page cache.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

from shardkeep.cli import argument, command
from shardkeep.cli.output import Table, UsageError, echo_err, format_size, print_json, printable, styled
from shardkeep.errors import CheckpointError
from shardkeep.options import Options, available_memory
from shardkeep.storage.base import Root, Store, local_path, preferred_requests
from shardkeep.storage.buffers import aligned_buffer
from shardkeep.storage.local import drop_from_cache
from shardkeep.storage.resolve import open_root, open_store

_TORCH = "torch.distributed.checkpoint"
_TITLES = {"raw": "raw", "shardkeep": "shardkeep", _TORCH: "torch DCP"}
_SPARE_NBYTES = 256 << 20
"""Space to leave free on the disk."""
_TENSOR_NBYTES = 64 << 20
_REQUEST_NBYTES = 8 << 20


class Result(NamedTuple):
    name: str
    nbytes: int
    write_s: list[float]
    read_s: list[float]

    @property
    def speeds(self) -> tuple[float, float]:
        """GB/s of the median write and read."""
        return self.nbytes / median(self.write_s) / 1e9, self.nbytes / median(self.read_s) / 1e9


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
    names = ["raw", "shardkeep"] + [_TORCH] * (args.torch and on_disk)
    results: list[Result] = []
    with _scratch_place(root, root.url if on_disk else args.path) as where:
        for name in names:
            if not args.json:
                echo_err(f"measuring {_TITLES[name]} …", "dim")
            results.append(measure(name, where, nbytes, args.rounds))
    url = os.path.abspath(root.url) if on_disk else root.url
    if args.json:
        speeds = [dict(zip(("write_gb_per_s", "read_gb_per_s"), each.speeds, strict=True)) for each in results]
        listed = [each._asdict() | speed for each, speed in zip(results, speeds, strict=True)]
        return print_json({"path": url, "gb": args.gb, "rounds": args.rounds, "results": listed})
    print(f"{printable(url)}: a checkpoint of {format_size(nbytes)}, median of {args.rounds}\n")
    table = Table(["GB/s", "write", "of-raw", "read", "of-raw"], right={"write", "of-raw", "read"})
    for each in results:
        speeds_of = zip(each.speeds, results[0].speeds, strict=True)
        table.add(_TITLES[each.name], *(cell for own, raw in speeds_of for cell in (f"{own:.2f}", f"{own / raw:.0%}")))
    table.print()
    if results[-1].name == _TORCH:
        write, read = (ours / theirs for ours, theirs in zip(*(each.speeds for each in results[-2:]), strict=True))
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
    name = f"shardkeep-bench-{secrets.token_hex(8)}"
    try:
        yield f"{url.rstrip('/')}/{name}"
    finally:
        try:
            root.remove(name)
        except CheckpointError as exc:
            echo_err(f"{root.url}/{name} could not be deleted: {exc}", "yellow")


class Contender(NamedTuple):
    nbytes: int
    """Bytes that are written: the requested size, rounded down."""
    write: Callable[[str], object]
    """Writes everything below a path or URL, durable on return."""
    read: Callable[[str], object]


def raw_store(nbytes: int) -> Contender:
    """Measure a disk or store without a checkpoint: blobs of random bytes, as many at once as a save writes."""
    requests = max(1, min(nbytes, _TENSOR_NBYTES) // _REQUEST_NBYTES)
    blob_nbytes = requests * _REQUEST_NBYTES
    names = [f"raw-{i}" for i in range(max(1, nbytes // blob_nbytes))]
    data = aligned_buffer(_REQUEST_NBYTES)
    data[:] = os.urandom(_REQUEST_NBYTES)

    def write(store: Store, name: str) -> None:
        writer = store.create(name, blob_nbytes)
        for number in range(requests):
            writer.write_at(number * _REQUEST_NBYTES, data)
        writer.finish()

    def read(store: Store, name: str) -> None:
        into = aligned_buffer(_REQUEST_NBYTES)
        with closing(store.open(name)) as reader:
            for number in range(requests):
                reader.read_into(number * _REQUEST_NBYTES, into)

    def each(work: Callable[[Store, str], None], path: str) -> None:
        store = open_store(path, direct=Options().direct_io)
        with ThreadPoolExecutor(preferred_requests(store, Options().io_threads)) as pool:
            list(pool.map(partial(work, store), names))

    return Contender(len(names) * blob_nbytes, partial(each, write), partial(each, read))


def saved_state(module: str, nbytes: int) -> Contender:
    """Measure a state that a module saves and loads: shardkeep, or one with the `save` and `load` of torch's DCP."""
    import torch  # noqa: PLC0415 - `--help` does not need it

    found: Any = import_module(module)
    count = max(1, nbytes // _TENSOR_NBYTES)
    size = nbytes // count
    state = {f"layer{i}.weight": torch.randint(256, (size,), dtype=torch.uint8) for i in range(count)}

    def call(function: Callable[..., object], path: str) -> None:
        if module == "shardkeep":  # not kept in the page cache: a thread would read it back while it is dropped
            function(state, path, options=found.Options(keep_cached=False))
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            function(state, checkpoint_id=path, no_dist=True)

    return Contender(size * count, partial(call, found.save), partial(call, found.load))


def measure(name: str, where: str, nbytes: int, rounds: int) -> Result:
    make = raw_store if name == "raw" else partial(saved_state, name)
    _measure_round(make(1 << 20), where)  # so that imports and the like are not measured
    contender = make(nbytes)
    seconds = [_measure_round(contender, where) for _ in range(rounds)]
    return Result(name, contender.nbytes, [write for write, _ in seconds], [read for _, read in seconds])


def _measure_round(contender: Contender, where: str) -> tuple[float, float]:
    path = f"{where}/round"
    began = time.perf_counter()
    contender.write(path)
    written = time.perf_counter()
    # Otherwise a read would measure memory. A URL has no files.
    drop_from_cache(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    dropped = time.perf_counter()
    contender.read(path)
    read = time.perf_counter()
    open_root(where, direct=False).remove("round")
    return written - began, read - dropped
