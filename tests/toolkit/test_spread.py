"""Full state dicts broadcast and distributed into those of all ranks, next to torch's own functions."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shardkeep.errors import CheckpointError, RanksDisagree, StateMismatch, UnsupportedLeaf
from shardkeep.state import collectives as stream
from shardkeep.state.collectives import (
    _TensorInfo,
    broadcast_state_dict,
    broadcast_tensors,
    distribute_state_dict,
    distribute_tensors,
    gather_state_dict,
)
from tests.engine.samples import all_dtypes, bits, random_tensor
from tests.toolkit.samples import CPU, grid, mesh_of, numbered, seen, spread_out


@contextlib.contextmanager
def batches_of(nbytes):
    before, stream.BATCH_BYTES = stream.BATCH_BYTES, nbytes
    try:
        yield
    finally:
        stream.BATCH_BYTES = before


def full_tree():
    return {
        "line": numbered(7, 5),
        "columns": numbered(4, 6, dtype=torch.float64),
        "square": numbered(10, 4),
        "twice": numbered(9, 3, dtype=torch.int64),
        "hybrid": numbered(6, 2, dtype=torch.bfloat16),
        "plain": numbered(3, 2),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "step": torch.tensor(3.0),
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "only full": numbered(2),
        "skipped": numbered(2),
        "name": "run",
    }


def local_tree(device="cpu"):
    line, square = mesh_of(dist.get_world_size()), grid()
    full = full_tree()

    def blank(key):
        return torch.zeros_like(full[key])

    tree = {
        "line": spread_out(blank("line"), line, Cut(0)),
        "columns": spread_out(blank("columns"), line, Cut(1)),
        "square": spread_out(blank("square"), square, Cut(0), Cut(1)),
        "twice": spread_out(blank("twice"), square, Cut(0), Cut(0)),
        "hybrid": spread_out(blank("hybrid"), square, Replicate(), Cut(0)),
        "plain": blank("plain"),
        "flags": blank("flags"),
        "empty": blank("empty"),
        "step": blank("step"),
        "lr": 0.0,
        "betas": None,
        "skipped": None,
        "name": "",
        "only local": numbered(3),
    }
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in tree.items()}


def full_on_first():
    return full_tree() if dist.get_rank() == 0 else {}


def broadcast_both(batch_bytes, device, options):
    ours, expected = local_tree(device), local_tree(device)
    held = {key: value for key, value in ours.items() if isinstance(value, DTensor)}
    with batches_of(batch_bytes):
        broadcast_state_dict(full_on_first(), ours, CPU, **options)
    theirs._broadcast_state_dict(full_on_first(), expected, CPU, **options)
    in_place = device == "meta" or all(ours[key] is value for key, value in held.items())
    return seen(ours) == seen(expected), list(ours) == list(expected), in_place


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("batch_bytes", "options"), [(64 << 20, {}), (48, {"strict": True})])
def test_broadcasts_as_torch_does(rank_pool, ranks, device, batch_bytes, options):
    assert rank_pool.run(ranks, broadcast_both, batch_bytes, device, options) == [(True, True, True)] * ranks


def broadcast_offloaded():
    ours = local_tree("meta")
    broadcast_state_dict(full_on_first(), ours, CPU, cpu_offload=True)
    expected = local_tree()
    broadcast_state_dict(full_on_first(), expected, CPU)
    del ours["only local"], expected["only local"]
    return seen(ours) == seen(expected)


def test_offload_leaves_keys_alone_that_only_the_sender_has(rank_pool):
    """`cpu_offload` with keys that are not in the local state dict works, where torch raises KeyError."""
    assert rank_pool.run(2, broadcast_offloaded) == [True] * 2


def broadcast_views():
    line = mesh_of(dist.get_world_size())
    whole = numbered(6, 8)
    full = {"turned": whole.t(), "every other": whole[::2, 1::3], "expanded": numbered(3, 1).expand(3, 4)}
    local = {key: spread_out(torch.zeros(value.shape), line, Cut(0)) for key, value in full.items()}
    plain = dict.fromkeys(full, 0)
    with batches_of(40):
        broadcast_state_dict(full if dist.get_rank() == 0 else {}, local, CPU)
        broadcast_state_dict(full if dist.get_rank() == 0 else {}, plain, CPU)
    return seen(plain) == seen(full), seen(gather_state_dict(local)) == seen(full)


def test_views_arrive_as_they_look(rank_pool):
    """Transposed, strided and expanded tensors, of which torch sends the memory in the wrong order."""
    assert rank_pool.run(2, broadcast_views) == [(True, True)] * 2


def broadcast_every_dtype():
    full = {str(dtype): random_tensor((5, 3), dtype) for dtype in all_dtypes()}
    local = dict.fromkeys(full, 0)
    with batches_of(32):
        broadcast_state_dict(full if dist.get_rank() == 0 else {}, local, CPU)
    return [key for key in full if bits(local[key]) != bits(full[key])]


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_arrives_bit_for_bit(rank_pool):
    assert rank_pool.run(2, broadcast_every_dtype) == [[], []]


def nested_trees(device):
    line = mesh_of(dist.get_world_size())
    full = {"state": {"w": {"m": numbered(5, 2), "step": torch.tensor(2.0)}}, "groups": [{"lr": 0.5}, (numbered(3), 1)]}
    local = {"state": {"w": {"m": spread_out(torch.zeros(5, 2), line, Cut(0)).to(device)}}, "groups": []}
    expected = {
        "state": {"w": {"m": spread_out(numbered(5, 2), line, Cut(0)), "step": torch.tensor(2.0)}},
        "groups": [{"lr": 0.5}, (numbered(3), 1)],
    }
    return full, local, expected


def spread_nested(device):
    full, local, expected = nested_trees(device)
    broadcast_state_dict(full if dist.get_rank() == 0 else {}, local, CPU)
    again, untouched, _ = nested_trees(device)
    distribute_state_dict(full, untouched, CPU)
    return seen(local) == seen(expected), seen(untouched) == seen(expected), seen(full) == seen(again)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nested_values_are_gone_into(rank_pool, device):
    """A DTensor inside a dict gets its own part, where torch puts the full tensor; the full tree is not changed."""
    assert rank_pool.run(2, spread_nested, device) == [(True, True, True)] * 2


def distribute_both(device):
    ours, expected = local_tree(), local_tree()
    before = {key: seen(value) for key, value in ours.items()}
    held = dict(ours)
    if device == "meta":
        ours = local_tree("meta")
    distribute_state_dict(full_tree(), ours, CPU)
    theirs._distribute_state_dict(full_tree(), expected, CPU)
    del ours["only local"], expected["only local"]  # on meta here, and left as it is
    return seen(ours) == seen(expected), {key: seen(value) for key, value in held.items()} == before


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_distributes_as_torch_does(rank_pool, ranks, device):
    assert rank_pool.run(ranks, distribute_both, device) == [(True, True)] * ranks


def strided_layouts():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = nn.Linear(5, 7)
    full = {key: value.clone() for key, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    expected = seen(model.state_dict())
    placements = model.weight.placements
    outcomes = [any(isinstance(each, _StridedShard) for each in placements)]
    for device in ("cpu", "meta"):
        local = {key: torch.zeros_like(value).to(device) for key, value in model.state_dict().items()}
        broadcast_state_dict(full if dist.get_rank() == 0 else {}, local, CPU)
        again = {key: torch.zeros_like(value).to(device) for key, value in model.state_dict().items()}
        distribute_state_dict(full, again, CPU)
        outcomes += [seen(local) == expected, seen(again) == expected, seen(gather_state_dict(local)) == seen(full)]
    return outcomes


def test_uneven_strided_shards_get_their_own_rows(rank_pool):
    """FSDP over tensor parallelism with seven rows over two by two ranks, which torch's own cannot do."""
    assert rank_pool.run(4, strided_layouts) == [[True] * 7] * 4


