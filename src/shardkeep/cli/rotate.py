"""`shardkeep rotate`: wrap the data keys of encrypted checkpoints by another key, without writing data."""

from __future__ import annotations

import argparse
from typing import Any

from shardkeep.cli.output import echo, echo_err, format_count, print_json, printable, styled
from shardkeep.cli.runs import Run, open_checkpoint_or_run
from shardkeep.conversion.rotate import rotate_keys
from shardkeep.errors import CheckpointError, StateError

EXAMPLES = """
  SHARDKEEP_KEY_FILE=keys shardkeep rotate runs/a      the new key first in it
  SHARDKEEP_KEY_FILE=keys shardkeep rotate runs/a/step-500
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", nargs="+", help="checkpoints, or directories of them")
    parser.add_argument("--template", metavar="NAME", help='what checkpoints of a run are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """Rotate all of them; 2 where one could not be."""
    documents: list[dict[str, Any]] = []
    for path in args.path:
        found = open_checkpoint_or_run(path, args.template)
        if isinstance(found, Run):
            documents += [_rotated(found.path_of(entry), alone=False) for entry in found.entries() if entry.committed]
        else:
            documents.append(_rotated(path, alone=True))
    failed = [each for each in documents if each["status"] == "failed"]
    if args.json:
        print_json({"rotated": not failed, "checkpoints": documents})
        return 2 if failed else 0
    for each in documents:
        if each["status"] != "failed":
            echo(
                f"{styled(each['status'], 'green' if each['status'] == 'rotated' else 'dim')}  {printable(each['path'])}"
            )
    for each in failed:
        echo_err(f"failed   {printable(each['path'])}: {printable(each['reason'])}", "red")
    many = sum(each["status"] == "rotated" for each in documents)
    echo(f"\n{format_count(many, 'checkpoint')} rotated")
    return 2 if failed else 0


def _rotated(path: str, *, alone: bool) -> dict[str, Any]:
    try:
        status = "rotated" if rotate_keys(path) else "current"
    except StateError:  # of a run, some may be encrypted and some not
        if alone:
            raise
        status = "plain"
    except CheckpointError as exc:
        if alone:
            raise
        return {"path": path, "status": "failed", "reason": exc.message}
    return {"path": path, "status": status}
