"""
What torch's checkpoint does wrong, lines 5, 11 and 15 to 27 of the list in `dcp_contract.md`: staging, and what grows
with the job. As in `test_defects`, torch's behaviour is asserted as it was found; lines 8 and 13 are in `test_async_save`, line 21 in
`tests/staging`.
"""

import contextlib
import io
import os
import threading
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardkeep.engine import peers
from shardkeep.errors import RanksSilent
from tests.dcp.sides import SIDES, causes_of, failure_of, part, quietly, side
from tests.toolkit.samples import numbered, seen

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


# Staging


def test_5_staging_waits_for_the_work_before_it(tmp_path: Any) -> None:
    """
    Line 5: torch copies on a fresh stream that does not wait for the compute stream, which needs a GPU to be seen.
    What ours saves is the state as of the call, whatever is queued before it and changed after it; without a GPU
    nothing is ever queued.
    """
    dcp = side("ours")
    w = torch.zeros(1 << 20, device=DEVICE or "cpu")
    stager = part("ours", "staging").DefaultStager()
    for _ in range(20):
        w += 1
    response = quietly(dcp.async_save, {"w": w}, checkpoint_id=str(tmp_path / "ck"), async_stager=stager, no_dist=True)
    response.staging_completion.result(60)
    w.fill_(-1)
    response.upload_completion.result(60)
    stager.close()
    into = {"w": torch.zeros(1 << 20)}
    quietly(dcp.load, into, checkpoint_id=str(tmp_path / "ck"), no_dist=True)
    assert into["w"].eq(20).all()


# Hugging Face


def test_11_safetensors_files_can_be_read(tmp_path: Any) -> None:
    """Line 11: what FileSystemWriter writes as safetensors, torch's FileSystemReader cannot read."""
    for name in SIDES:
        dcp = side(name)
        where = str(tmp_path / name)
        kind = part(name, "filesystem").SerializationFormat.SAFETENSORS
        state = {"w": numbered(3, 2)}
        quietly(dcp.save, state, storage_writer=dcp.FileSystemWriter(where, serialization_format=kind), no_dist=True)
        into = {"w": torch.zeros(3, 2)}
        if name == "torch":
            failure_of(dcp.load, into, checkpoint_id=where, no_dist=True)
        else:
            quietly(dcp.load, into, checkpoint_id=where, no_dist=True)
            assert seen(into) == seen(state)


# Reading


class Counted:
    """How much is read from streams, and by how many threads at once."""

    def __init__(self, waits_s: float = 0.0) -> None:
        """The first thread that reads waits so long for another one to come."""
        self.nbytes = 0
        self.most = 0
        self.waits_s = waits_s
        self._now = 0
        self._lock = threading.Lock()
        self._two = threading.Event()

    def reader(self, name: str, folder: str) -> Any:
        counted = self

        class Stream(io.FileIO):
            def readinto(self, into: Any) -> int:
                # Of the tensors' files: other files are read before the threads begin.
                large = str(self.name).endswith(".distcp") and len(memoryview(into).cast("B")) > 100_000
                if large:
                    with counted._lock:
                        counted._now += 1
                        counted.most = max(counted.most, counted._now)
                        if counted._now > 1:
                            counted._two.set()
                        waits_s, counted.waits_s = counted.waits_s, 0.0
                    counted._two.wait(waits_s)
                got = super().readinto(into) or 0
                with counted._lock:
                    counted.nbytes += got
                    counted._now -= large
                return got

            def read(self, size: int | None = -1) -> bytes:
                data = bytearray(os.fstat(self.fileno()).st_size if size is None or size < 0 else size)
                return bytes(data[: self.readinto(data)])

        class System(part(name, "filesystem").FileSystem):  # type: ignore[misc]
            @contextlib.contextmanager
            def create_stream(self, path: Any, mode: str) -> Any:
                with Stream(os.fspath(path), mode) as stream:
                    yield stream

        reader = side(name).FileSystemReader(folder)
        reader.fs = System()
        return reader