def broadcast_in_a_subgroup():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    full = {"w": numbered(4) + 10 * half, "half": half}
    local = {"w": torch.zeros(4), "half": None}
    broadcast_state_dict(full if dist.get_rank() % 2 == 0 else {}, local, CPU, pg=groups[half])
    return seen(local) == seen(full)


def test_a_group_without_rank_0_sends_from_its_own_first(rank_pool):
    """Two halves of the ranks broadcast at the same time."""
    assert rank_pool.run(4, broadcast_in_a_subgroup) == [True] * 4


def different_wishes():
    rank = dist.get_rank()
    full = {"a": numbered(4), "b": numbered(5), "c": numbered(6), "unwanted": numbered(7)}
    mine = {0: ["a"], 1: ["b", "c"], 2: ["a", "c"], 3: []}[rank]
    local = dict.fromkeys(mine, 0)
    broadcast_state_dict(full if rank == 0 else {}, local, CPU)
    return seen(local) == seen({key: full[key] for key in mine})


def test_ranks_may_want_different_keys(rank_pool):
    assert rank_pool.run(4, different_wishes) == [True] * 4


def broadcast_tensors_both():
    line = mesh_of(dist.get_world_size())
    source = {"a": numbered(5, 2), "b": numbered(3), "c": numbered(2)}
    infos = {key: _TensorInfo(value.size(), value.dtype) for key, value in source.items()}
    full = source if dist.get_rank() == 0 else infos
    trees = []
    for broadcast in (broadcast_tensors, theirs._broadcast_tensors):
        tree = {"a": spread_out(torch.zeros(5, 2), line, Cut(0)), "b": torch.zeros(3), "c": None}
        broadcast(full, tree, ["a", "b", "c"], CPU)
        trees.append(seen(tree))
    same = []
    for kind in (tuple, list):
        pair = kind([spread_out(torch.zeros(5, 2), line, Cut(0)).to("meta"), source["a"]])
        state = {"a": pair, "b": torch.ones(1), "x": None}
        distribute_tensors(state, ["a", "b", "x", "y"], CPU)
        same.append(seen(state["a"]) == seen(spread_out(source["a"], line, Cut(0))))
    return trees[0] == trees[1], all(same)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_a_broadcast_work_alone(rank_pool, ranks):
    """`broadcast_tensors` with infos on the ranks that wait, `distribute_tensors` with pairs, as tuples or lists."""
    assert rank_pool.run(ranks, broadcast_tensors_both) == [(True, True)] * ranks


