"""
Blobs as objects of a bucket, below a prefix: S3 and what speaks its language, Google Cloud Storage, Azure.

Nothing is written to this machine, nothing depends on a directory, and nothing is renamed. An object appears all at once
or not at all. Requests that fail in passing are made again by the library, with growing and uneven waits, for a time.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError, WrongSize
from shardkeep.storage.base import BlobInfo, Version, check_name, delete_contents, is_name
from shardkeep.storage.buffers import copy, flat
from shardkeep.storage.cancel import current_scope, run_cancellable
from shardkeep.storage.conditional_put import ConditionalPuts, name_taken
from shardkeep.storage.multipart import ObjectWriter
from shardkeep.storage.object_client import Bucket, backoff_s, object_errors, obstore, retry_request
from shardkeep.storage.retry import TRANSIENT

# Reading an object: any range of it, straight into place, and only as long as it is the same object.
#
# Opening asks for the first bytes and learns the size with them, in one request; headers are then at hand already. An
# answer that breaks off is asked for again from where it broke off.

HEAD_BYTES = 64 << 10
"""Asked for when a blob is opened: less would not come sooner."""
_CHUNK_BYTES = 256 << 10


class ObjectReader:
    """An object that is open for reading."""

    def __init__(self, bucket: Bucket, path: str, *, url: str, name: str) -> None:
        """Open one, or raise `BlobNotFound`."""
        self._bucket = bucket
        self._path = path
        self._url = url
        self._name = name
        self._closed = False
        self._head = b""
        self._tag: str | None
        with object_errors("cannot open", url, name):
            self._nbytes, self._tag = retry_request(bucket.manners, f"to open {url}/{name}", self._looked_up)

    def _looked_up(self) -> tuple[int, str | None]:
        try:
            with self._bucket.slots, object_errors("cannot open", self._url, self._name):
                found = obstore().get(self._bucket.client, self._path, options={"range": (0, HEAD_BYTES)})
                meta = found.meta
                with contextlib.suppress(Exception):  # then it is read when it is wanted
                    self._head = bytes(found.bytes())
        except StorageError as error:
            if error.errno != errno.EINVAL:  # an empty object has no first byte
                raise
            meta = obstore().head(self._bucket.client, self._path)
        return meta["size"], meta["e_tag"]

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        return 0 <= offset <= len(self._head) - nbytes

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - known here
        view = flat(into)
        there = max(0, min(len(view), self._nbytes - max(offset, 0)))
        if self._closed or offset < 0:
            what = "is closed" if self._closed else f"there is no offset {offset}"
            raise StorageError(f"{self._url}/{self._name}: {what}", name=self._name, offset=offset, errno=errno.EINVAL)
        if there < len(view):
            raise WrongSize(
                f"{self._url}/{self._name}: wanted {len(view)} bytes at offset {offset}, got {there}: it ends there",
                name=self._name, offset=offset, wanted=len(view), got=there,
            )  # fmt: skip
        if self.cached(offset, len(view)):
            view[:] = self._head[offset : offset + len(view)]
            return
        self._read(offset, view)

    def _read(self, offset: int, view: memoryview) -> None:
        """Read until all is there; every answer that brings something begins the count of failures anew."""
        manners = self._bucket.manners
        done = failed = 0
        until = time.monotonic() + manners.retry_s
        while done < len(view):
            begun = done
            try:
                for got in self._chunks(offset + done, view[done:]):
                    done += got
            except StorageError as error:
                failed = 1 if done > begun else failed + 1
                if error.errno not in TRANSIENT or failed > manners.retries or time.monotonic() > until:
                    raise
                time.sleep(backoff_s(failed))

    def _chunks(self, offset: int, view: memoryview) -> Any:
        """Ask once, and fill what comes; yields how much came each time."""
        wanted: dict[str, Any] = {"range": (offset, offset + len(view))}
        if self._tag:
            wanted["if_match"] = self._tag
        done = 0
        with self._bucket.slots:
            try:
                with object_errors("cannot read", self._url, self._name, offset):
                    found = obstore().get(self._bucket.client, self._path, options=wanted)
            except StorageError as error:
                if error.errno == errno.EEXIST:  # the condition does not hold
                    raise self._replaced(offset) from None
                raise
            if found.meta["e_tag"] != self._tag or found.meta["size"] != self._nbytes:  # some do not look at conditions
                raise self._replaced(offset)
            stream = iter(found.stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                with object_errors("cannot read", self._url, self._name, offset + done):
                    chunk = next(stream, None)
                if chunk is None:
                    break
                piece = memoryview(chunk)
                if done + len(piece) > len(view):
                    raise self._broken(offset, "more came than was asked for", errno.EPROTO)
                copy(view[done : done + len(piece)], piece)
                done += len(piece)
                yield len(piece)
        if done < len(view):
            raise self._broken(offset + done, "the answer broke off", errno.ECONNRESET)

    def _broken(self, offset: int, what: str, number: int) -> StorageError:
        message = f"{self._url}/{self._name}: cannot read at offset {offset}: {what}"
        return StorageError(message, name=self._name, offset=offset, errno=number)

    def _replaced(self, offset: int) -> BlobNotFound:
        return BlobNotFound(
            f"{self._url}/{self._name}: cannot read at offset {offset}: another was put in its place since it was opened",
            name=self._name,
            offset=offset,
            errno=errno.ENOENT,
        )

    def close(self) -> None:
        self._closed = True


# Small objects, put whole and read whole, with the conditions of the service.
#
# Whether a service keeps to conditions is tried out once, unless it is known: some answer that all is well and look
# at
# none.

_PROBE = "shardkeep.probe"
_CREATE = "a put that is to create only is refused where there is one"
_OVER = "a put over a version is refused where there is another"


class SmallObjects:
    """The small objects of one place."""

    def __init__(self, bucket: Bucket, prefix: str, url: str) -> None:
        """Take objects whose paths begin with `prefix`."""
        self._bucket = bucket
        self._prefix = prefix
        self._url = url

    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put one whole, with a condition."""
        mode: Any = "create" if create else "overwrite"
        if over is not None:
            mode = {"e_tag": over.tag, **({"version": over.generation} if over.generation else {})}
        with self._bucket.slots, object_errors("cannot put", self._url, name):
            obstore().put(self._bucket.client, self._prefix + name, data, mode=mode, use_multipart=False)

    def read(self, name: str, limit: int) -> bytes:
        """Read one whole, of at most so many bytes."""
        return retry_request(self._bucket.manners, f"to get {self._url}/{name}", lambda: self._read(name, limit))

    def _read(self, name: str, limit: int) -> bytes:
        with self._bucket.slots, object_errors("cannot get", self._url, name):
            found = obstore().get(self._bucket.client, self._prefix + name)
            nbytes = found.meta["size"]
            if nbytes > limit:  # before any of it is read
                raise MalformedFile(f"{self._url}/{name}: {nbytes} bytes, expected at most {limit}", name=name)
            return bytes(found.bytes())

    def version(self, name: str) -> Version | None:
        """Say which version is there."""
        try:
            with self._bucket.slots, object_errors("cannot look at", self._url, name):
                found = obstore().head(self._bucket.client, self._prefix + name)
        except BlobNotFound:
            return None
        # Where there are no tags there are no conditions either, and this is compared by us.
        return Version(found["e_tag"] or f"{found['last_modified']} {found['size']}", found["version"] or "")

    def keeps_conditions(self, over: Version | None) -> bool:
        """Tell whether conditions are checked: that there is none, or that it is of a version. Some check one of them."""
        self._bucket.check_process()  # whoever asks may wait for a lock next
        wanted = self._bucket.manners.conditional_puts
        if wanted is not None or self._bucket.official:
            return wanted is not False
        tried = self._bucket.tried
        what = _CREATE if over is None else _OVER
        if what not in tried:
            again = f"to try out conditions at {self._url}"
            tried[what] = retry_request(self._bucket.manners, again, lambda: self._try_out(what))
        return tried[what]

    def _try_out(self, what: str) -> bool:
        """Put something against a condition that does not hold: who lets that pass looks at none."""
        # By one name for all, so that what a killed process left is deleted by the next. Others who try just now, and
        # delete it, may make it seem that all puts pass: then it is tried by a name of its own.
        return any(self._refuses(what, name) for name in (_PROBE, f"{_PROBE}-{secrets.token_hex(8)}"))

    def _refuses(self, what: str, name: str) -> bool:
        try:
            self.send(name, b"1")
            seen = None
            if what == _OVER:
                seen = self.version(name)
                self.send(name, b"22")
            self.send(name, b"333", create=what == _CREATE, over=seen)
        except BlobNotFound:
            return False
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return True
            raise
        else:
            return False
        finally:
            with contextlib.suppress(StorageError):
                retry_request(self._bucket.manners, f"to delete {self._url}/{name}", lambda: self._delete(name))

    def _delete(self, name: str) -> None:
        with self._bucket.slots, object_errors("cannot delete", self._url, name):
            obstore().delete(self._bucket.client, self._prefix + name)