def test_15_a_row_is_read_alone(tmp_path: Any) -> None:
    """Line 15: of a tensor of 8 MB a row of 8 KB is wanted: torch reads all of it, ours a block."""
    read = {}
    for name in SIDES:
        dcp = side(name)
        where = str(tmp_path / name)
        full = numbered(1024, 2048)
        quietly(dcp.save, {"w": full}, checkpoint_id=where, no_dist=True)
        row = torch.zeros(1, 2048)

        class Row(dcp.DefaultLoadPlanner):  # type: ignore[misc]
            def create_local_plan(self) -> Any:
                chunk = dcp.ChunkStorageMetadata(torch.Size([700, 0]), torch.Size([1, 2048]))  # noqa: B023
                items = dcp.planner_helpers.create_read_items_for_chunk_list(  # noqa: B023
                    "w", self.metadata.state_dict_metadata["w"], [chunk]
                )
                return dcp.LoadPlan(items)  # noqa: B023

            def lookup_tensor(self, index: Any) -> torch.Tensor:
                return row  # noqa: B023

        counted = Counted()
        quietly(dcp.load, {"w": row}, storage_reader=counted.reader(name, where), planner=Row(), no_dist=True)
        assert torch.equal(row[0], full[700])
        read[name] = counted.nbytes
    assert read["torch"] > 8_000_000
    assert read["ours"] < 400_000


def test_16_several_threads_read(tmp_path: Any, monkeypatch: Any) -> None:
    """Line 16: torch reads item by item on one thread; here several threads are in the files at once."""
    monkeypatch.setenv("SHARDKEEP_IO_THREADS", "4")
    most = {}
    for name in SIDES:
        where = str(tmp_path / name)
        state = {f"t{n}": torch.full((600_000,), float(n)) for n in range(8)}
        quietly(side(name).save, state, checkpoint_id=where, no_dist=True)
        counted = Counted(waits_s=1 if name == "torch" else 60)
        into = {key: torch.zeros(600_000) for key in state}
        monkeypatch.setenv("SHARDKEEP_HOST_BUDGET_BYTES", str(16 << 20))
        quietly(side(name).load, into, storage_reader=counted.reader(name, where), no_dist=True)
        assert seen(into) == seen(state)
        most[name] = counted.most
    assert most["torch"] == 1
    assert most["ours"] >= 2


def load_replica(name: str, folder: str) -> int:
    dcp = side(name)
    state = {"w": numbered(300_000), "step": 1}
    quietly(dcp.save, state, checkpoint_id=folder)
    counted, fetched = Counted(), peers.Peers._timed
    into = {"w": torch.zeros(300_000), "step": None}

    def count(self: Any, fetch: Any, view: Any) -> None:
        counted.nbytes += len(view)
        fetched(self, fetch, view)

    reader = counted.reader(name, folder) if name == "torch" else None  # one of ours that is changed reads alone
    with mock.patch.dict(os.environ, {"SHARDKEEP_SHARE_READS": "1"}), mock.patch.object(peers.Peers, "_timed", count):
        quietly(dcp.load, into, checkpoint_id=folder, storage_reader=reader)
    assert seen(into) == seen(state)
    return counted.nbytes


def test_17_replicas_are_read_once(rank_pool: Any, tmp_path: Any) -> None:
    """Line 17: every rank of torch's reads a replicated tensor from the files; ours, where asked to, one of them."""
    assert min(rank_pool.run(2, load_replica, "torch", str(tmp_path / "torch"))) > 1_200_000
    assert 1_200_000 <= sum(rank_pool.run(2, load_replica, "ours", str(tmp_path / "ours"))) < 1.5 * 1_200_000


# Writing


def test_18_copies_do_not_pile_up(tmp_path: Any) -> None:
    """Line 18: sixteen tensors that a planner makes as they are asked for: in torch all of them live at once."""
    most = {}
    for name in SIDES:
        dcp = side(name)
        made: list[weakref.ref[Any]] = []
        high = [0]

        class Copies(dcp.DefaultSavePlanner):  # type: ignore[misc]
            def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
                copy = object.numpy().copy()
                made.append(weakref.ref(copy))  # noqa: B023
                high[0] = max(high[0], sum(each() is not None for each in made))  # noqa: B023
                # A tensor's memory keeps the array alive, whoever holds it.
                return torch.from_numpy(copy)

        state = {f"t{n}": numbered(1000) + n for n in range(16)}
        quietly(dcp.save, state, checkpoint_id=str(tmp_path / name), planner=Copies(), no_dist=True)
        most[name] = high[0]
        into = {key: torch.zeros(1000) for key in state}
        quietly(dcp.load, into, checkpoint_id=str(tmp_path / name), no_dist=True)
        assert seen(into) == seen(state)
    assert most["torch"] == 16
    assert most["ours"] <= 2


