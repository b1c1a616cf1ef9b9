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
from itertools import count, islice

import numpy as np

from shardkeep.conversion import pipeline
from shardkeep.conversion.select import Selection
from shardkeep.conversion.to_hf import names_in
from shardkeep.engine.reader import Source
from shardkeep.engine.torch_source import item_batches
from shardkeep.engine.torch_view import TorchView
from shardkeep.format.boxes import Boxes, Ints, whole
from shardkeep.format.data_file import ALIGNMENT
from shardkeep.format.torch_zip import frame_tensor
from shardkeep.layouts import orphans
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import DATA_SUFFIX, METADATA_NAME, SUMS_SUFFIX, Sums, encode_sums, with_sums
from shardkeep.layouts.torch_pickle import Contents, Kind, encode_body, encode_plain_metadata
from shardkeep.layouts.torch_publish import Commit
from shardkeep.options import Options
from shardkeep.storage.base import Store

_FILE_NBYTES = 4 << 30
_SHARED_FILE_NBYTES = 256 << 20
_FILES_OF_RANK = 4
"""If several ranks share the work, files are smaller: about as many of each rank, but none below the size above."""


_Item = tuple[str, memoryview | pipeline.TensorPart]


def write_torch_layout(
    store: Store, chosen: Selection, source: Source, how: pipeline.WriteArguments
) -> pipeline.Written:
    team, began_s, commit = how.team, time.time(), Commit(store)

    def describe() -> tuple[Contents, list[list[_Item]]]:
        contents, items = _describe(TorchView(source, tree=chosen.tree), source, how.options)
        items.sort(key=lambda item: isinstance(item[1], pipeline.TensorPart))  # objects first
        most_nbytes = _FILE_NBYTES
        if not team.world.solo:  # so many files that all ranks have about as much to write
            fair_nbytes = sum(data.nbytes for _, data in items) // (_FILES_OF_RANK * team.world.size)
            most_nbytes = min(_FILE_NBYTES, max(_SHARED_FILE_NBYTES, fair_nbytes))
        return contents, list(item_batches(items, lambda item: item[1].nbytes, most_nbytes=most_nbytes))

    def begin() -> list[str]:
        taken = set(names_in(store))
        if not how.overwrite and METADATA_NAME in taken:
            raise pipeline.already_there(store.url, "a checkpoint", METADATA_NAME)
        # A checkpoint that is there must stay whole until the commit: no file has a name of another.
        numbered = (f"__0_{number}{DATA_SUFFIX}" for number in count(commit.first_number()))
        return list(islice((name for name in numbered if name not in taken), len(groups)))

    contents, groups = team.alike(
        "lay out", describe, lambda it: [(name, data.nbytes) for group in it[1] for name, data in group]
    )
    names = team.on_rank_0("begin", begin, list[str])
    places: dict[str, tuple[int, int, int, int]] = {}
    files = [
        _lay_out(number, name, group, places) for number, (name, group) in enumerate(zip(names, groups, strict=True))
    ]
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
        data = encode_plain_metadata(
            encode_body(contents, np.array([places[key] for key in contents.kinds]).reshape(-1, 4).T, len(names)),
            names,
            storage_meta=protocol.StorageMeta(checkpoint_id=store.url, save_id=str(uuid.uuid4())),
            version=protocol.CURRENT_DCP_VERSION,
            shardkeep_sums={name: tuple(each) for name, each in sorted(sums.items())},
        )
        handed_over = True
        commit.publish(METADATA_NAME, data, sums=sums, own=list(sums), keep=with_sums(names), began_s=began_s)
        return pipeline.Written(names, sum(each.nbytes for each in sums.values()), set())

    try:
        written = team.gather("write", write, dict[str, Sums])
        # From here on only `Commit` removes files: it alone knows whether they were committed.
        handed_over = not team.leads
        return team.on_rank_0("publish", publish, pipeline.Written)
    except BaseException as error:
        # Rank 0 also removes those of a rank that died, unless another job may have written files of these names.
        everything = team.leads and not team.world.solo and getattr(error, "errno", None) != errno.EEXIST
        dead = [] if handed_over else names if everything else made
        orphans.discard(store, sorted(with_sums(dead)))
        raise


def _describe(view: TorchView, source: Source, options: Options) -> tuple[Contents, list[_Item]]:
    """Return what is stored, each value as one item, and the items."""
    kinds: dict[str, Kind | None] = {}
    shapes: list[Ints] = []
    items: list[_Item] = []
    for key in view.paths:  # in the order of the state
        row = view.rows.get(key)
        shapes.append(() if row is None else source.index.shape(row))
        if row is None:
            kinds[key] = None
            items.append((key, view.saved_object(key, options).getbuffer()))
        else:
            part = pipeline.TensorPart(key, row, whole(shapes[-1]), source.index.dtype(row))
            kinds[key] = part.dtype.name, False, False
            items.append((key, part))
    boxes, ndim = Boxes.of(list(map(whole, shapes))), np.array(list(map(len, shapes)), np.int64)
    return Contents(kinds, ndim, boxes.sizes, view.paths, np.arange(len(kinds)), boxes), items


def _lay_out(
    number: int, file: str, items: Sequence[_Item], places: dict[str, tuple[int, int, int, int]]
) -> pipeline.FileParts:
    """Lay items end to end in a file, each tensor framed as an archive of torch's, and note where each one lies."""
    parts: list[pipeline.Part] = []
    at = 0
    for name, data in items:
        own: list[pipeline.Part] = [data]
        start = -1
        if isinstance(data, pipeline.TensorPart):
            head, tail = frame_tensor(data.dtype, data.box.sizes, at=at, alignment=ALIGNMENT)
            own = [memoryview(head), data, memoryview(tail)]
            start = at + len(head)
        nbytes = sum(part.nbytes for part in own)
        places[name] = number, at, nbytes, start
        parts += own
        at += nbytes
    return pipeline.file_parts(file, parts)
