"""
A rank's part of a save on the wire: the manifest of what it holds, and the plan of what it writes, with its file jobs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from shardkeep.engine.memory import view_memory
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.writer import FileJob
from shardkeep.errors import InvalidShards, ReplicasDiffer
from shardkeep.format.boxes import Box, Boxes, IntArray, relative, slices
from shardkeep.format.data_file import HeaderEntry, block_nbytes_for, build_header
from shardkeep.format.dtypes import by_code
from shardkeep.format.record import Recorded
from shardkeep.format.tree import decode_tree, encode_tree, merge_trees
from shardkeep.format.values import encode_value
from shardkeep.layouts import native
from shardkeep.plan.save_plan import (
    PlainValues,
    RankManifest,
    SavePlan,
    TensorNames,
    decode_names,
    decode_values,
    encode,
    ints,
)
from shardkeep.state.describe import Description, file_groups

if TYPE_CHECKING:
    import torch


class RankWritePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one rank writes, as rank 0 sends them to it."""

    save_id: str
    files: list[tuple[str, int, int]]
    """Name, data size and block size of each file."""
    file: bytes
    """For each chunk: its position in `files`, its start in the file's data, the row of the rank's manifest, and its box."""
    start: bytes
    row: bytes
    axes: int
    offsets: bytes
    sizes: bytes
    chain: list[int | None]
    """The codec chain of each file."""
    chains: list[Recorded]
    apart: bool
    """The store takes bytes only in order: digests of files without codecs go into sidecar files."""


def data_file_names(plan: SavePlan, save_id: str, world_size: int) -> list[str]:
    """Return the names of all data files of a save."""
    return [
        native.data_name(file.group, file.rank, world_size, save_id, part=file.part, coded=file.chain is not None)
        for file in plan.files
    ]


def split_by_rank(
    plan: SavePlan, save_id: str, world_size: int, *, chains: Sequence[Recorded] = (), apart: bool = False
) -> list[RankWritePlan]:
    """Divide the plan, which is sorted by file and so by rank, into each rank's part."""
    names = data_file_names(plan, save_id, world_size)
    ranks = np.array([file.rank for file in plan.files], np.int64)
    first_file = np.searchsorted(ranks, np.arange(world_size + 1))
    first_piece = np.searchsorted(plan.pieces.file, first_file)
    blocks = _block_sizes(plan)
    orders = []
    for rank in range(world_size):
        low, high = int(first_file[rank]), int(first_file[rank + 1])
        pieces = plan.pieces.take(slice(int(first_piece[rank]), int(first_piece[rank + 1])))
        orders.append(
            RankWritePlan(
                save_id=save_id,
                files=[(names[i], plan.files[i].data_nbytes, blocks[i]) for i in range(low, high)],
                file=(pieces.file - low).tobytes(),
                start=pieces.start.tobytes(),
                row=pieces.row.tobytes(),
                axes=pieces.boxes.axes,
                offsets=pieces.offsets.tobytes(),
                sizes=pieces.sizes.tobytes(),
                chain=[file.chain for file in plan.files[low:high]],
                chains=list(chains),
                apart=apart,
            )
        )
    return orders


def _block_sizes(plan: SavePlan) -> list[int]:
    """Choose each file's block size by the size of its group: many small blocks keep many threads waiting."""
    together: dict[tuple[int, str], int] = {}
    for file in plan.files:
        together[file.rank, file.group] = together.get((file.rank, file.group), 0) + file.data_nbytes
    return [block_nbytes_for(together[file.rank, file.group]) for file in plan.files]


def make_file_jobs(description: Description, orders: RankWritePlan) -> list[FileJob]:
    """Find the memory of every chunk that this rank writes, and build its files' headers."""
    file, start, row = ints(orders.file), ints(orders.start), ints(orders.row)
    offsets = ints(orders.offsets).reshape(len(row), orders.axes)
    sizes = ints(orders.sizes).reshape(len(row), orders.axes)
    jobs = []
    for at, (name, data_nbytes, block) in enumerate(orders.files):
        mine = np.flatnonzero(file == at)
        chunks = _FileChunks(description, row[mine], Boxes(offsets[mine], sizes[mine]), start[mine])
        apart = orders.apart and orders.chain[at] is None
        header = build_header(
            chunks.entries(), save_id=orders.save_id, data_nbytes=data_nbytes, block_nbytes=block, apart=apart
        )
        tensors = chunks.tensors()
        addresses = [host_address(tensor) for tensor in tensors]
        others = {
            i: scattered_memory(tensors[i], tensors[i].dtype) for i, address in enumerate(addresses) if not address
        }
        begins = np.array(addresses, np.int64)
        jobs.append(FileJob(name, header, data_nbytes, block, start[mine], begins, others, apart=apart))
    return jobs


