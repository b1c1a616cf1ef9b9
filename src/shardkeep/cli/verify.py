"""
`shardkeep verify`: check that checkpoints are what was saved, and list what is damaged. No torch.

A deep check reads every byte; a shallow one looks at record, index, sizes and headers. `latest` and `prune` use that one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import Run, open_checkpoint_or_run, split_path
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
_INDENT = " " * 7


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one checkpoint."""

    problems: list[str] = field(default_factory=list)
    """What is damaged, with the file and, if known, bytes and keys; or that none of the given keys decrypts it."""
    unknown: str = ""
    """Why it could not be checked, because the store failed, which says nothing about the checkpoint."""
    files: int = 0
    nbytes: int = 0
    """Bytes that were read; in a shallow check, bytes of files of the right size."""
    without_digests: int = 0
    """Files without digests of ours."""
    uncompared: int = 0
    """Files among them that have no checksums of any kind: their bytes were read, and compared with nothing."""
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
        return CheckResult(
            files=report.files,
            nbytes=report.bytes_read,
            without_digests=report.without_digests,
            uncompared=report.without_checksums,
        )
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
    argument("path", metavar="PATH", nargs="+", help="checkpoints, runs, or folders of runs"),
    argument("--quick", action="store_true", help="look at records, indexes, sizes and headers only"),
    argument("--deep", action="store_true", help=argparse.SUPPRESS),  # the default; scripts may still say it
    argument("--template", metavar="NAME", help='only checkpoints of these names: "step-{step}"'),
    examples="""
  shardkeep verify runs/a/step-500            read every byte of a checkpoint
  shardkeep verify runs/a runs/b              every checkpoint of two runs
  shardkeep verify runs --quick               sizes and headers of all runs
""",
)
def verify(args: argparse.Namespace) -> int:
    """Check all of them; 1 if one is damaged, 2 if none is, but a path has nothing that could be checked."""
    if args.quick and args.deep:
        raise out.UsageError("--quick and --deep contradict each other", hint="every byte is read without --quick")
    targets = {path: list(_targets(path, args.template)) for path in args.path}
    results = {path: [_verify(*target, args) for target in below] for path, below in targets.items()}
    documents = [document for found in results.values() for document in found]
    unverified = [
        path for path, found in results.items() if all(each["status"] in {"unfinished", "unknown"} for each in found)
    ]
    count = Counter(document["status"] for document in documents)
    code = 1 if count["damaged"] else 2 if unverified or count["unknown"] else 0
    if args.json:
        out.print_json({"sound": code == 0 and not args.quick, "deep": not args.quick, "checkpoints": documents})
    elif len(documents) > 1:
        good = "not read" if args.quick else "sound"
        words = [f"{count[status]:,} {text}" for status, text in _SUMMARY.items() if count[status] and status != good]
        whole = f"{count[good]:,} of {out.format_count(len(documents), 'checkpoint')} {_SUMMARY[good]}"
        print(out.wrap_lines("\n" + ", ".join([whole, *words])))
    if args.quick and not args.json and not unverified:
        print(out.styled("no data was read: without --quick, every byte is compared", "dim"))
    for path in unverified:
        why = "it has no checkpoint that could be" if results[path] else "there is no checkpoint in it"
        out.echo_err(f"{out.printable(path)}: nothing was verified: {why}", "red")
    return code


def _verify(path: str, nbytes: int, unfinished: str, args: argparse.Namespace) -> dict[str, Any]:
    """Check one checkpoint, print the result, and return it as JSON."""
    if unfinished:
        document = {"path": path, "status": "unfinished", "reason": unfinished}
        text = f"{out.styled('skip', 'yellow')}   {out.printable(path)}  unfinished: {out.printable(unfinished)}"
    else:
        with out.ReadProgress(split_path(path)[1], nbytes) as progress:
            result = check_checkpoint(path, deep=not args.quick, on_read=progress.add)
        document = _result_json(path, result, deep=not args.quick)
        text = _result_text(path, result, document["status"], deep=not args.quick)
    if not args.json:
        print(text)
    return document


def _targets(path: str, template: str | None) -> Iterator[tuple[str, int, str]]:
    """Yield path and size of the checkpoint at a path, or of all of a run; and why it is unfinished, if it is."""
    try:
        record = find(open_store(path, direct=Options().direct_io)).record
    except CheckpointNotFound:
        found = open_checkpoint_or_run(path, template)
        for run in (found, *found.runs) if isinstance(found, Run) else ():
            for entry in run.entries:
                yield run.path_of(entry), entry.nbytes, entry.reason if entry.status == "unfinished" else ""
        return
    except CheckpointError:  # the check will report it
        yield path, 0, ""
        return
    yield path, record.stored_nbytes, ""


_STYLES: dict[str, tuple[str, out.Style]] = {
    "sound": ("ok", "green"),
    "read": ("read", "yellow"),
    "not read": ("quick", "yellow"),
    "damaged": ("BAD", "red"),
    "unknown": ("?", "red"),
}
"""The word for each status, and its colour. "ok" is for checkpoints whose every byte was compared with a checksum."""
_SUMMARY = {
    "sound": "sound",
    "read": "read, with nothing to compare with",
    "not read": "with the right sizes and headers",
    "damaged": "damaged",
    "unknown": "could not be checked",
    "unfinished": "unfinished",
}


def _result_text(path: str, result: CheckResult, status: str, *, deep: bool) -> str:
    word, style = _STYLES[status]
    line = f"{out.styled(word, style)}{' ' * (7 - len(word))}{out.printable(path)}"
    if result.problems:
        lines = [out.wrap_lines(out.printable(problem), _INDENT) for problem in result.problems]
        return "\n".join([f"{line}  {out.format_count(len(result.problems), 'problem')}", *lines])
    if result.unknown:
        return f"{line}\n{out.wrap_lines(f'could not be checked: {out.printable(result.unknown)}', _INDENT)}"
    files = out.format_count(result.files, "file")
    if deep:
        speed = out.format_speed(result.seconds, result.nbytes / 1e9 / (result.seconds or 1), _MIN_TIMED_S)
        text = f"{files}, {out.format_size(result.nbytes)} read{speed}"
    else:
        text = f"{files} of {out.format_size(result.nbytes)}: sizes and headers are right"
    notes = []
    if deep and (rest := result.without_digests - result.uncompared):
        has = out.format_count(rest, "file has", "files have")
        notes.append(f"{has} no digests: compared with the CRC-32 that torch stores")
    if deep and result.uncompared:
        has = out.format_count(result.uncompared, "file has", "files have")
        notes.append(f"{has} no checksums: every byte was read, but there was nothing to compare it with")
    if result.undecoded:
        has = out.format_count(result.undecoded, "file is", "files are")
        notes.append(f"{has} encrypted and no key was given: only the stored bytes were checked")
    return "\n".join([f"{line}  {text}", *(out.wrap_lines(note, _INDENT) for note in notes)])


def _result_json(path: str, result: CheckResult, *, deep: bool) -> dict[str, Any]:
    good = "not read" if not deep else "read" if result.uncompared else "sound"
    return {
        "path": path,
        "status": "damaged" if result.problems else "unknown" if result.unknown else good,
        "problems": result.problems,
        "reason": result.unknown or None,
        "files": result.files,
        "nbytes": result.nbytes,
        "files_without_digests": result.without_digests,
        "files_without_checksums": result.uncompared,
        "files_undecoded": result.undecoded,
        "seconds": result.seconds if deep else None,
    }
