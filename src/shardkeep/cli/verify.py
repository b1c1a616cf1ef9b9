"""
`shardkeep verify`: check that checkpoints are what was saved, and list what is damaged. No torch.

A shallow check looks at record, index, sizes and headers; a deep one reads every byte. `latest` and `prune` use it too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import is_empty_directory, open_existing_run, split_path
from shardkeep.engine.codecs import keys_for
from shardkeep.engine.reader import open_checked
from shardkeep.engine.sources import find
from shardkeep.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint, KeyMissing, WrongKey
from shardkeep.format.record import FileEntry
from shardkeep.opening import Checkpoint, verify_stored
from shardkeep.opening import open as open_checkpoint
from shardkeep.options import Options
from shardkeep.storage.base import BlobReader, Store, local_path, with_any_names
from shardkeep.storage.resolve import open_store
from shardkeep.storage.wrapper import ReaderWrapper, StoreWrapper

OnRead = Callable[[int], None]
"""Called with a number of bytes that were read, from any thread."""
_MIN_TIMED_S = 0.1
"""Throughput is not shown for checks that take less."""


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one checkpoint."""

    problems: list[str] = field(default_factory=list)
    """What is damaged, with the file and, if known, bytes and keys; or that none of the given keys decrypts it."""
    unknown: str = ""
    """Why it could not be checked, because the store failed, which says nothing about the checkpoint."""
    files: int = 0
    nbytes: int = 0
    """Bytes that were read and compared with their digests; in a shallow check, bytes of files of the right size."""
    without_digests: int = 0
    """Files without digests, whose bytes can be read but not compared with anything."""
    undecoded: int = 0
    """Encrypted files for which no key was given: the stored bytes were checked, but not the plain ones."""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        return self.unknown or "; ".join(self.problems)


def check_checkpoint(where: str, *, deep: bool, on_read: OnRead = lambda _: None) -> CheckResult:
    """Check one checkpoint. Damage is returned, not raised."""
    began = time.perf_counter()
    try:
        result = _check(where, deep=deep, on_read=on_read)
    except (DamagedCheckpoint, CheckpointNotFound) as exc:
        return CheckResult(problems=list(exc.details.get("problems", ())) or [exc.message])
    except CheckpointError as exc:
        return CheckResult(unknown=exc.message)
    return replace(result, seconds=time.perf_counter() - began)


def _check(where: str, *, deep: bool, on_read: OnRead) -> CheckResult:
    store = CountingStore(open_store(where, direct=Options().direct_io), on_read)
    try:
        checkpoint = open_checkpoint(store if deep else where)
    except (KeyMissing, WrongKey) as exc:
        problems = []
        if keys_for(Options()) is not None:  # a user who is about to discard an old key relies on this being a problem
            wrong = "none of the given keys decrypts it: " if isinstance(exc, WrongKey) else ""
            problems = [f"{wrong}{exc.message}"]
        try:
            report = verify_stored(store, deep=deep)
        except DamagedCheckpoint as damaged:
            return CheckResult(problems=[*problems, *(damaged.details.get("problems") or [damaged.message])])
        return CheckResult(problems, files=report.files, nbytes=report.bytes_read, undecoded=report.undecoded)
    if deep:
        report = checkpoint.verify()
        return CheckResult(files=report.files, nbytes=report.bytes_read, without_digests=report.without_digests)
    files = checkpoint.record.files
    return CheckResult(
        list(shallow_problems(checkpoint)),
        files=len(files),
        nbytes=sum(nbytes for file in files for _, nbytes in file.at_rest),
        without_digests=sum(not file.block_nbytes for file in files),
    )


def shallow_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the problems that index, sizes and headers show."""
    source = checkpoint.source
    try:
        source.check_index(np.unique(np.asarray(checkpoint.index.tensors.alias, np.int64)))
    except DamagedCheckpoint as exc:
        yield exc.message

    def check(file: FileEntry) -> str:
        try:
            open_checked(source.store, file, None if file.header_nbytes else source.digests)[0].close()
        except DamagedCheckpoint as exc:
            return exc.message
        return ""

    files = checkpoint.record.files
    if files:
        with ThreadPoolExecutor(min(Options().io_threads, len(files))) as pool:
            yield from filter(None, pool.map(check, files))


# -- reads that are counted, for progress


class CountingStore(StoreWrapper):
    """A store that calls `on_read` for every read."""

    def __init__(self, inner: Store, on_read: OnRead) -> None:
        super().__init__(inner)
        self.on_read = on_read

    @property
    def local_path(self) -> str | None:
        """The inner store's: reads that bypass the store are only not counted."""
        return local_path(self.inner)

    def any_names(self) -> CountingStore:
        """Return the inner store's view, with its reads counted."""
        return CountingStore(with_any_names(self.inner), self.on_read)

    def wrap_reader(self, reader: BlobReader, name: str) -> BlobReader:
        return _CountingReader(reader, self, name)


