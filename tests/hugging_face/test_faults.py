"""Files that are not one whole checkpoint, saves that do not end, and what is left of the model that was there."""

import errno
import json
import os
import struct
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardkeep.dcp import hf_storage, state_dict_saver
from shardkeep.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from shardkeep.dcp._hf_utils import _get_safetensors_file_metadata
from shardkeep.dcp._impl import hf
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultSavePlanner
from shardkeep.errors import CheckpointError, DamagedCheckpoint, MalformedFile, WrongSize
from shardkeep.layouts import safetensors_publish
from shardkeep.layouts.safetensors import read_header
from shardkeep.storage.local import LocalStore, _LocalWriter
from tests.hugging_face.samples import INDEX, by_library, load, same, save, shard, spread_state
from tests.protocol.samples import quietly
from tests.toolkit.samples import numbered, seen

FILE = "model-00001-of-00001.safetensors"


def raw_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "nothing": b"",
    "less than a length": b"\1\2",
    "a header beyond the file": raw_file({}, length=1 << 20),
    "a header beyond any memory": raw_file({}, length=(1 << 64) - 1),
    "no JSON": raw_file(b"not json"),
    "no text": raw_file(b"\xff\xfe{}"),
    "too deep": raw_file(b"[" * 60_000),
    "no object": raw_file([1]),
    "a name twice": raw_file(b'{"a":%s,"a":%s}' % ((json.dumps(entry(offsets=(0, 8))).encode(),) * 2), bytes(8)),
    "metadata of numbers": raw_file({"__metadata__": {"a": 1}}),
    "an entry that is a list": raw_file({"a": [1]}),
    "no shape": raw_file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "a negative size": raw_file({"a": entry(shape=(-2,))}, bytes(8)),
    "a size that is true": raw_file({"a": entry(shape=(True, 2))}, bytes(8)),
    "a size beyond all": raw_file({"a": entry(shape=(1 << 70, 0), offsets=(0, 0))}),
    "an unknown dtype": raw_file({"a": entry(dtype="F3")}, bytes(8)),
    "half a byte": raw_file({"a": entry(dtype="F4", shape=(3,), offsets=(0, 2))}, bytes(2)),
    "another size than the shape": raw_file({"a": entry(offsets=(0, 4))}, bytes(4)),
    "offsets backwards": raw_file({"a": entry(offsets=(8, 0))}, bytes(8)),
    "offsets beyond the file": raw_file({"a": entry(offsets=(0, 8))}, bytes(4)),
    "far beyond the file": raw_file({"a": entry(shape=(1 << 40,), offsets=(0, 1 << 42))}, bytes(4)),
    "overlapping": raw_file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "a gap": raw_file({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "bytes of no tensor": raw_file({"a": entry()}, bytes(9)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_name(tmp_path, name):
    """Loading and consolidating say which file is wrong, make no memory for what it claims, and write nothing."""
    path = tmp_path / "in" / FILE
    path.parent.mkdir()
    path.write_bytes(HOSTILE[name])
    with pytest.raises(DamagedCheckpoint) as raised:
        read_header(FILE, LocalStore(path.parent))
    assert FILE in str(raised.value)
    with pytest.raises(ValueError, match=FILE):
        consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", {"a": 1})
    with pytest.raises(CheckpointException, match=FILE):
        load("ours", {"a": torch.zeros(2)}, tmp_path / "in", no_dist=True)
    assert os.listdir(tmp_path) == ["in"]


def test_a_stream_without_a_header_is_refused(tmp_path):
    for name in ("less than a length", "a header beyond any memory"):
        (tmp_path / "f").write_bytes(HOSTILE[name])
        with open(tmp_path / "f", "rb") as stream, pytest.raises(MalformedFile, match="header"):
            _get_safetensors_file_metadata(stream)


TWO = numbered(4, 6)
WRONG = {
    "a hole": ([("a", TWO[:2], [0, 0])], [("a", TWO[3:], [3, 0])], "hole"),
    "an overlap": ([("a", TWO[:3], [0, 0])], [("a", TWO[2:], [2, 0])], "overlap"),
    "the same twice": ([("a", TWO, [0, 0])], [("a", TWO, [0, 0])], "overlap"),
    "a first part missing": ([("a", TWO[1:], [1, 0])], [("b", TWO, [0, 0])], "hole"),
    "hole and overlap of one size": (
        [("a", TWO[:2, :4], [0, 0]), ("b", TWO, [0, 0])],
        [("a", TWO[:, 2:], [0, 2])],
        "overlap",
    ),
    "two dtypes": ([("a", TWO[:2], [0, 0])], [("a", TWO[2:].half(), [2, 0])], "float16"),
    "two numbers of axes": ([("a", TWO[:2], [0, 0])], [("a", TWO[2:].flatten(), [12])], "axes"),
    "offsets of other axes": ([("a", TWO, [0])], [("b", TWO, [0, 0])], "saved_offsets"),
    "negative offsets": ([("a", TWO, [0, -1])], [("b", TWO, [0, 0])], "saved_offsets"),
}


@pytest.mark.parametrize("name", WRONG)
def test_shards_that_do_not_fit_are_refused_by_name(tmp_path, name):
    """Shards that do not make whole tensors are an error with key and files; nothing is written or filled."""
    first, second, said = WRONG[name]
    for number, parts in enumerate((first, second), start=1):
        shard(tmp_path, number, {key: (tensor, offsets) for key, tensor, offsets in parts})
    with pytest.raises(MalformedFile, match=said) as raised:
        consolidate_safetensors_files(tmp_path, tmp_path / "out", {"a": 1})
    assert "'a'" in str(raised.value)
    assert "shard-0000" in str(raised.value)
    assert not (tmp_path / "out").exists()
    into = {"a": torch.full((4, 6), -1.0)}
    with pytest.raises(CheckpointException, match=said):
        load("ours", into, tmp_path, no_dist=True)
    assert bool((into["a"] == -1).all())


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    """One byte less is known from the header alone, before anything is read."""
    path = shard(tmp_path, 1, {"a": (TWO, [0, 0])})
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(WrongSize, match="cut short"):
        consolidate_safetensors_files(tmp_path, tmp_path / "out", {"a": 1})
    with pytest.raises(CheckpointException, match="cut short"):
        load("ours", {"a": torch.zeros(4, 6)}, tmp_path, no_dist=True)


def test_mappings_that_do_not_fit(tmp_path):
    shard(tmp_path, 1, {"a": (TWO, [0, 0])})
    for mapping, said in [({"a": 1, "x": 1}, "'x'"), ({}, "empty"), ({"a": 0}, "from 1"), ({"a": "1"}, "from 1")]:
        with pytest.raises(ValueError, match=said):
            consolidate_safetensors_files(tmp_path, tmp_path / "out", mapping)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no safetensors files"):
        consolidate_safetensors_files(tmp_path / "empty", tmp_path / "out", {"a": 1})
    save_file({"b": TWO}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="DCP_SHARDING_INFO"):
        consolidate_safetensors_files(tmp_path, tmp_path / "out", {"a": 1})
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointException) as raised:
        save("ours", {"a": TWO, "b": TWO}, tmp_path / "ck", no_dist=True, fqn_to_index_mapping={"a": 1})
    assert isinstance(raised.value.failures[0][0], KeyError)
    assert "'b'" in str(raised.value)


# -- more than one save in a directory ---------------------------------------------------------------------------------


def save_shards(folder, side, add):
    state = {"w": spread_state()["rows"], "n": torch.tensor(add)}
    save(side, state, folder, save_distributed=True)


def test_shards_of_an_older_save_are_gone(rank_pool, tmp_path):
    """Four ranks save, then two: only the two files of the second are left, whichever writer wrote the first."""
    for side in ("ours", "theirs"):
        rank_pool.run(4, save_shards, str(tmp_path), side, 1)
        assert len(os.listdir(tmp_path)) == 4
        rank_pool.run(2, save_shards, str(tmp_path), "ours", 2)
        assert len(os.listdir(tmp_path)) == 2
        assert int(load("ours", {"n": torch.tensor(0)}, tmp_path, no_dist=True)["n"]) == 2


def test_files_of_two_saves_are_refused(rank_pool, tmp_path):
    for turn in ("one", "two"):
        rank_pool.run(2, save_shards, str(tmp_path / turn), "ours", 1)
    name = min(os.listdir(tmp_path / "one"))
    os.replace(tmp_path / "one" / name, tmp_path / "two" / name)
    with pytest.raises(CheckpointException, match="different saves"):
        load("ours", {"n": torch.tensor(0)}, tmp_path / "two", no_dist=True)


def test_a_missing_file_is_missed(rank_pool, tmp_path):
    """Without its last shard the tensor would only seem to be shorter; the number of files says that one is missing."""
    rank_pool.run(2, save_shards, str(tmp_path), "ours", 1)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointException, match=r"of 2 files of save .*, 1 are here"):
        load("ours", {"n": torch.tensor(0)}, tmp_path, no_dist=True)


def test_the_index_file_decides(tmp_path, caplog):
    """Files it does not name are not read, and said so; one that names only files that are not there is an error."""
    save_file({"a": numbered(3)}, tmp_path / "one.safetensors")
    save_file({"a": numbered(3) + 9, "b": numbered(2)}, tmp_path / "old.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert seen(load("ours", {"a": torch.zeros(3)}, tmp_path, no_dist=True)["a"]) == seen(numbered(3))
    assert "does not name old.safetensors" in caplog.text
    for weight_map, said in [
        ({"a": "gone.safetensors"}, "none of the files"),
        ({"a": "../one.safetensors"}, "none of the files"),
        (["a"], "no weight_map"),
    ]:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointException, match=said):
            load("ours", {"a": torch.zeros(3)}, tmp_path, no_dist=True)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointException, match="no JSON"):
        load("ours", {"a": torch.zeros(3)}, tmp_path, no_dist=True)


