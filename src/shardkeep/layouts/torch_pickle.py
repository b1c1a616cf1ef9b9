"""
`.metadata`, the file that lists the contents of a checkpoint in torch's layout: a pickle of torch's classes.

It is written without importing torch's classes, and read without running code: the names of torch's classes stand for
ours. A digest of the pickle follows it in the file, where torch does not look, so that damage is detected.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any, ClassVar

import torch

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Ints
from shardkeep.format.pickles import Call, Names, New, plain_names, sealed
from shardkeep.layouts import torch as torch_layout
from shardkeep.layouts import torch_values as metadata
from shardkeep.layouts.torch_values import Metadata, MetadataIndex, _StorageInfo
from shardkeep.options import collector_paused
from shardkeep.storage.base import ReadableStore

log = logging.getLogger("shardkeep")

_CLASSES: dict[type, tuple[str, str]] = {
    getattr(metadata, name): (homes[0], name) for name, homes in torch_layout.HOMES.items()
}


def encode_metadata(value: Metadata) -> bytes:
    """Pickle metadata as torch does, under the names of torch's classes, and seal it; warn of classes no reader knows."""
    file = io.BytesIO()
    writer = _Writer(file, protocol=4)
    with collector_paused():
        writer.dump(value)
    if writer.unknown:
        log.warning(
            "the checkpoint's metadata contain %s, which shardkeep refuses to load: before loading, call"
            " torch.serialization.add_safe_globals with these classes, or set SHARDKEEP_ALLOW_PICKLE=1",
            ", ".join(sorted(writer.unknown)),
        )
    return sealed(file.getvalue())


def read_metadata(store: ReadableStore, name: str, *, where: str) -> Metadata:
    """Read `.metadata`, or the metadata of one rank."""
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
        raise MalformedFile(f"{where}: no metadata of a checkpoint, but a {type(found).__name__}", file=where)
    for name in ("planner_data", "storage_data", "storage_meta", "version"):
        vars(found).setdefault(name, None)  # of an older torch
    try:
        _check_entries(found)
    except (AttributeError, TypeError) as exc:
        raise MalformedFile(f"{where}: not the metadata of a checkpoint: {exc}", file=where) from exc
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
    kinds = {kind.__name__: New(kind) for kind in _CLASSES if kind is not _GetLayout}
    encoding = metadata._MEM_FORMAT_ENCODING
    # A copy of each member, because a pickle could modify the enum's own.
    named = Call(lambda number: types.SimpleNamespace(name=encoding(number).name), encoding)
    names: dict[tuple[str, str], Any] = torch_layout.class_names({**kinds, encoding.__name__: named})
    # All dtypes, including those of quantized tensors, which only torch reads.
    names.update({("torch", str(each)[6:]): each for each in vars(torch).values() if isinstance(each, torch.dtype)})
    names["torch", "Size"] = Call(torch.Size)
    names["torch.serialization", "_get_layout"] = Call(_layout)
    return names


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise MalformedFile(f"there is no layout {name!r}")
    return found


_Pickler: Any = pickle._Pickler
"""The pickler in Python, whose names for classes can be changed."""


