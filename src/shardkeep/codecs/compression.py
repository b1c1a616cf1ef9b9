"""Compression with zstd (`compression.zstd` or `backports.zstd`) and with lz4, which is fast and of little use for floats."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from typing_extensions import Buffer

from shardkeep.codecs.base import Codec, CodecConfig, CodecRecord, FramePlace, damaged_frame, require_module
from shardkeep.codecs.keys import KeySource
from shardkeep.errors import InvalidCodec, PackageMissing
from shardkeep.storage.buffers import PerThread

MODULES = ("compression.zstd", "backports.zstd")
_MIN_LEVEL, _MAX_LEVEL = -100, 22

LEVEL, _WINDOW_LOG, _HASH_LOG, _MIN_MATCH, _STEP, _STRATEGY = 100, 101, 102, 105, 106, 107
_WINDOW_LOG_MAX = 100
_LITERALS = 1002
"""Whether literals are coded: 0 depends on the strategy, 1 always."""
HUFFMAN_ONLY = {_STRATEGY: 1, _MIN_MATCH: 7, _HASH_LOG: 6, _WINDOW_LOG: 17, _STEP: 1 << 17, _LITERALS: 1}
"""Parameters with which zstd hardly searches for matches, for data whose bytes repeat but whose runs do not."""
_RAW, _CODED = b"\0", b"\1"

CompressFrame = Callable[[Buffer], bytes]
"""Compresses data into a whole frame that contains its size. Serves one thread."""


@cache
def zstd_module() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def require_zstd(wanted_by: str) -> Any:
    module = zstd_module()
    if module is None:
        raise PackageMissing(
            f"{wanted_by} needs one of the modules {', '.join(MODULES)}, and none is installed",
            hint="pip install 'shardkeep[zstd]'",
        )
    return module


def frame_compressor(module: Any, options: dict[int, int]) -> CompressFrame:
    inner = module.ZstdCompressor(options=options)
    return lambda data: bytes(inner.compress(data, inner.FLUSH_FRAME))


def decompress_frame(module: Any, frame: memoryview, max_nbytes: int) -> bytes:
    """Decompress one frame, with nothing behind it; raises a ValueError or a `ZstdError` if it is not one, or too large."""
    # A frame chooses how much memory its window takes: never allow more than the frame is large.
    inner = module.ZstdDecompressor(options={_WINDOW_LOG_MAX: max(10, max_nbytes.bit_length())})
    pieces, room = [], max_nbytes + 1
    data: Any = frame
    while room and not inner.eof:
        pieces.append(inner.decompress(data, room))
        room -= len(pieces[-1])
        data = b""
        if not pieces[-1] and not inner.eof:
            raise ValueError("a zstd frame ends too early")
    if not room:
        raise ValueError(f"a zstd frame becomes more than {max_nbytes} bytes")
    if inner.unused_data:
        raise ValueError("there is more data behind a zstd frame")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Zstd(CodecConfig, frozen=True):
    """Compresses with zstd. For floating-point numbers, `float` is smaller and faster."""

    name = "zstd"
    level: int = 1
    """1 is fast; up to 22 smaller and slower; below 0 faster and hardly smaller."""

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or not _MIN_LEVEL <= self.level <= _MAX_LEVEL:
            raise InvalidCodec(f"zstd has the levels {_MIN_LEVEL} to {_MAX_LEVEL}, not {self.level!r}")

    @classmethod
    def from_text(cls, argument: str) -> Zstd:
        try:
            level = int(argument or cls().level)
        except ValueError as exc:
            raise InvalidCodec(f"zstd takes a level, as in 'zstd:3', and was given {argument!r}") from exc
        return cls(level)

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        module, level = require_zstd("the codec 'zstd'"), cls.from_recorded(recorded).level
        compressor = PerThread(lambda: frame_compressor(module, {LEVEL: level}))
        return _OrRaw(compressor.get, partial(decompress_frame, module))


class Lz4(CodecConfig, frozen=True):
    """Compresses with lz4; frames that do not shrink are stored raw. Needs the package `lz4`."""

    name = "lz4"

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        cls.from_recorded(recorded)
        block = require_module("lz4.block", package="shardkeep[lz4]", wanted_by="the codec 'lz4'")
        return _OrRaw(
            lambda: partial(block.compress, store_size=False),
            lambda coded, most_nbytes: block.decompress(coded, uncompressed_size=most_nbytes),
        )


class _OrRaw:
    """A codec that stores a frame raw if it does not shrink. The first byte says in which form a frame is stored."""

    def __init__(
        self, compressor: Callable[[], CompressFrame], decompress: Callable[[memoryview, int], Buffer]
    ) -> None:
        """`compressor` returns one for the thread that calls it."""
        self._compressor = compressor
        self._decompress = decompress

    def bound(self, nbytes: int) -> int:
        return nbytes + 1

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:  # noqa: ARG002 - the same at any place
        coded = self._compressor()(data)
        return b"".join((_CODED, coded) if len(coded) < data.nbytes else (_RAW, data))

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        marker, rest = data[:1], data[1:]
        if marker == _CODED:
            return self._decompress(rest, most_nbytes)
        if marker != _RAW:
            raise damaged_frame(place, "does not say how it is stored")
        return rest
