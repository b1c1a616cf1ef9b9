"""
Random 64-bit fingerprints of rows of integers, to compare half a million boxes without sorting them by every column.

The multipliers are drawn anew by each caller, so no file can be made to collide on purpose.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.format.boxes import IntArray

Hashes = npt.NDArray[np.uint64]

_PRIME = np.uint64(2**61 - 1)
_61, _32, _29, _3 = np.uint64(61), np.uint64(32), np.uint64(29), np.uint64(3)
_LOW_32, _LOW_29 = np.uint64(2**32 - 1), np.uint64(2**29 - 1)


def multipliers(count: int, rng: np.random.Generator) -> Hashes:
    """Draw odd 64-bit numbers."""
    odd: Hashes = rng.integers(0, 2**64, count, dtype=np.uint64) | np.uint64(1)
    return odd


def mix(hashes: Hashes) -> Hashes:
    """Scramble 64-bit numbers so that sums of them behave as sums of random numbers (the splitmix64 finaliser)."""
    h: Hashes = hashes ^ (hashes >> np.uint64(30))
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def of_rows(columns: list[IntArray], weights: Hashes) -> Hashes:
    """Fingerprint each row of a table, with one weight a column and one more that keeps a row of zeros from being 0."""
    total = np.full(len(columns[0]), weights[-1])
    for column, weight in zip(columns, weights[:-1], strict=True):
        total += column.astype(np.uint64) * weight
    return mix(total)


def times(a: Hashes, b: Hashes) -> Hashes:
    """Multiply modulo 2**61 - 1; both are below it."""
    a_high, a_low, b_high, b_low = a >> _32, a & _LOW_32, b >> _32, b & _LOW_32
    low, middle = a_low * b_low, a_high * b_low + a_low * b_high
    # 2**61 is 1 here, so 2**64 is 8, and what stands above bit 29 of the middle counts once.
    return _reduced(
        (a_high * b_high << _3) + (middle >> _29) + ((middle & _LOW_29) << _32) + (low & _PRIME) + (low >> _61)
    )


def minus(a: Hashes, b: Hashes) -> Hashes:
    """Subtract any 64-bit numbers modulo 2**61 - 1."""
    return _reduced(_reduced(a) + (_PRIME - _reduced(b)))


def add_up(numbers: Hashes, group: IntArray, groups: int) -> Hashes:
    """Add up the numbers of each group modulo 2**61 - 1; `group` is sorted."""
    sums = np.zeros((2, groups), np.uint64)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if len(starts):
        # In halves: four billion numbers of 32 bits fit 64.
        for half, part in enumerate((numbers >> _32, numbers & _LOW_32)):
            sums[half, group[starts]] = np.add.reduceat(part, starts)
    two_32 = np.full(groups, 1 << 32, np.uint64)
    return _reduced(times(_reduced(sums[0]), two_32) + _reduced(sums[1]))


def _reduced(numbers: Hashes) -> Hashes:
    folded: Hashes = (numbers & _PRIME) + (numbers >> _61)
    return np.where(folded >= _PRIME, folded - _PRIME, folded)
