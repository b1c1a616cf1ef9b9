"""`shardkeep rotate`: wrap the data keys of encrypted checkpoints with another key, without rewriting data."""

from __future__ import annotations

import argparse
from typing import Any

from shardkeep.cli import argument, command
from shardkeep.cli.output import echo_err, format_count, print_json, printable, styled
from shardkeep.cli.runs import Run, open_checkpoint_or_run
from shardkeep.conversion.rotate import rotate_keys
from shardkeep.errors import CheckpointError, StateError


@command(
    argument("path", metavar="PATH", nargs="+", help="checkpoints, runs, or folders of runs"),
    argument("--template", metavar="NAME", help='only checkpoints of these names: "step-{step}"'),
    examples="""
  SHARDKEEP_KEY_FILE=keys shardkeep rotate runs/a      put the new key first
  SHARDKEEP_KEY_FILE=keys shardkeep rotate runs/a/step-500
""",
)
def rotate(args: argparse.Namespace) -> int:
    """Rotate all of them; 2 if one fails, or if a path has nothing that is encrypted."""
    documents: dict[str, list[dict[str, Any]]] = {}
    for path in args.path:
        found = open_checkpoint_or_run(path, args.template)
        paths = [path]
        if isinstance(found, Run):
            paths = [run.path_to(each.name) for run in (found, *found.runs) for each in run.entries if each.committed]
        documents[path] = list(map(_rotate, paths))
    plain = [path for path, below in documents.items() if all(each["status"] == "plain" for each in below)]
    every = [each for below in documents.values() for each in below]
    failed = [each for each in every if each["status"] == "failed"]
    code = 2 if failed or plain else 0
    if args.json:
        print_json({"rotated": code == 0, "checkpoints": every})
        return code
    for each in every:
        if each["status"] != "failed":
            style = styled(each["status"], "green" if each["status"] == "rotated" else "dim")
            print(f"{style}  {printable(each['path'])}")
    for each in failed:
        echo_err(f"failed   {printable(each['path'])}: {printable(each['reason'])}", "red")
    print(f"\n{format_count(sum(each['status'] == 'rotated' for each in every), 'checkpoint')} rotated")
    for path in plain:
        why = "it is not encrypted" if documents[path] else "there is no checkpoint in it"
        echo_err(f"{printable(path)}: nothing was rotated: {why}", "red")
    return code


def _rotate(path: str) -> dict[str, Any]:
    """Rotate one checkpoint. If it is plain or cannot be rotated, that is returned, and the others go on."""
    try:
        return {"path": path, "status": "rotated" if rotate_keys(path) else "current"}
    except StateError:
        return {"path": path, "status": "plain"}
    except CheckpointError as exc:
        return {"path": path, "status": "failed", "reason": exc.message}
