"""Files of torch's layout: which save counts, which files are removed, names and links of other writers."""

import os
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dcp import filesystem, format_utils, state_dict_loader, state_dict_saver
from shardkeep.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultSavePlanner
from shardkeep.errors import CheckpointError, CheckpointExists
from shardkeep.format import data_file
from tests.protocol.samples import quietly

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is not in use"),
    pytest.mark.filterwarnings("ignore:.*holds a checkpoint, which this save will replace"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def loaded(folder, like):
    state = {"w": torch.full_like(like, -1)}
    dcp.load(state, checkpoint_id=folder)
    return state["w"]


@pytest.mark.parametrize("name", ["../victim", "{tmp}/victim", ".metadata", "victim-in-it"])
def test_old_metadata_cannot_have_other_files_removed(tmp_path, name):
    """Whatever files the replaced metadata name, only data files of this layout are removed."""
    folder = tmp_path / "ck"
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=folder)
    victims = [tmp_path / "victim", folder / "victim-in-it"]
    for victim in victims:
        victim.write_text("precious")
    metadata = theirs.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = name.format(tmp=tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    assert [victim.read_text() for victim in victims] == ["precious"] * 2
    assert torch.equal(loaded(folder, torch.ones(3)), torch.ones(3))


def test_blocks_are_as_large_as_those_of_a_native_save(tmp_path, monkeypatch):
    """Many small blocks keep many reading threads waiting: files of one rank have the blocks of all of them together."""
    monkeypatch.setattr(data_file, "MOST_BLOCKS", 8)
    state = {f"w{n}": torch.full((64, 1024), float(n)) for n in range(8)}
    sk.save(state, tmp_path / "native")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torch", thread_count=4))
    native, torchs = (sk.open(tmp_path / name) for name in ("native", "torch"))
    assert len(torchs.record.files) == 4
    assert {each.block_nbytes for each in torchs.record.files} == {each.block_nbytes for each in native.record.files}
    torchs.verify()


class Halving(dcp.DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002 - torch's name
        stored = super().transform_object(write_item, object)
        return stored.half() if isinstance(stored, torch.Tensor) else stored


def test_an_archive_as_long_as_the_tensor_is_no_bare_tensor(tmp_path):
    """Where planned and stored dtypes differ, an archive as long as the planned bytes is still an archive."""
    for count in range(330, 420, 2):
        dcp.save({"w": torch.arange(float(count))}, checkpoint_id=tmp_path / str(count), planner=Halving())
        assert torch.equal(loaded(tmp_path / str(count), torch.empty(count)), torch.arange(float(count)))
    assert torch.equal(sk.open(tmp_path / "372")["w"].tensor(), torch.arange(372.0))


def test_the_last_save_counts_whatever_its_layout(tmp_path):
    """Native over torch's layout, torch's over native, each rank's own over all ranks': the last one is read."""
    one, two, three, four = (torch.full((3,), float(n)) for n in range(4))
    sk.save({"w": one}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        dcp.save({"w": two}, storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=False))
    dcp.save({"w": two}, checkpoint_id=tmp_path)
    assert torch.equal(sk.open(tmp_path)["w"].tensor(), two)
    assert torch.equal(loaded(tmp_path, two), two)
    with pytest.raises(CheckpointExists):
        sk.save({"w": three}, tmp_path)
    sk.save({"w": three}, tmp_path, overwrite=True)
    assert torch.equal(sk.open(tmp_path)["w"].tensor(), three)
    assert torch.equal(loaded(tmp_path, three), three)
    assert not list(tmp_path.glob("*.distcp*"))
    dcp.save({"w": four}, checkpoint_id=tmp_path, use_collectives=False)
    assert torch.equal(loaded(tmp_path, four), four)


def test_two_commits_of_a_save_that_died(tmp_path):
    sk.save({"w": torch.zeros(2)}, tmp_path / "a")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "b")
    for each in (tmp_path / "b").iterdir():
        each.rename(tmp_path / "a" / each.name)
    for name, value in (("shardkeep.json", 0.0), (".metadata", 1.0)):
        os.utime(tmp_path / "a" / name, (2_000_000_000 + value, 2_000_000_000 + value))
        assert float(sk.open(tmp_path / "a")["w"][0]) == value
        assert float(loaded(tmp_path / "a", torch.ones(2))[0]) == value


@pytest.mark.parametrize("prefix", ["shards/__0_", "run=7 rank 0_"])
def test_file_names_of_other_writers(tmp_path, prefix):
    class Named(dcp.FileSystemWriter):
        def prepare_global_plan(self, plans):
            from dataclasses import replace

            from shardkeep.dcp.filesystem import _StoragePrefix

            (Path(self.path) / "shards").mkdir(exist_ok=True)
            return [replace(plan, storage_data=_StoragePrefix(prefix)) for plan in plans]

    dcp.save({"w": torch.arange(3.0)}, storage_writer=Named(tmp_path))
    assert torch.equal(loaded(tmp_path, torch.empty(3)), torch.arange(3.0))
    assert torch.equal(sk.open(tmp_path)["w"].tensor(), torch.arange(3.0))


def test_checkpoints_of_links(tmp_path):
    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=tmp_path / "blobs")
    (tmp_path / "links").mkdir()
    for each in (tmp_path / "blobs").iterdir():
        (tmp_path / "links" / each.name).symlink_to(each)
    assert torch.equal(loaded(tmp_path / "links", torch.empty(3)), torch.arange(3.0))
    ck = sk.open(tmp_path / "links")
    assert torch.equal(ck["w"].tensor(), torch.arange(3.0))
    ck.verify()


