"""A file of torch.save loaded on many ranks: one reads it, each keeps its part, and all hear of what is wrong."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as their_dcp
from torch.distributed.checkpoint import format_utils as theirs
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import format_utils as ours
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.state_dict_loader import load, load_state_dict
from shardkeep.errors import ChecksumMismatch, MalformedFile, PickleRefused, StateMismatch
from shardkeep.state import collectives as stream
from tests.protocol.samples import quietly
from tests.toolkit.samples import grid, in_chunks, mesh_of, numbered, seen, spread_out
from tests.toolkit.test_bounded import LiveBytes


def full_state():
    return {
        "rows": numbered(50, 30),
        "columns": numbered(50, 30) * 2,
        "both": numbered(16, 12, dtype=torch.float64),
        "copied": numbered(33),
        "few rows": numbered(2, 3),
        "chunks": numbered(10, 3),
        "plain": numbered(4, dtype=torch.bfloat16),
        "eighth": numbered(9).to(torch.float8_e4m3fn),
        "transposed": numbered(6, 8).t(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "nested": {"list": [numbered(3), {"deep": numbered(2, 2)}]},
    }


def spread_state(full):
    line = mesh_of(dist.get_world_size())
    return {
        **full,
        "rows": spread_out(full["rows"], line, Cut(0)),
        "columns": spread_out(full["columns"], line, Cut(1)),
        "both": spread_out(full["both"], grid(), Cut(0), Cut(1)),
        "copied": spread_out(full["copied"], line, Replicate()),
        "few rows": spread_out(full["few rows"], line, Cut(0)),
        "chunks": in_chunks(full["chunks"]),
    }


def zeros(tree):
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeros(value) for value in tree]
    return torch.zeros_like(tree.float()).to(tree.dtype)


def broadcast(state, path, planner=ours.DynamicMetaLoadPlanner):
    quietly(load, state, storage_reader=ours.BroadcastingTorchSaveReader(path), planner=planner())


def loaded(path, coordinator):
    want, into = spread_state(full_state()), spread_state(zeros(full_state()))
    before, stream.BATCH_BYTES = stream.BATCH_BYTES, 1000
    try:
        if coordinator:
            planner = ours.DynamicMetaLoadPlanner()
            with pytest.warns(FutureWarning):
                load_state_dict(into, NoReset(path, coordinator), coordinator_rank=coordinator, planner=planner)
        else:
            broadcast(into, path)
    finally:
        stream.BATCH_BYTES = before
    found, wanted = seen(into), seen(want)
    return [key for key in wanted if found[key] != wanted[key]]


class NoReset(ours.BroadcastingTorchSaveReader):
    """`load_state_dict` resets the storage without an id, which makes torch's reader, and ours, forget its file."""

    def reset(self, checkpoint_id=None):
        if checkpoint_id is not None:
            super().reset(checkpoint_id)


@pytest.mark.parametrize(("ranks", "coordinator"), [(1, 0), (2, 0), (4, 0), (4, 2)])
def test_every_rank_gets_its_part(rank_pool, tmp_path, ranks, coordinator):
    """DTensors cut in any way, also where a rank has nothing of one, ShardedTensors and plain tensors, bit for bit."""
    torch.save(full_state(), tmp_path / "file.pt")
    assert rank_pool.run(ranks, loaded, str(tmp_path / "file.pt"), coordinator) == [[]] * ranks


