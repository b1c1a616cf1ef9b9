"""
`shardkeep verify`: check that checkpoints are what was saved, and list what is damaged. No torch.

A deep check reads every byte; a shallow one looks at record, index, sizes and headers. `latest` and `prune` use that one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import Run, open_checkpoint_or_run, split_path
from shardkeep.engine.codecs import keys_for
from shardkeep.engine.sources import find
from shardkeep.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint, KeyMissing, WrongKey
from shardkeep.opening import VerifyReport, verify_stored
from shardkeep.opening import open as open_checkpoint
from shardkeep.options import Options
from shardkeep.storage.base import BlobReader, Store, local_path, with_any_names
from shardkeep.storage.resolve import open_store
from shardkeep.storage.wrapper import ReaderWrapper, StoreWrapper

_NOTHING = VerifyReport(files=0, bytes_read=0, seconds=0.0)


class CheckResult(NamedTuple):
    report: VerifyReport
    """What was read; nothing if there is a problem."""
    problems: Sequence[str] = ()
    """What is damaged, with the file and, if known, bytes and keys; or that none of the given keys decrypts it."""
    unknown: str = ""
    """Why it could not be checked, because the store failed, which says nothing about the checkpoint."""

    @property
    def reason(self) -> str:
        """What is wrong, in one line; empty if nothing is."""
        return self.unknown or "; ".join(self.problems)


def check_checkpoint(where: str, *, deep: bool, on_read: out.OnRead = lambda _: None) -> CheckResult:
    """Check one checkpoint. Damage is returned, not raised."""
    problems: list[str] = []
    try:
        store = CountingStore(open_store(where, direct=Options().direct_io), on_read)
        try:
            return CheckResult(open_checkpoint(store if deep else where).verify(deep=deep))
        except (KeyMissing, WrongKey) as exc:
            # A user who is about to discard an old key relies on this being a problem.
            if keys_for(Options()) is not None:
                wrong = "none of the given keys decrypts it: " if isinstance(exc, WrongKey) else ""
                problems = [f"{wrong}{exc.message}"]
            return CheckResult(verify_stored(store, deep=deep), problems)
    except (DamagedCheckpoint, CheckpointNotFound) as exc:
        return CheckResult(_NOTHING, [*problems, *(exc.details.get("problems") or [exc.message])])
    except CheckpointError as exc:
        return CheckResult(_NOTHING, unknown=exc.message)


class CountingStore(StoreWrapper):
    def __init__(self, inner: Store, on_read: out.OnRead) -> None:
        super().__init__(inner)
        self.on_read = on_read

    @property
    def local_path(self) -> str | None:
        """The inner store's: reads that bypass the store are only not counted."""
        return local_path(self.inner)

    def any_names(self) -> CountingStore:
        return CountingStore(with_any_names(self.inner), self.on_read)

    def wrap_reader(self, reader: BlobReader, name: str) -> BlobReader:
        return _CountingReader(reader, self, name)


class _CountingReader(ReaderWrapper):
    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        super().read_into(offset, into, cached=cached)
        self.store.on_read(into.nbytes)


@command(
    argument("path", metavar="PATH", nargs="+", help="checkpoints, runs, or folders of runs"),
    argument("--quick", action="store_true", help="look at records, indexes, sizes and headers only"),
    examples="""
  shardkeep verify runs/a/step-500            read every byte of a checkpoint
  shardkeep verify runs/a runs/b              every checkpoint of two runs
  shardkeep verify runs --quick               sizes and headers of all runs
""",
)
def verify(args: argparse.Namespace) -> int:
    """Check all of them; 1 if one is damaged, 2 if none is, but a path has nothing that could be checked."""
    targets = {path: list(_targets(path)) for path in args.path}
    width = max((len(target[0]) for below in targets.values() for target in below), default=0)
    results = {path: [_verify(*target, width, args) for target in below] for path, below in targets.items()}
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
        words = [f"{count[each]:,} {words[2]}" for each, words in _WORDS.items() if count[each] and each != good]
        whole = f"{count[good]:,} of {out.format_count(len(documents), 'checkpoint')} {_WORDS[good][2]}"
        print(out.wrap_lines("\n" + ", ".join([whole, *words])))
    if args.quick and not args.json and not unverified:
        print(out.styled("no data was read: without --quick, every byte is compared", "dim"))
    for path in unverified:
        why = "it has no checkpoint that could be" if results[path] else "there is no checkpoint in it"
        out.echo_err(f"{out.printable(path)}: nothing was verified: {why}", "red")
    return code


