"""A place whose reads are counted, so that whoever waits for them sees how far they are."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from shardkeep.cli.output import (
    ReadProgress,
    echo,
    format_count,
    format_size,
    print_json,
    printable,
    styled,
    wrap_lines,
)
from shardkeep.cli.runs import base_name, is_empty, open_existing_run
from shardkeep.engine.access import keys_for
from shardkeep.engine.reader import open_checked
from shardkeep.engine.sources import find
from shardkeep.engine.torch_source import TorchSource
from shardkeep.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint, KeyMissing, WrongKey
from shardkeep.format.record import FileEntry
from shardkeep.manage.catalog import Entry
from shardkeep.opening import Checkpoint, verify_stored
from shardkeep.opening import open as open_checkpoint
from shardkeep.options import Options
from shardkeep.storage.base import BlobReader, Store
from shardkeep.storage.local import LocalStore
from shardkeep.storage.resolve import open_store

OnRead = Callable[[int], None]


def open_counting(where: str, on_read: OnRead) -> Store:
    """Open the store of a place, with its reads told to somebody."""
    direct = Options().direct_io
    store = open_store(where, direct=direct)
    if type(store) is LocalStore:  # looked at by its type where files of other programs are to be read
        return _CountingDirectory(store.url, on_read, direct=direct)
    return cast("Store", _CountingStore(store, on_read))


class _CountingStore:
    def __init__(self, inner: Store, on_read: OnRead) -> None:
        self._inner = inner
        self._on_read = on_read

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def open(self, name: str) -> BlobReader:
        return _CountingReader(self._inner.open(name), self._on_read)


class _CountingDirectory(LocalStore):
    def __init__(self, path: str, on_read: OnRead, *, direct: bool, foreign: bool = False) -> None:
        super().__init__(path, direct=direct, foreign=foreign)
        self._on_read = on_read

    def of_foreign_files(self) -> LocalStore:
        return _CountingDirectory(self.url, self._on_read, direct=self._direct, foreign=True)

    def open(self, name: str) -> BlobReader:  # type: ignore[override]  # a reader all the same
        return _CountingReader(super().open(name), self._on_read)


class _CountingReader:
    def __init__(self, reader: BlobReader, on_read: OnRead) -> None:
        self._reader = reader
        self._on_read = on_read

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        return self._reader.cached(offset, nbytes)

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        self._reader.read_into(offset, into, cached=cached)
        self._on_read(into.nbytes)

    def close(self) -> None:
        self._reader.close()


# Whether a checkpoint is what was saved: by what its record, index and headers say, or by every byte. No torch.


@dataclass(frozen=True)
class CheckResult:
    """What was found of one checkpoint."""

    problems: list[str] = field(default_factory=list)
    """What is damaged, each with the file, and the bytes and keys where that is known; or that no given key opens it."""
    unknown: str = ""
    """Why it could not be checked: the store failed, which says nothing about the checkpoint."""
    files: int = 0
    nbytes: int = 0
    """That were read and compared with their digests; without `deep`, of files whose size is right."""
    without_digests: int = 0
    """Files of which nobody took digests: their bytes can be read, but not compared with anything."""
    undecoded: int = 0
    """Files that are encrypted, and no key was given: what is stored of them was checked, not what it stands for."""
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.problems and not self.unknown


def check_checkpoint(where: str, *, deep: bool, on_read: Callable[[int], None] = lambda _: None) -> CheckResult:
    """Check the checkpoint at a place; `on_read` is told how many bytes were read, from any thread."""
    began = time.perf_counter()
    try:
        verdict = _check(where, deep=deep, on_read=on_read)
    except (DamagedCheckpoint, CheckpointNotFound) as exc:
        return CheckResult(problems=list(exc.details.get("problems", ())) or [exc.message])
    except CheckpointError as exc:
        return CheckResult(unknown=exc.message)
    return CheckResult(
        problems=verdict.problems,
        files=verdict.files,
        nbytes=verdict.nbytes,
        without_digests=verdict.without_digests,
        undecoded=verdict.undecoded,
        seconds=time.perf_counter() - began,
    )


def _check(where: str, *, deep: bool, on_read: Callable[[int], None]) -> CheckResult:
    try:
        checkpoint = open_checkpoint(open_counting(where, on_read) if deep else where)
    except (KeyMissing, WrongKey) as exc:
        problems = _wrong_keys(exc)
        try:
            report = verify_stored(open_counting(where, on_read), deep=deep)
        except DamagedCheckpoint as damaged:
            return CheckResult(problems=[*problems, *(damaged.details.get("problems") or [damaged.message])])
        return CheckResult(problems, files=report.files, nbytes=report.bytes_read, undecoded=report.undecoded)
    problems, undecoded = _keys_of_items(checkpoint)
    if deep and not problems:  # which decodes plain values, and says so where no key was given
        report = checkpoint.verify()
        return CheckResult(files=report.files, nbytes=report.bytes_read, without_digests=report.without_digests)
    files = checkpoint.record.files
    return CheckResult(
        [*problems, *shallow_problems(checkpoint)],
        files=len(files),
        nbytes=sum(nbytes for file in files for _, nbytes in file.at_rest),
        without_digests=sum(not file.block_nbytes for file in files),
        undecoded=undecoded,
    )


def _wrong_keys(exc: KeyMissing | WrongKey) -> list[str]:
    """Say what is wrong with the keys that were given; nothing where none was, as one may check without."""
    if keys_for(Options()) is None:
        return []
    # Whoever is about to throw an old key away asks just this.
    return [f"none of the given keys opens it: {exc.message}" if isinstance(exc, WrongKey) else exc.message]


def _keys_of_items(checkpoint: Checkpoint) -> tuple[list[str], int]:
    """Try the keys on items of torch's layout, which opening does not; also say how many files no key was given for."""
    source = checkpoint.source
    if isinstance(source, TorchSource):
        try:
            source.check_keys()
        except (KeyMissing, WrongKey) as exc:
            return _wrong_keys(exc), len(checkpoint.record.files)
    return [], 0


