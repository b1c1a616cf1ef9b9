"""Compression of frames with zstd: what shrinks is compressed, what does not is stored as it is."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from shardkeep.codecs.base import Codec, CodecConfig, CodecRecord, FramePlace, add_marker, marked_bound, strip_marker
from shardkeep.errors import CodecUnavailable, InvalidCodec

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.codecs.keys import KeySource


# The modules that can compress with zstd, behind one face: whichever of them is installed.
#
# `compression.zstd` (Python 3.14), `backports.zstd` and `pyzstd` have one interface: compressors and decompressors
# that
# take and give pieces. `zstandard` has its own, and its decompressor gives all that a piece of input stands for at
# once;
# it is fed small pieces here, as four bytes of zeros may stand for 128 KiB.

_ALIKE = ("compression.zstd", "backports.zstd", "pyzstd")
MODULES = (*_ALIKE, "zstandard")
"""The modules that will do, the best first."""
READERS = ("zstandard", *_ALIKE)
"""The same, the best for whole frames of a known size first: it makes them at once where they are to be."""

_FEED = 2048
"""Most input that `zstandard` is given at a time: it becomes 64 MiB at the very most."""

# zstd's numbers for its parameters.
_LEVEL, _WINDOW_LOG, _HASH_LOG, _MIN_MATCH, _STEP, _STRATEGY = 100, 101, 102, 105, 106, 107
_WINDOW_LOG_MAX = 100
_LITERALS = 1002
"""Whether literals are coded: 0 as the strategy would, 1 always."""
_QUICK = {_STRATEGY: 1, _MIN_MATCH: 7, _HASH_LOG: 6, _WINDOW_LOG: 17}
"""Parameters under which hardly a match is found, or looked for."""
_SKEWED = bytes((1, 2, 1, 3, 1, 1, 4, 2)) * 512


class Compressor(Protocol):
    """Makes one frame."""

    def compress(self, data: memoryview) -> bytes:
        """Take data, and return what can be written already."""
        ...

    def end_block(self) -> bytes:
        """Return what a reader needs to have all data so far."""
        ...

    def end_frame(self) -> bytes:
        """Return the rest of the frame."""
        ...


class Decompressor(Protocol):
    """Reads one frame."""

    @property
    def eof(self) -> bool:
        """Say whether the frame is read to its end."""
        ...

    @property
    def needs_input(self) -> bool:
        """Say whether nothing can be given before more is taken."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Return what was taken and is behind the frame."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take a piece of the frame, possibly empty, and return at most so many bytes."""
        ...


class OneFrame(Protocol):
    """Makes a whole frame at a time, of any number of them. Used by one thread."""

    def __call__(self, data: Buffer, /) -> bytes:
        """Return a frame that says how many bytes it stands for."""
        ...


class Engine:
    """One of the modules."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.error: type[Exception] = module.ZstdError

    def compressor(self) -> Compressor:
        """Return a compressor at the default level, as torch's is."""
        return _Compressor(self._module)

    def decompressor(self) -> Decompressor:
        """Return what reads the next frame."""
        frame: Decompressor = self._module.ZstdDecompressor()
        return frame

    def frames(self, level: int) -> OneFrame:
        """Return what compresses frame by frame at a level."""
        return self._frames({_LEVEL: level})

    def literal_frames(self) -> OneFrame:
        """
        Return what compresses data whose bytes repeat and whose runs of bytes do not: by Huffman coding alone.

        Where the module allows it: otherwise with the few matches that are found in passing.
        """
        try:
            # A parameter that zstd has had for years and does not promise to keep: without it, steps this long would
            # store literals as they are.
            huffman = self._frames({**_QUICK, _STEP: 1 << 17, _LITERALS: 1})
            if len(huffman(_SKEWED)) < len(_SKEWED) // 2:
                return huffman
        except (self.error, ValueError, TypeError):
            pass
        return self._frames(_QUICK)

    def whole(self, frame: memoryview, most_nbytes: int) -> bytes:
        """
        Return what one frame, and nothing behind it, stands for.

        Raises:
            ValueError: it is more than so many bytes, or no whole frame. So is whatever the module raises (`error`).

        """
        # A frame may ask for memory for what it looks back at: never more than it is large.
        inner = self._opened_for({_WINDOW_LOG_MAX: max(10, most_nbytes.bit_length())})
        pieces, room = [], most_nbytes + 1
        data: Any = frame
        while room and not inner.eof:
            pieces.append(inner.decompress(data, room))
            room -= len(pieces[-1])
            data = b""
            if not pieces[-1] and not inner.eof:
                raise ValueError("a zstd frame ends too early")
        if not room:
            raise ValueError(f"a zstd frame stands for more than {most_nbytes} bytes")
        if inner.unused_data:
            raise ValueError("there is more behind a zstd frame")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _frames(self, settings: dict[int, int]) -> OneFrame:
        inner = self._opened(settings)

        def compress(data: Buffer, /) -> bytes:
            return bytes(inner.compress(data, inner.FLUSH_FRAME))

        return compress

    def _opened(self, settings: dict[int, int]) -> Any:
        return self._module.ZstdCompressor(options=settings)

    def _opened_for(self, settings: dict[int, int]) -> Decompressor:
        frame: Decompressor = self._module.ZstdDecompressor(options=settings)
        return frame


class PyzstdEngine(Engine):
    """The module `pyzstd`, from which the others have their interface, but for two names."""

    def _opened(self, settings: dict[int, int]) -> Any:
        return self._module.ZstdCompressor(settings)

    def _opened_for(self, settings: dict[int, int]) -> Decompressor:
        frame: Decompressor = self._module.ZstdDecompressor(option=settings)
        return frame


