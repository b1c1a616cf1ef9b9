"""
Where this rank's part of a DTensor lies in the whole tensor: pairs of boxes, in the whole and in the local tensor.

A sharding is a sequence of cuts. Each cut splits what the cuts before it left of one tensor dimension over one mesh
dimension, the way `torch.chunk` does: ceil-sized chunks, the last ones short or empty. Nothing is communicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkeep.errors import InvalidShards, UnsupportedLeaf
from shardkeep.format.boxes import Box, Ints, grid

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

Run = tuple[int, int]
"""Start and length of consecutive indices along one dimension."""


class Cut(NamedTuple):
    mesh_dim: int
    tensor_dim: int
    split_factor: int = 1
    """Above 1, the dimension is first split into that many parts, and the rank has its chunk of every part."""
    # torch does so for cuts made after cuts further right (FSDP over tensor parallelism), and for some flattening views.


def local_layout(
    shape: Ints, mesh_shape: Ints, coordinate: Ints, cuts: Sequence[Cut]
) -> tuple[Ints, list[tuple[Box, Box]]]:
    """Return the shape of the local tensor at a coordinate, and its non-empty boxes in the whole and in the local tensor."""
    runs = [[(0, n)] if n else [] for n in shape]
    for mesh_dim, tensor_dim, split_factor in cuts:
        axis = runs[tensor_dim]
        size = sum(n for _, n in axis)
        kept: list[Run] = []
        for part in range(split_factor):
            start, stop = _chunk(size, split_factor, part)
            lo, hi = _chunk(stop - start, mesh_shape[mesh_dim], coordinate[mesh_dim])
            _extend(kept, axis, start + lo, start + hi)
        runs[tensor_dim] = kept
    return tuple([sum([n for _, n in axis]) for axis in runs]), _pair(runs)


def _chunk(size: int, count: int, index: int) -> Run:
    """Return start and stop of chunk `index` of `count`, as `torch.chunk` cuts `size` elements."""
    each = -(-size // count)
    start = min(each * index, size)
    return start, min(start + each, size)


def _extend(kept: list[Run], axis: list[Run], start: int, stop: int) -> None:
    """Append elements `start..stop` of the indices in `axis`, joining runs that touch."""
    position = 0
    for offset, length in axis:
        lo, hi = max(start - position, 0), min(stop - position, length)
        position += length
        if lo >= hi:
            continue
        if kept and sum(kept[-1]) == offset + lo:
            kept[-1] = (kept[-1][0], kept[-1][1] + hi - lo)
        else:
            kept.append((offset + lo, hi - lo))


def _pair(runs: list[list[Run]]) -> list[tuple[Box, Box]]:
    """Pair each box of the product of the runs with its box in the local tensor, where they follow one another."""
    placed: list[list[Run]] = []
    for axis in runs:
        ends = list(itertools.accumulate(n for _, n in axis))
        placed.append([(end - n, n) for end, (_, n) in zip(ends, axis, strict=True)])
    return list(zip(grid(runs), grid(placed), strict=True))


_MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], list[tuple[Box, Box]]] = {}
"""The boxes of local tensors, by all that they follow from: many tensors of a model have one form."""


def dtensor_boxes(key: str, spec: DTensorSpec, local: Ints) -> list[tuple[Box, Box]]:
    """Return the boxes of a DTensor's local tensor, which has shape `local`; none for a rank outside the mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return []
    where, mesh_shape, shape = tuple(coordinate), tuple(spec.mesh.shape), tuple(spec.shape)
    cuts_of = ((type(each), getattr(each, "dim", None), getattr(each, "split_factor", 1)) for each in spec.placements)
    order = getattr(spec, "shard_order", None), getattr(spec, "use_strided_shard_as_shard_order", True)
    form = (where, mesh_shape, shape, local, *cuts_of, *order)
    if (known := _known.get(form)) is not None:
        return known
    expected: Ints = ()
    for cuts in possible_cuts(key, spec, mesh_shape):
        expected, boxes = local_layout(shape, mesh_shape, where, cuts)
        if 0 in local and 0 in expected and expected != local:  # FSDP may narrow another dimension of an empty tensor
            expected, boxes = local, []
        if expected == local:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[form] = boxes
            return boxes
    raise InvalidShards(
        f"{key!r}: the local tensor is {local}, but {spec.placements} of {shape} over a mesh of {mesh_shape} is "
        f"{expected} at {where}",
        hint="give DTensor.from_local the shape and stride of the whole tensor, and chunk it as torch.chunk does",
        key=key,
    )


def possible_cuts(key: str, spec: DTensorSpec, mesh_shape: Ints) -> list[list[Cut]]:
    """
    Return the cuts that a DTensor's placements may mean, the likelier first.

    Strided placements have two meanings. FSDP cuts what tensor parallelism left and writes strided placements, which
    torch's redistribute undoes; `distribute_tensor` applies the same placements left to right. The two differ only for
    uneven sizes, and then in the shape of some local tensor, by which the caller distinguishes them.
    """
    ndim = len(spec.shape)
    cuts = [_read_cut(key, i, placement, ndim) for i, placement in enumerate(spec.placements)]
    as_written = [cut for cut in cuts if cut is not None and mesh_shape[cut.mesh_dim] > 1]
    if len(as_written) < 2:
        return [as_written]
    if any(cut.split_factor > 1 for cut in as_written) and getattr(spec, "use_strided_shard_as_shard_order", True):
        undone = _undo_strides(as_written, mesh_shape)
        return [as_written] if undone is None else [undone, as_written]
    # In the order of execution that torch recorded for each tensor dimension, if it did.
    recorded = getattr(spec, "shard_order", None) or ()
    order = {mesh_dim: i for _, mesh_dims in recorded for i, mesh_dim in enumerate(mesh_dims)}
    return [sorted(as_written, key=lambda cut: order.get(cut.mesh_dim, cut.mesh_dim))]


def _read_cut(key: str, mesh_dim: int, placement: Any, ndim: int) -> Cut | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    partial = placement.is_partial()
    if partial or not isinstance(dim, int) or not -ndim <= dim < ndim:
        why = "its value is not yet reduced over ranks" if partial else "shardkeep does not know this placement"
        raise UnsupportedLeaf(
            f"{key!r} is a DTensor of {ndim} dimensions placed as {placement!r}: {why}",
            hint="save t.full_tensor(), or t.redistribute(...) to Shard or Replicate placements",
            key=key,
        )
    return Cut(mesh_dim, dim % ndim, int(getattr(placement, "split_factor", 1)))


def _undo_strides(cuts: list[Cut], mesh_shape: Ints) -> list[Cut] | None:
    """Return the plain cuts, in order of execution, that strided ones mean; None if there are none."""
    # A split factor is the number of parts before the cut: the product of the mesh sizes of cuts of the same dimension that
    # were made earlier but are written further right.
    order: dict[int, list[Cut]] = {}
    for mesh_dim, tensor_dim, split_factor in reversed(cuts):
        earlier = order.setdefault(tensor_dim, [])
        parts, at = 1, 0
        while parts < split_factor and at < len(earlier):
            parts *= mesh_shape[earlier[at].mesh_dim]
            at += 1
        if parts != split_factor:
            return None
        earlier.insert(at, Cut(mesh_dim, tensor_dim))
    return [cut for dim in order.values() for cut in dim]
