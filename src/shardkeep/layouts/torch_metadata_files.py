"""
The files that metadata are kept in: `.metadata`, and beside a large one its columns, which a reader need not decode.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkeep.engine.reader import ReadableStore
from shardkeep.format.checksum import digest
from shardkeep.format.pickles import tail_of
from shardkeep.format.torch_columns import encode_columns
from shardkeep.layouts.column_metadata import columns_of, metadata_of
from shardkeep.layouts.torch import SUMS_SUFFIX, columns_name, read_index
from shardkeep.layouts.torch_pickle import decode_metadata, encode_metadata
from shardkeep.layouts.torch_values import Metadata, _StorageInfo

FROM_ITEMS = 1000
"""Fewer items are decoded in a few hundredths of a second, and not worth a file."""


class MetadataFiles(NamedTuple):
    """What a save puts beside its data files."""

    name: str
    data: bytes
    columns_name: str | None = None
    columns: bytes = b""


def metadata_files(metadata: Metadata, name: str) -> MetadataFiles:
    """Make `.metadata`, or that of one rank, and its columns."""
    items = metadata.storage_data
    columns = columns_of(metadata) if isinstance(items, dict) and len(items) >= FROM_ITEMS else None
    if columns is None:
        return MetadataFiles(name, encode_metadata(metadata))
    made = encode_columns(columns)
    key = digest(made)
    return MetadataFiles(name, encode_metadata(metadata, columns=key), columns_name(name, key), made)


def read_metadata(store: ReadableStore, name: str, *, where: str) -> Metadata:
    """
    Read metadata, of which entries are made when they are asked for if they have columns.

    Raises:
        BlobNotFound: there are none.
        DamagedCheckpoint: they are not what was saved.

    """
    found = read_index(store, name)
    if isinstance(found, bytes):
        return decode_metadata(found, where=where)
    return metadata_of(found.columns, where=found.name)


def read_file_names(store: ReadableStore, name: str, *, where: str) -> set[str]:
    """Return the names of all files that metadata speak of, their own columns among them."""
    found = read_index(store, name)
    if not isinstance(found, bytes):
        return _with_sums(set(found.columns.names.files)) | {found.name}
    tail = tail_of(found)
    return files_of(decode_metadata(found, where=where)) | ({columns_name(name, tail.columns)} if tail else set())


def files_of(metadata: Metadata) -> set[str]:
    """Return the names of all data files that metadata speak of, and of the digests beside them."""
    places = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    return _with_sums({place.relative_path for place in places.values() if isinstance(place, _StorageInfo)})


def _with_sums(names: set[str]) -> set[str]:
    return names | {f"{name}{SUMS_SUFFIX}" for name in names}
