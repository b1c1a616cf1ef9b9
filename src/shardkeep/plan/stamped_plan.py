"""
The plan of a save by very many ranks, most of which hold alike.

Ranks that hold the same boxes are a group of replicas, and groups whose boxes have the same sizes are of one kind. One
group of each kind is planned, and its plan is stamped for the others, with their offsets: right if no two groups hold
the same, and then the chunks tile every tensor, which is checked. Tensors that several groups hold whole, such as
scalars of an optimizer, are written by the lowest rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as chained
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from shardkeep.errors import CheckpointError
from shardkeep.format.boxes import ITEMSIZES, Boxes, IntArray, hash_rows, multipliers, segment_starts, tiled
from shardkeep.format.index import Chunks, Tensors
from shardkeep.plan.save_plan import (
    SMALL_NBYTES,
    ChainOf,
    CheckpointPlan,
    Merged,
    PlannedChunks,
    PlannedFile,
    RankManifest,
    SampledReplicas,
    Shards,
    assign_writers,
    find_differing,
    lay_out,
    merge,
    pairs_of,
)

LEAST_SHARDS = 1 << 16
"""Of all ranks together. Fewer are planned in no time, each for itself."""
_BLOCK_ROWS = 1 << 17
"""So many chunks are stamped at a time, if no tensor has more."""
_GROUPS_AT_ONCE = 64
"""Whose offsets are unpacked."""

Columns = tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True)
class Stamp:
    """Groups of one kind and size, and the plan of the first of them."""

    plan: CheckpointPlan
    """Its ranks are numbered within the group."""
    ranks: IntArray
    """The ranks of each group, a row for each."""
    offsets: npt.NDArray[Any]
    """For each row of a group's manifests that is unlike those before it, and each group."""
    column: IntArray
    """Of each row of a group's manifests, where it is in `offsets`."""

    def plans(self) -> Iterator[tuple[list[int], CheckpointPlan]]:
        """Return the ranks and the plan of every group."""
        plan, pieces = self.plan, self.plan.pieces
        column, cut = self.column[pieces.row], pieces.cut.any()  # only if pieces are cut, ranks are sent boxes
        for at, ranks in enumerate(self.ranks.tolist()):
            if cut:
                moved = pieces.offsets + self.offsets[column, at] - self.offsets[column, 0]
                plan = replace(self.plan, pieces=replace(pieces, offsets=moved))
            yield ranks, plan

    def chunks(self, low: int, high: int, first_file: IntArray, like: Columns) -> Columns:
        """
        Return tensor, offsets, sizes, file and start of the chunks of all groups in the tensors from `low` to `high`, in
        types like those of the last four.
        """
        pieces = self.plan.pieces
        pieces = pieces.take(np.flatnonzero((pieces.tensor >= low) & (pieces.tensor < high)))
        pieces = pieces.take(np.argsort(pieces.tensor, kind="stable"))
        offsets = self.offsets[column := self.column[pieces.row]]
        moved = pieces.offsets - self.offsets[column, 0]
        if moved.any():
            offsets = offsets + moved[:, None]
        own_file = pieces.file - np.searchsorted(self.plan.ranks, pieces.rank)
        file = first_file[self.ranks.T].astype(like[2].dtype)[pieces.rank] + own_file.astype(like[2].dtype)[:, None]
        sizes, start = pieces.sizes.astype(like[1].dtype), pieces.start.astype(like[3].dtype)
        tensor, sizes, start = (np.repeat(each, len(self.ranks), axis=0) for each in (pieces.tensor, sizes, start))
        return tensor, offsets.astype(like[0].dtype).reshape(sizes.shape), sizes, file.reshape(-1), start


@dataclass(frozen=True)
class StampedPlan:
    """All that rank 0 plans: a `CheckpointPlan`, but with stamps, and the chunks of all ranks as they are in the index."""

    keys: list[str]
    tensors: Tensors
    files: list[PlannedFile]
    ranks: IntArray
    sampled: SampledReplicas
    stamps: list[Stamp]
    chunk_ends: IntArray
    chunks: Chunks

    def by_rank(self) -> tuple[list[IntArray], Columns]:
        """Return the rows that each rank writes; and tensor, offsets and sizes of all, by rank and row. None may be cut."""
        rows: dict[int, IntArray] = {}
        parts = list[tuple[Stamp, IntArray, PlannedChunks]]()
        for stamp in self.stamps:
            for number, ranks in enumerate(stamp.ranks.T):
                own = stamp.plan.pieces.take(stamp.plan.pieces.rank == number)
                own = own.take(np.argsort(own.row))
                rows.update(dict.fromkeys(ranks.tolist(), own.row))
                parts.append((stamp, ranks, own))
        by_rank = [rows[rank] for rank in range(len(rows))]
        first, count = segment_starts(ends := np.cumsum(list(map(len, by_rank)))), int(ends[-1])
        tensor = np.empty(count, np.int32)
        offsets, sizes = (np.empty((count, self.chunks.axes), column.dtype) for column in self.chunks.columns()[:2])
        for stamp, ranks, own in parts:
            at = first[ranks][:, None] + np.arange(len(own))
            tensor[at], sizes[at] = own.tensor, own.sizes
            offsets[at] = stamp.offsets[stamp.column[own.row]].transpose(1, 0, 2)
        return by_rank, (tensor, offsets, sizes)


