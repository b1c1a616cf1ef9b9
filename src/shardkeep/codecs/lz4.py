"""Compression of frames with lz4: very fast, and of little use for floating-point numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkeep.codecs.base import (
    Codec,
    CodecConfig,
    CodecRecord,
    FramePlace,
    add_marker,
    marked_bound,
    require_module,
    strip_marker,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.codecs.keys import KeySource


class Lz4(CodecConfig, frozen=True):
    """Compresses with lz4; frames that do not shrink are stored raw. Needs the package `lz4`."""

    name = "lz4"

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        """Return the codec."""
        cls.from_recorded(recorded)
        return _Lz4Codec(require_module("lz4.block", extra="lz4", wanted_by="the codec 'lz4'"))


class _Lz4Codec:
    def __init__(self, block: Any) -> None:
        self._block = block

    def bound(self, nbytes: int) -> int:
        return marked_bound(nbytes)

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:  # noqa: ARG002 - the same at any place
        return add_marker(data, self._block.compress(data, store_size=False))

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        coded, is_raw = strip_marker(data, place, most_nbytes)
        return coded if is_raw else self._block.decompress(coded, uncompressed_size=most_nbytes)
