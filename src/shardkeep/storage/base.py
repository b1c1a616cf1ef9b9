"""
The store protocol: the verbs that every place for checkpoints has, and the optional verbs of some.

A store holds named blobs in one place (a directory, a key prefix). Blob names are flat: no separators, no `..`. The
protocol has no directories, handles or renames, so that files and object stores can keep the same promises. A store
reports every failure as an error of `shardkeep.errors` that carries the blob's name and the offset.

Functions below call an optional verb of a store, or of the store that it wraps, or return its default; nothing outside
`storage/` checks the class of a store.
"""

from __future__ import annotations

import errno
import functools
import logging
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import msgspec

from shardkeep.errors import BlobNotFound, CheckpointError, DamagedCheckpoint, MalformedFile, StorageError, WrongSize
from shardkeep.events import log_safely
from shardkeep.format.record import RECORD_NAME

log = logging.getLogger("shardkeep")
S = TypeVar("S")

REMOVING_NAME = "shardkeep.removing"
"""Marks a place that is being removed. It has no meaning in a place that holds a commit."""
DEFAULT_PART_NBYTES = 8 << 20
"""How much of an open blob a sequential store is assumed to buffer if it does not say."""
_NAME = re.compile(r"(?!\.tmp-)(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._-]{0,250}")
"""No separators, no directory references, and no name that a store uses for its temporary files."""
_PLACE = re.compile(r"(?!-)(?!\.tmp-)(?!\.{1,2}$)[^/\\\x00-\x1f\x7f]{1,251}")
_SCHEME = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*)://")
"""Also of chained URLs of fsspec: `simplecache::s3`."""


