"""
Where bytes go: one small Protocol per verb, so that a function asks only for what it uses.

A store holds named blobs below one place (a directory, a key prefix). Names are flat: no separators, no `..`. There
are no directories, handles or renames in this vocabulary, so that files and object stores can keep the same promises.
Every failure leaves a store as an error of `shardkeep.errors`, with the name and offset in it.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardkeep.errors import MalformedFile, StorageError
from shardkeep.format.record import RECORD_NAME

_NAME = re.compile(r"(?!\.tmp-)(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._-]{0,250}")
"""No separators, nothing that means a directory, and nothing that a store calls what is not a blob yet."""


def is_name(name: str) -> bool:
    """Tell whether a blob may have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return the name, or raise `MalformedFile` for one that could reach outside the store or upset a file system."""
    if not is_name(name):
        raise MalformedFile(
            f"{name!r} is not a blob name: up to 251 letters, digits, '.', '_' or '-', no '-' first",
            name=name,
        )
    return name


def check_below(name: str) -> str:
    """Return the name of a file that another program wrote, or raise `MalformedFile` if it leads out of its directory."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ":" in parts[0] or ".." in parts or not parts[0]:
        raise MalformedFile(
            f"{name!r} is no name of a file in a checkpoint", hint="do not trust this checkpoint", name=name
        )
    return name


@dataclass(frozen=True)
class BlobInfo:
    """One entry of a listing."""

    name: str
    nbytes: int
    modified_s: float
    """Seconds since the epoch, by the store's clock."""


@dataclass(frozen=True)
class Version:
    """
    Which bytes a blob had when it was asked for them. To be compared and handed back, not to be read.

    Bytes that are put over the very same bytes may be of the same version.
    """

    tag: str
    generation: str = ""
    """What some stores want besides."""


