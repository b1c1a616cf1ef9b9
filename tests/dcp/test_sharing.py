"""Loads of torch's calls in which ranks read for each other: as torch loads them, or not shared at all."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardkeep as sk
from shardkeep.dcp._impl.shared_items import shared_requests_of_plan
from shardkeep.engine.shared_reads import Exchange
from shardkeep.errors import ChecksumMismatch
from shardkeep.testing.checkpoint_utils import Rot13Example, get_test_extension_registry
from tests.dcp.sides import causes_of, failure_of, part, quietly, side
from tests.engine.test_sharing import logged, small_slices
from tests.toolkit.samples import mesh_of, numbered, seen

SHAPES = [(), (9,), (600, 70), (20, 8, 300), (1, 1, 5000)]


@contextlib.contextmanager
def sharing() -> Any:
    """Let reads be shared, in small messages; gives the bytes received by each exchange."""
    received: list[int] = []
    exchange = Exchange.run

    def watched(self: Exchange) -> int:
        received.append(exchange(self))
        return received[-1]

    env = {"SHARDKEEP_SHARE_READS": "1", "SHARDKEEP_HOST_BUDGET_BYTES": str(2 << 20)}
    with mock.patch.dict(os.environ, env), mock.patch.object(Exchange, "run", watched), small_slices():
        yield received


def state_of(rng: random.Random, *, blank: bool) -> dict[str, Any]:
    """Tensors in random layouts, and values, nested; blank for a state to be filled."""
    state: dict[str, Any] = {"step": None if blank else 7, "own": {"name": "" if blank else "x"}}
    for n, shape in enumerate(SHAPES):
        full = numbered(*shape, dtype=rng.choice([torch.float32, torch.bfloat16, torch.int64]))
        full = torch.zeros_like(full) if blank else full
        if shape and rng.random() < 0.6:
            placement = rng.choice([Replicate(), *(Shard(d) for d in range(len(shape)))])
            full = distribute_tensor(full, mesh_of(dist.get_world_size()), [placement], src_data_rank=None)
        elif len(shape) > 1 and rng.random() < 0.5:
            full = full.transpose(0, 1).contiguous().transpose(0, 1)
        state["own"][f"t{n}"] = full
    return state


def dtypes_as(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """A blank state with the dtypes of another."""
    own = {key: each.to(like["own"][key].dtype) if key != "name" else each for key, each in state["own"].items()}
    return {**state, "own": own}


def load_layouts(folder: str, layout: str, seeds: Any) -> int:
    dcp, theirs = side("ours"), side("torch")
    total = 0
    for seed in seeds:
        where = f"{folder}/{seed}"
        state = state_of(random.Random(seed), blank=False)
        if layout == "native":
            sk.save(state, where)
        else:
            quietly(side(layout).save, state, checkpoint_id=where)
        blanks = [dtypes_as(state_of(random.Random(seed + 1), blank=True), state) for _ in range(3)]
        quietly(dcp.load, blanks[0], checkpoint_id=where)
        with sharing() as received:
            quietly(dcp.load, blanks[1], checkpoint_id=where)
        assert seen(blanks[0]) == seen(blanks[1])
        if layout != "native":
            quietly(theirs.load, blanks[2], checkpoint_id=where)
            assert seen(blanks[2]) == seen(blanks[1])
        assert blanks[1]["step"] == 7
        total += sum(received)
    return total


@pytest.mark.parametrize(("layout", "ranks"), [("ours", 2), ("ours", 4), ("torch", 3), ("native", 3)])
def test_any_layout_loads_as_without_sharing(rank_pool: Any, tmp_path: Any, layout: str, ranks: int) -> None:
    """Random layouts of what torch, we in torch's layout, and we in our own saved: bit for bit as torch loads it."""
    assert min(rank_pool.run(ranks, load_layouts, str(tmp_path), layout, range(0, 40, 10))) > 0


