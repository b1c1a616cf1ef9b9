"""
What a stream extension is.

An extension changes bytes on their way to a file, and gives them back as they were when they are read. It leaves a
descriptor, "name[@local-domain][/version]", with the data; a reader makes the same extension from it again.
"""

from __future__ import annotations

import io
import json
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol, cast

from shardkeep.codecs.base import FRAME_NBYTES, WRAPPED, CodecConfig, FramePlace
from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.keys import CachedKeys, KeyRing, Keys, key_source
from shardkeep.codecs.zstd import MODULES, Decompressor, Engine, find_engine
from shardkeep.errors import DamagedFrame, ExtensionUnavailable, MalformedFile, StorageError, UnknownExtension
from shardkeep.options import setting

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer, Self


class Extension(ABC):
    """Something that changes what is written, and is known to readers by its descriptor."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the part of the descriptor before the version; readers find the class by it."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Make the extension that wrote a descriptor with this version; "" stands for none."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return what is stored with the data: "name[@local-domain][/version]"."""


class StreamTransformExtension(Extension):
    """
    An extension that changes a stream of bytes: compression, encryption.

    Large tensors pass through in pieces; an implementation should hold one piece at a time and not the whole.
    """

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that changes what is written to it, and writes the result to `output`."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that reads from `input`, and gives what was once written to `transform_to`'s."""


# Several extensions on one stream.
#
# The first extension of a writer's list is nearest to the file: data passes through the last one first. Their
# descriptors are stored in the order in which data passed through them, the reverse of the list; so a reader takes
# them
# from the back, undoing first what was done last.
#
# Extensions are written by many hands. Their streams may or may not pass on `flush` and `close`, may give no count or
# the wrong one from `write`, and may have no `readinto`. So between any two of them stands a step of ours, which
# closes
# each stream once and all of them in order, and gives every reader all it asked for.

_PIECE = 1 << 20


class DescriptorRegistry(Protocol):
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


def transformed_input(registry: DescriptorRegistry, descriptors: Sequence[str], raw: IO[bytes]) -> IO[bytes]:
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


# Compression of streams with zstd, readable by torch's extension of the same name, and the other way round.
#
# A stream is one frame, as one of the modules that torch uses reads only the first; when reading, any number of
# frames
# is taken. A stream that ends inside a frame is an error, not an end.

_WRITE_PIECE = 4 << 20
_READ_PIECE = 128 << 10


