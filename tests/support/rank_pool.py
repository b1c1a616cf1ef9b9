"""
Ranks for tests: processes that stay alive between tests and form a fresh process group for each run.

In comes a top-level function; out comes what it returned or raised on each rank. Importing torch takes seconds, so a
single process does it, of which the ranks are forks (`forking`); a rank is started when it is first needed
and used again by later runs, and one that died or hung is replaced. What a run leaves behind in its processes
(modules, seeds, environment) is still there in the next one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import wait as wait_any
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tests.support.forking import fork_context
from tests.support.rank_process import Finished, Job, StoreAt, rank_process

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from multiprocessing.connection import Connection
    from typing import Literal

    from torch.distributed.distributed_c10d import Store
    from typing_extensions import Self

T = TypeVar("T")

START_S = 120.0
"""How long a process may take to import torch."""
LOG_LINES = 60
"""How much of a rank's output an error message shows."""


class RankPoolError(Exception):
    """Ranks failed, died or did not finish; the message shows the traceback or the stacks of each."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a run ended on one rank."""

    rank: int
    value: T | None = None
    error: BaseException | None = None
    """What the rank raised, with its `__cause__`; a `RankPoolError` with its text where it cannot be pickled."""
    trace: str = ""
    """The traceback of `error`."""
    died: str = ""
    """Says how the process ended, where it did not live to return ("killed by SIGKILL")."""


class RankPool:
    """Up to `size` processes, started when needed. Close it, or use it as a context manager."""

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self._processes: list[_Process] = []
        self._folder = tempfile.mkdtemp(prefix="shardkeep-ranks-")
        self._store: Store | None = None
        self._store_port = 0
        self._runs = 0

    def run(
        self, world_size: int, fn: Callable[..., T], *args: Any, expect_death: Collection[int] = (), **kwargs: Any
    ) -> list[T]:
        """
        Do as `outcomes` does, and return the results by rank; raises if a rank raised, died or did not finish.

        Ranks of `expect_death` must die; their result is None.
        """
        outcomes = self.outcomes(world_size, fn, *args, **kwargs)
        bad = [
            f"rank {one.rank}: {one.trace or one.died or 'did not die'}"
            for one in outcomes
            if one.error or bool(one.died) != (one.rank in expect_death)
        ]
        if bad:
            raise RankPoolError("\n".join([f"{len(bad)} of {world_size} ranks failed", *bad]))
        return [one.value for one in outcomes]  # type: ignore[misc]  # None only from ranks that had to die

    def outcomes(
        self,
        world_size: int,
        fn: Callable[..., T],
        *args: Any,
        timeout_s: float = 60,
        backend: str = "gloo",
        init: bool = True,
        store_on: Literal["parent", "rank0"] = "parent",
        **kwargs: Any,
    ) -> list[Outcome[T]]:
        """
        Call `fn(*args, **kwargs)` on each of `world_size` ranks; returns whether each returned, raised or died.

        After `timeout_s`, raises an error with every rank's stack, and kills the processes. Without `init` there is no
        process group; RANK, WORLD_SIZE and their LOCAL_ forms are in the environment either way. `store_on` says which
        process hosts the group's store, and takes it along when it dies.
        """
        call = pickle.dumps((fn, args, kwargs))
        processes = self._ready(world_size)
        self._runs += 1
        at = StoreAt(f"run{self._runs}", self._parent_port() if store_on == "parent" else 0, store_on == "parent")
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(processes):
            job = Job(rank, world_size, call, tuple(sys.path), backend if init else "", at, timeout_s)
            process.send(job)
            if rank == 0 and at.port == 0:
                at = replace(at, port=process.receive_port(deadline))
        self._wait(processes, deadline, timeout_s)
        return [_outcome(rank, process) for rank, process in enumerate(processes)]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()
        self._processes = []
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self, world_size: int) -> list[_Process]:
        if world_size > self._size:
            raise ValueError(f"a pool of {self._size} cannot run {world_size} ranks")
        for number in range(world_size):
            if number == len(self._processes):
                self._processes.append(_Process(self._folder))
            elif not self._processes[number].idle():
                self._processes[number].end()
                self._processes[number] = _Process(self._folder)
        processes = self._processes[:world_size]
        for process in processes:
            process.await_start()
        return processes

    def _parent_port(self) -> int:
        # One store for all runs, apart by prefix: connections are made once, not for each run.
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store, self._store_port = store, store.port
        return self._store_port

    def _wait(self, processes: list[_Process], deadline: float, timeout_s: float) -> None:
        while busy := [process for process in processes if process.finished is None and process.alive()]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RankPoolError(self._give_up(processes, timeout_s))
            for connection in wait_any([process.connection for process in busy], left_s):
                next(process for process in busy if process.connection is connection).receive()

    def _give_up(self, processes: list[_Process], timeout_s: float) -> str:
        stuck = [rank for rank, process in enumerate(processes) if process.finished is None and process.alive()]
        for rank in stuck:
            processes[rank].dump_stacks()
        lines = [f"ranks {stuck} of {len(processes)} did not finish within {timeout_s:g} s"]
        for rank, process in enumerate(processes):
            if rank in stuck:
                lines.append(f"rank {rank}: stacks and output\n{process.log()}")
            elif process.finished is None:
                lines.append(f"rank {rank}: {process.death()}")
            else:
                lines.append(f"rank {rank}: {process.finished.trace or 'returned'}")
        # Those that returned are as good as new; the others hold who knows what.
        for rank in stuck:
            processes[rank].kill()
        return "\n".join(lines)


