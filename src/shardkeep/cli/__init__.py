"""The `shardkeep` command line. `main` dispatches; each other module has one command or a few that belong together."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand. A module lists its own in a dict `COMMANDS`, by name."""

    configure: Callable[[argparse.ArgumentParser], None]
    """Adds the arguments of the command to its parser. `main` adds `--json`."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code: 0 success, 1 something is wrong or different, 2 could not run."""
    examples: str
    """Lines for the end of its help, each indented by two spaces."""
