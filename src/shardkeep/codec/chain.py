"""
Several extensions on one stream.

The first extension of a writer's list is nearest to the file: data passes through the last one first. Their
descriptors are stored in the order in which data passed through them, the reverse of the list; so a reader takes them
from the back, undoing first what was done last.

Extensions are written by many hands. Their streams may or may not pass on `flush` and `close`, may give no count or
the wrong one from `write`, and may have no `readinto`. So between any two of them stands a step of ours, which closes
each stream once and all of them in order, and gives every reader all it asked for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from shardkeep.errors import StorageError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from shardkeep.codec.extensions import StreamTransformExtension

_PIECE = 1 << 20


class Registry(Protocol):
    """What makes extensions from descriptors: ours, or torch's."""

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Any]:
        """Make the extensions that left these descriptors, in their order."""
        ...


def transformed_output(extensions: Sequence[StreamTransformExtension], raw: IO[bytes]) -> tuple[IO[bytes], list[str]]:
    """
    Return a stream that writes through all extensions, and the descriptors to store.

    Closing it brings everything to `raw`, flushes it and leaves it open. If it is not closed, or left with an
    exception as a context manager, what the extensions still hold is dropped: nothing reaches `raw` later on.
    """
    step = _OutputStep(raw)
    for extension in extensions:
        step = _OutputStep(extension.transform_to(cast("IO[bytes]", step)), step)
    return cast("IO[bytes]", step), [extension.get_descriptor() for extension in reversed(extensions)]


def transformed_input(registry: Registry, descriptors: Sequence[str], raw: IO[bytes]) -> IO[bytes]:
    """
    Return a stream that gives what was written through the extensions that left these descriptors.

    Closing it leaves `raw` open. Without descriptors it is `raw` itself.

    Raises:
        ValueError: a descriptor is not known to the registry.

    """
    stream = raw
    for extension in reversed(registry.from_descriptor_list(descriptors)):
        # As in torch, an extension that does not change streams is passed over. Torch's own classes count.
        if hasattr(extension, "transform_from"):
            stream = extension.transform_from(_InputStep(stream, is_raw=stream is raw))
    return stream if stream is raw else cast("IO[bytes]", _InputStep(stream))


class _OutputStep(io.RawIOBase):
    """What an extension writes to: the stream of the one before it, or the file."""

    def __init__(self, below: IO[bytes], beneath: _OutputStep | None = None) -> None:
        self._below = below
        self._beneath = beneath
        """The step under the stream of this one; None over the file."""
        self._closing = False
        self._dropping = False

    def writable(self) -> bool:
        return True

    writeable = writable  # spelled so in torch

    def write(self, b: Buffer, /) -> int:
        if self._closing:
            raise ValueError("write to a closed stream")
        rest = memoryview(b).cast("B")
        nbytes = len(rest)
        if self._dropping:
            return nbytes
        if self._beneath is not None:
            # Its count is not looked at: some extensions count what they wrote, some nothing.
            self._below.write(b)
            return nbytes
        while rest:
            count = self._below.write(rest)
            if count == 0:
                raise StorageError("the file took none of what was written to it", hint="is it in non-blocking mode?")
            rest = rest[len(rest) if count is None else count :]
        return nbytes

    def tell(self) -> int:
        return self._below.tell()

    def flush(self) -> None:
        if not self._closing and not self._dropping:
            self._below.flush()

    def close(self) -> None:
        if self._closing:
            return
        try:
            if self._beneath is not None:
                self._closing = True  # its stream writes to the step beneath, no more to this one
                self._below.close()
            else:
                self.flush()
                self._closing = True
        finally:
            self._closing = True
            super().close()
            if self._beneath is not None:
                self._beneath.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._drop()
        self.close()

    def __del__(self) -> None:
        # A stream that was let go without `close` belongs to a write that failed; its tail must not reach the file.
        if not getattr(self, "_closing", True):
            self._drop()

    def _drop(self) -> None:
        step: _OutputStep | None = self
        while step is not None:
            step._dropping = True
            step = step._beneath
        with suppress(Exception):
            self.close()


class _InputStep(io.RawIOBase):
    """What an extension reads from, and what is read in the end: gives all that is asked for, if it is there."""

    def __init__(self, below: IO[bytes], *, is_raw: bool = False) -> None:
        self._below = below
        self._is_raw = is_raw

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = -1 if size is None else size
        first = self._some(_PIECE if wanted < 0 else min(wanted, _PIECE))
        if not first or len(first) == wanted:
            return first
        held = io.BytesIO()
        held.write(first)
        while wanted < 0 or held.tell() < wanted:
            piece = self._some(_PIECE if wanted < 0 else min(wanted - held.tell(), _PIECE))
            if not piece:
                break
            held.write(piece)
        return held.getvalue()

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        filled = 0
        while filled < len(view):
            piece = self._some(min(len(view) - filled, _PIECE))
            if not piece:
                break
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def seekable(self) -> bool:
        answer = getattr(self._below, "seekable", None)
        return answer is not None and bool(answer())

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._below.seek(offset, whence)

    def tell(self) -> int:
        return self._below.tell()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if not self._is_raw:
            self._below.close()

    def __del__(self) -> None:
        """Close nothing: what is beneath may still be read from."""

    def _some(self, most: int) -> bytes:
        # `read` and not `readinto`: a stream that changes bytes may have inherited one that does not.
        piece: bytes | None = self._below.read(most) if most else b""
        if piece is None:
            raise StorageError("a stream gave neither data nor its end", hint="is the file in non-blocking mode?")
        if len(piece) > most:
            raise StorageError(f"a stream gave {len(piece)} bytes where {most} were asked for")
        return piece
