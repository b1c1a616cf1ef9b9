"""
The index: every tensor, where each of its chunks lies, and every plain value. Sorted, binary, in columns.

    "SKINDEX1" | u32 length | msgpack header | sections, each on a 64-byte boundary

The header names each section with its number type, shape, place and digest, so that a section can be read without the
others. Whole numbers that are not negative are stored in the narrowest type that holds them. Opening an index makes a few
views of its bytes; nothing is decoded until it is asked for.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.errors import ChecksumMismatch, MalformedFile
from shardkeep.format.boxes import ITEMSIZES, Box, Boxes, IntArray, Ints, Rows, concat_ranges, matrix_of, segment_starts
from shardkeep.format.data_file import DIGEST_NBYTES, digest
from shardkeep.format.dtypes import DType, by_code

T = TypeVar("T")

_ALIGN = 64
Table = list[tuple[str, str, tuple[int, ...], int, bytes]]
"""Name, number type, shape, offset and digest of each section."""


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Turn errors that malformed bytes cause inside into `MalformedFile`, which names the file."""
    try:
        yield
    except (MalformedFile, ChecksumMismatch):
        raise
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, msgspec.MsgspecError, RecursionError) as exc:
        raise MalformedFile(f"{where}: not a readable index: {exc}", file=where) from exc


MAGIC = b"SKINDEX1"
_MAX_AXES = 64
MAX_ELEMENTS = 2.0**58
"""Most elements of a tensor, counting an axis of size 0 as 1: sizes in bytes stay below 2**63."""
_TEXTS = frozenset({"keys", "value_keys", "values", "tree"})
_MATRICES = frozenset({"shape", "offsets", "sizes"})
_COLUMNS = frozenset(
    {"key_ends", "dtype", "ndim", "origin", "alias", "chunk_ends", "file", "start", "value_key_ends", "value_ends"}
)
_CHUNK_SECTIONS = ("offsets", "sizes", "file", "start")
_VALUE_SECTIONS = ("value_keys", "value_key_ends", "values", "value_ends", "tree")


@dataclass(frozen=True)
class Tensors(Rows):
    """One row a tensor, sorted by key."""

    dtype: npt.NDArray[np.uint8]
    """Codes of `format.dtypes`."""
    ndim: npt.NDArray[np.uint8]
    shape: IntArray
    """Padded with 1."""
    origin: npt.NDArray[np.uint8]
    """0: a torch tensor, 1: a numpy array."""
    alias: IntArray
    """Row of the tensor whose memory this one shares; its own row where it shares none."""


@dataclass(frozen=True)
class Chunks(Boxes):
    """One row a chunk, sorted by tensor."""

    file: IntArray
    """Position in the commit record's list of files."""
    start: IntArray
    """
    Byte offset of its first element from the beginning of that file's data, its elements in row-major order. In an index
    that was not read from a file, -1 for a chunk that is not, or not known to be, stored so: see `Source.locate`.
    """


class Strings:
    """Sorted byte strings, stored end to end with the end of each."""

    def __init__(self, ends: npt.NDArray[Any], data: memoryview) -> None:
        self.ends = ends
        self.data = data

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, row: int) -> bytes:
        start = int(self.ends[row - 1]) if row else 0
        return bytes(self.data[start : int(self.ends[row])])

    def all(self) -> list[bytes]:
        data = bytes(self.data)
        ends = self.ends.tolist()
        return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def find(self, wanted: bytes) -> int | None:
        row = bisect.bisect_left(range(len(self)), wanted, key=self.raw)
        return row if row < len(self) and self.raw(row) == wanted else None