def a_shard_and_replicas(name: str) -> list[Any]:
    """Items of one size: a shard of a huge tensor, and eight whole tensors."""
    dcp = side(name)
    made = []
    for key, rows in [("shard", 100_000), *((f"whole{n}", 10) for n in range(8))]:
        chunk = dcp.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([10, 10]))
        properties = part(name, "metadata").TensorProperties(dtype=torch.float32)
        data = part(name, "planner").TensorWriteData(chunk, properties, torch.Size([rows, 10]))
        index = part(name, "metadata").MetadataIndex(key, torch.Size([0, 0]))
        made.append(dcp.WriteItem(index, part(name, "planner").WriteItemType.SHARD, tensor_data=data))
    return made


def test_20_balance_is_by_what_is_written() -> None:
    """Line 20: torch weighs a shard as its whole tensor: the file, and the rank, that has it gets nothing else."""
    files, ranks = {}, {}
    for name in SIDES:
        dcp = side(name)
        items = a_shard_and_replicas(name)
        files[name] = sorted(len(each) for each in part(name, "filesystem")._split_by_size_and_type(2, items))
        plans = [dcp.SavePlan(items), dcp.SavePlan(items[1:])]
        ranks[name] = [len(plan.items) for plan in part(name, "_dedup_save_plans").dedup_save_plans(plans)]
    assert files == {"torch": [1, 8], "ours": [4, 5]}
    assert ranks["torch"] == [1, 8]
    assert sorted(ranks["ours"]) == [4, 5]


def test_22_no_sync_of_the_whole_host(tmp_path: Any) -> None:
    """Line 22: where streams have no descriptor, torch asks the system to write out everything of every process."""
    synced = {}
    for name in SIDES:

        class Blob(io.BytesIO):
            def __init__(self, path: str) -> None:
                super().__init__()
                self.path = path

            def close(self) -> None:
                if not self.closed:
                    with open(self.path, "wb") as file:
                        file.write(self.getvalue())
                super().close()

        class System(part(name, "filesystem").FileSystem):  # type: ignore[misc]
            @contextlib.contextmanager
            def create_stream(self, path: Any, mode: str) -> Any:
                if mode == "wb":
                    with Blob(os.fspath(path)) as stream:
                        yield stream
                else:
                    with super().create_stream(path, mode) as stream:
                        yield stream

        dcp = side(name)
        writer = dcp.FileSystemWriter(str(tmp_path / name))
        writer.fs = System()
        with mock.patch.object(os, "sync") as sync:
            quietly(dcp.save, {"w": numbered(4)}, storage_writer=writer, no_dist=True)
        synced[name] = sync.call_count
        into = {"w": torch.zeros(4)}
        quietly(dcp.load, into, checkpoint_id=str(tmp_path / name), no_dist=True)
        assert into["w"].tolist() == [0, 1, 2, 3]
    assert (synced["torch"] > 0) == (torch.__version__ < (2, 14)), "later versions do not"
    assert synced["ours"] == 0


def test_22_large_tensors_lie_on_pages(tmp_path: Any) -> None:
    """Line 22: torch's archives put a tensor's bytes anywhere; ours are on pages if large, on 64 bytes if not."""
    dcp = side("ours")
    state = {"large": torch.zeros(300_000), "small": torch.zeros(3), "n": 1}
    metadata = quietly(dcp.save, state, checkpoint_id=str(tmp_path), no_dist=True)
    starts = {index.fqn: place.shardkeep_data_start for index, place in metadata.storage_data.items()}
    assert starts["large"] % 4096 == 0
    assert starts["small"] % 64 == 0
    assert starts["n"] is None


