"""
Writes a checkpoint of any layout as one that `torch.distributed.checkpoint` reads: tensors whole, streamed.

Names are those that torch's flattening gives the nested state. Digests stand beside the data files, as in every
checkpoint of torch's layout that shardkeep saves; `.metadata` is written last, by rank 0 if several ranks share the work.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any

import torch

from shardkeep.conversion import pipeline
from shardkeep.conversion.select import Selection
from shardkeep.conversion.to_hf import names_in
from shardkeep.engine.reader import Source
from shardkeep.engine.torch_source import item_batches
from shardkeep.engine.torch_view import StoredObject, TorchView
from shardkeep.errors import CheckpointError, CheckpointExists
from shardkeep.format.boxes import whole
from shardkeep.format.torch_zip import frame_tensor
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import DATA_SUFFIX, METADATA_NAME, SUMS_SUFFIX, Sums, encode_sums
from shardkeep.layouts.torch_pickle import data_files_of, encode_metadata, set_sums
from shardkeep.layouts.torch_publish import Commit
from shardkeep.options import Options
from shardkeep.storage.base import Store

_FILE_NBYTES = 4 << 30
_SHARED_FILE_NBYTES = 256 << 20
_FILES_OF_RANK = 4
"""If several ranks share the work, files are smaller: about as many of each rank, but none below the size above."""
_ALIGNMENT = 4096
"""A tensor's bytes begin at a multiple of this, a page, for direct I/O."""


_Item = tuple[protocol.MetadataIndex, memoryview | pipeline.TensorPart]
"""An object as `torch.save` writes it, or a tensor, and what it is called."""


def write_torch_layout(
    store: Store, chosen: Selection, source: Source, how: pipeline.WriteArguments
) -> pipeline.Written:
    """Write what was selected of a checkpoint into a place."""
    team, began_s, commit = how.team, time.time(), Commit(store)
    described: list[protocol.Metadata] = []

    def group() -> list[list[_Item]]:
        metadata, items = _describe(TorchView(source, store.url, tree=chosen.tree), source, store.url, how.options)
        described.append(metadata)
        items.sort(key=lambda item: isinstance(item[1], pipeline.TensorPart))  # objects first
        most_nbytes = _FILE_NBYTES
        if not team.world.solo:  # so many files that all ranks have about as much to write
            fair_nbytes = sum(item[1].nbytes for item in items) // (_FILES_OF_RANK * team.world.size)
            most_nbytes = min(_FILE_NBYTES, max(_SHARED_FILE_NBYTES, fair_nbytes))
        return list(item_batches(items, lambda item: item[1].nbytes, most_nbytes=most_nbytes))

    def begin() -> list[str]:
        taken = set(names_in(store))
        if not how.overwrite and METADATA_NAME in taken:
            raise CheckpointExists(
                f"{store.url}: a checkpoint is already there ({METADATA_NAME})",
                hint="pass overwrite=True (--overwrite) to replace it, or give another place",
            )
        # A checkpoint that is there must stay whole until the commit: no file has a name of another.
        numbered = (f"__0_{number}{DATA_SUFFIX}" for number in count(commit.first_number()))
        return list(islice((name for name in numbered if name not in taken), len(groups)))

    groups = team.alike(
        "lay out", group, lambda groups: [(at.fqn, data.nbytes) for each in groups for at, data in each]
    )
    [metadata] = described
    names = team.on_rank_0("begin", begin, list[str])
    files = [_lay_out(name, each, metadata.storage_data) for name, each in zip(names, groups, strict=True)]
    made, handed_over = list[str](), False

    def write() -> dict[str, Sums]:
        mine = team.share(files, lambda file: file.job.nbytes)
        digests, _ = pipeline.write_parts(store, mine, source, how.options, how.progress)
        made.extend(file.job.name for file in mine)
        pipeline.verify_written(store, mine, digests, how.options)
        sums: dict[str, Sums] = {}
        for file, of_file in zip(mine, digests, strict=True):
            name = file.job.name
            sums[name], encoded = encode_sums(file.job.data_nbytes, file.job.block_nbytes, of_file)
            store.put(f"{name}{SUMS_SUFFIX}", encoded, replace=True)
        return sums

    def publish() -> pipeline.Written:
        nonlocal handed_over
        sums = {name: of_file for of_rank in written for name, of_file in of_rank.items()}
        set_sums(metadata, sums)
        data = encode_metadata(metadata)
        handed_over = True
        commit.publish(METADATA_NAME, data, sums=sums, own=list(sums), keep=data_files_of(metadata), began_s=began_s)
        return pipeline.Written(names, sum(each.nbytes for each in sums.values()), set())

    try:
        written = team.gather("write", write, dict[str, Sums])
        # From here on only `Commit` removes files: it alone knows whether they were committed.
        handed_over = not team.leads
        return team.on_rank_0("publish", publish, pipeline.Written)
    except BaseException as error:
        # Rank 0 also removes those of a rank that died, unless another job may have written files of these names.
        everything = team.leads and not team.world.solo and getattr(error, "errno", None) != errno.EEXIST
        for name in [] if handed_over else names if everything else made:
            for each in (name, f"{name}{SUMS_SUFFIX}"):
                with suppress(CheckpointError):
                    store.delete(each)
        raise


def _describe(view: TorchView, source: Source, to: str, options: Options) -> tuple[protocol.Metadata, list[_Item]]:
    """Return the metadata of the new checkpoint, without locations, and all items to write."""
    seen = view.metadata
    entries: dict[str, Any] = {}
    items: list[_Item] = []
    for index, place in seen.storage_data.items():
        if isinstance(place, StoredObject):
            entries[index.fqn] = protocol.BytesStorageMetadata()
            items.append((protocol.MetadataIndex(index.fqn), view.saved_object(place, options).getbuffer()))
    for key, entry in seen.state_dict_metadata.items():
        if isinstance(entry, protocol.TensorStorageMetadata):
            row, box = view.rows[key], whole(tuple(entry.size))
            chunk = protocol.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            entries[key] = protocol.TensorStorageMetadata(entry.properties, entry.size, [chunk])
            part = pipeline.TensorPart(key, row, box, source.index.dtype(row))
            items.append((protocol.MetadataIndex(key, chunk.offsets, 0), part))
    described = {key: entries[key] for key in seen.state_dict_metadata}  # in the order of the state
    meta = protocol.StorageMeta(checkpoint_id=to, save_id=str(uuid.uuid4()))
    metadata = protocol.Metadata(
        described,
        planner_data=seen.planner_data,
        storage_data={},
        storage_meta=meta,
        version=protocol.CURRENT_DCP_VERSION,
    )
    return metadata, items


def _lay_out(
    name: str, items: Sequence[_Item], places: dict[protocol.MetadataIndex, protocol._StorageInfo]
) -> pipeline.FileParts:
    """Lay items end to end in a file, each tensor framed as an archive of torch's, and note where each one lies."""
    parts: list[pipeline.Part] = []
    at = 0
    for index, data in items:
        own: list[pipeline.Part] = [data]
        start = None
        if isinstance(data, pipeline.TensorPart):
            frame = frame_tensor(data.dtype, data.box.sizes, at=at, alignment=_ALIGNMENT)
            own = [memoryview(frame.head), data, memoryview(frame.tail)]
            start = at + len(frame.head)
        nbytes = sum(part.nbytes for part in own)
        places[index] = protocol._StorageInfo(name, at, nbytes)
        places[index].shardkeep_data_start = start
        parts += own
        at += nbytes
    return pipeline.file_parts(name, parts)
