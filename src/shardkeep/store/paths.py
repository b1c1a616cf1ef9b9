"""
Files of this machine by their paths, whatever they are called and wherever they are: for reading what others wrote.
"""

from __future__ import annotations

import os
from contextlib import closing

from shardkeep.errors import MalformedFile
from shardkeep.store.aligned import ScratchPool
from shardkeep.store.files import open_files, storage_errors
from shardkeep.store.local import _SCRATCH_BYTES, _LocalReader
from shardkeep.store.protocol import BlobReader


class PathStore:
    """Opens files through symbolic links, as in a Hugging Face cache; a blob's name is its path."""

    def __init__(self, *, direct: bool) -> None:
        """Bypass the page cache where that is possible, if `direct`."""
        self._direct = direct
        self._scratch = ScratchPool(_SCRATCH_BYTES)

    def open(self, name: str) -> BlobReader:
        where, last = os.path.split(name)
        with storage_errors("cannot open", where, last):
            files = open_files(name, os.O_RDONLY, direct=self._direct, follow_links=True)
            return _LocalReader(where, last, files, self._scratch)

    def get(self, name: str, *, limit: int) -> bytes:
        with closing(self.open(name)) as reader:
            if reader.nbytes > limit:
                raise MalformedFile(f"{name}: {reader.nbytes} bytes, expected at most {limit}", file=name)
            data = bytearray(reader.nbytes)
            reader.read_into(0, memoryview(data))
            return bytes(data)
