"""The plan of a save, made by rank 0 from all manifests: merge, deduplicate, balance, validate, assign to files."""

from __future__ import annotations

import heapq
import re
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.random import default_rng  # imported here: a fork during a lazy import would see half a module

from shardkeep.errors import CheckpointError, InvalidShards, RanksDisagree, ReplicasDiffer, StateError
from shardkeep.format import dtypes
from shardkeep.format.boxes import (
    ITEMSIZES,
    Boxes,
    IntArray,
    clashes,
    concat_ranges,
    explain_tiling,
    hash_rows,
    ints,
    multipliers,
    pack,
    segment_starts,
    tiled,
    widen,
    within,
)
from shardkeep.format.data_file import block_nbytes_for
from shardkeep.format.index import MAX_ELEMENTS, Tensors
from shardkeep.format.record import Recorded
from shardkeep.format.values import decode_tree, encode_tree, merge_trees
from shardkeep.options import decodable

if TYPE_CHECKING:
    from shardkeep.state.describe import Description


class RankManifest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """
    What one rank holds, as columns that are sent to rank 0 without pickle. Arrays of whole numbers are packed (`pack`).
    Equal parts of manifests (keys, tree, values) are equal bytes, so rank 0 decodes each different one once.
    """

    axes: int
    """Width of the box matrices."""
    names: bytes
    """`TensorNames`, encoded: equal on ranks that hold the same tensors."""
    shape: bytes
    alias: bytes
    """For each tensor, the position of the first one with the same memory on this rank; -1: the rank holds none of it."""
    row_tensor: bytes
    """For each shard, its tensor, as a position in the names."""
    row_offsets: bytes
    """Compressed, because those of a shard of many tensors repeat, and all ranks' go through one store."""
    row_sizes: bytes
    check_replicas: bool = False
    samples: bytes = b""
    """
    Pairs of 8 bytes: a shard's row, and a digest of a few of its elements; if replicas are compared, of all elements,
    for all shards. They find replicas that have diverged.
    """
    tree: bytes = b""
    """The state's skeleton (`format.values`)."""
    values: bytes
    """`PlainValues`, encoded."""


def pairs_of(samples: bytes) -> IntArray:
    return np.frombuffer(samples, "<i8").reshape(-1, 2)


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a rank's state, without their boxes."""

    keys: list[str]
    groups: list[str]
    """The file group of each tensor: the top-level key it is under."""
    dtype: bytes
    ndim: bytes
    origin: bytes
    flags: bytes
    """`BUFFER`, and bits of layouts that store properties of tensors; those of the first rank that has a tensor count."""


BUFFER = 4
"""The flag of a module's buffer. A forward pass may leave it different on each rank, and one rank's is saved."""
SMALL_NBYTES = 64 << 10
"""
Replicas up to this size are written by the lowest rank that has them, like buffers: in a plain state dict, only its
size suggests that a tensor is a buffer. The others are divided so that all ranks write about as much, these included.
"""


def manifest_of(
    d: Description, *, groups: list[str], flags: npt.NDArray[np.uint8], alias: IntArray, **more: Any
) -> RankManifest:
    names = TensorNames(
        keys=d.keys,
        groups=groups,
        dtype=d.dtype.tobytes(),
        ndim=d.ndim.tobytes(),
        origin=d.origin.tobytes(),
        flags=flags.tobytes(),
    )
    held = np.bincount(d.row_tensor, minlength=len(d.keys)) > 0
    return RankManifest(
        axes=d.boxes.axes,
        names=encode(names),
        shape=pack(d.shape),
        alias=pack(np.where(held, alias, -1)),
        row_tensor=pack(d.row_tensor),
        row_offsets=zlib.compress(pack(d.boxes.offsets), 1),
        row_sizes=pack(d.boxes.sizes),
        **more,
    )


PlainValues = tuple[list[str], list[bytes]]
"""Keys and encoded values of a rank's state."""
encode = msgspec.msgpack.encode


def common_part(manifest: RankManifest) -> bytes:
    """Return what ranks that hold boxes of the same sizes have in common, encoded."""
    return encode(msgspec.structs.replace(manifest, row_offsets=b"", samples=b"", values=b""))


class PlannedFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a plan; its name follows from these, the rank that writes it and the save."""

    group: str
    part: int
    """From 1 if the rank's data of this group are in several files; else 0."""
    data_nbytes: int
    block_nbytes: int
    chain: int | None