@dataclass(frozen=True)
class Index:
    """An index in memory; cheap to open, decoded in part."""

    keys: Strings
    tensors: Tensors
    chunk_ends: npt.NDArray[Any]
    """Chunks of tensor t are rows `chunk_ends[t-1]` to `chunk_ends[t]`."""
    chunks: Chunks
    value_keys: Strings
    value_data: Strings
    make_tree: Callable[[], bytes]

    @cached_property
    def tree(self) -> bytes:
        return self.make_tree()

    def narrowed(self, tensors: IntArray, boxes: Boxes) -> Index:  # noqa: ARG002 - all chunks are in memory
        """Return this index, or one with fewer chunks, among them all that these boxes, of these tensors, touch."""
        return self

    def check_parts(self) -> None:
        """Check that what is stored twice is the same."""

    def chunk_rows(self, tensor: int) -> slice:
        """Return the rows of a tensor's chunks; for a tied tensor, of the tensor it is tied to."""
        owner = int(self.tensors.alias[tensor])
        return slice(int(self.chunk_ends[owner - 1]) if owner else 0, int(self.chunk_ends[owner]))

    def shape(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.tensors.shape[tensor, : int(self.tensors.ndim[tensor])].tolist())

    def dtype(self, tensor: int) -> DType:
        return by_code(int(self.tensors.dtype[tensor]))

    @cached_property
    def is_sorted(self) -> bool:
        """Whether keys are sorted and distinct, so that a binary search finds each of them."""
        return all(a < b for keys in (self.keys.all(), self.value_keys.all()) for a, b in itertools.pairwise(keys))

    @cached_property
    def tensor_rows(self) -> dict[str, int]:
        return _rows_by_key(self.keys)

    @cached_property
    def value_rows(self) -> dict[str, int]:
        rows = _rows_by_key(self.value_keys)
        if not rows.keys().isdisjoint(self.tensor_rows):
            raise MalformedFile("the index has a tensor and a value of one key")
        return rows


def encode_index(index: Index, *, parts: Mapping[str, npt.NDArray[np.uint8]] = MappingProxyType({})) -> bytes:
    """Encode an index with keys sorted by their UTF-8 bytes, chunks by tensor; `parts` (see below) come first."""
    sections = {
        **parts,
        "keys": np.frombuffer(index.keys.data, np.uint8),
        "key_ends": index.keys.ends,
        **vars(index.tensors),
        "chunk_ends": index.chunk_ends,
        "value_keys": np.frombuffer(index.value_keys.data, np.uint8),
        "value_key_ends": index.value_keys.ends,
        "values": np.frombuffer(index.value_data.data, np.uint8),
        "value_ends": index.value_data.ends,
        "tree": np.frombuffer(index.tree, np.uint8),
        **vars(index.chunks),
    }
    table: Table = []
    body: list[Any] = []
    at = 0
    for name, column in sections.items():
        is_narrow = column.dtype.itemsize == 1 or column.size == 0
        number_type = None if is_narrow else np.min_scalar_type(int(column.max())).newbyteorder("<")
        narrow = np.ascontiguousarray(column, dtype=number_type)
        raw = narrow.reshape(-1).view(np.uint8).data
        table.append((name, narrow.dtype.str, narrow.shape, at, digest(raw)))
        padding = bytes(-raw.nbytes % _ALIGN)
        body += (raw, padding)
        at += raw.nbytes + len(padding)
    header = msgspec.msgpack.encode(table)
    start = len(MAGIC) + 4 + len(header)
    return b"".join((MAGIC, len(header).to_bytes(4, "little"), header, bytes(-start % _ALIGN), *body))


PlacedChunk = tuple[Box, int, int]
"""A box, its file, and where in the file it begins."""


