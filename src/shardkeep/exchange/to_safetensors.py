"""
A checkpoint of any layout written anew as safetensors files: tensors under their flat names, and all else in a header.

What safetensors cannot hold stands in the metadata of the first file (`layout.safetensors_state`): nesting, plain
values, ties, step and meta. So nothing is lost on the way there and back, and other tools see the tensors alone.
"""

from __future__ import annotations

from shardkeep.errors import CheckpointError, UnsupportedLeaf
from shardkeep.exchange.models import write_model
from shardkeep.exchange.streams import Progress, StoredPart
from shardkeep.format.region import whole
from shardkeep.format.tree import decode_tree, leaf_keys
from shardkeep.layout.safetensors_state import STATE_KEY, KeptState, encode_state, to_text
from shardkeep.options import Options
from shardkeep.run.read import Source
from shardkeep.run.safetensors_open import find_safetensors
from shardkeep.store.protocol import Store


def write_safetensors(
    store: Store,
    source: Source,
    *,
    max_shard_bytes: float,
    overwrite: bool,
    options: Options,
    progress: Progress | None,
) -> int:
    """
    Write all of a checkpoint into a place, and return the bytes of its files.

    Raises:
        UnsupportedLeaf: a tensor is of a dtype that safetensors does not have.
        CheckpointExists: a checkpoint is there, and `overwrite` was not given.

    """
    tensors = _tensors(source)
    kept = encode_state(_state(source))
    written = write_model(
        store,
        tensors,
        source,
        max_shard_bytes=max_shard_bytes,
        metadata={STATE_KEY: kept},
        config=None,
        overwrite=overwrite,
        options=options,
        progress=progress,
        replaces_others=True,
    )
    _check_opens(store, source, options)
    return written.nbytes


def _check_opens(store: Store, source: Source, options: Options) -> None:
    """Insist that the place, with all that lies in it, is opened as what was converted."""
    found = find_safetensors(store)
    meant = source.index
    if found is not None:
        index = found.open(options).index
        if (index.tree, set(index.tensor_rows), set(index.value_rows)) == (
            meant.tree,
            set(meant.tensor_rows),
            set(meant.value_rows),
        ):
            return
    raise CheckpointError(
        f"{store.url}: the files were written, but other files there keep them from being opened as one checkpoint",
        hint="convert into an empty place",
    )


def _tensors(source: Source) -> dict[str, StoredPart]:
    index = source.index
    parts: dict[str, StoredPart] = {}
    for key in leaf_keys(decode_tree(index.tree)):
        row = index.tensor_rows.get(key)
        if row is None or int(index.tensors.alias[row]) != row:
            continue
        dtype, shape = index.dtype(row), index.shape(row)
        if dtype.safetensors is None or (dtype.packed > 1 and not shape):
            raise UnsupportedLeaf(
                f"{key!r} is of dtype {dtype.name}, which safetensors files cannot hold",
                hint=f"leave it out: drop={key!r} (--drop)",
                key=key,
            )
        if key == "__metadata__":
            raise UnsupportedLeaf("safetensors files cannot hold a tensor called '__metadata__'", key=key)
        parts[key] = StoredPart(key, row, whole(shape), dtype)
    return parts


def _state(source: Source) -> KeptState:
    index, record = source.index, source.record
    alias = index.tensors.alias.tolist()
    rows = index.tensor_rows
    names = list(rows)
    return KeptState(
        step=record.step,
        meta=record.meta,
        tree=to_text(index.tree),
        values={key: to_text(index.value_data.raw(row)) for key, row in index.value_rows.items()},
        numpy=[key for key, row in rows.items() if int(index.tensors.origin[row]) == 1],
        ties={key: names[alias[row]] for key, row in rows.items() if alias[row] != row},
    )
