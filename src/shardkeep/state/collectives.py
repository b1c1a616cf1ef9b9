"""
Before a gather: do the ranks that share tensors hold the same ones, in the same order?

Collectives that do not match wait for each other until the process group gives up, or mix up tensors. So the ranks of
each mesh and group compare, through the store, a digest of what they are about to gather; where it differs, or one of
them cannot go on, all of them raise the same error and no collective has begun.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World
from shardkeep.errors import CheckpointError, InvalidShards, RanksDisagree, StateMismatch
from shardkeep.format.boxes import (
    Box,
    Ints,
    flat_range_to_boxes,
    intersect,
    relative,
    slices,
    whole,
)
from shardkeep.options import Options
from shardkeep.state.leaves import (
    TreePath,
    as_bytes,
    carrier_of,
    copy_bits,
    describe_leaf,
    is_dtensor,
    is_sharded_tensor,
    path_name,
    wait_tensor,
)
from shardkeep.state.offload import _identity_func, check_types, iterate_state_dict
from shardkeep.state.placement import dtensor_boxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


RankSet = tuple[int, ...]


def check_same_tensors(tree: Any, pg: ProcessGroup | None, check: Callable[[], None]) -> None:
    """
    Raise, on all ranks that share tensors, unless they hold the same ones in the same order and `check` passes.

    Args:
        tree: what this rank is about to gather.
        pg: gathers the ShardedTensors; each its own group by default.
        check: looks at this rank's own tree, and raises a `CheckpointError` where it cannot be gathered.

    Raises:
        RanksDisagree: another tensor is next on another rank; names both.
        RanksSilent: a rank did not come at all.

    """
    shared: dict[RankSet, list[list[str]]] = {}
    for path, tensor in sharded_in(tree):
        shared.setdefault(_ranks_of(tensor, pg), []).append([path_name(path), _form(tensor)])
    failure: CheckpointError | None = None
    try:
        check()
    except CheckpointError as error:
        failure = error
    # Small sets first, so that what goes wrong in one is known to the larger ones its ranks belong to; and all ranks
    # in one order, so that none waits in one set for a rank that waits for it in another.
    for ranks in sorted(shared, key=lambda each: (len(each), each)):
        try:
            _compare(ranks, shared[ranks], failure)
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _compare(ranks: RankSet, lines: list[list[str]], failure: CheckpointError | None) -> None:
    """Compare `lines` with those of the other ranks of the set, or tell them that this one cannot go on."""
    world = _world_of(ranks)
    text = json.dumps(lines).encode()

    def work() -> bytes:
        if failure is not None:
            raise failure
        return blake2b(text, digest_size=16).digest()

    with rendezvous(world, "gather a state dict") as meeting:
        if meeting.agree("compare", work, _differ) == b"differ":
            meeting.agree("name what differs", lambda: text, _name_difference)


def _differ(said: list[bytes]) -> list[bytes]:
    return [b"" if len(set(said)) == 1 else b"differ"] * len(said)


def _name_difference(said: list[bytes]) -> list[bytes]:
    first = json.loads(said[0])
    for number, word in enumerate(said):
        for ours, theirs in itertools.zip_longest(first, json.loads(word), fillvalue=["nothing", ""]):
            if ours != theirs:
                raise RanksDisagree(
                    f"the tensors to gather differ: {' '.join(ours).strip()} on the first of the ranks that share "
                    f"them, {' '.join(theirs).strip()} on number {number} of them",
                    hint="give all ranks state dicts with the same sharded tensors in the same order",
                )
    return [b""] * len(said)


def sharded_in(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Return the sharded tensors of a tree, and where they stand, in the order in which they are gathered."""
    if is_dtensor(tree) or is_sharded_tensor(tree):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from sharded_in(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from sharded_in(value, (*path, index))


def _ranks_of(tensor: Any, pg: ProcessGroup | None) -> RankSet:
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a sharded tensor

    if is_dtensor(tensor):
        return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(pg or tensor._process_group or dist.group.WORLD)))


