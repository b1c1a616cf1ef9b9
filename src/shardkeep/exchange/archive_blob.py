"""
One file as a blob of a store: found by its URL, written in windows, replaced in one request.

A blob that is new appears when all of it is there. One that takes the place of another is put at once, from memory, where
it is looked at before, while the old bytes can still stay. Of a larger one object stores put together the parts in one
request (`blob_replacing`), and it is looked at afterwards; other stores have no such step, and it is refused. What
replaced another is never deleted: there would be neither.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import closing, suppress

from shardkeep.errors import BlobNotFound, CheckpointError, DamagedCheckpoint, StorageError
from shardkeep.exchange.blob_replacing import ReplacingWriter
from shardkeep.options import Options
from shardkeep.store.local import LocalStore
from shardkeep.store.objects import ObjectStore
from shardkeep.store.place import open_store
from shardkeep.store.protocol import BlobReader, BlobWriter, Store

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_MOST_HELD_NBYTES = 1 << 30
"""Of a blob that is put in place of another from memory, in one request."""

Check = Callable[[BlobReader], None]
"""Raises where what was written is not what was meant to be."""


def is_blob(path: str) -> bool:
    """Say whether a file is one of a store, and not of this machine."""
    return _URL.match(path) is not None and not path.lower().startswith("file://")


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the path of a file of this machine, which may be given as a URL."""
    found = open_store(path, direct=False) if isinstance(path, str) and _URL.match(path) else None
    return found.url if isinstance(found, LocalStore) else os.fspath(path)


def place_of(url: str) -> tuple[Store, str]:
    """
    Return the store that a blob is in, and its name there.

    Raises:
        CheckpointError: the URL is of a place, and not of something in it.

    """
    above, _, name = url.rpartition("/")
    if not name or above.endswith(":/"):
        raise CheckpointError(f"{url}: no file", hint="give the name of the file: s3://bucket/folder/model.pt")
    return open_store(above, direct=Options().direct_io), name


def exists(path: str) -> bool:
    """Say whether there is such a file, of this machine or of a store."""
    if not is_blob(path):
        return os.path.exists(path)
    store, name = place_of(path)
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
    store, name = place_of(url)
    replaces = replace and store.version(name) is not None
    replacing: ReplacingWriter | None = None
    if replaces and nbytes <= min(_MOST_HELD_NBYTES, budget_nbytes // 2):  # it is held twice for a moment
        held = _Held(nbytes)
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
            raise replacing.unchanged()
        return
    try:
        try:
            _look(store, name, check)
        except DamagedCheckpoint:
            _look(store, name, check)  # it may have been changed on the way here
    except DamagedCheckpoint as exc:
        if replacing is not None and replacing.in_doubt:
            raise replacing.unchanged() from exc
        if not replaces:
            with suppress(CheckpointError):
                store.delete(name)
        raise


def _look(store: Store, name: str, check: Check) -> None:
    with closing(store.open(name)) as reader:
        check(reader)


def _replacing(store: Store, name: str, nbytes: int) -> ReplacingWriter:
    if not isinstance(store, ObjectStore):
        raise StorageError(
            f"{store.url}/{name}: {nbytes} bytes cannot replace what is there in one step: too many for memory",
            hint="give more memory (host_budget_bytes), write to another name, or delete what is there first",
            name=name,
            errno=errno.EFBIG,
        )
    return ReplacingWriter(store, name, nbytes)


def _write_all(writer: BlobWriter, write: Callable[[BlobWriter], None]) -> None:
    try:
        write(writer)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


class _Held:
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
    store, name = place_of(url)
    try:
        return store.open(name)
    except BlobNotFound as exc:
        raise BlobNotFound(f"{url}: there is no such file", name=name, errno=exc.errno) from exc
