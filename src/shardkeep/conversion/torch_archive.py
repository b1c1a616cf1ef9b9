"""
A file in the form of `torch.save`, written in windows from its first byte to its last.

While one window is hashed and written, the next one is filled: two of them are all that is in memory. The file appears
under its name when it is complete and durable, in place of what was there, or not at all. What a killed process left of
its file is removed by the next that writes to the same place. Files of stores are written in `archive_blob`.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import re
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import _utils as rebuilding

from shardkeep.errors import BlobNotFound, CheckpointError, DamagedCheckpoint, NoStorage, StorageError
from shardkeep.format.boxes import Ints
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.torch_zip import _STORAGE_OF, ArchiveLayout
from shardkeep.options import Options
from shardkeep.storage import base
from shardkeep.storage.base import BlobReader, BlobWriter, Replaces, Store, create_over
from shardkeep.storage.buffers import ALIGNMENT, aligned_buffer
from shardkeep.storage.local import LocalStore
from shardkeep.storage.resolve import open_store
from shardkeep.storage.system import host_identity, process_start, storage_errors, sync_directory

# The pickle of a state in an archive of `torch.save`, made without the values of its tensors.
#
# Tensors that lie in a checkpoint stand in the state as `StandIn`s and are pickled as torch pickles tensors, whose
# bytes
# it keeps apart as storages. Values that hold real tensors are pickled as they are.

_PROTOCOL = 2  # torch's


@dataclass(frozen=True)
class TensorPlaceholder:
    """A dense tensor that is not in memory."""

    key: str
    shape: Ints
    dtype: DType

    @property
    def nbytes(self) -> int:
        """What its values take."""
        return math.prod(self.shape) * self.dtype.itemsize


class Pickled(NamedTuple):
    """A state without the bytes of its tensors."""

    data: bytes
    storages: list[TensorPlaceholder | torch.UntypedStorage]
    """Whose bytes belong to each storage that the pickle names by its number; those in memory are on the CPU."""


def pickle_state(state: Any) -> Pickled:
    """Pickle a state as `torch.save` does."""
    out = io.BytesIO()
    pickler = _StatePickler(out)
    pickler.dump(state)
    return Pickled(out.getvalue(), pickler.storages)


@dataclass(frozen=True)
class _Bytes:
    """The storage of a tensor that is not in memory."""

    tensor: TensorPlaceholder


class _StatePickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, _PROTOCOL)
        self.storages: list[TensorPlaceholder | torch.UntypedStorage] = []
        self._known: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, TensorPlaceholder):
            return NotImplemented
        strides = tuple(math.prod(max(n, 1) for n in obj.shape[axis + 1 :]) for axis in range(len(obj.shape)))
        hooks: OrderedDict[Any, Any] = OrderedDict()
        form = (_Bytes(obj), 0, obj.shape, strides, False, hooks)
        if obj.dtype.name in _STORAGE_OF:
            return rebuilding._rebuild_tensor_v2, form
        return rebuilding._rebuild_tensor_v3, (*form, to_torch(obj.dtype))

    def persistent_id(self, obj: Any, /) -> Any:
        if isinstance(obj, _Bytes):
            number = self._add(obj.tensor)
            name = _STORAGE_OF.get(obj.tensor.dtype.name)
            if name is None:
                return "storage", torch.UntypedStorage, number, "cpu", obj.tensor.nbytes
            return "storage", getattr(torch, name), number, "cpu", math.prod(obj.tensor.shape)
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            return self._stored(typed._untyped_storage, getattr(torch, typed._pickle_storage_type()), typed._size())
        if isinstance(obj, torch.UntypedStorage):
            return self._stored(obj, torch.UntypedStorage, obj.nbytes())
        return None

    def _stored(self, storage: torch.UntypedStorage, kind: Any, elements: int) -> tuple[Any, ...]:
        # Tensors that share memory share it after they were loaded, too.
        known = self._known.get(storage._cdata)
        if known is None:
            number = self._add(storage.cpu())  # type: ignore[no-untyped-call]  # torch's
            # Kept as well: no other storage may come to have its address.
            known = self._known[storage._cdata] = number, storage
        return "storage", kind, known[0], torch.serialization.location_tag(storage), elements

    def _add(self, storage: TensorPlaceholder | torch.UntypedStorage) -> str:
        self.storages.append(storage)
        return str(len(self.storages) - 1)


# One file as a blob of a store: found by its URL, written in windows, replaced in one request.
#
# A blob that is new appears when all of it is there. One that takes the place of another is put at once, from memory,
# where
# it is looked at before, while the old bytes can still stay. Of a larger one object stores put together the parts in
# one
# request (`blob_replacing`), and it is looked at afterwards; other stores have no such step, and it is refused. What
# replaced another is never deleted: there would be neither.

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_MOST_HELD_NBYTES = 1 << 30
"""Of a blob that is put in place of another from memory, in one request."""

Check = Callable[[BlobReader], None]
"""Raises where what was written is not what was meant to be."""


def is_blob_url(path: str) -> bool:
    """Say whether a file is one of a store, and not of this machine."""
    return _URL.match(path) is not None and not path.lower().startswith("file://")


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the path of a file of this machine, which may be given as a URL."""
    found = open_store(path, direct=False) if isinstance(path, str) and _URL.match(path) else None
    return base.local_path(found) or os.fspath(path)