def _outcome(rank: int, process: _Process) -> Outcome[Any]:
    if process.finished is None:
        return Outcome(rank, died=process.death())
    if process.finished.value:
        return Outcome(rank, value=pickle.loads(process.finished.value))
    error = RankPoolError(process.finished.trace)
    with contextlib.suppress(Exception):  # an exception that cannot be rebuilt here is shown as text
        error, cause = pickle.loads(process.finished.error)
        error.__cause__ = cause
    return Outcome(rank, error=error, trace=process.finished.trace)


class _Process:
    """One process of the pool, seen from the caller."""

    def __init__(self, folder: str) -> None:
        context = fork_context()
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        handle, self._log_path = tempfile.mkstemp(suffix=".log", dir=folder)
        os.close(handle)
        self._process = context.Process(target=rank_process, args=(theirs, self._log_path), daemon=True)
        self._process.start()
        # Closed here, so that the end of the process is the end of the pipe.
        theirs.close()
        self._started = False
        self._busy = False
        self.finished: Finished | None = None

    def alive(self) -> bool:
        return not self.connection.closed and self._process.is_alive()

    def idle(self) -> bool:
        return self.alive() and not self._busy

    def await_start(self) -> None:
        if not self._started:
            if not self.connection.poll(START_S) or self.connection.recv() != "started":
                raise RankPoolError(f"a rank's process did not start: {self.log()}")
            self._started = True

    def send(self, job: Job) -> None:
        self.finished, self._busy = None, True
        self.connection.send(job)

    def receive_port(self, deadline: float) -> int:
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise RankPoolError(f"rank 0 did not open its store in time\n{self.log()}")
        port = self.connection.recv()
        if isinstance(port, Finished):
            self.finished, self._busy = port, False
            raise RankPoolError(f"rank 0 could not open its store\n{port.trace}")
        return int(port)

    def receive(self) -> None:
        try:
            self.finished = self.connection.recv()
            self._busy = self.finished.spoiled
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            self.connection.close()

    def death(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with {code}\n{self.log()}"

    def dump_stacks(self) -> None:
        before = os.path.getsize(self._log_path)
        if self._process.pid is None or not self._process.is_alive():
            return
        os.kill(self._process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if os.path.getsize(self._log_path) > before:
                time.sleep(0.05)
                return

    def log(self) -> str:
        with open(self._log_path, errors="replace") as file:
            lines = [line for line in file.read().splitlines() if not line.startswith("frame #")]
        return "\n".join(lines[-LOG_LINES:])

    def kill(self) -> None:
        self._process.kill()
        self._process.join(5)
        self.connection.close()

    def end(self) -> None:
        self.kill()
        self._process.close()
