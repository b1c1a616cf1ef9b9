"""
A file in the form of `torch.save`, written in windows from its first byte to its last.

While one window is hashed and written, the next one is filled: two of them are all that is in memory. The file appears
under its name when it is complete and durable, in place of what was there, or not at all. What a killed process left of
its file is removed by the next that writes to the same place. Files of stores are written in `archive_blob`.
"""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from hashlib import blake2b
from typing import NamedTuple

from shardkeep.exchange.archive_blob import Check, is_blob, local_path, write_blob
from shardkeep.format.torch_archive_writer import ArchiveLayout
from shardkeep.options import Options
from shardkeep.protocol.problems import NoStorage
from shardkeep.store.aligned import ALIGNMENT, aligned_buffer
from shardkeep.store.files import storage_errors, sync_directory
from shardkeep.store.local import LocalStore
from shardkeep.store.process import host, started
from shardkeep.store.protocol import BlobWriter

_WINDOW_NBYTES = 32 << 20
_LEAST_WINDOW_NBYTES = 1 << 20


class Part(NamedTuple):
    """A run of bytes of a storage, and the memory they are wanted in."""

    storage: int
    start: int
    stop: int
    into: memoryview


Fill = Callable[[list[Part]], None]
"""Puts bytes of storages where they are wanted: at most one part of each storage at a time, in order."""


class _Stretch(NamedTuple):
    """Bytes of the file: those of a storage, or what stands before the storage of that number."""

    number: int
    is_storage: bool
    start: int
    stop: int


class _Window(NamedTuple):
    start: int
    stop: int
    stretches: list[_Stretch]


