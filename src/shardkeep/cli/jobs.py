"""
Runs the work of a command on several processes of this machine, which share it as ranks do; this one is rank 0.

The others are forks of it, which need not import anything. A fork cannot use the client of an object store that its parent
has used, and not every system forks safely, so then they are new processes. Ranks meet through a file of torch's.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import wait
from typing import Any, TypeVar

from shardkeep.cli import argument
from shardkeep.cli import output as out
from shardkeep.dist.world import World
from shardkeep.engine.process.rpc import describe_exit
from shardkeep.engine.sources import find
from shardkeep.errors import CheckpointError
from shardkeep.options import Options, cores, set_for_children, setting
from shardkeep.storage.base import scheme_of
from shardkeep.storage.resolve import open_store

JOBS = argument(
    "--jobs", metavar="N", type=int, help="processes that share the work (default: by cores and size, 1 if small)"
)
_CORES_OF_JOB = 4
"""The threads of one process keep as many busy."""
_NBYTES_OF_JOB = 2 << 30
"""Less is not worth another process."""
_MOST_JOBS = 8
_END_S = 10.0
"""How long a process may take to remove what it wrote, before it is killed."""

T = TypeVar("T")
Work = Callable[..., T]
"""Does the work, or this rank's part of it; takes `group` and `progress`."""


def jobs_for(given: int | None, source: str) -> int:
    """Return how many processes share the work on a checkpoint: as many as the user says, or by cores and size."""
    if given is not None and given < 1:
        raise out.UsageError(f"--jobs {given}: at least one process is needed")
    most = min(_MOST_JOBS, cores() // _CORES_OF_JOB)
    if given is not None or most < 2:
        return given or 1
    with contextlib.suppress(CheckpointError):  # the work itself will report it
        nbytes = find(open_store(source, direct=Options().direct_io)).record.stored_nbytes
        return max(1, min(most, nbytes // _NBYTES_OF_JOB))
    return 1


@contextlib.contextmanager
def sharing(jobs: int, work: Work[T], *places: str) -> Iterator[Work[T]]:
    """Start the other processes, and yield a function that shares the work with them. `places` are read and written."""
    if jobs == 1:
        yield work
        return
    local = all(scheme_of(place) in (None, "file") for place in places)
    context: Any = mp.get_context("fork" if local and sys.platform == "linux" else "spawn")
    before = setting("LOCAL_WORLD_SIZE")
    with tempfile.TemporaryDirectory(prefix="shardkeep-jobs-") as folder, contextlib.ExitStack() as ends:
        ends.callback(set_for_children, "LOCAL_WORLD_SIZE", before)
        set_for_children("LOCAL_WORLD_SIZE", str(jobs))  # they share cores and memory
        others: list[Any] = []
        ends.push(lambda kind, *_: _end(others, 0.0 if kind is KeyboardInterrupt else _END_S))
        for rank in range(1, jobs):
            others.append(context.Process(target=_follow, args=(rank, jobs, folder, work), daemon=True))
            others[-1].start()
        yield partial(_lead, others, folder, work)


def _world(rank: int, jobs: int, folder: str) -> World:
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # noqa: PLC0415 - missing from the stubs

    return World(rank, jobs, FileStore(os.path.join(folder, "store"), jobs), Options().timeout_s)


def _lead(others: Sequence[Any], folder: str, work: Work[T], *, progress: Callable[[int, int], object]) -> T:
    """Do the part of rank 0, and stop wherever it is if another process dies."""
    jobs = len(others) + 1
    died: list[CheckpointError] = []
    ending = threading.Event()
    stop, stopped = mp.Pipe(duplex=False)

    def watch() -> None:
        living: dict[Any, int] = {process.sentinel: number for number, process in enumerate(others)}
        while stop not in (ended := list[Any](wait([stop, *living]))):
            number = living.pop(ended[0])
            others[number].join()
            if others[number].exitcode and not ending.is_set():
                how = f"process {number + 2} of {jobs} (pid {others[number].pid}) {describe_exit(others[number].exitcode)}"
                hint = "if memory ran out, the kernel's log says so; fewer --jobs need less"
                died.append(CheckpointError(how, hint=hint))
                os.kill(os.getpid(), signal.SIGINT)
                return

    def interrupted(*_: object) -> None:
        ending.set()  # a process that is ended has not died, and rank 0 is interrupted once: it then removes what it wrote
        _end(others, 0.0)  # first: what rank 0 removes then stays removed
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="shardkeep-jobs") as pool:
            watching = pool.submit(watch)
            try:
                # Every rank has about as much to do.
                count = lambda done, total: progress(jobs * done, jobs * total)  # noqa: E731
                return work(group=_world(0, jobs, folder), progress=count)
            finally:
                stopped.send(None)
                watching.result()
    except KeyboardInterrupt:
        if died:
            raise died[0] from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _end(processes: Sequence[Any], within_s: float) -> None:
    """Wait for processes, then end them; they remove what they wrote."""
    deadline = time.monotonic() + within_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.terminate()
    for process in processes:
        process.join(_END_S)
        process.kill()
        process.join()


def _follow(rank: int, jobs: int, folder: str, work: Work[object]) -> None:
    """Do the part of another rank. Its failure is raised by rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; rank 0 ends the others
    with contextlib.suppress(CheckpointError, KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # A daemon, because it waits for as long as the parent lives.
        threading.Thread(target=_end_with_parent, daemon=True, name="shardkeep-parent").start()
        try:
            work(group=_world(rank, jobs, folder))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway


def _end_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
