"""
`.metadata`, the file that lists the contents of a checkpoint in torch's layout: a pickle of torch's classes.

It is written without importing torch's classes, and read without running code: the names of torch's classes stand for ours.
"""

from __future__ import annotations

import copyreg
import logging
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, compress, repeat
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import torch

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Boxes, IntArray, Ints, distinct_rows
from shardkeep.format.pickles import Call, Names, New, plain_names
from shardkeep.layouts import torch as torch_layout
from shardkeep.layouts import torch_values as metadata
from shardkeep.layouts.torch_values import Metadata, MetadataIndex, _StorageInfo
from shardkeep.options import collector_paused
from shardkeep.storage.base import ReadableStore

log = logging.getLogger("shardkeep")

_CLASSES = {getattr(metadata, name): (homes[0], name) for name, homes in torch_layout.HOMES.items()}


def encode_metadata(value: Metadata) -> bytes:
    """Pickle metadata as torch does, under the names of torch's classes, and seal it; warn of classes no reader knows."""
    out = _Writer()
    with collector_paused():
        out.save(value)
    return out.finished()


def read_metadata(store: ReadableStore, name: str, *, where: str) -> Metadata:
    return decode_metadata(store.get(name, limit=torch_layout.MAX_METADATA_NBYTES), where=where)


def data_files_of(metadata: Metadata) -> set[str]:
    """Return the names of all data files that metadata refer to, and of the files with their digests."""
    places = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    return torch_layout.with_sums(place.relative_path for place in places.values() if isinstance(place, _StorageInfo))


def set_sums(metadata: Metadata, sums: Mapping[str, torch_layout.Sums]) -> None:
    """Add the checksums of the data files as an attribute, which is pickled and which torch ignores."""
    vars(metadata)["shardkeep_sums"] = {name: tuple(each) for name, each in sorted(sums.items())}


def decode_metadata(data: bytes, *, where: str) -> Metadata:
    """Read metadata that we or torch wrote; `PickleRefused` if they name a class that does not belong there."""
    found = torch_layout.unpickle_metadata(data, _known(), where=where)
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise MalformedFile.of(where, f"not the metadata of a checkpoint, but a {type(found).__name__}")
    for name in ("planner_data", "storage_data", "storage_meta", "version"):
        vars(found).setdefault(name, None)  # of an older torch
    try:
        _check_entries(found)
    except (AttributeError, TypeError) as exc:
        raise MalformedFile.of(where, f"not the metadata of a checkpoint: {exc}") from exc
    return found


def _check_entries(found: Metadata) -> None:
    """Check the types of all fields that we compute with; planner data are left to the planner."""
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            sizes = [entry.size, *(each for chunk in entry.chunks for each in (chunk.offsets, chunk.sizes))]
            if not all(_is_size(each, len(entry.size)) for each in sizes):
                raise TypeError(f"{key!r} has malformed sizes or offsets")
            if not isinstance(entry.properties.dtype, torch.dtype):
                raise TypeError(f"{key!r} has no dtype")
    for index, place in ({} if found.storage_data is None else found.storage_data).items():
        if isinstance(place, _StorageInfo):
            numbers, descriptors = (place.offset, place.length), place.transform_descriptors
            if type(place.relative_path) is not str or not all(type(n) is int and n >= 0 for n in numbers):
                raise TypeError(f"{index} has a malformed location")
            if descriptors is not None and not all(type(each) is str for each in descriptors):
                raise TypeError(f"{index} has malformed extension names")


def _is_size(size: Any, dimensions: int) -> bool:
    return isinstance(size, tuple) and len(size) == dimensions and all(type(n) is int and n >= 0 for n in size)