class ZStandard(StreamTransformExtension):
    """
    Compresses what is written. Needs one of several modules that know zstd; see `is_available`.

    Raises:
        ExtensionUnavailable: (a ValueError) none of them is installed.

    """

    def __init__(self) -> None:
        super().__init__()
        self._engine()

    @staticmethod
    def is_available() -> bool:
        """Say whether a module that knows zstd is installed."""
        return find_engine() is not None

    @staticmethod
    def registry_name() -> str:
        """Return the name that torch's extension has too."""
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        """Make the extension for streams of version 1 or 1.x, which are plain zstd."""
        if version.partition(".")[0] != "1":
            raise UnknownExtension(f"Unknown extension {version=} of {ZStandard.registry_name()}; known is 1")
        return ZStandard()

    def get_descriptor(self) -> str:
        """Return what is stored with the data."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that compresses to `output`, and closes it when it is closed itself."""
        return cast("IO[bytes]", _ZstdWriter(self._engine(), output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that gives what was compressed to `input`."""
        return cast("IO[bytes]", _ZstdReader(self._engine(), input))

    @staticmethod
    def _engine() -> Engine:
        # Not kept in the extension, which travels to other processes with its storage writer.
        engine = find_engine()
        if engine is None:
            raise ExtensionUnavailable(
                f"ZStandard cannot be used: there is no module named {' or '.join(map(repr, MODULES))}",
                hint="pip install backports.zstd (Python 3.14 has compression.zstd)",
            )
        return engine


class _ZstdWriter(io.RawIOBase):
    def __init__(self, engine: Engine, output: IO[bytes]) -> None:
        self._compressor = engine.compressor()
        self._output = output
        self._behind = False
        self._ended = False

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        if self._ended:
            raise ValueError("write to a closed zstd stream")
        view = memoryview(b).cast("B")
        for start in range(0, len(view), _WRITE_PIECE):
            self._behind = True
            self._pass_on(self._compressor.compress(view[start : start + _WRITE_PIECE]))
        return len(view)

    def flush(self) -> None:
        if self._ended:
            return
        if self._behind:
            self._behind = False
            self._pass_on(self._compressor.end_block())
        self._output.flush()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._pass_on(self._compressor.end_frame())
        finally:
            super().close()
            self._output.close()

    def _pass_on(self, data: bytes) -> None:
        if data:
            self._output.write(data)


class _ZstdReader(io.RawIOBase):
    def __init__(self, engine: Engine, source: IO[bytes]) -> None:
        self._engine = engine
        self._source = source
        self._frame: Decompressor | None = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        data = self._next(len(view)) if len(view) else b""
        view[: len(data)] = data
        return len(data)

    def _next(self, most: int) -> bytes:
        """Return some bytes, or none at the end of the stream."""
        while True:
            if not self._pending and (self._frame is None or self._frame.needs_input):
                self._pending = self._source.read(_READ_PIECE)
                if not self._pending:
                    if self._frame is None:
                        return b""
                    raise MalformedFile(
                        "a zstd stream ends inside a frame",
                        hint="the file was cut short: use another checkpoint, or another copy of this one",
                    )
            if self._frame is None:
                self._frame = self._engine.decompressor()
            try:
                data = self._frame.decompress(self._pending, most)
            except self._engine.error as exc:
                raise MalformedFile(f"a zstd stream is damaged, or is none: {exc}") from exc
            self._pending = b""
            if self._frame.eof:
                self._pending, self._frame = self._frame.unused_data, None
            if data:
                return data


# Codecs as a stream extension: what DCP's storage writers and readers can pass values through.
#
# A stream begins with an id of its own; frames follow, each with its size before and after coding; the last one is
# empty, so that a stream that was cut is told from one that ended. With encryption frames are bound to their stream
# and
# their place in it. Which stream belongs to which value the extension is not told: that whole streams were exchanged
# within a file it cannot notice, as `shardkeep.save` does.

_ID_NBYTES = 16
_SIZES = struct.Struct("<QQ")
_VERSION = "1"
_HINT = "the file was cut short or damaged: use another checkpoint, or another copy of this one"


class CodecStream(StreamTransformExtension):
    """
    Passes values through codecs: `FileSystemWriter(path, _extensions=[CodecStream(["float", "aes"])])`.

    Readers need nothing but the keys, from SHARDKEEP_KEY_FILE or SHARDKEEP_KEY; or a registry on which
    `CodecStream.reading_with(keys)` is registered.

    Args:
        codecs: Names or configs of codecs, in the order in which bytes pass them.
        keys: Whoever wraps the data key, if a codec encrypts. By default as the environment says.

    """

    _reading_keys: ClassVar[CachedKeys | None] = None

    def __init__(self, codecs: Sequence[str | CodecConfig], *, keys: Keys = None) -> None:
        super().__init__()
        self._keys = _remembered(keys)
        self._recorded = CodecChain.begin(codecs, keys=self._keys).recorded

    @staticmethod
    def registry_name() -> str:
        """Return the name that readers know it by."""
        return "stream.shardkeep"

    @classmethod
    def from_descriptor(cls, version: str) -> Self:
        """
        Make the extension that left a descriptor.

        Raises:
            UnknownExtension: (a ValueError) a later version of shardkeep wrote it, or it was changed.

        """
        number, _, text = version.partition(":")
        if number != _VERSION:
            raise UnknownExtension(f"Unknown extension {version=} of {cls.registry_name()}; known is {_VERSION}")
        try:
            recorded = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise UnknownExtension(f"what {cls.registry_name()} recorded cannot be read: {version!r}") from exc
        if not isinstance(recorded, list):
            raise UnknownExtension(f"what {cls.registry_name()} recorded is no list of codecs: {version!r}")
        made = cls.__new__(cls)
        made._recorded = recorded
        # A key file that is not there matters only to those who need it.
        is_secret = any(isinstance(each, dict) and WRAPPED in each for each in recorded)
        made._keys = _remembered(cls._reading_keys) if is_secret else None
        return made

    @classmethod
    def reading_with(cls, keys: Keys) -> type[CodecStream]:
        """Return this extension with keys to read with, to be registered on a reader's registry."""
        names = {"_reading_keys": _remembered(keys), "__doc__": cls.__doc__, "__module__": __name__}
        return type(cls.__name__, (cls,), names)

    def get_descriptor(self) -> str:
        """Return what is stored with each value: the codecs and, wrapped, the data key."""
        return f"{self.registry_name()}/{_VERSION}:{json.dumps(self._recorded, separators=(',', ':'))}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that codes to `output`, and closes it when it is closed itself."""
        return cast("IO[bytes]", _CodecWriter(self._chain(), output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that gives what was coded to `input`."""
        return cast("IO[bytes]", _CodecReader(self._chain(), input))

    def _chain(self) -> CodecChain:
        # Not kept: the extension travels to other processes with its storage writer, and what is open does not.
        return CodecChain.opened(self._recorded, keys=self._keys)


class _CodecWriter(io.RawIOBase):
    def __init__(self, chain: CodecChain, output: IO[bytes]) -> None:
        self._chain = chain
        self._output = output
        self._held = bytearray()
        self._id = secrets.token_bytes(_ID_NBYTES)
        self._place = _Places(self._id)
        self._began = self._ended = False

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        if self._ended:
            raise ValueError("write to a closed stream of codecs")
        rest = memoryview(b).cast("B")
        nbytes = len(rest)
        while rest:
            if not self._held and len(rest) >= FRAME_NBYTES:
                self._pass_on(rest[:FRAME_NBYTES])
                rest = rest[FRAME_NBYTES:]
                continue
            room = FRAME_NBYTES - len(self._held)
            self._held += rest[:room]
            rest = rest[room:]
            if len(self._held) == FRAME_NBYTES:
                self._pass_on_held()
        return nbytes

    def flush(self) -> None:
        if not self._ended:
            self._output.flush()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            if self._held:
                self._pass_on_held()
            self._pass_on(memoryview(b""))
        finally:
            super().close()
            self._output.close()

    def _pass_on_held(self) -> None:
        held, self._held = self._held, bytearray()
        self._pass_on(memoryview(held))

    def _pass_on(self, data: memoryview) -> None:
        stored = memoryview(self._chain.encode(data, self._place(len(data))))
        head = _SIZES.pack(len(data), stored.nbytes)
        self._output.write(head if self._began else self._id + head)
        self._began = True
        self._output.write(cast("Any", stored))


class _CodecReader(io.RawIOBase):
    def __init__(self, chain: CodecChain, source: IO[bytes]) -> None:
        self._chain = chain
        self._source = source
        self._place: _Places | None = None
        self._ready = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        if len(view) and not self._ready and not self._ended:
            self._next()
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _next(self) -> None:
        """Decode the next frame."""
        if self._place is None:
            self._place = _Places(self._exactly(_ID_NBYTES))
        nbytes, stored_nbytes = _SIZES.unpack(self._exactly(_SIZES.size))
        if nbytes > FRAME_NBYTES or stored_nbytes > self._chain.bound(nbytes):
            raise DamagedFrame("a stream of codecs has a frame of a size that none has", hint=_HINT)
        plain = bytearray(nbytes)
        self._chain.decode(memoryview(self._exactly(stored_nbytes)), memoryview(plain), self._place(nbytes))
        self._ready = memoryview(plain)
        if not nbytes:
            self._ended = True
            if self._source.read(1):
                raise DamagedFrame("there is more behind the end of a stream of codecs", hint=_HINT)

    def _exactly(self, nbytes: int) -> bytes:
        pieces = []
        while nbytes:
            piece = self._source.read(nbytes)
            if not piece:
                raise DamagedFrame("a stream of codecs ends within a frame, or before its end", hint=_HINT)
            pieces.append(piece)
            nbytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Places:
    """The places of the frames of a stream, one after the other."""

    def __init__(self, stream_id: bytes) -> None:
        self._file = f"stream {stream_id.hex()}"
        self._number = 0
        self._offset = 0

    def __call__(self, nbytes: int) -> FramePlace:
        """Return the place of the next frame."""
        place = FramePlace(self._file, self._number, self._offset, nbytes)
        self._number += 1
        self._offset += nbytes
        return place


def _remembered(keys: Keys) -> CachedKeys | None:
    """Return the keys that were given, or those of the environment; a stream is opened for each value."""
    if isinstance(keys, CachedKeys):
        return keys
    source = key_source(keys)
    if source is None and (file := setting("SHARDKEEP_KEY_FILE")):
        source = KeyRing.from_file(file)
    elif source is None and (text := setting("SHARDKEEP_KEY")):
        source = KeyRing.from_text(text, named="SHARDKEEP_KEY")
    return None if source is None else CachedKeys(source)


# From the descriptors stored with data to the extensions that read it.


class ExtensionRegistry:
    """The extensions that a reader knows: the ones that come with shardkeep, and those registered."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {each.registry_name(): each for each in (ZStandard, CodecStream)}

    def register(self, cls: type[Extension]) -> None:
        """Make an extension known, in place of another one of its name."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """
        Make the extensions that left these descriptors, in their order.

        What an extension raises because of a version passes through.

        Raises:
            UnknownExtension: (a ValueError) nothing is registered under a name.

        """
        return [self._from_descriptor(descriptor) for descriptor in descriptors]

    def _from_descriptor(self, descriptor: str) -> Extension:
        name, _, version = descriptor.partition("/")
        extension = self.extensions.get(name)
        if extension is None:
            raise UnknownExtension(
                f"Unknown extension {name=}; known are {sorted(self.extensions)}",
                hint="give the reader a registry (_extension_registry) on which the extension's class was registered",
                descriptor=descriptor,
            )
        return extension.from_descriptor(version)


# The extensions of a storage writer, and of a storage reader, as their attribute `transforms`.


class _StorageWriterTransforms:
    """What a storage writer does to each value's stream. A subclass may choose by the item that is written."""

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions: Sequence[StreamTransformExtension] = () if extensions is None else extensions

    def transform_save_stream(self, write_item: Any, raw_stream: IO[bytes]) -> tuple[IO[bytes], list[str]]:  # noqa: ARG002 - for subclasses
        """Return the stream to write an item to, and the descriptors to store; see `transformed_output`."""
        return transformed_output(self.extensions, raw_stream)


class _StorageReaderTransforms:
    """How a storage reader finds what was done to each value's stream, and undoes it."""

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
