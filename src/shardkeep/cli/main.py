"""
The `shardkeep` command. It imports only the module of the given subcommand, so that most commands start without torch.

Exit codes: 0 success, 1 the command ran and found something wrong or different, 2 it could not run, with an error of
`shardkeep.errors`. CONTRIBUTING.md says how to add a command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

from shardkeep._version import __version__
from shardkeep.cli import Command
from shardkeep.cli import output as out
from shardkeep.errors import CheckpointError

GROUPS = {
    "Look": {
        "ls": ("ls", "list the checkpoints of a run, or the keys of one"),
        "show": ("show", "show a tensor: statistics, histogram, values, chunks"),
        "du": ("du", "show what takes the space, by prefix"),
        "diff": ("diff", "compare two checkpoints: keys, shapes, values"),
        "cat": ("ls", "print the commit record of a checkpoint"),
    },
    "Keep": {
        "latest": ("ls", "print the path of the latest good checkpoint of a run"),
        "verify": ("verify", "check that checkpoints are what was saved"),
        "prune": ("prune", "delete old checkpoints by rules"),
        "pin": ("prune", "keep checkpoints, whatever the rules say"),
        "unpin": ("prune", "leave pinned checkpoints to the rules again"),
        "rotate": ("export", "wrap the keys of encrypted checkpoints with a new key"),
    },
    "Move": {
        "export": ("export", "write a checkpoint for Hugging Face or torch.load"),
        "convert": ("export", "convert between shardkeep, torch DCP and safetensors"),
    },
    "Try": {
        "doctor": ("doctor", "print versions, limits and what a store can do"),
        "bench": ("bench", "measure a disk or a store against its own limit"),
        "completion": ("completion", "print the completion script for your shell"),
    },
}
"""Commands by group and name: the module that has the command, and its summary."""
SUMMARIES = {name: summary for group in GROUPS.values() for name, (_, summary) in group.items()}
_MODULES = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}
_BROKEN_PIPE = 141
_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` with a suggestion instead of exiting."""

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` lists the arguments"
        missing = message.partition("arguments are required: ")[2].split(", ")
        if missing != [""]:
            free = {action.metavar for action in self._actions if action.nargs == "*"}  # argparse lists these, too
            message = f"needs {', '.join(word for word in missing if word not in free)}"
        wrong = message.partition("unrecognized arguments: ")[2].split()
        if wrong and wrong[0].startswith("-"):
            hint = out.did_you_mean(wrong[0].partition("=")[0], self._option_string_actions) or hint
        raise out.UsageError(f"{self.prog.removeprefix('shardkeep ')}: {message}", hint=hint)


def load_command(name: str) -> Command:
    command: Command = getattr(import_module(f"shardkeep.cli.{_MODULES[name]}"), name)
    return command


def parser_of(name: str, command: Command) -> Parser:
    examples = command.examples.strip("\n")
    parser = Parser(
        prog=f"shardkeep {name}",
        description=f"{SUMMARIES[name][0].upper()}{SUMMARIES[name][1:]}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for names, options in command.arguments:
        parser.add_argument(*names, **options)
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")
    if command.paged:
        parser.add_argument("--no-pager", action="store_true", help="do not use $PAGER on a terminal")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # for terminals that lack a character
    try:
        code = _main(words)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout is gone, and Python would report an error when it flushes at exit.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _main(words: list[str]) -> int:
    try:
        return _run(words)
    except CheckpointError as error:
        text = out.titled("shardkeep:", out.printable_lines(f" {error}"), "red", sys.stderr)
        print(text, file=sys.stderr)
        failed = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:  # noqa: BLE001 - exit code 1 would mean that the command ran
        traceback.print_exc()
        out.echo_err("shardkeep: this is a bug in shardkeep; please report the lines above")
        failed = {"kind": type(error).__name__, "message": str(error), "hint": "please report this"}
    if "--json" in words:
        out.print_json({"error": failed})
    return 2


def _run(words: list[str]) -> int:
    asked = words[0] if words else "--help"
    if asked in {"-h", "--help", "help"}:
        _overview()
        return 0
    if asked in {"-V", "--version"}:
        print(f"shardkeep {__version__}")
        return 0
    if asked not in SUMMARIES:
        every = f"`shardkeep` alone lists the commands; they are {', '.join(SUMMARIES)}"
        if asked.startswith("-"):
            raise out.UsageError(f"the command comes first, before {asked}", hint=every)
        raise out.UsageError(f"there is no command {asked!r}", hint=out.did_you_mean(asked, SUMMARIES) or every)
    command = load_command(asked)
    try:
        args = parser_of(asked, command).parse_intermixed_args(words[1:])
    except SystemExit:  # after --help
        return 0
    try:
        with out.paging() if command.paged and not args.no_pager else nullcontext():
            return command.run(args)
    except CheckpointError as error:
        error.hint = _with_flags(error.hint, args)
        raise


def _with_flags(hint: str, args: argparse.Namespace) -> str:
    """Replace arguments of Python by those of the command that have the same name: overwrite=True by --overwrite."""

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        words = f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}")
        return words if name in vars(args) else found[0]

    return re.sub(r"\b(\w+)=(True|'[^']*')", flag, hint)


def _overview() -> None:
    print(f"{out.styled('shardkeep', 'bold')} {__version__}: checkpoints for PyTorch training\n")
    for title, commands in GROUPS.items():
        for name, (_, summary) in commands.items():
            print(f"  {out.styled(title.ljust(5), 'dim')}  {out.styled(name.ljust(10), 'cyan')}  {summary}")
            title = ""  # noqa: PLW2901 - print it once
    print("\nshardkeep COMMAND --help   prints its arguments and examples")
    print("shardkeep COMMAND --json   prints one JSON document, for programs")
    print("\nexit codes: 0 success, 1 something is wrong or different, 2 could not run")


if __name__ == "__main__":
    sys.exit(main())
