"""
Writes a checkpoint of any layout, or a selection of one, as a native checkpoint.

Nesting, plain values, ties and numpy arrays are copied as they are encoded in the index. It is a save like any other: the place
is claimed, files go through codecs if asked for, and the commit record is written last. If several ranks share the work, each
says that it holds all of the checkpoint, so the plan divides the tensors among them as it divides replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from shardkeep.codecs.coded_store import DecodingStore
from shardkeep.conversion import pipeline
from shardkeep.conversion.select import Selection, selection_contents
from shardkeep.engine.codecs import Codecs, FileCodecs
from shardkeep.engine.native_save import NativeSave, PlannedSave, boxes_of, data_name, make_manifest
from shardkeep.engine.reader import Source
from shardkeep.engine.save_session import SaveArguments, WrittenFiles
from shardkeep.engine.sources import open_native
from shardkeep.format.boxes import Boxes, ints
from shardkeep.format.data_file import HeaderEntry, build_header
from shardkeep.format.dtypes import by_code
from shardkeep.format.index import Index
from shardkeep.format.record import FileEntry, checked_meta, checked_step
from shardkeep.format.values import decode_tree
from shardkeep.layouts import native
from shardkeep.plan.save_plan import RankManifest, RankWritePlan, encode
from shardkeep.state.describe import Description
from shardkeep.storage.base import Store


def write_native(
    store: Store, chosen: Selection, source: Source, how: pipeline.WriteArguments, *, codecs: Codecs
) -> pipeline.Written:
    """Write what was selected, with the step and meta of the source; `CheckpointExists` if a checkpoint is there already."""
    index, rows = selection_contents(chosen, source.index)
    options, team = how.options, how.team
    request = SaveArguments(store, overwrite=how.overwrite, codecs=codecs, options=options)
    layout = NativeSave(request, store, team.world)
    labels = checked_step(source.record.step), checked_meta(source.record.meta)
    filled = [row for row in range(len(index.keys)) if math.prod(index.shape(row))]
    planned: list[PlannedSave] = []
    mine, handed_over = list[FileEntry](), False

    def plan(_: list[bytes]) -> list[bytes]:
        made, answers = layout.plan([_manifest(index, filled)] * team.world.size)
        planned.append(made)
        return [encode((layout.save_id, answer)) for answer in answers]

    def write() -> tuple[WrittenFiles, set[int]]:
        orders = msgspec.msgpack.decode(answer, type=RankWritePlan)
        names = [data_name(file, team.world.rank, team.world.size, save_id) for file in orders.files]
        coding = FileCodecs(orders, names, layout.keys)
        files = _files(index, [(row, rows[row]) for row in filled], orders, names, save_id)
        digests, infinite = pipeline.write_parts(coding.over(store), files, source, options, how.progress)
        mine.extend(coding.entry_of(file.job) for file in files)
        coded = DecodingStore(store, mine, coding.chains) if coding.chains else store
        pipeline.verify_written(coded, files, digests, options, entries=mine)
        return WrittenFiles(mine), infinite

    def publish() -> pipeline.Written:
        files = [of_rank for of_rank, _ in written]
        layout.check_written(files)
        layout.commit(planned[0], files, labels)
        # Make sure that the new checkpoint opens before the old one is removed.
        open_native(store, native.read_record(store), options)
        layout.tidy()
        sizes = dict(each for of_rank in files for entry in of_rank.files for each in entry.at_rest)
        return pipeline.Written(list(sizes), sum(sizes.values()), set().union(*(each for _, each in written)))

    with layout.claimed():
        try:
            save_id, answer = msgspec.msgpack.decode(team.meeting.agree("plan", bytes, plan), type=tuple[str, bytes])
            written = team.gather("write", write, tuple[WrittenFiles, set[int]])
            handed_over = True  # from here on the files may be committed, and only rank 0 knows
            return team.on_rank_0("commit", publish, pipeline.Written)
        except BaseException:
            if team.leads:
                layout.withdraw()
            elif not handed_over:
                layout.discard([name for entry in mine for name, _ in entry.at_rest])
            raise


def _manifest(index: Index, rows: list[int]) -> RankManifest:
    """Describe the checkpoint as a rank that holds all of it."""
    tensors, shape = index.tensors, np.asarray(index.tensors.shape, np.int64)
    described = Description(
        tree=decode_tree(index.tree),
        values={},
        leaves={},
        keys=[raw.decode() for raw in index.keys.all()],
        dtype=np.asarray(tensors.dtype, np.uint8),
        ndim=np.asarray(tensors.ndim, np.uint8),
        shape=shape,
        origin=np.asarray(tensors.origin, np.uint8),
        alias=np.asarray(tensors.alias, np.int64),
        row_tensor=np.array(rows, np.int64),
        boxes=Boxes(np.zeros_like(shape[rows]), shape[rows]),
        pieces=[],
    )
    stored = [index.value_data.raw(row) for row in index.value_rows.values()]
    values = encode((list(index.value_rows), stored))
    return replace(make_manifest(described, allow_pickle=False, check_replicas=False), values=values)


def _files(
    index: Index, filled: Sequence[tuple[int, int]], orders: RankWritePlan, names: Sequence[str], save_id: str
) -> list[pipeline.FileParts]:
    """Turn orders into files: headers, and which box of which tensor each of their bytes comes from."""
    file, row = ints(orders.file), ints(orders.row)
    shape = np.asarray(index.tensors.shape, np.int64)[[filled[at][0] for at in row.tolist()]]
    boxes = boxes_of(orders, Boxes(np.zeros_like(shape), shape))
    made = []
    for at, (name, planned) in enumerate(zip(names, orders.files, strict=True)):
        parts: list[pipeline.TensorPart] = []
        entries: list[HeaderEntry] = []
        start = 0
        for piece in np.flatnonzero(file == at).tolist():
            tensor, stored_row = filled[int(row[piece])]
            box = boxes.box(piece, int(index.tensors.ndim[tensor]))
            dtype = by_code(int(index.tensors.dtype[tensor]))
            part = pipeline.TensorPart(index.keys.raw(tensor).decode(), stored_row, box, dtype)
            kind, stored_shape = dtype.in_safetensors(box.sizes)
            chunk = native.chunk_name(part.key, None if box.sizes == index.shape(tensor) else box)
            entries.append(HeaderEntry(chunk, kind, stored_shape, start, start + part.nbytes))
            parts.append(part)
            start += part.nbytes
        sidecar, block_nbytes = orders.sidecar and planned.chain is None, planned.block_nbytes
        header = build_header(
            entries, save_id=save_id, data_nbytes=planned.data_nbytes, block_nbytes=block_nbytes, sidecar=sidecar
        )
        made.append(pipeline.file_parts(name, parts, header=header, block_nbytes=block_nbytes, sidecar=sidecar))
    return made
