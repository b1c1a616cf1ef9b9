"""
The writer process: it hashes and writes bytes that the training process shares with it.

It imports neither torch nor the training program, and the client library of an object store only when a save needs it.
Its CPU priority is low, and Linux derives that for the disk from it. It ignores the signals that a scheduler sends to
all processes of a job, and ends only with the training process, so that this can save once more.

Each request has one reply, on the pipe it came from; each pipe has a thread. Tensor bytes lie in memory that both
processes see. Notices have no reply, and come on a socket of their own, because all pipes may be in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import select
import signal
import socket
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import EncodingStore, Seal
from shardkeep.codecs.keys import CachedKeys
from shardkeep.dist.rank_errors import describe_error
from shardkeep.engine.process.rpc import MESSAGE_NBYTES, receive, send
from shardkeep.engine.writer import hash_and_write
from shardkeep.errors import Failure
from shardkeep.format.record import Recorded
from shardkeep.layouts import native
from shardkeep.options import decodable
from shardkeep.storage.base import BlobWriter, StoreSpec
from shardkeep.storage.buffers import MemoryBudget, aligned_buffer, copy, view_memory
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.resolve import open_spec

_SENT_TO_ALL = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
IGNORED_SIGNALS = frozenset(getattr(signal, name) for name in _SENT_TO_ALL if hasattr(signal, name))
"""Signals that terminals and schedulers may send to all processes of a job."""
_NICENESS = 10
_MOST_MAPPED = 4096
_PARENT_POLL_S = 1.0
_MAP_FAILED = ctypes.c_void_p(-1).value


class FileCodecSpec(msgspec.Struct, frozen=True):
    recorded: Recorded
    data_keys: dict[str, str]
    """Data keys by their wrapped form, because this process cannot ask the user for keys."""

    def __repr__(self) -> str:
        return f"FileCodecSpec({[each.get('name') for each in self.recorded]})"  # no keys in a log


@decodable
class CreateFile(msgspec.Struct, frozen=True, tag=True):
    """Begin a file; the reply has its number."""

    store: StoreSpec
    name: str
    nbytes: int
    codecs: FileCodecSpec | None = None
    room_nbytes: int = 0
    """Memory for what a store copies on the way, of all files of the save; 0: what it has for all files together."""


class WriteRuns(msgspec.Struct, frozen=True, tag=True):
    """Hash and write runs of shared memory, end to end; the reply has the digests."""

    file: int
    offset: int
    """In the file."""
    block_nbytes: int
    region: int
    """Where in the shared memory the region of the runs begins."""
    region_nbytes: int
    starts: bytes
    sizes: bytes
    """Where in the region each run begins, and its size; int64."""


class WriteBytes(msgspec.Struct, frozen=True, tag=True):
    """Write a few bytes, such as a header."""

    file: int
    offset: int
    data: bytes


class FinishFile(msgspec.Struct, frozen=True, tag=True):
    """Make a file durable; the reply has the seal of a coded file."""

    file: int
    nbytes: int | None = None
    """The size of the file; None: as it was created."""


class AbandonFile(msgspec.Struct, frozen=True, tag=True):
    """Remove a file, unless it is finished, and forget it."""

    file: int


WriterRequest = CreateFile | WriteRuns | WriteBytes | FinishFile | AbandonFile


@decodable
class WriterReply(msgspec.Struct, frozen=True, kw_only=True):
    file: int = 0
    digests: bytes = b""
    seal: Seal | None = None
    failure: Failure | None = None


def map_shared(fd: int, offset: int, nbytes: int, *, owned: bool) -> memoryview:
    """Map whole pages of a memory file until their last view is gone; `owned` ones are writable, and freed with it."""
    # Python's own `mmap` would hold a file descriptor for each mapping.
    access = mmap.PROT_READ | mmap.PROT_WRITE if owned else mmap.PROT_READ
    address: int | None = _libc().mmap(None, nbytes, access, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of shared memory")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # works only where the system allows it for shared memory
    # Views keep the array alive, as they would not keep a plain address.
    pages = np.frombuffer(view_memory(address, nbytes), np.uint8)
    weakref.finalize(pages, _unmap, address, nbytes, owned, os.getpid()).atexit = False
    return pages.data if owned else pages.data.toreadonly()


def _unmap(address: int, nbytes: int, owned: bool, process_id: int) -> None:
    if process_id != os.getpid():  # a fork must not free its parent's memory
        return
    if owned:
        _libc().madvise(address, nbytes, mmap.MADV_REMOVE)
    _libc().munmap(address, nbytes)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def main(pipes: Sequence[int], notices: int, memory: int, parent: int) -> NoReturn:
    """Serve requests from these pipes, about memory in this file, until the parent closes the pipes or is gone."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    with contextlib.suppress(OSError):  # not every user may
        os.nice(_NICENESS)
    files = _Files(memory)
    threads = ThreadPoolExecutor(len(pipes) + 1)
    for pipe in pipes:
        threads.submit(_serve, socket.socket(fileno=pipe), files)
    threads.submit(_serve_notices, socket.socket(fileno=notices), files)
    # Until the parent is gone. The end of a pipe would not do: processes that the parent has forked may hold it open.
    watched: list[int] = []
    with contextlib.suppress(AttributeError, OSError):  # an old system: polls
        watched.append(os.pidfd_open(parent))
    while os.getppid() == parent and not select.select(watched, [], [], None if watched else _PARENT_POLL_S)[0]:
        pass
    os._exit(0)