def _form(tensor: Any) -> str:
    if is_dtensor(tensor):
        return f"({tensor.dtype} {tuple(tensor.shape)} as {tensor.placements})"
    return f"({tensor.dtype} {tuple(tensor.size())} as a ShardedTensor)"


def _world_of(ranks: RankSet) -> World:
    """Return the world of these ranks; this process alone where it is none of them, or where all others are made up."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded, as there is a sharded tensor

    mine = c10d.get_rank()
    if len(ranks) == 1 or mine not in ranks or c10d.get_backend() == "fake":
        return World(0, 1)
    digest = blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    store = c10d.PrefixStore(f"shardkeep/ranks/{digest}", c10d._get_default_store())
    return World(ranks.index(mine), len(ranks), store, Options().timeout_s)


# Sharded state dicts made whole: on all ranks, or computed by all and kept by some.
#
# Each sharded tensor is gathered by itself, so beyond the result a rank holds one full tensor at a time. Bytes are
# moved,
# not numbers: every dtype travels over every backend, bit for bit.


def gather_state_dict(
    state_dict: dict[str, Any],
    *,
    pg: ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
) -> dict[str, Any]:
    """
    Return the state dict with each DTensor and ShardedTensor as one full tensor.

    All ranks that hold parts of a tensor must call this, with trees of the same order, which is checked before
    anything is gathered. Gathered values are detached; other tensors are in the result as they are.

    Args:
        state_dict: the tree; never changed.
        pg: gathers ShardedTensors, each over its own group by default. DTensors go over their mesh.
        device: where ShardedTensors are gathered; by default where their shards are said to be.
        cpu_offload: move each full tensor to the CPU as soon as it is gathered.
        ranks_only: ranks that get the result; the others take part and get an empty dict. Empty for all ranks.
        type_check: refuse values that are neither tensors nor of a plain type; else copy them deeply.

    Raises:
        UnexpectedValue: a value of another type, and `type_check` is on.
        InvalidShards: the shards of a ShardedTensor are not what its metadata say.
        RanksDisagree: ranks that share a mesh or group hold other tensors on it; the same error on all of them.
        CheckpointError: another rank cannot go on.

    """
    check_same_tensors(state_dict, pg, lambda: _check_gatherable(state_dict, type_check=type_check))
    with torch.no_grad():
        gathered: dict[str, Any] = iterate_state_dict(
            state_dict,
            _full_of_sharded_tensor,
            _full_of_dtensor,
            _identity_func,
            pg=pg,
            device=device,
            cpu_offload=cpu_offload,
            ranks_only=ranks_only,
            type_check=type_check,
        )
    return gathered


def all_gather_sharded_tensor(
    sharded_tensor: Any, pg: ProcessGroup | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """
    Return the full tensor, on every rank of the group.

    The shards may be of any size and in any order, cut along any dimensions, several or none on a rank; torch takes
    equal rows in the order of ranks for granted.

    Args:
        sharded_tensor: its metadata say where every rank's shards are.
        pg: the group; that of the tensor by default.
        device: where to gather; by default where the first shard is said to be, if the group can.

    Raises:
        InvalidShards: this rank's shards are not what the metadata say.

    """
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor

    group = pg or sharded_tensor._process_group or dist.group.WORLD
    metadata = sharded_tensor.metadata()
    pieces = _pieces_of("a ShardedTensor", sharded_tensor)
    where = _device_for(metadata, group) if device is None else device
    boxes = [
        (each.placement.rank(), Box(tuple(each.shard_offsets), tuple(each.shard_sizes)))
        for each in metadata.shards_metadata
    ]
    blank = _Blank(tuple(metadata.size), sharded_tensor.dtype, where)
    if _chunked_in_rank_order(blank.shape, boxes, group):
        return _gather_chunks(blank, pieces, group)
    return _gather_boxes(blank, pieces, boxes, group)


def _check_gatherable(tree: Any, *, type_check: bool) -> None:
    if type_check:
        check_types(tree)
    for path, tensor in sharded_in(tree):
        if is_sharded_tensor(tensor):
            _pieces_of(path_name(path), tensor)


def _pieces_of(name: str, sharded_tensor: Any) -> dict[Ints, torch.Tensor]:
    """Return this rank's shards as plain tensors by their offsets, if they are those the metadata give to this rank."""
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor

    pieces = {piece.offsets: piece.tensor for piece in describe_leaf(name, sharded_tensor).pieces}
    given = {
        tuple(each.shard_offsets): tuple(each.shard_sizes)
        for each in sharded_tensor.metadata().shards_metadata
        if each.placement.rank() == dist.get_rank() and 0 not in each.shard_sizes
    }
    held = {offsets: tuple(tensor.shape) for offsets, tensor in pieces.items()}
    if held != given:
        raise InvalidShards(
            f"{name!r} has local shards {held} (size by offsets), its metadata give this rank {given}",
            hint="a ShardedTensor is gathered by its metadata, which must be the same on all ranks",
            key=name,
        )
    return pieces