@decodable
class RankWritePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one rank writes, as rank 0 sends them to it: equal bytes for ranks that write alike. Arrays are packed."""

    files: list[PlannedFile]
    file: bytes
    """For each chunk: its position in `files`, its start in the file's data, the row of the rank's manifest, and its box."""
    start: bytes
    row: bytes
    axes: int
    offsets: bytes
    """No boxes if every chunk is all that the rank holds in its row."""
    sizes: bytes
    chains: list[Recorded]
    sidecar: bool
    """The store takes bytes only in order: digests of files without codecs go into sidecar files."""


MOST_GROUPS = 8
"""A state with more top-level containers than this goes to one file for each rank."""


@dataclass(frozen=True)
class Shards(Boxes):
    tensor: IntArray
    rank: IntArray
    row: IntArray
    """The shard's position in its rank's manifest."""
    digest: IntArray
    """Of the shard, or of a sample of it; 0 if there is none."""


@dataclass(frozen=True)
class SampledReplicas:
    """The replicas that are compared by samples, group after group."""

    members: Shards
    first: IntArray
    """Where each group begins; the lowest rank of a group comes first."""

    def differ(self, samples: Sequence[bytes]) -> bool:
        """Return whether new samples, those of each rank, show that replicas have diverged."""
        by_rank = [pairs_of(each) for each in samples]
        row, sampled = np.concatenate(by_rank).T
        place = (np.repeat(np.arange(len(by_rank)), list(map(len, by_rank))) << 32) + row
        order, wanted = np.argsort(place), (self.members.rank << 32) + self.members.row
        at = np.searchsorted(place, wanted, sorter=order)
        is_there = np.append(place[order], -1)[at] == wanted
        digest = np.where(is_there, np.append(sampled[order], 0)[at], 0)
        return len(find_differing(replace(self.members, digest=digest), self.first)) > 0


@dataclass(frozen=True)
class PlannedChunks(Shards):
    """The chunks that are written: by which rank, from which of its shards, and where to."""

    nbytes: IntArray
    file: IntArray
    start: IntArray
    cut: npt.NDArray[np.bool_]
    """Whether the chunk may be a part of the shard."""


ChainOf = Callable[[list[str], IntArray], "list[int | None]"]
"""Returns the codec chain of each tensor, from all keys and the tensors in whose place they are stored."""


@dataclass(frozen=True)
class CheckpointPlan:
    keys: list[str]
    """Sorted by UTF-8 bytes."""
    tensors: Tensors
    pieces: PlannedChunks
    """Sorted by file, then by place in it."""
    files: list[PlannedFile]
    ranks: IntArray
    """The rank that writes each file; ascending."""
    sampled: SampledReplicas | None
    """None if replicas have diverged: the plan is not that of other saves then."""


@dataclass(frozen=True)
class Merged:
    keys: list[str]
    groups: list[str]
    tensors: Tensors
    buffer: npt.NDArray[np.bool_]
    """For each tensor, whether a rank has it as a buffer."""
    shards: Shards


Warn = Callable[[CheckpointError], None]


def _warn_or_raise(error: CheckpointError, warn: Warn | None) -> None:
    if warn is None:
        raise error
    warn(error)


def plan_save(
    manifests: Sequence[RankManifest],
    chain_of: ChainOf = lambda keys, _: [None] * len(keys),
    *,
    warn: Warn = lambda _: None,
) -> CheckpointPlan:
    """Plan which rank writes which part of which tensor into which file; `warn` hears of replicas that differ."""
    checking = [rank for rank, d in enumerate(manifests) if d.check_replicas]
    if 0 < len(checking) < len(manifests):
        other = next(rank for rank, d in enumerate(manifests) if not d.check_replicas)
        raise RanksDisagree(
            f"check_replicas was given on {len(checking)} of {len(manifests)} ranks: on rank {checking[0]},"
            f" not on rank {other}",
            hint="give it on all ranks or on none",
        )
    merged = merge(manifests)
    own = merged.tensors.alias[merged.shards.tensor] == merged.shards.tensor
    pieces, sampled = assign_writers(merged, merged.shards.take(own), len(manifests), None if checking else warn)
    _check_tiling(merged, pieces, merged.shards.take(~own))
    return lay_out(merged, pieces, sampled, len(manifests), chain_of(merged.keys, merged.tensors.alias))


def lay_out(
    merged: Merged, pieces: PlannedChunks, sampled: SampledReplicas | None, world_size: int, chain: list[int | None]
) -> CheckpointPlan:
    files, ranks, pieces = _assign_files(merged, pieces, world_size, chain)
    if np.any(np.array([file.chain for file in files], object)[pieces.file] != np.array(chain, object)[pieces.tensor]):
        raise StateError("a tensor would miss the codecs, or the encryption, asked for it", hint="please report this")
    return CheckpointPlan(merged.keys, merged.tensors, pieces, files, ranks, sampled)


def plan_whole_shards(manifests: Sequence[RankManifest], *, to_lowest: bool, warn: Warn) -> CheckpointPlan:
    """
    Plan which rank writes which shard, where each is an item of its own: none is divided or tied, and files are
    not planned.

    A replicated shard goes to the rank with least to write, or to the lowest that has it. Where ranks have different
    tensors of one name, or replicas have diverged, the first rank's is written, with a warning. What one rank holds
    alone need not be complete: others may save the rest elsewhere.
    """
    merged = merge(manifests, warn)
    pieces, sampled = assign_writers(merged, merged.shards, len(manifests), warn, whole=True, to_lowest=to_lowest)
    filled = pieces.take(pieces.nbytes > 0)
    _check_tiling(merged, filled, merged.shards.take(slice(0)), complete=len(manifests) > 1)
    pieces = pieces.take(np.lexsort((pieces.row, pieces.rank)))
    return CheckpointPlan(merged.keys, merged.tensors, pieces, [], pieces.rank[:0], sampled)


def _check_sizes(merged: Merged) -> None:
    # In floats, which do not overflow.
    elements = np.prod(np.maximum(merged.tensors.shape, 1).astype(np.float64), axis=1)
    if np.any(elements >= MAX_ELEMENTS):
        at = int(np.flatnonzero(elements >= MAX_ELEMENTS)[0])
        shape = tuple(merged.tensors.shape[at, : int(merged.tensors.ndim[at])].tolist())
        raise StateError(
            f"{merged.keys[at]!r} has shape {shape}: more than a checkpoint can hold of one tensor",
            hint="an axis of size 0 counts as 1 here; the product of all axes must be below 2**58",
            key=merged.keys[at],
        )


def merge(manifests: Sequence[RankManifest], warn: Warn | None = None) -> Merged:
    """Merge what all ranks hold; with `warn`, tensors that differ from the first rank's are left out, else they are an error."""
    axes = max((d.axes for d in manifests), default=0)
    names = {d.names: msgspec.msgpack.decode(d.names, type=TensorNames) for d in manifests}
    keys = sorted({key for n in names.values() for key in n.keys}, key=str.encode)
    row_of = {key: row for row, key in enumerate(keys)}
    places = {raw: np.array([row_of[key] for key in n.keys], np.int64) for raw, n in names.items()}
    tensors, odd = _merge_tensors(manifests, names, places, keys, axes)
    for error in odd.values():
        _warn_or_raise(error, warn)
    group_of = {key: group for n in names.values() for key, group in zip(n.keys, n.groups, strict=True)}
    groups = [group_of[key] for key in keys]
    buffer = np.zeros(len(keys), bool)
    for raw, n in names.items():
        buffer[places[raw]] |= (np.frombuffer(n.flags, np.uint8) & BUFFER).astype(bool)
    tables = []
    for rank, d in enumerate(manifests):
        local = ints(d.row_tensor)
        wide = (len(local), d.axes)
        digests, sampled = np.zeros(len(local), np.int64), pairs_of(d.samples)
        digests[sampled[:, 0]] = sampled[:, 1]
        held = Shards(
            tensor=places[d.names][local],
            rank=np.full(len(local), rank, np.int64),
            row=np.arange(len(local), dtype=np.int64),
            offsets=widen(ints(zlib.decompress(d.row_offsets)).reshape(wide), axes, 0),
            sizes=widen(ints(d.row_sizes).reshape(wide), axes, 1),
            digest=digests,
        )
        if others := [tensor for form, tensor in odd if form == (d.names, d.shape)]:
            held = held.take(~np.isin(held.tensor, others))
        tables.append(held)
    columns = zip(*(table.columns() for table in tables), strict=True)
    merged = Merged(keys, groups, tensors, buffer, Shards(*(np.concatenate(column) for column in columns)))
    _check_sizes(merged)
    return merged