def save_locally(folder):
    own = f"{folder}/{dist.get_rank()}"
    dcp.save({f"w{dist.get_rank()}": torch.ones(3)}, checkpoint_id=own)
    return sorted(os.listdir(own))


def test_each_rank_on_a_disk_of_its_own(rank_pool, tmp_path):
    """Ranks that see only their own files save, as with torch; whoever collects the files has a checkpoint."""
    first, second = rank_pool.run(2, save_locally, str(tmp_path))
    assert ".metadata" in first
    assert "__1_0.distcp" in second
    for each in (tmp_path / "1").iterdir():
        each.rename(tmp_path / "0" / each.name)
    assert sorted(sk.open(tmp_path / "0")) == ["w0", "w1"]


def save_alone(folder):
    dcp.save(
        {"w": torch.full((2,), float(dist.get_rank()))},
        storage_writer=dcp.FileSystemWriter(folder, overwrite=False),
        use_collectives=False,
    )
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=folder)
    return float(state["w"][0])


def test_ranks_on_their_own_do_not_take_each_other_for_an_older_save(rank_pool, tmp_path):
    assert rank_pool.run(3, save_alone, str(tmp_path / "ck")) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("layout", ["native", "torch"])
def test_targets_that_are_views(tmp_path, layout):
    """A conjugated target gets the saved numbers; an expanded one, which cannot hold them, is refused."""
    saved = torch.tensor([1 + 2j, 3 - 4j])
    save = sk.save if layout == "native" else (lambda state, where: dcp.save(state, checkpoint_id=where))
    save({"w": saved, "e": torch.arange(3.0)}, tmp_path / "ck")
    conjugated = {"w": torch.zeros(2, dtype=saved.dtype).conj()}
    dcp.load(conjugated, checkpoint_id=tmp_path / "ck")
    assert torch.equal(conjugated["w"].resolve_conj(), saved)
    with pytest.raises(dcp.CheckpointException, match="expanded"):
        dcp.load({"e": torch.zeros(1).expand(3)}, checkpoint_id=tmp_path / "ck")


