"""
The `shardkeep` command. Imports only the module of the subcommand that was asked for, so that commands which look at
files start without torch.

To add a command, write `cli/<name>.py` with `configure(parser)`, `run(args) -> exit code` and, for its help, `EXAMPLES`;
and name it in `GROUPS`. `args.json` is set where one JSON document is wanted on stdout and nothing else there: give it to
`output.print_json`. Raise an error of `shardkeep.errors` for what cannot be done; it becomes exit code 2.

Exit codes: 0 all is well, 1 the command ran and found something wrong or different, 2 it could not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import NoReturn, Protocol, cast

from shardkeep._version import __version__
from shardkeep.cli.output import (
    UsageError,
    did_you_mean,
    echo,
    echo_err,
    print_json,
    printable_lines,
    styled,
    wrap_lines,
)
from shardkeep.errors import CheckpointError

GROUPS = {
    "Look": {
        "ls": "list the checkpoints of a run, or what is in one",
        "show": "show a tensor: statistics, histogram, values, places",
        "du": "show what takes the space, by prefix",
        "diff": "compare two checkpoints: keys, shapes, values",
        "cat": "print the commit record of a checkpoint",
    },
    "Keep": {
        "latest": "print the path of the latest good checkpoint of a run",
        "verify": "check that checkpoints are what was saved",
        "prune": "delete old checkpoints by rules",
        "rotate": "wrap the keys of encrypted checkpoints by a new key",
    },
    "Move": {
        "export": "write a checkpoint for Hugging Face or torch.load",
        "convert": "convert between shardkeep, torch DCP and safetensors",
    },
    "Try": {
        "bench": "measure a disk or a store against its own limit",
        "demo": "train on several ranks, kill them, resume on fewer, compare",
        "completion": "print the completion script for your shell",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
_STORY_TELLERS = {"demo"}
"""Commands that know nothing of `--json`: their text goes to stderr, and the document is how they ended."""
_BROKEN_PIPE = 141
_INTERRUPTED = 130


class Command(Protocol):
    """What a module of this folder offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


class Parser(argparse.ArgumentParser):
    """A parser that raises what is wrong instead of ending the process, and guesses what was meant."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the words given."""
        hint = f"`{self.prog} --help` says what it takes"
        missing = message.partition("arguments are required: ")[2].split(", ")
        if missing != [""]:
            message = f"needs {', '.join(self._without_optional(missing))}"
        wrong = message.partition("unrecognized arguments: ")[2].split()
        if wrong and wrong[0].startswith("-"):
            hint = did_you_mean(wrong[0].partition("=")[0], self._option_string_actions, otherwise=hint)
        raise UsageError(f"{self.prog.removeprefix('shardkeep ')}: {message}", hint=hint)

    def _without_optional(self, missing: list[str]) -> list[str]:
        """Leave out what may be given any number of times: argparse names it beside what it really misses."""
        free = {action.metavar for action in self._actions if action.nargs == "*"}
        return [word for word in missing if word not in free]


def load_command(name: str) -> Command:
    """Import the module of a command."""
    return cast("Command", import_module(f"shardkeep.cli.{name}"))


def parser_of(name: str, command: Command) -> Parser:
    """Make the parser of one command, its help and what every command takes included."""
    examples = getattr(command, "EXAMPLES", "").strip("\n")
    parser = Parser(
        prog=f"shardkeep {name}",
        description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.configure(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a terminal that has no such letter is no reason to fail
    try:
        code = _main(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _let_go_of_stdout()
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _main(words: list[str]) -> int:
    try:
        return _run(words)
    except CheckpointError as error:
        text = wrap_lines(printable_lines(f"shardkeep: {error}"), stream=sys.stderr)
        echo_err(styled("shardkeep:", "red", sys.stderr) + text.removeprefix("shardkeep:"))
        failed = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001 - 1 would tell a script that the command ran
        traceback.print_exc()
        echo_err("shardkeep: this is a mistake in shardkeep; please report the lines above")
        failed = {"kind": type(error).__name__, "message": str(error), "hint": "please report this"}
    if "--json" in words:
        print_json({"error": failed})
    return 2


def _run(words: list[str]) -> int:
    asked = words[0] if words else "--help"
    if asked in {"-h", "--help", "help"} and len(words) < 2:
        _overview()
        return 0
    if asked == "help":
        words = [words[1], "--help"]
        asked = words[0]
    if asked in {"-V", "--version"}:
        echo(f"shardkeep {__version__}")
        return 0
    if asked not in COMMANDS:
        every = f"`shardkeep` alone lists the commands; they are {', '.join(COMMANDS)}"
        if asked.startswith("-"):
            raise UsageError(f"the command comes first, before {asked}", hint=every)
        raise UsageError(f"there is no command {asked!r}", hint=did_you_mean(asked, COMMANDS, otherwise=every))
    command = load_command(asked)
    try:
        args = parser_of(asked, command).parse_intermixed_args(words[1:])
    except SystemExit:  # after --help
        return 0
    if args.json and asked in _STORY_TELLERS:
        with redirect_stdout(sys.stderr):
            code = command.run(args)
        print_json({"passed": code == 0})
        return code
    return command.run(args)


def _overview() -> None:
    echo(f"{styled('shardkeep', 'bold')} {__version__}: checkpoints for PyTorch training\n")
    for title, commands in GROUPS.items():
        for name, summary in commands.items():
            echo(f"  {styled(title.ljust(5), 'dim')}  {styled(name.ljust(10), 'cyan')}  {summary}")
            title = ""  # noqa: PLW2901 - once a group
    echo("\nshardkeep COMMAND --help   says more, with examples")
    echo("shardkeep COMMAND --json   prints one JSON document, for programs")
    echo("\nexit codes: 0 all is well, 1 something is wrong or different, 2 could not run")


def _let_go_of_stdout() -> None:
    """Point stdout nowhere: whoever read it has gone, and Python would complain as it flushes at the end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # not a file, so there is nothing that would be flushed
        return


if __name__ == "__main__":
    sys.exit(main())
