"""
A new blob of an object store: it is seen all at once when it is finished, or not at all.

A large one is uploaded in parts. One of one part is put in one request, only if there is none of its name.
"""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.store.aligned import flat
from shardkeep.store.object_client import Bucket
from shardkeep.store.object_sending import Upload
from shardkeep.store.protocol import checked_end


class ObjectWriter:
    """A new blob of an object store."""

    def __init__(
        self, bucket: Bucket, path: str, *, url: str, name: str, nbytes: int, put: Callable[[memoryview], None]
    ) -> None:
        """Begin one; `put` stores a blob of one part, if there is none of that name."""
        self._url = url
        self._name = name
        self._nbytes = nbytes
        self._put = put
        self._upload = Upload(bucket, path, url=url, name=name, nbytes=nbytes)
        self._closed = False
        self._over = False

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        if self._closed or offset < 0 or offset + len(view) > self._nbytes:
            what = f"{len(view)} bytes at offset {offset} do not fit an open blob of {self._nbytes}"
            raise self._upload.error(what, offset)
        self._upload.write(offset, view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(f"{self._url}/{self._name}", self._name, nbytes, self._nbytes)
        if self._closed:
            raise self._upload.error("is closed already", None)
        self._closed = True
        whole = self._upload.close(end)
        if whole is None:
            self._upload.check_size(end)
        else:
            self._upload.put(lambda: self._put(whole))
        self._over = True

    def abandon(self) -> None:
        if self._over:
            return
        self._over = self._closed = True
        self._upload.cancel()
        if self._upload.may_appear:
            self._upload.remove()