def build_index(
    *,
    keys: Sequence[str],
    dtypes: Sequence[DType],
    shapes: Sequence[Ints],
    chunks: Sequence[Sequence[PlacedChunk]],
    alias: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    value_keys: Sequence[str] = (),
    value_data: Strings | None = None,
    make_tree: Callable[[], bytes] = bytes,
    where: str,
) -> Index:
    """Make an index in memory, and check it; keys are sorted by their UTF-8 bytes, and `chunks` has those of each tensor."""
    with decoding(where):
        axes = max(map(len, shapes), default=0)
        flat = [chunk for some in chunks for chunk in some]
        index = Index(
            keys=strings_of(key.encode() for key in keys),
            tensors=Tensors(
                dtype=np.array([dtype.code for dtype in dtypes], np.uint8),
                ndim=np.array(list(map(len, shapes)), np.uint8),
                shape=matrix_of(shapes, axes, 1),
                origin=np.zeros(len(keys), np.uint8) if origin is None else np.array(origin, np.uint8),
                alias=np.arange(len(keys)) if alias is None else np.array(alias, np.int64),
            ),
            chunk_ends=np.cumsum(list(map(len, chunks)), dtype=np.int64),
            chunks=Chunks(
                offsets=matrix_of([box.offsets for box, _, _ in flat], axes, 0),
                sizes=matrix_of([box.sizes for box, _, _ in flat], axes, 1),
                file=np.array([file for _, file, _ in flat], np.int64),
                start=np.array([start for _, _, start in flat], np.int64),
            ),
            value_keys=strings_of(key.encode() for key in value_keys),
            value_data=strings_of([]) if value_data is None else value_data,
            make_tree=make_tree,
        )
    return _checked_index(index, where=where)


def decode_index(data: bytes | memoryview, *, where: str) -> Index:
    """Open an index and check that its columns fit each other; `where` is named in errors."""
    with decoding(where):
        table, start = read_table(memoryview(data), where)
        index = _index_of(_unpack_sections(table, memoryview(data), start, where))
    return _checked_index(index, where=where)


def _index_of(section: Mapping[str, npt.NDArray[Any]]) -> Index:
    return Index(
        keys=Strings(section["key_ends"], section["keys"].data),
        tensors=Tensors(*(section[name] for name in ("dtype", "ndim", "shape", "origin", "alias"))),
        chunk_ends=section["chunk_ends"],
        chunks=Chunks(*(section[name] for name in _CHUNK_SECTIONS)),
        value_keys=Strings(section["value_key_ends"], section["value_keys"].data),
        value_data=Strings(section["value_ends"], section["values"].data),
        make_tree=section["tree"].tobytes,
    )


def read_table(data: memoryview, where: str) -> tuple[Table, int]:
    """Return the table of sections, and where the first of them begins. To be called inside `decoding`."""
    at = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC:
        raise MalformedFile(f"{where}: not an index: it does not begin with {MAGIC!r}", file=where)
    header_nbytes = int.from_bytes(data[len(MAGIC) : at], "little")
    table = msgspec.msgpack.decode(data[at : at + header_nbytes], type=Table)
    at += header_nbytes
    return table, at + -at % _ALIGN


def _unpack_sections(table: Table, data: memoryview, at: int, where: str) -> dict[str, npt.NDArray[Any]]:
    """
    Return the known sections of a table as views of the data, in which the first section of the file begins `at` a byte,
    before 0 if the data are a later part of the file. To be called inside `decoding`.
    """
    sections: dict[str, npt.NDArray[Any]] = {}
    for name, code, shape, offset, expected in table:
        if name not in _TEXTS | _MATRICES | _COLUMNS:
            continue  # of a later version; not hashed, because a forged header can name the same bytes a million times
        if (
            name in sections
            or code not in (("|u1",) if name in _TEXTS else ("|u1", "<u2", "<u4", "<u8", "<i8"))
            or len(shape) != (2 if name in _MATRICES else 1)
            or min(offset, at + offset, *shape) < 0
        ):
            raise MalformedFile.of(where, f"section {name!r} of the index is declared in a way no writer does")
        raw = data[at + offset : at + offset + math.prod(shape) * np.dtype(code).itemsize]
        if digest(raw) != expected:
            raise ChecksumMismatch.of(where, f"section {name!r} of the index is damaged", offset=at + offset)
        column = np.frombuffer(raw, code).reshape(shape)
        if column.dtype.itemsize == 8:
            column = column.view("<i8")
            if column.size and column.min() < 0:
                raise ValueError("a number that is negative or beyond 63 bits")
        sections[name] = column
    return sections