def blob_location(url: str) -> tuple[Store, str]:
    """
    Return the store that a blob is in, and its name there.

    Raises:
        CheckpointError: the URL is of a place, and not of something in it.

    """
    above, _, name = url.rpartition("/")
    if not name or above.endswith(":/"):
        raise CheckpointError(f"{url}: no file", hint="give the name of the file: s3://bucket/folder/model.pt")
    return open_store(above, direct=Options().direct_io), name


def file_exists(path: str) -> bool:
    """Say whether there is such a file, of this machine or of a store."""
    if not is_blob_url(path):
        return os.path.exists(path)
    store, name = blob_location(path)
    return store.version(name) is not None


def write_blob(
    url: str,
    nbytes: int,
    write: Callable[[BlobWriter], None],
    *,
    replace: bool,
    check: Check | None,
    budget_nbytes: int,
) -> None:
    """
    Write a blob, in place of what has its name.

    Args:
        url: where it goes.
        nbytes: its size.
        write: writes all of it, in order.
        replace: whether it may take the place of what is there.
        check: looks at it once more. A new blob that is damaged is removed; one that could not be read is not.
        budget_nbytes: memory to use.

    Raises:
        StorageError: it cannot be written, or something is there that it may not replace (errno EEXIST), or that it is
            too large to replace in a store that is no object store (errno EFBIG); that is still there. Or it was
            written, and cannot be read.
        DamagedCheckpoint: what was written is not what was meant to be.

    """
    store, name = blob_location(url)
    replaces = replace and store.version(name) is not None
    replacing: Replaces | None = None
    if replaces and nbytes <= min(_MOST_HELD_NBYTES, budget_nbytes // 2):  # it is held twice for a moment
        held = _MemoryBlob(nbytes)
        write(held)
        if check is not None:
            check(held)
        store.put(name, bytes(held.data), replace=True)
    elif replaces:
        replacing = _replacing(store, name, nbytes)
        _write_all(replacing, write)
    else:
        _write_all(store.create(name, nbytes), write)
    if check is None:
        if replacing is not None and replacing.in_doubt:
            raise _unchanged(store, name)
        return
    try:
        try:
            _look(store, name, check)
        except DamagedCheckpoint:
            _look(store, name, check)  # it may have been changed on the way here
    except DamagedCheckpoint as exc:
        if replacing is not None and replacing.in_doubt:
            raise _unchanged(store, name) from exc
        if not replaces:
            with suppress(CheckpointError):
                store.delete(name)
        raise


def _look(store: Store, name: str, check: Check) -> None:
    with closing(store.open(name)) as reader:
        check(reader)


def _unchanged(store: Store, name: str) -> StorageError:
    return StorageError(
        f"{store.url}/{name}: was not replaced: the upload did not arrive, and the old file is still there",
        hint="try again",
        name=name,
        errno=errno.EIO,
    )


def _replacing(store: Store, name: str, nbytes: int) -> Replaces:
    writer = create_over(store, name, nbytes)
    if writer is None:
        raise StorageError(
            f"{store.url}/{name}: {nbytes} bytes cannot replace what is there in one step: too many for memory",
            hint="give more memory (host_budget_bytes), write to another name, or delete what is there first",
            name=name,
            errno=errno.EFBIG,
        )
    return writer


def _write_all(writer: BlobWriter, write: Callable[[BlobWriter], None]) -> None:
    try:
        write(writer)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


class _MemoryBlob:
    """A blob that is held in memory until it is whole, and can be read there."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def write_at(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data

    def finish(self, nbytes: int | None = None) -> None:
        """Do nothing: it is put as a whole."""

    def abandon(self) -> None:
        """Do nothing: nothing was written."""

    def cached(self, offset: int, nbytes: int) -> bool:  # noqa: ARG002 - of any range
        return True

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - all is at hand
        into[:] = memoryview(self.data)[offset : offset + len(into)]

    def close(self) -> None:
        """Do nothing: it is held for as long as it is needed."""


def open_blob(url: str) -> BlobReader:
    """
    Open a blob by its URL.

    Raises:
        BlobNotFound: there is none.

    """
    store, name = blob_location(url)
    try:
        return store.open(name)
    except BlobNotFound as exc:
        raise BlobNotFound(f"{url}: there is no such file", name=name, errno=exc.errno) from exc


_WINDOW_NBYTES = 32 << 20
_LEAST_WINDOW_NBYTES = 1 << 20


class StoragePart(NamedTuple):
    """A run of bytes of a storage, and the memory they are wanted in."""

    storage: int
    start: int
    stop: int
    into: memoryview


Fill = Callable[[list[StoragePart]], None]
"""Puts bytes of storages where they are wanted: at most one part of each storage at a time, in order."""


class _Segment(NamedTuple):
    """Bytes of the file: those of a storage, or what stands before the storage of that number."""

    number: int
    is_storage: bool
    start: int
    stop: int


class _Window(NamedTuple):
    start: int
    stop: int
    stretches: list[_Segment]


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
    if isinstance(path, str) and is_blob_url(path):
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
    if is_blob_url(path):
        budget = Options().host_budget_bytes if budget_nbytes is None else budget_nbytes

        def write(writer: BlobWriter) -> None:
            _write_windows(writer, layout, fill, window_nbytes(budget))

        write_blob(path, layout.nbytes, write, replace=replace, check=check, budget_nbytes=budget)
        return
    folder, name = os.path.split(path)
    _clear(folder, name)  # first, as the disk may have no room for both
    temporary = f"{_prefix(name)}-{os.getpid()}-{process_start(os.getpid())}-{secrets.token_hex(8)}"
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
    marks = (blake2b(text, digest_size=6).hexdigest() for text in (os.fsencode(name), host_identity().encode()))
    return "-".join((".shardkeep-converting", *marks))


def _clear(folder: str, name: str) -> None:
    """Remove what processes left that died while they wrote this file; nothing depends on it."""
    unfinished = re.compile(re.escape(_prefix(name)) + r"-(?P<pid>\d+)-(?P<started>\w*)-[0-9a-f]+")
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            left = unfinished.fullmatch(entry.name)
            if left and process_start(int(left["pid"])) != left["started"]:
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


def _parts(window: _Window, buffer: memoryview) -> list[StoragePart]:
    parts = []
    for stretch in window.stretches:
        start, stop = max(stretch.start, window.start), min(stretch.stop, window.stop)
        if stretch.is_storage:
            into = buffer[start - window.start : stop - window.start]
            parts.append(StoragePart(stretch.number, start - stretch.start, stop - stretch.start, into))
    return parts


def _windows(layout: ArchiveLayout, nbytes: int) -> Iterator[_Window]:
    """Cut the file into windows of `nbytes`."""
    coming = _segments(layout)
    following = next(coming, None)
    held: list[_Segment] = []
    for start in range(0, layout.nbytes, nbytes):
        stop = min(start + nbytes, layout.nbytes)
        held = [each for each in held if each.stop > start]
        while following is not None and following.start < stop:
            held.append(following)
            following = next(coming, None)
        yield _Window(start, stop, held)


def _segments(layout: ArchiveLayout) -> Iterator[_Segment]:
    at = 0
    for number, (start, nbytes) in enumerate(zip(layout.starts, layout.sizes, strict=True)):
        yield _Segment(number, False, at, start)
        at = start + nbytes
        if nbytes:
            yield _Segment(number, True, start, at)
    yield _Segment(len(layout.sizes), False, at, layout.nbytes)
