"""Our writer and reader and torch's, each with the other's files and the other's driver."""

import json
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardkeep.dcp import hf_storage, state_dict_loader, state_dict_saver
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from shardkeep.dcp.planner import LoadItemType, LoadPlan, ReadItem
from shardkeep.engine import reader as engine_reader
from shardkeep.storage.local import _LocalReader
from tests.hugging_face.samples import INDEX, by_library, full_state, load, same, save, spread_state
from tests.protocol.samples import blank, holds, quietly
from tests.toolkit.samples import numbered, seen, sharded_tensor


def save_and_load(folder, saver, writer, loader, reader, turn):
    state = spread_state()
    if "theirs" in (loader, reader):
        # Torch's planner drops a ShardedTensor of which a rank has no shard.
        del state["chunks"]
    save(writer, state, folder, saver=saver, save_distributed=True, thread_count=2)
    dist.barrier()
    into, expected = spread_state(turn), spread_state(turn)
    for tree in (into, expected):
        if "theirs" in (loader, reader):
            del tree["chunks"]
    into = blank(into)
    load(reader, into, folder, loader=loader, thread_count=2)
    found, wanted = holds(into), holds(expected)
    return sorted(key for key in wanted if found[key] != wanted[key])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("saver", "writer", "loader", "reader"),
    [
        ("ours", "ours", "ours", "ours"),
        ("ours", "ours", "theirs", "theirs"),
        ("theirs", "theirs", "ours", "ours"),
        ("theirs", "ours", "theirs", "ours"),
        ("ours", "theirs", "ours", "theirs"),
    ],
)
def test_what_one_saves_the_other_loads(rank_pool, tmp_path, ranks, saver, writer, loader, reader):
    """Shards of any driver and writer are read by any other, as other cuts, bit for bit."""
    outcome = rank_pool.run(ranks, save_and_load, str(tmp_path / "ck"), saver, writer, loader, reader, 1)
    assert outcome == [[]] * ranks


def names_after(folder, side, **options):
    save(side, spread_state(), folder, **options)
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("mapped", [False, True])
def test_files_are_called_as_torch_calls_them(rank_pool, tmp_path, mapped):
    keys = [*full_state(), "chunks"]
    mapping = {key: number % 2 + 1 for number, key in enumerate(keys)} if mapped else None
    names = {
        side: rank_pool.run(
            2, names_after, str(tmp_path / side), side, save_distributed=True, fqn_to_index_mapping=mapping
        )[0]
        for side in ("ours", "theirs")
    }
    assert names["ours"] == names["theirs"]
    for name in names["ours"]:
        said = {side: header(tmp_path / side / name)["__metadata__"] for side in ("ours", "theirs")}
        assert set(said["ours"]) - {"shardkeep.save_id", "shardkeep.files"} == set(said["theirs"])
        for key in ("DCP_VERSION", "format"):
            assert said["ours"][key] == said["theirs"][key]


def header(path):
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def save_with_rank_zero_mode(folder):
    save("ours", {key: value for key, value in spread_state().items() if type(value) is torch.Tensor}, folder)


@pytest.mark.parametrize("ranks", [1, 3])
def test_whole_tensors_of_several_ranks_are_one_model(rank_pool, tmp_path, ranks):
    """Replicated tensors that several ranks write are all there; torch's ranks overwrite one file."""
    rank_pool.run(ranks, save_with_rank_zero_mode, str(tmp_path))
    expected = {key: value for key, value in full_state().items() if key in ("bytes", "flags", "step", "nothing")}
    assert same(by_library(tmp_path), expected) == []
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    assert set(index["weight_map"].values()) | {INDEX} == set(os.listdir(tmp_path))
    for side in ("ours", "theirs"):
        into = {key: torch.zeros_like(value) for key, value in expected.items()}
        assert same(load(side, into, tmp_path, no_dist=True), expected) == []


def save_in_parts_without_saying_so(folder):
    try:
        save("ours", spread_state(), folder)
    except BaseException as error:  # noqa: BLE001 - a CheckpointException is no Exception
        return "save_distributed=True" in str(error), os.listdir(folder)
    return None


