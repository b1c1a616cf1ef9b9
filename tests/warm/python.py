"""
Python in a process of its own, without the seconds of CPU that `import torch` takes.

For scripts that import torch anyway, where it does not matter that torch is there before their first line. Each is a
fork of one process (`server.py`) and otherwise what `python` would be: its own `__main__`, streams, environment,
folder, exit. What is looked at when Python starts is not looked at again: PYTHONPATH, `sitecustomize`, options.
"""

import atexit
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 120.0
"""For a program, on a machine that is busy with other tests."""

LEAKS = re.compile(r"^(nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.).*\n?", re.MULTILINE)
"""What triton prints when a process ends: it comes with CUDA builds of torch, and `torch._dynamo` imports it."""


@functools.cache
def _server() -> socket.socket:
    """Start the process that has imported torch, once; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).with_name("server.py")), str(theirs.fileno())]
    # Threads do not survive a fork, and a pool that believes it still has them waits for ever.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
    process.returncode = 0  # not waited for: it ends when the socket is closed
    theirs.close()
    atexit.register(ours.close)
    return ours


class _Fork:
    def __init__(self, words: Sequence[Any], cwd: Any, env: Mapping[str, str] | None, streams: list[int]) -> None:
        self.args = [str(word) for word in words]
        request = {"words": self.args, "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
        self._answers, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_server(), [json.dumps(request).encode()], [*streams, theirs.fileno()])
        self._lines = self._answers.makefile()
        self.pid = int(self._lines.readline())

    def wait(self, timeout: float) -> int:
        self._answers.settimeout(timeout)
        try:
            code = int(self._lines.readline())
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        finally:
            self._lines.close()
            self._answers.close()
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def warm_python(
    *words: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """
    Run `python *words` and return how it ended and what it said, as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was killed.

    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        fork = _Fork(words, cwd, env, [nothing.fileno(), out.fileno(), err.fileno()])
        code = fork.wait(timeout_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(fork.args, code, out.read().decode(), LEAKS.sub("", err.read().decode()))


def _refuses_late_threads() -> bool:
    code = "import threading; threading._register_atexit(lambda: threading.Thread(target=int).start())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return b"RuntimeError" in done.stderr


needs_late_threads = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12) and _refuses_late_threads(),
    reason="the first versions of Python 3.12 start no thread once the main script has ended: CPython's gh-113964",
)


class WarmPopen(_Fork):
    """As `subprocess.Popen` of a command that begins with Python, with two pipes of text that go line by line."""

    def __init__(self, command: Sequence[Any], **_: Any) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        try:
            super().__init__(command[1:], None, None, [theirs_in, theirs_out, 2])
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.stdin = os.fdopen(ours_in, "w", buffering=1)
        self.stdout = os.fdopen(ours_out)

    def wait(self, timeout: float) -> int:
        self.stdout.close()
        return super().wait(timeout)