def plan_stamped(
    manifests: Sequence[RankManifest], chain_of: ChainOf, *, least_shards: int = LEAST_SHARDS, **how: bool
) -> StampedPlan | None:
    """
    Plan as `plan_save` does, or assign writers as `how` says; None if it must: ranks are few or too different, or something
    is wrong with what they hold.
    """
    kinds: dict[tuple[bytes, ...], dict[bytes, list[int]]] = {}
    for rank, d in enumerate(manifests):
        same_sizes = kinds.setdefault((d.names, d.shape, d.alias, d.row_tensor, d.row_sizes), {})
        same_sizes.setdefault(d.row_offsets, []).append(rank)
    groups = [list(kind.values()) for kind in kinds.values()]
    if len(kinds) > len(manifests) // 4 or any(d.check_replicas for d in manifests):
        return None
    odd: list[CheckpointError] = []
    merged = merge([manifests[kind[0][0]] for kind in groups], odd.append)
    tensors, held = merged.tensors, replace(merged.shards, digest=np.zeros_like(merged.shards.digest))
    counts = np.array([sum(map(len, kind)) for kind in groups])
    if odd or counts[held.rank].sum() < least_shards or np.any(tensors.alias != np.arange(len(tensors))):
        return None
    held_by = np.array(list(map(len, groups)))[held.rank]
    whole = np.all(held.sizes == tensors.shape[held.tensor], axis=1)
    shared = whole & (np.bincount(held.tensor, whole * held_by, len(tensors))[held.tensor] > 1)
    large = held.boxes.volumes() * ITEMSIZES[tensors.dtype[held.tensor]] > SMALL_NBYTES
    of_kind = [np.flatnonzero(held.rank == number) for number in range(len(groups))]
    sampled = _sampled(manifests, groups, [held.take(rows) for rows in of_kind])
    if sampled is None or np.any(shared & large & ~merged.buffer[held.tensor]):
        return None
    lowest = np.full(len(tensors), len(kinds))  # kinds are in the order of their lowest ranks
    np.minimum.at(lowest, held.tensor[shared], held.rank[shared])
    chain, stamps = chain_of(merged.keys, tensors.alias), list[Stamp]()
    for number, (packed, kind) in enumerate(zip(kinds.values(), groups, strict=True)):
        rows = held.take(of_kind[number])
        own = np.flatnonzero(~shared[of_kind[number]])
        also = np.flatnonzero(shared[of_kind[number]] & (lowest[rows.tensor] == number))
        offsets, column = _offsets(list(packed), (len(rows), manifests[kind[0][0]].axes))
        offsets = np.pad(offsets, ((0, 0), (0, 0), (0, rows.axes - offsets.shape[2])))
        alike: dict[tuple[int, bool], list[int]] = {}
        for at, ranks in enumerate(kind):
            alike.setdefault((len(ranks), at == 0 and also.size > 0), []).append(at)
        for (size, writes_shared), places in alike.items():
            row = np.concatenate([np.tile(own, size), also if writes_shared else also[:0]])
            local = np.append(np.repeat(np.arange(size), len(own)), np.zeros(len(row) - size * len(own), np.int64))
            group = replace(rows.take(row), rank=local, offsets=offsets[column[row], places[0]].astype(np.int64))
            plan = lay_out(merged, *assign_writers(merged, group, size, None, **how), len(manifests), chain)
            own_offsets = offsets if len(places) == len(kind) else offsets[:, places]
            stamps.append(Stamp(plan, np.array([kind[at] for at in places]), own_offsets, column))
    return _stamped(merged, sampled, stamps, len(manifests))


