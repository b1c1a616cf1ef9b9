"""Where a DTensor's local part lies, against what torch's own splitting does to a tensor of distinct numbers."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _MaskPartial, _StridedShard

from shardkeep.errors import InvalidShards, UnsupportedLeaf
from shardkeep.format.boxes import Box, slices
from shardkeep.state.leaves import describe_leaf
from shardkeep.state.placement import Cut, dtensor_boxes, local_layout, possible_cuts
from tests.support.rank_pool import RankPool

Ints = tuple[int, ...]


def numbered(shape: Ints) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def spec_of(shape: Ints, mesh: Ints, at: Ints | None, placements: tuple[Placement, ...], **more: Any) -> Any:
    """The parts of a DTensorSpec that count, without a process group."""
    got = None if at is None else list(at)
    mesh_like = SimpleNamespace(shape=mesh, get_coordinate=lambda: got)
    return SimpleNamespace(mesh=mesh_like, shape=torch.Size(shape), placements=placements, **more)


def left_to_right(full: torch.Tensor, mesh: Ints, at: Ints, placements: tuple[Placement, ...]) -> torch.Tensor:
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if not placement.is_replicate():
            full = placement._split_tensor(full, size, with_padding=False, contiguous=False)[0][index]
    return full


def in_order(full: torch.Tensor, mesh: Ints, at: Ints, cuts: list[tuple[int, int]]) -> torch.Tensor:
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


@settings(deadline=None, max_examples=120)
@given(shardings())
def test_left_to_right(sharding: tuple[Ints, Ints, tuple[Placement, ...]]) -> None:
    """For any mix of placements, at every coordinate, the boxes hold what torch's own functions give the rank."""
    shape, mesh, placements = sharding
    full = numbered(shape)
    for at in coordinates(mesh):
        local = left_to_right(full, mesh, at, placements)
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
        found, boxes = local_layout(shape, mesh, at, as_written(placements))
        assert found == tuple(local.shape) == tuple(size)
        check(full, local, boxes)
        if 0 not in size:
            assert boxes[0][0].offsets == tuple(offset)


@settings(deadline=None, max_examples=80)
@given(shardings(strided=False))
def test_plain_shards_are_one_box(sharding: tuple[Ints, Ints, tuple[Placement, ...]]) -> None:
    """Without strided placements a rank has one box or none; boxes of all ranks tile the tensor, once a replica."""
    shape, mesh, placements = sharding
    count = torch.zeros(shape, dtype=torch.int64)
    for at in coordinates(mesh):
        local = local_layout(shape, mesh, at, as_written(placements))[0]
        boxes = dtensor_boxes("k", spec_of(shape, mesh, at, placements), local)
        assert len(boxes) <= 1
        for there, _ in boxes:
            count[slices(there)] += 1
    replicas = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.is_replicate())
    assert bool((count == replicas).all())


@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (2, 4), (3, 2), (5, 3)])
def test_fsdp_over_tensor_parallel(mesh: Ints) -> None:
    """
    FSDP cuts what tensor parallelism left: for every size, even or not, the rank's rows are those and one run. Applied
    left to right, as `distribute_tensor` does, the same placements differ in uneven sizes; the local shape decides.
    """
    placements = (_StridedShard(0, split_factor=mesh[1]), Shard(0))
    for rows, at in itertools.product(range(40), coordinates(mesh)):
        full = numbered((rows, 2))
        local = in_order(full, mesh, at, [(1, 0), (0, 0)])
        boxes = dtensor_boxes("k", spec_of((rows, 2), mesh, at, placements), tuple(local.shape))
        check(full, local, boxes)
        assert len(boxes) <= 1
        if mesh in ((2, 2), (4, 2), (2, 4)):  # with others a shape may not tell
            local = left_to_right(full, mesh, at, placements)
            check(full, local, dtensor_boxes("k", spec_of((rows, 2), mesh, at, placements), tuple(local.shape)))


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
    """HSDP, and FSDP over two model-parallel dimensions, are read back in the order the cuts were made."""
    mesh = (2, 2, 2)
    for rows, columns, at in itertools.product(range(20), (1, 5), coordinates(mesh)):
        full = numbered((rows, columns))
        local = in_order(full, mesh, at, order)
        check(full, local, dtensor_boxes("k", spec_of((rows, columns), mesh, at, placements), tuple(local.shape)))


def test_strided_without_its_partner() -> None:
    boxes = dtensor_boxes("k", spec_of((9,), (4,), (0,), (_StridedShard(0, split_factor=2),)), (3,))
    assert boxes == [(Box((0,), (2,)), Box((0,), (2,))), (Box((5,), (1,)), Box((2,), (1,)))]