@cache
def _known() -> Names:
    """Return what a pickle may name, besides plain values and what the user declared safe."""
    kinds = {kind.__name__: New(kind) for kind in _CLASSES}
    encoding = metadata._MEM_FORMAT_ENCODING
    # A copy of each member, because a pickle could modify the enum's own.
    named = Call(lambda number: types.SimpleNamespace(name=encoding(number).name), encoding)
    names: dict[tuple[str, str], Any] = torch_layout.class_names({**kinds, encoding.__name__: named})
    # All dtypes, including those of quantized tensors, which only torch reads.
    names.update({("torch", str(each)[6:]): each for each in vars(torch).values() if isinstance(each, torch.dtype)})
    names["torch", "Size"] = Call(torch.Size)
    names["torch.serialization", "_get_layout"] = Call(torch.serialization._get_layout)
    return names


Kind = tuple[str, bool, bool]
"""Of a tensor: the name of its dtype, whether it requires a gradient and was pinned."""


@dataclass(frozen=True)
class Contents:
    """The values of a checkpoint and the items that they are stored in, in columns."""

    kinds: Mapping[str, Kind | None]
    """Of each value, by name; None: an object."""
    ndim: IntArray
    """Of each value; 0 for objects."""
    shape: IntArray
    """Padded, like the boxes of items."""
    paths: Mapping[str, tuple[str | int, ...]] | None
    value: IntArray
    """Of each item, the position of its value. Every value has items, and an object has one."""
    boxes: Boxes


class Body(NamedTuple):
    """The pickle of contents; any save that writes the same items to the same places of its files can use it."""

    raw: bytes
    memo_size: int
    """How many objects are in the pickle's memo behind it."""


_KINDS = (metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, MetadataIndex, _StorageInfo)
_FIELDS = "properties size chunks offsets sizes fqn offset index relative_path length shardkeep_data_start"


@collector_paused()
def encode_body(said: Contents, places: IntArray, files: int) -> Body:
    """
    Pickle values and items, which are rows of opcodes that differ in numbers only. `places` says of each item, in four rows:
    the number of its file, offset, length, and where the data begin (-1: unknown).
    """
    out, paths = _Writer(), said.paths or {}
    made, text = out.made, out.text
    tensor, chunk, index, place, nothing, *fields = out.begin()
    properties, size, chunks, offsets, sizes, fqn, offset, number, file, length, start = fields
    made.clear()
    first_file = out.memo_size
    out.memo_size += files
    parts: list[Any] = list(chain.from_iterable(paths.values()))
    is_part_text = list(map(isinstance, parts, repeat(str)))
    out.define_texts(chain(said.kinds, compress(parts, is_part_text)))
    for kind in dict.fromkeys(said.kinds.values()):
        if kind is not None:
            out.define(out.properties, *kind)
    names, is_tensor = out.numbers(said.kinds), np.array([kind is not None for kind in said.kinds.values()], bool)
    order = np.argsort(said.value, kind="stable")
    rows, objects = (order[is_tensor[said.value[order]] == which] for which in (True, False))
    value, boxes = said.value[rows], said.boxes.take(rows)
    begins, extents = (out.sizes(said.ndim[value], matrix) for matrix in boxes.columns())
    shapes, form = out.sizes(said.ndim, said.shape), out.numbers(filter(None, said.kinds.values()))

    made += out.named(*_CLASSES[Metadata]), b")\x81}(", text("state_dict_metadata"), b"}("
    at, whole = np.flatnonzero(is_tensor), shapes[is_tensor]
    heads = [_ref(names[at]), tensor, properties, _ref(form), size, _ref(whole), chunks, b"]("]
    made.append(
        _woven(
            (at, heads),
            (value, [chunk, offsets, _ref(begins), sizes, _ref(extents), b"ub"]),
            (at, [b"eub"]),
            (np.flatnonzero(~is_tensor), [_ref(names[~is_tensor]), nothing]),
        )
    )
    made += b"u", text("planner_data"), b"N" if said.paths is None else b"}("
    is_text, numbers = np.array(is_part_text, np.bool_), np.array([*map(out.known.get, parts, parts)], np.int64)
    begin = np.cumsum([0, *map(len, paths.values())])
    order = np.arange(len(parts)) + 2 * np.repeat(np.arange(len(paths)), np.diff(begin)) + 1
    head = begin[:-1] + 2 * np.arange(len(paths))
    made.append(
        _woven(
            (head, [_ref(out.numbers(paths)), b"("]),
            (order[is_text], [_ref(numbers[is_text])]),
            (order[~is_text], [_whole(numbers[~is_text])]),
            (head + np.diff(begin) + 1, [b"t"]),
        )
    )
    made += b"" if said.paths is None else b"u", text("storage_data"), b"}("

    def add_places(items: IntArray, where: list[_Part], *, with_start: bool) -> None:
        of_file, begin, nbytes, data = places[:, items]
        row = [index, fqn, _ref(names[said.value[items]]), offset, *where, b"ub", place, file]
        row += [_ref(first_file + of_file), offset, _whole(begin), length, _whole(nbytes)]
        row += [start, _whole(data), b"ub"] if with_start else [b"ub"]
        made.append(_rows(*row, count=len(items))[0])

    hint, known = np.arange(len(rows)) - np.searchsorted(value, value), places[3, rows] >= 0
    for which in (known, ~known):
        where = [_ref(begins[which]), number, _whole(hint[which])]
        add_places(rows[which], where, with_start=which is known)
    add_places(objects, [b"N", number, b"N"], with_start=False)
    return Body(b"".join([*made, b"u"]), out.memo_size)