def _merge_tensors(
    manifests: Sequence[RankManifest],
    names: dict[bytes, TensorNames],
    places: dict[bytes, IntArray],
    keys: list[str],
    axes: int,
) -> tuple[Tensors, dict[tuple[tuple[bytes, bytes], int], InvalidShards]]:
    """Merge the tensor tables; return also where ranks do not agree with the first one on dtype and global shape."""
    count = len(keys)
    facts = np.full((count, axes + 3), -1, np.int64)  # dtype, ndim, origin, shape
    first_rank = np.zeros(count, np.int64)
    seen: set[tuple[bytes, bytes]] = set()
    odd: dict[tuple[tuple[bytes, bytes], int], InvalidShards] = {}
    for rank, d in enumerate(manifests):
        if (d.names, d.shape) in seen:
            continue
        seen.add((d.names, d.shape))
        n, place = names[d.names], places[d.names]
        shape = widen(ints(d.shape).reshape(len(place), d.axes), axes, 1)
        columns = [np.frombuffer(column, np.uint8) for column in (n.dtype, n.ndim, n.origin)]
        mine = np.concatenate([np.stack(columns, axis=1).astype(np.int64).reshape(-1, 3), shape], axis=1)
        new = facts[place, 0] < 0
        for at in np.flatnonzero(~new & np.any(facts[place] != mine, axis=1)).tolist():
            error = _disagreement(keys[place[at]], int(first_rank[place[at]]), facts[place[at]], rank, mine[at])
            odd[(d.names, d.shape), int(place[at])] = error
        facts[place[new]] = mine[new]
        first_rank[place[new]] = rank
    tensors = Tensors(
        dtype=facts[:, 0].astype(np.uint8),
        ndim=facts[:, 1].astype(np.uint8),
        shape=facts[:, 3:],
        origin=facts[:, 2].astype(np.uint8),
        alias=_ties(manifests, places, facts[:, 2]),
    )
    return tensors, odd


