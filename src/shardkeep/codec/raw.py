"""
Frames that did not shrink are stored as they are: one byte before the frame says which it is.
"""

from __future__ import annotations

from shardkeep.codec.codecs import FramePlace
from shardkeep.codec.problems import DamagedFrame, OversizedFrame

_RAW, _CODED = 0, 1


def bound_of_marked(nbytes: int) -> int:
    """Return the most bytes that `marked` makes of so many."""
    return nbytes + 1


def marked(data: memoryview, coded: bytes) -> bytes:
    """Return the smaller of the two, with a byte before it that says which it is."""
    if len(coded) < data.nbytes:
        return b"".join((bytes((_CODED,)), coded))
    return b"".join((bytes((_RAW,)), data))


def unmarked(stored: memoryview, place: FramePlace, most_nbytes: int) -> tuple[memoryview, bool]:
    """
    Return what stands behind the byte, and whether it is raw.

    Raises:
        DamagedFrame: the byte is neither.
        OversizedFrame: raw bytes are more than were written.

    """
    if not stored.nbytes or stored[0] not in (_RAW, _CODED):
        raise DamagedFrame(f"frame {place.number} of {place.file} does not say how it is stored", file=place.file)
    rest, is_raw = stored[1:], stored[0] == _RAW
    if is_raw and rest.nbytes > most_nbytes:
        raise OversizedFrame(
            f"frame {place.number} of {place.file} holds {rest.nbytes} bytes, and {most_nbytes} are the most it may",
            file=place.file,
        )
    return rest, is_raw
