"""
A quick look at frames: are these numbers, how wide, and which of their bytes are worth coding?

A few kilobytes from several places of each are counted. What counting says about the bytes at each place of a word is
what an entropy coder would make of them, near enough; nothing needs to know a dtype. What is said of a frame depends on
its own bytes alone. Yet several are looked at together: numpy takes the interpreter's lock anew for every small step,
and threads that all do so wait for one another more than they work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkeep.codec.planes import Bytes, turned, type_of

Counts = npt.NDArray[np.int64]

WORST = 7.7
"""Bits a byte takes, from which on coding it is not worth its time."""
_WIDER = 0.01
"""What part of a frame wider words have to save in order to be preferred."""
_TURNED = 0.004
"""What part of a frame turned words have to save: turning costs a tenth of the time."""
_MISSED = 1 / (2 * math.log(2))
_REGIONS = 8
_REGION = 1024
_SAMPLE_NBYTES = _REGIONS * _REGION
_WIDTHS = np.repeat((1, 2, 4, 8), (1, 2, 4, 8))
"""Of which words each byte is one, of all that are counted."""


class Look(NamedTuple):
    """What a frame seems to be."""

    width: int
    """Bytes of a word."""
    turn: bool
    """Whether words had better be turned (`planes`)."""
    bits: tuple[float, ...]
    """What each byte of a word would take, the lowest first."""


def looks(frames: Sequence[memoryview]) -> list[Look]:
    """Say what frames seem to be; each has at least eight bytes."""
    samples = [_sample(frame) for frame in frames]
    found: list[Look] = []
    for nbytes, alike in groupby(samples, len):
        group = list(alike)
        found += _looks(np.frombuffer(b"".join(group), np.uint8).reshape(len(group), nbytes))
    return found


def _sample(data: memoryview) -> bytes:
    """Return a few kilobytes of a frame, from all over it; whole words of eight bytes."""
    if data.nbytes <= 2 * _SAMPLE_NBYTES:
        return bytes(data[: min(data.nbytes, _SAMPLE_NBYTES) // 8 * 8])
    step = (data.nbytes - _REGION) // (_REGIONS - 1) // 8 * 8
    return b"".join([data[at * step : at * step + _REGION] for at in range(_REGIONS)])


def _looks(samples: Bytes) -> list[Look]:
    """Say what frames seem to be, from samples of one size: a row for each."""
    eight = _counts(samples, 8)
    # Of words of one byte, of two, of four and of eight, one behind the other.
    counts: Counts = np.empty((len(samples), 15, 256), np.int64)
    counts[:, 7:] = eight
    np.add(eight[:, :4], eight[:, 4:], out=counts[:, 3:7])
    np.add(counts[:, 3:5], counts[:, 5:7], out=counts[:, 1:3])
    np.add(counts[:, 1], counts[:, 2], out=counts[:, 0])
    found = [_straight(bits) for bits in _bits(counts, samples.shape[1] // _WIDTHS)]
    for width in {each.width for each in found} - {1}:
        rows = [row for row, each in enumerate(found) if each.width == width]
        for row, its in zip(rows, _turned_bits(samples[rows], width), strict=True):
            bits = (*found[row].bits[:-2], *its)
            if sum(bits) < sum(found[row].bits) - 8 * _TURNED * width:
                found[row] = Look(width, turn=True, bits=bits)
    return found


def _straight(bits: list[float]) -> Look:
    """Choose the width of words, from what their bytes take: of words of one byte first, then of two, four, eight."""
    width, best = 1, bits[:1]
    for wider in (2, 4, 8):
        its = bits[wider - 1 : 2 * wider - 1]
        if sum(its) / wider < sum(best) / width - 8 * _WIDER:
            width, best = wider, its
    return Look(width, turn=False, bits=tuple(best))


def _turned_bits(samples: Bytes, width: int) -> list[list[float]]:
    """Return what the two upper bytes of turned words take; the others are as they were."""
    uppers = samples.view(type_of(2))[:, width // 2 - 1 :: width // 2]
    return _bits(_counts(_turned_pairs().take(uppers).view(np.uint8), 2), np.array([uppers.shape[1]]))


def _counts(samples: Bytes, width: int) -> Counts:
    """Return how often each byte stands at each place of words of this width, for each sample."""
    rows, nbytes = samples.shape
    numbers = samples.reshape(rows, nbytes // width, width) + _first_numbers(rows, width)
    return np.bincount(numbers.ravel(), minlength=rows * width * 256).reshape(rows, width, 256)


def _bits(counts: Counts, totals: Counts) -> list[list[float]]:
    """Return the entropy of bytes in bits, from how often each was counted, and how many that were."""
    sums = _logs().take(counts).sum(axis=2)
    bits: list[list[float]] = np.minimum(8.0, np.log2(totals) - (sums + _MISSED) / totals).tolist()
    return bits


@cache
def _first_numbers(rows: int, width: int) -> Counts:
    return np.arange(0, rows * width * 256, 256).reshape(rows, 1, width)


@cache
def _turned_pairs() -> npt.NDArray[np.uint16]:
    """Return what every word of two bytes becomes when it is turned."""
    return turned(np.arange(1 << 16, dtype=type_of(2)))


@cache
def _logs() -> npt.NDArray[np.float64]:
    # With the correction of Miller and Madow for how few bytes are counted: random ones would seem to be less so.
    numbers = np.arange(_SAMPLE_NBYTES + 1)
    logs: npt.NDArray[np.float64] = numbers * np.log2(np.maximum(numbers, 1)) - _MISSED * (numbers > 0)
    return logs