class Opaque:
    def __reduce__(self):
        raise TypeError("no copies of me")


def broadcast_badly(case):
    line = mesh_of(dist.get_world_size())
    full = {"a": numbered(8, 2), "b": numbered(6)}
    local = {"a": spread_out(torch.zeros(8, 2), line, Cut(0)), "b": torch.zeros(6)}
    odd_one = dist.get_rank() == dist.get_world_size() - 1
    if case == "shape of a DTensor":
        full["a"] = numbered(9, 2)
    elif case == "shape here only" and odd_one:
        local["b"] = torch.zeros(7)
    elif case == "partial here only" and odd_one:
        local["a"] = DTensor.from_local(torch.zeros(8, 2), line, [Partial()])
    elif case == "sharded source":
        full["a"] = spread_out(full["a"], line, Cut(0))
    elif case == "meta source":
        full["b"] = full["b"].to("meta")
    elif case == "unpicklable":
        full["c"] = Opaque()
    elif case == "lesser dtype":
        full["a"] = full["a"].to(torch.complex64)
    elif case == "other info" and odd_one:
        full["b"] = _TensorInfo(torch.Size([7]), torch.float32)
    elif case == "no info" and odd_one:
        del full["b"]
    before = seen(local)
    try:
        if "info" in case:
            broadcast_tensors(full, local, ["a", "b"], CPU)
        broadcast_state_dict(full if dist.get_rank() == 0 else {}, local, CPU)
    except CheckpointError as error:
        return type(error), str(error), seen(local) == before
    return None


