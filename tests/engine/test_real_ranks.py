"""Real processes over gloo: DTensor, FSDP2, TP, HSDP, ShardedTensor, subgroups, from any number of ranks to any other."""

import contextlib
import logging
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardkeep as sk
from shardkeep import dcp
from shardkeep.engine.sources import identity_of
from tests.engine.samples import bits
from tests.toolkit.samples import numbered, sharded_tensor

MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1)], 8: [(8,), (2, 4), (2, 2, 2)]}
SHAPES = [(), (5,), (7, 6), (3, 5, 4), (0, 3), (1, 9), (16, 2)]


def random_layout(seed, world_size, ndim):
    rng = random.Random(seed)
    mesh = rng.choice(MESHES[world_size])
    return mesh, [rng.choice([Replicate(), *(Shard(d) for d in range(ndim))]) for _ in mesh]


def full_tensors():
    return {f"t{i}": torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)}


def distributed(seed, *, blank):
    state = {}
    for i, (key, full) in enumerate(full_tensors().items()):
        shape, placements = random_layout(seed * 100 + i, dist.get_world_size(), full.dim())
        mesh = init_device_mesh("cpu", shape)
        state[key] = distribute_tensor(torch.zeros_like(full) if blank else full, mesh, placements)
    return state


def save_distributed(where, seed, **more):
    return sk.save({**distributed(seed, blank=False), "step": 3}, where, check_replicas=True, **more).bytes_total


def load_distributed(where, seed):
    state = {**distributed(seed, blank=True), "step": 0}
    sk.load(state, where)
    expected = distributed(seed, blank=False)
    return state["step"] == 3 and all(bits(state[key].to_local()) == bits(expected[key].to_local()) for key in expected)


def test_a_long_record_is_read_by_every_rank(rank_pool, tmp_path):
    """Rank 0 sends a commit record neither whole nor in part if it is long, or goes to many ranks: they read it themselves."""
    rank_pool.run(2, save_distributed, tmp_path / "short", 1)
    assert [bool(identity_of(sk.open(tmp_path / "short").record, ranks)[2]) for ranks in (2, 10**6)] == [True, False]
    rank_pool.run(2, save_distributed, tmp_path / "ck", 1, meta={"note": "x" * 100_000})
    assert identity_of(sk.open(tmp_path / "ck").record, 2)[2] == b""
    assert rank_pool.run(2, load_distributed, tmp_path / "ck", 2) == [True, True]


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 3), (3, 4), (4, 2), (4, 8), (8, 3)])
def test_dtensors_of_any_layout_load_on_any_number_of_ranks(rank_pool, tmp_path, writers, readers):
    """Random meshes and placements, uneven and empty shards; saved by some ranks, loaded by others."""
    total = sum(full.nbytes for full in full_tensors().values())
    for seed in range(3):
        where = tmp_path / str(seed)
        assert rank_pool.run(writers, save_distributed, where, seed) == [total] * writers
        assert rank_pool.run(readers, load_distributed, where, seed + 50) == [True] * readers
        assert bits(sk.open(where).to_dict()) == bits({**full_tensors(), "step": 3})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 22)
        self.down = nn.Linear(22, 10)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def model_in(layout):
    torch.manual_seed(5)
    model = nn.Sequential(Block(), Block())
    world = dist.get_world_size()
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "fsdp2+tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
    return model


def save_model(where, layout):
    return sk.save({"model": model_in(layout).state_dict()}, where).tensors


def load_model(where, layout):
    expected = model_in(layout).state_dict()
    model = model_in(layout)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.fill_(float("nan"))
    state = model.state_dict()
    sk.load({"model": state}, where)
    return all(bits(local_of(state[key])) == bits(local_of(expected[key])) for key in expected)


def local_of(value):
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.parametrize(
    ("saved", "writers", "loaded", "readers"),
    [
        ("fsdp2+tp", 4, "fsdp2", 3),
        ("fsdp2", 3, "fsdp2+tp", 4),
        ("hsdp", 4, "tp", 2),
        ("tp", 2, "hsdp", 4),
        ("plain", 1, "fsdp2+tp", 4),
        ("fsdp2+tp", 8, "plain", 1),
    ],
)
def test_parallel_models_load_into_each_other(rank_pool, tmp_path, saved, writers, loaded, readers):
    assert rank_pool.run(writers, save_model, tmp_path / "ck", saved) == [8] * writers
    assert rank_pool.run(readers, load_model, tmp_path / "ck", loaded) == [True] * readers


def save_outside(where):
    mesh = DeviceMesh("cpu", [0, 1])
    return sk.save({"w": distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])}, where).bytes_written


def load_outside(where):
    mesh = DeviceMesh("cpu", [1, 2])
    state = {"w": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])}
    sk.load(state, where)
    return state["w"].to_local().reshape(-1).tolist() if dist.get_rank() in (1, 2) else None


