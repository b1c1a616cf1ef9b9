"""
A safetensors file that is being written, in parts, from any thread, under its temporary name.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from shardkeep.layout.safetensors_publish import temporary
from shardkeep.run.write import take_back
from shardkeep.store.local import LocalStore


class NewFile:
    """
    A file of known size. Whoever writes the last part of its data writes the header and makes it durable.

    It is removed if `undo` is closed, whether it was complete or not.
    """

    def __init__(
        self, store: LocalStore, name: str, save_id: str, header: bytes, data_nbytes: int, undo: ExitStack
    ) -> None:
        self._name = temporary(name, save_id)
        self._header = header
        self._writer = store.create(self._name, len(header) + data_nbytes)
        undo.callback(take_back, store, self._name, self._writer)
        self._lock = threading.Lock()
        self._bytes_left = data_nbytes

    def write(self, start: int, data: memoryview) -> None:
        """Write a part of the data; of a file without data, the empty part, once."""
        if data:
            self._writer.write_at(len(self._header) + start, data)
        with self._lock:
            self._bytes_left -= len(data)
            last = not self._bytes_left
        if last:
            self._writer.write_at(0, memoryview(self._header))
            self._writer.finish()
