"""
A blob of an object store that takes the place of another in one step, however large it is.

It is uploaded in parts, which nobody sees until the last request puts them together under the name: until then, and if
anything fails, the old bytes are there. Nothing is ever deleted: there would be neither.
"""

from __future__ import annotations

import errno

from shardkeep.errors import StorageError
from shardkeep.store.aligned import flat
from shardkeep.store.object_sending import Upload
from shardkeep.store.objects import ObjectStore
from shardkeep.store.protocol import checked_end


class ReplacingWriter:
    """Writes such a blob."""

    def __init__(self, store: ObjectStore, name: str, nbytes: int) -> None:
        """Begin one in place of what is there."""
        self._store = store
        self._name = name
        self._nbytes = nbytes
        self._before = store.version(name)
        self._upload = Upload(store.bucket, store.prefix + name, url=store.url, name=name, nbytes=nbytes)
        self._over = False
        self.in_doubt = False
        """Whether the last request went wrong in a way that leaves open what is there now: old bytes, or the new ones."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`; best in order."""
        self._upload.write(offset, flat(data))

    def finish(self, nbytes: int | None = None) -> None:
        """
        Put the new bytes in place of the old ones.

        Raises:
            StorageError: the old ones are still there.

        """
        end = checked_end(f"{self._store.url}/{self._name}", self._name, nbytes, self._nbytes)
        whole = self._upload.close(end)
        if whole is not None:  # of one part, and nothing of it was sent
            self._store.put(self._name, bytes(whole), replace=True)
        self._over = True
        # A size tells nothing: models of one kind have the same. Nor does a version alone: equal bytes may have the same.
        self.in_doubt = self._upload.in_doubt and self._store.version(self._name) == self._before

    def abandon(self) -> None:
        """Take back what was sent; what is under the name stays."""
        if not self._over:
            self._over = True
            self._upload.cancel()

    def unchanged(self) -> StorageError:
        """Make the error of a blob that is not what was written, because the old one is still there."""
        return StorageError(
            f"{self._store.url}/{self._name}: was not replaced: what was sent did not arrive, and the old file is there",
            hint="try again",
            name=self._name,
            errno=errno.EIO,
        )
