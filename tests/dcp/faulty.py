"""What the system is asked for by a save: seen, stopped, or made to fail."""

import builtins
import contextlib
import io
import os
import pathlib
import resource
import stat
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.dcp.sides import side
from tests.faults.calls import CHANGING

__all__ = ["before_changes", "before_writing", "files_named", "no_more_memory", "synced_directories"]


@contextlib.contextmanager
def before_changes(act: Callable[[str, Any], None], names: tuple[str, ...] = CHANGING) -> Iterator[None]:
    """Call `act(name, first argument)` before each call of `os` that changes something; not for its own calls."""
    acting = False

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal acting
            writes = name != "open" or (len(args) > 1 and args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if not acting and writes:
                acting = True
                try:
                    act(name, args[0])
                finally:
                    acting = False
            return real(*args, **kwargs)

        return call

    with mock.patch.multiple(os, **{name: wrap(name) for name in names}):
        yield


@contextlib.contextmanager
def before_writing(act: Callable[[str, Any], None]) -> Iterator[None]:
    real = io.open

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode:
            act("open", path)
        return real(path, mode, *args, **kwargs)

    with contextlib.ExitStack() as patched:
        patched.enter_context(before_changes(act, ("open",)))
        patched.enter_context(mock.patch.object(io, "open", opened))
        patched.enter_context(mock.patch.object(builtins, "open", opened))
        if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10 has kept it there
            patched.enter_context(mock.patch.object(pathlib._NormalAccessor, "open", staticmethod(opened)))
        yield


def synced_directories(function: Callable[[], Any]) -> list[str]:
    found = []

    def look(name: str, fd: Any) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))

    with before_changes(look, ("fsync", "fdatasync")):
        function()
    return found


def files_named(folder: str) -> set[str]:
    """The files that the metadata of a checkpoint of ours name, and those with their digests."""
    places = side("ours").FileSystemReader(folder).read_metadata().storage_data.values()
    names = {place.relative_path for place in places}
    return names | {f"{name}.sums" for name in names}


@contextlib.contextmanager
def no_more_memory(nbytes: int) -> Iterator[None]:
    """Let this process have so much more memory, and no more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