def _ties(manifests: Sequence[RankManifest], places: dict[bytes, IntArray], origin: IntArray) -> IntArray:
    """Find for each tensor the one in whose place it is stored: itself, or another of its kind."""
    # A tensor need not be stored if every rank that holds boxes of it holds them in the memory of one other tensor.
    mates: dict[int, frozenset[int]] = {}
    alone = np.zeros(len(origin), bool)
    for raw, alias in dict.fromkeys((d.names, d.alias) for d in manifests):
        place, first = places[raw], ints(alias)
        # A numpy array and a torch tensor over one memory are loaded as two different things.
        memory = np.where(first < 0, -1, 2 * first + origin[place])
        order = np.argsort(memory, kind="stable")[np.count_nonzero(first < 0) :]
        starts = np.flatnonzero(np.diff(memory[order], prepend=-1))
        count = np.diff(starts, append=len(order))
        alone[place[order[starts[count == 1]]]] = True
        for start, many in zip(starts[count > 1].tolist(), count[count > 1].tolist(), strict=True):
            group = frozenset(place[order[start : start + many]].tolist())
            for tensor in group:
                mates[tensor] = mates.get(tensor, group) & group
    mates |= {tensor: frozenset({tensor}) for tensor in mates if alone[tensor]}
    owner = np.arange(len(origin))
    for tensor, others in mates.items():
        # The tensor with the fewest mates can stand for all of them, because mates of a mate are mates.
        owner[tensor] = min(others, key=lambda other: (len(mates[other]), other))
    return owner


def _disagreement(key: str, rank: int, facts: IntArray, other: int, others: IntArray) -> InvalidShards:
    def words(row: IntArray) -> str:
        kind = ("a torch tensor ", "a numpy array ")[int(row[2])] if facts[2] != others[2] else ""
        return f"{kind}{dtypes.by_code(int(row[0])).name}{tuple(row[3 : 3 + int(row[1])].tolist())}"

    return InvalidShards(
        f"{key!r} is {words(facts)} on rank {rank} but {words(others)} on rank {other}",
        hint="one key must name one tensor; wrap per-rank state in sk.PerRank, pieces in sk.ShardedBox",
        key=key,
    )


