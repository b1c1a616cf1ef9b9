"""
Parts of a large index, of which little must be read: what it says of tensors and chunks once more, packed.

`docs/format.md` specifies the two sections. The commit record vouches for the directory, and the directory for each part.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.errors import ChecksumMismatch, MalformedFile
from shardkeep.format.boxes import Boxes, IntArray, concat_ranges, segment_starts
from shardkeep.format.data_file import DIGEST_NBYTES, digest
from shardkeep.format.index import (
    CHUNK_SECTIONS,
    VALUE_SECTIONS,
    Chunks,
    Index,
    Strings,
    Table,
    checked_index,
    decoding,
    ends_fit,
    index_of,
    read_table,
    unpack_sections,
)

PART_ROWS = 4096
DIRECTORY, PARTS = "directory", "parts"
_LEAST_NBYTES = 1 << 20
"""About how large tensors and chunks are in an index that has parts; a smaller one is read whole, in one request."""
_GAP_NBYTES = 64 << 10
_MOST_READ_NBYTES = 8 << 20
_PACKED_AT_ONCE = 8 * PART_ROWS
_CODES = ("|i1", "<i2", "<i4", "<i8")
_MOST = [np.iinfo(code).max for code in _CODES[:-1]]
_TEXTS = ("keys", "digests")
"""Columns that are packed as they are."""

T = TypeVar("T")


Columns = dict[str, npt.NDArray[Any]]
IndexParts = Mapping[str, npt.NDArray[np.uint8]]
"""The sections of an index that can be read in parts; none in a small one, nor in one that is encoded as a whole."""
_OF_TENSORS = ("keys", "key_ends", "dtype", "ndim", "shape", "origin", "alias", "chunk_ends")
_DIRECTORY = (*_OF_TENSORS, "ends", "digests", "low", "high")
"""The last four have a row for each part."""


def _pack(columns: Columns) -> list[bytes]:
    """Pack the parts of columns, each of which has an axis for parts before that for rows."""
    packed = []
    for name, column in columns.items():
        (parts, rows), shape = column.shape[:2], column.shape[1:]
        if name in _TEXTS:
            packed.append([("|u1", shape, part.tobytes()) for part in column])
            continue
        width = math.prod(shape[1:])
        flat = column.reshape(parts, rows * width)  # numpy takes ten times as long for an axis of few
        steps = flat.astype(np.int64)
        np.subtract(flat[:, width:], flat[:, :-width], out=steps[:, width:], dtype=np.int64)
        # Kept is what comes before the steps stay the same, and one of these.
        differ = np.ones((parts, 1 + max(rows - 1, 0) * width), bool)
        np.not_equal(steps[:, width:], steps[:, :-width], out=differ[:, 1:])
        last = differ.shape[1] - 1 - np.argmax(differ[:, ::-1], axis=1)
        kept = ((last + width - 1) // max(width, 1) + 1) * width
        most = np.maximum(steps.max(axis=1, initial=0), ~steps.min(axis=1, initial=0))
        codes = [_CODES[code] for code in np.searchsorted(_MOST, most)]
        each = zip(steps, kept.tolist(), codes, strict=True)
        packed.append([(code, shape, part[:end].astype(code).tobytes()) for part, end, code in each])
    return [zlib.compress(msgspec.msgpack.encode(part), 1) for part in zip(*packed, strict=True)]


def _unpack(data: memoryview, names: Sequence[str], most_nbytes: int) -> Columns:
    """Unpack the columns of these names. To be called inside `decoding`."""
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(data, most_nbytes)
    except zlib.error as exc:
        raise ValueError(str(exc)) from exc
    columns: Columns = {}
    packed = msgspec.msgpack.decode(raw, type=list[tuple[str, tuple[int, ...], bytes]])
    for name, (code, shape, kept) in zip(names, packed, strict=True):
        total, width = math.prod(shape), math.prod(shape[1:])
        if (
            code not in (("|u1",) if name in _TEXTS else _CODES)
            or not 0 <= min(shape) <= max(total, *shape) <= most_nbytes
        ):
            raise ValueError(f"column {name!r} is packed in a way no writer does")
        found = np.frombuffer(kept, code)
        if name not in _TEXTS:
            rows = len(found) // width if width else shape[0]
            steps = np.empty(shape, np.int64)
            steps[:rows] = found.reshape(rows, *shape[1:])
            steps[rows:] = steps[rows - 1 : rows]
            found = np.cumsum(steps, axis=0)
            if found.size and found.min() < 0:
                raise ValueError("a number that is negative or beyond 63 bits")
        columns[name] = found.reshape(shape)
    return columns


def parts_of(index: Index, *, least_nbytes: int = _LEAST_NBYTES) -> IndexParts:
    rows, tensors = len(index.chunks), index.tensors
    if (len(tensors) + rows) * 12 + len(index.keys.data) < least_nbytes:
        return {}
    packed, whole = list[bytes](), rows - rows % PART_ROWS
    low, high = np.empty((2, -(-rows // PART_ROWS), index.chunks.axes), np.int64)
    cuts = [*range(0, whole, _PACKED_AT_ONCE), *range(whole, rows, PART_ROWS), rows]
    for first, end in itertools.pairwise(cuts):
        each, some = min(PART_ROWS, end - first), slice(first // PART_ROWS, -(-end // PART_ROWS))
        shape = (some.stop - some.start, each)
        columns = [column[first:end].reshape(*shape, *column.shape[1:]) for column in index.chunks.columns()]
        ends = np.add(columns[0], columns[1], dtype=np.int64)
        for axis in range(index.chunks.axes):
            low[some, axis] = columns[0][:, :, axis].min(axis=1)
            high[some, axis] = ends[:, :, axis].max(axis=1)
        packed += _pack(dict(zip(CHUNK_SECTIONS, columns, strict=True)))
    directory = [
        np.frombuffer(index.keys.data, np.uint8),
        index.keys.ends,
        *vars(tensors).values(),
        index.chunk_ends,
        np.cumsum([len(each) for each in packed], dtype=np.int64),
        np.frombuffer(b"".join(map(digest, packed)), np.uint8).reshape(-1, DIGEST_NBYTES),
        low,
        high,
    ]
    [encoded] = _pack({name: column[None] for name, column in zip(_DIRECTORY, directory, strict=True)})
    return {DIRECTORY: np.frombuffer(encoded, np.uint8), PARTS: np.frombuffer(b"".join(packed), np.uint8)}


def head_nbytes(data: bytes) -> int | None:
    """Return where the directory of an encoded index ends; None if it has no parts."""
    table, start = read_table(memoryview(data), "the index")
    return next((start + offset + shape[0] for name, _, shape, offset, _ in table if name == DIRECTORY), None)


class Load(Protocol):
    """Reads a range of the index file and decodes it; both once more, if it is damaged."""

    def __call__(self, offset: int, nbytes: int, decode: Callable[[memoryview], T], /) -> T: ...


class PartialIndex(Index):
    """An index of which chunks and plain values are read when they are needed, and chunks in parts."""

    def __init__(
        self, head: memoryview, nbytes: int, load: Load, load_whole: Callable[[], Index], *, where: str
    ) -> None:
        """Take the verified first bytes, up to the end of the directory, of a file of `nbytes`."""
        with decoding(where):
            table, start = read_table(head, where)
            places = {name: (start + offset, shape[0]) for name, _, shape, offset, _ in table if len(shape) == 1}
            begin, length = places[DIRECTORY]
            directory = _unpack(head[begin : begin + length], _DIRECTORY, 2 * nbytes)
            place, length = places[PARTS]
            if not _directory_fits(directory, length):
                raise ValueError("the directory of its parts contradicts itself")
        self.__dict__.update(_table=table, _start=start, _nbytes=nbytes, _where=where, _place=place)
        self.__dict__.update(_directory=directory, _load=load, _load_whole=load_whole)
        named = self._checked(0 * directory["chunk_ends"], {})
        self.__dict__.update(keys=named.keys, tensors=named.tensors, chunk_ends=directory["chunk_ends"])

    _table: Table
    _start: int
    """Where the first section begins, and where the parts do."""
    _place: int
    _nbytes: int
    _where: str
    _directory: Columns
    _load: Load
    _load_whole: Callable[[], Index]

    @property
    def _no_chunks(self) -> Columns:
        none = self._directory["low"][:0]
        return dict(zip(CHUNK_SECTIONS, (none, none, np.empty(0, np.int64), np.empty(0, np.int64)), strict=True))

    def _checked(self, chunk_ends: IntArray, more: Columns) -> Index:
        """Return an index of the tensors with these chunks, or these values."""
        texts = dict.fromkeys(VALUE_SECTIONS, np.empty(0, np.uint8))
        columns = self._directory | {"chunk_ends": chunk_ends}
        return checked_index(index_of(texts | self._no_chunks | columns | more), where=self._where)

    # Fields of an index that are read when they are first asked for.

    @cached_property
    def chunks(self) -> Chunks:
        return self._whole.chunks

    @cached_property
    def value_keys(self) -> Strings:
        return self._with_values.value_keys

    @cached_property
    def value_data(self) -> Strings:
        return self._with_values.value_data

    @cached_property
    def tree(self) -> bytes:
        return self._with_values.tree

    @cached_property
    def _whole(self) -> Index:
        return self._load_whole()

    @cached_property
    def _with_values(self) -> Index:
        """Values and the tree are read in one range, and verified section by section."""
        table = [each for each in self._table if each[0] in VALUE_SECTIONS]
        begin = min((offset for _, _, _, offset, _ in table), default=0)
        end = max((at + math.prod(shape) * np.dtype(code).itemsize for _, code, shape, at, _ in table), default=0)

        def decode(data: memoryview) -> Index:
            with decoding(self._where):
                values = unpack_sections(table, data, -begin, self._where)
            return self._checked(0 * self.chunk_ends, values)

        return self._load(self._start + begin, end - begin, decode)

    def narrowed(self, tensors: IntArray, boxes: Boxes) -> Index:
        if "_whole" in self.__dict__:
            return self._whole
        owner, parts = self._directory["alias"][tensors], self._directory
        first = segment_starts(self.chunk_ends)[owner] // PART_ROWS
        count = -(-self.chunk_ends[owner] // PART_ROWS) - first
        part, want = concat_ranges(first, count), np.repeat(np.arange(len(owner)), count)
        low, high = boxes.offsets[want], boxes.offsets[want] + boxes.sizes[want]
        touching = np.all(np.maximum(parts["low"][part], low) < np.minimum(parts["high"][part], high), axis=1)
        numbers, at = np.unique(part[touching], return_inverse=True)
        # What is wanted of a part lies between these coordinates.
        lows, highs = parts["high"][numbers], parts["low"][numbers]
        np.minimum.at(lows, at, low[touching])
        np.maximum.at(highs, at, high[touching])
        return self._with_chunks(numbers, lows, highs)

    def _with_chunks(self, numbers: IntArray, low: IntArray, high: IntArray) -> Index:
        """Return an index of those chunks only that lie in some parts, of each between some coordinates."""
        ends = self._directory["ends"]
        begins = segment_starts(ends)
        found = [(np.empty(0, np.int64), *self._no_chunks.values())]
        # Parts that are close together are read in one range.
        apart = begins[numbers[1:]] - ends[numbers[:-1]] > _GAP_NBYTES
        apart |= np.diff(ends[numbers] // _MOST_READ_NBYTES) > 0
        for some in np.split(np.arange(len(numbers)), np.flatnonzero(apart) + 1) if len(numbers) else ():
            begin, end = int(begins[numbers[some[0]]]), int(ends[numbers[some[-1]]])

            def decode(data: memoryview, some: IntArray = some, begin: int = begin) -> list[tuple[IntArray, ...]]:
                kept = []
                for at, number in zip(some.tolist(), numbers[some].tolist(), strict=True):
                    part = self._decode_part(number, data[begins[number] - begin : ends[number] - begin])
                    touching = np.all((part.offsets < high[at]) & (part.offsets + part.sizes > low[at]), axis=1)
                    rows = np.flatnonzero(touching)
                    kept.append((number * PART_ROWS + rows, *part.take(rows).columns()))
                return kept

            found += self._load(self._place + begin, end - begin, decode)
        rows, *columns = (np.concatenate(each) for each in zip(*found, strict=True))
        return self._checked(np.searchsorted(rows, self.chunk_ends), dict(zip(CHUNK_SECTIONS, columns, strict=True)))

    def _decode_part(self, number: int, data: memoryview) -> Chunks:
        if digest(data) != self._directory["digests"][number].tobytes():
            raise ChecksumMismatch(f"{self._where}: part {number} of the index is damaged", file=self._where)
        axes = self._directory["low"].shape[1]
        rows = min(PART_ROWS, int(self.chunk_ends[-1]) - number * PART_ROWS)
        with decoding(self._where):
            part = Chunks(*_unpack(data, CHUNK_SECTIONS, (axes + 1) * 16 * PART_ROWS + 1024).values())
            if [column.shape for column in part.columns()] != [(rows, axes)] * 2 + [(rows,)] * 2:
                raise ValueError(f"part {number} has not the chunks that belong into it")
        return part

    def check_parts(self) -> None:
        whole, stored = self._whole, self._directory
        parts = self._with_chunks(np.arange(len(stored["ends"])), stored["low"], stored["high"])
        true = _unpack(parts_of(whole, least_nbytes=0)[DIRECTORY].data, _DIRECTORY, 2 * self._nbytes)
        # Packed bytes, and so where they end, differ from one version of zlib to the next.
        same = all(np.array_equal(true[name], stored[name]) for name in (*_OF_TENSORS, "low", "high"))
        if not same or not all(map(np.array_equal, parts.chunks.columns(), whole.chunks.columns())):
            raise MalformedFile(f"{self._where}: the parts of the index and its columns differ", file=self._where)


def _directory_fits(directory: Columns, nbytes: int) -> bool:
    rows, axes = int(directory["chunk_ends"][-1]), directory["shape"].shape[1]
    count = -(-rows // PART_ROWS)
    return (
        directory["digests"].shape == (count, DIGEST_NBYTES)
        and directory["low"].shape == directory["high"].shape == (count, axes)
        and directory["ends"].shape == (count,)
        and ends_fit(directory["ends"], nbytes)
        and ends_fit(directory["chunk_ends"], rows)
    )
