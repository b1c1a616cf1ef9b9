"""
`.metadata` of torch's layout as plain data, read without torch: which tensors, objects and files a checkpoint has.

What the pickle names of torch's stands here for small classes with the same fields.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Box, Ints
from shardkeep.format.dtypes import DTYPES, DType, by_name
from shardkeep.format.pickles import Call, Names, New, load_pickle, load_trusted, names_of, plain_names, unsealed
from shardkeep.layouts.torch import Sums
from shardkeep.options import Options

_PACKAGE = "torch.distributed.checkpoint"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"


class ItemLocation(NamedTuple):
    """Where an item lies."""

    file: str
    offset: int
    nbytes: int
    data_start: int | None
    """Where the bytes of a dense row-major tensor begin in the file; None where that is not known."""
    descriptors: tuple[str, ...]
    """The extensions it was written through."""


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor."""

    dtype: DType
    shape: Ints
    chunks: list[tuple[Box, ItemLocation]]


@dataclass(frozen=True)
class TorchMetadata:
    """What a checkpoint of torch's layout holds."""

    tensors: dict[str, TensorEntry]
    objects: dict[str, ItemLocation]
    paths: dict[str, tuple[str | int, ...]]
    """The keys and positions that lead to each value in the nested state."""
    sums: dict[str, Sums] = field(default_factory=dict)
    save_id: str = ""


def decode_torch_metadata(data: bytes, *, where: str) -> TorchMetadata:
    """
    Read `.metadata`.

    Raises:
        ChecksumMismatch: its seal is not that of its contents.
        PickleRefused: it names what is no part of such a file.
        MalformedFile: it is no such file, or contradicts itself.

    """
    raw = unsealed(data, where)
    if Options().allow_pickle:
        found = load_trusted(raw, _plainly(_torch_names()), where=where)
    else:
        found = load_pickle(raw, {**plain_names(), **_torch_names()}, where=where, others=_safe_globals)
    try:
        return _metadata_of(found)
    except MalformedFile:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as exc:
        raise MalformedFile(f"{where}: not the metadata of a checkpoint: {exc!r}", file=where) from exc


class _Fields:
    """Stands for a class of torch's: whatever fields its pickle gives it."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of the properties of a tensor, the dtype is first
            self.dtype = state[0]
        else:
            vars(self).update(state)

    def __hash__(self) -> int:
        return hash((getattr(self, "fqn", None), getattr(self, "offset", None)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fields) and _index(self) == _index(other)


def _index(value: _Fields) -> tuple[Any, Any]:
    return getattr(value, "fqn", None), getattr(value, "offset", None)


class _DTypeName(NamedTuple):
    """Stands for a dtype. The rows of our own table are not given to a pickle, which could change them."""

    name: str


def _as_it_is(value: Any) -> Any:
    return value


@cache
def _torch_names() -> Names:
    """Return what of torch's the pickle may name."""
    names: dict[tuple[str, str], Any] = {}
    for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                 "TensorProperties", "StorageMeta", "MetadataIndex"):  # fmt: skip
        for home in (f"{_PACKAGE}.metadata", "shardkeep.layouts.torch_values", "shardkeep.protocol.metadata"):
            names[home, name] = New(_Fields)
    for name in ("_StorageInfo", "_StoragePrefix"):
        for home in (f"{_PACKAGE}.filesystem", "shardkeep.layouts.torch_values", "shardkeep.protocol.stored_items"):
            names[home, name] = New(_Fields)
    names[_SHARDS, "TensorProperties"] = New(_Fields)
    names[f"{_PACKAGE}.metadata", "_MEM_FORMAT_ENCODING"] = names[_SHARDS, "MEM_FORMAT_ENCODING"] = Call(_as_it_is)
    names["torch", "Size"] = Call(tuple)
    names["torch.serialization", "_get_layout"] = Call(_as_it_is)
    names.update({("torch", dtype.name): _DTypeName(dtype.name) for dtype in DTYPES})
    return names