def test_ranks_outside_the_mesh_take_part(rank_pool, tmp_path):
    written = rank_pool.run(4, save_outside, tmp_path / "ck")
    assert [nbytes > 0 for nbytes in written] == [True, True, False, False]
    assert rank_pool.run(3, load_outside, tmp_path / "ck") == [None, [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


def sharded_there_and_back(where):
    boxes = [(0, (0, 0), (3, 3)), (1, (3, 0), (4, 3))]
    sk.save({"w": sharded_tensor(numbered(7, 3), boxes)}, where)
    state = {"w": sharded_tensor(torch.zeros(7, 3), boxes)}
    sk.load(state, where)
    return state["w"].local_shards()[0].tensor.sum().item()


def test_sharded_tensors(rank_pool, tmp_path):
    assert rank_pool.run(2, sharded_there_and_back, tmp_path / "ck") == [36.0, 174.0]
    assert torch.equal(sk.open(tmp_path / "ck")["w"][...], numbered(7, 3))


def save_in_halves(where):
    """Two groups of two ranks save two checkpoints at the same time, then all four load one of them."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    piece = sk.ShardedBox(torch.full((2,), float(rank)), offsets=(2 * (rank % 2),), shape=(4,))
    for _ in range(3):
        sk.save(
            {"w": piece, "half": half, "rank": sk.PerRank(rank)}, f"{where}/{half}", group=groups[half], overwrite=True
        )
    dist.barrier()
    state = {"w": torch.zeros(4), "half": -1, "rank": sk.PerRank(None)}
    sk.load(state, f"{where}/1", exclude="rank")
    return state["w"].tolist(), state["half"]


def test_subgroups_save_beside_each_other(rank_pool, tmp_path):
    assert rank_pool.run(4, save_in_halves, tmp_path) == [([2.0, 2.0, 3.0, 3.0], 1)] * 4
    assert sk.open(tmp_path / "0").to_dict()["rank"] == {0: 0, 1: 1}


class OwnFiles(dcp.FileSystemWriter):
    """A writer that is not ours alone, so that the save goes item by item."""

    def write_data(self, plan, planner):
        return super().write_data(plan, planner)


def managed(state, where):
    with sk.Checkpointer(where, every_steps=1) as checkpointer:
        checkpointer.step(1, state)


DOORS = {
    "save": lambda state, where: sk.save(state, where / "step-1"),
    "async_save": lambda state, where: sk.async_save(state, where / "step-1").result(),
    "Checkpointer": managed,
    "dcp.save": lambda state, where: dcp.save(state, checkpoint_id=where / "step-1"),
    "dcp.async_save": lambda state, where: dcp.async_save(state, checkpoint_id=where / "step-1").result(),
    "item by item": lambda state, where: dcp.save(state, storage_writer=OwnFiles(where / "step-1")),
}


@contextlib.contextmanager
def warnings_logged():
    said, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardkeep").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("shardkeep").removeHandler(handler)


class Normed(nn.Module):
    """Statistics of twelve layers, and codes that take 64 MiB: a forward pass changes all of them."""

    def __init__(self, codes):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(12)))
        self.register_buffer("codes", torch.zeros(codes))

    def forward(self, x):
        self.codes += x.mean()
        return self.layers(x)


def save_normed(where, door, form, codes):
    """Train under DDP on data that differs by rank, and save; return this rank's state and what was logged."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Normed(codes))
    torch.manual_seed(1 + dist.get_rank())
    model(torch.randn(16, 8)).sum().backward()
    with warnings_logged() as said:
        DOORS[door]({"model": model if form == "module" else model.state_dict()}, where)
    return {name: bits(tensor) for name, tensor in model.module.state_dict().items()}, said


@pytest.mark.parametrize("form", ["module", "state dict"])
@pytest.mark.parametrize("door", DOORS)
def test_buffers_that_differ_between_ranks_come_from_the_lowest_rank(rank_pool, tmp_path, door, form):
    """As DDP broadcasts them, and without a warning; of a module in the state also large ones, which else are divided."""
    large = form == "module" and door != "item by item"
    [(expected, said), (other, _)] = rank_pool.run(2, save_normed, tmp_path, door, form, 16 << 20 if large else 0)
    assert said == []
    differ = {name for name in expected if expected[name] != other[name]}
    assert len(differ) == (25 if large else 24)
    saved = sk.open(tmp_path / "step-1").to_dict()["model"]
    assert {name.removeprefix("module."): bits(tensor) for name, tensor in saved.items()} == expected


def save_diverged(where, door):
    torch.manual_seed(dist.get_rank())
    names = ["first", "second", "third", "fourth"]
    state = {"model": {name: torch.randn(3 << 20) for name in names}, "same": torch.ones(4), "own": {}}
    state["own"][str(dist.get_rank())] = torch.randn(2)
    with warnings_logged() as said:
        DOORS[door](state, where)
    return {name: bits(tensor) for name, tensor in state["model"].items()}, said


@pytest.mark.parametrize("door", list(DOORS)[:-1])
def test_parameters_that_differ_between_ranks_are_warned_of(rank_pool, tmp_path, door):
    """The first of them are named, with the ranks. What is saved is one rank's, not parts of each."""
    [(expected, said), (_, elsewhere)] = rank_pool.run(2, save_diverged, tmp_path, door)
    [warning] = said
    assert all(f"'model.{name}': ranks 0 and 1" in warning for name in ("first", "fourth", "second"))
    assert "and 1 more" in warning
    assert not elsewhere
    saved = sk.open(tmp_path / "step-1").to_dict()["model"]
    assert {name: bits(tensor) for name, tensor in saved.items()} == expected