def test_parts_of_tensors_need_save_distributed(rank_pool, tmp_path):
    """Without save_distributed, a spread tensor is an error that says what to set; torch loses parts."""
    assert rank_pool.run(2, save_in_parts_without_saying_so, str(tmp_path)) == [(True, [])] * 2


def refusal(folder, state, **options):
    with pytest.raises(CheckpointException) as raised:
        save("ours", state(), folder, **options)
    return str(raised.value.failures[0][0]), os.listdir(folder)


def two_shards_a_rank():
    return {"w": sharded_tensor(numbered(8, 5), [(number % 2, [number * 2, 0], [2, 5]) for number in range(4)])}


def large_replicas():
    return {key: torch.zeros(100_000) for key in "ab"}


def test_what_torchs_names_have_no_place_for(rank_pool, tmp_path):
    """Two shards of a tensor on one rank, and two ranks with tensors for one file: torch writes one over the other."""
    for why, nothing in rank_pool.run(2, refusal, str(tmp_path), two_shards_a_rank, save_distributed=True):
        assert ("'w' has 2 shards on one rank" in why, nothing) == (True, [])
    for why, nothing in rank_pool.run(2, refusal, str(tmp_path), large_replicas):
        assert ("ranks [0, 1] have tensors for model-00001" in why, nothing) == (True, [])


def save_whole(folder, mapping):
    save(
        "ours",
        spread_state(),
        folder,
        save_distributed=True,
        enable_consolidation=True,
        fqn_to_index_mapping=mapping,
        thread_count_consolidation=2,
    )
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_save_may_end_with_whole_tensors(rank_pool, tmp_path, mapped):
    """Shards go to `sharded`, whole tensors to the directory itself; saved again, they replace the first."""
    full = {**full_state(), "chunks": numbered(10, 3)}
    mapping = {key: number % 3 + 1 for number, key in enumerate(full)} if mapped else None
    last = 3 if mapped else 1
    names = [*(f"model-0000{n}-of-0000{last}.safetensors" for n in range(1, last + 1)), INDEX, "sharded"]
    for _ in range(2):
        assert rank_pool.run(2, save_whole, str(tmp_path), mapping) == [names] * 2
        assert same(by_library(tmp_path), full) == []
    assert len(os.listdir(tmp_path / "sharded")) == 2 * last
    into = {key: torch.zeros_like(value) for key, value in full.items()}
    assert same(load("ours", into, tmp_path, no_dist=True), full) == []


def test_an_id_moves_shards_and_result(tmp_path):
    """A checkpoint id given to the save moves all of it; torch leaves the result in the writer's first place."""
    writer = hf_storage.HuggingFaceStorageWriter(str(tmp_path / "a"), save_distributed=True, enable_consolidation=True)
    writer.reset(str(tmp_path / "b"))
    assert (str(writer.path), writer.consolidated_output_path) == (str(tmp_path / "b" / "sharded"), str(tmp_path / "b"))
    quietly(
        state_dict_saver.save,
        {"w": numbered(3)},
        storage_writer=writer,
        checkpoint_id=str(tmp_path / "c"),
        no_dist=True,
    )
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert seen(by_library(tmp_path / "c")["w"]) == seen(numbered(3))


class Halving(DefaultSavePlanner):
    """Stores something smaller than it planned, and counts how much of it is alive."""

    alive = most = 0

    def transform_object(self, write_item, object):  # noqa: A002 - torch's name
        made = object.to(torch.bfloat16) if object.is_floating_point() else object.clone()
        type(self).alive += 1
        type(self).most = max(self.most, self.alive)
        weakref.finalize(made, self.let_go)
        return made

    @classmethod
    def let_go(cls):
        cls.alive -= 1


