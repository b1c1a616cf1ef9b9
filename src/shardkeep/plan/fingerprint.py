"""
Random 64-bit fingerprints of rows of integers, to compare half a million boxes without sorting them by every column.

The multipliers are drawn anew by each caller, so no file can be made to collide on purpose.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.format.columns import IntArray

Hashes = npt.NDArray[np.uint64]


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
