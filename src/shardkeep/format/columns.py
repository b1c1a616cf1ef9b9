"""
Columns: the numpy arrays that plans and the index are made of.

Boxes of tensors with different numbers of axes share one matrix: rows are padded on the right with offset 0 and size
1, which leaves volumes, intersections and tilings as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkeep.format import dtypes
from shardkeep.format.region import Box

if TYPE_CHECKING:
    from typing_extensions import Self

IntArray = npt.NDArray[np.int64]
_GROUP_BITS = 7

ITEMSIZES = np.zeros(256, np.int64)
"""Bytes of an element by dtype code; 0 for codes that no dtype has."""
ITEMSIZES[[row.code for row in dtypes.TABLE]] = [row.itemsize for row in dtypes.TABLE]


class Rows:
    """A dataclass whose fields are arrays of one length: the columns of a table."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]  # every subclass is a dataclass

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the columns in the order of the fields."""
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    def take(self, rows: Any) -> Self:
        """Return the table of these rows, in this order (an index array, a mask or a slice)."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})  # type: ignore[type-var,arg-type]


@dataclass(frozen=True)
class Boxes(Rows):
    """Boxes as two matrices, one row each."""

    offsets: IntArray
    sizes: IntArray

    @property
    def axes(self) -> int:
        """Width of the matrices: the largest number of axes."""
        return int(self.offsets.shape[1])

    def volumes(self) -> IntArray:
        """Return the number of elements of each box."""
        volumes: IntArray = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volumes

    def box(self, row: int, ndim: int) -> Box:
        """Return one row as a plain value, without padding."""
        return Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.sizes[row, :ndim].tolist()))


class Tuples:
    """The rows of several columns as tuples of plain numbers, made in groups as they are asked for."""

    def __init__(self, *columns: npt.NDArray[Any]) -> None:
        self._columns = columns
        self._groups: dict[int, list[tuple[Any, ...]]] = {}

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        group = self._groups.get(row >> _GROUP_BITS)
        if group is None:
            first = row >> _GROUP_BITS << _GROUP_BITS
            lists = (column[first : first + (1 << _GROUP_BITS)].tolist() for column in self._columns)
            group = self._groups[row >> _GROUP_BITS] = list(zip(*lists, strict=True))
        return group[row & ((1 << _GROUP_BITS) - 1)]


def widen(matrix: IntArray, axes: int, fill: int) -> IntArray:
    """Pad a matrix on the right to `axes` columns."""
    if matrix.shape[1] == axes:
        return matrix
    wide = np.full((len(matrix), axes), fill, np.int64)
    wide[:, : matrix.shape[1]] = matrix
    return wide


def matrix_of(rows: Sequence[tuple[int, ...]], axes: int, fill: int) -> IntArray:
    """Build a padded matrix from tuples of at most `axes` numbers, most of which are alike."""
    seen: dict[tuple[int, ...], int] = {}
    which = [seen.setdefault(row, len(seen)) for row in rows]
    padded = [row + (fill,) * (axes - len(row)) for row in seen]
    return np.array(padded, dtype=np.int64).reshape(len(seen), axes)[which]


def segment_starts(ends: npt.NDArray[Any]) -> IntArray:
    """Return where each segment begins, given where each ends."""
    starts = np.empty(len(ends), np.int64)
    starts[:1] = 0
    starts[1:] = ends[:-1]
    return starts


def concat_ranges(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> IntArray:
    """Return `start, start+1, … start+count-1` of every range, end to end."""
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    if total == 0:
        return np.empty(0, np.int64)
    ends = np.cumsum(counts)
    ranges: IntArray = np.arange(total, dtype=np.int64)
    ranges += np.repeat(np.asarray(starts, np.int64) - (ends - counts), counts)
    return ranges