def _checked_index(index: Index, *, where: str) -> Index:
    """Return an index whose columns are consistent; `where` is named in the error for one whose columns are not."""
    with decoding(where):
        sound = _fits(index)
    if not sound:
        raise MalformedFile(f"{where}: the columns of the index contradict each other", file=where)
    return index


def _rows_by_key(keys: Strings) -> dict[str, int]:
    rows = {key.decode(): row for row, key in enumerate(keys.all())}
    if len(rows) != len(keys):
        raise MalformedFile("the index has one key twice")
    return rows


def strings_of(strings: Iterable[bytes]) -> Strings:
    parts = list(strings)
    return Strings(np.cumsum([len(part) for part in parts], dtype=np.int64), memoryview(b"".join(parts)))


def _fits(index: Index) -> bool:
    # The order matters: a matrix without columns takes no bytes, so its row count must be checked against columns first.
    tensors, chunks = index.tensors, index.chunks
    count, axes = tensors.shape.shape
    return (
        axes <= _MAX_AXES
        and all(len(column) == count for column in (index.keys, tensors.dtype, tensors.ndim, tensors.origin))
        and len(tensors.alias) == len(index.chunk_ends) == count
        and chunks.offsets.shape == chunks.sizes.shape == (len(chunks.file), axes)
        and len(chunks.start) == len(chunks.file)
        and len(index.value_keys) == len(index.value_data)
        and all(_ends_fit(each.ends, len(each.data)) for each in (index.keys, index.value_keys, index.value_data))
        and _ends_fit(index.chunk_ends, len(chunks.file))
        and all(map(_are_text, (index.keys, index.value_keys)))
        and bool(np.all(ITEMSIZES[tensors.dtype] > 0))
        and _shapes_fit(tensors)
        and _ties_fit(index)
        and _boxes_inside(index)
    )


def _ends_fit(ends: npt.NDArray[Any], total: int) -> bool:
    """Return whether these are the ends of segments that fill a total."""
    if len(ends) == 0:
        return total == 0
    return int(ends[-1]) == total and bool(np.all(ends[1:] >= ends[:-1]))


def _are_text(strings: Strings) -> bool:
    """Return whether every string is UTF-8: all of them together are, and none begins inside a character."""
    data = bytes(strings.data)
    if data.isascii():
        return True
    data.decode()  # raises a ValueError if it is not
    starts = segment_starts(strings.ends)
    return bool(np.all(np.frombuffer(data + b" ", np.uint8)[starts] & 0xC0 != 0x80))


def _shapes_fit(tensors: Tensors) -> bool:
    shape = tensors.shape
    if np.any(tensors.ndim > shape.shape[1]):
        return False
    # In floats, which do not overflow; never times 0, because infinity times 0 is not a number.
    with np.errstate(over="ignore"):
        elements = np.prod(np.maximum(shape, 1).astype(np.float64), axis=1)
    padding = np.arange(shape.shape[1]) >= tensors.ndim[:, None]
    return bool(np.all(elements < MAX_ELEMENTS) and np.all(shape[padding] == 1))


def _ties_fit(index: Index) -> bool:
    """Return whether every tied tensor has no chunks, and the shape and dtype of a tensor that is not tied itself."""
    tensors, rows = index.tensors, np.arange(len(index.tensors))
    alias = tensors.alias
    if not np.all(alias < len(rows)):
        return False
    tied = np.flatnonzero(alias != rows)
    owner, starts = alias[tied], segment_starts(index.chunk_ends)
    return bool(
        np.all(alias[owner] == owner)
        and all(np.array_equal(column[owner], column[tied]) for column in (tensors.shape, tensors.ndim, tensors.dtype))
        and np.all(starts[tied] == index.chunk_ends[tied])
    )


