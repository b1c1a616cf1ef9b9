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
    documents: list[dict[str, Any]] = []
    for path in args.path:
        found = open_checkpoint_or_run(path, args.template)
        if isinstance(found, Run):
            pairs = [(run, entry) for run in (found, *found.runs) for entry in run.entries if entry.committed]
            documents += [_rotate(run.path_of(entry), alone=False) for run, entry in pairs]
        else:
            documents.append(_rotate(path, alone=True))
    failed = [each for each in documents if each["status"] == "failed"]
    if args.json:
        print_json({"rotated": not failed, "checkpoints": documents})
        return 2 if failed else 0
    for each in documents:
        if each["status"] != "failed":
            style = styled(each["status"], "green" if each["status"] == "rotated" else "dim")
            print(f"{style}  {printable(each['path'])}")
    for each in failed:
        echo_err(f"failed   {printable(each['path'])}: {printable(each['reason'])}", "red")
    print(f"\n{format_count(sum(each['status'] == 'rotated' for each in documents), 'checkpoint')} rotated")
    return 2 if failed else 0


def _rotate(path: str, *, alone: bool) -> dict[str, Any]:
    """Rotate one checkpoint. In a run, a plain or unreadable checkpoint is reported and the others go on."""
    try:
        return {"path": path, "status": "rotated" if rotate_keys(path) else "current"}
    except CheckpointError as exc:
        if alone:
            raise
        if isinstance(exc, StateError):
            return {"path": path, "status": "plain"}
        return {"path": path, "status": "failed", "reason": exc.message}