class _Blank(NamedTuple):
    """A tensor to be made."""

    shape: Ints
    dtype: torch.dtype
    device: torch.device

    def rows(self, count: int) -> torch.Tensor:
        return torch.empty((count, *self.shape[1:]), dtype=self.dtype, device=self.device)


def _full_of_sharded_tensor(
    value: Any, pg: ProcessGroup | None, device: torch.device | None, companion_obj: Any
) -> torch.Tensor:
    del companion_obj
    full = all_gather_sharded_tensor(value, pg, device)
    shards = value.local_shards()
    return full.to(shards[0].tensor.device if shards else torch.device("cpu"))


def _full_of_dtensor(
    value: Any, pg: ProcessGroup | None, device: torch.device | None, companion_obj: Any
) -> torch.Tensor:
    del pg, device, companion_obj
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - loaded, as there is a DTensor

    mesh = value.device_mesh
    # One that was offloaded goes back to where the mesh can talk.
    there = value if value.device.type == mesh.device_type else value.to(mesh.device_type)
    dtype = there.dtype
    if not any(placement.is_partial() for placement in there.placements):  # what is summed has to stay a number
        there = _viewed_as(carrier_of(dtype), there)
    everywhere = there.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    full: torch.Tensor = wait_tensor(everywhere.to_local())
    return full if full.dtype == dtype else full.view(dtype)


def _viewed_as(dtype: torch.dtype, dtensor: Any) -> Any:
    """Return a DTensor over the same memory that is of another dtype, of the same size."""
    if dtensor.dtype == dtype:
        return dtensor
    spec = dtensor._spec
    viewed = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return type(dtensor)(dtensor._local_tensor.view(dtype), viewed, requires_grad=False)


def _device_for(metadata: Any, group: Any) -> torch.device:
    """Choose from what all ranks know alike: a rank without shards must choose as the others do."""
    able = [device.type for device in group._device_types]
    said = [each.placement.device() for each in metadata.shards_metadata if each.placement.device() is not None]
    kind = said[0].type if said and said[0].type in able else "cpu" if "cpu" in able else able[0]
    return torch.device(kind)