def encode_plain_metadata(
    body: Body, files: Iterable[str], columns: torch_layout.Columns | None = None, **others: Any
) -> bytes:
    """Make `.metadata` of a body, fifty times as fast as from objects; `columns` say the same."""
    out = _Writer()
    out.begin()
    out.define_texts(files)
    out.made.append(body.raw)
    out.memo_size = body.memo_size
    for key, value in others.items():
        out.made.append(out.text(key))
        out.save(value)
    out.made.append(b"ub")
    return out.finished(b"" if columns is None else msgspec.msgpack.encode(columns))


_Part = bytes | tuple[bytes, int, IntArray]
"""What rows have here: the same bytes, or an opcode and a number of so many bytes."""
_BLOCK_ROWS = 1 << 16


def _ref(numbers: IntArray) -> _Part:
    """Return references to objects in the memo."""
    return (b"h", 1, numbers) if numbers.max(initial=0) < 1 << 8 else (b"j", 4, numbers)


def _whole(numbers: IntArray) -> _Part:
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if least < 0:  # opcodes of up to two bytes have no sign
        most = max(most, -1 - least, 1 << 16)
    return *_opcode_of(most), numbers


def _int(number: int) -> bytes:
    opcode, nbytes = _opcode_of(number)
    return opcode + number.to_bytes(nbytes, "little")


def _head_of(nbytes: int) -> bytes:
    """Return what stands before a text of so many bytes."""
    return b"\x8c" + bytes((nbytes,)) if nbytes < 256 else b"X" + nbytes.to_bytes(4, "little")


def _opcode_of(most: int) -> tuple[bytes, int]:
    """Return the opcode for whole numbers up to this one, and their bytes."""
    widths = ((8, b"K", 1), (16, b"M", 2), (31, b"J", 4), (63, b"\x8a\x08", 8))
    return next((opcode, nbytes) for bits, opcode, nbytes in widths if most < 1 << bits)