_CHECKED_ROWS = 1 << 18


def _boxes_inside(index: Index) -> bool:
    shape, ends, rows = index.tensors.shape, np.asarray(index.chunk_ends, np.int64), len(index.chunks)
    for low in range(0, rows, _CHECKED_ROWS):  # not all at a time, because this takes 50 bytes for each
        high = min(low + _CHECKED_ROWS, rows)
        within = np.clip(ends - low, 0, high - low)
        limits = np.repeat(shape, within - segment_starts(within), axis=0)
        offsets, sizes = index.chunks.offsets[low:high], index.chunks.sizes[low:high]
        if not (np.all(sizes <= limits) and np.all(offsets <= limits - sizes) and np.all(sizes >= 1)):
            return False
    return True


# -- parts: what a large index says of tensors and chunks once more, packed, so that little of it must be read ----------------

# `docs/format.md` specifies the two sections. The commit record vouches for the directory, and the directory for each part.

PART_ROWS = 4096
DIRECTORY, PARTS = "directory", "parts"
_LEAST_NBYTES = 1 << 20
"""About how large tensors and chunks are in an index that has parts; a smaller one is read whole, in one request."""
_GAP_NBYTES = 64 << 10
_MOST_READ_NBYTES = 8 << 20
_PACKED_AT_ONCE = 8 * PART_ROWS
_CODES = ("|i1", "<i2", "<i4", "<i8")
_MOST = [np.iinfo(code).max for code in _CODES[:-1]]
_PACKED_RAW = ("keys", "digests")
"""Columns that are packed as they are."""

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
        if name in _PACKED_RAW:
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
            code not in (("|u1",) if name in _PACKED_RAW else _CODES)
            or not 0 <= min(shape) <= max(total, *shape) <= most_nbytes
        ):
            raise ValueError(f"column {name!r} is packed in a way no writer does")
        found = np.frombuffer(kept, code)
        if name not in _PACKED_RAW:
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
        packed += _pack(dict(zip(_CHUNK_SECTIONS, columns, strict=True)))
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
        return dict(zip(_CHUNK_SECTIONS, (none, none, np.empty(0, np.int64), np.empty(0, np.int64)), strict=True))

    def _checked(self, chunk_ends: IntArray, more: Columns) -> Index:
        """Return an index of the tensors with these chunks, or these values."""
        texts = dict.fromkeys(_VALUE_SECTIONS, np.empty(0, np.uint8))
        columns = self._directory | {"chunk_ends": chunk_ends}
        return _checked_index(_index_of(texts | self._no_chunks | columns | more), where=self._where)

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
        table = [each for each in self._table if each[0] in _VALUE_SECTIONS]
        begin = min((offset for _, _, _, offset, _ in table), default=0)
        end = max((at + math.prod(shape) * np.dtype(code).itemsize for _, code, shape, at, _ in table), default=0)

        def decode(data: memoryview) -> Index:
            with decoding(self._where):
                values = _unpack_sections(table, data, -begin, self._where)
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
        return self._checked(np.searchsorted(rows, self.chunk_ends), dict(zip(_CHUNK_SECTIONS, columns, strict=True)))

    def _decode_part(self, number: int, data: memoryview) -> Chunks:
        if digest(data) != self._directory["digests"][number].tobytes():
            raise ChecksumMismatch(f"{self._where}: part {number} of the index is damaged", file=self._where)
        axes = self._directory["low"].shape[1]
        rows = min(PART_ROWS, int(self.chunk_ends[-1]) - number * PART_ROWS)
        with decoding(self._where):
            part = Chunks(*_unpack(data, _CHUNK_SECTIONS, (axes + 1) * 16 * PART_ROWS + 1024).values())
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
        and _ends_fit(directory["ends"], nbytes)
        and _ends_fit(directory["chunk_ends"], rows)
    )