def test_runs_that_touch_are_one() -> None:
    assert local_layout((8,), (1,), (0,), [Cut(0, 0, 4)])[1] == [(Box((0,), (8,)), Box((0,), (8,)))]
    assert local_layout((4,), (2,), (0,), [Cut(0, 0, 4)])[1] == [(Box((0,), (4,)), Box((0,), (4,)))]
    assert local_layout((4,), (2,), (1,), [Cut(0, 0, 4)])[1] == []


def test_views_keep_the_written_order() -> None:
    """A spec that says its strides are no shard order is read left to right only."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    spec = spec_of((9,), (4, 2), (3, 0), placements, use_strided_shard_as_shard_order=False)
    assert possible_cuts("k", spec, (4, 2)) == [[Cut(0, 0, 2), Cut(1, 0)]]


def test_shard_order_of_each_dimension() -> None:
    mesh, shape = (2, 2, 2, 2), (7, 9)
    placements = (Shard(1), Shard(0), Shard(0), Shard(1))
    full = numbered(shape)
    for at in coordinates(mesh):
        local = in_order(full, mesh, at, [(2, 0), (1, 0), (3, 1), (0, 1)])
        spec = spec_of(shape, mesh, at, placements, shard_order=((0, (2, 1)), (1, (3, 0))))
        check(full, local, dtensor_boxes("k", spec, tuple(local.shape)))


def test_huge_dimensions_cost_nothing() -> None:
    n = 10**12 + 7
    boxes = local_layout((n, 3), (7, 5), (6, 4), [Cut(0, 0, 3), Cut(1, 0)])[1]
    assert (
        sum(there.sizes[0] for there, _ in boxes)
        == local_layout((n, 3), (7, 5), (6, 4), [Cut(0, 0, 3), Cut(1, 0)])[0][0]
    )
    assert boxes[-1][0].offsets[0] + boxes[-1][0].sizes[0] == n


def test_scalars_and_ranks_outside() -> None:
    assert dtensor_boxes("k", spec_of((), (2,), (1,), (Replicate(),)), ()) == [(Box((), ()), Box((), ()))]
    assert dtensor_boxes("k", spec_of((4,), (2,), None, (Shard(0),)), (0,)) == []


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        *((partial, "full_tensor") for partial in (Partial(), Partial("max"), _MaskPartial(None, offset_dim=0))),
        *((unknown, "does not know") for unknown in (Shard(1), Shard(-2), Placement())),
    ],
)
def test_placements_that_are_refused(placement: Placement, said: str) -> None:
    """A value not yet reduced is on no rank, and what we do not understand is not guessed; the error names the leaf."""
    with pytest.raises(UnsupportedLeaf, match=rf"'a\.b'.*(?s:.*){said}"):
        dtensor_boxes("a.b", spec_of((4,), (2,), (0,), (placement,)), (4,))


def test_wrong_local_shape() -> None:
    for local in ((4,), (0,)):
        with pytest.raises(InvalidShards, match=rf"'k'.*\({local[0]},\).*\(3,\) at \(0,\)"):
            dtensor_boxes("k", spec_of((5,), (2,), (0,), (Shard(0),)), local)


def test_empty_local_tensors_of_another_shape() -> None:
    """Where a rank has no elements, FSDP makes its local tensor empty in a dimension that is not."""
    assert dtensor_boxes("k", spec_of((6, 9), (2, 4), (1, 3), (Shard(0), Shard(1))), (0, 0)) == []


def test_the_rare_size_at_which_shapes_cannot_tell() -> None:
    """One rank in fifty thousand has two readings of one shape; it is read as FSDP's, and a wrong tiling would show."""
    spec = spec_of((27,), (3, 4), (2, 2), (_StridedShard(0, split_factor=4), Shard(0)))
    assert [
        local_layout((27,), (3, 4), (2, 2), cuts)[1][0][0].offsets for cuts in possible_cuts("k", spec, (3, 4))
    ] == [(20,), (26,)]
    assert dtensor_boxes("k", spec, (1,))[0][0].offsets == (20,)


Plain = tuple[Any, ...]
Pieces = list[tuple[Ints, torch.Tensor]]

SHAPES: list[Ints] = [(8, 4), (7, 5), (1, 3), (3, 1), (0, 4), (17, 2)]


def placed(plain: Plain) -> Placement:
    """A placement from what crosses processes."""
    if plain[0] == "strided":
        return _StridedShard(plain[1], split_factor=plain[2])
    return Shard(plain[1]) if plain[0] == "shard" else Replicate()


def pieces_of(leaf: Any) -> Pieces:
    return [(piece.offsets, piece.tensor.clone()) for piece in describe_leaf("k", leaf).pieces]


def distributed(mesh_shape: Ints, cases: list[tuple[Ints, tuple[Plain, ...]]]) -> list[Pieces]:
    mesh = init_device_mesh("cpu", mesh_shape)
    held = []
    for shape, plain in cases:
        # Torch's scatter of uneven strided shards fails; its local split does not.
        source = None if any(p[0] == "strided" for p in plain) else 0
        held.append(pieces_of(distribute_tensor(numbered(shape), mesh, list(map(placed, plain)), src_data_rank=source)))
    return held