def assign_writers(
    merged: Merged, shards: Shards, world_size: int, warn: Warn | None, *, whole: bool = False, to_lowest: bool = False
) -> tuple[PlannedChunks, SampledReplicas | None]:
    """
    Assign every box to one writer: unique boxes to their holder; replicas that are small, of buffers or different to
    their lowest holder, so that what belongs together comes from one rank; the others to who has least to write.
    """
    itemsizes = ITEMSIZES[merged.tensors.dtype]
    nbytes = shards.boxes.volumes() * itemsizes[shards.tensor]
    lone, members, first = _group_equal(shards)
    unique = shards.take(lone)
    # float64 holds byte counts exactly up to 8 PiB, which is what bincount adds in.
    load = np.bincount(unique.rank, weights=nbytes[lone], minlength=world_size).astype(np.int64)
    held, sizes = shards.take(members), nbytes[members[first]]
    lowest = merged.buffer[held.tensor[first]] | (sizes <= SMALL_NBYTES) | to_lowest
    count = np.diff(first, append=len(members))
    kept = np.flatnonzero(held.digest)
    _, starts = np.unique(np.repeat(np.arange(len(first)), count)[kept], return_index=True)
    sampled: SampledReplicas | None = SampledReplicas(held.take(kept), starts)
    if len(differing := find_differing(held, first)):
        _warn_or_raise(_difference(merged, held, first, differing), warn)
        lowest[differing], sampled = True, None
    leaders = held.take(first[lowest])
    load += np.bincount(leaders.rank, weights=sizes[lowest], minlength=world_size).astype(np.int64)
    split = _share_replicas(held, first[~lowest], count[~lowest], sizes[~lowest], load, whole=whole)
    columns = zip(unique.columns(), leaders.columns(), split.columns(), strict=True)
    written = Shards(*map(np.concatenate, columns))
    zeros = np.zeros(len(written), np.int64)
    nbytes = written.boxes.volumes() * itemsizes[written.tensor]
    cut = np.arange(len(written)) >= len(written) - len(split) * (not whole)
    return PlannedChunks(**vars(written), nbytes=nbytes, file=zeros, start=zeros, cut=cut), sampled


def _share_replicas(
    members: Shards, first: IntArray, count: IntArray, nbytes: IntArray, load: IntArray, *, whole: bool
) -> Shards:
    """Divide groups of equal shards over the ranks that hold them, if not `whole`, and return the slices as shards."""
    sizes = members.sizes[first]
    if whole or not sizes.shape[1]:
        _, holder, _, _ = assign_replicas(load, nbytes, first, count, members.rank, np.ones_like(first))
        return members.take(holder)
    axis = np.argmax(sizes > 1, axis=1)
    rows = np.take_along_axis(sizes, axis[:, None], axis=1)[:, 0]
    group, holder, begin, end = assign_replicas(load, nbytes, first, count, members.rank, rows)
    slices = members.take(holder)  # copies
    slices.offsets[np.arange(len(group)), axis[group]] += begin
    slices.sizes[np.arange(len(group)), axis[group]] = end - begin
    return slices


def _group_equal(shards: Shards) -> tuple[IntArray, IntArray, IntArray]:
    """Find equal boxes: return rows of unique shards, rows of the others by group and rank, and where groups begin."""
    columns = [shards.tensor, *shards.offsets.T, *shards.sizes.T]
    rng = default_rng()
    while True:
        hashes = hash_rows(columns, multipliers(len(columns) + 1, rng))
        order = np.argsort(hashes, kind="stable")
        starts = np.flatnonzero(np.diff(hashes[order], prepend=hashes[order][:1] ^ np.uint64(1)))
        count = np.diff(starts, append=len(order))
        many = count > 1
        members = order[concat_ranges(starts[many], count[many])]
        first = segment_starts(np.cumsum(count[many]))
        leader = np.repeat(members[first], count[many])
        if all(np.array_equal(column[members], column[leader]) for column in columns):
            return np.sort(order[starts[~many]]), members, first


def find_differing(members: Shards, first: IntArray) -> IntArray:
    """Return the groups in which a digest is not that of the lowest rank, by tensor."""
    group = np.repeat(np.arange(len(first)), np.diff(first, append=len(members)))
    lowest = members.digest[first[group]]
    differs = np.zeros(len(first), bool)
    differs[group[(members.digest != lowest) & (members.digest != 0) & (lowest != 0)]] = True
    found = np.flatnonzero(differs)
    return found[np.argsort(members.tensor[first[found]], kind="stable")]


_MOST_NAMED = 3


