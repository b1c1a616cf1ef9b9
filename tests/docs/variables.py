"""The table of environment variables in `docs/environment.md`, made from `shardkeep.options`."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from shardkeep import options
from shardkeep.dcp_install import ASKED

HEAD = "| variable | default | meaning |\n|---|---|---|\n"
VARIABLES = {
    **{
        f"SHARDKEEP_{each.name.upper()}": f"`Options.{each.name}`"
        for each in fields(options.Options)
        if each.name != "keys"
    },
    "SHARDKEEP_KEY_FILE": "The path of a file with keys for encrypted checkpoints, if `Options.keys` is None.",
    "SHARDKEEP_KEY": "The key itself, if neither `Options.keys` nor `SHARDKEEP_KEY_FILE` is set.",
    "SHARDKEEP_DCP_INSTALL": "1: `shardkeep.dcp` takes the place of torch's module in this process. `python -m shardkeep.dcp`"
    " sets it for child processes.",
    "PYTHONPATH": "`python -m shardkeep.dcp` adds a folder to it for child processes.",
    "LOCAL_WORLD_SIZE": "How many ranks share this machine, and so its cores and memory. torchrun sets it.",
    "WORLD_SIZE": "How many ranks the launcher started: named in errors of a program that has no process group. torchrun sets it.",
    "NO_COLOR": "The command line prints no colours if it is set.",
    "TERM": "The command line prints no colours and uses no pager if it is `dumb`.",
    "PAGER": "What long output of the command line goes through on a terminal.",
}
"""Every environment variable that is read, and its meaning; those of object stores are in `storage/object_client`."""
_READERS = {"_env_int", "_env_size", "_env_flag", "setting", "settings_with", "os.environ.get"}
_DEFAULTS = {"_fair_threads()": "4 to 8, by cores and ranks", "_fair_pinned_nbytes()": "a 32nd of memory, up to 4 GiB"}


def table() -> str:
    """Return the rows: those of `Options` have the default and the description of their field."""
    texts, defaults = dict(_fields()), dict(_defaults())
    rows = []
    for name, meaning in VARIABLES.items():
        of_field = re.fullmatch(r"`Options\.(\w+)`", meaning)
        text = f"{meaning}. {texts[of_field[1]]}" if of_field else meaning
        rows.append(f"| `{name}` | {defaults.get(name, 'not set')} | {text} |\n")
    return HEAD + "".join(rows)


def _fields() -> Iterator[tuple[str, str]]:
    """Yield the fields of `Options`, and the docstring under each."""
    [body] = ast.parse(inspect.getsource(options.Options)).body
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield field.target.id, " ".join(text.value.value.split())


def _defaults() -> Iterator[tuple[str, str]]:
    """Yield the variables with a default, and that default as the page writes it."""
    for call in ast.walk(ast.parse(inspect.getsource(options))):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("_env_int", "_env_size", "_env_flag"):
            name, default, *_ = call.args
            if isinstance(name, ast.Constant):
                text = ast.unparse(default)
                yield name.value, _DEFAULTS.get(text) or text.replace(" * MIB", " MiB")
    yield "SHARDKEEP_SHARE_READS", "not set"  # then the store decides
    yield "PAGER", "`less`"


def variables_read() -> set[str]:
    """Return the names of all environment variables that the code of shardkeep names to read them."""
    found = {ASKED}  # named by this constant
    for path in Path(inspect.getfile(options)).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in _READERS:
                texts = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
                found |= {text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z_]+[A-Z]", text)}
    return found
