"""
What runs in the process that writes: it hashes and writes memory that the training process shares with it.

It imports neither torch nor the program that trains, and the libraries of object stores only where one is written to.
It has a low priority for the CPU, from which Linux derives that for the disk. Each pipe is served by a thread of its own.
It ends with the training process, and at nobody else's wish: a scheduler that tells all processes of a job to end leaves
it to the training process to save once more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import EncodingStore, Seal
from shardkeep.codecs.keys import CachedKeys
from shardkeep.dist.rank_errors import describe_error
from shardkeep.engine.memory import view_memory
from shardkeep.engine.writer import hash_and_write
from shardkeep.errors import CheckpointError, Failure
from shardkeep.format.record import Recorded
from shardkeep.layouts import native
from shardkeep.options import set_for_children, setting
from shardkeep.storage.base import BlobWriter, Store
from shardkeep.storage.buffers import MemoryBudget, aligned_buffer, copy
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.local import LocalStore

# Messages between a training process and the process that writes for it, and how long one waits for the other.
#
# A process that is stopped, or whose disk hangs, neither answers nor takes what it is sent: whoever waits wakes up
# now and
# then, to see whether it is still worth it.

SLICE_S = 0.1
"""Between two looks of somebody who waits. What it waits for wakes it at once."""
_CANCELLED_S = 1.0
"""What a healthy process needs for a request, as a rule; one that nobody needs is cheap to replace."""
MESSAGE_NBYTES = 4096
"""The most of a message that has no answer."""
_SIZE = struct.Struct("!Q")

Ready = Callable[[int], None]
"""Waits until a socket can be read (POLLIN) or written (POLLOUT)."""


@dataclass(frozen=True)
class WaitPolicy:
    """How long a save waits for an answer."""

    timeout_s: float
    cancelled_s: float = _CANCELLED_S
    """How long at least, where the process would be ended because the save was cancelled."""
    given_up: Callable[[], bool] = lambda: False
    """
    Says whether nobody needs the process any more. It is asked until it says so; the process is then ended, so that
    from then on nobody may begin to need it.
    """


class NoReply(Exception):
    """Nobody answered, and there is no sense in waiting on. Its text says what the one who waited did."""


class ReplyDeadline:
    """One thread that waits for an answer."""

    def __init__(self, patience: WaitPolicy, *, more_s: float = 0.0) -> None:
        self._patience = patience
        self._most_s = patience.timeout_s + more_s
        self._waited_s = 0.0
        self._looked = time.monotonic()

    def begin_again(self) -> None:
        """Forget for how long it has waited: there was an answer, to somebody."""
        self._waited_s = 0.0

    def look(self) -> None:
        """
        Say that there was nothing for a slice of time.

        Raises:
            TooLong: that is enough.

        """
        now = time.monotonic()
        # A job may be stopped as a whole, and go on hours later: that nobody answered meanwhile means nothing.
        self._waited_s += min(now - self._looked, 2 * SLICE_S)
        self._looked = now
        if self._waited_s >= self._most_s:
            raise NoReply(f"did not answer within {self._most_s:.3g} s, and was ended")
        if self._waited_s >= self._patience.cancelled_s and self._patience.given_up():
            raise NoReply("was ended, as it did not answer when its save was cancelled")


def ready_within(pipe: socket.socket, gone: Sequence[int], waiting: ReplyDeadline) -> Ready:
    """
    Return what waits until a pipe can be used.

    It raises EOFError when one of the descriptors in `gone` says that the other process has ended, and TooLong.
    """

    def ready(event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        for each in gone:
            poll.register(each, select.POLLIN)
        while not (found := poll.poll(SLICE_S * 1000)):
            waiting.look()
        if all(descriptor in gone for descriptor, _ in found):
            raise EOFError("the process has ended")

    return ready


def no_wait(event: int) -> None:
    """Wait for nothing: for sockets that block."""
    del event


def send(pipe: socket.socket, data: bytes, ready: Ready = no_wait) -> None:
    """Send a message."""
    left = memoryview(_SIZE.pack(len(data)) + data)
    while left:
        ready(select.POLLOUT)
        try:
            left = left[pipe.send(left, socket.MSG_NOSIGNAL) :]  # of a closed pipe an error tells
        except BlockingIOError:
            continue


def receive(pipe: socket.socket, ready: Ready = no_wait) -> bytes:
    """
    Receive a message.

    Raises:
        EOFError: the other end was closed.

    """
    (nbytes,) = _SIZE.unpack(_receive_exactly(pipe, _SIZE.size, ready))
    return bytes(_receive_exactly(pipe, nbytes, ready))


def _receive_exactly(pipe: socket.socket, nbytes: int, ready: Ready) -> bytearray:
    data = bytearray(nbytes)
    left = memoryview(data)
    while left:
        ready(select.POLLIN)
        try:
            got = pipe.recv_into(left)
        except BlockingIOError:
            continue
        if not got:
            raise EOFError("the pipe was closed")
        left = left[got:]
    return data


# Stores in words, from which the process that writes opens them again.
#
# There are keys among these words: they go through its pipes and nowhere else, so that no list of processes, no file
# and
# no log shows them. A library that talks to a store is imported there when a save needs it, and begins afresh.


class LocalStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A directory of this machine."""

    path: bytes
    """Absolute, as the system has it."""
    direct: bool
    durable: bool

    def opened(self) -> LocalStore:
        """Open it here."""
        return LocalStore(os.fsdecode(self.path), direct=self.direct, durable=self.durable)


class BucketStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A prefix of a bucket."""

    service: str
    name: str
    prefix: str
    url: str
    options: dict[str, Any]
    """As the bucket was opened with; there may be keys among them."""
    environment: dict[str, str | None]
    """What its variables were in the training process when it was opened; there may be keys among them, too."""

    def __repr__(self) -> str:
        return f"BucketPlace({self.url!r})"  # and no keys

    def opened(self) -> Store:
        """Open it here; the connections of one bucket are used again."""
        from shardkeep.storage.object_client import open_bucket  # noqa: PLC0415 - most saves need none of this
        from shardkeep.storage.object_store import ObjectStore  # noqa: PLC0415

        for name, value in self.environment.items():
            if setting(name) != value:  # not without need: threads of the library may be reading others
                set_for_children(name, value)
        return ObjectStore(open_bucket(self.service, self.name, self.options), self.prefix, self.url)


class FsspecStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A directory of a file system of fsspec."""

    module: str
    kind: str
    """The file system's class in that module."""
    args: list[Any]
    options: dict[str, Any]
    """As the file system was opened with; there may be passwords among them."""
    path: str
    url: str
    settle_s: float

    def __repr__(self) -> str:
        return f"FsspecPlace({self.url!r})"  # and no passwords

    def opened(self) -> Store:
        """
        Open it here.

        Raises:
            CheckpointError: its class is not to be found here.
            StorageError: it cannot be opened.

        """
        from shardkeep.storage.fsspec import FsspecStore, fs_errors  # noqa: PLC0415 - most saves need none of this

        try:
            kind = getattr(importlib.import_module(self.module), self.kind)
        except (ImportError, AttributeError) as exc:
            raise CheckpointError(
                f'{self.url}: writer="process" finds no {self.module}.{self.kind} in another process: {exc}',
                hint='that process does not run your program: bring the file system in a package, or pass writer="thread"',
            ) from exc
        with fs_errors("cannot open", self.url):
            fs = kind(*self.args, **self.options)
        return FsspecStore(fs, self.path, self.url, settle_s=self.settle_s)


StoreSpec = LocalStoreSpec | BucketStoreSpec | FsspecStoreSpec


# What a training process and the process that writes for it say to each other. Bytes of tensors are not among it:
# they
# lie in memory that both see.
#
# Each request has one reply, on the pipe it came from. What has none comes on a pipe of its own: all others may be in
# use
# by those who wait for a reply.


class FileCodecSpec(msgspec.Struct, frozen=True):
    """The codecs that a file goes through."""

    recorded: Recorded
    data_keys: dict[str, str]
    """By what they are wrapped as: that process cannot ask the user for keys."""

    def __repr__(self) -> str:
        return f"Coded({[each.get('name') for each in self.recorded]})"  # no keys in a log

    def opened(self) -> CodecChain:
        """Open them here."""
        return CodecChain.opened(self.recorded, keys=CachedKeys(known=self.data_keys))


class CreateFile(msgspec.Struct, frozen=True, tag=True):
    """Begin a file; the reply says its number."""

    place: StoreSpec
    name: str
    nbytes: int
    coded: FileCodecSpec | None = None
    room_nbytes: int = 0
    """For what a store copies on the way, of all files of the save; 0: what it has for all files together."""


class WriteRuns(msgspec.Struct, frozen=True, tag=True):
    """Hash and write runs of shared memory, end to end; the reply has the digests."""

    file: int
    offset: int
    """Where in the file."""
    block_nbytes: int
    region: int
    """Where in the shared memory the region begins that the runs are in."""
    region_nbytes: int
    starts: bytes
    """Where in the region each run begins; int64."""
    sizes: bytes
    """Of each run; int64."""


class WriteBytes(msgspec.Struct, frozen=True, tag=True):
    """Write a few bytes, such as a header."""

    file: int
    offset: int
    data: bytes


class FinishFile(msgspec.Struct, frozen=True, tag=True):
    """Make a file durable; the reply has the seal of a coded one."""

    file: int
    nbytes: int | None = None
    """Where it ends; None: as it was created."""


class AbandonFile(msgspec.Struct, frozen=True, tag=True):
    """Remove a file, unless it is finished, and forget it."""

    file: int


WriterRequest = CreateFile | WriteRuns | WriteBytes | FinishFile | AbandonFile


class CancelSave(msgspec.Struct, frozen=True):
    """Wait no longer for a store because of this file, nor for others of its save, which has failed; there is no reply."""

    name: str


class WriterReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    file: int = 0
    digests: bytes = b""
    seal: Seal | None = None
    """Of a coded file that is finished."""
    failure: Failure | None = None


# A range of a file as memory, of which the system keeps no file descriptor: Python's own `mmap` holds one for each.

_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, offset: int, nbytes: int, *, owned: bool) -> memoryview:
    """
    Map whole pages of a file in memory, until the last view of them is gone.

    Args:
        fd: the file.
        offset: where they begin.
        nbytes: how many bytes.
        owned: may be written to, and the file's memory is given back with them. Else they are only read.

    """
    access = mmap.PROT_READ | mmap.PROT_WRITE if owned else mmap.PROT_READ
    address: int | None = _libc().mmap(None, nbytes, access, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of shared memory")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # only where the system allows it for shared memory
    # Views of the array hold it, as they would not hold a plain address.
    pages = np.frombuffer(view_memory(address, nbytes), np.uint8)
    weakref.finalize(pages, _unmap, address, nbytes, owned, os.getpid()).atexit = False
    return pages.data if owned else pages.data.toreadonly()


def _unmap(address: int, nbytes: int, owned: bool, process_id: int) -> None:
    if process_id != os.getpid():  # a fork, whose copy of the mapping is of no consequence
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
    decoder = msgspec.msgpack.Decoder(WriterRequest)
    own = _ThreadBuffer()
    try:
        while True:
            send(pipe, msgspec.msgpack.encode(_tried(decoder.decode(receive(pipe)), files, own)))
    except (EOFError, OSError):
        os._exit(0)  # the training process has closed the pipe
    except BaseException:  # noqa: BLE001 - or that process would wait for an answer
        traceback.print_exc()
        os._exit(1)


def _listen(aside: socket.socket, files: _Files) -> None:
    decoder = msgspec.msgpack.Decoder(CancelSave)
    with aside, contextlib.suppress(OSError):  # closed by the training process before the other pipes are
        while message := aside.recv(MESSAGE_NBYTES):
            files.give_up(decoder.decode(message).name)


def _tried(request: WriterRequest, files: _Files, own: _ThreadBuffer) -> WriterReply:
    """Carry out a request. Whatever it raises is a reply."""
    try:
        return files.answer(request, own)
    except Exception as error:  # noqa: BLE001 - raised in the training process
        return WriterReply(failure=describe_error(error))


class _ThreadBuffer:
    """Memory of one thread, made when it is needed."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        if len(self._view) < nbytes:
            self._view = aligned_buffer(nbytes)
        return self._view[:nbytes]


@contextlib.contextmanager
def _cancelling(hope: CancelScope) -> Iterator[None]:
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
    hope: CancelScope
    """That of its save."""


class _Files:
    """The files that are being written. Used by several threads."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._mapped: dict[tuple[int, int], memoryview] = {}
        self._numbers = itertools.count(1)
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()
        self._hopes: WeakValueDictionary[str, CancelScope] = WeakValueDictionary()

    def answer(self, request: WriterRequest, own: _ThreadBuffer) -> WriterReply:
        """Carry out a request."""
        if isinstance(request, CreateFile):
            return self._create(request)
        file = self._files[request.file]
        if isinstance(request, AbandonFile):
            # The save has failed: what of it still waits for a store need not.
            file.hope.give_up()
            file.writer.abandon()
            del self._files[request.file]
            return WriterReply()
        with _cancelling(file.hope):
            if isinstance(request, WriteRuns):
                data = self._bytes_of(request, own)
                return WriterReply(digests=hash_and_write(file.writer, request.offset, data, request.block_nbytes))
            if isinstance(request, WriteBytes):
                file.writer.write_at(request.offset, memoryview(request.data))
                return WriterReply()
            file.writer.finish(request.nbytes)
            del self._files[request.file]
            return WriterReply(seal=next(iter(file.seals.values()), None))

    def _create(self, request: CreateFile) -> WriterReply:
        chains = {} if request.coded is None else {request.name: request.coded.opened()}
        with self._lock:  # one at a time: to open a store may change the environment
            store = EncodingStore(request.place.opened(), chains)
            hope = self._hope_of(request)
        with _cancelling(hope), hope.held():
            writer = store.create(request.name, request.nbytes)
        number = next(self._numbers)
        self._files[number] = _File(writer, store.seals, hope)
        return WriterReply(file=number)

    def give_up(self, name: str) -> None:
        """Let all files of the save that this one belongs to be given up, as something failed elsewhere."""
        with self._lock:
            hope = self._hopes.get(native.save_id_of(name) or "")
        if hope is not None:
            hope.give_up()

    def _hope_of(self, request: CreateFile) -> CancelScope:
        """Return what the files of one save share; others share nothing, as something of their name may come later."""
        hope = CancelScope(room=MemoryBudget(request.room_nbytes) if request.room_nbytes else None)
        save_id = native.save_id_of(request.name)
        return hope if save_id is None else self._hopes.setdefault(save_id, hope)

    def _bytes_of(self, request: WriteRuns, own: _ThreadBuffer) -> memoryview:
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