def window_nbytes(budget_nbytes: int | None = None) -> int:
    """Return the size of a window: a small part of the memory that a call may take."""
    budget = Options().host_budget_bytes if budget_nbytes is None else budget_nbytes
    wanted = min(_WINDOW_NBYTES, max(_LEAST_WINDOW_NBYTES, budget // 8))
    # No element of any storage lies across two windows, and all of them can be written past the page cache.
    return wanted // ALIGNMENT * ALIGNMENT


def destination(path: str | os.PathLike[str], *, make_directory: bool = False) -> str:
    """
    Return where the file goes: its path, through links, or its URL.

    Args:
        path: what the user wrote.
        make_directory: whether its directory may be made when it is written, as that of a checkpoint is; `torch.save`
            makes none.

    Raises:
        NoStorage: (a RuntimeError) its directory does not exist, or it is itself one.

    """
    if isinstance(path, str) and is_blob(path):
        return path
    where = os.path.realpath(local_path(path))
    if not make_directory and not os.path.isdir(os.path.dirname(where)):
        raise NoStorage(f"Parent directory {os.path.dirname(where)} does not exist.", hint="make it first")
    if os.path.isdir(where):
        raise NoStorage(f"{where} is a directory", hint="give the name of the file to write")
    return where


def write_archive(
    path: str,
    layout: ArchiveLayout,
    fill: Fill,
    *,
    replace: bool = True,
    check: Check | None = None,
    budget_nbytes: int | None = None,
) -> None:
    """
    Write the file, in place of what is at `path`.

    Args:
        path: where it goes, as `destination` says.
        layout: what it is made of.
        fill: gives the bytes of storages.
        replace: whether it may take the place of what is there.
        check: looks at the file once more before it gets its name.
        budget_nbytes: memory to use; by default that of `Options`.

    Raises:
        StorageError: it cannot be written, or something is at `path` that it may not replace (errno EEXIST); that is
            still there.

    """
    if is_blob(path):
        budget = Options().host_budget_bytes if budget_nbytes is None else budget_nbytes

        def write(writer: BlobWriter) -> None:
            _write_windows(writer, layout, fill, window_nbytes(budget))

        write_blob(path, layout.nbytes, write, replace=replace, check=check, budget_nbytes=budget)
        return
    folder, name = os.path.split(path)
    _clear(folder, name)  # first, as the disk may have no room for both
    temporary = f"{_prefix(name)}-{os.getpid()}-{started(os.getpid())}-{secrets.token_hex(8)}"
    store = LocalStore(folder, direct=Options().direct_io)
    writer = store.create(temporary, layout.nbytes)
    try:
        _write_windows(writer, layout, fill, window_nbytes(budget_nbytes))
        writer.finish()
        if check is not None:
            with closing(store.open(temporary)) as reader:
                check(reader)
        with storage_errors("cannot replace", folder, name):
            if replace:
                os.replace(os.path.join(folder, temporary), path)
            else:
                os.link(os.path.join(folder, temporary), path)
                os.unlink(os.path.join(folder, temporary))
            sync_directory(folder)
    except BaseException:
        writer.abandon()
        with suppress(OSError):
            os.unlink(os.path.join(folder, temporary))
        raise


def _prefix(name: str) -> str:
    """Say, in a name for an unfinished file, which file it is to become and on which machine it is written."""
    marks = (blake2b(text, digest_size=6).hexdigest() for text in (os.fsencode(name), host().encode()))
    return "-".join((".shardkeep-converting", *marks))


def _clear(folder: str, name: str) -> None:
    """Remove what processes left that died while they wrote this file; nothing depends on it."""
    unfinished = re.compile(re.escape(_prefix(name)) + r"-(?P<pid>\d+)-(?P<started>\w*)-[0-9a-f]+")
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            left = unfinished.fullmatch(entry.name)
            if left and started(int(left["pid"])) != left["started"]:
                with suppress(OSError):
                    # A machine may hide the processes of other users, which then look as if they were dead.
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        os.unlink(entry.path)


def _write_windows(writer: BlobWriter, layout: ArchiveLayout, fill: Fill, nbytes: int) -> None:
    crcs = [0] * len(layout.sizes)

    def write(window: _Window, buffer: memoryview) -> None:
        for stretch in window.stretches:
            start, stop = max(stretch.start, window.start), min(stretch.stop, window.stop)
            piece = buffer[start - window.start : stop - window.start]
            if stretch.is_storage:
                crcs[stretch.number] = zlib.crc32(piece, crcs[stretch.number])
            else:
                piece[:] = layout.before(stretch.number, crcs)[start - stretch.start : stop - stretch.start]
        writer.write_at(window.start, buffer[: window.stop - window.start])

    buffers = [aligned_buffer(min(nbytes, layout.nbytes)) for _ in range(2)]
    written: Future[None] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="shardkeep") as pool:
        for number, window in enumerate(_windows(layout, nbytes)):
            buffer = buffers[number % 2]
            fill(_parts(window, buffer))
            if written is not None:
                written.result()
            written = pool.submit(write, window, buffer)
    if written is not None:
        written.result()


def _parts(window: _Window, buffer: memoryview) -> list[Part]:
    parts = []
    for stretch in window.stretches:
        start, stop = max(stretch.start, window.start), min(stretch.stop, window.stop)
        if stretch.is_storage:
            into = buffer[start - window.start : stop - window.start]
            parts.append(Part(stretch.number, start - stretch.start, stop - stretch.start, into))
    return parts


def _windows(layout: ArchiveLayout, nbytes: int) -> Iterator[_Window]:
    """Cut the file into windows of `nbytes`."""
    coming = _stretches(layout)
    following = next(coming, None)
    held: list[_Stretch] = []
    for start in range(0, layout.nbytes, nbytes):
        stop = min(start + nbytes, layout.nbytes)
        held = [each for each in held if each.stop > start]
        while following is not None and following.start < stop:
            held.append(following)
            following = next(coming, None)
        yield _Window(start, stop, held)


def _stretches(layout: ArchiveLayout) -> Iterator[_Stretch]:
    at = 0
    for number, (start, nbytes) in enumerate(zip(layout.starts, layout.sizes, strict=True)):
        yield _Stretch(number, False, at, start)
        at = start + nbytes
        if nbytes:
            yield _Stretch(number, True, start, at)
    yield _Stretch(len(layout.sizes), False, at, layout.nbytes)