def model_from(path, device):
    with torch.device(device):
        model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    state = {"model": model.state_dict()}
    broadcast(state, path)
    if device == "meta":
        model.load_state_dict(state["model"], assign=True)
    return {key: value.full_tensor() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_fsdp_model_is_filled(rank_pool, tmp_path, device):
    """On the CPU in place, and from the meta device; three ranks, so that no tensor is cut evenly."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    torch.save({"model": model.state_dict()}, tmp_path / "file.pt")
    for found in rank_pool.run(3, model_from, str(tmp_path / "file.pt"), device):
        assert seen(found) == seen(dict(model.state_dict()))


def both_load(path):
    states, halves = [], []
    for module, do_load in ((ours, load), (theirs, their_dcp.load)):
        state = {"a": torch.zeros(5, 3), "b": {"c": torch.zeros(4, dtype=torch.float64), "half": torch.zeros(3)}}
        reader, planner = module.BroadcastingTorchSaveReader(), module.DynamicMetaLoadPlanner()
        quietly(do_load, state, checkpoint_id=path, storage_reader=reader, planner=planner)
        halves.append(state["b"].pop("half").tolist())
        states.append(seen(state))
    return states[0] == states[1], float(state["a"].sum()), halves[0]


def test_torchs_reader_does_the_same_with_plain_tensors(rank_pool, tmp_path):
    """Called alike, both fill the same values; ours also converts them, as `copy_` does it, on every rank."""
    nested = {"c": numbered(4, dtype=torch.float64), "half": numbered(3, dtype=torch.float16)}
    torch.save({"a": numbered(5, 3), "b": nested, "x": "y"}, tmp_path / "file.pt")
    assert rank_pool.run(2, both_load, str(tmp_path / "file.pt")) == [(True, 105.0, [0.0, 1.0, 2.0])] * 2


def failure(path, state, planner=ours.DynamicMetaLoadPlanner):
    try:
        broadcast(state, path, planner)
    except CheckpointException as error:
        kinds = {type(each) for each, _ in error.failures.values()}
        return kinds, str(error)
    return None


class Refusing(ours.DynamicMetaLoadPlanner):
    """Has no memory for anything on rank 1."""

    def resolve_tensor(self, read_item):
        if dist.get_rank() == 1:
            raise MemoryError("no room")
        return super().resolve_tensor(read_item)


class Late(ours.DynamicMetaLoadPlanner):
    def commit_tensor(self, read_item, tensor):
        if dist.get_rank() == 1:
            raise ValueError("too late")


class Hostile:
    def __reduce__(self):
        return print, ("this was run",)


def spoilt(folder, fault):
    path = folder / "file.pt"
    torch.save({"a": numbered(1000), "text": "x", "bad": Hostile()} if fault == "hostile" else
               {"a": numbered(1000), "text": "x"}, path)  # fmt: skip
    data = bytearray(path.read_bytes())
    if fault == "flipped":
        data[data.index(numbered(1000).numpy().tobytes()) + 2000] ^= 1
    elif fault == "cut short":
        del data[3000:]
    elif fault == "absent":
        path.unlink()
        return str(path)
    path.write_bytes(bytes(data))
    return str(path)


FAULTS = {
    "absent": ("a", 1000, DynamicMeta := ours.DynamicMetaLoadPlanner, "there is no such file"),
    "cut short": ("a", 1000, DynamicMeta, "cut short"),
    "flipped": ("a", 1000, DynamicMeta, "they hold 'a'"),
    "hostile": ("a", 1000, DynamicMeta, "SHARDKEEP_ALLOW_PICKLE"),
    "missing key": ("b", 1000, DynamicMeta, "Missing key in checkpoint state_dict: b"),
    "other size": ("a", 999, DynamicMeta, "Size mismatch"),
    "no tensor": ("text", 1000, DynamicMeta, "'text' is a str"),
    "no room": ("a", 1000, Refusing, "no room"),
    "too late": ("a", 1000, Late, "too late"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_raise(rank_pool, tmp_path, fault):
    key, size, planner, words = FAULTS[fault]
    path = spoilt(tmp_path, fault)
    outcomes = rank_pool.run(3, failure, path, {key: torch.zeros(size)}, planner)
    for kinds, text in outcomes:
        assert words in text
        assert kinds == outcomes[0][0]
    expected = {"cut short": MalformedFile, "flipped": ChecksumMismatch, "hostile": PickleRefused,
                "other size": StateMismatch}.get(fault)  # fmt: skip
    assert expected is None or expected in outcomes[0][0]


def test_values_that_are_no_tensors_are_refused(tmp_path):
    """By the planner, and by the reader if a plan has one, in torch's words."""
    torch.save({"a": 1}, tmp_path / "file.pt")
    for module, do_load in ((ours, load), (theirs, their_dcp.load)):
        with pytest.raises(BaseException, match="Non-tensor value identified at a") as caught:
            quietly(
                do_load,
                {"a": 1},
                checkpoint_id=tmp_path / "file.pt",
                storage_reader=module.BroadcastingTorchSaveReader(),
                planner=module.DynamicMetaLoadPlanner(),
            )
        assert isinstance(caught.value.failures[0][0], RuntimeError)


def test_a_reader_without_a_file_or_with_another_coordinator_says_so(tmp_path):
    """Where torch raises AssertionError, so do we."""
    with pytest.raises(AssertionError, match="no file"):
        ours.BroadcastingTorchSaveReader().set_up_storage_reader(None, True)
    with pytest.raises(AssertionError, match="Coordinator rank mismatch: expected 1, got 0"):
        ours.BroadcastingTorchSaveReader("x", 1).set_up_storage_reader(None, True)
    reader = ours.BroadcastingTorchSaveReader("x")
    reader.reset("y")
    assert reader.checkpoint_id == "y"
    assert reader.read_metadata().state_dict_metadata == {}
    torch.save({}, tmp_path / "file.pt")
    assert [reader.validate_checkpoint_id(tmp_path / name) for name in ("file.pt", "no.pt")] == [True, False]


COUNT, ROWS = 40, 1024
FULL = ROWS * 64 * 4
BATCH, SLACK = 512 << 10, 64 << 10


def counted(path):
    line = mesh_of(dist.get_world_size())
    into = {f"t{i}": spread_out(torch.zeros(ROWS, 64), line, Cut(0)) for i in range(COUNT)}
    before, stream.BATCH_BYTES = stream.BATCH_BYTES, BATCH
    try:
        with LiveBytes() as live:
            broadcast(into, path)
    finally:
        stream.BATCH_BYTES = before
    return live.peak, all(float(value._local_tensor.mean()) == i for i, value in enumerate(into.values()))


def test_no_rank_holds_more_than_a_batch(rank_pool, tmp_path):
    """Ten MiB arrive through half a MiB, on the rank that reads, too: its file is mapped."""
    torch.save({f"t{i}": torch.full((ROWS, 64), float(i)) for i in range(COUNT)}, tmp_path / "file.pt")
    for peak, right in rank_pool.run(4, counted, str(tmp_path / "file.pt")):
        assert right
        assert BATCH // 2 < peak <= BATCH + SLACK
