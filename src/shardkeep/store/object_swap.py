"""
Small objects, put whole and read whole, with the conditions of the service.

Whether a service keeps to conditions is tried out once, unless it is known: some answer that all is well and look at
none.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from typing import Any

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError
from shardkeep.store.object_again import ask_again
from shardkeep.store.object_client import Bucket, obstore
from shardkeep.store.object_errors import object_errors
from shardkeep.store.protocol import Version

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
        return ask_again(self._bucket.manners, f"to get {self._url}/{name}", lambda: self._read(name, limit))

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
            tried[what] = ask_again(self._bucket.manners, again, lambda: self._try_out(what))
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
                ask_again(self._bucket.manners, f"to delete {self._url}/{name}", lambda: self._delete(name))

    def _delete(self, name: str) -> None:
        with self._bucket.slots, object_errors("cannot delete", self._url, name):
            obstore().delete(self._bucket.client, self._prefix + name)
