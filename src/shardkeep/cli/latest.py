"""`shardkeep latest`: the path of the latest good checkpoint of a run, alone on stdout, for scripts."""

from __future__ import annotations

import argparse

from shardkeep.cli.ls import entry_json
from shardkeep.cli.output import echo, echo_err, print_json, printable
from shardkeep.cli.runs import open_run, reject_checkpoint, suggest_path
from shardkeep.cli.verify import check_checkpoint
from shardkeep.manage.catalog import Entry

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
    reject_checkpoint(args.root)
    found = open_run(args.root, args.template)  # one that does not exist has no checkpoint yet
    skipped: list[dict[str, str]] = []
    latest: Entry | None = None
    for entry in found.entries():
        reason = entry.reason if not entry.committed else _wrong(found.path_of(entry))
        if not reason:
            latest = entry
            break
        skipped.append({"name": entry.name, "reason": reason})
        echo_err(f"skipped {printable(entry.name)}: {printable(reason)}", "yellow")
    if args.json:
        print_json({"latest": entry_json(found, latest) if latest else None, "skipped": skipped})
    elif latest:
        echo(found.path_of(latest))
    if latest is None:
        echo_err(f"{args.root}: no checkpoint" + (" that could be loaded" if skipped else " below it yet"))
        if not skipped and (hint := suggest_path(args.root)):
            echo_err(f"  hint: {hint}")
    return 0 if latest else 1


def _wrong(path: str) -> str:
    """Return what is wrong with a committed checkpoint, as far as index, sizes and headers tell."""
    verdict = check_checkpoint(path, deep=False)
    return verdict.unknown or "; ".join(verdict.problems)
