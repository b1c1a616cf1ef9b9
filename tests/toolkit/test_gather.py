"""Gathering sharded state dicts, next to torch's own gather."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils as theirs
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shardkeep.errors import BadValue, CheckpointError, InvalidShards, RanksDisagree
from shardkeep.state.collectives import all_gather_sharded_tensor, gather_state_dict
from tests.engine.samples import all_dtypes, bits, random_tensor
from tests.toolkit.samples import CPU, in_chunks, mesh_of, numbered, seen, sharded_tensor, sharded_tree, spread_out

RANKS = [1, 2, 4]
KEYS = 18  # of the sample tree

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def gather_both(**options):
    tree = sharded_tree()
    before = seen(tree)
    ours, expected = gather_state_dict(tree, **options), theirs._gather_state_dict(tree, **options)
    return seen(ours) == seen(expected), seen(tree) == before, len(ours)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"device": CPU}])
@pytest.mark.filterwarnings("ignore")
def test_gathers_as_torch_does(rank_pool, ranks, options):
    """DTensors on lines and squares, ShardedTensors, nested and plain values: the same tree, the input untouched."""
    outcome = rank_pool.run(ranks, gather_both, **options)
    assert outcome == [(True, True, KEYS)] * ranks


def gather_for_one(options):
    tree = sharded_tree()
    ours, expected = gather_state_dict(tree, **options), theirs._gather_state_dict(tree, **options)
    return seen(ours) == seen(expected), len(ours)


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_the_ranks_asked_for_get_the_result(rank_pool, ranks):
    """With `ranks_only` the others take part and get an empty dict."""
    outcome = rank_pool.run(ranks, gather_for_one, {"ranks_only": (1,), "cpu_offload": True})
    assert outcome == [(True, KEYS if rank == 1 else 0) for rank in range(ranks)]


def gather_odd_shards():
    full = numbered(6, 4, dtype=torch.float64)
    layouts = {
        "long first": [(0, (0, 0), (5, 4)), (1, (5, 0), (1, 4))],
        "reversed": [(1, (0, 0), (3, 4)), (0, (3, 0), (3, 4))],
        "columns": [(0, (0, 0), (6, 1)), (1, (0, 1), (6, 3))],
        "two each": [(0, (0, 0), (3, 2)), (1, (0, 2), (3, 2)), (1, (3, 0), (3, 2)), (0, (3, 2), (3, 2))],
        "all on one": [(1, (0, 0), (6, 4))],
    }
    return {name: bits(all_gather_sharded_tensor(sharded_tensor(full, boxes))) for name, boxes in layouts.items()}


def test_shards_of_any_size_and_order_are_gathered(rank_pool):
    """Shards that are not the equal rows torch takes for granted end up where their metadata say, on all ranks."""
    for found in rank_pool.run(2, gather_odd_shards):
        assert set(found.values()) == {bits(numbered(6, 4, dtype=torch.float64))}


def gather_every_dtype():
    wrong = []
    for dtype in all_dtypes():
        full = random_tensor((5, 3), dtype)
        odd = [(0, (0, 0), (1, 3)), (1, (1, 0), (4, 3))]
        made = [bits(all_gather_sharded_tensor(tensor)) for tensor in (in_chunks(full), sharded_tensor(full, odd))]
        mine = full[:3] if dist.get_rank() == 0 else full[3:]
        cut = DTensor.from_local(mine, mesh_of(2), [Cut(0)], shape=full.shape, stride=full.stride())
        made.append(bits(gather_state_dict({"w": cut})["w"]))
        if made != [bits(full)] * 3:
            wrong.append(dtype)
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_is_gathered_bit_for_bit(rank_pool):
    """ShardedTensors and DTensors of dtypes that gloo cannot send, NaNs with odd payloads included."""
    assert rank_pool.run(2, gather_every_dtype) == [[], []]


def gather_in_a_subgroup():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    full = numbered(5, 2) + half
    boxes = [(2 * half, (0, 0), (3, 2)), (2 * half + 1, (3, 0), (2, 2))]
    st = sharded_tensor(full, boxes)
    st._process_group = groups[half]
    return seen(gather_state_dict({"w": st})["w"]) == seen(full), seen(
        all_gather_sharded_tensor(st, groups[half])
    ) == seen(full)


def test_a_sharded_tensor_is_gathered_over_its_own_group(rank_pool):
    """Two halves of the ranks gather two tensors at the same time, each over the group its tensor was made for."""
    assert rank_pool.run(4, gather_in_a_subgroup) == [(True, True)] * 4


def gather_fsdp_over_tp():
    torch.manual_seed(3)
    plain = nn.Linear(6, 7)
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(plain, mesh["tp"], ColwiseParallel())
    fully_shard(plain, mesh=mesh["dp"])
    return seen(gather_state_dict(plain.state_dict())) == seen(expected)


def test_uneven_strided_shards_come_back_in_order(rank_pool):
    """FSDP over tensor parallelism, with seven rows over two by two ranks."""
    assert rank_pool.run(4, gather_fsdp_over_tp) == [True] * 4


def gather_strided():
    wrong = []
    mesh = mesh_of(2, 2)
    strided = _StridedShard(0, split_factor=2)
    for rows in (4, 5, 7, 9):
        full = numbered(rows, 2)
        for placements in ([strided, Cut(0)], [Cut(0), strided]):
            cut = spread_out(full, mesh, *placements)
            if placements[0] is not strided and TORCH < (2, 12):
                continue  # DTensor itself cannot make this one whole
            if seen(gather_state_dict({"w": cut})["w"]) != seen(full):
                wrong.append((rows, placements))
    return wrong


def test_strided_placements_by_hand_come_back_in_order(rank_pool):
    """Even and uneven rows, strided before and after a plain cut, made by `distribute_tensor`."""
    assert rank_pool.run(4, gather_strided) == [[]] * 4


def gather_beside():
    pair = DeviceMesh("cpu", [0, 1])
    tree = {"w": distribute_tensor(numbered(5, 2), pair, [Cut(0)])}
    return seen(gather_state_dict(tree)) == seen(theirs._gather_state_dict(tree))


def test_ranks_beside_a_mesh_are_not_waited_for(rank_pool):
    """A DTensor on the mesh of two ranks, in the hands of four: those outside get nothing, as in torch."""
    assert rank_pool.run(4, gather_beside) == [True] * 4


def gather_partial_and_grad():
    mesh = mesh_of(dist.get_world_size())
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    trained = nn.Parameter(spread_out(numbered(4, 2), mesh, Cut(0)))
    made = gather_state_dict({"p": partial, "w": trained})
    return made["p"].tolist(), made["w"].requires_grad, made["w"].grad_fn is None


def test_partial_sums_are_reduced_and_gradients_left_behind(rank_pool):
    """A partial DTensor is summed over the ranks; a parameter is gathered without a graph."""
    assert rank_pool.run(2, gather_partial_and_grad) == [([2.0] * 3, False, True)] * 2


def gather_pending():
    mesh = mesh_of(2)
    sharded = spread_out(numbered(4, 2), mesh, Cut(0))
    pending = sharded.redistribute(placements=[Replicate()], async_op=True)
    inner = pending._local_tensor
    over_pending = DTensor(inner, pending._spec, requires_grad=False)
    made = gather_state_dict({"local": inner, "dtensor": over_pending})
    kinds = [type(value) is torch.Tensor for value in made.values()]
    return isinstance(inner, AsyncCollectiveTensor), kinds, [seen(v) == seen(numbered(4, 2)) for v in made.values()]


def test_tensors_on_their_way_are_waited_for(rank_pool):
    """An AsyncCollectiveTensor, bare or inside a DTensor, is a finished plain tensor in the result."""
    assert rank_pool.run(2, gather_pending) == [(True, [True, True], [True, True])] * 2


class Opaque:
    pass


def gather_what_differs(case):
    line = mesh_of(dist.get_world_size())
    tree = {"a": spread_out(numbered(4, 2), line, Cut(0)), "b": spread_out(numbered(6), line, Cut(0))}
    odd_one = dist.get_rank() == 1
    if case == "another order" and odd_one:
        tree = dict(reversed(tree.items()))
    elif case == "a key less" and odd_one:
        del tree["b"]
    elif case == "another shape" and odd_one:
        tree["b"] = spread_out(numbered(8), line, Cut(0))
    elif case == "an object" and odd_one:
        tree["c"] = Opaque()
    elif case == "a wrong shard":
        tree["c"] = in_chunks(numbered(4, 3))
        if odd_one:
            tree["c"].local_shards()[0].tensor = torch.zeros(2, 3)
    gather_state_dict(tree)


@pytest.mark.parametrize(
    ("case", "kind", "named"),
    [
        ("another order", RanksDisagree, "differ: a .*, b "),
        ("a key less", RanksDisagree, "differ: b .*, nothing"),
        ("another shape", RanksDisagree, r"b .*\(8,\)"),
        ("an object", CheckpointError, "'c' is a Opaque"),
        ("a wrong shard", InvalidShards, r"'c'.*\(2, 3\)"),
    ],
)
def test_trees_that_differ_are_an_error_on_all_ranks(rank_pool, case, kind, named):
    """No rank waits in a collective that another never joins: all raise, and the error names the key."""
    for outcome in rank_pool.outcomes(4, gather_what_differs, case, timeout_s=40):
        with pytest.raises(kind, match=named):
            raise outcome.error


def test_an_object_is_refused_by_path_or_copied():
    """Without other ranks: a ValueError that names the path, or a deep copy if types are not checked."""
    tree = {"a": [1, {"b": Opaque()}]}
    with pytest.raises(BadValue, match=r"'a\.1\.b' is a Opaque") as caught:
        gather_state_dict(tree)
    assert isinstance(caught.value, ValueError)
    made = gather_state_dict(tree, type_check=False)
    assert isinstance(made["a"][1]["b"], Opaque)
    assert made["a"][1]["b"] is not tree["a"][1]["b"]


def gather_with_holes():
    st = in_chunks(numbered(4, 3))
    st.metadata().shards_metadata[0].shard_sizes[0] = 3
    all_gather_sharded_tensor(st)


def test_shards_that_are_not_what_the_metadata_say(rank_pool):
    """A rank whose shard differs from its metadata says so."""
    first = rank_pool.outcomes(1, gather_with_holes)[0]
    with pytest.raises(InvalidShards, match="metadata"):
        raise first.error
