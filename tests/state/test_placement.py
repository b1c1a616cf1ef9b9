"""Where a DTensor's local part lies, against what torch's own splitting does to a tensor of distinct numbers."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _MaskPartial, _StridedShard

from shardkeep.errors import InvalidShards, UnsupportedLeaf
from shardkeep.format.region import Box, slices
from shardkeep.state.placement import Cut, dtensor_boxes, local_boxes, local_shape, possible_cuts

Ints = tuple[int, ...]


def numbered(shape: Ints) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def spec_of(shape: Ints, mesh: Ints, at: Ints | None, placements: tuple[Placement, ...], **more: Any) -> Any:
    """The parts of a DTensorSpec that count, without a process group."""
    got = None if at is None else list(at)
    mesh_like = SimpleNamespace(shape=mesh, get_coordinate=lambda: got)
    return SimpleNamespace(mesh=mesh_like, shape=torch.Size(shape), placements=placements, **more)


def left_to_right(full: torch.Tensor, mesh: Ints, at: Ints, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Split as `distribute_tensor` does, by torch's own functions."""
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if not placement.is_replicate():
            full = placement._split_tensor(full, size, with_padding=False, contiguous=False)[0][index]
    return full


def in_order(full: torch.Tensor, mesh: Ints, at: Ints, cuts: list[tuple[int, int]]) -> torch.Tensor:
    """Split by `torch.chunk`, mesh dimension by mesh dimension in the order given."""
    for mesh_dim, dim in cuts:
        full = Shard(dim)._split_tensor(full, mesh[mesh_dim], with_padding=False)[0][at[mesh_dim]]
    return full


def check(full: torch.Tensor, local: torch.Tensor, boxes: list[tuple[Box, Box]]) -> None:
    """The boxes cover the local tensor exactly once, and hold in it what they hold in the whole one."""
    seen = torch.zeros(local.shape, dtype=torch.int64)
    for there, here in boxes:
        assert there.sizes == here.sizes
        assert 0 not in here.sizes
        assert torch.equal(full[slices(there)], local[slices(here)])
        seen[slices(here)] += 1
    assert bool((seen == 1).all())


def coordinates(mesh: Ints) -> Any:
    return itertools.product(*map(range, mesh))


@st.composite
def shardings(draw: st.DrawFn, *, strided: bool = True) -> tuple[Ints, Ints, tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 8)))
    dim = st.integers(0, len(shape) - 1)
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate()), st.builds(Shard, dim)]
    if strided:
        kinds.append(st.builds(lambda d, f: _StridedShard(d, split_factor=f), dim, st.integers(1, 5)))
    return shape, mesh, tuple(draw(st.one_of(kinds)) for _ in mesh)


def as_written(placements: tuple[Placement, ...]) -> list[Cut]:
    return [Cut(i, p.dim, getattr(p, "split_factor", 1)) for i, p in enumerate(placements) if not p.is_replicate()]


@settings(deadline=None, max_examples=300)
@given(shardings())
def test_left_to_right(sharding: tuple[Ints, Ints, tuple[Placement, ...]]) -> None:
    """
    For any mix of placements, at every coordinate, the boxes hold what torch's splitting gives the rank.
    """
    shape, mesh, placements = sharding
    full = numbered(shape)
    cuts = as_written(placements)
    for at in coordinates(mesh):
        local = left_to_right(full, mesh, at, placements)

        assert local_shape(shape, mesh, at, cuts) == tuple(local.shape)
        check(full, local, local_boxes(shape, mesh, at, cuts))


@settings(deadline=None, max_examples=150)
@given(shardings())
def test_agrees_with_torchs_offsets(sharding: tuple[Ints, Ints, tuple[Placement, ...]]) -> None:
    """
    Shape, and the offset of the first box, are those of torch's own function for checkpoints.
    """
    shape, mesh, placements = sharding
    cuts = as_written(placements)
    for at in coordinates(mesh):
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)

        assert local_shape(shape, mesh, at, cuts) == tuple(size)
        if 0 not in size:
            assert local_boxes(shape, mesh, at, cuts)[0][0].offsets == tuple(offset)