def test_a_planner_may_store_another_dtype(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDKEEP_HOST_BUDGET_BYTES", str(2 << 20))
    state = {f"t{n}": numbered(256, 256 + n) for n in range(40)} | {"n": torch.tensor(3)}
    writer = hf_storage.HuggingFaceStorageWriter(str(tmp_path))
    quietly(state_dict_saver.save, state, storage_writer=writer, planner=Halving(), no_dist=True)
    expected = {key: value.bfloat16() if value.is_floating_point() else value for key, value in state.items()}
    assert same(by_library(tmp_path), expected) == []
    assert 0 < Halving.most <= 12
    assert Halving.alive == 0


def test_strided_tensors_are_written_and_filled(tmp_path):
    wide = numbered(6, 10)
    state = {"t": wide.t(), "s": wide[1:5, 2::3], "r": numbered(4)[::2]}
    save("ours", state, tmp_path, no_dist=True)
    assert same(by_library(tmp_path), {key: value.contiguous() for key, value in state.items()}) == []
    memory = {key: torch.zeros(20, 20) for key in state}
    into = {"t": memory["t"][:12:2, :10].t(), "s": memory["s"][::5, 1:4], "r": memory["r"][0, 3:9:3]}
    load("ours", into, tmp_path, no_dist=True)
    assert [seen(into[key].contiguous()) for key in state] == [seen(state[key].contiguous()) for key in state]
    assert memory["r"].count_nonzero() == state["r"].count_nonzero()


def test_values_are_cast_as_torch_casts_them(tmp_path):
    state = {key: value for key, value in full_state().items() if key != "nothing"}
    save_file(state, tmp_path / "model.safetensors")
    for dtype in (torch.float16, torch.float64, torch.int32):
        found = {
            side: load(side, {k: torch.zeros(v.shape, dtype=dtype) for k, v in state.items()}, tmp_path, no_dist=True)
            for side in ("ours", "theirs")
        }
        assert same(found["ours"], found["theirs"]) == []


def test_one_row_is_read_without_the_tensor(tmp_path, monkeypatch):
    full = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save("ours", {"w": full}, tmp_path, no_dist=True)
    read = []
    real = _LocalReader.read_into

    def counted(self, offset, into, **how):
        read.append(len(into))
        real(self, offset, into, **how)

    monkeypatch.setattr(_LocalReader, "read_into", counted)
    reader = hf_storage.HuggingFaceStorageReader(str(tmp_path))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    [index] = metadata.storage_data
    read.clear()
    row = torch.zeros(1, 1024)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": row}, metadata)
    size = torch.Size
    item = ReadItem(LoadItemType.TENSOR, index, size([0, 0]), index, size([777, 0]), size([1, 1024]))
    reader.read_data(LoadPlan([item]), planner).wait()
    assert seen(row[0]) == seen(full[777])
    assert read[-1] == 4096
    assert sum(read[:-1]) == 64 << 10


def test_files_of_a_hub_cache_are_links(tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": numbered(5)}, blobs / ("0a" * 32))
    (tmp_path / "snapshot" / "my model.safetensors").symlink_to(blobs / ("0a" * 32))
    assert seen(load("ours", {"w": torch.zeros(5)}, tmp_path / "snapshot", no_dist=True)["w"]) == seen(numbered(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as stored", "converted"])
def test_elements_cut_by_windows_are_loaded(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(engine_reader, "_CACHED_STEP_NBYTES", 4096)
    stored = {
        "a": torch.arange(21, dtype=torch.uint8).reshape(3, 7),
        "b": torch.arange(64 * 130, dtype=torch.float32).reshape(64, 130),
        "c": torch.arange(210, dtype=torch.uint8).reshape(30, 7),
    }
    entries, payload = {}, b""
    for key, tensor in stored.items():
        name = {torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype]
        offsets = [len(payload), len(payload) + tensor.nbytes]
        entries[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": offsets}
        payload += tensor.numpy().tobytes()
    text = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + payload)

    loaded = {
        key: torch.zeros(len(tensor), 2 * tensor.shape[1], dtype=dtype if key == "b" else tensor.dtype)[:, ::2]
        for key, tensor in stored.items()
    }
    load("ours", loaded, tmp_path, no_dist=True)
    for key, tensor in stored.items():
        assert torch.equal(loaded[key], tensor.to(loaded[key].dtype)), key


class Negated(torch.Tensor):
    """Keeps the negative of what is copied into it, in memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args[0].inner.copy_(-args[1])
            return args[0]
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


def test_a_tensor_of_another_class_is_filled_by_its_own_copy(tmp_path):
    """It may use its memory in its own way."""
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    into = Negated(torch.zeros(4))
    reader = hf_storage.HuggingFaceStorageReader(tmp_path)
    quietly(state_dict_loader.load, {"w": into}, storage_reader=reader, no_dist=True)
    assert into.inner.tolist() == [0, -1, -2, -3]
