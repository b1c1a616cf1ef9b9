"""
Blobs as objects of a bucket, below a prefix: S3 and what speaks its language, Google Cloud Storage, Azure.

Nothing is written to this machine, nothing depends on a directory, and nothing is renamed. An object appears all at once
or not at all. Requests that fail in passing are made again by the library, with growing and uneven waits, for a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardkeep.errors import BlobNotFound
from shardkeep.store.giving_up import hope_held, unless_lost
from shardkeep.store.object_again import ask_again
from shardkeep.store.object_client import Bucket, obstore
from shardkeep.store.object_errors import object_errors
from shardkeep.store.object_read import ObjectReader
from shardkeep.store.object_swap import SmallObjects
from shardkeep.store.object_upload import ObjectWriter
from shardkeep.store.protocol import BlobInfo, Version, check_name, is_name
from shardkeep.store.swaps import Swaps, taken


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
        self._swaps = Swaps(
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
        if unless_lost(lambda: self._small.version(name), f"{self.url}/{name}", hope_held()) is not None:
            raise taken(self.url, name)
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
            ask_again(self.bucket.manners, f"to delete {self.url}/{name}", deleted)
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

        return ask_again(self.bucket.manners, f"to list {self.url}", listed)
