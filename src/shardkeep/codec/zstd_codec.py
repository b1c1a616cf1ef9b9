"""Compression of frames with zstd: what shrinks is compressed, what does not is stored as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import msgspec

from shardkeep.codec.codecs import Codec, CodecConfig, FramePlace, Recorded
from shardkeep.codec.problems import CodecUnavailable, InvalidCodec
from shardkeep.codec.raw import bound_of_marked, marked, unmarked
from shardkeep.codec.zstd_engines import MODULES, READERS, Engine, find_engine

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.codec.keys import KeySource

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
    def open(cls, recorded: Recorded, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        """Return the codec."""
        config = cls.from_recorded(recorded)
        return _ZstdCodec(*need_engines("the codec 'zstd'"), config.level)


class _ZstdCodec:
    def __init__(self, writer: Engine, reader: Engine, level: int) -> None:
        self._reader = reader
        self._compress = ForThread(lambda: writer.frames(level))

    def bound(self, nbytes: int) -> int:
        return bound_of_marked(nbytes)

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:  # noqa: ARG002 - the same at any place
        return marked(data, self._compress.get()(data))

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        coded, is_raw = unmarked(data, place, most_nbytes)
        return coded if is_raw else self._reader.whole(coded, most_nbytes)


class ForThread(Generic[T]):
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
