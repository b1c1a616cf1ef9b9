"""Torch's layout by URL: saves, loads and conversions in stores, S3 for real."""

import io
import pickle
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.tensor import Shard

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dcp import format_utils
from shardkeep.dcp._extension import ZStandard
from shardkeep.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
from shardkeep.errors import CheckpointError, ChecksumMismatch, WrongSize
from shardkeep.layouts.torch import Sums
from shardkeep.layouts.torch_pickle import encode_metadata
from shardkeep.layouts.torch_publish import Commit
from shardkeep.layouts.torch_values import Metadata
from shardkeep.storage import file_systems as blob_streams
from shardkeep.storage.cancel import current_scope
from shardkeep.storage.file_systems import FsspecFileSystem, StoreFileSystem
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_place
from tests.dcp.sides import failure_of, part, quietly
from tests.exchange.test_stores import names_at
from tests.toolkit.samples import mesh_of, numbered, seen, spread_out


@pytest.fixture
def root(s3_root, monkeypatch, tmp_path):
    """The URL of an empty place; nothing is written to the directory that the test is in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield s3_root
    assert list((tmp_path / "here").iterdir()) == []


def state_of(k):
    return {"w": numbered(30, 40) + k, "b": numbered(7, dtype=torch.bfloat16) * k, "step": k, "words": ["a", k]}


def blank():
    return {"w": torch.zeros(30, 40), "b": torch.zeros(7, dtype=torch.bfloat16), "step": 0, "words": ["", 0]}


def loaded(where, **how):
    into = blank()
    quietly(dcp.load, into, checkpoint_id=where, no_dist=True, **how)
    return into


def same(found, expected):
    return {k: seen(v) if isinstance(v, torch.Tensor) else v for k, v in found.items()} == {
        k: seen(v) if isinstance(v, torch.Tensor) else v for k, v in expected.items()
    }


def save_spread(url, environment, k, turn):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        mesh = mesh_of(dist.get_world_size())
        state = {"w": spread_out(numbered(30, 40) + k, mesh, Shard(0)), "step": k}
        quietly(dcp.save, state, checkpoint_id=url)
        into = {"w": spread_out(torch.zeros(30, 40), mesh, Shard(turn)), "step": 0}
        quietly(dcp.load, into, checkpoint_id=url)
        return seen(into["w"].full_tensor()), into["step"]


def test_ranks_save_and_load_by_url(rank_pool, root, s3_server):
    """Two ranks save to S3 twice and load as other cuts; nothing of the first save is left; one process verifies it."""
    for k in (1, 2):
        found = rank_pool.run(2, save_spread, f"{root}/ck", s3_server.environment, k, k % 2)
        assert found == [(seen(numbered(30, 40) + k), k)] * 2
        assert len(names_at(f"{root}/ck")) == 5  # data and digests of each, and the metadata
    opened = sk.open(f"{root}/ck")
    assert seen(opened["w"].tensor()) == seen(numbered(30, 40) + 2)
    assert opened.verify().without_digests == 0
    into = {"w": torch.zeros(30, 40), "step": 0}
    sk.load(into, f"{root}/ck")
    assert seen(into["w"]) == seen(numbered(30, 40) + 2)


def test_torch_reads_what_was_saved_by_url(root):
    on_obstore = pytest.importorskip("obstore.fsspec")
    quietly(dcp.save, state_of(3), checkpoint_id=f"{root}/ours", no_dist=True)
    into = blank()
    on_obstore.register("s3")
    try:
        reader = quietly(part, "torch", "_fsspec_filesystem").FsspecReader(
            f"{root}/ours"
        )  # 2.15 has another name for it
        quietly(theirs.load, into, storage_reader=reader, no_dist=True)
    finally:
        sys.modules["fsspec.registry"]._registry.pop("s3")
    assert same(into, state_of(3))


def test_what_torch_wrote_is_read_in_a_store(root, tmp_path):
    quietly(theirs.save, state_of(4), checkpoint_id=tmp_path / "theirs", no_dist=True)
    store = open_place(f"{root}/theirs")
    for path in (tmp_path / "theirs").iterdir():
        store.put(path.name, path.read_bytes())
    assert same(loaded(f"{root}/theirs"), state_of(4))
    assert sk.open(f"{root}/theirs")["step"] == 4
    sk.convert(f"{root}/theirs", f"{root}/native")
    assert same(loaded(f"{root}/native"), state_of(4))


def test_streams_to_a_store(root, monkeypatch):
    """A stream through an extension arrives whole, as one blob or many pieces; one that fails leaves nothing."""
    for piece in (8 << 20, 100):
        monkeypatch.setattr(blob_streams, "_WRITE_PIECE_NBYTES", piece)
        where = f"{root}/{piece}"
        writer = dcp.FileSystemWriter(where, _extensions=[ZStandard()], thread_count=2)
        quietly(dcp.save, state_of(5), storage_writer=writer, no_dist=True)
        assert same(loaded(where), state_of(5))
        before = names_at(where)

        class Fails(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                if write_item.index.fqn == "b":
                    raise OSError(5, "struck")
                return super().resolve_data(write_item)

        error = failure_of(
            dcp.save, state_of(6), checkpoint_id=where, storage_writer=writer, planner=Fails(), no_dist=True
        )
        assert "struck" in str(error)
        assert names_at(where) == before
        assert same(loaded(where), state_of(5))
    monkeypatch.setattr(blob_streams, "_ROOM_NBYTES", 1000)
    assert "do not fit a blob" in str(failure_of(dcp.save, state_of(6), storage_writer=writer, no_dist=True))
    assert names_at(where) == before


def test_fsspec_storages_without_its_file_system(root):
    """Where fsspec has nothing for S3, its storages use our store; options that are meant for fsspec are an error."""
    quietly(dcp.save, state_of(7), storage_writer=FsspecWriter(f"{root}/a", sync_files=False), no_dist=True)
    into = blank()
    quietly(dcp.load, into, storage_reader=FsspecReader(f"{root}/a"), no_dist=True)
    assert same(into, state_of(7))
    writer = FsspecWriter(f"{root}/a", overwrite=False)
    assert "already exists" in str(failure_of(dcp.save, state_of(8), storage_writer=writer, no_dist=True))


def test_which_file_system_a_place_is_in(root, tmp_path):
    """URLs choose stores, a Path that was made of one is refused, and a storage with stores in it can be pickled."""
    writer = dcp.FileSystemWriter(tmp_path / "local")
    writer.reset(f"{root}/a")
    assert type(writer.fs) is StoreFileSystem
    quietly(dcp.save, state_of(1), storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True)
    reader = dcp.FileSystemReader(f"file://{tmp_path}/local")
    assert reader.path == tmp_path / "local"
    reader.reset(f"{root}/a")
    into = blank()
    quietly(dcp.load, into, storage_reader=reader, no_dist=True)
    assert same(into, state_of(1))
    assert type(dcp.FileSystemWriter("simplecache::s3://bucket/a").fs) is FsspecFileSystem
    with pytest.raises(CheckpointError, match="a Path cannot hold a URL"):
        dcp.FileSystemWriter(Path(f"{root}/a"))
    quietly(dcp.save, state_of(2), checkpoint_id=f"file://{tmp_path}/by_url", no_dist=True)
    assert same(loaded(tmp_path / "by_url"), state_of(2))
    fs = StoreFileSystem()
    fs.rename(f"{root}/a/.metadata", f"{root}/b/.metadata")
    assert not fs.exists(f"{root}/a/.metadata")
    with pytest.raises(CheckpointError, match="'rb' or 'wb'"), fs.create_stream(f"{root}/b/x", "ab"):
        pass


def test_files_of_dead_saves_are_swept():
    store = MemoryStore()
    for name in ("__0_1.distcp", "__0_2.distcp", "mine.distcp"):
        store.put(name, b"x")
    for name in ("__0_1.distcp", "mine.distcp"):
        store._blobs[name].modified_s -= 2 * 3600
    marker = (".metadata", encode_metadata(Metadata({}, storage_data={})))
    Commit(store).publish(*marker, sums={}, own=[], keep=set(), began_s=time.time())
    assert [info.name for info in store.list()] == [".metadata", "__0_2.distcp", "mine.distcp"]
    written = {"__0_3.distcp": Sums(nbytes=5, block_nbytes=1, checksum="")}
    with pytest.raises(WrongSize, match="no bytes where 5 were written"):
        Commit(store).publish(*marker, sums=written, own=[], keep=set(written), began_s=time.time())


class NotesBudgets(MemoryStore):
    """Takes uploads in parts, and keeps the memory budget that each of them is created with."""

    sequential = True

    def __init__(self):
        super().__init__()
        self.budgets = set()

    def create(self, name, nbytes):
        scope = current_scope()
        self.budgets.add(None if scope is None or scope.budget is None else scope.budget.nbytes)
        return super().create(name, nbytes)


def test_a_save_to_a_store_keeps_to_the_memory_budget(monkeypatch):
    monkeypatch.setenv("SHARDKEEP_HOST_BUDGET_BYTES", str(96 << 20))
    state = {str(n): torch.zeros(3 << 20) for n in range(4)}
    ours, native = NotesBudgets(), NotesBudgets()
    writer = dcp.FileSystemWriter("memory://x", thread_count=4)
    monkeypatch.setattr(blob_streams, "open_store", lambda *_, **__: ours)
    writer.fs, writer.path = StoreFileSystem(), ours.url
    quietly(dcp.save, state, storage_writer=writer, no_dist=True)
    sk.save(state, native)
    assert ours.budgets == native.budgets != {None}


def test_conversions_by_url(root):
    made = io.BytesIO()
    torch.save(state_of(9), made)
    store = open_place(f"{root}/files")
    store.put("state.pt", made.getvalue())
    quietly(format_utils.torch_save_to_dcp, f"{root}/files/state.pt", f"{root}/ck")
    assert same(loaded(f"{root}/ck"), state_of(9))
    for _ in range(2):
        quietly(format_utils.dcp_to_torch_save, f"{root}/ck", f"{root}/files/back.pt")
        back = torch.load(io.BytesIO(store.get("back.pt", limit=1 << 20)), weights_only=True)
        assert same(back, state_of(9))
    damaged = bytearray(made.getvalue())
    damaged[len(damaged) // 2] ^= 1
    store.put("damaged.pt", bytes(damaged))
    with pytest.raises(ChecksumMismatch, match=r"data/0\) have another CRC-32 .* they hold 'w'"):
        quietly(format_utils.torch_save_to_dcp, f"{root}/files/damaged.pt", f"{root}/x")
    with pytest.raises(sk.CheckpointNotFound, match="no such file"):
        quietly(format_utils.torch_save_to_dcp, f"{root}/files/none.pt", f"{root}/x")