def test_planners_that_use_one_buffer_for_all(tmp_path):
    """A planner may give the same stream or tensor again for the next item, also by a method put on the object."""
    planner = dcp.DefaultSavePlanner()
    buffer = torch.empty(3)

    def resolve(item):
        return buffer.copy_(planner.lookup_object(item.index))

    planner.resolve_data = resolve
    state = {name: torch.full((3,), float(n)) for n, name in enumerate("abc")}
    dcp.save(state, checkpoint_id=tmp_path, planner=planner)
    into = {name: torch.empty(3) for name in state}
    dcp.load(into, checkpoint_id=tmp_path)
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_damage_to_the_seal_is_noticed(tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for data in (whole[:-3], whole + b"\0", whole[:-30]):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError):
            sk.open(tmp_path)
        with pytest.raises(dcp.CheckpointException):
            loaded(tmp_path, torch.zeros(3))


def load_unreadable(folder):
    """Load where each rank's own metadata of an older save stand beside those of all ranks, which time out."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, use_collectives=False)
    own = Path(folder, f"__{dist.get_rank()}.metadata")
    old = own.read_bytes()
    dist.barrier()
    dcp.save({"w": torch.full((2,), 2.0)}, checkpoint_id=folder)
    own.write_bytes(old)
    reader = FsspecReader(f"file://{folder}")
    real = reader.fs.create_stream

    @contextmanager
    def failing(path, mode):
        if str(path).endswith("/.metadata"):
            raise TimeoutError("read timed out")
        with real(path, mode) as stream:
            yield stream

    reader.fs.create_stream = failing
    into = {"w": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException, match="read timed out") as caught:
        dcp.load(into, storage_reader=reader)
    assert all(isinstance(error, AssertionError) for error, _ in caught.value.failures.values())
    return into["w"].tolist()


def test_metadata_that_cannot_be_read_are_not_replaced_by_older_ones(rank_pool, tmp_path):
    """If the metadata of all ranks cannot be read, no rank loads what an older save left beside them."""
    assert rank_pool.run(2, load_unreadable, str(tmp_path / "ck")) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("start", ["memory://{}", "file://{}"])
def test_elsewhere_too_the_last_save_counts(tmp_path, start):
    where = start.format(tmp_path)
    dcp.save({"w": torch.ones(2)}, storage_writer=FsspecWriter(where), use_collectives=False)
    into = {"w": torch.zeros(2)}
    dcp.load(into, storage_reader=FsspecReader(where))  # a missing .metadata is one, whatever such an error looks like
    assert into["w"].tolist() == [1, 1]
    format_utils.dcp_to_torch_save(where, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt")["w"].tolist() == [1, 1]
    (tmp_path / "file.pt").unlink()
    dcp.save({"w": torch.zeros(2)}, storage_writer=FsspecWriter(where))
    into = {"w": torch.ones(2)}
    dcp.load(into, storage_reader=FsspecReader(where))
    assert into["w"].tolist() == [0, 0]


class Failing(DefaultSavePlanner):
    def __init__(self, rank):
        super().__init__()
        self.failing = rank

    def finish_plan(self, new_plan):
        if dist.get_rank() == self.failing:
            raise OSError("not now")
        return super().finish_plan(new_plan)


def save_twice(folder, failing):
    state = {"a": torch.ones(3), "b": torch.ones(4)}
    writer = filesystem.FileSystemWriter(folder)
    quietly(state_dict_saver.save, state, storage_writer=writer)
    dist.barrier()
    before = set(os.listdir(folder))
    dist.barrier()
    with pytest.raises(CheckpointException, match="not now"):
        quietly(state_dict_saver.save, state, storage_writer=writer, planner=Failing(failing))
    dist.barrier()
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    state_dict_loader.load(into, storage_reader=filesystem.FileSystemReader(folder))
    return before <= set(os.listdir(folder)), all(torch.equal(into[key], state[key]) for key in state)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_save_removes_nothing_of_the_one_before(rank_pool, tmp_path, failing):
    assert rank_pool.run(2, save_twice, str(tmp_path), failing) == [(True, True)] * 2