def _serve(pipe: socket.socket, files: _Files) -> None:
    decoder = msgspec.msgpack.Decoder(WriterRequest)
    try:
        while True:
            request = decoder.decode(receive(pipe))
            try:
                reply = files.answer(request)
            except Exception as error:  # noqa: BLE001 - raised in the training process
                reply = WriterReply(failure=describe_error(error))
            send(pipe, msgspec.msgpack.encode(reply))
    except (EOFError, OSError):
        os._exit(0)  # the training process has closed the pipe
    except BaseException:  # noqa: BLE001 - or that process would wait for a reply
        traceback.print_exc()
        os._exit(1)


def _serve_notices(notices: socket.socket, files: _Files) -> None:
    """Each notice is the name of a file whose save has failed: nothing waits for the store in that save any more."""
    with notices, contextlib.suppress(OSError):  # the training process closes it before the pipes
        while message := notices.recv(MESSAGE_NBYTES):
            files.cancel_save_of(message.decode())


@contextlib.contextmanager
def _cancelling(scope: CancelScope) -> Iterator[None]:
    """Cancel the other files of a save after a failure inside: the save has failed, and they need not wait for a store."""
    try:
        yield
    except BaseException:
        scope.cancel()
        raise


@dataclass(frozen=True)
class _File:
    writer: BlobWriter
    seals: dict[str, Seal]
    scope: CancelScope
    """Shared by all files of its save."""


class _ThreadMemory(threading.local):
    view = memoryview(b"")


class _Files:
    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._own = _ThreadMemory()
        self._mapped: dict[tuple[int, int], memoryview] = {}
        self._numbers = itertools.count(1)
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()
        self._scopes: WeakValueDictionary[str, CancelScope] = WeakValueDictionary()

    def answer(self, request: WriterRequest) -> WriterReply:
        if isinstance(request, CreateFile):
            return self._create(request)
        file = self._files[request.file]
        if isinstance(request, AbandonFile):
            # The save has failed: its other files need not wait for a store.
            file.scope.cancel()
            file.writer.abandon()
            del self._files[request.file]
            return WriterReply()
        with _cancelling(file.scope):
            if isinstance(request, WriteRuns):
                data = self._bytes_of(request)
                return WriterReply(digests=hash_and_write(file.writer, request.offset, data, request.block_nbytes))
            if isinstance(request, WriteBytes):
                file.writer.write_at(request.offset, memoryview(request.data))
                return WriterReply()
            file.writer.finish(request.nbytes)
            del self._files[request.file]
            return WriterReply(seal=next(iter(file.seals.values()), None))

    def _create(self, request: CreateFile) -> WriterReply:
        chains, codecs = {}, request.codecs
        if codecs is not None:
            chains[request.name] = CodecChain.opened(codecs.recorded, keys=CachedKeys(known=codecs.data_keys))
        scope = CancelScope(budget=MemoryBudget(request.room_nbytes) if request.room_nbytes else None)
        with self._lock:  # one at a time: opening a store may change the environment
            store = EncodingStore(open_spec(request.store), chains)
            # Shared by the files of a save. A file without a save id has its own: its name may be reused.
            if (save_id := native.save_id_of(request.name)) is not None:
                scope = self._scopes.setdefault(save_id, scope)
        with _cancelling(scope), scope.active():
            writer = store.create(request.name, request.nbytes)
        number = next(self._numbers)
        self._files[number] = _File(writer, store.seals, scope)
        return WriterReply(file=number)

    def cancel_save_of(self, name: str) -> None:
        with self._lock:
            scope = self._scopes.get(native.save_id_of(name) or "")
        if scope is not None:
            scope.cancel()

    def _bytes_of(self, request: WriteRuns) -> memoryview:
        """Return the runs end to end: a single one as it lies, several as a copy."""
        key = request.region, request.region_nbytes
        region = self._mapped.get(key)
        if region is None:  # mapped once: mapping is cheap, but then each of its pages faults again
            if len(self._mapped) >= _MOST_MAPPED:  # most of them were freed by the training process since
                self._mapped = {}
            region = self._mapped[key] = map_shared(self._memory, *key, owned=False)
        starts: list[int] = np.frombuffer(request.starts, np.int64).tolist()
        sizes: list[int] = np.frombuffer(request.sizes, np.int64).tolist()
        if len(starts) == 1:
            return region[starts[0] : starts[0] + sizes[0]]
        if len(self._own.view) < sum(sizes):
            self._own.view = aligned_buffer(sum(sizes))
        data, at = self._own.view[: sum(sizes)], 0
        for start, size in zip(starts, sizes, strict=True):
            copy(data[at : at + size], region[start : start + size])
            at += size
        return data