@settings(deadline=None, max_examples=150)
@given(shardings(strided=False))
def test_plain_shards_are_one_box(sharding: tuple[Ints, Ints, tuple[Placement, ...]]) -> None:
    """
    Without strided placements a rank has one box or none; boxes of all ranks tile the tensor, once a replica.
    """
    shape, mesh, placements = sharding
    count = torch.zeros(shape, dtype=torch.int64)
    for at in coordinates(mesh):
        local = local_shape(shape, mesh, at, as_written(placements))
        boxes = dtensor_boxes("k", spec_of(shape, mesh, at, placements), local)
        assert len(boxes) <= 1
        for there, _ in boxes:
            count[slices(there)] += 1
    replicas = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())

    assert bool((count == replicas).all())


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 4), (3, 2), (5, 3)])
def test_fsdp_over_tensor_parallel(mesh: Ints) -> None:
    """
    FSDP cuts what tensor parallelism left: for every size, even or not, the rank's rows are those and one run.
    """
    placements = (_StridedShard(0, split_factor=mesh[1]), Shard(0))
    for rows, at in itertools.product(range(40), coordinates(mesh)):
        full = numbered((rows, 2))
        local = in_order(full, mesh, at, [(1, 0), (0, 0)])

        boxes = dtensor_boxes("k", spec_of((rows, 2), mesh, at, placements), tuple(local.shape))

        check(full, local, boxes)
        assert len(boxes) <= 1


@pytest.mark.parametrize(
    ("placements", "order"),
    [
        ((Replicate(), _StridedShard(0, split_factor=2), Shard(0)), [(2, 0), (1, 0)]),
        ((_StridedShard(0, split_factor=4), Shard(0), Shard(0)), [(1, 0), (2, 0), (0, 0)]),
        ((_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)), [(2, 0), (1, 0), (0, 0)]),
        ((_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)), [(2, 0), (0, 0), (1, 0)]),
        ((_StridedShard(0, split_factor=2), Shard(1), Shard(0)), [(2, 0), (0, 0), (1, 1)]),
        ((Shard(0), _StridedShard(1, split_factor=2), Shard(1)), [(0, 0), (2, 1), (1, 1)]),
    ],
    ids=str,
)
def test_three_dimensional_meshes(placements: tuple[Placement, ...], order: list[tuple[int, int]]) -> None:
    """
    HSDP, and FSDP over two model-parallel dimensions, are read back in the order the cuts were made.
    """
    mesh = (2, 2, 2)
    for rows, columns, at in itertools.product(range(20), (1, 5), coordinates(mesh)):
        full = numbered((rows, columns))
        local = in_order(full, mesh, at, order)

        check(full, local, dtensor_boxes("k", spec_of((rows, columns), mesh, at, placements), tuple(local.shape)))


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 4)])
def test_distribute_tensor_with_strided_placements(mesh: Ints) -> None:
    """
    The same placements applied left to right differ in uneven sizes; the local shape tells, and the boxes are right.
    """
    placements = (_StridedShard(0, split_factor=mesh[1]), Shard(0))
    for rows, at in itertools.product(range(40), coordinates(mesh)):
        full = numbered((rows,))
        local = left_to_right(full, mesh, at, placements)

        check(full, local, dtensor_boxes("k", spec_of((rows,), mesh, at, placements), tuple(local.shape)))


def test_strided_without_its_partner() -> None:
    """
    A strided placement that no other accounts for gives several disjoint boxes, in the order of the local tensor.
    """
    boxes = dtensor_boxes("k", spec_of((9,), (4,), (0,), (_StridedShard(0, split_factor=2),)), (3,))

    assert boxes == [(Box((0,), (2,)), Box((0,), (2,))), (Box((5,), (1,)), Box((2,), (1,)))]


def test_strided_on_two_dimensions_is_a_grid() -> None:
    """
    Several runs on each of two dimensions give their product.
    """
    placements = (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3))
    full = numbered((8, 12))
    for at in coordinates((2, 2)):
        local = left_to_right(full, (2, 2), at, placements)
        boxes = dtensor_boxes("k", spec_of((8, 12), (2, 2), at, placements), tuple(local.shape))

        assert len(boxes) == 6
        check(full, local, boxes)


