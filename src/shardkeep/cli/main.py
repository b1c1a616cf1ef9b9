"""
The `shardkeep` command. Imports only the module of the subcommand that was asked for, so that commands which look at
files start without torch.

To add a command, write `cli/<name>.py` with `configure(parser)` and `run(args) -> exit code`, and name it in
`COMMANDS`. Exit codes: 0 all is well, 1 the command ran and found something wrong, 2 it could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from shardkeep._version import __version__
from shardkeep.errors import CheckpointError

COMMANDS = {
    "demo": "train a small model on several ranks, kill the job, resume on fewer, and check every tensor",
}


class Command(Protocol):
    """What a module of this folder offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="shardkeep", description="Checkpoints for PyTorch training.")
    parser.add_argument("--version", action="version", version=f"shardkeep {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    asked = next((word for word in argv if not word.startswith("-")), "")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == asked:
            command = cast("Command", import_module(f"shardkeep.cli.{name}"))
            command.configure(subparser)
    args = parser.parse_args(argv)
    try:
        return command.run(args)
    except CheckpointError as error:
        print(f"shardkeep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
