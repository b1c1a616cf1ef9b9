"""
Python in a process of its own, without the seconds of CPU that `import torch` takes.

For scripts that import torch anyway, where it does not matter that torch is there before their first line. Each is a
fork of one process (`server.py`) and otherwise what `python` would be: its own `__main__`, streams, environment,
folder, exit. What is looked at when Python starts is not looked at again: PYTHONPATH, `sitecustomize`, options.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

WAIT_S = 120.0
"""For a program, on a machine that is busy with other tests."""


@functools.cache
def _server() -> socket.socket:
    """Start the process that has imported torch, once; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).with_name("server.py")), str(theirs.fileno())]
    # Threads do not survive a fork, and a pool that believes it still has them waits for ever.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
    process.returncode = 0  # nobody waits for it: it ends when the socket does
    theirs.close()
    atexit.register(ours.close)
    return ours


def warm_python(
    *words: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """
    Run `python *words` and return how it ended and what it said, as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was killed.

    """
    request = {"words": [str(word) for word in words], "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
    answers, theirs = socket.socketpair()
    with answers, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        with theirs:
            fds = [nothing.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(_server(), [json.dumps(request).encode()], fds)
        answers.settimeout(timeout_s)
        with answers.makefile() as lines:
            pid = int(lines.readline())
            try:
                code = int(lines.readline())
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(request["words"], timeout_s) from None
        said = [_text(each) for each in (out, err)]
    return subprocess.CompletedProcess(request["words"], code, *said)


def _text(file: tempfile._TemporaryFileWrapper[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