def _verify(path: str, nbytes: int, unfinished: str, width: int, args: argparse.Namespace) -> dict[str, Any]:
    notes: Sequence[str] = ()
    if unfinished:
        document = {"path": path, "status": "unfinished", "reason": unfinished}
        text = f"unfinished: {out.printable(unfinished)}"
    else:
        with out.byte_bar(split_path(path)[1], nbytes) as update:
            result = check_checkpoint(path, deep=not args.quick, on_read=lambda read: update(advance=read))
        document = _result_json(path, result, deep=not args.quick)
        text, notes = _describe(result, deep=not args.quick)
    if not args.json:
        word, style, _ = _WORDS[document["status"]]
        line = f"{out.styled(word, style)}{' ' * (7 - len(word))}{out.printable(path.ljust(width))}"
        if 9 + max(len(path), width) + len(text) > (out.terminal_width() or sys.maxsize):
            line, text, notes = line.rstrip(), "", [text, *notes]
        print(f"{line}  {text}" if text else line)
        for note in notes:
            print(out.wrap_lines(out.printable(note), " " * 7))
    return document


def _targets(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield path and size of the checkpoint at a path, or of all of a run; and why it is unfinished, if it is."""
    try:
        record = find(open_store(path, direct=Options().direct_io)).record
    except CheckpointNotFound:
        found = open_checkpoint_or_run(path)
        for run in (found, *found.runs) if isinstance(found, Run) else ():
            for entry in run.entries:
                yield run.path_to(entry.name), entry.nbytes, entry.reason if entry.status == "unfinished" else ""
        return
    except CheckpointError:  # the check will report it
        yield path, 0, ""
        return
    yield path, record.stored_nbytes, ""


_WORDS: dict[str, tuple[str, out.Style, str]] = {
    "sound": ("ok", "green", "sound"),
    "read": ("read", "yellow", "read, with nothing to compare with"),
    "not read": ("quick", "yellow", "with the right sizes and headers"),
    "damaged": ("BAD", "red", "damaged"),
    "unknown": ("?", "red", "could not be checked"),
    "unfinished": ("skip", "yellow", "unfinished"),
}
"""The word for each status, its colour, and what the summary says. Only what was compared byte by byte is "ok"."""


def _describe(result: CheckResult, *, deep: bool) -> tuple[str, Sequence[str]]:
    """Say what was found, and what else is to be known, a line each."""
    found, count = result.report, out.format_count
    if result.problems:
        return count(len(result.problems), "problem"), result.problems
    if result.unknown:
        return "could not be checked", [result.unknown]
    text = f"{count(found.files, 'file')} of {out.format_size(found.bytes_read)}: sizes and headers are right"
    notes = []
    if deep:
        speed = out.format_speed(found.bytes_read, found.seconds)
        text = f"{count(found.files, 'file')}, {out.format_size(found.bytes_read)} read{speed}"
        if crc := found.without_digests - found.without_checksums:
            has = count(crc, "file has", "files have")
            notes.append(f"{has} no digests: compared with the CRC-32 that torch stores")
        if found.without_checksums:
            has = count(found.without_checksums, "file has", "files have")
            notes.append(f"{has} no checksums: every byte was read, but there was nothing to compare it with")
    if found.undecoded:
        has = count(found.undecoded, "file is", "files are")
        notes.append(f"{has} encrypted and no key was given" + ": only the stored bytes were checked" * deep)
    return text, notes


def _result_json(path: str, result: CheckResult, *, deep: bool) -> dict[str, Any]:
    good = "not read" if not deep else "read" if result.report.without_checksums else "sound"
    status = "damaged" if result.problems else "unknown" if result.unknown else good
    found = {"path": path, "status": status, "problems": result.problems, "reason": result.unknown or None}
    return found | asdict(result.report)