class ObjectStore:
    """The objects of a bucket right below a prefix."""

    sequential = True
    """The parts of an upload are sent in order."""

    def __init__(self, bucket: Bucket, prefix: str, url: str) -> None:
        """Point to a place; `prefix` ends with a slash or is empty, `url` is what the user wrote."""
        self.url = url
        self.bucket = bucket
        self.prefix = prefix
        self._small = SmallObjects(bucket, prefix, url)
        self._swaps = ConditionalPuts(
            self._small, url, settle_s=bucket.manners.settle_s, retry_s=bucket.manners.retry_s,
            lock=bucket.lock, warned=bucket.warned,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def requests(self) -> int:
        """How many requests may be under way at once."""
        return self.bucket.manners.requests

    def create(self, name: str, nbytes: int) -> ObjectWriter:
        check_name(name)
        if run_cancellable(lambda: self._small.version(name), f"{self.url}/{name}", current_scope()) is not None:
            raise name_taken(self.url, name)
        return ObjectWriter(
            self.bucket, self.prefix + name, url=self.url, name=name, nbytes=nbytes,
            put=lambda data: self._swaps.put(name, data),
        )  # fmt: skip

    def open(self, name: str) -> ObjectReader:
        return ObjectReader(self.bucket, self.prefix + check_name(name), url=self.url, name=name)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        self._swaps.put(check_name(name), data, replace=replace, over=over)

    def get(self, name: str, *, limit: int) -> bytes:
        return self._small.read(check_name(name), limit)

    def version(self, name: str) -> Version | None:
        return self._small.version(check_name(name))

    def list(self) -> Iterator[BlobInfo]:
        found = []
        for each in self._level()["objects"]:
            name = each["path"].removeprefix(self.prefix)
            # Some services list a prefix itself, as an object of no bytes.
            if each["path"].startswith(self.prefix) and is_name(name):
                found.append(BlobInfo(name, each["size"], each["last_modified"].timestamp()))
        return iter(sorted(found, key=lambda blob: blob.name))

    def delete(self, name: str) -> None:
        self.delete_all([name])

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete many, in as few requests as the service allows; those that are not there are no error."""
        self._delete([self.prefix + check_name(name) for name in names])

    def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        name = paths[0].removeprefix(self.prefix) if len(paths) == 1 else ""

        def deleted() -> None:
            with self.bucket.slots, object_errors("cannot delete", self.url, name):
                obstore().delete(self.bucket.client, list(paths))

        try:
            retry_request(self.bucket.manners, f"to delete {self.url}/{name}", deleted)
        except BlobNotFound:
            # Some services say so for one that is not there, and then not what became of the others.
            if len(paths) > 1:
                left = self._left_of(paths)
                for each in [left] if len(left) < len(paths) else [[path] for path in left]:
                    self._delete(each)

    def _left_of(self, paths: Sequence[str]) -> Sequence[str]:
        """Return those of some paths that are there, or lie deeper than a listing shows."""
        there = {each["path"] for each in self._level()["objects"]}
        return [path for path in paths if path in there or "/" in path.removeprefix(self.prefix)]

    def _level(self) -> dict[str, Any]:
        """List what is right below the prefix: objects, and further prefixes."""

        def listed() -> dict[str, Any]:
            with self.bucket.slots, object_errors("cannot list", self.url):
                found: dict[str, Any] = obstore().list_with_delimiter(self.bucket.client, self.prefix or None)
                return found

        return retry_request(self.bucket.manners, f"to list {self.url}", listed)


# A root in a bucket: its places are the prefixes below its own.


class ObjectRoot(ObjectStore):
    """A prefix with prefixes below it."""

    def places(self) -> Iterator[str]:
        found = [path.rstrip("/").removeprefix(self.prefix) for path in self._level()["common_prefixes"]]
        return iter([name for name in found if is_name(name)])

    def place(self, name: str) -> ObjectStore:
        return ObjectStore(self.bucket, f"{self.prefix}{check_name(name)}/", f"{self.url}/{name}")

    def remove(self, name: str) -> None:
        place = self.place(name)
        delete_contents(place)

        def below() -> list[str]:
            with self.bucket.slots, object_errors("cannot list", place.url):
                found = obstore().list(self.bucket.client, place.prefix, chunk_size=1000)
                return [each["path"] for chunk in found for each in chunk]

        # What no blob is called, or lies deeper: left by others.
        paths = retry_request(self.bucket.manners, f"to list {place.url}", below)
        self._delete([path for path in paths if path.startswith(place.prefix)])

    def drop_empty(self, name: str) -> None:
        check_name(name)  # that is all: a prefix without objects is none
