"""
Which layout a checkpoint has, and opening it: native, or torch's.

The commit record is looked for first: a directory that has both was saved by us last, or is one that we converted.
"""

from __future__ import annotations

from shardkeep.errors import BlobNotFound, CheckpointNotFound
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import Record
from shardkeep.layout import native
from shardkeep.options import Options
from shardkeep.run import torch_open
from shardkeep.run.read import Headers, Source
from shardkeep.store.protocol import Store


def read_record(store: Store) -> Record:
    """
    Read what says that a checkpoint exists.

    Raises:
        CheckpointNotFound: there is none, of any layout.

    """
    try:
        return native.read_record(store)
    except CheckpointNotFound as exc:
        try:
            return torch_open.read_torch_record(store)
        except BlobNotFound:
            raise exc from None


def open_source(store: Store, record: Record, options: Options, headers: Headers | None = None) -> Source:
    """Open the checkpoint that a record is of."""
    if record.format == NATIVE:
        return Source(store, record, native.read_index(store, record), headers)
    return torch_open.open_torch(store, record, options)