class _Writer(_Pickler):  # type: ignore[misc]  # see above
    """Pickles our classes under torch's names; writes the classes with thousands of instances as prepared opcodes."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def dump(self, obj: Any) -> None:
        self.unknown: set[str] = set()
        self._readable = {*torch_layout.safe_globals(), *plain_names(), *_known()}
        self._refs: dict[Any, bytes] = {}
        self._sizes: dict[torch.Size, bytes] = {}
        self._properties: dict[Any, bytes] = {}
        super().dump(obj)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = _CLASSES.get(obj) if isinstance(obj, type) else None
        if known is None:
            self._note(obj, name)
            super().save_global(obj, name)
            return
        self.save(known[0])
        self.save(known[1])
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def _note(self, obj: Any, name: str | None) -> None:
        name = name or getattr(obj, "__qualname__", None) or obj.__name__
        module = pickle.whichmodule(obj, name)  # type: ignore[attr-defined]  # typeshed lacks it
        if (module, name) not in self._readable:
            self.unknown.add(f"{module}.{name}")

    dispatch[type] = save_global
    dispatch[types.FunctionType] = save_global
    dispatch[type(metadata._MEM_FORMAT_ENCODING)] = save_global

    def _ref(self, obj: Any) -> bytes:
        """Return the opcodes that push an object from the memo; the object is added to the memo first if needed."""
        found = self._refs.get(obj)
        if found is None:
            self.save(obj)
            self.write(pickle.POP)
            found = self._refs[obj] = self.get(self.memo[id(obj)][0])
        return found

    def _size(self, size: torch.Size) -> bytes:
        found = self._sizes.get(size)
        if found is None:
            found = self._ref(torch.Size) + b"(" + b"".join(map(_int, size)) + b"t\x85R"
            self._sizes[size] = found
        return found

    def _fields(self, kind: type, **fields: bytes) -> bytes:
        held = [self._ref(key) + value for key, value in fields.items()]
        return self._ref(kind) + b")\x81}(" + b"".join(held) + b"ub"

    dispatch[torch.Size] = lambda self, size: self.write(self._size(size))

    def _save_plainly(self, obj: Any) -> None:
        """Pickle an object by its `__reduce_ex__`, because it has more attributes than its class defines."""
        self.save_reduce(*obj.__reduce_ex__(4), obj=obj)

    def _save_tensor(self, obj: metadata.TensorStorageMetadata) -> None:
        if not has_only_its_fields(obj):
            self._save_plainly(obj)
            return
        state = _properties_for_all(obj.properties)
        properties = self._properties.get(state)
        if properties is None:
            dtype, layout, requires_grad, memory_format, pin_memory = state
            # Torch pickles a layout as a call with its name.
            named = self._ref(_GetLayout) + self._ref(str(layout)) + b"\x85R"
            parts = [self._ref(dtype), named, _bool(requires_grad), self._ref(memory_format)]
            properties = self._ref(type(obj.properties)) + b")\x81(" + b"".join([*parts, _bool(pin_memory)]) + b"tb"
            self._properties[state] = properties
        kind = metadata.ChunkStorageMetadata
        chunks = [
            self._fields(kind, offsets=self._size(chunk.offsets), sizes=self._size(chunk.sizes)) for chunk in obj.chunks
        ]
        held = b"](" + b"".join(chunks) + b"e"
        self.write(self._fields(type(obj), properties=properties, size=self._size(obj.size), chunks=held))

    dispatch[metadata.TensorStorageMetadata] = _save_tensor

    def _save_properties(self, obj: metadata.TensorProperties) -> None:
        self.save_reduce(copyreg.__newobj__, (type(obj),), _properties_for_all(obj), obj=obj)  # type: ignore[attr-defined]

    dispatch[metadata.TensorProperties] = _save_properties

    def _save_index(self, obj: MetadataIndex) -> None:
        plain = (
            vars(obj).keys() <= _INDEX
            and type(obj.fqn) is str
            and (obj.offset is None or type(obj.offset) is torch.Size)
            and (obj.index is None or type(obj.index) is int)
        )
        if not plain:
            self._save_plainly(obj)
            return
        offset = b"N" if obj.offset is None else self._size(obj.offset)
        index = b"N" if obj.index is None else _int(obj.index)
        self.write(self._fields(MetadataIndex, fqn=self._ref(obj.fqn), offset=offset, index=index))

    dispatch[MetadataIndex] = _save_index

    def _save_place(self, obj: _StorageInfo) -> None:
        fields = {
            key: _int(value) if type(value) is int else self._ref(value) if type(value) is str else None
            for key, value in obj.__getstate__().items()
        }
        if None in fields.values():
            self._save_plainly(obj)
        else:
            self.write(self._fields(_StorageInfo, **fields))  # type: ignore[arg-type]  # none is None

    dispatch[_StorageInfo] = _save_place


def _properties_for_all(properties: metadata.TensorProperties) -> tuple[Any, ...]:
    """Return the state that every torch reads: no version reads the strides, and those before 2.15 refuse them."""
    return properties.__getstate__()[:5]


def has_only_its_fields(entry: metadata.TensorStorageMetadata) -> bool:
    """Return whether an entry and everything in it has exactly our classes and fields, with nothing added."""
    properties, chunks = entry.properties, entry.chunks
    return (
        type(entry) is metadata.TensorStorageMetadata
        and vars(entry).keys() == {"properties", "size", "chunks"}
        and type(properties) is metadata.TensorProperties
        and vars(properties).keys() == {"dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"}
        and type(properties.requires_grad) is type(properties.pin_memory) is bool
        and type(entry.size) is torch.Size
        and type(chunks) is list
        and all(
            type(chunk) is metadata.ChunkStorageMetadata
            and vars(chunk).keys() == _CHUNK
            and type(chunk.offsets) is type(chunk.sizes) is torch.Size
            for chunk in chunks
        )
    )


# -- metadata of a default planner, from plain values --------------------------------------------------------------------

PlainEntry = tuple[tuple[str, bool, bool], Ints, list[tuple[Ints, Ints]]]
"""A tensor: the name of its dtype, whether it requires a gradient and was pinned; its size; the boxes of its chunks."""
PlainPlace = tuple[str, Ints | None, int, str, int, int, int]
"""An item: name, offsets (None for an object), number of the chunk, file, offset, length, where data begin (-1: unknown)."""
_FIELDS = "properties size chunks offsets sizes fqn offset index relative_path length shardkeep_data_start"


def encode_plain_metadata(
    entries: Mapping[str, PlainEntry | None],
    paths: Mapping[str, tuple[str | int, ...]] | None,
    places: Iterable[PlainPlace],
    **others: Any,
) -> bytes:
    """Make the same pickle as `encode_metadata`, ten times as fast, from plain values; an entry None is an object."""
    out = _Opcodes()
    made, text, sized = out.made, out.text, out.size
    kinds = (metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, MetadataIndex, _StorageInfo)
    tensor, chunk, index, place = [out.define(kind, out.named(*_CLASSES[kind])) + b")\x81}(" for kind in kinds]
    nothing = out.define(None, out.named(*_CLASSES[metadata.BytesStorageMetadata])) + b")\x81"
    properties, size, chunks, offsets, sizes, fqn, offset, number, file, length, start = [
        out.define(field, _text(field)) for field in _FIELDS.split()
    ]

    def encode_entry(kind: tuple[str, bool, bool], shape: Ints, *boxes: tuple[Ints, Ints]) -> bytes:
        held = [tensor, properties, out.properties(*kind), size, sized(shape), chunks, b"]("]
        for at, extent in boxes:
            held += chunk, offsets, sized(at), sizes, sized(extent), b"ub"
        return b"".join([*held, b"eub"])

    def encode_place(at: Ints | None, hint: int, name: str) -> bytes:
        held = (b"N", number, b"N") if at is None else (sized(at), number, _int(hint))
        return b"".join([offset, *held, b"ub", place, file, text(name), offset])

    made += out.named(*_CLASSES[Metadata]), b")\x81}(", _text("state_dict_metadata"), b"}("
    for name, entry in entries.items():
        made += text(name), nothing if entry is None else out.again(encode_entry, *entry[:2], *entry[2])
    made += b"u", _text("planner_data"), b"N" if paths is None else b"}("
    for name, path in (paths or {}).items():
        made += text(name), b"("
        made += [text(part) if type(part) is str else out.value(part) for part in path]
        made.append(b"t")
    made += b"" if paths is None else b"u", _text("storage_data"), b"}("
    for name, where, hint, of_file, begin, nbytes, data in places:
        made += index, fqn, text(name), out.again(encode_place, where, hint, of_file), _int(begin), length, _int(nbytes)
        made += (b"ub",) if data < 0 else (start, _int(data), b"ub")
    made.append(b"u")
    for key, value in others.items():
        made += _text(key), out.value(value)
    made.append(b"ub.")
    return sealed(b"".join(made))


class _Opcodes:
    """A pickle in the making. A string or a size that comes again is a reference to the first."""

    def __init__(self) -> None:
        self.made: list[bytes] = [b"\x80\x04"]
        self._memo: dict[Any, bytes] = {}
        self._often: dict[Any, bytes] = {}

    def define(self, key: Any, opcodes: bytes) -> bytes:
        """Write a value that is only referred to later, and return the reference."""
        self.made += self._first(key, opcodes), b"0"
        return self._memo[key]

    def _first(self, key: Any, opcodes: bytes) -> bytes:
        at = len(self._memo)
        self._memo[key] = b"h" + bytes([at]) if at < 256 else b"j" + at.to_bytes(4, "little")
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
        """Return a string; like all of these, to be written at once."""
        return self._memo.get(text) or self._first(text, _text(text))

    def size(self, size: Ints) -> bytes:
        """Return a `torch.Size`."""
        return self._memo.get(size) or self._first(
            size, self.named("torch", "Size") + b"(" + b"".join(map(_int, size)) + b"t\x85R"
        )

    def named(self, module: str, name: str) -> bytes:
        """Return a class or a constant of a module."""
        key = module, name, "global"
        return self._memo.get(key) or self._first(key, self.text(module) + self.text(name) + b"\x93")

    def properties(self, dtype: str, requires_grad: bool, pinned: bool) -> bytes:
        """Return `TensorProperties` of a strided, contiguous tensor, in the form that every torch reads."""
        key = dtype, requires_grad, pinned
        if key in self._memo:
            return self._memo[key]
        made = self.named(*_CLASSES[metadata.TensorProperties]) + b")\x81(" + self.named("torch", dtype)
        made += (
            self.named("torch.serialization", "_get_layout")
            + self.text("torch.strided")
            + b"\x85R"
            + _bool(requires_grad)
        )
        made += self.named(*_CLASSES[metadata._MEM_FORMAT_ENCODING]) + b"K\x00\x85R" + _bool(pinned) + b"tb"
        return self._first(key, made)

    def value(self, value: Any) -> bytes:
        """Return a plain value, a path, or one of our classes."""
        if value is None or type(value) in (bool, int):
            return b"N" if value is None else _bool(value) if type(value) is bool else _int(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, PurePath):
            return (
                self.named("pathlib", "PosixPath" if value.as_posix() == str(value) else "WindowsPath")
                + b"("
                + b"".join(map(self.text, value.parts))
                + b"tR"
            )
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.value, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.value, value)) + b"e"
        if isinstance(value, dict):
            return b"}(" + b"".join(self.value(key) + self.value(each) for key, each in value.items()) + b"u"
        return self.named(*_CLASSES[type(value)]) + b")\x81" + self.value(vars(value)) + b"b"


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return (b"\x8c" + bytes([len(raw)]) if len(raw) < 256 else b"X" + len(raw).to_bytes(4, "little")) + raw


_CHUNK = {"offsets", "sizes"}
_INDEX = {"fqn", "offset", "index"}


class _GetLayout:
    """Stands for torch's function that makes a layout from its name."""


_CLASSES[_GetLayout] = ("torch.serialization", "_get_layout")


def _bool(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


_SMALL_INTS = [b"K" + bytes([number]) for number in range(256)]


def _int(number: int) -> bytes:
    if 0 <= number < 1 << 31:
        if number < 1 << 16:
            return _SMALL_INTS[number] if number < 1 << 8 else b"M" + number.to_bytes(2, "little")
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)
