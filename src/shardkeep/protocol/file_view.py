"""
A part of a stream as a stream of its own, and small sums over shapes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any


class _ReaderView(io.IOBase):
    """
    The `len` bytes of a stream from `offset` on, read as if there were no others.

    Where it stands is where the stream stands: two views of one stream are used in turn, each after a `seek`.
    """

    def __init__(self, base_stream: io.IOBase, offset: int, len: int) -> None:  # noqa: A002 - torch's name
        super().__init__()
        self.offset = offset
        self.len = len
        self.base_stream = base_stream
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place, and return it, both counted from the view's start."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell() if whence == os.SEEK_CUR else 0, os.SEEK_END: self.len}
        if whence not in start:
            raise ValueError(f"whence is {whence}, expected one of os.SEEK_SET, os.SEEK_CUR, os.SEEK_END")
        target = start[whence] + offset
        if target < 0:
            raise ValueError(f"cannot go to {target}, before the start of the view")
        self.base_stream.seek(self.offset + target)
        return target

    def tell(self) -> int:
        """Return where the view stands, counted from its start."""
        return self.base_stream.tell() - self.offset

    def readable(self) -> bool:
        """Say whether the stream can be read."""
        return self.base_stream.readable()

    def seekable(self) -> bool:
        """Say whether the stream can be moved in."""
        return self.base_stream.seekable()

    def readinto(self, b: Any) -> int:
        """Fill a buffer as far as the view goes; return how much was read."""
        left = self._left()
        if left == 0:
            return 0
        room = memoryview(b).cast("B")
        read: int = self.base_stream.readinto(room[:left])  # type: ignore[attr-defined]  # binary streams have it
        return read

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, or all that are left in the view."""
        left = self._left()
        wanted = left if size is None or size < 0 else min(size, left)
        data: bytes = self.base_stream.read(wanted)
        return data

    def _left(self) -> int:
        return max(0, self.len - self.tell())


def _create_file_view(file: io.IOBase, offset: int, length: int) -> io.IOBase:
    """Return a part of a stream as a stream."""
    return _ReaderView(file, offset, length)


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=False)]


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=False)]


def _normalize_device_info(device_type: str, device_id: int) -> str:
    """Return how a device is written in a placement."""
    return "cpu" if device_type == "cpu" else f"{device_type}:{device_id}"