def _rows(*parts: _Part, count: int) -> tuple[bytes, int]:
    """Return `count` rows, end to end, and the length of each."""
    whole = [(part, 0, np.zeros(0, np.int64)) if isinstance(part, bytes) else part for part in parts]
    width = sum(len(raw) + nbytes for raw, nbytes, _ in whole)
    made: list[bytes] = []
    for low in range(0, count, _BLOCK_ROWS):
        table, at = np.empty((min(_BLOCK_ROWS, count - low), width), np.uint8), 0
        for raw, nbytes, numbers in whole:
            table[:, at : at + len(raw)] = np.frombuffer(raw, np.uint8)
            at += len(raw) + nbytes
            if nbytes:
                some = numbers[low : low + _BLOCK_ROWS].astype(f"<u{nbytes}")
                table[:, at - nbytes : at] = some[:, None].view(np.uint8)
        made.append(table.tobytes())
    return b"".join(made), width


def _woven(*tables: tuple[IntArray, Sequence[_Part]]) -> bytes:
    """Return rows of several tables in the order of the numbers of these rows; if they are equal, in that of the tables."""
    counts, rows = [len(at) for at, _ in tables], [_rows(*parts, count=len(at)) for at, parts in tables]
    order = np.argsort(np.concatenate([at for at, _ in tables]), kind="stable")
    widths = np.repeat([width for _, width in rows], counts)
    starts = np.empty(len(order), np.int64)
    starts[order] = np.cumsum(widths[order]) - widths[order]
    made = np.empty(widths.sum(), np.uint8)
    for at, (raw, width) in zip(np.split(starts, np.cumsum(counts)[:-1]), rows, strict=True):
        if len(at):
            # Elements that begin at every byte, and overlap.
            np.ndarray(len(made) - width + 1, f"V{width}", made, strides=(1,))[at] = np.frombuffer(raw, f"V{width}")
    return made.tobytes()


_Pickler: Any = pickle._Pickler
"""The pickler in Python, whose names for classes can be changed."""