def _chunked_in_rank_order(shape: Ints, boxes: list[tuple[int, Box]], group: Any) -> bool:
    """Say whether the shards are those `torch.chunk` makes of the rows, the first on the first rank."""
    import torch.distributed as dist  # noqa: PLC0415

    if not shape or 0 in shape:
        return False
    ranks = dist.get_process_group_ranks(group)
    rows, rest = shape[0], shape[1:]
    each = -(-rows // len(ranks))
    expected = {
        (rank, Box((at * each, *(0,) * len(rest)), (min(each, rows - at * each), *rest)))
        for at, rank in enumerate(ranks)
        if at * each < rows
    }
    return {(rank, box) for rank, box in boxes if box.volume} == expected


def _gather_chunks(blank: _Blank, pieces: dict[Ints, torch.Tensor], group: Any) -> torch.Tensor:
    """Gather in one collective, the last chunks padded to the size of the others."""
    import torch.distributed as dist  # noqa: PLC0415

    world_size = dist.get_world_size(group)
    chunk_rows = -(-blank.shape[0] // world_size)
    mine = blank.rows(chunk_rows)
    for piece in pieces.values():
        copy_bits(mine[: piece.shape[0]], piece)
    padded = blank.rows(chunk_rows * world_size)
    # Named all_gather_into_tensor before torch 2.13, which warns of that name.
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(as_bytes(padded), as_bytes(mine), group=group)
    return padded[: blank.shape[0]]


def _gather_boxes(
    blank: _Blank, pieces: dict[Ints, torch.Tensor], boxes: list[tuple[int, Box]], group: Any
) -> torch.Tensor:
    """Let each owner broadcast its shards, one after another, straight into the full tensor where that is one run."""
    import torch.distributed as dist  # noqa: PLC0415

    full = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device)
    for owner, box in boxes:
        if not box.volume:
            continue
        target = full[slices(box)]
        carrier = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if owner == dist.get_rank():
            copy_bits(carrier, pieces[box.offsets])
        dist.broadcast(as_bytes(carrier), src=owner, group=group)
        if carrier is not target:
            copy_bits(target, carrier)
    return full


# Full tensors of one rank sent to all, of which each rank keeps only what it has a place for.
#
# The tensors' bytes are one long row, sent in batches through one buffer of a fixed size: whatever the tree and its
# tensors measure, no rank holds more than the batch beyond what it keeps. Bytes are moved, not numbers, so every
# dtype
# travels over every backend, bit for bit.

BATCH_BYTES = 64 << 20
"""Size of the buffer: long enough for full bandwidth, short beside any model."""
_ALIGNED = 16  # every dtype can be viewed at multiples of this


class TensorSpec(NamedTuple):
    """A tensor that is sent."""

    name: str
    shape: Ints
    dtype: torch.dtype


class Destination(NamedTuple):
    """Where a tensor goes on this rank."""

    result: Any
    """What stands in the tree once all has arrived."""
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """Memory to be filled, and which box of the full tensor each piece of it is."""


class _Run(NamedTuple):
    """Consecutive elements of one tensor, in a batch."""

    number: int
    start: int
    stop: int
    at_byte: int


def destination_for(cargo: TensorSpec, destination: Any, device: torch.device, *, refill: bool = True) -> Destination:
    """
    Make room for a tensor on this rank.

    A DTensor takes its own part only: into its memory, or into new memory on `device` where it is on meta or `refill`
    is false. For anything else a full tensor is made there.

    Raises:
        StateMismatch: the destination is a tensor of another shape, or one to fill of a lesser kind of dtype.
        InvalidShards, UnsupportedLeaf: a DTensor whose placements do not say where its part lies.

    """
    check_shape(cargo, destination)
    if not is_dtensor(destination):
        full = torch.empty(cargo.shape, dtype=cargo.dtype, device=device)
        return Destination(full, ((whole(cargo.shape), full),))
    dtensor = wait_tensor(destination)
    if dtensor._local_tensor.is_meta or not refill:
        dtensor = torch.empty_like(dtensor, dtype=cargo.dtype, device=device, requires_grad=False)
    elif not torch.can_cast(cargo.dtype, dtensor.dtype):
        raise StateMismatch(
            f"{cargo.name!r} is {cargo.dtype} in the full state dict, {dtensor.dtype} here, which cannot hold it",
            hint="convert one of the two, or leave the key out",
            mismatched=[cargo.name],
        )
    local = dtensor._local_tensor.detach()
    boxes = dtensor_boxes(cargo.name, dtensor._spec, tuple(local.shape))
    return Destination(dtensor, tuple((there, local[slices(here)]) for there, here in boxes))


def check_shape(cargo: TensorSpec, destination: Any) -> None:
    """Raise `StateMismatch` if the destination is a tensor of another shape."""
    if isinstance(destination, torch.Tensor) and tuple(destination.size()) != cargo.shape:
        raise StateMismatch(
            f"{cargo.name!r} has shape {cargo.shape} in the full state dict, {tuple(destination.size())} here",
            hint="give a full state dict of the same model, or leave the key out",
            mismatched=[cargo.name],
        )


def communication_device(device: torch.device, pg: ProcessGroup | None) -> torch.device:
    """Return `device` if the group can send from there, else one from which it can."""
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and a single process needs none

    if not (dist.is_available() and dist.is_initialized()):
        return device
    group: Any = pg or dist.group.WORLD
    able = [each.type for each in group._device_types]
    return device if device.type in able else torch.device(able[0])


def broadcast_batches(
    cargoes: Sequence[TensorSpec],
    sources: Sequence[torch.Tensor] | None,
    berths: Sequence[Destination],
    device: torch.device,
    pg: ProcessGroup | None,
    *,
    batch_bytes: int,
    sender: int = 0,
) -> None:
    """
    Fill the berths of all ranks with the tensors of one.

    Args:
        cargoes: the tensors, the same on all ranks.
        sources: their values on the rank that sends; None on the others.
        berths: where they go on this rank.
        device: where the buffer is, on a kind of device the group can talk from.
        pg: the group; None for all ranks, or where there is only this one.
        batch_bytes: the longest batch, the same on all ranks.
        sender: the rank that sends, counted within the group.

    """
    batches = list(_batches(cargoes, batch_bytes))
    length = max((_end(cargoes, pieces[-1]) for pieces in batches), default=0)
    buffer = torch.empty(length, dtype=torch.uint8, device=device)
    for pieces in batches:
        batch = buffer[: _end(cargoes, pieces[-1])]
        if sources is not None:
            for piece in pieces:
                for box, values in _boxes_in(batch, cargoes[piece.number], piece):
                    copy_bits(values, sources[piece.number][slices(box)])
        _broadcast(batch, pg, sender)
        for piece in pieces:
            for box, values in _boxes_in(batch, cargoes[piece.number], piece):
                copy_box(box, values, berths[piece.number])


def copy_box(box: Box, values: torch.Tensor, berth: Destination) -> None:
    """Copy the elements of one box of a full tensor to where a berth wants them."""
    for wanted, memory in berth.parts:
        common = intersect(wanted, box)
        if common is not None:
            copy_bits(memory[slices(relative(common, wanted))], values[slices(relative(common, box))])


def _batches(cargoes: Sequence[TensorSpec], limit_bytes: int) -> Iterator[list[_Run]]:
    """Cut the tensors' elements, one after another, into batches of at most `limit_bytes`; all ranks alike."""
    batch: list[_Run] = []
    used = 0
    for number, cargo in enumerate(cargoes):
        count, start = math.prod(cargo.shape), 0
        while start < count:
            room = (limit_bytes - used) // cargo.dtype.itemsize
            if room <= 0 and batch:
                yield batch
                batch, used = [], 0
                continue
            stop = min(count, start + max(room, 1))
            batch.append(_Run(number, start, stop, used))
            used += -(-(stop - start) * cargo.dtype.itemsize // _ALIGNED) * _ALIGNED
            start = stop
    if batch:
        yield batch


def _end(cargoes: Sequence[TensorSpec], piece: _Run) -> int:
    return piece.at_byte + (piece.stop - piece.start) * cargoes[piece.number].dtype.itemsize


def _boxes_in(batch: torch.Tensor, cargo: TensorSpec, piece: _Run) -> Iterator[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor that a piece is made of, each with its place in the batch."""
    row = batch[piece.at_byte : piece.at_byte + (piece.stop - piece.start) * cargo.dtype.itemsize].view(cargo.dtype)
    at = 0
    for box in flat_range_to_boxes(cargo.shape, piece.start, piece.stop):
        yield box, row[at : at + box.volume].view(box.sizes)
        at += box.volume


def _broadcast(batch: torch.Tensor, pg: ProcessGroup | None, sender: int) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and a single process needs none

    if dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1:
        dist.broadcast(batch, src=dist.get_process_group_ranks(pg or dist.group.WORLD)[sender], group=pg)