# Scale


def test_23_metadata_stay_small(tmp_path: Any) -> None:
    """Line 23: what each item adds to the metadata, which all ranks read, is no more than torch's, digests and all."""
    sizes = {}
    for name in SIDES:
        for count in (10, 410):
            where = tmp_path / f"{name}{count}"
            state = {f"layer.{n}.weight": torch.zeros(3, 2) for n in range(count)}
            quietly(side(name).save, state, checkpoint_id=str(where), no_dist=True)
            sizes[name, count] = (where / ".metadata").stat().st_size
    each = {name: (sizes[name, 410] - sizes[name, 10]) / 400 for name in SIDES}
    assert each["ours"] <= 1.1 * each["torch"], each


def test_24_names_are_merged_in_one_pass() -> None:
    """Line 24: with 40 ranks of five keys each, torch looks every key up in the maps of all ranks before its own."""
    looked = {}

    class Counting(dict):  # type: ignore[type-arg]
        count = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.count += 1
            return super().__getitem__(key)

    for name in SIDES:
        dcp = side(name)
        plans = [
            dcp.SavePlan([], planner_data=Counting({f"r{rank}k{n}": (f"r{rank}k{n}",) for n in range(5)}))
            for rank in range(40)
        ]
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner({}, None, True)
        Counting.count = 0
        _, metadata = planner.create_global_plan(plans)
        assert len(metadata.planner_data) == 200
        looked[name] = Counting.count
    assert looked["torch"] > 3000
    assert looked["ours"] <= 400


COLLECTIVES = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "barrier",
               "all_gather", "gather", "scatter", "broadcast", "all_reduce")  # fmt: skip


def collectives_of(name: str, folder: str) -> int:
    """Save and load; count the collectives of the default group on the way."""
    dcp = side(name)
    calls = []

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    patched = {each: counting(getattr(dist, each)) for each in COLLECTIVES}
    with mock.patch.multiple(dist, **patched):
        quietly(dcp.save, {"w": numbered(4)}, checkpoint_id=folder)
        quietly(dcp.load, {"w": torch.zeros(4)}, checkpoint_id=folder)
    return len(calls)


def late_rank(folder: str) -> Any:
    os.environ["SHARDKEEP_TIMEOUT_S"] = "1"
    try:
        if dist.get_rank() == 1:
            return None
        error = failure_of(side("ours").save, {"w": numbered(4)}, checkpoint_id=folder)
        found = [error, *(causes_of(error).values() if hasattr(error, "failures") else ())]
        return any(isinstance(each, RanksSilent) for each in found), str(error)
    finally:
        del os.environ["SHARDKEEP_TIMEOUT_S"]


def test_26_no_collectives_and_a_deadline(rank_pool: Any, tmp_path: Any) -> None:
    """Line 26: torch waits for a late rank in collectives; ours use none, and name the rank that did not come."""
    assert min(rank_pool.run(2, collectives_of, "torch", str(tmp_path / "torch"))) > 0
    assert rank_pool.run(2, collectives_of, "ours", str(tmp_path / "ours")) == [0, 0]
    silent, text = rank_pool.run(2, late_rank, str(tmp_path / "late"))[0]
    assert silent
    assert "1" in text


def test_27_places_that_can_only_be_read(tmp_path: Any) -> None:
    """Line 27: a path, as text, to a checkpoint on a mount that cannot be written to: torch finds no storage for it."""
    found = {}
    for name in SIDES:
        dcp = side(name)
        where = str(tmp_path / name / "deep" / "ck")
        os.makedirs(os.path.dirname(where))
        quietly(dcp.save, {"w": numbered(4)}, checkpoint_id=where, no_dist=True)
        into = {"w": torch.zeros(4)}
        with mock.patch.object(os, "access", lambda path, mode, **_: mode != os.W_OK):
            found[name] = dcp.FileSystemReader.validate_checkpoint_id(where)
            if found[name]:
                quietly(dcp.load, into, checkpoint_id=where, no_dist=True)
                assert into["w"].tolist() == [0, 1, 2, 3]
    assert found == {"torch": False, "ours": True}
