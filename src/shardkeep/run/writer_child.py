"""
What runs in the process that writes: it hashes and writes memory that the training process shares with it.

It imports neither torch nor the program that trains, and the libraries of object stores only where one is written to.
It has a low priority for the CPU, from which Linux derives that for the disk. Each pipe is served by a thread of its own.
It ends with the training process, and at nobody else's wish: a scheduler that tells all processes of a job to end leaves
it to the training process to save once more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from shardkeep.layout import native
from shardkeep.layout.coded_store import EncodingStore
from shardkeep.layout.frame_writer import Seal
from shardkeep.ranks.verdict import describe
from shardkeep.run.write import hash_and_write
from shardkeep.run.writer_mapping import map_shared
from shardkeep.run.writer_pipe import MESSAGE_NBYTES, receive, send
from shardkeep.run.writer_wire import Abandon, Create, GiveUp, Reply, Request, WriteBytes, WriteRuns
from shardkeep.store.aligned import aligned_buffer, copy
from shardkeep.store.giving_up import Hope
from shardkeep.store.object_parts import Room
from shardkeep.store.protocol import BlobWriter

_SENT_TO_ALL = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
IGNORED = frozenset(getattr(signal, name) for name in _SENT_TO_ALL if hasattr(signal, name))
"""What terminals and schedulers may send to all processes of a job."""
_NICENESS = 10
_MOST_MAPPED = 4096
_LOOK_S = 1.0


def main(pipes: Sequence[int], aside: int, memory: int, parent: int) -> NoReturn:
    """Serve requests from these pipes, about memory in this file, until the parent closes them or is gone."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    with contextlib.suppress(OSError):  # not everybody may
        os.nice(_NICENESS)
    files = _Files(memory)
    threads = ThreadPoolExecutor(len(pipes) + 1)
    for pipe in pipes:
        threads.submit(_serve, socket.socket(fileno=pipe), files)
    threads.submit(_listen, socket.socket(fileno=aside), files)
    _wait_for_end_of(parent)
    os._exit(0)


def _wait_for_end_of(parent: int) -> None:
    """Wait until a process is gone; a pipe may be held open by others that it has forked."""
    watch: list[int] = []
    with contextlib.suppress(AttributeError, OSError):  # an old system: looks once in a while
        watch.append(os.pidfd_open(parent))
    while os.getppid() == parent:
        if select.select(watch, [], [], None if watch else _LOOK_S)[0]:
            return


def _serve(pipe: socket.socket, files: _Files) -> None:
    decoder = msgspec.msgpack.Decoder(Request)
    own = _Own()
    try:
        while True:
            send(pipe, msgspec.msgpack.encode(_tried(decoder.decode(receive(pipe)), files, own)))
    except (EOFError, OSError):
        os._exit(0)  # the training process has closed the pipe
    except BaseException:  # noqa: BLE001 - or that process would wait for an answer
        traceback.print_exc()
        os._exit(1)


def _listen(aside: socket.socket, files: _Files) -> None:
    decoder = msgspec.msgpack.Decoder(GiveUp)
    with aside, contextlib.suppress(OSError):  # closed by the training process before the other pipes are
        while message := aside.recv(MESSAGE_NBYTES):
            files.give_up(decoder.decode(message).name)


def _tried(request: Request, files: _Files, own: _Own) -> Reply:
    """Carry out a request. Whatever it raises is a reply."""
    try:
        return files.answer(request, own)
    except Exception as error:  # noqa: BLE001 - raised in the training process
        return Reply(failure=describe(error))


class _Own:
    """Memory of one thread, made when it is needed."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        if len(self._view) < nbytes:
            self._view = aligned_buffer(nbytes)
        return self._view[:nbytes]


@contextlib.contextmanager
def _shared_by(hope: Hope) -> Iterator[None]:
    """Let the other files of a save hear of a failure inside: the save has failed, and they need not wait for a store."""
    try:
        yield
    except BaseException:
        hope.give_up()
        raise


@dataclass(frozen=True)
class _File:
    """A file that is being written."""

    writer: BlobWriter
    seals: dict[str, Seal]
    hope: Hope
    """That of its save."""


class _Files:
    """The files that are being written. Used by several threads."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._mapped: dict[tuple[int, int], memoryview] = {}
        self._numbers = itertools.count(1)
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()
        self._hopes: WeakValueDictionary[str, Hope] = WeakValueDictionary()

    def answer(self, request: Request, own: _Own) -> Reply:
        """Carry out a request."""
        if isinstance(request, Create):
            return self._create(request)
        file = self._files[request.file]
        if isinstance(request, Abandon):
            # The save has failed: what of it still waits for a store need not.
            file.hope.give_up()
            file.writer.abandon()
            del self._files[request.file]
            return Reply()
        with _shared_by(file.hope):
            if isinstance(request, WriteRuns):
                data = self._bytes_of(request, own)
                return Reply(digests=hash_and_write(file.writer, request.offset, data, request.block_nbytes))
            if isinstance(request, WriteBytes):
                file.writer.write_at(request.offset, memoryview(request.data))
                return Reply()
            file.writer.finish(request.nbytes)
            del self._files[request.file]
            return Reply(seal=next(iter(file.seals.values()), None))

    def _create(self, request: Create) -> Reply:
        chains = {} if request.coded is None else {request.name: request.coded.opened()}
        with self._lock:  # one at a time: to open a store may change the environment
            store = EncodingStore(request.place.opened(), chains)
            hope = self._hope_of(request)
        with _shared_by(hope), hope.held():
            writer = store.create(request.name, request.nbytes)
        number = next(self._numbers)
        self._files[number] = _File(writer, store.seals, hope)
        return Reply(file=number)

    def give_up(self, name: str) -> None:
        """Let all files of the save that this one belongs to be given up, as something failed elsewhere."""
        with self._lock:
            hope = self._hopes.get(native.save_id_of(name) or "")
        if hope is not None:
            hope.give_up()

    def _hope_of(self, request: Create) -> Hope:
        """Return what the files of one save share; others share nothing, as something of their name may come later."""
        hope = Hope(room=Room(request.room_nbytes) if request.room_nbytes else None)
        save_id = native.save_id_of(request.name)
        return hope if save_id is None else self._hopes.setdefault(save_id, hope)

    def _bytes_of(self, request: WriteRuns, own: _Own) -> memoryview:
        """Return the runs end to end: as they lie, if there is one, else as a copy."""
        region = self._region(request.region, request.region_nbytes)
        starts: list[int] = np.frombuffer(request.starts, np.int64).tolist()
        sizes: list[int] = np.frombuffer(request.sizes, np.int64).tolist()
        if len(starts) == 1:
            return region[starts[0] : starts[0] + sizes[0]]
        data = own.of(sum(sizes))
        at = 0
        for start, size in zip(starts, sizes, strict=True):
            copy(data[at : at + size], region[start : start + size])
            at += size
        return data

    def _region(self, offset: int, nbytes: int) -> memoryview:
        """Map a region once: to map is cheap, but all its pages must then be found again."""
        region = self._mapped.get((offset, nbytes))
        if region is None:
            if len(self._mapped) >= _MOST_MAPPED:  # of which most are given back since
                self._mapped = {}
            region = self._mapped[offset, nbytes] = map_shared(self._memory, offset, nbytes, owned=False)
        return region
