"""
A quick look at a frame: are these numbers, how wide, and which of their bytes are worth coding?

A few kilobytes from several places are counted. What counting says about the bytes at each place of a word is what an
entropy coder would make of them, near enough; nothing needs to know a dtype.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkeep.codec.planes import turned, type_of

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

WORST = 7.7
"""Bits a byte takes, from which on coding it is not worth its time."""
_WIDER = 0.01
"""What part of a frame wider words have to save in order to be preferred."""
_TURNED = 0.004
"""What part of a frame turned words have to save: turning costs a tenth of the time."""
_MISSED = 1 / (2 * math.log(2))
_REGIONS = 8
_REGION = 1024
SAMPLE_NBYTES = _REGIONS * _REGION


class Look(NamedTuple):
    """What a frame seems to be."""

    width: int
    """Bytes of a word."""
    turn: bool
    """Whether words had better be turned (`planes`)."""
    bits: tuple[float, ...]
    """What each byte of a word would take, the lowest first."""


def sample_of(data: Bytes) -> Bytes:
    """Return a few kilobytes of a frame, from all over it; whole words of eight bytes."""
    if data.nbytes <= 2 * SAMPLE_NBYTES:
        return data[: min(data.nbytes, SAMPLE_NBYTES) // 8 * 8]
    step = (data.nbytes - _REGION) // (_REGIONS - 1) // 8 * 8
    return np.concatenate([data[at * step : at * step + _REGION] for at in range(_REGIONS)])


def look(sample: Bytes) -> Look:
    """Say what a frame seems to be, from a sample of it; at least eight bytes."""
    eight = _counts(sample, 8)
    four = eight[:4] + eight[4:]
    two = four[:2] + four[2:]
    sums = _logs().take(np.concatenate((two[:1] + two[1:], two, four, eight))).sum(axis=1)
    width, best = 1, _bits(sums[:1], sample.size)
    for wider in (2, 4, 8):
        its = _bits(sums[wider - 1 : 2 * wider - 1], sample.size // wider)
        if sum(its) / wider < sum(best) / width - 8 * _WIDER:
            width, best = wider, its
    if width > 1:
        counts = _counts(turned(sample.view(type_of(width))).view(np.uint8), width)
        its = _bits(_logs().take(counts).sum(axis=1), sample.size // width)
        if sum(its) < sum(best) - 8 * _TURNED * width:
            return Look(width, turn=True, bits=its)
    return Look(width, turn=False, bits=best)


def _counts(sample: Bytes, width: int) -> npt.NDArray[np.int64]:
    """Return how often each byte stands at each place of words of this width."""
    return np.bincount(sample + _places(width)[: sample.size], minlength=256 * width).reshape(width, 256)


def _bits(sums: Floats, total: int) -> tuple[float, ...]:
    """Return the entropy of bytes in bits, from `_logs` of how often each was counted, and how many that were."""
    return tuple(min(8.0, math.log2(total) - (each + _MISSED) / total) for each in sums.tolist())


@cache
def _places(width: int) -> npt.NDArray[np.int64]:
    return np.tile(np.arange(0, 256 * width, 256, dtype=np.int64), SAMPLE_NBYTES // width)


@cache
def _logs() -> Floats:
    # With the correction of Miller and Madow for how few bytes are counted: random ones would seem to be less so.
    numbers = np.arange(SAMPLE_NBYTES + 1)
    logs: Floats = numbers * np.log2(np.maximum(numbers, 1)) - _MISSED * (numbers > 0)
    return logs
