"""
Full tensors of one rank sent to all, of which each rank keeps only what it has a place for.

The tensors' bytes are one long row, sent in batches through one buffer of a fixed size: whatever the tree and its
tensors measure, no rank holds more than the batch beyond what it keeps. Bytes are moved, not numbers, so every dtype
travels over every backend, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkeep.errors import StateMismatch
from shardkeep.format.region import Box, Ints, flat_range_to_boxes, intersect, relative, slices, whole
from shardkeep.state.placement import dtensor_boxes
from shardkeep.state.toolkit.bits import copy_bits
from shardkeep.state.toolkit.recognise import awaited, is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BATCH_BYTES = 64 << 20
"""Size of the buffer: long enough for full bandwidth, short beside any model."""
_ALIGNED = 16  # every dtype can be viewed at multiples of this


class Cargo(NamedTuple):
    """A tensor that is sent."""

    name: str
    shape: Ints
    dtype: torch.dtype


class Berth(NamedTuple):
    """Where a tensor goes on this rank."""

    result: Any
    """What stands in the tree once all has arrived."""
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """Memory to be filled, and which box of the full tensor each piece of it is."""


class _Piece(NamedTuple):
    """Consecutive elements of one tensor, in a batch."""

    number: int
    start: int
    stop: int
    at_byte: int


def berth_for(cargo: Cargo, destination: Any, device: torch.device, *, refill: bool = True) -> Berth:
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
        return Berth(full, ((whole(cargo.shape), full),))
    dtensor = awaited(destination)
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
    return Berth(dtensor, tuple((there, local[slices(here)]) for there, here in boxes))


def check_shape(cargo: Cargo, destination: Any) -> None:
    """Raise `StateMismatch` if the destination is a tensor of another shape."""
    if isinstance(destination, torch.Tensor) and tuple(destination.size()) != cargo.shape:
        raise StateMismatch(
            f"{cargo.name!r} has shape {cargo.shape} in the full state dict, {tuple(destination.size())} here",
            hint="give a full state dict of the same model, or leave the key out",
            mismatched=[cargo.name],
        )


def talking_device(device: torch.device, pg: ProcessGroup | None) -> torch.device:
    """Return `device` if the group can send from there, else one from which it can."""
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and a single process needs none

    if not (dist.is_available() and dist.is_initialized()):
        return device
    group: Any = pg or dist.group.WORLD
    able = [each.type for each in group._device_types]
    return device if device.type in able else torch.device(able[0])


def send(
    cargoes: Sequence[Cargo],
    sources: Sequence[torch.Tensor] | None,
    berths: Sequence[Berth],
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
                deliver(box, values, berths[piece.number])


def deliver(box: Box, values: torch.Tensor, berth: Berth) -> None:
    """Copy the elements of one box of a full tensor to where a berth wants them."""
    for wanted, memory in berth.parts:
        common = intersect(wanted, box)
        if common is not None:
            copy_bits(memory[slices(relative(common, wanted))], values[slices(relative(common, box))])


def _batches(cargoes: Sequence[Cargo], limit_bytes: int) -> Iterator[list[_Piece]]:
    """Cut the tensors' elements, one after another, into batches of at most `limit_bytes`; all ranks alike."""
    batch: list[_Piece] = []
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
            batch.append(_Piece(number, start, stop, used))
            used += -(-(stop - start) * cargo.dtype.itemsize // _ALIGNED) * _ALIGNED
            start = stop
    if batch:
        yield batch


def _end(cargoes: Sequence[Cargo], piece: _Piece) -> int:
    return piece.at_byte + (piece.stop - piece.start) * cargoes[piece.number].dtype.itemsize


def _boxes_in(batch: torch.Tensor, cargo: Cargo, piece: _Piece) -> Iterator[tuple[Box, torch.Tensor]]:
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