def shallow_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Go through what is wrong with an opened checkpoint as far as index, sizes and headers tell."""
    source = checkpoint.source
    try:
        source.check_index(np.unique(np.asarray(checkpoint.index.tensors.alias, np.int64)))
    except DamagedCheckpoint as exc:
        yield exc.message
    digests = source.digests_to_verify()

    def look(file: FileEntry) -> str:
        try:
            open_checked(source.store, file, digests)[0].close()
        except DamagedCheckpoint as exc:
            return exc.message
        return ""

    files = checkpoint.record.files
    if files:
        with ThreadPoolExecutor(min(Options().io_threads, len(files))) as pool:
            yield from filter(None, pool.map(look, files))


# `shardkeep verify`: check checkpoints, one or many, and list what is damaged.

EXAMPLES = """
  shardkeep verify runs/a/step-500            record, index, sizes and headers
  shardkeep verify runs/a/step-500 --deep     every byte
  shardkeep verify runs/a runs/b --deep       every checkpoint of two runs
"""
_MIN_TIMED_S = 0.1
"""What takes less says nothing about the speed of a disk."""


class Target(NamedTuple):
    """Something that may be a checkpoint."""

    path: str
    entry: Entry | None
    """What its run's catalog says, where it was found there."""
    nbytes: int


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", nargs="+", help="checkpoints, or directories of them")
    parser.add_argument("--deep", action="store_true", help="read every byte and compare it with its digest")
    parser.add_argument("--template", metavar="NAME", help='what checkpoints of a run are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """Check all of them; 1 where one is damaged, 2 where one could not be checked and none is known to be damaged."""
    places = [place for path in args.path for place in _targets(path, args.template)]
    documents: list[dict[str, Any]] = []
    worst = 0
    for place in places:
        if place.entry is not None and place.entry.status == "unfinished":
            documents.append({"path": place.path, "status": "unfinished", "reason": place.entry.reason})
            _say(
                args,
                f"{styled('skip', 'yellow')}  {printable(place.path)}  unfinished: {printable(place.entry.reason)}",
            )
            continue
        with ReadProgress(base_name(place.path), place.nbytes) as progress:
            verdict = check_checkpoint(place.path, deep=args.deep, on_read=progress.add)
        documents.append(_document(place, verdict, deep=args.deep))
        _say(args, _text(place, verdict, deep=args.deep))
        worst = _worse(worst, 1 if verdict.problems else 2 if verdict.unknown else 0)
    if args.json:
        print_json({"sound": worst == 0, "deep": args.deep, "checkpoints": documents})
    elif len(places) > 1:
        sound = sum(document["status"] == "sound" for document in documents)
        echo(f"\n{sound:,} of {format_count(len(places), 'checkpoint')} sound")
    elif not places:
        echo("no checkpoint yet")
    if not args.json and not args.deep and places and worst == 0:
        echo(styled("no damage found by sizes and headers; --deep reads every byte", "dim"))
    return worst


def _worse(worst: int, code: int) -> int:
    return 1 if 1 in {worst, code} else max(worst, code)


def _targets(path: str, template: str | None) -> Iterator[Target]:
    """Find the checkpoint at a place, damaged or not, or those of the run that it is."""
    try:
        record = find(open_store(path, direct=Options().direct_io)).record
    except CheckpointNotFound:
        found = open_existing_run(path, template)
        entries = found.entries()
        if not entries and not is_empty(path):
            raise
        yield from (Target(found.path_of(entry), entry, entry.nbytes) for entry in entries)
        return
    except CheckpointError:  # `check` says what is wrong
        yield Target(path, None, 0)
        return
    yield Target(path, None, record.stored_nbytes)


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        echo(text)


def _text(place: Target, verdict: CheckResult, *, deep: bool) -> str:
    if verdict.problems:
        many = f"{len(verdict.problems):,} wrong" if len(verdict.problems) > 1 else "not sound"
        lines = [f"{styled('BAD', 'red')}   {printable(place.path)}  {many}"]
        return "\n".join(lines + [wrap_lines(printable(problem), "      ") for problem in verdict.problems])
    if verdict.unknown:
        return f"{styled('?', 'red')}     {printable(place.path)}  could not be checked: {printable(verdict.unknown)}"
    files = format_count(verdict.files, "file")
    undigested = verdict.without_digests
    if deep:
        speed = ""
        if verdict.seconds > _MIN_TIMED_S:
            speed = f" in {verdict.seconds:.1f} s, {verdict.nbytes / 1e9 / verdict.seconds:.2f} GB/s"
        text = f"{files}, {format_size(verdict.nbytes)} read{speed}"
        doubt = "it was read, but there is nothing to compare it with"
    else:
        text = f"record, index, and {files} of {format_size(verdict.nbytes)} by size and header"
        doubt = "only sizes and structure can be checked"
    if undigested:
        text += f"\n      {format_count(undigested, 'file has', 'files have')} no digests: {doubt}"
    if verdict.undecoded:
        text += (
            f"\n      {format_count(verdict.undecoded, 'file is', 'files are')} encrypted, and there is no key:"
            " what is stored was checked, not what it stands for"
        )
    return f"{styled('ok', 'green')}    {printable(place.path)}  {text}"


def _document(place: Target, verdict: CheckResult, *, deep: bool) -> dict[str, Any]:
    status = "damaged" if verdict.problems else "unknown" if verdict.unknown else "sound"
    return {
        "path": place.path,
        "status": status,
        "problems": verdict.problems,
        "reason": verdict.unknown or None,
        "files": verdict.files,
        "nbytes": verdict.nbytes,
        "files_without_digests": verdict.without_digests,
        "files_undecoded": verdict.undecoded,
        "seconds": verdict.seconds if deep else None,
    }