class ZstandardEngine(Engine):
    """The module `zstandard`."""

    def compressor(self) -> Compressor:
        """Return a compressor at the default level."""
        return _ZstandardCompressor(self._module)

    def decompressor(self) -> Decompressor:
        """Return what reads the next frame."""
        return _ZstandardDecompressor(self._module)

    def literal_frames(self) -> OneFrame:
        """Return what compresses mostly by Huffman coding; this module has no parameter for Huffman coding alone."""
        params = self._module.ZstdCompressionParameters(strategy=1, min_match=7, hash_log=6, window_log=17)
        compress: OneFrame = self._module.ZstdCompressor(compression_params=params).compress
        return compress

    def whole(self, frame: memoryview, most_nbytes: int) -> bytes:
        """Return what one frame stands for. The module looks at its size before it makes room for it."""
        says = self._module.frame_content_size(frame)
        if not 0 <= says <= most_nbytes:
            raise ValueError(f"a zstd frame stands for {says} bytes, and {most_nbytes} are the most it may")
        inner = self._module.ZstdDecompressor()
        data = bytes(inner.decompress(frame, max_output_size=most_nbytes, allow_extra_data=False))
        if len(data) != says:
            raise ValueError(f"a zstd frame stands for {len(data)} bytes and not for {says}")
        return data

    def _frames(self, settings: dict[int, int]) -> OneFrame:
        compress: OneFrame = self._module.ZstdCompressor(level=settings[_LEVEL]).compress
        return compress


@cache
def find_engine(names: tuple[str, ...] = MODULES) -> Engine | None:
    """Return the first of the modules that is installed, or None."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return {"pyzstd": PyzstdEngine, "zstandard": ZstandardEngine}.get(name, Engine)(module)
    return None


class _Compressor:
    def __init__(self, module: Any) -> None:
        self._inner = module.ZstdCompressor()

    def compress(self, data: memoryview) -> bytes:
        return bytes(self._inner.compress(data))

    def end_block(self) -> bytes:
        return bytes(self._inner.flush(self._inner.FLUSH_BLOCK))

    def end_frame(self) -> bytes:
        return bytes(self._inner.flush(self._inner.FLUSH_FRAME))


class _ZstandardCompressor:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._inner = module.ZstdCompressor().compressobj()

    def compress(self, data: memoryview) -> bytes:
        return bytes(self._inner.compress(data))

    def end_block(self) -> bytes:
        return bytes(self._inner.flush(self._module.COMPRESSOBJ_FLUSH_BLOCK))

    def end_frame(self) -> bytes:
        return bytes(self._inner.flush(self._module.COMPRESSOBJ_FLUSH_FINISH))


class _ZstandardDecompressor:
    def __init__(self, module: Any) -> None:
        self._inner = module.ZstdDecompressor().decompressobj()
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof) and not self._output

    @property
    def needs_input(self) -> bool:
        return not self._inner.eof and not self._output and not self._input

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + bytes(self._input)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data:
            self._input = memoryview(bytes(self._input) + data)
        if not self._output and not self._inner.eof:
            piece, self._input = self._input[:_FEED], self._input[_FEED:]
            self._output = memoryview(self._inner.decompress(piece))
        given, self._output = self._output[:max_length], self._output[max_length:]
        return bytes(given)


T = TypeVar("T")
_LEAST, _MOST = -100, 22


class Zstd(CodecConfig, frozen=True):
    """Compresses with zstd. For floating point numbers `float` is smaller and faster."""

    name = "zstd"
    level: Annotated[int, msgspec.Meta(ge=_LEAST, le=_MOST)] = 1
    """1 is fast; up to 22 smaller and slower; below 0 faster and hardly smaller."""

    def __post_init__(self) -> None:
        """Refuse levels that zstd does not have."""
        if not isinstance(self.level, int) or not _LEAST <= self.level <= _MOST:
            raise InvalidCodec(f"zstd has the levels {_LEAST} to {_MOST}, and not {self.level!r}")

    @classmethod
    def from_text(cls, argument: str) -> Zstd:
        """Read "zstd:3"."""
        try:
            level = int(argument or cls().level)
        except ValueError as exc:
            raise InvalidCodec(f"zstd takes a level, as in 'zstd:3', and was given {argument!r}") from exc
        return cls(level)

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        """Return the codec."""
        config = cls.from_recorded(recorded)
        return _ZstdCodec(*need_engines("the codec 'zstd'"), config.level)


class _ZstdCodec:
    def __init__(self, writer: Engine, reader: Engine, level: int) -> None:
        self._reader = reader
        self._compress = PerThread(lambda: writer.frames(level))

    def bound(self, nbytes: int) -> int:
        return marked_bound(nbytes)

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:  # noqa: ARG002 - the same at any place
        return add_marker(data, self._compress.get()(data))

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        coded, is_raw = strip_marker(data, place, most_nbytes)
        return coded if is_raw else self._reader.whole(coded, most_nbytes)


class PerThread(Generic[T]):
    """One of something for each thread, as a compressor: its megabytes are worth keeping, and it serves one at a time."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._mine = threading.local()

    def get(self) -> T:
        """Return the one of this thread."""
        made: T | None = getattr(self._mine, "made", None)
        if made is None:
            made = self._mine.made = self._make()
        return made


def need_engines(wanted_by: str) -> tuple[Engine, Engine]:
    """
    Return the modules that write and read zstd frames; often it is one.

    Raises:
        CodecUnavailable: none is installed.

    """
    writer, reader = find_engine(), find_engine(READERS)
    if writer is None or reader is None:
        raise CodecUnavailable(
            f"{wanted_by} needs one of the modules {', '.join(MODULES)}, and none is installed",
            hint="pip install 'shardkeep[zstd]'",
        )
    return writer, reader