def test_views_keep_the_written_order() -> None:
    """
    A spec that says its strides are no shard order is read left to right only.
    """
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    spec = spec_of((9,), (4, 2), (3, 0), placements, use_strided_shard_as_shard_order=False)

    assert possible_cuts("k", spec, 1) == [[Cut(0, 0, 2), Cut(1, 0)]]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_recorded_shard_order(order: Ints) -> None:
    """
    Where torch recorded another order than left to right, cuts are made in that order.
    """
    mesh = (2, 3, 2)
    placements = (Shard(0), Shard(0), Shard(0))
    for rows, at in itertools.product((0, 1, 7, 12, 25), coordinates(mesh)):
        full = numbered((rows,))
        local = in_order(full, mesh, at, [(m, 0) for m in order])
        spec = spec_of((rows,), mesh, at, placements, shard_order=((0, order),))

        check(full, local, dtensor_boxes("k", spec, tuple(local.shape)))


def test_shard_order_of_each_dimension() -> None:
    """
    Each tensor dimension has an order of its own.
    """
    mesh, shape = (2, 2, 2, 2), (7, 9)
    placements = (Shard(1), Shard(0), Shard(0), Shard(1))
    full = numbered(shape)
    for at in coordinates(mesh):
        local = in_order(full, mesh, at, [(2, 0), (1, 0), (3, 1), (0, 1)])
        spec = spec_of(shape, mesh, at, placements, shard_order=((0, (2, 1)), (1, (3, 0))))

        check(full, local, dtensor_boxes("k", spec, tuple(local.shape)))


def test_negative_dimensions() -> None:
    """
    A dimension counted from the end is the same dimension.
    """
    assert possible_cuts("k", spec_of((4, 6), (2,), (1,), (Shard(-1),)), 2) == [[Cut(0, 1)]]


def test_huge_dimensions_cost_nothing() -> None:
    """
    Runs are worked out, not listed: a dimension of a million million elements is no different.
    """
    n = 10**12 + 7
    boxes = local_boxes((n, 3), (7, 5), (6, 4), [Cut(0, 0, 3), Cut(1, 0)])

    assert (
        sum(there.sizes[0] for there, _ in boxes) == local_shape((n, 3), (7, 5), (6, 4), [Cut(0, 0, 3), Cut(1, 0)])[0]
    )
    assert boxes[-1][0].offsets[0] + boxes[-1][0].sizes[0] == n


def test_scalars_and_ranks_outside() -> None:
    """
    A replicated scalar is one box without axes; a rank outside the mesh holds nothing.
    """
    assert dtensor_boxes("k", spec_of((), (2,), (1,), (Replicate(),)), ()) == [(Box((), ()), Box((), ()))]
    assert dtensor_boxes("k", spec_of((4,), (2,), None, (Shard(0),)), (0,)) == []


@pytest.mark.parametrize(
    "placement", [Partial(), Partial("max"), _MaskPartial(offset_shape=None, offset_dim=0)], ids=repr
)
def test_partial_is_refused(placement: Placement) -> None:
    """
    A value not yet reduced is on no rank; the error names the leaf and says what to do.
    """
    with pytest.raises(UnsupportedLeaf, match=r"'a\.b'.*(?s:.*)full_tensor"):
        dtensor_boxes("a.b", spec_of((4,), (2,), (0,), (placement,)), (4,))


@pytest.mark.parametrize("placement", [Shard(1), Shard(-2), Placement()], ids=["S(1)", "S(-2)", "custom"])
def test_unknown_placements_are_refused(placement: Placement) -> None:
    """
    A placement that says nothing we understand about this tensor is refused, not guessed.
    """
    with pytest.raises(UnsupportedLeaf, match="'k'"):
        dtensor_boxes("k", spec_of((4,), (2,), (0,), (placement,)), (4,))


def test_wrong_local_shape() -> None:
    """
    A local tensor that is not what its placements give, as `from_local` allows, is reported with both shapes.
    """
    with pytest.raises(InvalidShards, match=r"'k'.*\(4,\).*\(3,\) at \(0,\)"):
        dtensor_boxes("k", spec_of((5,), (2,), (0,), (Shard(0),)), (4,))