def load_in_part(folder: str) -> int:
    """Ranks 1 to 3 of four, led by the second of them."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return 0
    into = {"w": torch.zeros(3000, 7)}
    dcp = side("ours")
    with sharing() as received:
        quietly(dcp.load_state_dict, into, dcp.FileSystemReader(folder), group, 1)
    assert torch.equal(into["w"], numbered(3000, 7))
    return sum(received)


def test_a_process_group_and_another_coordinator(rank_pool: Any, tmp_path: Any) -> None:
    """Ranks are counted in the group that loads, whoever leads it."""
    quietly(side("ours").save, {"w": numbered(3000, 7)}, checkpoint_id=str(tmp_path), no_dist=True)
    assert sum(rank_pool.run(4, load_in_part, str(tmp_path))) == 2 * 3000 * 7 * 4


def load_all_of(folder: str, layout: str) -> int:
    dcp = side("ours")
    reader = dcp.HuggingFaceStorageReader(folder)
    if layout == "extension":
        reader = dcp.FileSystemReader(folder, _extension_registry=get_test_extension_registry())
    into = {"w": torch.zeros(3000, 7), "b": torch.zeros(5)}
    with sharing() as received:
        quietly(dcp.load, into, storage_reader=reader)
    assert seen(into) == seen({"w": numbered(3000, 7), "b": numbered(5)})
    return sum(received)


@pytest.mark.parametrize("layout", ["extension", "hugging face"])
def test_other_files(rank_pool: Any, tmp_path: Any, layout: str) -> None:
    """Items that an extension wrote, which must be read whole, and weights of a model are cut and shared like others."""
    dcp = side("ours")
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), fqn_to_index_mapping={"w": 1, "b": 1})
    if layout == "extension":
        writer = dcp.FileSystemWriter(str(tmp_path), _extensions=[Rot13Example()])
    quietly(dcp.save, {"w": numbered(3000, 7), "b": numbered(5)}, storage_writer=writer, no_dist=True)
    assert sum(rank_pool.run(2, load_all_of, str(tmp_path), layout)) == (3000 * 7 + 5) * 4


def load_unlike(folder: str) -> Any:
    rank = dist.get_rank()
    one = torch.zeros(3000)
    # Rank 0 has one memory for two tensors, rank 1 another dtype and a tensor that shows the opposite of its memory.
    into = {"a": one, "b": one if rank == 0 else torch.zeros(3000)}
    into["c"] = torch.zeros(3000, dtype=torch.float64 if rank == 1 else torch.float32)
    into["d"] = torch.zeros(3000, dtype=torch.complex64).conj().imag if rank == 1 else torch.zeros(3000)
    into["e"] = torch.zeros(3000, requires_grad=True).detach()
    before = into["e"]._version
    with sharing() as received:
        quietly(side("ours").load, into, checkpoint_id=folder)
    assert into["e"]._version > before
    return [into[key].double().mean().item() for key in "abcde"], sum(received)


def test_ranks_whose_tensors_are_of_another_kind_read_for_themselves(rank_pool: Any, tmp_path: Any) -> None:
    """Memory that is filled twice on one rank never reaches another; conversions are made by those who ask for them."""
    state = {key: torch.full((3000,), n + 1.0) for n, key in enumerate("abcde")}
    quietly(side("ours").save, state, checkpoint_id=str(tmp_path), no_dist=True)
    for rank, (means, received) in enumerate(rank_pool.run(4, load_unlike, str(tmp_path))):
        assert means[2:] == [3.0, 4.0, 5.0]
        assert rank == 0 or means[:2] == [1.0, 2.0]
        assert received > 0 or rank < 2


def load_damaged(folder: str) -> Any:
    into = {key: torch.zeros(1 << 20) for key in "abc"}
    with sharing() as received:
        error = failure_of(side("ours").load, into, checkpoint_id=folder)
    assert received == []
    return {rank: type(cause).__name__ for rank, cause in causes_of(error).items()}


def test_damage_that_one_rank_finds_is_told_to_all(rank_pool: Any, tmp_path: Any) -> None:
    """A rank that fails to read its share keeps nobody waiting: all fail in the step before the exchange."""
    state = {key: torch.full((1 << 20,), n + 1.0) for n, key in enumerate("abc")}
    quietly(side("ours").save, state, checkpoint_id=str(tmp_path), no_dist=True)
    with open(tmp_path / "__0_0.distcp", "r+b") as data:
        data.seek(6_000_000)
        data.write(b"\x7f")
    heard = rank_pool.run(3, load_damaged, str(tmp_path))
    assert list(heard[0].values()) == [ChecksumMismatch.__name__]
    assert heard[1:] == heard[:1] * 2


@pytest.mark.parametrize(("second", "apart"), [(6, True), (4, False)])
def test_elements_that_are_filled_twice_are_not_shared(second: int, apart: bool) -> None:
    """Of metadata whose chunks overlap, nobody can tell what the common part will be, so no rank sends it to others."""
    dcp, metadata = side("ours"), part("ours", "metadata")
    sizes = {0: 6, second: 10 - second}
    chunks = [metadata.ChunkStorageMetadata(torch.Size([at]), torch.Size([n])) for at, n in sizes.items()]
    properties = metadata.TensorProperties(dtype=torch.float32)
    entry = metadata.TensorStorageMetadata(properties, torch.Size([10]), chunks)
    info = part("ours", "filesystem")._StorageInfo("__0_0.distcp", 0, 100)
    places = {metadata.MetadataIndex("w", torch.Size([at])): info for at in sizes}
    said = metadata.Metadata({"w": entry}, storage_data=places, storage_meta=metadata.StorageMeta(save_id="a"))
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(10)}, said, True)
    plan = planner.create_local_plan()
    assert [want.can_share for want in shared_requests_of_plan(plan, planner, said)] == [apart, apart]


# Where nothing is shared


def load_by(folder: str, kind: str) -> Any:
    dcp = side("ours")
    into = {"w": torch.zeros(3000)}
    options: dict[str, Any] = {"storage_reader": dcp.FileSystemReader(folder)}

    class Resolving(dcp.DefaultLoadPlanner):  # type: ignore[misc]
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return super().resolve_tensor(read_item)  # type: ignore[no-any-return]

    class Reading(dcp.FileSystemReader):  # type: ignore[misc]
        def read_data(self, plan: Any, planner: Any) -> Any:
            assert len(plan.items) == 1
            return super().read_data(plan, planner)

    if kind == "planner":
        options["planner"] = Resolving()
    elif kind == "reader":
        options["storage_reader"] = Reading(folder)
    elif kind == "torch's planner":
        options["planner"] = side("torch").DefaultLoadPlanner()
    elif kind == "torch's reader":
        options["storage_reader"] = part("torch", "filesystem").FileSystemReader(folder)
    elif kind == "no_dist":
        options["no_dist"] = True
    elif kind == "instance":
        planner = dcp.DefaultLoadPlanner()
        planner.lookup_tensor = lambda index: into["w"]
        options["planner"] = planner
    with sharing() as received, logged() as lines:
        quietly(dcp.load, into, **options)
    assert torch.equal(into["w"], numbered(3000))
    return len(received), [line for line in lines if "not shared" in line]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("plain", None),
        ("planner", "the planner, a load_by.<locals>.Resolving, may override how it is filled"),
        ("instance", "the planner, a DefaultLoadPlanner, may override how it is filled"),
        ("torch's planner", "the planner, a DefaultLoadPlanner, may override how it is filled"),
        ("reader", "the reader, a load_by.<locals>.Reading, may override how it reads"),
        ("torch's reader", "the reader, a FileSystemReader, may override how it reads"),
        ("no_dist", "there is only one rank"),
    ],
)
def test_who_reads_in_other_ways_reads_alone(rank_pool: Any, tmp_path: Any, kind: str, said: str | None) -> None:
    """With planners and readers of other kinds each rank reads all it wants, and the coordinator says why."""
    quietly(side("ours").save, {"w": numbered(3000)}, checkpoint_id=str(tmp_path), no_dist=True)
    heard = rank_pool.run(2, load_by, str(tmp_path), kind)
    assert [count for count, _ in heard] == ([1, 1] if said is None else [0, 0])
    line = [f"reads are not shared: rank 0: {said}"] if said else []
    assert heard[0][1] == line
    assert heard[1][1] == (line if kind == "no_dist" else [])


def load_own(folder: str) -> tuple[int, list[float]]:
    into = {"w": torch.zeros(300, 70)}
    with sharing() as received:
        quietly(side("ours").load, into, checkpoint_id=f"{folder}/{dist.get_rank()}")
    return sum(received), into["w"].unique().tolist()


def test_checkpoints_without_an_id_are_not_taken_for_each_other(rank_pool: Any, tmp_path: Any) -> None:
    """Ranks that load from places of their own what an older torch saved, without ids, each get what is at theirs."""
    for rank in range(2):
        quietly(
            side("torch").save,
            {"w": torch.full((300, 70), rank + 1.0)},
            checkpoint_id=tmp_path / str(rank),
            no_dist=True,
        )
        file = tmp_path / str(rank) / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        metadata.storage_meta = None
        file.write_bytes(pickle.dumps(metadata))
    assert rank_pool.run(2, load_own, str(tmp_path)) == [(0, [1.0]), (0, [2.0])]