class _CountingReader(ReaderWrapper):
    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        super().read_into(offset, into, cached=cached)
        self.store.on_read(into.nbytes)


# -- the command


@command(
    argument("path", metavar="PATH", nargs="+", help="checkpoints, or directories of them"),
    argument("--deep", action="store_true", help="read every byte and compare it with its digest"),
    argument("--template", metavar="NAME", help='how checkpoints of a run are named: "step-{step}"'),
    examples="""
  shardkeep verify runs/a/step-500            record, index, sizes and headers
  shardkeep verify runs/a/step-500 --deep     every byte
  shardkeep verify runs/a runs/b --deep       every checkpoint of two runs
""",
)
def verify(args: argparse.Namespace) -> int:
    """Check all of them; 1 if one is damaged, 2 if one could not be checked and none is known to be damaged."""
    targets = [target for path in args.path for target in _targets(path, args.template)]
    documents: list[dict[str, Any]] = []
    for path, nbytes, unfinished in targets:
        if unfinished:
            document = {"path": path, "status": "unfinished", "reason": unfinished}
            text = f"{out.styled('skip', 'yellow')}  {out.printable(path)}  unfinished: {out.printable(unfinished)}"
        else:
            with out.ReadProgress(split_path(path)[1], nbytes) as progress:
                result = check_checkpoint(path, deep=args.deep, on_read=progress.add)
            document, text = _result_json(path, result, deep=args.deep), _result_text(path, result, deep=args.deep)
        documents.append(document)
        if not args.json:
            print(text)
    found = {document["status"] for document in documents}
    worst = 1 if "damaged" in found else 2 if "unknown" in found else 0
    if args.json:
        out.print_json({"sound": worst == 0, "deep": args.deep, "checkpoints": documents})
    elif len(targets) > 1:
        sound = sum(document["status"] == "sound" for document in documents)
        print(f"\n{sound:,} of {out.format_count(len(targets), 'checkpoint')} sound")
    elif not targets:
        print("no checkpoint yet")
    if not args.json and not args.deep and targets and worst == 0:
        print(out.styled("no damage found in sizes and headers; --deep reads every byte", "dim"))
    return worst


def _targets(path: str, template: str | None) -> Iterator[tuple[str, int, str]]:
    """Yield path and size of the checkpoint at a path, or of all of a run; and why it is unfinished, if it is."""
    try:
        record = find(open_store(path, direct=Options().direct_io)).record
    except CheckpointNotFound:
        run = open_existing_run(path, template)
        if not run.entries and not is_empty_directory(path):
            raise
        for entry in run.entries:
            yield run.path_of(entry), entry.nbytes, entry.reason if entry.status == "unfinished" else ""
        return
    except CheckpointError:  # the check will report it
        yield path, 0, ""
        return
    yield path, record.stored_nbytes, ""


def _result_text(path: str, result: CheckResult, *, deep: bool) -> str:
    path = out.printable(path)
    if result.problems:
        lines = [f"{out.styled('BAD', 'red')}   {path}  {out.format_count(len(result.problems), 'problem')}"]
        return "\n".join(lines + [out.wrap_lines(out.printable(problem), "      ") for problem in result.problems])
    if result.unknown:
        return f"{out.styled('?', 'red')}     {path}  could not be checked: {out.printable(result.unknown)}"
    files = out.format_count(result.files, "file")
    if deep:
        speed = out.format_speed(result.seconds, result.nbytes / 1e9 / (result.seconds or 1), _MIN_TIMED_S)
        text = f"{files}, {out.format_size(result.nbytes)} read{speed}"
        doubt = "read, but there is nothing to compare with"
    else:
        text = f"record, index, and {files} of {out.format_size(result.nbytes)} by size and header"
        doubt = "only sizes and structure can be checked"
    if result.without_digests:
        text += f"\n      {out.format_count(result.without_digests, 'file has', 'files have')} no digests: {doubt}"
    if result.undecoded:
        text += (
            f"\n      {out.format_count(result.undecoded, 'file is', 'files are')} encrypted and no key was given:"
            " only the stored bytes were checked"
        )
    return f"{out.styled('ok', 'green')}    {path}  {text}"


def _result_json(path: str, result: CheckResult, *, deep: bool) -> dict[str, Any]:
    status = "damaged" if result.problems else "unknown" if result.unknown else "sound"
    return {
        "path": path,
        "status": status,
        "problems": result.problems,
        "reason": result.unknown or None,
        "files": result.files,
        "nbytes": result.nbytes,
        "files_without_digests": result.without_digests,
        "files_undecoded": result.undecoded,
        "seconds": result.seconds if deep else None,
    }
