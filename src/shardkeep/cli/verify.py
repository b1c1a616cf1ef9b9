"""`shardkeep verify`: check checkpoints, one or many, and list what is damaged."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardkeep.cli.checking import Verdict, check
from shardkeep.cli.output import count_text, folded, print_json, say, shown, size_text, styled
from shardkeep.cli.places import is_empty, name_of, open_root_only
from shardkeep.cli.progress import Progress
from shardkeep.errors import CheckpointError, CheckpointNotFound
from shardkeep.manage.entries import Entry
from shardkeep.options import Options
from shardkeep.run.sources import find
from shardkeep.store.place import open_store

EXAMPLES = """
  shardkeep verify runs/a/step-500            record, index, sizes and headers
  shardkeep verify runs/a/step-500 --deep     every byte
  shardkeep verify runs/a runs/b --deep       every checkpoint of two runs
"""
_WORTH_TELLING_S = 0.1
"""What takes less says nothing about the speed of a disk."""


class Place(NamedTuple):
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
    places = [place for path in args.path for place in _places(path, args.template)]
    documents: list[dict[str, Any]] = []
    worst = 0
    for place in places:
        if place.entry is not None and place.entry.status == "unfinished":
            documents.append({"path": place.path, "status": "unfinished", "reason": place.entry.reason})
            _say(args, f"{styled('skip', 'yellow')}  {shown(place.path)}  unfinished: {shown(place.entry.reason)}")
            continue
        with Progress(name_of(place.path), place.nbytes) as progress:
            verdict = check(place.path, deep=args.deep, on_read=progress.add)
        documents.append(_document(place, verdict, deep=args.deep))
        _say(args, _text(place, verdict, deep=args.deep))
        worst = _worse(worst, 1 if verdict.problems else 2 if verdict.unknown else 0)
    if args.json:
        print_json({"sound": worst == 0, "deep": args.deep, "checkpoints": documents})
    elif len(places) > 1:
        sound = sum(document["status"] == "sound" for document in documents)
        say(f"\n{sound:,} of {count_text(len(places), 'checkpoint')} sound")
    elif not places:
        say("no checkpoint yet")
    if not args.json and not args.deep and places and worst == 0:
        say(styled("no damage found by sizes and headers; --deep reads every byte", "dim"))
    return worst


def _worse(worst: int, code: int) -> int:
    return 1 if 1 in {worst, code} else max(worst, code)


def _places(path: str, template: str | None) -> Iterator[Place]:
    """Find the checkpoint at a place, damaged or not, or those of the run that it is."""
    try:
        record = find(open_store(path, direct=Options().direct_io)).record
    except CheckpointNotFound:
        found = open_root_only(path, template)
        entries = found.entries()
        if not entries and not is_empty(path):
            raise
        yield from (Place(found.path_of(entry), entry, entry.nbytes) for entry in entries)
        return
    except CheckpointError:  # `check` says what is wrong
        yield Place(path, None, 0)
        return
    yield Place(path, None, record.stored_nbytes)


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        say(text)


def _text(place: Place, verdict: Verdict, *, deep: bool) -> str:
    if verdict.problems:
        many = f"{len(verdict.problems):,} wrong" if len(verdict.problems) > 1 else "not sound"
        lines = [f"{styled('BAD', 'red')}   {shown(place.path)}  {many}"]
        return "\n".join(lines + [folded(shown(problem), "      ") for problem in verdict.problems])
    if verdict.unknown:
        return f"{styled('?', 'red')}     {shown(place.path)}  could not be checked: {shown(verdict.unknown)}"
    files = count_text(verdict.files, "file")
    undigested = verdict.without_digests
    if deep:
        speed = ""
        if verdict.seconds > _WORTH_TELLING_S:
            speed = f" in {verdict.seconds:.1f} s, {verdict.nbytes / 1e9 / verdict.seconds:.2f} GB/s"
        text = f"{files}, {size_text(verdict.nbytes)} read{speed}"
        doubt = "it was read, but there is nothing to compare it with"
    else:
        text = f"record, index, and {files} of {size_text(verdict.nbytes)} by size and header"
        doubt = "only sizes and structure can be checked"
    if undigested:
        text += f"\n      {count_text(undigested, 'file has', 'files have')} no digests: {doubt}"
    if verdict.undecoded:
        text += (
            f"\n      {count_text(verdict.undecoded, 'file is', 'files are')} encrypted, and there is no key:"
            " what is stored was checked, not what it stands for"
        )
    return f"{styled('ok', 'green')}    {shown(place.path)}  {text}"


def _document(place: Place, verdict: Verdict, *, deep: bool) -> dict[str, Any]:
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
