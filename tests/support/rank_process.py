"""
The inside of one process of a `RankPool`: takes jobs from a pipe, is a rank of a fresh group for each, sends back how
it went. Ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tests.support.forking import caches_of_torch_distributed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class StoreAt:
    """Where the group's store is."""

    prefix: str
    port: int
    """0 asks rank 0 to open one and say its port."""
    lasting: bool
    """It serves later runs too, so the connection is worth keeping."""


@dataclass(frozen=True)
class Job:
    """What one rank has to do in a run."""

    rank: int
    world_size: int
    call: bytes
    """The pickled function and its arguments."""
    sys_path: tuple[str, ...]
    """The caller's, so that functions of its test modules are found here."""
    backend: str
    """Empty for no process group."""
    store: StoreAt
    timeout_s: float


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    value: bytes = b""
    """The pickled result."""
    error: bytes = b""
    """The pickled exception and its cause; empty where pickle cannot do it."""
    trace: str = ""
    spoiled: bool = False
    """The process is of no use for another run."""


class NoGroup(Exception):
    """The process group was not made; torch's state in this process is no longer that of the others."""


def rank_process(connection: Connection, log_path: str) -> None:
    """Do jobs until the pipe ends."""
    _set_up(log_path)
    connection.send("started")
    # Connections to stores that outlive a run, by port.
    kept: dict[int, Store] = {}
    meshes = _Meshes()
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        sys.stderr.flush()
        os.truncate(log_path, 0)
        meshes.forget()
        connection.send(_do(job, kept, connection))


class _Meshes:
    """
    What torch keeps of the meshes of earlier runs.

    Its caches take a mesh for an equal one of before, whose process groups are gone by now: ranks would wait for ever.
    """

    def __init__(self) -> None:
        self._modules = 0
        inherited = sys.modules.get("tests.support.inherited")
        self._inherited: list[Any] = inherited.CACHES if inherited else []
        self._caches: list[Any] = []

    def forget(self) -> None:
        """Empty those caches; they are looked for again when modules were imported since."""
        if "torch.distributed.tensor" not in sys.modules:
            return
        if self._modules != len(sys.modules):
            self._modules = len(sys.modules)
            self._caches = [*self._inherited, *caches_of_torch_distributed()]
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch has no types for it
        for cache in self._caches:
            cache.cache_clear()


def _set_up(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True, name="end-with-parent").start()
    # torch looks up the name of every peer, for its log; a slow name server must not slow down the tests.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    # A rank that hangs does not see the end of its pipe.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(job: Job, kept: dict[int, Store], connection: Connection) -> Finished:
    try:
        sys.path[:] = [*job.sys_path, *(path for path in sys.path if path not in job.sys_path)]
        rank, size = str(job.rank), str(job.world_size)
        os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
        # First what may take seconds, the import of a test module; ranks leave the making of the group together.
        fn, args, kwargs = pickle.loads(job.call)
        with _process_group(job, kept, connection):
            return Finished(value=pickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - sent to the caller
        pair = b""
        with contextlib.suppress(Exception):
            pair = pickle.dumps((error, error.__cause__))
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return Finished(error=pair, trace=trace, spoiled=isinstance(error, NoGroup))


@contextlib.contextmanager
def _process_group(job: Job, kept: dict[int, Store], connection: Connection) -> Iterator[None]:
    import torch.distributed as dist

    store = _open_store(job, kept, connection)
    if not job.backend:
        yield
        return
    patience = timedelta(seconds=job.timeout_s)
    try:
        dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=patience)
        # A rank that is done, or dead, before its peers have connected to it would leave them waiting in there.
        store.set(f"ready/{job.rank}", "")
        store.wait([f"ready/{rank}" for rank in range(job.world_size)], patience)
    except Exception as error:
        raise NoGroup(f"rank {job.rank} could not join the process group") from error
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_store(job: Job, kept: dict[int, Store], connection: Connection) -> Store:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    at = job.store
    if at.port in kept:
        return PrefixStore(at.prefix, kept[at.port])
    opens = at.port == 0
    patience = timedelta(seconds=job.timeout_s)
    store = TCPStore("127.0.0.1", at.port, is_master=opens, wait_for_workers=False, timeout=patience)
    if opens:
        connection.send(store.port)
    if at.lasting:
        kept[at.port] = store
    return PrefixStore(at.prefix, store)