def _difference(merged: Merged, members: Shards, first: IntArray, differing: IntArray) -> ReplicasDiffer:
    ends = np.append(first, len(members))
    named: list[str] = []
    for group in differing[:_MOST_NAMED].tolist():
        low, high = int(ends[group]), int(ends[group + 1])
        other = int(members.rank[low + np.flatnonzero(members.digest[low:high] != members.digest[low])[0]])
        box = members.boxes.box(low, int(merged.tensors.ndim[members.tensor[low]]))
        named.append(
            f"{merged.keys[members.tensor[low]]!r}: ranks {members.rank[low]} and {other} hold different bytes of {box}"
        )
    if len(differing) > _MOST_NAMED:
        named.append(f"and {len(differing) - _MOST_NAMED} more")
    key = merged.keys[members.tensor[first[differing[0]]]]
    return ReplicasDiffer(
        f"replicated tensors are not the same on all ranks: {'; '.join(named)}",
        hint="parameters that differ have diverged; wrap state that differs by rank in sk.PerRank",
        key=key,
    )


def _check_tiling(merged: Merged, pieces: PlannedChunks, tied: Shards, *, complete: bool = True) -> None:
    """Check that what ranks write, or hold if `tied`, tiles each tensor; if not `complete`: is disjoint and inside."""
    lone, members, first = _group_equal(tied)
    distinct = tied.take(np.concatenate([lone, members[first]]))
    tensor = np.concatenate([pieces.tensor, distinct.tensor])
    boxes = Boxes(np.concatenate([pieces.offsets, distinct.offsets]), np.concatenate([pieces.sizes, distinct.sizes]))
    order = np.argsort(tensor, kind="stable")
    good = tiled(merged.tensors.shape, tensor[order], boxes.take(order))
    if np.all(good):
        return
    for at in np.flatnonzero(~good).tolist():
        ndim = int(merged.tensors.ndim[at])
        shape = tuple(merged.tensors.shape[at, :ndim].tolist())
        found = [boxes.box(row, ndim) for row in np.flatnonzero(tensor == at).tolist()]
        if complete or clashes(found) or not all(within(shape, box) for box in found):
            break
    else:
        return
    raise InvalidShards(
        f"the shards of {merged.keys[at]!r} do not tile its shape {shape}: {explain_tiling(shape, found)}",
        hint="every rank of the mesh must call save, with the same global tensor",
        key=merged.keys[at],
        others=[merged.keys[i] for i in np.flatnonzero(~good)[1:100]],
    )


def _assign_files(
    merged: Merged, pieces: PlannedChunks, world_size: int, chain: list[int | None]
) -> tuple[list[PlannedFile], IntArray, PlannedChunks]:
    """
    Lay chunks end to end in files: one for each rank, group and codec chain, or several if they are large. safetensors
    allows no gaps, so chunks are sorted by the power of two that divides their size: each begins at a multiple of it.
    """
    safe = {group: re.sub(r"[^A-Za-z0-9_]+", "_", group)[:60].strip("_") or "state" for group in set(merged.groups)}
    if len(set(safe.values())) > MOST_GROUPS:
        safe = dict.fromkeys(safe, "state")
    kind_of = [(safe[name], -1 if each is None else each) for name, each in zip(merged.groups, chain, strict=True)]
    kinds = sorted(set(kind_of))
    chains_of = Counter(name for name, _ in kinds)
    # A label contains the chain if the group has several.
    labels = [f"{name}-c{chain + 1}" if chains_of[name] > 1 else name for name, chain in kinds]
    chains = [None if chain < 0 else chain for _, chain in kinds]
    row_of = {kind: row for row, kind in enumerate(kinds)}
    group = np.array([row_of[kind] for kind in kind_of], np.int64)
    slots, slot = np.unique(pieces.rank * len(kinds) + group[pieces.tensor], return_inverse=True)
    slot = slot.reshape(-1)
    rank_of_slot = slots // max(1, len(kinds))
    # float64, which bincount adds in, holds byte counts exactly up to 8 PiB.
    in_slot = np.asarray(np.bincount(slot, weights=pieces.nbytes, minlength=len(slots)), np.float64)
    part = divide_into_parts(slot, rank_of_slot, in_slot, pieces.tensor, pieces.nbytes, world_size)
    made, file = np.unique(slot * MOST_PARTS + part, return_inverse=True)
    file = file.reshape(-1)
    alignment = np.minimum(pieces.nbytes & -pieces.nbytes, 4096)
    order = np.lexsort((*pieces.offsets.T[::-1], pieces.tensor, -alignment, file))
    pieces = replace(pieces, file=file).take(order)
    ends = np.cumsum(pieces.nbytes)
    last = np.flatnonzero(np.diff(pieces.file, append=len(made)))
    base = segment_starts(ends[last])
    pieces = replace(pieces, start=ends - pieces.nbytes - base[pieces.file])
    slot_of_file = made // MOST_PARTS
    alone = np.bincount(slot_of_file)[slot_of_file] == 1
    columns = (
        (slots[slot_of_file] % max(1, len(kinds))).tolist(),
        np.where(alone, 0, made % MOST_PARTS + 1).tolist(),
        (ends[last] - base).tolist(),
        # Blocks by the size of the group: many small blocks keep many threads waiting.
        map(block_nbytes_for, in_slot[slot_of_file].tolist()),
    )
    files = [
        PlannedFile(labels[kind], part, nbytes, block_nbytes, chains[kind])
        for kind, part, nbytes, block_nbytes in zip(*columns, strict=True)
    ]
    return files, rank_of_slot[slot_of_file], pieces


