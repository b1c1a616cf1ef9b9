"""
Messages to another process of this machine, in which tensors travel as handles to the memory they lie in.

torch's own way hands each handle to a thread that keeps it open until the other process asks for it: what is never
asked for, because the message could not be sent or the process died, stays in shared memory for good. Here handles go
through the pipe itself, where the kernel closes them if nobody takes them.

    message = bytes: the sizes of the storages; their handles, some at a time; bytes: the pickled object
"""

from __future__ import annotations

import array
import io
import os
import pickle
import socket
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.multiprocessing

from shardkeep.errors import CheckpointError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_untyped: Final[Any] = torch.multiprocessing
_AT_ONCE: Final = 200
"""Handles in one piece; Linux takes up to 253."""


class NoHandles(CheckpointError, OSError):
    """A message arrived, and the memory that its tensors lie in could not be opened."""


class Parcel:
    """An object, pickled, and the storages of its tensors."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Packing(file)
        pickler.dump(value)
        self._data = file.getbuffer()
        self._storages = pickler.storages

    def send(self, pipe: Connection) -> None:
        """Send it; the storages must stay where they are until the other process has answered."""
        handles, sizes = [], []
        for storage in self._storages:
            handle, size = storage._share_fd_cpu_()  # the storage's own
            handles.append(handle)
            sizes.append(size)
        pipe.send_bytes(pickle.dumps(sizes))
        if handles:
            with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as through:
                for start in range(0, len(handles), _AT_ONCE):
                    some = array.array("i", handles[start : start + _AT_ONCE])
                    through.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)])
        pipe.send_bytes(self._data)


def receive(pipe: Connection) -> Callable[[], Any]:
    """
    Wait for a message, and return what unpickles it: whatever that raises, the pipe is ready for the next message.

    Raises:
        EOFError, OSError: the pipe has ended.

    """
    sizes: list[int] = pickle.loads(pipe.recv_bytes())
    storages: list[Any] = []
    problems: list[Exception] = []
    if sizes:
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as through:
            for start in range(0, len(sizes), _AT_ONCE):
                try:
                    storages += _opened(through, sizes[start : start + _AT_ONCE])
                except (NoHandles, RuntimeError) as error:
                    problems.append(error)  # raised once the whole message is here
    data = pipe.recv_bytes()

    def unpack() -> Any:
        if problems:
            raise problems[0]
        return _Unpacking(io.BytesIO(data), storages).load()

    return unpack


def _opened(through: socket.socket, sizes: list[int]) -> list[Any]:
    """Receive the handles of some storages, and map them."""
    handles = array.array("i")
    space = socket.CMSG_SPACE(len(sizes) * handles.itemsize)
    letter, extras, _, _ = through.recvmsg(1, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not letter:
        raise EOFError("the pipe has ended")
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
    try:
        if len(handles) != len(sizes):
            raise NoHandles(
                f"{len(handles)} of {len(sizes)} pieces of shared memory could be opened",
                hint="allow more open files (ulimit -n)",
            )
        storage: Any = torch.UntypedStorage
        # The storage duplicates the handle.
        return [storage._new_shared_fd_cpu(handle, size) for handle, size in zip(handles, sizes, strict=True)]
    finally:
        for handle in handles:
            os.close(handle)


class _Packing(ForkingPickler):
    """Sets the storages of tensors in host memory aside; all else goes as torch has it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        if "file_descriptor" in _untyped.get_all_sharing_strategies():
            inherited: Any = self.dispatch_table
            self.dispatch_table = {**inherited, torch.UntypedStorage: self._set_aside}

    def _set_aside(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return _untyped.reductions.reduce_storage(storage)
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            storage._share_fd_cpu_()  # moves one there that is not in shared memory, and fails here if there is no room
            self.storages.append(storage)
        return numbered_storage, (number,)


class _Unpacking(pickle.Unpickler):
    """Finds the storages that came with a message."""

    def __init__(self, file: io.BytesIO, storages: list[Any]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        if (module, name) == (__name__, numbered_storage.__name__):
            return self._storages.__getitem__
        return super().find_class(module, name)


def numbered_storage(number: int) -> torch.UntypedStorage:
    """Stand in pickles for the storage of that number in the message."""
    raise pickle.UnpicklingError(f"storage {number} came with a message, and is not here")