def test_what_is_there_of_a_model_is_loaded(tmp_path, caplog):
    """A file or tensor that the index names and that is gone is missing, and named; the rest is loaded."""
    save_file({"a": numbered(3)}, tmp_path / "one.safetensors")
    homes = {"a": "one.safetensors", "stale": "one.safetensors", "far": "two.safetensors", "out": "../one.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": homes}))
    assert seen(load("ours", {"a": torch.zeros(3)}, tmp_path, no_dist=True)["a"]) == seen(numbered(3))
    assert "'far' in two.safetensors" in caplog.text
    for key in ("stale", "far", "out"):
        with pytest.raises(CheckpointException, match=key) as raised:
            load("ours", {key: torch.zeros(3)}, tmp_path, no_dist=True)
        assert isinstance(raised.value.failures[0][0], RuntimeError)


def test_shards_are_not_put_beside_a_model(tmp_path):
    """A model from elsewhere with an index file is neither deleted nor made to hide the shards."""
    save_file({"a": numbered(3)}, tmp_path / FILE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FILE}}))
    with pytest.raises(CheckpointException, match="holds a model"):
        save("ours", {"a": numbered(3) + 1}, tmp_path, no_dist=True, save_distributed=True)
    assert same(by_library(tmp_path), {"a": numbered(3)}) == []
    # Whole tensors replace it: that is what a second save is for.
    save("ours", {"a": numbered(3) + 1}, tmp_path, no_dist=True)
    assert same(by_library(tmp_path), {"a": numbered(3) + 1}) == []