@pytest.mark.parametrize(
    ("case", "kind", "named"),
    [
        ("shape of a DTensor", StateMismatch, "'a' has shape (9, 2)"),
        ("shape here only", StateMismatch, "'b' has shape (6,)"),
        ("partial here only", UnsupportedLeaf, "'a'"),
        ("sharded source", UnsupportedLeaf, "'a' is a DTensor"),
        ("meta source", UnsupportedLeaf, "'b' is on the meta device"),
        ("unpicklable", CheckpointError, "no copies of me"),
        ("lesser dtype", StateMismatch, "'a' is torch.complex64"),
        ("other info", RanksDisagree, "b (torch.float32 (6,)) on rank 0, b (torch.float32 (7,)) on rank 3"),
        ("no info", RanksDisagree, "on rank 0, b (missing ()) on rank 3"),
    ],
)
def test_what_does_not_fit_is_one_error_on_all_ranks(rank_pool, case, kind, named):
    """All ranks raise the same, naming the key, and no local state dict has changed."""
    outcomes = rank_pool.run(4, broadcast_badly, case, timeout_s=40)
    assert {outcome[0] for outcome in outcomes} == {kind}
    assert all(named in outcome[1] for outcome in outcomes)
    assert all(outcome[2] for outcome in outcomes)


def test_distributing_what_does_not_fit_changes_nothing():
    local = {"a": torch.zeros(3), "b": torch.zeros(2)}
    before = seen(local)
    with pytest.raises(StateMismatch, match=r"'b' has shape \(4,\)"):
        distribute_state_dict({"a": numbered(3), "b": numbered(4)}, local, CPU)
    assert seen(local) == before


def spread_beside(device):
    pair = DeviceMesh("cpu", [0, 1])
    expected = distribute_tensor(numbered(5, 2), pair, [Cut(0)])
    made = []
    for put in (broadcast_state_dict, distribute_state_dict):
        local = {"w": torch.zeros_like(expected).to(device)}
        put({"w": numbered(5, 2)}, local, CPU)
        made.append(seen(local["w"]) == seen(expected))
    return made


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_beside_a_mesh_keep_nothing(rank_pool, device):
    """A DTensor on the mesh of two ranks, in the hands of four: the others take part and hold no part."""
    assert rank_pool.run(4, spread_beside, device) == [[True, True]] * 4


def distribute_dtensors():
    line = mesh_of(2)
    held = spread_out(numbered(4, 2), line, Cut(0))
    local = {"a": torch.zeros_like(held)}
    distribute_state_dict({"a": held}, local, CPU)
    other = {"a": distribute_tensor(torch.zeros(4, 2), line, [Cut(1)])}
    try:
        distribute_state_dict({"a": held}, other, CPU)
    except UnsupportedLeaf as error:
        return seen(local["a"]) == seen(held), "'a' is a DTensor" in str(error)
    return None


def test_a_dtensor_in_a_full_tree_must_be_cut_as_its_destination(rank_pool):
    """One of the same layout is taken as it is, any other refused by name."""
    assert rank_pool.run(2, distribute_dtensors) == [(True, True)] * 2


def test_a_process_on_its_own_needs_no_group():
    opaque = Opaque()
    for put in (broadcast_state_dict, distribute_state_dict):
        local = {"w": torch.zeros(3), "o": None}
        put({"w": numbered(3), "o": opaque}, local, CPU)
        assert local["o"] is opaque
        assert seen(local["w"]) == seen(numbered(3))
