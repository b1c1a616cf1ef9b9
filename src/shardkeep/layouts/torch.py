"""
Torch's layout: the files of a checkpoint, and the digests that we store beside them.

    .metadata               what the checkpoint holds and where; written last, it makes the checkpoint exist
    __<rank>_<n>.distcp     items, end to end
    __<rank>_<n>.distcp.sums    digests of the blocks of that file; torch ignores them
    __<rank>.metadata       instead of `.metadata`, if each rank saved on its own
    .metadata.<digest>.columns  a copy of `.metadata` that older versions of shardkeep wrote; nothing reads it

`.metadata` is a pickle, and a pickle names classes. `unpickle_metadata` looks them up in a table that its caller gives. Here
that table has small stand-ins, so that commands which only look at a checkpoint need no torch. `layouts.torch_pickle` gives
the classes that users of `shardkeep.dcp` see.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from shardkeep.errors import BlobNotFound, ChecksumMismatch, MalformedFile
from shardkeep.format.boxes import Box, Ints
from shardkeep.format.data_file import ALGORITHM, DIGEST_NBYTES, checksum_text, count_blocks, digest
from shardkeep.format.dtypes import DTYPES, DType, by_name
from shardkeep.format.pickles import Call, Names, New, load_pickle, load_trusted, numbers_of, plain_names
from shardkeep.options import Options, collector_paused
from shardkeep.storage.base import ReadableStore

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
SUMS_SUFFIX = ".sums"
MAX_METADATA_NBYTES = 4 << 30
_MAX_SUMS_NBYTES = 1 << 30
_MAX_BLOCK_NBYTES = 1 << 30
_OURS = re.compile(r"__\d+_\d+\.distcp(\.sums)?|(__\d+)?\.metadata\.[0-9a-f]{32}\.columns")
_RANKS_OWN = re.compile(r"__\d+\.metadata")
_WRITER = re.compile(r"__(\d{1,9})_")


def is_data(name: str) -> bool:
    """Return whether this is the name of a data file, of its digests, or of a copy of the metadata: files we may remove."""
    return _OURS.fullmatch(name) is not None


def is_metadata(name: str) -> bool:
    return name == METADATA_NAME or _RANKS_OWN.fullmatch(name) is not None


def with_sums(names: Iterable[str]) -> set[str]:
    """Return the names of data files, and of the files with their digests."""
    return {each for name in names for each in (name, f"{name}{SUMS_SUFFIX}")}


def writer_rank(name: str) -> int | None:
    found = _WRITER.match(name)
    return int(found[1]) if found else None


def metadata_name(rank: int | None) -> str:
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


class Sums(NamedTuple):
    """Size and checksum of a data file; sent to the coordinator and stored in the metadata."""

    nbytes: int
    block_nbytes: int
    checksum: str
    """Checksum of the file with the digests."""


class _SumsFile(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: str
    nbytes: int
    block_nbytes: int
    digests: bytes


def encode_sums(nbytes: int, block_nbytes: int, digests: bytes) -> tuple[Sums, bytes]:
    """Return what the metadata say of a data file, and the contents of the file with its digests."""
    file = _SumsFile(algorithm=ALGORITHM, nbytes=nbytes, block_nbytes=block_nbytes, digests=digests)
    data = msgspec.msgpack.encode(file)
    return Sums(nbytes=nbytes, block_nbytes=block_nbytes, checksum=checksum_text(digest(data))), data


def read_sums(store: ReadableStore, name: str, sums: Sums) -> bytes | None:
    """Read the digests of a data file; None if their file is missing."""
    own = f"{name}{SUMS_SUFFIX}"
    try:
        data = store.get(own, limit=_MAX_SUMS_NBYTES)
    except BlobNotFound:
        return None
    if checksum_text(digest(data)) != sums.checksum:
        hint = f"delete {own} to read {name} without checking it"
        raise ChecksumMismatch.of(own, "the digests are not what was saved", hint=hint, offset=0)
    try:
        file = msgspec.msgpack.decode(data, type=_SumsFile)
    except msgspec.MsgspecError as exc:
        raise MalformedFile.of(own, f"not a file of digests: {exc}") from exc
    if (
        file.algorithm != ALGORITHM
        or not 0 < file.block_nbytes <= _MAX_BLOCK_NBYTES
        or (file.nbytes, file.block_nbytes) != (sums.nbytes, sums.block_nbytes)
        or len(file.digests) != count_blocks(file.nbytes, file.block_nbytes) * DIGEST_NBYTES
    ):
        raise MalformedFile.of(own, f"these are not the digests of {name}")
    return file.digests


T = TypeVar("T")

_PACKAGE = "torch.distributed.checkpoint"
_SHARDS = "torch.distributed._shard.sharded_tensor.metadata"
HOMES: dict[str, tuple[str, ...]] = {
    name: (f"{_PACKAGE}.{module}", "shardkeep.layouts.torch_values")
    for module, names in (
        ("metadata", "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties"),
        ("metadata", "StorageMeta MetadataIndex _MEM_FORMAT_ENCODING"),
        ("filesystem", "_StorageInfo _StoragePrefix"),
    )
    for name in names.split()
}
"""The modules of each class: torch's, and ours, under which torch's writer pickles them."""


# -- the seal of the pickle --------------------------------------------------------------------------------------------

# A digest behind the pickle, where readers of pickles do not look, so that damage is detected:
#
#     pickle | mark, digest of the pickle
#
# Older versions put the digest of a second file between the two, which is ignored.

_MARK = f"shardkeep {ALGORITHM} ".encode()
_SEAL_NBYTES = len(_MARK) + DIGEST_NBYTES
_OLD_MARK = b"shardkeep columns "
_OLD_NBYTES = len(_OLD_MARK) + DIGEST_NBYTES
_BEHIND_MARK = b"shardkeep behind "
_BEHIND_NBYTES = len(_BEHIND_MARK) + 8


def sealed(raw: Sequence[bytes], behind: bytes = b"") -> bytes:
    """Return the parts of a pickle, what only shardkeep reads behind it, and a digest of both."""
    parts = [*raw, behind, _BEHIND_MARK, len(behind).to_bytes(8, "little")] if behind else raw
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    return b"".join([*parts, _MARK, whole.digest()])


def unsealed(data: bytes, where: str) -> tuple[bytes, bytes]:
    """
    Return the pickle that was sealed, or all bytes if they have no seal, and what is behind it.

    Raises `ChecksumMismatch` for a wrong seal.
    """
    raw, seal = data[:-_SEAL_NBYTES], data[-_SEAL_NBYTES:]
    if not seal.startswith(_MARK):
        return data, b""
    if seal[len(_MARK) :] != digest(raw):
        raise ChecksumMismatch.of(where, "the metadata are not what was saved", offset=0)
    if raw[-_OLD_NBYTES:].startswith(_OLD_MARK):
        return raw[:-_OLD_NBYTES], b""
    if raw[-_BEHIND_NBYTES:].startswith(_BEHIND_MARK):
        stop = len(raw) - _BEHIND_NBYTES
        start = max(0, stop - int.from_bytes(raw[-8:], "little"))
        return raw[:start], raw[start:stop]
    return raw, b""


# -- columns behind the pickle -----------------------------------------------------------------------------------------


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """What the pickle says, in columns: all that a load needs, without decoding an object for each chunk."""

    index: bytes
    """An index (`format.index`), whose values have names only."""
    items: bytes
    """Where the item of each chunk begins, then how long each is."""
    objects: bytes
    """The file of each value, where its item begins, and how long it is."""
    files: list[str]
    paths: dict[str, tuple[str | int, ...]]
    sums: dict[str, Sums]
    save_id: str


def columns_of(data: bytes, *, where: str) -> Columns | None:
    """Return the columns of a `.metadata`; None if it has none, because torch wrote it, or an item is one for torch alone."""
    _, behind = unsealed(data, where)
    try:
        return msgspec.msgpack.decode(behind, type=Columns) if behind else None
    except msgspec.MsgspecError as exc:
        raise MalformedFile.of(where, f"malformed columns behind the pickle: {exc}") from exc


# -- the decoder -------------------------------------------------------------------------------------------------------


def unpickle_metadata(data: bytes, names: Names, *, where: str) -> Any:
    """Load a sealed `.metadata` of `names`, plain values and safe globals; of anything if the user allows pickles."""
    raw, _ = unsealed(data, where)
    if Options().allow_pickle:
        trusted = {
            name: each.kind if isinstance(each, New) else (each.kind or each.make) if isinstance(each, Call) else each
            for name, each in names.items()
        }
        return load_trusted(raw, trusted, where=where)
    return load_pickle(raw, {**plain_names(), **names}, where=where, others=safe_globals)


def class_names(kinds: Mapping[str, T]) -> dict[tuple[str, str], T]:
    """Return values, given for classes by name, under every module and name that a pickle may have for the class."""
    found = {(home, name): kind for name, kind in kinds.items() for home in HOMES[name]}
    # Where torch before 2.3 had them.
    found[_SHARDS, "TensorProperties"] = kinds["TensorProperties"]
    found[_SHARDS, "MEM_FORMAT_ENCODING"] = kinds["_MEM_FORMAT_ENCODING"]
    return found


def safe_globals() -> Names:
    """Return what the user declared safe (`torch.serialization.add_safe_globals`), if torch is loaded."""
    torch = sys.modules.get("torch")
    found: dict[tuple[str, str], Any] = {}
    for entry in torch.serialization.get_safe_globals() if torch is not None else ():
        if isinstance(entry, tuple):  # with the name that it is pickled by
            kind, named = entry
            module, _, name = named.rpartition(".")
            found[module, name] = kind
        elif hasattr(entry, "__qualname__"):
            found[entry.__module__, entry.__qualname__] = entry
    return found


class ItemLocation(NamedTuple):
    file: str
    offset: int
    nbytes: int
    data_start: int | None
    """Where the bytes of a dense row-major tensor begin in the file; None if that is not known."""
    descriptors: tuple[str, ...]
    """The stream extensions it was written through."""


@dataclass(frozen=True)
class TensorEntry:
    dtype: DType
    shape: Ints
    chunks: list[tuple[Box, ItemLocation]]


@dataclass(frozen=True)
class TorchMetadata:
    tensors: dict[str, TensorEntry]
    objects: dict[str, ItemLocation]
    paths: dict[str, tuple[str | int, ...]]
    """The keys and positions that lead to each value in the nested state."""
    sums: dict[str, Sums]
    save_id: str


def decode_torch_metadata(data: bytes, *, where: str) -> TorchMetadata:
    """Raise `DamagedCheckpoint`, or `PickleRefused` for names that do not belong there."""
    found = unpickle_metadata(data, _stand_ins(), where=where)
    try:
        with collector_paused():
            return _metadata_of(found)
    except MalformedFile:
        raise
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as exc:
        raise MalformedFile.of(where, f"not the metadata of a checkpoint: {exc!r}") from exc


class _Fields:
    """Stands for one of torch's classes: takes whatever fields its pickle has."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # the properties of a tensor, with the dtype first
            self.dtype = state[0]
        else:
            vars(self).update(state)

    def _index(self) -> tuple[Any, Any]:
        offset = getattr(self, "offset", None)
        return getattr(self, "fqn", None), None if offset is None else numbers_of(offset)

    def __hash__(self) -> int:
        return hash(self._index())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fields) and self._index() == other._index()