class _FileChunks:
    """The chunks of one file: their entries in its header, and the tensors that hold exactly their boxes."""

    def __init__(self, description: Description, row: IntArray, boxes: Boxes, start: IntArray) -> None:
        d = description
        self.rows = row.tolist()
        self.pieces = d.pieces
        self.tensor = d.row_tensor[row]
        self.boxes = boxes
        self.start = start
        self.keys = d.keys
        self.ndim = d.ndim[self.tensor].tolist()
        self.dtype = [by_code(code) for code in d.dtype[self.tensor].tolist()]
        axes = d.boxes.axes
        self.held = d.boxes.take(row)
        narrow = Boxes(boxes.offsets[:, :axes], boxes.sizes[:, :axes])  # the rest is padding for other ranks' tensors
        self.offsets, self.sizes = narrow.offsets.tolist(), narrow.sizes.tolist()
        self.whole = np.all(narrow.sizes == d.shape[self.tensor], axis=1).tolist()
        self.as_held = np.all(narrow.sizes == self.held.sizes, axis=1).tolist()

    def entries(self) -> Iterator[HeaderEntry]:
        """Yield the entries of the header."""
        columns = zip(self.tensor.tolist(), self.ndim, self.dtype, self.offsets, self.sizes, self.whole, strict=True)
        for start, (tensor, ndim, dtype, offsets, sizes, whole) in zip(self.start.tolist(), columns, strict=True):
            shape = tuple(sizes[:ndim])
            name = native.chunk_name(self.keys[tensor], None if whole else Box(tuple(offsets[:ndim]), shape))
            kind, stored = dtype.in_safetensors(shape)
            yield HeaderEntry(name, kind, stored, start, start + math.prod(shape) * dtype.itemsize)

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of each chunk: a tensor of the state, or a slice of one if replicas share the work."""
        found = [self.pieces[row] for row in self.rows]
        for at, as_held in enumerate(self.as_held):
            if not as_held:
                ndim = self.ndim[at]
                found[at] = found[at][slices(relative(self.boxes.box(at, ndim), self.held.box(at, ndim)))]
        return found


# From a rank's description to its manifest, and from all manifests to what the index says of the tree and plain values.

_WINDOW_NBYTES = 8 << 20


def make_manifest(description: Description, *, allow_pickle: bool, check_replicas: bool) -> RankManifest:
    """Encode a description; a plain value that has no safe form raises an error that names it."""
    d = description
    held = np.bincount(d.row_tensor, minlength=len(d.keys)) > 0
    names = TensorNames(
        keys=d.keys,
        groups=file_groups(d),
        dtype=d.dtype.tobytes(),
        ndim=d.ndim.tobytes(),
        origin=d.origin.tobytes(),
    )
    values = PlainValues(
        keys=list(d.values),
        data=[encode_value(value, key=key, allow_pickle=allow_pickle) for key, value in d.values.items()],
    )
    return RankManifest(
        axes=d.boxes.axes,
        names=encode(names),
        shape=d.shape.tobytes(),
        alias=np.where(held, d.alias, -1).tobytes(),
        row_tensor=d.row_tensor.tobytes(),
        row_offsets=d.boxes.offsets.tobytes(),
        row_sizes=d.boxes.sizes.tobytes(),
        check_replicas=check_replicas,
        row_digest=_digests(description) if check_replicas else b"",
        tree=encode_tree(d.tree),
        values=encode(values),
    )


def _digests(description: Description) -> bytes:
    buffer = memoryview(bytearray(_WINDOW_NBYTES))
    digests = bytearray()
    for tensor in description.pieces:
        nbytes = tensor.numel() * tensor.element_size()
        address = host_address(tensor)
        digest = xxhash.xxh3_128()
        source = None if address else scattered_memory(tensor, tensor.dtype)
        for start in range(0, nbytes, _WINDOW_NBYTES):
            stop = min(start + _WINDOW_NBYTES, nbytes)
            if source is None:
                digest.update(view_memory(address + start, stop - start))
            else:
                source.read(start, stop, buffer[: stop - start])
                digest.update(buffer[: stop - start])
        digests += digest.digest()
    return bytes(digests)


def merge_rank_trees(manifests: Sequence[RankManifest]) -> bytes:
    """Merge the trees of all ranks."""
    distinct = list(dict.fromkeys(manifest.tree for manifest in manifests))
    if len(distinct) == 1:
        return distinct[0]
    return encode_tree(merge_trees([decode_tree(raw) for raw in distinct]))


def merge_rank_values(manifests: Sequence[RankManifest], tensors: Sequence[str]) -> list[tuple[str, bytes]]:
    """Merge the plain values of all ranks, sorted by key; a key must have one value, and must not be that of a tensor."""
    merged: dict[str, tuple[bytes, int]] = {}
    seen: set[bytes] = set()
    for rank, manifest in enumerate(manifests):
        if manifest.values in seen:
            continue
        seen.add(manifest.values)
        values = decode_values(manifest.values)
        for key, data in zip(values.keys, values.data, strict=True):
            known, first_rank = merged.setdefault(key, (data, rank))
            if known != data:
                raise ReplicasDiffer(
                    f"{key!r} is not the same on all ranks: ranks {first_rank} and {rank} hold different values",
                    hint="wrap state that differs by rank in sk.PerRank, or save the same value on every rank",
                    key=key,
                )
    for key, (_, first_rank) in merged.items():
        at = bisect_left(tensors, key.encode(), key=str.encode)
        if at < len(tensors) and tensors[at] == key:
            holder = next(rank for rank, manifest in enumerate(manifests) if key in decode_names(manifest.names).keys)
            raise InvalidShards(
                f"{key!r} is a plain value on rank {first_rank} but a tensor on rank {holder}",
                hint="one key must name one thing; wrap state that differs by rank in sk.PerRank",
                key=key,
            )
    return sorted(((key, data) for key, (data, _) in merged.items()), key=lambda item: item[0].encode())
