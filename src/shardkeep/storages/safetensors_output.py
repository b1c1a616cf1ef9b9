"""
A safetensors file that is being written, in parts, from any thread.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from shardkeep.run.write import take_back
from shardkeep.store.protocol import Store


class NewFile:
    """
    A file of known size. Whoever writes the last part of its data makes it durable.

    It is removed if `undo` is closed, whether it was complete or not.
    """

    def __init__(self, store: Store, name: str, header: bytes, data_nbytes: int, undo: ExitStack) -> None:
        self._header_nbytes = len(header)
        self._writer = store.create(name, len(header) + data_nbytes)
        undo.callback(take_back, store, name, self._writer)
        self._writer.write_at(0, memoryview(header))  # first: many stores take bytes in order only
        self._lock = threading.Lock()
        self._bytes_left = data_nbytes

    def write(self, start: int, data: memoryview) -> None:
        """Write a part of the data; of a file without data, the empty part, once."""
        if data:
            self._writer.write_at(self._header_nbytes + start, data)
        with self._lock:
            self._bytes_left -= len(data)
            last = not self._bytes_left
        if last:
            self._writer.finish()
