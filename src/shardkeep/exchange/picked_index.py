"""
What was picked of a checkpoint as the contents of a native one: a flat dict under the names outside.
"""

from __future__ import annotations

import numpy as np

from shardkeep.exchange.picking import Picked
from shardkeep.exchange.to_native import Contents
from shardkeep.format.columns import matrix_of
from shardkeep.format.index import Chunks, Index, Tensors, decode_index, encode_index
from shardkeep.format.tree import Container, encode_tree


def contents_of(picked: Picked, index: Index) -> Contents:
    """Describe what was picked of the checkpoint that has this index."""
    keys = sorted([*picked.tensors, *picked.ties], key=str.encode)
    row_of = {key: row for row, key in enumerate(keys)}
    parts = [picked.tensors[picked.ties.get(key, key)] for key in keys]
    axes = max((len(part.box.sizes) for part in parts), default=0)
    none = np.zeros((0, axes), np.int64)
    values = [(name, index.value_data.raw(index.value_rows[key])) for name, key in picked.values.items()]
    encoded = encode_index(
        keys=keys,
        tensors=Tensors(
            dtype=np.array([part.dtype.code for part in parts], np.uint8),
            ndim=np.array([len(part.box.sizes) for part in parts], np.uint8),
            shape=matrix_of([part.box.sizes for part in parts], axes, 1),
            # What was converted may be of a dtype that numpy has not.
            origin=np.array(
                [int(index.tensors.origin[p.row]) if p.dtype is index.dtype(p.row) else 0 for p in parts], np.uint8
            ),
            alias=np.array([row_of[picked.ties.get(key, key)] for key in keys], np.int64),
        ),
        chunk_ends=np.zeros(len(keys), np.int64),
        chunks=Chunks(none, none, np.zeros(0, np.int64), np.zeros(0, np.int64)),
        values=sorted(values, key=lambda entry: entry[0].encode()),
        tree=encode_tree(Container("dict", tuple((name, None) for name in picked.names))),
    )
    return Contents(decode_index(encoded, where="what was picked"), [part.row for part in parts])