def reordered(mesh_shape: Ints, shape: Ints, orders: list[Ints]) -> list[tuple[Pieces, bool]]:
    """On each rank: what it holds after torch resharded by a given order, and whether torch reads it back."""
    mesh = init_device_mesh("cpu", mesh_shape)
    full = numbered(shape)
    whole = distribute_tensor(full, mesh, [Replicate()] * len(mesh_shape))
    held = []
    for order in orders:
        spec = DTensorSpec(
            mesh,
            (Shard(0),) * len(mesh_shape),
            tensor_meta=whole._spec.tensor_meta,
            shard_order=(ShardOrderEntry(0, order),),
        )
        made = DTensor(redistribute_local_tensor(whole._local_tensor, whole._spec, spec), spec, requires_grad=False)
        held.append((pieces_of(made), torch.equal(made.full_tensor(), full)))
    return held


def parallel_layers(mesh_shape: Ints, rows: list[int]) -> list[tuple[list[str], list[Pieces]]]:
    """On each rank: what it holds of layers under tensor parallelism and FSDP, and of their gradients' placements."""
    names = ("replicate", "shard", "tensor")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    held = []
    for n in rows:
        layers = nn.Sequential(nn.Linear(6, n), nn.Linear(n, 6))
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.copy_(numbered(tuple(parameter.shape)))
        parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(layers, mesh=mesh[names[:-1]] if len(names) == 3 else mesh["shard"])
        held.append(([str(p.placements) for p in layers.parameters()], [pieces_of(p) for p in layers.parameters()]))
    return held


def check_world(shape: Ints, held: list[Pieces], replicas: int) -> None:
    """All ranks together hold each number as often as it is replicated, where it belongs."""
    full = numbered(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for offsets, tensor in itertools.chain.from_iterable(held):
        at = slices(Box(offsets, tuple(tensor.shape)))
        assert torch.equal(full[at].to(tensor.dtype), tensor)
        count[at] += 1
    assert bool((count == replicas).all())


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2), (2, 2, 2)], ids=str)
def test_real_ranks(rank_pool: RankPool, mesh_shape: Ints) -> None:
    """On 2, 4 and 8 processes, what `distribute_tensor` gave each rank is what the boxes say."""
    choices: list[Plain] = [("replicate",), ("shard", 0), ("shard", 1), ("strided", 0, 2), ("shard", -1)]
    mixes = list(itertools.product(choices, repeat=len(mesh_shape)))
    cases = [(shape, mix) for shape, mix in itertools.product(SHAPES, mixes)][:: 1 if len(mixes) < 30 else 7]
    world = rank_pool.run(math.prod(mesh_shape), distributed, mesh_shape, cases)
    for i, (shape, mix) in enumerate(cases):
        replicas = math.prod(n for n, p in zip(mesh_shape, mix, strict=True) if p == ("replicate",))
        check_world(shape, [rank[i] for rank in world], replicas)


@pytest.mark.parametrize(("mesh_shape", "shape"), [((2, 2), (7, 2)), ((2, 2, 2), (16, 3)), ((2, 2, 2), (11, 1))])
def test_real_shard_orders(rank_pool: RankPool, mesh_shape: Ints, shape: Ints) -> None:
    orders = list(itertools.permutations(range(len(mesh_shape))))
    world = rank_pool.run(math.prod(mesh_shape), reordered, mesh_shape, shape, orders)
    for i in range(len(orders)):
        check_world(shape, [rank[i][0] for rank in world], 1)
        assert all(rank[i][1] for rank in world)


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 2), (4, 2), (2, 4), (2, 2, 2)], ids=str)
def test_real_fsdp_over_tensor_parallel(rank_pool: RankPool, mesh_shape: Ints) -> None:
    """Parameters under FSDP and tensor parallelism, of even and uneven sizes, tile; each rank has one run of rows."""
    rows = [16, 9, 5, 3]
    world = rank_pool.run(math.prod(mesh_shape), parallel_layers, mesh_shape, rows)
    tensor = mesh_shape[-1]
    replicas = mesh_shape[0] if len(mesh_shape) == 3 else 1
    for i, n in enumerate(rows):
        placements, _ = world[0][i]
        assert ("_StridedShard" in placements[0]) == (tensor > 1)
        # The bias of a row-wise layer is not split by tensor parallelism.
        for j, (shape, copies) in enumerate([((n, 6), 1), ((n,), 1), ((6, n), 1), ((6,), tensor)]):
            held = [rank[i][1][j] for rank in world]
            assert all(len(pieces) <= 1 for pieces in held)
            check_world(shape, held, replicas * copies)
