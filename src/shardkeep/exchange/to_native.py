"""
A checkpoint of any layout written anew in the native one: the same index over new files.

Nesting, plain values, ties and arrays of numpy go over as the bytes they are in the index. The work is planned and
committed as a save of one rank is, so the place is claimed, and the commit record is written last.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from shardkeep.exchange.streams import Progress, StoredPart, Streamed, check_written, streamed, write_streamed
from shardkeep.format.columns import Boxes
from shardkeep.format.dtypes import by_code
from shardkeep.format.header import HeaderEntry, build_header
from shardkeep.format.index import Index
from shardkeep.format.tree import decode_tree
from shardkeep.layout import leftovers, native
from shardkeep.options import Options
from shardkeep.plan.draft import Draft, PlainValues, TensorNames, encode, ints
from shardkeep.run.coordinating import Coordinator
from shardkeep.run.orders import Orders
from shardkeep.run.read import Source
from shardkeep.run.write import entry_of
from shardkeep.state.describe import Description, file_groups
from shardkeep.store.protocol import Store


def write_native(store: Store, source: Source, *, overwrite: bool, options: Options, progress: Progress | None) -> int:
    """
    Write all of a checkpoint, and return the bytes of its data files.

    Raises:
        CheckpointExists: one is there, and `overwrite` was not given.

    """
    coordinator = Coordinator(store, overwrite=overwrite)
    coordinator.label(source.record.step, source.record.meta)
    with leftovers.claiming(coordinator.save_id):
        try:
            rows = _rows(source.index)
            [told] = coordinator.plan([encode(_draft(source.index, rows))])
            orders = msgspec.msgpack.decode(told, type=Orders)
            files = _files(source.index, rows, orders)
            digests, _ = write_streamed(store, files, source, options, progress)
            check_written(store, files, digests, options)
            entries = [entry_of(file.job) for file in files]
            coordinator.collect([entries])
            coordinator.commit([b""])
        except BaseException:
            coordinator.withdraw()
            raise
    # Before what was replaced goes away: what was committed can be read.
    native.read_index(store, native.read_record(store))
    coordinator.tidy()
    return sum(entry.nbytes for entry in entries)


def _rows(index: Index) -> list[int]:
    """Return the tensors that have elements."""
    return [row for row in range(len(index.keys)) if math.prod(index.shape(row))]


def _draft(index: Index, rows: list[int]) -> Draft:
    """Describe the checkpoint as one rank would that held all of it."""
    tensors = index.tensors
    shape = np.asarray(tensors.shape, np.int64)
    keys = [raw.decode() for raw in index.keys.all()]
    held = np.zeros(len(keys), bool)
    held[rows] = True
    alias = np.where(held, np.asarray(tensors.alias, np.int64), -1)
    names = TensorNames(
        keys=keys,
        groups=_groups(index, keys),
        dtype=np.asarray(tensors.dtype, np.uint8).tobytes(),
        ndim=np.asarray(tensors.ndim, np.uint8).tobytes(),
        origin=np.asarray(tensors.origin, np.uint8).tobytes(),
    )
    values = PlainValues(
        keys=list(index.value_rows), data=[index.value_data.raw(row) for row in index.value_rows.values()]
    )
    return Draft(
        axes=shape.shape[1],
        names=encode(names),
        shape=shape.tobytes(),
        alias=alias.tobytes(),
        row_tensor=np.array(rows, np.int64).tobytes(),
        row_offsets=np.zeros_like(shape[rows]).tobytes(),
        row_sizes=shape[rows].tobytes(),
        check_replicas=False,
        row_digest=b"",
        tree=index.tree,
        values=encode(values),
    )


def _groups(index: Index, keys: list[str]) -> list[str]:
    tensors = index.tensors
    empty = np.zeros((0, tensors.shape.shape[1]), np.int64)
    described = Description(
        tree=decode_tree(index.tree),
        values={},
        leaves={},
        keys=keys,
        dtype=tensors.dtype,
        ndim=tensors.ndim,
        shape=tensors.shape,
        origin=tensors.origin,
        alias=tensors.alias,
        row_tensor=np.zeros(0, np.int64),
        boxes=Boxes(empty, empty),
        pieces=[],
    )
    return file_groups(described)


def _files(index: Index, rows: list[int], orders: Orders) -> list[Streamed]:
    """Turn orders into files: headers, and which box of which tensor each of their bytes comes from."""
    file, row = ints(orders.file), ints(orders.row)
    shape = (len(row), orders.axes)
    boxes = Boxes(ints(orders.offsets).reshape(shape), ints(orders.sizes).reshape(shape))
    made = []
    for at, (name, data_nbytes, block_nbytes) in enumerate(orders.files):
        parts: list[StoredPart] = []
        for piece in np.flatnonzero(file == at).tolist():
            tensor = rows[int(row[piece])]
            box = boxes.box(piece, int(index.tensors.ndim[tensor]))
            dtype = by_code(int(index.tensors.dtype[tensor]))
            parts.append(StoredPart(index.keys.raw(tensor).decode(), tensor, box, dtype))
        header = build_header(
            _entries(index, parts), save_id=orders.save_id, data_nbytes=data_nbytes, block_nbytes=block_nbytes
        )
        made.append(streamed(name, parts, header=header, block_nbytes=block_nbytes))
    return made


def _entries(index: Index, parts: list[StoredPart]) -> list[HeaderEntry]:
    entries, at = [], 0
    for part in parts:
        whole = part.box.sizes == index.shape(part.row)
        kind, shape = part.dtype.in_safetensors(part.box.sizes)
        name = native.chunk_name(part.key, None if whole else part.box)
        entries.append(HeaderEntry(name, kind, shape, at, at + part.nbytes))
        at += part.nbytes
    return entries
