"""
Reading an object: any range of it, straight into place, and only as long as it is the same object.

Opening asks for the first bytes and learns the size with them, in one request; headers are then at hand already. An
answer that breaks off is asked for again from where it broke off.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import Any

from shardkeep.errors import BlobNotFound, StorageError, WrongSize
from shardkeep.store.aligned import copy, flat
from shardkeep.store.object_again import ask_again, wait_s
from shardkeep.store.object_client import Bucket, obstore
from shardkeep.store.object_errors import object_errors
from shardkeep.store.retrying import TRANSIENT

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
            self._nbytes, self._tag = ask_again(bucket.manners, f"to open {url}/{name}", self._looked_up)

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
                time.sleep(wait_s(failed))

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
