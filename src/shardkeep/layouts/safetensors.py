"""
Safetensors files: their headers, their names as Hugging Face and torch have them, and what their metadata may hold.

Headers of any origin are checked before they are used: every byte of the file must belong to exactly one tensor, and all
sizes must fit the file before memory is allocated. Files may be symbolic links, as in a Hugging Face cache.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from shardkeep.errors import MalformedFile, UnsupportedLeaf, UnsupportedVersion, WrongSize
from shardkeep.format.data_file import ALIGNMENT, MAX_HEADER_NBYTES, HeaderEntry, digest, encode_header
from shardkeep.format.dtypes import DTYPES, DType, Ints
from shardkeep.storage.base import BlobReader, ReadableStore, read_range

_FIRST_NBYTES = 64 << 10
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_BY_SAFETENSORS = {row.safetensors: row for row in DTYPES if row.safetensors is not None}


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    dtype: DType
    shape: Ints
    """In torch's elements, which are bytes for packed dtypes."""
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SafetensorsFile:
    path: str
    tensors: dict[str, HeaderTensor]
    metadata: dict[str, str]
    nbytes: int
    data_start: int
    """Where the header ends."""
    digest: bytes

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


def read_header(path: str, opens: ReadableStore) -> SafetensorsFile:
    with closing(opens.open(path)) as reader:
        raw, total = _raw_header(path, reader), reader.nbytes
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise MalformedFile.of(path, f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise MalformedFile.of(path, "the header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise MalformedFile.of(path, "__metadata__ is not a map of texts")
    data_start = 8 + len(raw)
    parts = {key: _part(path, key, entry, data_start) for key, entry in header.items()}
    _check_whole(path, parts, data_start, total)
    return SafetensorsFile(path, parts, metadata, total, data_start, digest(raw))


def _raw_header(path: str, reader: BlobReader) -> bytes:
    first = read_range(reader, 0, min(_FIRST_NBYTES, reader.nbytes))
    length = int.from_bytes(first[:8], "little")
    if len(first) > 8 and first[8] != ord("{"):
        raise MalformedFile.of(path, "not a safetensors file: its header does not begin with {")
    if len(first) < 8 or length > reader.nbytes - 8:
        why = f"{reader.nbytes} bytes, too few for its header of {length}"
        raise WrongSize.of(path, why, hint="the file was cut short, or is not a safetensors file")
    if length > MAX_HEADER_NBYTES:
        why = f"a header of {length} bytes, more than the {MAX_HEADER_NBYTES} that safetensors allows"
        raise MalformedFile.of(path, why)
    rest = read_range(reader, len(first), max(0, 8 + length - len(first)))
    return bytes(first + rest)[8 : 8 + length]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _part(path: str, key: str, entry: Any, data_start: int) -> HeaderTensor:
    def malformed(why: str, hint: str = "") -> MalformedFile:
        return MalformedFile.of(path, f"tensor {key!r}{why}", hint=hint, key=key)

    try:
        said = msgspec.convert(entry, _HeaderEntry)
    except msgspec.ValidationError as exc:
        raise malformed(f" is not described as in safetensors files: {exc}") from exc
    shape, (begin, end), dtype = said.shape, said.data_offsets, _BY_SAFETENSORS.get(said.dtype)
    if dtype is None:
        raise malformed(
            f" is of dtype {said.dtype!r}, which torch has no type for", "is the file newer than this shardkeep?"
        )
    if dtype.packed > 1:
        if not shape or shape[-1] % dtype.packed:
            raise malformed(f" of {dtype.safetensors} has shape {shape}: not in whole bytes")
        shape = [*shape[:-1], shape[-1] // dtype.packed]
    part = HeaderTensor(dtype, tuple(shape), data_start + begin)
    if part.nbytes != end - begin:
        raise malformed(
            f": shape {shape} of {dtype.name} takes {part.nbytes} bytes, and data_offsets {begin} to {end} do not"
        )
    return part


def _check_whole(path: str, parts: Mapping[str, HeaderTensor], data_start: int, total: int) -> None:
    """Make sure that the tensors fill the file without gap or overlap."""
    at, last = data_start, ""
    for key, part in sorted(parts.items(), key=lambda entry: (entry[1].start, entry[1].nbytes)):
        if part.start != at:
            wrong = "overlaps" if part.start < at else "does not follow"
            before = f"{repr(last) if last else 'the header'}, which ends at {at}"
            raise MalformedFile.of(path, f"tensor {key!r} at byte {part.start} {wrong} {before}", key=key)
        at, last = part.start + part.nbytes, key
    if at != total:
        why = f"{total} bytes, and the header says {at}" + (f" (up to tensor {last!r})" if last else "")
        raise WrongSize.of(path, why, hint="the file was cut short or is not complete yet" if total < at else "")


def alignment_of(nbytes: int) -> int:
    """Return the largest power of two, up to a page, that divides a size: in falling order, all are aligned without gaps."""
    return min(nbytes & -nbytes, ALIGNMENT) if nbytes else ALIGNMENT


def build_model_header(parts: Mapping[str, tuple[DType, Ints]], metadata: Mapping[str, str], *, where: str) -> bytes:
    """Make the header of a file with these tensors, in this order; data begins at a multiple of `ALIGNMENT`."""
    entries: list[HeaderEntry] = []
    at = 0
    for key, (dtype, shape) in parts.items():
        if dtype.safetensors is None or (dtype.packed > 1 and not shape):
            raise UnsupportedLeaf(
                f"{where}: {key!r} is of dtype {dtype.name}, which safetensors files cannot hold",
                hint=f"leave it out: drop={key!r} of a conversion, exclude={key!r} of an export",
                key=key,
            )
        if key == "__metadata__":
            raise UnsupportedLeaf(f"{where}: a safetensors file cannot hold a tensor called '__metadata__'", key=key)
        stop = at + math.prod(shape) * dtype.itemsize
        entries.append(HeaderEntry(key, *dtype.in_safetensors(shape), at, stop))
        at = stop
    return bytes(encode_header(entries, dict(metadata)))


INDEX_NAME = _metadata_fn = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"

# The names and values of torch's `_hf_utils`.
DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"
NUM_BYTES_FOR_HEADER_LEN = 8
SHARDED_DIR_NAME = "sharded"
HF_DCP_VERSION: float = 1.0
DCP_VERSION_KEY = "DCP_VERSION"
DCP_SHARDING_INFO_KEY = CUSTOM_METADATA_KEY = "DCP_SHARDING_INFO"
"""In files of a distributed checkpoint: where each tensor begins in its whole tensor."""
SAVED_OFFSETS_KEY = "saved_offsets"
FORMAT_KEY = "format"
FORMAT_VALUE = "pt"
SAVE_ID_KEY = "shardkeep.save_id"
"""The save of a file: files of two saves are never read as one checkpoint."""
FILE_COUNT_KEY = "shardkeep.files"
"""The number of files of that save, so that a missing file is noticed."""


def file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """Return the name of file `index` of `largest_index`, or of one shard of it; all numbers begin at 1."""
    numbers = {"cpt_idx": f"{index:05}", "num_files": f"{largest_index:05}"}
    if shard_index is None:
        return FILE_NAME.format(**numbers) + SUFFIX
    return SHARDED_FILE_NAME.format(shard_idx=f"{shard_index:05}", **numbers) + SUFFIX


def marked_name(name: str, save_id: str) -> str:
    """Return a name with the mark of a save, which no file of another save has."""
    return f"{name.removesuffix(SUFFIX)}-{save_id.replace('-', '')[:8]}{SUFFIX}"


# -- the rest of a state, in the metadata ------------------------------------------------------------------------------

# Nesting, plain values, ties and which tensors were numpy arrays. Other tools ignore this text. It is JSON; the nesting
# and plain values are encoded by `format.values`, as base64, so no pickle is needed.

STATE_KEY = "shardkeep.state"
_VERSION = 1
_RESERVED = frozenset({FORMAT_KEY, CUSTOM_METADATA_KEY, SAVE_ID_KEY, FILE_COUNT_KEY, STATE_KEY})


def tie_metadata(ties: Mapping[str, str]) -> dict[str, str]:
    """
    Return the ties that metadata can name as the safetensors library does: a name that was left out, and the tensor
    that it shares. Keys with another meaning name no tie.
    """
    return {name: owner for name, owner in ties.items() if name not in _RESERVED}


class HeaderState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a state except its tensors."""

    version: int = _VERSION
    step: int | None = None
    meta: dict[str, Any] = {}
    tree: bytes
    values: dict[str, bytes]
    """Plain values by flat name, encoded."""
    numpy: list[str] = []
    ties: dict[str, str] = {}
    """Names of tensors that share the memory of another one, which is in the file."""


def decode_header_state(text: str, *, where: str) -> HeaderState:
    try:
        found = msgspec.json.decode(text, type=HeaderState)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise MalformedFile.of(where, f"{STATE_KEY} cannot be read: {exc}") from exc
    if found.version > _VERSION:
        raise UnsupportedVersion(
            f"{where}: {STATE_KEY} is of version {found.version}; this shardkeep reads up to {_VERSION}",
            hint="upgrade shardkeep",
        )
    return found
