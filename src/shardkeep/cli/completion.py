"""
`shardkeep completion`: a script that lets a shell complete commands, options, directories and, in bash, keys.

The script is static and generated from the parsers of all commands; only keys are looked up while completing.
"""

from __future__ import annotations

import argparse

from shardkeep.cli import argument, command
from shardkeep.cli.main import SUMMARIES, Parser, load_command, parser_of
from shardkeep.cli.output import UsageError, print_json

SHELLS = ("bash", "zsh", "fish")
_NOT_A_PATH = {"KEY", "PATTERN"}
# Not with `compgen -W`, which would execute a hostile key.
_KEYS = {
    "bash": "_shardkeep_keys",
    "preamble": {"bash": '_shardkeep_keys() { shardkeep ls "${COMP_WORDS[2]}" "$1*" --names 2>/dev/null; }'},
}


@command(
    argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS)),
    examples="""
  eval "$(shardkeep completion bash)"              in ~/.bashrc
  shardkeep completion zsh > "${fpath[1]}/_shardkeep"
  shardkeep completion fish > ~/.config/fish/completions/shardkeep.fish
""",
)
def completion(args: argparse.Namespace) -> int:
    try:
        import shtab  # noqa: PLC0415 - only this command needs it
    except ImportError as exc:
        raise UsageError("completion needs the package shtab", hint="pip install shtab") from exc
    script: str = shtab.complete(_whole_parser(shtab.DIRECTORY), args.shell)
    if args.json:
        return print_json({"shell": args.shell, "script": script})
    print(script)
    return 0


def _whole_parser(directory: object) -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="shardkeep", description="Checkpoints for PyTorch training.")
    whole.add_argument("--version", action="version")
    commands = whole.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name, summary in SUMMARIES.items():
        alone = parser_of(name, load_command(name))
        commands.add_parser(name, help=summary, description=summary, parents=[alone], add_help=False)
        for action in alone._actions:
            if not action.choices and isinstance(action.metavar, str) and not action.option_strings:
                by = directory if action.metavar not in _NOT_A_PATH else _KEYS if action.metavar == "KEY" else None
                if by is not None:
                    action.complete = by  # type: ignore[attr-defined]  # shtab reads it
    return whole
