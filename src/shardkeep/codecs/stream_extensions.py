"""
Stream extensions of torch's storage writers and readers: they transform the bytes of each value on the way to a file.

An extension leaves a descriptor, "name[@local-domain][/version]", from which a reader makes it again. Of several, the
first is nearest to the file, so data passes through the last one first; descriptors are stored in that order.

Extensions are written by many authors. Their streams may or may not pass on `flush` and `close`, may return no count or
a wrong one from `write`, and may have no `readinto`. So between any two of them is an adapter of ours, which closes
each stream once and all of them in order, and returns to every reader all it asked for.
"""

from __future__ import annotations

import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

from shardkeep.codecs.compression import MODULES, zstd_module
from shardkeep.errors import MalformedFile, StorageError, UnknownExtension

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPY_NBYTES = 1 << 20
_WRITE_NBYTES = 4 << 20


class Extension(ABC):
    """Something that changes what is written, and that readers find by its descriptor."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the part of the descriptor before the version, by which readers find the class."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Make the extension that wrote a descriptor with this version; "" means none."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return what is stored with the data: "name[@local-domain][/version]"."""


class StreamTransformExtension(Extension):
    """
    An extension that transforms a stream of bytes, for compression or encryption.

    Large tensors pass through in pieces; an implementation should hold one piece at a time and not the whole.
    """

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that transforms what is written to it, and writes the result to `output`."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that reads from `input`, and returns what was written to the stream of `transform_to`."""


# -- several extensions on one stream ----------------------------------------------------------------------------------


def transformed_output(extensions: Sequence[StreamTransformExtension], raw: IO[bytes]) -> tuple[IO[bytes], list[str]]:
    """
    Return a stream that writes through all extensions, and the descriptors to store.

    Closing it brings everything to `raw`, flushes it and leaves it open. If it is not closed, or left with an exception
    as a context manager, what the extensions still hold is dropped: nothing reaches `raw` later.
    """
    stream = _OutputAdapter(raw)
    for extension in extensions:
        stream = _OutputAdapter(extension.transform_to(cast("IO[bytes]", stream)), stream)
    return cast("IO[bytes]", stream), [extension.get_descriptor() for extension in reversed(extensions)]


def transformed_input(registry: Any, descriptors: Sequence[str], raw: IO[bytes]) -> IO[bytes]:
    """Return a stream that undoes the extensions of these descriptors, made by `registry`; `raw` if there are none."""
    stream = raw
    for extension in reversed(registry.from_descriptor_list(descriptors)):
        # As in torch, an extension that does not transform streams is skipped. Torch's own classes count.
        if hasattr(extension, "transform_from"):
            stream = extension.transform_from(_InputAdapter(stream, is_raw=stream is raw))
    return stream if stream is raw else cast("IO[bytes]", _InputAdapter(stream))


class _OutputAdapter(io.RawIOBase):
    """What an extension writes to: the stream of the extension below it, or the file."""

    def __init__(self, below: IO[bytes], beneath: _OutputAdapter | None = None) -> None:
        self._below = below
        self._beneath = beneath
        """The adapter that the stream below writes to; None if that stream is the file."""
        self._closing = False
        self._dropping = False

    def writable(self) -> bool:
        return True

    writeable = writable  # torch's spelling

    def write(self, b: Buffer, /) -> int:
        if self._closing:
            raise ValueError("write to a closed stream")
        rest = memoryview(b).cast("B")
        nbytes = len(rest)
        if self._dropping:
            return nbytes
        if self._beneath is not None:
            # Ignore its count: some extensions count what they wrote, some return nothing.
            self._below.write(b)
            return nbytes
        while rest:
            count = self._below.write(rest)
            if count == 0:
                raise StorageError("the file accepted no bytes", hint="is it in non-blocking mode?")
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
        # The stream below writes its rest to the adapter beneath, not to this one.
        self._closing = self._beneath is not None
        try:
            self._below.close() if self._beneath is not None else self.flush()
        finally:
            self._closing = True
            super().close()
            if self._beneath is not None:
                self._beneath.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._drop()
        self.close()

    def __del__(self) -> None:
        # A stream that was not closed belongs to a write that failed; its rest must not reach the file.
        if not getattr(self, "_closing", True):
            self._drop()

    def _drop(self) -> None:
        adapter: _OutputAdapter | None = self
        while adapter is not None:
            adapter._dropping = True
            adapter = adapter._beneath
        with suppress(Exception):
            self.close()


class _InputAdapter(io.RawIOBase):
    """What an extension, or the final reader, reads from: returns all that is asked for, if it is there."""

    def __init__(self, below: IO[bytes], *, is_raw: bool = False) -> None:
        self._below = below
        self._is_raw = is_raw

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        left = sys.maxsize if size is None or size < 0 else size
        piece = self._some(left)
        if not piece or len(piece) == left:
            return piece
        held = io.BytesIO()
        while piece:
            left -= held.write(piece)
            piece = self._some(left)
        return held.getvalue()

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        filled = 0
        while piece := self._some(len(view) - filled):
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
        """Close nothing: the stream below may still be in use."""

    def _some(self, most: int) -> bytes:
        most = min(most, _COPY_NBYTES)
        # `read`, not `readinto`: a stream that transforms bytes may have inherited a `readinto` that does not.
        piece: bytes | None = self._below.read(most) if most else b""
        if piece is None:
            raise StorageError("a stream returned neither data nor its end", hint="is the file in non-blocking mode?")
        if len(piece) > most:
            raise StorageError(f"a stream returned {len(piece)} bytes where {most} were asked for")
        return piece


