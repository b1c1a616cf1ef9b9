"""
`.metadata`, the file that lists the contents of a checkpoint in torch's layout: a pickle of torch's classes.

It is written without importing torch's classes, and read without running code: the names of torch's classes stand for ours.
"""

from __future__ import annotations

import copyreg
import itertools
import logging
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import msgspec
import torch

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Ints
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
    names = {place.relative_path for place in places.values() if isinstance(place, _StorageInfo)}
    return names | {f"{name}{torch_layout.SUMS_SUFFIX}" for name in names}


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


PlainEntry = tuple[tuple[str, bool, bool], Ints, list[tuple[Ints, Ints]]]
"""A tensor: the name of its dtype, whether it requires a gradient and was pinned; its size; the boxes of its chunks."""
PlainPlace = tuple[str, Ints | None, int, str, int, int, int]
"""An item: name, offsets (None for an object), number of the chunk, file, offset, length, where data begin (-1: unknown)."""
_FIELDS = "properties size chunks offsets sizes fqn offset index relative_path length shardkeep_data_start"


def encode_plain_metadata(
    entries: Mapping[str, PlainEntry | None],
    paths: Mapping[str, Sequence[str | int]] | None,
    places: Iterable[PlainPlace],
    columns: torch_layout.Columns | None = None,
    **others: Any,
) -> bytes:
    """Make `.metadata` from plain values, ten times as fast as from objects; None is an object's. `columns` say the same."""
    out = _Writer()
    made, text, sized = out.made, out.text, out.size
    kinds = (metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, MetadataIndex, _StorageInfo)
    tensor, chunk, index, place = [out.define(out.named, *_CLASSES[kind]) + b")\x81}(" for kind in kinds]
    nothing = out.define(out.named, *_CLASSES[metadata.BytesStorageMetadata]) + b")\x81"
    properties, size, chunks, offsets, sizes, fqn, offset, number, file, length, start = [
        out.define(text, field) for field in _FIELDS.split()
    ]

    def encode_entry(kind: tuple[str, bool, bool], shape: Ints, *boxes: tuple[Ints, Ints]) -> bytes:
        held = [tensor, properties, out.properties(*kind), size, sized(shape), chunks, b"]("]
        for at, extent in boxes:
            held += chunk, offsets, sized(at), sizes, sized(extent), b"ub"
        return b"".join([*held, b"eub"])

    def encode_place(at: Ints | None, hint: int, name: str) -> bytes:
        held = (b"N", number, b"N") if at is None else (sized(at), number, _int(hint))
        return b"".join([offset, *held, b"ub", place, file, text(name), offset])

    with collector_paused():
        made += out.named(*_CLASSES[Metadata]), b")\x81}(", text("state_dict_metadata"), b"}("
        for name, entry in entries.items():
            made += text(name), nothing if entry is None else out.again(encode_entry, *entry[:2], *entry[2])
        made += b"u", text("planner_data"), b"N" if paths is None else b"}("
        for name, path in (paths or {}).items():
            parts = [text(part) if type(part) is str else _int(part) for part in path]  # type: ignore[arg-type]
            made += text(name), b"(", *parts, b"t"
        made += b"" if paths is None else b"u", text("storage_data"), b"}("
        for name, where, hint, of_file, begin, nbytes, data in places:
            made += index, fqn, out.known[name], out.again(encode_place, where, hint, of_file), _int(begin), length
            made += (_int(nbytes), b"ub") if data < 0 else (_int(nbytes), start, _int(data), b"ub")
        made.append(b"u")
        for key, value in others.items():
            made.append(text(key))
            out.save(value)
        made.append(b"ub")
    return out.finished(b"" if columns is None else msgspec.msgpack.encode(columns))


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
        self.known: dict[Any, bytes] = {}
        self._often: dict[Any, bytes] = {}
        self._numbers = itertools.count()

    def define(self, encode: Callable[..., bytes], *values: Any) -> bytes:
        """Write a value that is only referred to later, and return the reference."""
        self.made += encode(*values), b"0"
        return encode(*values)

    def _first(self, key: Any, opcodes: bytes) -> bytes:
        self.known[key] = self.get(next(self._numbers))
        return opcodes + b"\x94"

    def again(self, encode: Callable[..., bytes], *values: Any) -> bytes:
        """Return what `encode` makes of some values, which may come often."""
        key = encode, values
        found = self._often.get(key)
        if found is None:
            first = encode(*values)
            self._often[key] = encode(*values)  # with references to what the first one defines
            return first
        return found

    def text(self, text: str) -> bytes:
        found = self.known.get(text)
        if found is None:
            raw = text.encode("utf-8", "surrogatepass")
            head = b"\x8c" + bytes([len(raw)]) if len(raw) < 256 else b"X" + len(raw).to_bytes(4, "little")
            found = self._first(text, head + raw)
        return found

    def size(self, size: Ints) -> bytes:
        return self.known.get(size) or self._first(
            size, self.named("torch", "Size") + b"(" + b"".join(map(_int, size)) + b"t\x85R"
        )

    def named(self, module: str, name: str) -> bytes:
        key = module, name, "global"
        return self.known.get(key) or self._first(key, self.text(module) + self.text(name) + b"\x93")

    def properties(self, dtype: str, requires_grad: bool, pinned: bool) -> bytes:
        """Return `TensorProperties` of a strided, contiguous tensor, in the form that every torch reads."""
        key = dtype, requires_grad, pinned
        if key in self.known:
            return self.known[key]
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
        return torch_layout.sealed(b"".join([*self.made, pickle.STOP]), behind)

    def memoize(self, obj: Any) -> None:
        self.memo[id(obj)] = next(self._numbers), obj
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


_SMALL_INTS = [b"K" + bytes([number]) for number in range(256)]


def _int(number: int) -> bytes:
    if 0 <= number < 1 << 31:
        if number < 1 << 16:
            return _SMALL_INTS[number] if number < 1 << 8 else b"M" + number.to_bytes(2, "little")
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)
