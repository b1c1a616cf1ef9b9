"""The `shardkeep` command line. `main` dispatches; each other module has one command or a few that belong together."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Argument = tuple[tuple[str, ...], dict[str, Any]]
_Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    """One subcommand. Its module has it under its name."""

    run: _Run
    """Does the work and returns the exit code: 0 success, 1 something is wrong or different, 2 could not run."""
    arguments: tuple[Argument, ...]
    """What its parser takes. `main` adds `--json`, and `--no-pager` if it is paged."""
    examples: str
    """Lines for the end of its help, each indented by two spaces."""
    paged: bool = False
    """Whether its output goes through the user's pager on a terminal."""


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def command(*arguments: Argument, examples: str, paged: bool = False) -> Callable[[_Run], Command]:
    return lambda run: Command(run, arguments, examples, paged)
