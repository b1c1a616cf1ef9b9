"""`shardkeep latest`: the path of the latest good checkpoint of a run, alone on stdout, for scripts."""

from __future__ import annotations

import argparse

from shardkeep.cli.checking import check
from shardkeep.cli.ls_run import entry_document
from shardkeep.cli.output import print_json, remark, say, shown
from shardkeep.cli.places import check_no_checkpoint, hint_for
from shardkeep.cli.roots import open_run
from shardkeep.manage.entries import Entry

EXAMPLES = """
  shardkeep latest runs/a
  python evaluate.py --from "$(shardkeep latest runs/a)"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="ROOT", help="the directory of a run's checkpoints")
    parser.add_argument("--template", metavar="NAME", help='what its checkpoints are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """Print it; 1, and nothing on stdout, where there is none."""
    check_no_checkpoint(args.root)
    found = open_run(args.root, args.template)  # one that does not exist has no checkpoint yet
    skipped: list[dict[str, str]] = []
    latest: Entry | None = None
    for entry in found.entries():
        reason = entry.reason if not entry.committed else _wrong(found.path_of(entry))
        if not reason:
            latest = entry
            break
        skipped.append({"name": entry.name, "reason": reason})
        remark(f"skipped {shown(entry.name)}: {shown(reason)}", "yellow")
    if args.json:
        print_json({"latest": entry_document(found, latest) if latest else None, "skipped": skipped})
    elif latest:
        say(found.path_of(latest))
    if latest is None:
        remark(f"{args.root}: no checkpoint" + (" that could be loaded" if skipped else " below it yet"))
        if not skipped and (hint := hint_for(args.root)):
            remark(f"  hint: {hint}")
    return 0 if latest else 1


def _wrong(path: str) -> str:
    """Return what is wrong with a committed checkpoint, as far as index, sizes and headers tell."""
    verdict = check(path, deep=False)
    return verdict.unknown or "; ".join(verdict.problems)
