"""A store in a bucket, below a prefix: an object appears all at once or not at all, and nothing is renamed."""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage import base
from shardkeep.storage.buffers import copy, flat
from shardkeep.storage.conditional_put import ConditionalPuts
from shardkeep.storage.multipart import ObjectWriter
from shardkeep.storage.object_client import Bucket, object_errors, obstore
from shardkeep.storage.retry import TRANSIENT

HEAD_BYTES = 64 << 10
"""Read when a blob is opened; fewer bytes would not arrive sooner."""
_CHUNK_BYTES = 256 << 10
_PROBE = "shardkeep.probe"


class ObjectReader:
    """An open object, which must not be replaced meanwhile. Its first bytes come with the opening, for headers."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._bucket, self._path, self._url, self._name = store.bucket, store.prefix + name, store.url, name
        self._closed = False
        self._head = b""
        self.nbytes, self._tag = self._bucket.request("open", self._url, name, self._look_up)

    def _look_up(self, client: Any) -> tuple[int, str | None]:
        try:
            with object_errors("cannot open", self._url, self._name):
                found = obstore().get(client, self._path, options={"range": (0, HEAD_BYTES)})
        except StorageError as error:
            if error.errno != errno.EINVAL:  # the range of an empty object is invalid
                raise
            meta = obstore().head(client, self._path)
        else:
            meta = found.meta
            with contextlib.suppress(Exception):  # then these bytes are read when they are needed
                self._head = bytes(found.bytes())
        return meta["size"], meta["e_tag"]

    def cached(self, offset: int, nbytes: int) -> bool:
        return 0 <= offset <= len(self._head) - nbytes

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - known here
        view = flat(into)
        if self._closed:
            raise self._error(offset, "is closed", errno.EINVAL)
        base.check_within(f"{self._url}/{self._name}", self._name, offset, len(view), self.nbytes)
        held = self._head[offset : offset + len(view)]
        view[: len(held)] = held
        self._read(offset + len(held), view[len(held) :])

    def _read(self, offset: int, view: memoryview) -> None:
        """Read everything; after every answer that brings some bytes, the count of retries begins again."""
        done = 0

        def read_on() -> None:
            nonlocal done
            begun = done
            try:
                for got in self._chunks(offset + done, view[done:]):
                    done += got
            except StorageError as error:
                if done == begun or error.errno not in TRANSIENT:
                    raise

        while done < len(view):
            self._bucket.retry(f"read {self._url}/{self._name} at {offset}", read_on)

    def _chunks(self, offset: int, view: memoryview) -> Iterator[int]:
        """Make one request and fill `view` as bytes arrive; yields how many arrived each time."""
        wanted: dict[str, Any] = {"range": (offset, offset + len(view))}
        if self._tag:
            wanted["if_match"] = self._tag
        done = 0
        with self._bucket.slots:
            with object_errors("cannot read", self._url, self._name, offset):
                try:
                    found = obstore().get(self._bucket.client, self._path, options=wanted)
                except obstore().exceptions.PreconditionError:
                    raise self._replaced(offset) from None
            if found.meta["e_tag"] != self._tag or found.meta["size"] != self.nbytes:  # some ignore the condition
                raise self._replaced(offset)
            stream = iter(found.stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                with object_errors("cannot read", self._url, self._name, offset + done):
                    chunk = next(stream, None)
                if chunk is None:
                    break
                piece = memoryview(chunk)
                if done + len(piece) > len(view):
                    raise self._error(offset, "the service sent more than was asked for", errno.EPROTO)
                copy(view[done : done + len(piece)], piece)
                done += len(piece)
                yield len(piece)
        if done < len(view):
            raise self._error(offset + done, "the answer broke off", errno.ECONNRESET)

    def _error(self, offset: int, what: str, number: int) -> StorageError:
        message = f"{self._url}/{self._name}: cannot read at offset {offset}: {what}"
        return StorageError(message, name=self._name, offset=offset, errno=number)

    def _replaced(self, offset: int) -> BlobNotFound:
        error = self._error(offset, "the object was replaced since it was opened", errno.ENOENT)
        return BlobNotFound(error.message, **error.details)

    def close(self) -> None:
        self._closed = True


class ObjectStore(ConditionalPuts):
    """The objects of a bucket directly below a prefix. It is also a root: its places are the prefixes below."""

    sequential = True
    remote = True

    def __init__(self, bucket: Bucket, prefix: str, url: str) -> None:
        """Point to a place; `prefix` ends with a slash or is empty, `url` is what the user wrote."""
        self.url = url
        self.bucket = bucket
        self.prefix = prefix
        self._settle_s, self._retry_s = bucket.policy.settle_s, bucket.policy.retry_s
        self._lock, self._warned = bucket.lock, bucket.warned
        self.requests, self.part_nbytes = bucket.policy.requests, bucket.policy.part_bytes

    @property
    def verifies_uploads(self) -> bool:
        """Whether this is S3, which compares each part with the SHA-256 sent along; of compatible services it is unknown."""
        bucket = self.bucket
        return bucket.service == "s3" and bucket.official and bool(bucket.client.config.get("checksum_algorithm"))

    def same_place(self, other: object) -> bool:
        if not isinstance(other, ObjectStore):
            return False
        mine, its = self.bucket, other.bucket
        return (mine.server, mine.name, self.prefix) == (its.server, its.name, other.prefix)

    def parent(self) -> tuple[base.Store, str] | None:
        above, _, name = self.url.rpartition("/")
        if not name or above.endswith("/"):
            return None
        return ObjectStore(self.bucket, self.prefix.removesuffix(f"{name}/"), above), name

    def spec(self) -> base.StoreSpec:
        options = base.sendable_options(self.url, self.bucket.options)
        return base.StoreSpec(self.url.encode(), options, dict(self.bucket.environment))

    def create(self, name: str, nbytes: int) -> ObjectWriter:
        return ObjectWriter(self, base.check_name(name), nbytes)

    def create_over(self, name: str, nbytes: int) -> ObjectWriter:
        return ObjectWriter(self, base.check_name(name), nbytes, replaces=True)

    def open(self, name: str) -> ObjectReader:
        return ObjectReader(self, base.check_name(name))

    def get(self, name: str, *, limit: int) -> bytes:
        path = self.prefix + base.check_name(name)

        def read(client: Any) -> bytes:
            found = obstore().get(client, path)
            base.check_limit(f"{self.url}/{name}", name, found.meta["size"], limit)  # before any of it is read
            return bytes(found.bytes())

        return self.bucket.request("get", self.url, name, read)

    def version(self, name: str) -> base.Version | None:
        path = self.prefix + base.check_name(name)
        try:
            with self.bucket.slots, object_errors("cannot look up", self.url, name):
                found = obstore().head(self.bucket.client, path)
        except BlobNotFound:
            return None
        # A service without tags has no conditions either: this is only compared by us.
        return base.Version(found["e_tag"] or f"{found['last_modified']} {found['size']}", found["version"] or "")

    def send(self, name: str, data: Any, *, create: bool = False, over: base.Version | None = None) -> None:
        mode: Any = "create" if create else "overwrite"
        if over is not None:
            mode = {"e_tag": over.tag, **({"version": over.generation} if over.generation else {})}
        with self.bucket.slots, object_errors("cannot put", self.url, name):
            obstore().put(self.bucket.client, self.prefix + name, data, mode=mode, use_multipart=False)

    def checks_conditions(self, over: base.Version | None) -> bool:
        """Return whether the service checks a condition; found out by a probe, once, because some accept and ignore it."""
        self.bucket.check_process()  # before the caller waits for a lock
        wanted = self.bucket.policy.conditional_puts
        if wanted is not None or self.bucket.official:
            return wanted is not False
        probed, creates = self.bucket.probed, over is None
        if creates not in probed:
            # First under a fixed name, so that what a killed process left is deleted by the next one. Another process that
            # probes at the same time may delete it and so make the put succeed: then probe again under a name of our own.
            names = (_PROBE, f"{_PROBE}-{secrets.token_hex(8)}")
            probed[creates] = self.bucket.retry(
                f"probe conditions at {self.url}", lambda: any(self._refuses(name, creates=creates) for name in names)
            )
        return probed[creates]

    def _refuses(self, name: str, *, creates: bool) -> bool:
        """Make a put whose condition does not hold: a service that accepts it ignores the condition."""
        try:
            self.send(name, b"1")
            seen = None
            if not creates:
                seen = self.version(name)
                self.send(name, b"22")
            self.send(name, b"333", create=creates, over=seen)
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
                self.delete(name)

    def list(self) -> Iterator[base.BlobInfo]:
        return iter(self._blobs(self._level()))

    def _blobs(self, level: dict[str, Any]) -> Sequence[base.BlobInfo]:
        found = []
        for each in level["objects"]:
            name = each["path"].removeprefix(self.prefix)
            # Some services list the prefix itself, as an empty object.
            if each["path"].startswith(self.prefix) and base.is_name(name):
                found.append(base.BlobInfo(name, each["size"], each["last_modified"].timestamp()))
        return sorted(found, key=lambda blob: blob.name)

    def delete(self, name: str) -> None:
        self.delete_all([name])

    def delete_all(self, names: Sequence[str]) -> None:
        self._delete([self.prefix + base.check_name(name) for name in names])

    def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        name = paths[0].removeprefix(self.prefix) if len(paths) == 1 else ""
        try:
            self.bucket.request("delete", self.url, name, lambda client: obstore().delete(client, list(paths)))
        except BlobNotFound:
            # Some services answer this for a missing object, and do not say what became of the others.
            for path in paths if len(paths) > 1 else ():
                self._delete([path])

    def _level(self) -> dict[str, Any]:
        return self.bucket.request(
            "list", self.url, "", lambda client: obstore().list_with_delimiter(client, self.prefix or None)
        )

    def all_names(self) -> base.Names:
        level = self._level()
        found = [path.rstrip("/").removeprefix(self.prefix) for path in level["common_prefixes"]]
        return base.Names([*filter(base.is_place_name, found)], lambda: [info.name for info in self._blobs(level)])

    def places(self) -> Iterator[str]:
        return iter(self.all_names().places)

    def place(self, name: str) -> ObjectStore:
        return ObjectStore(self.bucket, f"{self.prefix}{base.check_place(name)}/", f"{self.url}/{name}")

    def remove(self, name: str) -> None:
        place = self.place(name)

        def listed(client: Any) -> list[str]:
            found = obstore().list(client, place.prefix, chunk_size=1000)
            return [path for chunk in found for each in chunk if (path := each["path"]).startswith(place.prefix)]

        paths = self.bucket.request("list", place.url, "", listed)
        blobs = {name for path in paths if base.is_name(name := path.removeprefix(place.prefix))}
        base.delete_contents(place, blobs)
        # What is left has no blob's name, or is deeper: other programs left it.
        self._delete([path for path in paths if path.removeprefix(place.prefix) not in blobs])

    def drop_empty(self, name: str) -> None:
        """Do nothing: a prefix without objects does not exist."""
        base.check_place(name)