def scheme_of(path: str) -> str | None:
    """Return the scheme of a URL, in lower case; None for a path of this machine."""
    found = _SCHEME.match(path)
    return found[1].lower() if found else None


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return the name, or raise `MalformedFile` if it could reach outside the store or upset a file system."""
    if not is_name(name):
        message = f"{name!r} is not a blob name: up to 251 letters, digits, '.', '_' or '-', no '-' first"
        raise MalformedFile(message, name=name)
    return name


@functools.lru_cache(1 << 14)  # because a root is listed again and again
def is_place_name(name: str) -> bool:
    """Return whether a directory of this name can be listed and read: other programs choose names with `=` or spaces."""
    return _PLACE.fullmatch(name) is not None


def check_place(name: str) -> str:
    """Return the name of a place below a root, or raise `MalformedFile` if it could reach outside the root."""
    return name if is_place_name(name) else check_name(name)


def check_below(name: str) -> str:
    """Return the name of a file written by another program, or raise `MalformedFile` if it leads out of its directory."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ":" in parts[0] or ".." in parts or not parts[0]:
        raise MalformedFile(
            f"{name!r} is not the name of a file in a checkpoint", hint="do not trust this checkpoint", name=name
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
    """An opaque version of a blob, to compare and to pass back to `put`; the same bytes, put again, may have another."""

    tag: str
    generation: str = ""
    """A second token that some stores require."""


@dataclass(frozen=True)
class Names:
    """A listing of a root; the same one as before if the store knows that nothing has changed."""

    places: Sequence[str]
    blobs: Callable[[], Sequence[str]]
    """The names of its blobs, also those of other programs if the listing has them (`is_place_name`)."""
    derived: dict[object, Any] = field(default_factory=dict)
    """What was made from it, and need not be made again."""


class BlobWriter(Protocol):
    """A new blob of known size, written in parts, in any order, from any thread."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""

    def finish(self, nbytes: int | None = None) -> None:
        """
        Make the blob durable and close it. Called once, after every part was written.

        With `nbytes`, which is at most the size given to `create`, the blob ends there and the unused space is freed. A
        listing may show the blob before `finish`; only a finished blob can be trusted.
        """

    def abandon(self) -> None:
        """Remove the blob, unless a `finish` succeeded, and close it. Never raises, and can be called twice."""


W = TypeVar("W", bound=BlobWriter)


class BlobReader(Protocol):
    """A blob that is open for reads at any offset, from any thread."""

    @property
    def nbytes(self) -> int:
        """Size of the blob when it was opened."""

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        """Fill all of `into`; a blob that ends earlier is an error. `cached`: the caller knows from `is_cached` that it is."""

    def close(self) -> None:
        """Release what the reader holds. Can be called twice."""


class ReadableStore(Protocol):
    """The verbs that reading needs."""

    def open(self, name: str) -> BlobReader:
        """Open a blob; raises `BlobNotFound` if it does not exist."""

    def get(self, name: str, *, limit: int) -> bytes:
        """Read a whole small blob: `BlobNotFound` if it does not exist, `MalformedFile` if it has more bytes than `limit`."""


class WritableStore(Protocol):
    """The verbs that writing data files needs."""

    def create(self, name: str, nbytes: int) -> BlobWriter:
        """Begin a blob of at most `nbytes` bytes. If its name is taken, this or `finish` raises a `StorageError` (EEXIST)."""

    def delete(self, name: str) -> None:
        """Delete a blob; a missing blob is not an error."""


class Store(ReadableStore, WritableStore, Protocol):
    """A place for blobs. Besides these verbs, a store may have those that the functions under "optional verbs" ask for."""

    @property
    def url(self) -> str:
        """The place as the user would write it; used in messages."""

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        """
        Store a small blob in one atomic, durable step: readers see the old bytes or the new ones, never a part.

        Without `replace`, an existing blob of that name stays, and `put` raises a `StorageError` with errno EEXIST. With
        `over`, the blob is replaced only if it still has that version; if it has another or is gone, the same error.
        """

    def list(self) -> Iterator[BlobInfo]:
        """List every blob, sorted by name; a place that does not exist has none."""

    def version(self, name: str) -> Version | None:
        """
        Return the current version of a small blob, or None if it does not exist.

        Ask for the version before reading the blob: either the bytes read have this version, or a `put` over it fails.
        """


class Root(Store, Protocol):
    """A place with other places below it, each with a checkpoint, and small blobs of its own, which describe all of them."""

    def places(self) -> Iterator[str]:
        """Name all places below, in no order; none if there is no root. Other programs may have named them (`is_place_name`)."""

    def place(self, name: str) -> Store:
        """Return a place below, which need not exist."""

    def remove(self, name: str) -> None:
        """Delete a place, if it exists, and all in it, the commit marker first; of a symbolic link, only the link."""

    def drop_empty(self, name: str) -> None:
        """Delete a place if nothing is in it."""


def is_commit_marker(name: str) -> bool:
    """Return whether this blob makes a checkpoint exist, in any layout: the commit record, or torch's metadata."""
    return name == RECORD_NAME or name.endswith(".metadata")


def delete_contents(store: Store, names: Collection[str] | None = None) -> None:
    """
    Delete all blobs of a place, the commit marker first: an interrupted removal leaves nothing like a checkpoint.

    The removal mark stays until everything else is gone, to distinguish an interrupted removal from data loss. `names` are
    those of the blobs, if they are known.
    """
    names = {info.name for info in store.list()} if names is None else {*names}
    if not names:
        return
    marked = _mark(store)
    waiting = sorted(names - {REMOVING_NAME}, key=lambda name: (not is_commit_marker(name), name))
    # One by one until no commit marker is left and the removal is marked.
    while waiting and (not marked or is_commit_marker(waiting[0])):
        store.delete(waiting.pop(0))
        # Try the mark again: without it, what an interrupted removal leaves would never be cleaned up.
        marked = marked or _mark(store)
    delete_all(store, waiting)
    store.delete(REMOVING_NAME)


def _mark(store: Store) -> bool:
    """Mark a place as being removed; False where that fails, as on a full disk, which a removal is about to relieve."""
    try:
        store.put(REMOVING_NAME, b"", replace=True)
    except StorageError as exc:
        log.info("%s is removed without a mark: %s", store.url, exc)
        return False
    return True


# -- optional verbs ----------------------------------------------------------------------------------------------------


def _find(store: object, name: str, default: Any = None) -> Any:
    """Return an optional verb or attribute of a store, or of the nearest store inside that has it."""
    while not hasattr(store, name):
        if (store := getattr(store, "inner", None)) is None:
            return default
    return getattr(store, name)


def _nothing(*_: object) -> None:
    """Stands for an optional verb that a store does not have."""


def free_nbytes(store: object) -> int | None:
    """Return how many more bytes fit in a store; None if it does not know (`free_nbytes()`)."""
    return cast("int | None", _find(store, "free_nbytes", _nothing)())


def create_upto(store: WritableStore, name: str, nbytes: int) -> BlobWriter:
    """Begin a blob that is likely to be much smaller than `nbytes`, without reserving the space (`create_upto`)."""
    create: Callable[[str, int], BlobWriter] = getattr(store, "create_upto", store.create)
    return create(name, nbytes)


def create_over(store: object, name: str, nbytes: int) -> BlobWriter | None:
    """Begin a blob whose `finish` replaces another, whole until then, in one step; None without the verb `create_over`."""
    return cast("BlobWriter | None", getattr(store, "create_over", _nothing)(name, nbytes))


def delete_all(store: WritableStore, names: Sequence[str]) -> None:
    """Delete many blobs, in no particular order, and in few requests if the store can do that (`delete_all(names)`)."""
    if hasattr(store, "delete_all"):
        store.delete_all(names)
        return
    for name in names:
        store.delete(name)


def exists(store: ReadableStore, name: str) -> bool:
    """Return whether a blob exists, without reading it."""
    try:
        store.open(name).close()
    except BlobNotFound:
        return False
    return True


def names_of(root: Root, list_blobs: Callable[[], Iterator[BlobInfo]] | None = None) -> Names:
    """
    List the places below a root, and its blobs in the same step if the root can do that (`all_names`).

    If not, `list_blobs` lists these when they are wanted, instead of the root.
    """
    # Only if the class itself has the verb: a subclass may have changed `places`.
    if "all_names" in vars(type(root)):
        return cast("Names", cast("Any", root).all_names())
    listed = list_blobs or root.list
    return Names(list(root.places()), functools.cache(lambda: [info.name for info in listed()]))


def put_if_unchanged(store: Store, name: str, data: bytes, over: Version | None) -> bool:
    """Put a small blob over a version, or where there is none; return False if another version is there."""
    try:
        store.put(name, data, over=over)
    except StorageError as exc:
        if exc.errno != errno.EEXIST:
            raise
        return False
    return True


def is_sequential(store: object) -> bool:
    """Return whether parts of a blob should arrive nearly in order; the store buffers those that do not (`sequential`)."""
    return bool(_find(store, "sequential"))


def part_nbytes_of(store: object) -> int:
    """Return how much of each open blob a sequential store buffers before it can send it (`part_nbytes`); else 0."""
    if not is_sequential(store):
        return 0
    return int(_find(store, "part_nbytes") or DEFAULT_PART_NBYTES)


def preferred_requests(store: object, threads: int) -> int:
    """Return how many reads or writes should be in flight at once (`requests`); `threads` if the store does not say."""
    return _find(store, "requests") or threads


def local_path(store: object) -> str | None:
    """Return the directory behind a store, if callers may bypass the store and use the file system (`local_path`)."""
    return cast("str | None", getattr(store, "local_path", None))


def broken_path(store: object, *, inside: bool = False) -> str:
    """Say what is wrong with a local path, "" if nothing: it is a file, or it, or with `inside` an entry, a link to nothing."""
    path = os.path.abspath(local_path(innermost(store)) or os.sep)
    links = list[str]()
    if inside and os.path.isdir(path):
        with os.scandir(path) as entries:  # which says of each what it is
            links = sorted(entry.path for entry in entries if entry.is_symlink())
    while not os.path.isdir(path):
        if os.path.exists(path):
            return f"{path} is a file, not a directory"
        links.append(path)
        path = os.path.dirname(path)
    dangling = (each for each in links if os.path.islink(each) and not os.path.exists(each))
    return next((f"{each} is a symbolic link to {os.readlink(each)}, which does not exist" for each in dangling), "")


@contextmanager
def explaining_place(store: Store, own_name: str = "") -> Iterator[None]:
    """Raise failures inside as failures of the place that a user gave, not of `own_name`, a file that we keep there."""
    try:
        yield
    except StorageError as exc:
        if wrong := broken_path(store):
            # Without the cause, which names files of ours: this is the whole reason.
            raise StorageError(f"{store.url}: cannot save there: {wrong}", errno=exc.errno) from None
        if own_name and own_name in exc.message:
            exc.args = (exc.message.replace(f"/{own_name}", ""),)
            exc.message = exc.args[0]
        raise


def is_single_file(store: object) -> bool:
    """Return whether a place is a single local file, and not a directory."""
    path = local_path(store)
    return path is not None and os.path.isfile(path)


def with_any_names(store: S) -> S:
    """Return the store for reading files of other programs: any name, through symbolic links (`any_names()`)."""
    return cast("S", getattr(store, "any_names", lambda: store)())


def parent_of(store: object) -> tuple[Store, str] | None:
    """Return the store one level up and the name of this place in it; None if the store cannot say (`parent()`)."""
    return cast("tuple[Store, str] | None", getattr(store, "parent", _nothing)())


def verifies_uploads(store: object) -> bool:
    """Return whether the service compares everything it receives with a checksum before it accepts it."""
    return bool(_find(store, "verifies_uploads"))


def is_remote(store: object) -> bool:
    """Return whether a store is likely to be slower than the network between ranks (`remote`)."""
    return bool(_find(store, "remote"))


def prefetches(store: object) -> bool:
    """Return whether readers of a store can fill a cache of this machine in advance (`prefetches`)."""
    return bool(_find(store, "prefetches"))


def is_cached(reader: object, offset: int, nbytes: int) -> bool:
    """Return whether most of a range is cached locally, so that small reads cost no more (`cached` of a reader)."""
    return bool(_find(reader, "cached", _nothing)(offset, nbytes))


def prefetch(reader: object, offset: int, nbytes: int) -> bool:
    """Read a range into this machine's cache, if there is room; return whether it was not there (`prefetch` of a reader)."""
    return bool(_find(reader, "prefetch", _nothing)(offset, nbytes))


def drop_cached(store: object, name: str, offset: int, nbytes: int) -> None:
    """Make the next read of a range come from the storage itself, if the store can do that cheaply (`drop_cached`)."""
    _find(store, "drop_cached", _nothing)(name, offset, nbytes)


def keep_cached(store: object, names: Sequence[str], nbytes: int) -> bool:
    """Keep the files of a finished save in memory, in place of the save before, if there is room (`keep_cached`)."""
    return bool(names and _find(store, "keep_cached", _nothing)(names, nbytes))


def innermost(store: object) -> Any:
    """Return the store behind all wrappers, each of which has it as `inner`."""
    while (inner := getattr(store, "inner", None)) is not None:
        store = inner
    return store


def same_place(one: Store, other: Store) -> bool:
    """Return whether two stores or roots are one place, however they were named or wrapped (`same_place(other)`)."""
    a, b = innermost(one), innermost(other)
    if a is b:
        return True
    compare = getattr(a, "same_place", None)
    return bool(compare(b)) if compare is not None else a.url.rstrip("/") == b.url.rstrip("/")


class StoreSpec(msgspec.Struct, frozen=True):
    """A store, as another process opens it. It may contain secrets, and must only pass through pipes."""

    place: bytes
    options: dict[str, Any]
    """Of `open_place`."""
    environment: dict[str, str] = {}
    """The variables of its service."""

    def __repr__(self) -> str:
        return "StoreSpec(...)"  # without secrets


def spec_of(store: Store) -> StoreSpec:
    """Return a description from which another process opens the store (`spec()`)."""
    # Only if the class itself has the verb: a subclass that inherits it may behave differently, which would be lost.
    if "spec" in vars(type(store)):
        return cast("StoreSpec", cast("Any", store).spec())
    raise not_sendable(store.url, type(store).__name__)


def not_sendable(url: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f'{url}: writer="process" cannot open a {kind} in another process',
        hint='save to a path or a URL of files or objects, or pass writer="thread"',
    )


# -- for implementations -----------------------------------------------------------------------------------------------


@contextmanager
def abandoning(writer: W) -> Iterator[W]:
    try:
        yield writer
    except BaseException:
        writer.abandon()
        raise


def checked_end(where: str, name: str, nbytes: int | None, room: int) -> int:
    """Return where a blob created with `room` bytes ends; raises a `StorageError` if it cannot end there."""
    if nbytes is not None and not 0 <= nbytes <= room:
        message = f"{where}: cannot end after {nbytes} bytes: it was created with {room}"
        raise StorageError(message, name=name, errno=errno.EINVAL)
    return room if nbytes is None else nbytes


def check_fits(where: str, name: str, offset: int, nbytes: int, room: int, *, is_open: bool = True) -> None:
    """Raise a `StorageError` if a write is not within a blob, or the blob is not open any more."""
    if not is_open or offset < 0 or offset + nbytes > room:
        what = f"a blob of {room}" if is_open else "a blob that is closed"
        message = f"{where}: {nbytes} bytes at offset {offset} do not fit {what}"
        raise StorageError(message, name=name, offset=offset, errno=errno.EINVAL)


def conflict(where: str, name: str, over: Version | None = None) -> StorageError:
    """Make the error of a blob that already exists, or that no longer has the version which a `put` is `over`."""
    what = "cannot create: File exists" if over is None else "cannot put: it was replaced or deleted by another writer"
    return StorageError(f"{where}: {what} (errno EEXIST)", name=name, errno=errno.EEXIST)


def holds(get: Callable[..., bytes], name: str, data: Any) -> bool:
    try:
        return get(name, limit=len(data)) == bytes(data)
    except (BlobNotFound, MalformedFile):
        return False


def check_limit(where: str, name: str, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise MalformedFile(f"{where}: {nbytes} bytes, expected at most {limit}", name=name)


def short_read(where: str, name: str, offset: int, wanted: int, got: int) -> WrongSize:
    """Make the error of a blob that ends before the bytes that were asked for."""
    message = f"{where}: wanted {wanted} bytes at offset {offset}, got {got}: it ends there"
    return WrongSize(message, name=name, offset=offset, wanted=wanted, got=got)


def check_within(where: str, name: str, offset: int, wanted: int, nbytes: int) -> None:
    """Raise a `WrongSize` if a read is not within a blob."""
    if offset < 0 or offset + wanted > nbytes:
        raise short_read(where, name, offset, wanted, max(0, nbytes - max(offset, 0)))


def open_sized(store: ReadableStore, name: str, nbytes: int | None) -> BlobReader:
    """Open a file of a checkpoint; raise `WrongSize` if it is missing, or does not have the size of the commit record."""
    try:
        reader = store.open(name)
    except BlobNotFound as exc:
        raise WrongSize.of(name, "the file is missing", hint="restore it from a copy") from exc
    if (found := reader.nbytes) != nbytes:
        reader.close()
        why = f"{found} bytes, the commit record says {nbytes}"
        raise WrongSize.of(name, why, hint="the file was cut short or changed after the save")
    return reader


def read_range(reader: BlobReader, offset: int, nbytes: int) -> bytearray:
    """Read a range of an open blob into memory of its own."""
    data = bytearray(nbytes)
    reader.read_into(offset, memoryview(data))
    return data


def read_blob(reader: BlobReader, where: str, name: str, limit: int) -> bytes:
    """Read all of an open blob and close it: what `get` does in stores that have nothing faster."""
    with closing(reader):
        check_limit(where, name, reader.nbytes, limit)
        return bytes(read_range(reader, 0, reader.nbytes))


def sendable_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in a form that can be sent to another process. Errors do not show values, which may be secret."""
    sent = {}
    for name, value in options.items():
        try:
            sent[name] = _sendable(value)
        except TypeError as exc:
            raise CheckpointError(
                f'{url}: writer="process" cannot pass the option {name!r} to another process: {exc}',
                hint='give text and numbers, a profile, or environment variables instead, or pass writer="thread"',
            ) from None
    return sent


def _sendable(value: Any) -> Any:
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    if isinstance(value, timedelta):  # only obstore's client options have these, and it also accepts them as text
        return f"{value // timedelta(microseconds=1)}us"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sendable(each) for each in value]
    raise TypeError(f"it is a {type(value).__name__}")


# -- reading bytes a second time after a checksum mismatch -------------------------------------------------------------
#
# The network, a cache or memory may have changed them on the way. If the second read matches, the load goes on, and a
# warning says that the stored copy is fine. If not, both reads are compared: if they are equal, the stored copy is
# damaged; if they differ, something between the store and this process is. The second read bypasses caches where
# possible: it opens the blob again, and drops a local file from the page cache.

D = TypeVar("D", bytes, bytearray)
T = TypeVar("T")
E = TypeVar("E", bound=DamagedCheckpoint)

_ON_THE_WAY = (
    "two reads returned different bytes: the network, the disk or the memory of this machine corrupts data; try again, or"
    " on another machine"
)


def read_again(store: ReadableStore, name: str, offset: int, nbytes: int) -> bytearray:
    drop_cached(store, name, offset, nbytes)
    with closing(store.open(name)) as reader:
        return read_range(reader, offset, nbytes)


def repair(
    store: ReadableStore, name: str, offset: int, piece: memoryview, fits: Callable[[bytearray], bool]
) -> bool | None:
    """Read a range again, into `piece` if it is right now; returns None then, else whether both reads were equal."""
    data = read_again(store, name, offset, len(piece))
    if not fits(data):
        return piece == data
    piece[:] = data
    return None


def decode_or_reread(
    data: D,
    decode: Callable[[D], T],
    again: Callable[[], D],
    *,
    name: str,
    offset: int = 0,
    same: Callable[[D, D], bool | None] = operator.eq,
) -> T:
    """Decode bytes, or a second read; if both are damaged, raise the first error, with whether they are `same`."""
    try:
        return decode(data)
    except DamagedCheckpoint as exc:
        error = exc
    second = again()
    try:
        found = decode(second)
    except DamagedCheckpoint:
        raise with_reread_result(error, same=same(data, second)) from error.__cause__
    warn_reread_ok(name, offset, len(second))
    return found


def with_reread_result(error: E, *, same: bool | None) -> E:
    """Add to an error that its bytes were read twice, and whether the reads were equal; None: unknown."""
    if same is False:
        hint = _ON_THE_WAY
    else:
        times = "read twice, the same both times" if same else "read twice"
        hint = f"{error.hint or 'the file was damaged after the save'} ({times})"
    return type(error)(error.message, hint=hint, **{**error.details, "same_twice": same})


def warn_reread_ok(name: str, offset: int, nbytes: int) -> None:
    log_safely(
        logging.WARNING,
        "%s: bytes %d to %d were damaged when first read and right when read again: the stored copy is fine, but the"
        " network, the disk or the memory of this machine corrupted data",
        name,
        offset,
        offset + nbytes,
    )
