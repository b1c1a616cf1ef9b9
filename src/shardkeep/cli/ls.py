"""`shardkeep ls`: the checkpoints of a run, or the keys of one checkpoint."""

from __future__ import annotations

import argparse

from shardkeep.cli.ls_keys import list_keys
from shardkeep.cli.ls_run import list_run
from shardkeep.cli.places import open_one_or_root
from shardkeep.cli.roots import Run

EXAMPLES = """
  shardkeep ls runs/a                              the checkpoints of a run
  shardkeep ls runs/a/step-500                     what is in one
  shardkeep ls runs/a/step-500 'model.*.weight'    keys that fit a glob
  shardkeep ls runs/a/step-500 --tree --depth 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or the directory of a run's checkpoints")
    parser.add_argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob")
    parser.add_argument("--prefix", metavar="KEY", help="only keys that begin with this")
    parser.add_argument("-l", "--long", action="store_true", help="say where every chunk is stored")
    parser.add_argument("--names", action="store_true", help="names alone, one a line, for scripts")
    parser.add_argument("--tree", action="store_true", help="as a tree, with sizes")
    parser.add_argument("--depth", type=int, metavar="N", help="of the tree")
    parser.add_argument("--template", metavar="NAME", help='what checkpoints of the run are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """List it."""
    found = open_one_or_root(args.path, args.template)
    return list_run(found, args) if isinstance(found, Run) else list_keys(found, args)