def _offsets(
    packed: Sequence[bytes], shape: tuple[int, int], alike: Sequence[IntArray] = ()
) -> tuple[npt.NDArray[Any], IntArray]:
    """
    Return the offsets of the rows of a kind, for each group, in few bytes; and where those of each row are in them.

    Tensors that are cut alike have the same, and so they take little memory. `alike` is a guess of the rows that differ
    from others, and of which row is like which of them.
    """
    if not alike:
        some = [_unpacked(each).reshape(shape) for each in packed[:: -(-len(packed) // 8)]]
        columns = [np.zeros(shape[0], np.int64), *np.concatenate(some, axis=1).T]
        hashes = hash_rows(columns, multipliers(len(columns) + 1, default_rng()))
        _, *alike = np.unique(hashes, return_index=True, return_inverse=True)
    found = []
    for at in range(0, len(packed), _GROUPS_AT_ONCE):
        block = np.stack([_unpacked(each).reshape(shape) for each in packed[at : at + _GROUPS_AT_ONCE]])
        found.append(block[:, alike[0]])
        if not np.array_equal(found[-1][:, alike[1]], block):
            return _offsets(packed, shape, [np.arange(shape[0])] * 2)
    return np.concatenate(found).transpose(1, 0, 2), alike[1]


def _unpacked(offsets: bytes) -> npt.NDArray[Any]:
    raw = zlib.decompress(offsets)
    return np.frombuffer(raw, f"<i{raw[0]}", offset=1)


def _sampled(
    manifests: Sequence[RankManifest], groups: list[list[list[int]]], rows: list[Shards]
) -> SampledReplicas | None:
    """Return the replicas with samples, which are tensors that ranks hold whole; None if any differ."""
    found = []
    for kind, its in zip(groups, rows, strict=True):
        ranks = np.concatenate(kind)
        pairs = [pairs_of(manifests[rank].samples) for rank in ranks.tolist()]
        row, digest = np.concatenate(pairs).T
        found.append(replace(its.take(row), rank=np.repeat(ranks, list(map(len, pairs))), digest=digest))
    table = Shards(*map(np.concatenate, zip(*(each.columns() for each in found), strict=True)))
    table = table.take(np.flatnonzero(table.digest))
    table = table.take(np.lexsort((table.rank, table.tensor)))
    first = np.flatnonzero(np.diff(table.tensor, prepend=-1))
    return None if len(find_differing(table, first)) else SampledReplicas(table, first)


def _stamped(merged: Merged, sampled: SampledReplicas, stamps: list[Stamp], world_size: int) -> StampedPlan | None:
    """Stamp the files and chunks of all ranks; None if the chunks do not tile the tensors."""
    files: list[list[PlannedFile]] = [[] for _ in range(world_size)]
    count = np.zeros(len(merged.keys), np.int64)
    for stamp in stamps:
        of_rank = np.searchsorted(stamp.plan.ranks, np.arange(stamp.ranks.shape[1] + 1)).tolist()
        for ranks in stamp.ranks.tolist():
            for rank, low, high in zip(ranks, of_rank, of_rank[1:], strict=False):
                files[rank] = stamp.plan.files[low:high]
        count += len(stamp.ranks) * np.bincount(stamp.plan.pieces.tensor, minlength=len(count))
    many = np.array(list(map(len, files)))
    first_file = segment_starts(np.cumsum(many))
    ends = np.cumsum(count)
    axes, rows = merged.tensors.shape.shape[1], int(ends[-1])
    pieces = [stamp.plan.pieces for stamp in stamps]
    size, start = (max(int(getattr(each, name).max(initial=0)) for each in pieces) for name in ("sizes", "start"))
    offset = int(merged.tensors.shape.max(initial=1)) - 1
    columns = tuple(
        np.empty((rows, *shape), np.min_scalar_type(most))
        for shape, most in (((axes,), offset), ((axes,), size), ((), int(many.sum())), ((), start))
    )
    low = done = 0
    while low < len(ends):
        high = max(low + 1, int(np.searchsorted(ends, done + _BLOCK_ROWS, "right")))
        tensor, *block = _sorted([stamp.chunks(low, high, first_file, columns) for stamp in stamps])
        if not np.all(tiled(merged.tensors.shape[low:high], tensor - low, Boxes(block[0], block[1]))):
            return None
        for column, part in zip(columns, block, strict=True):
            column[done : done + len(part)] = part
        low, done = high, int(ends[high - 1])
    ranks_of_files = np.repeat(np.arange(world_size), many)
    chunks = Chunks(*columns)
    return StampedPlan(
        merged.keys, merged.tensors, [*chained.from_iterable(files)], ranks_of_files, sampled, stamps, ends, chunks
    )


def _sorted(parts: list[Columns]) -> Columns:
    columns = parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
    keys = (*columns[1].T[::-1], columns[0])
    # Often they are in this order already, which is found out in a tenth of the time of sorting.
    rises = np.ones(max(0, len(columns[0]) - 1), bool)
    for key in keys:
        rises = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & rises)
    order = slice(None) if rises.all() else np.lexsort(keys)
    return tuple(column[order] for column in columns)