class BlobWriter(Protocol):
    """A new blob of known size, written in parts, in any order, from any thread."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""

    def finish(self, nbytes: int | None = None) -> None:
        """
        Make the blob durable and close it. Called once, after every part was written.

        With `nbytes`, at most what `create` was told, the blob ends there, and the rest of its room is given back. A
        listing may show the blob before; only one that is finished may be trusted.
        """

    def abandon(self) -> None:
        """
        Close and remove what was written. Never raises, and does nothing when called again.

        After a `finish` that succeeded the blob stays; after one that failed it is removed.
        """


class BlobReader(Protocol):
    """A blob opened for reads at any offset, from any thread."""

    @property
    def nbytes(self) -> int:
        """Size of the blob when it was opened."""

    def cached(self, offset: int, nbytes: int) -> bool:
        """Say whether most of a range can be had without waiting, so that small reads cost no more than large ones."""

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        """
        Fill all of `into` from `offset`; a blob that ends earlier is an error.

        `cached`: the caller knows from `cached` that the bytes are at hand, so it need not be looked up again.
        """

    def close(self) -> None:
        """Release what the reader holds. Safe when called twice."""


class Creates(Protocol):
    def create(self, name: str, nbytes: int) -> BlobWriter:
        """
        Begin a new blob of `nbytes`, or less if `finish` says so.

        One of that name that exists is a `StorageError` with errno EEXIST, here or where `finish` makes the blob appear.
        """


class Opens(Protocol):
    def open(self, name: str) -> BlobReader:
        """Open a blob; `BlobNotFound` where there is none."""


class Puts(Protocol):
    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        """
        Store a small blob in one atomic, durable step: readers see the old bytes or the new ones, never a part.

        Without `replace`, an existing blob of that name is a `StorageError` with errno EEXIST and stays as it is. With
        `over`, the blob is replaced only if it still is of that version; else, also where it is gone, the same error.
        """


class Gets(Protocol):
    def get(self, name: str, *, limit: int) -> bytes:
        """
        Read a whole small blob; `BlobNotFound` where there is none.

        One of more than `limit` bytes is a `MalformedFile` error, and is not read.
        """


class Versions(Protocol):
    def version(self, name: str) -> Version | None:
        """
        Say which version of a small blob is there; None where there is none.

        Ask before reading: bytes read later are of this version, or a `put` over it fails.
        """


class Lists(Protocol):
    def list(self) -> Iterator[BlobInfo]:
        """List every blob, by name; a place that does not exist has none."""


class Deletes(Protocol):
    def delete(self, name: str) -> None:
        """Remove a blob; one that is not there is no error."""


class Store(Creates, Opens, Puts, Gets, Versions, Lists, Deletes, Protocol):
    """
    A place that can do all of it. It may also

    - say how much more fits, by a method `free_nbytes() -> int | None`,
    - remove many blobs at once, by a method `delete_all(names)`,
    - say by an attribute `sequential` that parts of a blob should come nearly in order of offset, else they are held in
      memory until it is their turn,
    - say by an attribute `requests` how many reads or writes it likes to have under way at once.
    """

    @property
    def url(self) -> str:
        """The place, as a user would write it; used in messages."""


def free_nbytes(store: object) -> int | None:
    """Ask a store how much more fits in it; None where it cannot say."""
    ask = getattr(store, "free_nbytes", None)
    return None if ask is None else ask()


def create_upto(store: Creates, name: str, nbytes: int) -> BlobWriter:
    """
    Begin a blob that is likely to end much earlier.

    No room is taken for it beforehand where the store has a verb `create_upto` for that: all of it may not be there.
    """
    create: Callable[[str, int], BlobWriter] = getattr(store, "create_upto", store.create)
    return create(name, nbytes)


def delete_all(store: Deletes, names: Sequence[str]) -> None:
    """Remove many blobs, in few requests where the store has a verb `delete_all` for that; in no order."""
    together = getattr(store, "delete_all", None)
    if together is not None:
        together(names)
        return
    for name in names:
        store.delete(name)


def is_sequential(store: object) -> bool:
    """Tell whether a store wants the parts of a blob nearly in order of offset."""
    return bool(getattr(store, "sequential", False))


def innermost(store: object) -> Any:
    """Return the store that others, which try again or count, pass everything on to."""
    while (inner := getattr(store, "inner", None)) is not None:
        store = inner
    return store


def preferred_requests(store: object, threads: int) -> int:
    """Tell how many reads or writes a store likes to have under way at once; `threads` where it does not mind."""
    return getattr(store, "requests", None) or threads


def checked_end(where: str, name: str, nbytes: int | None, room: int) -> int:
    """Return where a blob for which there is `room` ends, or raise a `StorageError` if it cannot end there."""
    if nbytes is not None and not 0 <= nbytes <= room:
        raise StorageError(f"{where}: cannot end after {nbytes} bytes: made for {room}", name=name, errno=errno.EINVAL)
    return room if nbytes is None else nbytes


def version_conflict(where: str, name: str) -> StorageError:
    """Make the error of a `put` over a version that is there no more."""
    return StorageError(
        f"{where}: cannot put: it was replaced or deleted by another writer meanwhile (errno EEXIST)",
        name=name,
        errno=errno.EEXIST,
    )


# A root: one place that has many places below it, each of which holds a checkpoint.
#
# A root is a store for small blobs of its own, which say something about all of its places. Nothing is renamed or
# moved.
# A place is removed so that nobody takes what is left of it for a checkpoint: what makes it one goes first, and a
# mark
# that says so stays until all the rest is gone, so that a removal that was cut short can be told from a loss.

log = logging.getLogger("shardkeep")

REMOVING_NAME = "shardkeep.removing"
"""The mark of a place that is being removed. It means nothing where there is a commit."""


class Root(Store, Protocol):
    """A place that has places below it."""

    def places(self) -> Iterator[str]:
        """Name all places below, in no order; reads nothing of them. A root that does not exist has none."""

    def place(self, name: str) -> Store:
        """Return a place below, which need not exist."""

    def remove(self, name: str) -> None:
        """
        Delete a place and all that is in it, what makes it a checkpoint first; one that is not there is no error.

        A place that is a link to elsewhere is unlinked, and what it leads to stays.
        """

    def drop_empty(self, name: str) -> None:
        """Delete a place if nothing is in it."""


class _Empties(Lists, Puts, Deletes, Protocol):
    """What emptying needs of a store."""

    @property
    def url(self) -> str: ...


def is_commit_marker(name: str) -> bool:
    """Tell whether a blob makes a checkpoint exist, in any layout: the commit record, or torch's metadata."""
    return name == RECORD_NAME or name.endswith(".metadata")


def delete_contents(store: _Empties) -> None:
    """Delete all blobs of a place, what makes it a checkpoint first."""
    names = [info.name for info in store.list()]
    if not names:
        return
    marked = _mark(store)
    commits = list(filter(is_commit_marker, names))
    others = [name for name in names if name not in {*commits, REMOVING_NAME}]
    waiting = [*commits, *others]
    # One by one, until it can no longer be taken for a checkpoint, nor for something else than a removal.
    while waiting and (not marked or is_commit_marker(waiting[0])):
        store.delete(waiting.pop(0))
        # Without a mark, what a removal leaves that is cut short now would stay for ever.
        marked = marked or _mark(store)
    delete_all(store, waiting)
    store.delete(REMOVING_NAME)


def _mark(store: _Empties) -> bool:
    """Say that a place is being removed, if that can be said: on a full disk it cannot, and room is what comes of removing."""
    try:
        store.put(REMOVING_NAME, b"", replace=True)
    except StorageError as exc:
        log.info("%s is removed without a mark: %s", store.url, exc)
        return False
    return True
