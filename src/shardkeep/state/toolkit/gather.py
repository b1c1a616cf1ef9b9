"""
Sharded state dicts made whole: on all ranks, or computed by all and kept by some.

Each sharded tensor is gathered by itself, so beyond the result a rank holds one full tensor at a time. Bytes are moved,
not numbers: every dtype travels over every backend, bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkeep.errors import InvalidShards
from shardkeep.format.region import Box, Ints, slices
from shardkeep.state.leaves import describe_leaf
from shardkeep.state.toolkit.bits import as_bytes, carrier_of, copy_bits
from shardkeep.state.toolkit.census import compare_trees, sharded_in
from shardkeep.state.toolkit.iterate import _identity_func, check_types, iterate_state_dict
from shardkeep.state.toolkit.recognise import awaited, is_sharded_tensor, spell

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    compare_trees(state_dict, pg, lambda: _check(state_dict, type_check=type_check))
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


def _check(tree: Any, *, type_check: bool) -> None:
    if type_check:
        check_types(tree)
    for path, tensor in sharded_in(tree):
        if is_sharded_tensor(tensor):
            _pieces_of(spell(path), tensor)


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
    full: torch.Tensor = awaited(everywhere.to_local())
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