class _Writer(_Pickler):  # type: ignore[misc]  # see above
    """
    A pickle in the making. A string or a size that comes again is a reference to the first.

    Any other object is pickled as Python does it, our classes under torch's names.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def __init__(self) -> None:
        self.made: list[bytes] = [b"\x80\x04"]
        super().__init__(types.SimpleNamespace(write=self.made.append), protocol=4)
        self.unknown: set[str] = set()
        """Classes and functions that shardkeep would refuse to load."""
        self.known: dict[Any, int] = {}
        """Where texts, sizes and names are in the memo."""
        self.memo_size = 0

    def begin(self) -> list[bytes]:
        """Write the classes and the fields that rows refer to, and return what rows have of each."""
        first = [self.define(self.named, *_CLASSES[kind]) + b")\x81}(" for kind in _KINDS]
        nothing = self.define(self.named, *_CLASSES[metadata.BytesStorageMetadata]) + b")\x81"
        return [*first, nothing, *(self.define(self.text, field) for field in _FIELDS.split())]

    def define(self, encode: Callable[..., bytes], *values: Any) -> bytes:
        """Write a value that is only referred to later, and return the reference."""
        self.made += encode(*values), b"0"
        return encode(*values)

    def define_texts(self, texts: Iterable[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        raw = [text.encode("utf-8", "surrogatepass") for text in new]
        heads = {nbytes: _head_of(nbytes) for nbytes in {*map(len, raw)}}
        self.made += b"(", *[heads[len(each)] + each + b"\x94" for each in raw], b"1"
        self.known.update(zip(new, range(self.memo_size, self.memo_size + len(new)), strict=True))
        self.memo_size += len(new)

    def numbers(self, keys: Iterable[Any]) -> IntArray:
        """Return where what is known is in the memo."""
        return np.array([*map(self.known.__getitem__, keys)], np.int64)

    def sizes(self, ndim: IntArray, matrix: IntArray) -> IntArray:
        """Write the rows of a padded matrix as sizes, and return where each is in the memo."""
        numbers = np.empty(len(matrix), np.int64)
        for low in range(0, len(matrix), _BLOCK_ROWS):
            some = slice(low, low + _BLOCK_ROWS)
            padded = np.where(np.arange(matrix.shape[1]) < ndim[some, None], matrix[some], 0)
            distinct, which = distinct_rows(np.column_stack([ndim[some], padded]))
            sizes = [tuple(row[1 : 1 + row[0]]) for row in distinct.tolist()]
            self.made += b"(", *[self.size(size) for size in sizes if size not in self.known], b"1"
            numbers[some] = self.numbers(sizes)[which]
        return numbers

    def _first(self, key: Any, opcodes: bytes) -> bytes:
        self.known[key] = self.memo_size
        self.memo_size += 1
        return opcodes + b"\x94"

    def _known(self, key: Any) -> bytes | None:
        return self.get(self.known[key]) if key in self.known else None

    def text(self, text: str) -> bytes:
        if (found := self._known(text)) is not None:
            return found
        raw = text.encode("utf-8", "surrogatepass")
        return self._first(text, _head_of(len(raw)) + raw)

    def size(self, size: Ints) -> bytes:
        return self._known(size) or self._first(
            size, self.named("torch", "Size") + b"(" + b"".join(map(_int, size)) + b"t\x85R"
        )

    def named(self, module: str, name: str) -> bytes:
        key = module, name, "global"
        return self._known(key) or self._first(key, self.text(module) + self.text(name) + b"\x93")

    def properties(self, dtype: str, requires_grad: bool, pinned: bool) -> bytes:
        """Return `TensorProperties` of a strided, contiguous tensor, in the form that every torch reads."""
        key = dtype, requires_grad, pinned
        if (found := self._known(key)) is not None:
            return found
        # Memoized while it is empty, as Python does it: the scan of a pickle (`format.pickles`) is faster then.
        made = self._first(key, self.named(*_CLASSES[metadata.TensorProperties]) + b")\x81")
        made += b"(" + self.named("torch", dtype) + self.named("torch.serialization", "_get_layout")
        made += self.text("torch.strided") + b"\x85R" + (b"\x88" if requires_grad else b"\x89")
        made += self.named(*_CLASSES[metadata._MEM_FORMAT_ENCODING]) + b"K\x00\x85R"
        return made + (b"\x88tb" if pinned else b"\x89tb")

    def finished(self, behind: bytes = b"") -> bytes:
        """Return the pickle and what is behind it, sealed."""
        if self.unknown:
            log.warning(
                "the checkpoint's metadata contain %s, which shardkeep refuses to load: before loading, call"
                " torch.serialization.add_safe_globals with these classes, or set SHARDKEEP_ALLOW_PICKLE=1",
                ", ".join(sorted(self.unknown)),
            )
        return torch_layout.sealed([*self.made, pickle.STOP], behind)

    def memoize(self, obj: Any) -> None:
        self.memo[id(obj)] = self.memo_size, obj
        self.memo_size += 1
        self.write(pickle.MEMOIZE)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = _CLASSES.get(obj) if isinstance(obj, type) else None
        if known is not None:
            self.write(self.named(*known))
            return
        called = name or getattr(obj, "__qualname__", None) or obj.__name__
        module = pickle.whichmodule(obj, called)  # type: ignore[attr-defined]  # typeshed lacks it
        if (module, called) not in {*torch_layout.safe_globals(), *plain_names(), *_known()}:
            self.unknown.add(f"{module}.{called}")
        super().save_global(obj, name)

    dispatch[type] = save_global
    dispatch[types.FunctionType] = save_global
    dispatch[type(metadata._MEM_FORMAT_ENCODING)] = save_global
    dispatch[torch.Size] = lambda self, size: self.write(self.size(tuple(size)))

    def _save_properties(self, obj: metadata.TensorProperties) -> None:
        # The state that every torch reads: no version reads the strides, and those before 2.15 refuse them.
        self.save_reduce(copyreg.__newobj__, (type(obj),), obj.__getstate__()[:5], obj=obj)  # type: ignore[attr-defined]

    dispatch[metadata.TensorProperties] = _save_properties