@cache
def _stand_ins() -> Names:
    unchanged = Call(lambda value: value)
    names: dict[tuple[str, str], Any] = class_names(
        {name: unchanged if name == "_MEM_FORMAT_ENCODING" else New(_Fields) for name in HOMES}
    )
    names["torch", "Size"] = Call(numbers_of)
    names["torch.serialization", "_get_layout"] = unchanged
    # Not the rows of our own table, because a pickle could change them.
    names.update({("torch", dtype.name): dtype.name for dtype in DTYPES})
    return names


def _metadata_of(found: Any) -> TorchMetadata:
    locations: dict[tuple[str, Ints | None], ItemLocation] = {}
    for index, info in found.storage_data.items():
        offset = getattr(index, "offset", None)
        locations[index.fqn, None if offset is None else numbers_of(offset)] = item_location(info)

    def locate(name: str, offsets: Ints | None) -> ItemLocation:
        location = locations.get((name, offsets))
        if location is None and offsets is not None and not any(offsets):
            location = locations.get((name, None))
        if location is None:
            at = "" if offsets is None else f" at {offsets}"
            raise MalformedFile(f"the metadata do not say where {name!r}{at} is", key=name)
        return location

    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ItemLocation] = {}
    for name, entry in found.state_dict_metadata.items():
        if type(name) is not str:
            raise MalformedFile(f"a name that is a {type(name).__name__}")
        if not hasattr(entry, "chunks"):
            objects[name] = locate(name, None)
            continue
        dtype = entry.properties.dtype
        if type(dtype) is not str:
            raise MalformedFile(f"{dtype!r} is not a dtype")
        # Each once: planners that keep replicas in the plan describe the same chunk for each of them.
        boxes = dict.fromkeys(Box(numbers_of(chunk.offsets), numbers_of(chunk.sizes)) for chunk in entry.chunks)
        chunks = [(box, locate(name, box.offsets)) for box in boxes if box.volume]
        tensors[name] = TensorEntry(by_name(dtype), numbers_of(entry.size), chunks)
    said = getattr(found, "planner_data", None)
    paths: dict[str, tuple[str | int, ...]] = {}
    for name in found.state_dict_metadata:
        path = said.get(name) if isinstance(said, Mapping) else None
        sound = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        paths[name] = path if sound and path is not None else (name,)
    save_id = getattr(getattr(found, "storage_meta", None), "save_id", None)
    return TorchMetadata(tensors, objects, paths, sums_of(found), str(save_id or ""))


def item_location(info: Any) -> ItemLocation:
    offset, nbytes = info.offset, info.length
    start = vars(info).get("shardkeep_data_start")
    if type(info.relative_path) is not str or any(type(n) is not int or n < 0 for n in (offset, nbytes)):
        raise MalformedFile(f"a location that is not a range of a file: {vars(info)}")
    descriptors = tuple(str(each) for each in getattr(info, "transform_descriptors", None) or ())
    return ItemLocation(info.relative_path, offset, nbytes, start if type(start) is int else None, descriptors)


def sums_of(metadata: Any) -> dict[str, Sums]:
    try:
        return {name: Sums(*said) for name, said in (getattr(metadata, "shardkeep_sums", None) or {}).items()}
    except (AttributeError, TypeError) as exc:
        raise MalformedFile(f"the checksums of the data files in the metadata are malformed: {exc}") from exc
