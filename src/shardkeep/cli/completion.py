"""
`shardkeep completion`: the script that lets a shell complete commands, options, directories and, in bash, keys.

The script is static, made from the parsers of all commands; only keys of a checkpoint are asked for as they are needed.
"""

from __future__ import annotations

import argparse

from shardkeep.cli.main import COMMANDS, Parser, load_command, parser_of
from shardkeep.cli.output import UsageError, echo, print_json

EXAMPLES = """
  eval "$(shardkeep completion bash)"              in ~/.bashrc
  shardkeep completion zsh > "${fpath[1]}/_shardkeep"
  shardkeep completion fish > ~/.config/fish/completions/shardkeep.fish
"""
SHELLS = ("bash", "zsh", "fish")
_NOT_A_PATH = {"KEY", "PATTERN"}
# Never by `compgen -W`, which would run what a hostile key says.
_KEYS = {
    "bash": "_shardkeep_keys",
    "preamble": {
        "bash": '_shardkeep_keys() { shardkeep ls "${COMP_WORDS[2]}" "$1*" --names 2>/dev/null; }',
    },
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab  # noqa: PLC0415 - for this command alone
    except ImportError as exc:
        raise UsageError("completion needs the package shtab", hint="pip install shtab") from exc
    script: str = shtab.complete(_whole_parser(shtab.DIRECTORY), args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        echo(script)
    return 0


def _whole_parser(directory: object) -> argparse.ArgumentParser:
    """Make one parser of all commands, with what each argument is completed by."""
    whole = argparse.ArgumentParser(prog="shardkeep", description="Checkpoints for PyTorch training.")
    whole.add_argument("--version", action="version")
    commands = whole.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name, summary in COMMANDS.items():
        alone = parser_of(name, load_command(name))
        commands.add_parser(name, help=summary, description=summary, parents=[alone], add_help=False)
        for action in alone._actions:
            if not action.choices and isinstance(action.metavar, str) and not action.option_strings:
                by = directory if action.metavar not in _NOT_A_PATH else _KEYS if action.metavar == "KEY" else None
                if by is not None:
                    action.complete = by  # type: ignore[attr-defined]  # shtab looks for it
    return whole
