"""
A process that has imported torch and forks for each request; the fork runs a program.

`python.py` starts it with the number of a socket. A request is a line of JSON with four file descriptors: the program's
standard streams, and one over which its process id and then its exit code are sent. A fork leaves `serve` and ends like any
Python process, with `atexit` functions and waiting for threads.
"""

import contextlib
import gc
import json
import os
import random
import runpy
import selectors
import socket
import sys
import types
from typing import Any

# What all this is for. None of them imports torch.distributed.checkpoint, which tests put ours in the place of.
import torch
import torch._dynamo  # which comes with the first optimizer
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Serve requests until the socket is closed; in a fork, return the request."""
    with selectors.DefaultSelector() as watched:
        watched.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in watched.select():
                if key.fileobj is not requests:
                    watched.unregister(key.fd)
                    _tell_end(key.fd, *key.data)
                    continue
                line, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
                if not line:
                    return None
                pid = os.fork()
                if pid == 0:
                    requests.close()
                    return json.loads(line), fds
                for fd in fds[:3]:
                    os.close(fd)
                answers = socket.socket(fileno=fds[3])
                answers.send(f"{pid}\n".encode())
                watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _tell_end(watch: int, pid: int, answers: socket.socket) -> None:
    os.close(watch)
    _, status = os.waitpid(pid, 0)
    with answers, contextlib.suppress(OSError):  # the client may be gone
        answers.send(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(words: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> None:
    """Run a program in this process as `python` would with these words."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first, *rest = words
    if first == "-m":
        sys.path[0], sys.argv = cwd, ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # what `python -m` calls
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), words
        vars(main)["__file__"] = first
        with open(first, encoding="utf-8") as file:
            code = compile(file.read(), first, "exec")
        exec(code, vars(main))


if __name__ == "__main__":
    gc.freeze()  # else each fork goes through all of torch, and so copies it, when it collects and when it ends
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        become(asked[0]["words"], asked[0]["cwd"], asked[0]["env"], asked[1])