SLICE_NBYTES = 4 << 20
"""A box is split only into slices of at least this size: smaller ones cost more requests than they save time."""


def assign_replicas(
    load: IntArray, nbytes: IntArray, first: IntArray, count: IntArray, holder: IntArray, rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """
    Assign each group of replicas to the rank with least to write, largest first; divide large boxes over several ranks.

    `load` is what each rank has to write already, and is updated. `first` and `count` are where each group's ranks are
    in `holder`, ascending; `rows` is the extent of its box along the axis it can be divided on, or 1. Returns for each
    slice: the group, the position in `holder` of its writer, first row, end row.
    """
    slices: list[tuple[int, int, int, int]] = []
    order = np.argsort(-nbytes, kind="stable")
    sizes, starts, counts, extents = nbytes.tolist(), first.tolist(), count.tolist(), rows.tolist()
    ranks = holder.tolist()
    loads = load.tolist()
    for group in order.tolist():
        size, start, stop = sizes[group], starts[group], starts[group] + counts[group]
        if size >= 2 * SLICE_NBYTES and extents[group] > 1:
            for at, begin, end in _pour(loads, ranks[start:stop], size, extents[group]):
                slices.append((group, start + at, begin, end))
                loads[ranks[start + at]] += size * (end - begin) // extents[group]
            continue
        present = [loads[rank] for rank in ranks[start:stop]]
        at = start + present.index(min(present))
        loads[ranks[at]] += size
        slices.append((group, at, 0, extents[group]))
    load[:] = loads
    group_of, at_of, begins, ends = np.array(slices, np.int64).reshape(-1, 4).T
    return group_of, at_of, begins, ends


def _pour(loads: list[int], ranks: list[int], nbytes: int, rows: int) -> list[tuple[int, int, int]]:
    """Fill the least loaded ranks up to one level; return (position in ranks, first row, end row)."""
    present = np.array([loads[rank] for rank in ranks], np.float64)
    most = max(1, min(len(ranks), nbytes // SLICE_NBYTES, rows))
    chosen = np.argsort(present, kind="stable")[:most]
    level = water_level(present[chosen], nbytes)
    shares = np.maximum(level - present[chosen], 0.0)
    keep = shares >= min(SLICE_NBYTES / 2, nbytes / (2 * most))
    chosen, shares = chosen[keep], shares[keep]
    order = np.argsort(chosen)
    chosen, shares = chosen[order], shares[order]
    cuts = np.rint(np.cumsum(shares) / shares.sum() * rows).astype(np.int64).tolist()
    parts = zip(chosen.tolist(), [0, *cuts], cuts, strict=False)
    return [(at, begin, end) for at, begin, end in parts if end > begin]


def water_level(loads: npt.NDArray[np.float64], volume: float) -> float:
    """Return the level that `volume` reaches over a floor of ascending heights."""
    counts = np.arange(1, len(loads) + 1)
    levels = (volume + np.cumsum(loads)) / counts
    wet = int(np.flatnonzero(levels >= loads)[-1])
    return float(levels[wet])


# A rank's data of one group go to one file, or to several if they are large: the kernel lets only one thread at a time write to a
# file, so one file is written at half the speed of four, or less. Chunks stay whole.

PART_NBYTES = 256 << 20
"""A group is divided only into parts of at least this size: smaller files cost more time than they save."""
MOST_PARTS = 8
"""For all groups of a rank together, before rounding."""
ENOUGH_FILES = 64
"""With many ranks there are fewer parts, or one: the ranks of a machine write several files at once without them."""


def divide_into_parts(
    slot: IntArray,
    rank_of_slot: IntArray,
    in_slot: npt.NDArray[np.float64],
    tensor: IntArray,
    nbytes: IntArray,
    world_size: int,
) -> IntArray:
    """Divide the chunks of every slot, the data of one rank and group, into parts of about equal size, numbered from 0."""
    part = np.zeros(len(slot), np.int64)
    most = min(MOST_PARTS, ENOUGH_FILES // world_size)
    of_rank = np.bincount(rank_of_slot, weights=in_slot, minlength=world_size)
    target = np.maximum(PART_NBYTES, of_rank / max(1, most))[rank_of_slot]
    wanted = np.rint(in_slot / target).astype(np.int64)
    for each in np.flatnonzero((wanted > 1) & (most > 1)).tolist():
        rows = np.flatnonzero(slot == each)
        rows = rows[np.argsort(tensor[rows], kind="stable")]
        for parts in range(int(wanted[each]), 1, -1):  # fewer if large chunks leave too little for the others
            divided = divide_chunks(nbytes[rows], parts)
            if np.bincount(divided, weights=nbytes[rows], minlength=parts).min() >= PART_NBYTES:
                part[rows] = divided
                break
    return part


def divide_chunks(nbytes: IntArray, parts: int) -> IntArray:
    """Return the part of each chunk. Small ones stay with their neighbours, as they are read in one request."""
    # Large chunks go to the smallest part, largest first; small ones then fill the parts up to one level.
    part = np.zeros(len(nbytes), np.int64)
    loads = [(0, each) for each in range(parts)]
    large = np.flatnonzero(nbytes >= SLICE_NBYTES)
    for row in large[np.argsort(-nbytes[large], kind="stable")].tolist():
        load, least = loads[0]
        part[row] = least
        heapq.heapreplace(loads, (load + int(nbytes[row]), least))
    small = np.flatnonzero(nbytes < SLICE_NBYTES)
    held, order = np.array(sorted(loads), np.int64).T
    ends = np.cumsum(nbytes[small])
    if len(small):
        room = np.maximum(water_level(held.astype(np.float64), float(ends[-1])) - held, 0.0)
        middle = ends - nbytes[small] / 2
        part[small] = order[np.minimum(np.searchsorted(np.cumsum(room), middle), parts - 1)]
    return part


def merge_rank_trees(manifests: Sequence[RankManifest]) -> bytes:
    distinct = list(dict.fromkeys(manifest.tree for manifest in manifests))
    if len(distinct) == 1:
        return distinct[0]
    return encode_tree(merge_trees([decode_tree(raw) for raw in distinct]))


def merge_rank_values(by_rank: Sequence[bytes]) -> list[tuple[str, bytes]]:
    """Merge the `PlainValues` of all ranks, sorted by key; a key must have one value."""
    merged: dict[str, tuple[bytes, int]] = {}
    lowest = dict(zip(reversed(by_rank), reversed(range(len(by_rank))), strict=True))
    for encoded, rank in sorted(lowest.items(), key=itemgetter(1)):
        values = msgspec.msgpack.decode(encoded, type=PlainValues)
        for key, data in zip(*values, strict=True):
            known, first_rank = merged.setdefault(key, (data, rank))
            if known != data:
                raise ReplicasDiffer(
                    f"{key!r} is not the same on all ranks: ranks {first_rank} and {rank} hold different values",
                    hint="wrap state that differs by rank in sk.PerRank, or save the same value on every rank",
                    key=key,
                )
    return sorted(((key, data) for key, (data, _) in merged.items()), key=lambda item: item[0].encode())


def check_no_tensors(values: Iterable[str], tensors: Sequence[str], manifests: Sequence[RankManifest]) -> None:
    for key in values:
        at = bisect_left(tensors, key.encode(), key=str.encode)
        if at == len(tensors) or tensors[at] != key:
            continue
        held = ((rank, msgspec.msgpack.decode(d.names, type=TensorNames).keys) for rank, d in enumerate(manifests))
        holder = next(rank for rank, keys in held if key in keys)
        plain = (msgspec.msgpack.decode(d.values, type=PlainValues)[0] for d in manifests)
        raise InvalidShards(
            f"{key!r} is a plain value on rank {next(rank for rank, keys in enumerate(plain) if key in keys)} but a"
            f" tensor on rank {holder}",
            hint="one key must name one thing; wrap state that differs by rank in sk.PerRank",
            key=key,
        )