# -- zstd --------------------------------------------------------------------------------------------------------------


class ZStandard(StreamTransformExtension):
    """Compresses what is written, as one zstd frame; reads any number of frames. Needs a module of zstd."""

    def __init__(self) -> None:
        super().__init__()
        self._module()

    @staticmethod
    def is_available() -> bool:
        """Return whether a module of zstd is installed."""
        return zstd_module() is not None

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        if version.partition(".")[0] != "1":
            raise UnknownExtension(f"Unknown extension {version=} of {ZStandard.registry_name()}; known is 1")
        return ZStandard()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", _ZstdWriter(self._module(), output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return cast("IO[bytes]", _ZstdReader(self._module(), input))

    @staticmethod
    def _module() -> Any:
        # Not an attribute: the extension is pickled with its storage writer for other processes.
        module = zstd_module()
        if module is None:
            raise UnknownExtension(
                f"ZStandard cannot be used: there is no module named {' or '.join(map(repr, MODULES))}",
                hint="pip install backports.zstd (Python 3.14 has compression.zstd)",
            )
        return module


class _ZstdWriter(io.RawIOBase):
    def __init__(self, module: Any, output: IO[bytes]) -> None:
        self._compressor = module.ZstdCompressor()  # at the default level, as torch's
        self._output = output
        self._pending = False
        self._ended = False

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        if self._ended:
            raise ValueError("write to a closed zstd stream")
        view = memoryview(b).cast("B")
        for start in range(0, len(view), _WRITE_NBYTES):
            self._pending = True
            self._output.write(self._compressor.compress(view[start : start + _WRITE_NBYTES]))
        return len(view)

    def flush(self) -> None:
        if self._ended:
            return
        if self._pending:
            self._pending = False
            self._output.write(self._compressor.flush(self._compressor.FLUSH_BLOCK))
        self._output.flush()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._output.write(self._compressor.flush(self._compressor.FLUSH_FRAME))
        finally:
            super().close()
            self._output.close()


class _ZstdReader(io.RawIOBase):
    def __init__(self, module: Any, source: IO[bytes]) -> None:
        self._error = module.ZstdError
        self._is_empty = True

        def read(size: int) -> bytes:
            piece = source.read(size)
            self._is_empty = self._is_empty and not piece
            return piece

        self._file = module.ZstdFile(SimpleNamespace(read=read))

    def readable(self) -> bool:
        return True

    def readinto(self, b: Buffer, /) -> int:
        try:
            return int(self._file.readinto(b))
        except EOFError as exc:
            if self._is_empty:
                return 0
            raise MalformedFile(
                "a zstd stream ends inside a frame",
                hint="the file was cut short: use another checkpoint, or another copy of this one",
            ) from exc
        except self._error as exc:
            raise MalformedFile(f"a zstd stream is damaged, or is not zstd: {exc}") from exc


# -- for storage writers and readers -----------------------------------------------------------------------------------


class ExtensionRegistry:
    """The extensions that a reader knows: those of shardkeep, and those that were registered."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {ZStandard.registry_name(): ZStandard}

    def register(self, cls: type[Extension]) -> None:
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """Make the extensions that left these descriptors, in their order; raises a ValueError for unknown ones."""
        found = []
        for descriptor in descriptors:
            name, _, version = descriptor.partition("/")
            if name not in self.extensions:
                raise UnknownExtension(
                    f"Unknown extension {name=}; known are {sorted(self.extensions)}",
                    hint="pass the reader a registry (_extension_registry) on which the extension's class is registered",
                    descriptor=descriptor,
                )
            found.append(self.extensions[name].from_descriptor(version))
        return found


class _StorageWriterTransforms:
    """Transforms the stream of each value that a storage writer writes. A subclass may choose by the item."""

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions: Sequence[StreamTransformExtension] = () if extensions is None else extensions

    def transform_save_stream(self, write_item: Any, raw_stream: IO[bytes]) -> tuple[IO[bytes], list[str]]:  # noqa: ARG002 - for subclasses
        """Return the stream to write an item to, and the descriptors to store; see `transformed_output`."""
        return transformed_output(self.extensions, raw_stream)


class _StorageReaderTransforms:
    """Undoes the transformations of each value that a storage reader reads."""

    def __init__(self, extension_registry: ExtensionRegistry | None = None) -> None:
        self.extension_registry = ExtensionRegistry() if extension_registry is None else extension_registry

    def transform_load_stream(
        self,
        read_item: Any,  # noqa: ARG002 - for subclasses
        transform_descriptors: Sequence[str],
        raw_stream: IO[bytes],
    ) -> IO[bytes]:
        """Return the stream to read an item from; see `transformed_input`."""
        return transformed_input(self.extension_registry, transform_descriptors, raw_stream)