def test_shards_beside_a_foreign_file(tmp_path):
    save_file({"a": numbered(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save("ours", {"b": numbered(2)}, tmp_path, no_dist=True, save_distributed=True)
    into = {"a": torch.zeros(3), "b": torch.zeros(2)}
    assert same(load("ours", into, tmp_path, no_dist=True), {"a": numbered(3), "b": numbered(2)}) == []
    save("ours", {"a": numbered(3)}, tmp_path, no_dist=True, save_distributed=True)
    with pytest.raises(CheckpointException, match=r"'a' of shape .* overlap"):
        load("ours", into, tmp_path, no_dist=True)


def test_foreign_files_are_left_alone(tmp_path):
    save_file({"x": numbered(3)}, tmp_path / "model-00007-of-00009.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    save("ours", {"a": numbered(3)}, tmp_path, no_dist=True, save_distributed=True)
    save("ours", {"a": numbered(3)}, tmp_path, no_dist=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["model-00007-of-00009.safetensors", "notes.txt", FILE, INDEX])


def save_objects(folder):
    try:
        save("ours", {"w": numbered(2), "opt": {"lr": 0.1}}, folder, save_distributed=True)
    except CheckpointException as error:
        return isinstance(error.failures[0][0], TypeError), "'opt.lr' is no tensor" in str(error), os.listdir(folder)
    return None


def test_objects_have_no_place(rank_pool, tmp_path):
    tmp_path.joinpath("ck").mkdir()
    assert rank_pool.run(2, save_objects, str(tmp_path / "ck")) == [(True, True, [])] * 2


def test_a_dtype_that_safetensors_lacks(tmp_path):
    with pytest.raises(CheckpointException, match="'c' is of dtype complex128"):
        save("ours", {"c": torch.zeros(2, dtype=torch.complex128)}, tmp_path, no_dist=True)
    assert os.listdir(tmp_path) == []


class Failing(DefaultSavePlanner):
    def __init__(self, rank):
        super().__init__()
        self.failing = rank

    def resolve_data(self, write_item):
        if dist.get_rank() == self.failing:
            raise OSError("nothing there")
        return super().resolve_data(write_item)


def save_and_fail(folder, failing):
    writer = hf_storage.HuggingFaceStorageWriter(folder, save_distributed=True)
    state = {"w": spread_state()["rows"]}
    with pytest.raises(CheckpointException, match="nothing there"):
        quietly(state_dict_saver.save, state, storage_writer=writer, planner=Failing(failing))
    dist.barrier()
    return os.listdir(folder)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_leaves_nothing_of_the_others(rank_pool, tmp_path, failing):
    assert rank_pool.run(2, save_and_fail, str(tmp_path), failing) == [[], []]


def save_slowly(folder):
    """Consolidate for longer than ranks wait for one that has nothing to do."""
    real, slowest = hf._consolidate, hf.SLOWEST_BYTES_PER_S
    os.environ["SHARDKEEP_TIMEOUT_S"] = "1"

    def slow(*args):
        time.sleep(2.5)
        real(*args)

    hf._consolidate, hf.SLOWEST_BYTES_PER_S = slow, 100
    try:
        state = {"w": spread_state()["rows"], "v": numbered(300)}
        save("ours", state, folder, save_distributed=True, enable_consolidation=True)
    finally:
        hf._consolidate, hf.SLOWEST_BYTES_PER_S = real, slowest
        del os.environ["SHARDKEEP_TIMEOUT_S"]
    return sorted(os.listdir(folder))


def test_the_rank_that_consolidates_is_waited_for(rank_pool, tmp_path):
    """Ranks wait for the one that writes the whole model as long as its bytes may take."""
    assert rank_pool.run(2, save_slowly, str(tmp_path)) == [[FILE, INDEX, "sharded"]] * 2


# -- interrupted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_full_disk_fails_the_save_and_keeps_the_old_model(tmp_path, monkeypatch, at):
    mapping = {"a": 1, "b": 2}
    old = {"a": numbered(300, 300), "b": numbered(7)}
    save("ours", old, tmp_path, no_dist=True, fqn_to_index_mapping=mapping)
    before = sorted(os.listdir(tmp_path))
    calls = []
    real = _LocalWriter.write_at

    def full(self, offset, data):
        calls.append(offset)
        if len(calls) > at:
            raise OSError(errno.ENOSPC, "no space")
        real(self, offset, data)

    monkeypatch.setattr(_LocalWriter, "write_at", full)
    with pytest.raises(CheckpointException, match="no space"):
        save("ours", {k: v + 1 for k, v in old.items()}, tmp_path, no_dist=True, fqn_to_index_mapping=mapping)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == before
    assert same(load("ours", {k: torch.zeros_like(v) for k, v in old.items()}, tmp_path, no_dist=True), old) == []


def test_a_note_that_is_not_ours_is_refused(tmp_path):
    """A forged note cannot make a save rename or delete what is outside the directory."""
    save("ours", {"a": numbered(3)}, tmp_path / "ck", no_dist=True)
    (tmp_path / "victim.safetensors").write_bytes(b"x")
    note = {"save_id": "s", "files": [], "remove": ["../victim.safetensors"], "index": True}
    for forged in (note, {**note, "remove": [], "save_id": "../s"}, {"files": 1}, [], "x"):
        (tmp_path / "ck" / safetensors_publish.NOTE_NAME).write_text(json.dumps(forged))
        with pytest.raises(CheckpointException, match="not a note that shardkeep wrote"):
            load("ours", {"a": torch.zeros(3)}, tmp_path / "ck", no_dist=True)
        with pytest.raises(CheckpointException, match="not a note that shardkeep wrote"):
            save("ours", {"a": numbered(3)}, tmp_path / "ck", no_dist=True)
    assert (tmp_path / "victim.safetensors").exists()


def save_alone(folder):
    rank = dist.get_rank()
    writer = hf_storage.HuggingFaceStorageWriter(folder)
    try:
        quietly(state_dict_saver.save, {"a": numbered(3) + rank}, storage_writer=writer, use_collectives=False)
    except CheckpointException as error:
        return "use_collectives=True" in str(error)
    return None


def test_ranks_cannot_save_one_model_each(rank_pool, tmp_path):
    """Without collectives all ranks would write the same file, as torch's do: all of them raise."""
    assert rank_pool.run(2, save_alone, str(tmp_path)) == [True, True]


def test_leftovers_of_a_dead_save_are_cleared(tmp_path):
    LocalStore(tmp_path).put(f"{FILE}.new-0123", b"half")
    save("ours", {"a": numbered(3)}, tmp_path, no_dist=True)
    assert sorted(os.listdir(tmp_path)) == [FILE, INDEX]
    with pytest.raises(CheckpointError):
        read_header("absent.safetensors", LocalStore(tmp_path))