def _plainly(names: Names) -> Mapping[tuple[str, str], Any]:
    """Return the classes and functions themselves, for a pickle that is trusted."""
    return {
        name: each.kind if isinstance(each, New) else each.make if isinstance(each, Call) else each
        for name, each in names.items()
    }


def _safe_globals() -> Names:
    """Return what else the pickle may name: if torch is there, what the user told it to be safe."""
    torch = sys.modules.get("torch")
    return names_of(torch.serialization.get_safe_globals() if torch is not None else [])


def _metadata_of(found: Any) -> TorchMetadata:
    places = {_key(index): item_location(info) for index, info in found.storage_data.items()}
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ItemLocation] = {}
    for name, entry in found.state_dict_metadata.items():
        if type(name) is not str:
            raise MalformedFile(f"a name that is a {type(name).__name__}")
        if hasattr(entry, "chunks"):
            shape = _ints(entry.size)
            tensors[name] = TensorEntry(_dtype(entry.properties), shape, list(_chunks(name, entry.chunks, places)))
        else:
            objects[name] = _place_of(places, name, None)
    meta = getattr(found, "storage_meta", None)
    paths = getattr(found, "planner_data", None)
    return TorchMetadata(
        tensors=tensors,
        objects=objects,
        paths=_paths(paths if isinstance(paths, Mapping) else {}, [*tensors, *objects]),
        sums=sums_of(getattr(found, "shardkeep_sums", None) or {}),
        save_id=str(getattr(meta, "save_id", None) or ""),
    )


def _key(index: Any) -> tuple[str, Ints | None]:
    return index.fqn, None if getattr(index, "offset", None) is None else _ints(index.offset)


def item_location(info: Any) -> ItemLocation:
    """Return where an item lies, from what metadata hold for it."""
    offset, nbytes = info.offset, info.length
    start = vars(info).get("shardkeep_data_start")
    if type(info.relative_path) is not str or any(type(n) is not int or n < 0 for n in (offset, nbytes)):
        raise MalformedFile(f"a place that is no range of a file: {vars(info)}")
    descriptors = tuple(str(each) for each in getattr(info, "transform_descriptors", None) or ())
    return ItemLocation(info.relative_path, offset, nbytes, start if type(start) is int else None, descriptors)


def _chunks(
    name: str, chunks: Any, places: Mapping[tuple[str, Ints | None], ItemLocation]
) -> Iterator[tuple[Box, ItemLocation]]:
    for chunk in chunks:
        offsets, sizes = _ints(chunk.offsets), _ints(chunk.sizes)
        if 0 not in sizes:
            yield Box(offsets, sizes), _place_of(places, name, offsets)


def _place_of(places: Mapping[tuple[str, Ints | None], ItemLocation], name: str, offsets: Ints | None) -> ItemLocation:
    place = places.get((name, offsets))
    if place is None and offsets is not None and not any(offsets):
        place = places.get((name, None))
    if place is None:
        at = "" if offsets is None else f" at {offsets}"
        raise MalformedFile(f"the metadata do not say where {name!r}{at} is", key=name)
    return place


def _ints(numbers: Any) -> Ints:
    made = tuple(numbers)
    if any(type(n) is not int or n < 0 for n in made):
        raise MalformedFile(f"{made} are no sizes")
    return made


def _dtype(properties: Any) -> DType:
    if type(properties.dtype) is not _DTypeName:
        raise MalformedFile(f"{properties.dtype!r} is no dtype")
    return by_name(properties.dtype.name)


def _paths(said: Mapping[Any, Any], names: list[str]) -> dict[str, tuple[str | int, ...]]:
    paths: dict[str, tuple[str | int, ...]] = {}
    for name in names:
        path = said.get(name)
        sound = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        paths[name] = path if sound and path is not None else (name,)
    return paths


def sums_of(said: Any) -> dict[str, Sums]:
    """Return what is known of each data file, from what metadata hold of them."""
    return {
        name: Sums(nbytes=nbytes, block_nbytes=block_nbytes, checksum=checksum)
        for name, (nbytes, block_nbytes, checksum) in said.items()
    }
