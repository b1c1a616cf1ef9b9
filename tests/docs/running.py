"""
Runs the blocks of a page, in an empty folder, as a reader would who types all of it in.

That reader has installed shardkeep and what the page says to install: other packages cannot be imported meanwhile.

A console line `shardkeep ...` runs in this process with a real pseudo-terminal of 80 columns as its standard output;
`torchrun --nproc-per-node N script.py` on N ranks of the pool, which is what torchrun would start, and `python ...` on
one of them, as a process of its own that has imported torch already; anything else in bash.
"""

import contextlib
import functools
import importlib.metadata
import io
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from shardkeep.cli.main import main
from tests.docs.fences import Command, Fence, commands_of, fences_of
from tests.support.rank_pool import RankPool
from tests.support.terminal import terminal

COLUMNS = "80"
PATIENCE_S = 120
"""For a command, on a machine that is busy with other tests."""
_TORCHRUN = re.compile(r"torchrun --nproc-per-node (\d+) (\S+\.py)((?: \S+)*)")
# `python -m shardkeep.dcp` puts something in torch's place, and has to have a process that ends with it.
_PYTHON = re.compile(r"python (\S+\.py|-m (?!shardkeep\.dcp )\S+)((?: \S+)*)")
_PLAIN = re.compile(r"shardkeep[^|&;<>$`\\]*")


_NAMED = re.compile(r"pip install ([^`#\n]+)")
_WORD = re.compile(r"([\w./-]+)(?:\[([\w,-]+)\])?")
_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""What runs the tests; it is there whatever a page says."""
_FOUND_ONCE = ("pillow",)
"""Transformers looks for it once in a process, perhaps in an earlier test, and then imports it."""


def missing_modules(page: str) -> list[str]:
    """Return the installed modules that a reader of this page does not have."""
    named = [_WORD.fullmatch(word.strip("'\"")) for line in _NAMED.findall(page) for word in line.split()]
    wanted = {("shardkeep", ""), *((name, "") for name in (*_TOOLS, *_FOUND_ONCE))}
    for found in filter(None, named):
        wanted |= {(found[1].removeprefix("./"), extra) for extra in ("", *(found[2] or "").split(","))}
    installed = _with_requirements(frozenset(wanted))
    homes = importlib.metadata.packages_distributions().items()
    return sorted(name for name, dists in homes if name != "tests" and not installed & {_plain(each) for each in dists})


@functools.cache
def _with_requirements(wanted: frozenset[tuple[str, str]]) -> set[str]:
    todo, found = list(wanted), set()
    while todo:
        name, extra = each = todo.pop()
        if each in found:
            continue
        found.add(each)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for line in importlib.metadata.requires(name) or []:
                needed, _, marker = line.partition(";")
                if "extra ==" in marker and not re.search(rf"extra == ['\"]{re.escape(extra or '-')}['\"]", marker):
                    continue
                package = _WORD.match(needed)
                todo += [(_plain(package[1]), each) for each in ("", *(package[2] or "").split(","))]
    return {_plain(name) for name, _ in found}


def _plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@contextlib.contextmanager
def without(modules: list[str]) -> Iterator[None]:
    """Let imports of these modules fail, as if they were not installed."""
    loaded = {name: each for name, each in sys.modules.items() if name.partition(".")[0] in modules}
    sys.modules.update(dict.fromkeys([*modules, *loaded]))
    try:
        yield
    finally:  # what was imported meanwhile stays
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(loaded)


class Reader:
    """One who follows a page."""

    def __init__(self, page: Path, pool: RankPool) -> None:
        self.page = page
        self._names: dict[str, Any] = {}
        self._pool = pool
        self._code = 0
        self._missing = missing_modules(page.read_text())

    def follow(self) -> Iterator[tuple[Fence, str]]:
        """Run block by block; yield those that show output, with what it really is, written as the page has it."""
        printed = ""
        for fence in fences_of(self.page.read_text()):
            if fence.skipped:
                continue
            if fence.is_output:
                yield fence, printed
            elif fence.language == "python" and fence.title:
                Path(fence.title).write_text(fence.body)
            elif fence.language == "python":
                printed = self._python(fence)
            elif fence.language == "console":
                yield fence, "".join(f"$ {each.words}\n{self._run(each)}" for each in commands_of(fence))

    def _python(self, fence: Fence) -> str:
        # Lines are counted from the top of the page, so that a traceback points into it.
        code = compile("\n" * (fence.line - 1) + fence.body, str(self.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out, without(self._missing):
            exec(code, self._names)
        return out.getvalue()

    def _run(self, command: Command) -> str:
        words = command.words
        if words == "echo $?":
            return f"{self._code}\n"
        if _TORCHRUN.fullmatch(words):
            self._code = 0
            return on_ranks(self._pool, words, self._missing)
        if alone := _PYTHON.fullmatch(words):
            self._code = 0
            script = (os.getcwd(), alone[1], alone[2].split(), None, self._missing)
            return "".join(self._pool.run(1, run_script, *script, init=False, timeout_s=PATIENCE_S))
        if _PLAIN.fullmatch(words):
            with without(self._missing):
                self._code, printed = in_terminal(shlex.split(words)[1:])
            return printed
        return self._in_bash(words)

    def _in_bash(self, words: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, "PATH": path, "COLUMNS": COLUMNS, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-c", words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        self._code = done.returncode
        return done.stdout


def on_ranks(pool: RankPool, words: str, missing: Sequence[str] = ()) -> str:
    """
    Run `torchrun --nproc-per-node N script.py ...` on ranks of the pool; return what they printed.

    Raises:
        ValueError: it is written in another way.

    """
    found = _TORCHRUN.fullmatch(words)
    if found is None:
        raise ValueError(f"no command of torchrun: {words}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = (os.getcwd(), found[2], found[3].split(), port, list(missing))
    return "".join(pool.run(int(found[1]), run_script, *script, init=False, timeout_s=PATIENCE_S))


def run_script(folder: str, script: str, arguments: list[str], port: int | None, missing: list[str]) -> str:
    """
    Run a script, and return what it printed; on a rank of the pool.

    With a port it runs as one of torchrun's ranks, without one as a single process.
    """
    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", [script, *arguments]),
            contextlib.redirect_stdout(io.StringIO()) as out,
            without(missing),
        ):
            if port is None:
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                    os.environ.pop(name, None)
            else:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if script.startswith("-m "):
                runpy.run_module(script[3:], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    finally:
        os.chdir(before)
    return out.getvalue()


def in_terminal(words: list[str]) -> tuple[int, str]:
    """Run `shardkeep`, writing to a pseudo-terminal; return its exit code and what it printed, remarks last."""
    remarks = io.StringIO()
    with (
        terminal() as (screen, written),
        mock.patch.dict(os.environ, {"COLUMNS": COLUMNS, "NO_COLOR": "1", "PAGER": "cat"}),
        os.fdopen(screen, "w", encoding="utf-8", closefd=False) as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(remarks),
    ):
        code = main(words)
    return code, written[0].replace("\r\n", "\n") + remarks.getvalue()
