"""Asynchronous saves in a process of their own: what reaches it, and what happens when it dies."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs

from shardkeep.dcp._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.async_ import AsyncCheckpointerType, async_save, group_saves_of
from shardkeep.dcp._impl.process import SaverDied, _Unpickler, pickle_with_tensors
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultSavePlanner
from shardkeep.dcp.filesystem import FileSystemWriter
from shardkeep.dcp.staging import DefaultStager, StagingOptions
from shardkeep.dcp.state_dict_loader import load
from shardkeep.engine.process.client import writer_manager
from tests.protocol.samples import blank, holds, quietly, state_of_ranks
from tests.toolkit.samples import numbered
from tests.warm.python import warm_python

PROCESS = AsyncCheckpointerType.PROCESS


class Mine(FileSystemWriter):
    """A writer of the user's, so it and the planner go to the process."""

    def write_data(self, plan, planner):
        return super().write_data(plan, planner)


def begin(state, folder, kind=Mine, **options):
    writer = kind(folder)
    return quietly(async_save, state, storage_writer=writer, async_checkpointer_type=PROCESS, **options)


def loaded(folder, **like):
    quietly(theirs.load, like, storage_reader=theirs.FileSystemReader(folder), no_dist=True)
    return like


class Telling(FileSystemWriter):
    """Leaves a note of the process that writes, and of what it knows of ranks."""

    def write_data(self, plan, planner):
        known = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        Path(f"{self.path}-note-{known[0] if known else 0}").write_text(repr((os.getpid(), known)))
        return super().write_data(plan, planner)


class Dying(FileSystemWriter):
    def write_data(self, plan, planner):
        if not dist.is_initialized() or dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


class Broken(FileSystemWriter):
    def write_data(self, plan, planner):
        raise ConnectionResetError("the bucket said no")


class Talking(FileSystemWriter):
    """Tries a collective where there is nobody to answer."""

    def write_data(self, plan, planner):
        dist.all_reduce(torch.ones(1))
        return super().write_data(plan, planner)


class Marking(DefaultSavePlanner):
    def create_local_plan(self):
        self.state_dict["mark"] = torch.full((2,), 7.0)
        return super().create_local_plan()


def note(folder, rank=0):
    return eval(Path(f"{folder}-note-{rank}").read_text())


def test_the_life_of_a_saver(tmp_path):
    """One process serves many saves and passes failures on; after it is killed, the next save has a new one."""
    state = {"w": numbered(1000), "n": {"step": 3}}
    first = begin(state, tmp_path / "1", Telling)
    state["w"].zero_()
    metadata = first.result(60)
    assert sorted(metadata.state_dict_metadata) == ["n.step", "w"]
    assert torch.equal(loaded(tmp_path / "1", w=torch.empty(1000))["w"], numbered(1000))
    pid, known = note(tmp_path / "1")
    assert pid != os.getpid()
    assert known is None

    with pytest.raises(CheckpointException, match="the bucket said no") as caught:
        begin(state, tmp_path / "2", Broken).result(60)
    assert isinstance(caught.value.failures[0][0], ConnectionResetError)
    begin(state, tmp_path / "3", Telling).result(60)
    assert note(tmp_path / "3")[0] == pid

    with pytest.raises(CheckpointException, match="SIGKILL in step 'write'") as caught:
        begin(state, tmp_path / "4", Dying).result(60)
    assert isinstance(caught.value.failures[0][0], SaverDied)
    begin(state, tmp_path / "5", Telling, planner=Marking()).result(60)
    assert note(tmp_path / "5")[0] != pid
    assert loaded(tmp_path / "5", mark=torch.empty(2))["mark"].tolist() == [7.0, 7.0]
    assert not (tmp_path / "4" / ".metadata").exists()


class Hanging(FileSystemWriter):
    """Never returns, as if its disk did not answer."""

    def write_data(self, plan, planner):
        time.sleep(3600)


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    """A step that does not end fails the save after `Options.timeout_s`, and the next save has a new process."""
    begin({"w": numbered(3)}, tmp_path / "a").result(60)
    saver = group_saves_of(None, no_dist=True).saver
    monkeypatch.setenv("SHARDKEEP_TIMEOUT_S", "2")
    with pytest.raises(CheckpointException, match="did not answer within 2 s, and was ended in step 'write'") as caught:
        begin({"w": numbered(3)}, tmp_path / "b", Hanging).result(60)
    assert "SHARDKEEP_TIMEOUT_S" in str(caught.value.failures[0][0])
    assert not saver.alive()
    monkeypatch.setenv("SHARDKEEP_TIMEOUT_S", "60")
    begin({"w": numbered(3)}, tmp_path / "c").result(60)


def test_what_cannot_be_pickled_is_said(tmp_path):
    writer = Mine(tmp_path / "a")
    writer.lock = threading.Lock()
    future = quietly(async_save, {"w": numbered(3)}, storage_writer=writer, async_checkpointer_type=PROCESS)
    with pytest.raises(CheckpointException, match="cannot be sent to the process that saves"):
        future.result(60)
    begin({"w": numbered(3)}, tmp_path / "b").result(60)


def memory_files():
    gc.collect()
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("shardkeep-state" in each for each in held)


def test_pickles_with_tensors():
    sent = [torch.full((2,), float(index)) for index in range(450)]
    data, memory, path, nbytes = pickle_with_tensors([[sent, sent[7], sent[8][1:], torch.empty(0), "x"]])
    found, again, view, empty, text = _Unpickler(data, path).load()
    memory.close()
    assert nbytes == 450 * 64
    assert [each.tolist() for each in found] == [each.tolist() for each in sent]
    found[8].fill_(-1)
    assert again is found[7]
    assert view.tolist() == [-1]
    assert empty.numel() == 0
    assert text == "x"
    with pytest.raises(pickle.UnpicklingError, match="persistent"):
        pickle.loads(data)


def test_a_state_is_let_go_while_it_is_copied(monkeypatch):
    """Each storage is freed when it is in the memory file, so that memory never holds the state twice."""
    held = [np.ones(1000) for _ in range(5)]
    box, alive, left = [{"w": [torch.from_numpy(each) for each in held]}], [weakref.ref(each) for each in held], []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *to: left.append(sum(each() is not None for each in alive)) or write(*to))
    del held
    pickle_with_tensors(box).memory.close()
    assert left == [5, 4, 3, 2, 1]


class Limited(Mine):
    """Leaves its process no descriptors."""

    def finish(self, metadata, results):
        super().finish(metadata, results)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def test_without_descriptors_the_error_says_so(tmp_path, monkeypatch):
    """The process that saves has none; the next one has. Systems without memory files use others."""
    state = {"w": numbered(3)}
    begin(state, tmp_path / "a", Limited).result(60)
    with pytest.raises(CheckpointException, match="Too many open files"):
        begin(state, tmp_path / "b").result(60)
    group_saves_of(None, no_dist=True).saver.close()
    monkeypatch.delattr(os, "memfd_create")  # as on systems that have none
    begin(state, tmp_path / "d").result(60)
    assert torch.equal(loaded(tmp_path / "d", w=torch.empty(3))["w"], numbered(3))


def until_asked(process):
    """Wait until a request is on its way to a process."""
    while process._free.qsize() == process.pipes:
        time.sleep(0.001)


class Locked(DefaultSavePlanner):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_shared_memory_of_failed_saves_is_given_back(tmp_path):
    """Nothing of a state stays in shared memory if it cannot be handed over, or the process dies before it takes it."""
    state = {"w": numbered(1000)}
    begin(state, tmp_path / "a").result(60)
    before = memory_files()
    with pytest.raises(CheckpointException, match="cannot be sent to the process that saves"):
        begin(state, tmp_path / "a", planner=Locked()).result(60)
    lane = group_saves_of(None, no_dist=True)
    os.kill(lane.saver.pid, signal.SIGSTOP)  # so that it dies with the state under way
    future = begin(state, tmp_path / "a")
    until_asked(lane.saver)
    os.kill(lane.saver.pid, signal.SIGKILL)
    with pytest.raises(CheckpointException, match="SIGKILL in step 'begin'"):
        future.result(60)
    del future
    begin(state, tmp_path / "a").result(60)
    assert memory_files() == before


def test_a_writer_that_stages_in_its_own_way_does_so(tmp_path):
    """What its `stage` returns is what is saved, wherever that lies."""
    writer = Doubling(tmp_path / "a")
    quietly(async_save, {"w": numbered(9)}, storage_writer=writer, async_checkpointer_type=PROCESS).result(60)
    assert torch.equal(loaded(tmp_path / "a", w=torch.empty(9))["w"], 2 * numbered(9))


class Doubling(FileSystemWriter):
    def stage(self, state_dict):
        return {key: 2 * value for key, value in state_dict.items()}


def test_our_own_writer_needs_no_process_of_the_script(tmp_path):
    """The engine's process writes for it; when that is killed the save fails, and the next one has another."""
    state = {"w": numbered(1000)}
    quietly(async_save, state, checkpoint_id=tmp_path / "1", async_checkpointer_type=PROCESS, no_dist=True).result(60)
    pid = writer_manager().pid
    os.kill(pid, signal.SIGSTOP)
    future = quietly(async_save, state, checkpoint_id=tmp_path / "2", async_checkpointer_type=PROCESS, no_dist=True)
    until_asked(writer_manager()._process)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointException, match="SIGKILL"):
        future.result(60)
    assert not (tmp_path / "2" / ".metadata").exists()
    quietly(async_save, state, checkpoint_id=tmp_path / "3", async_checkpointer_type=PROCESS, no_dist=True).result(60)
    assert writer_manager().pid != pid
    for name in "13":
        assert torch.equal(loaded(tmp_path / name, w=torch.empty(1000))["w"], numbered(1000))


def test_states_of_many_tensors(tmp_path, request):
    """More tensors than a process may open files are saved, whoever staged them. A process that is closed ends."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 400
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + count // 2, limits[1]))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    state = {str(index): torch.full((4,), float(index)) for index in range(count)}
    stager = DefaultStager(StagingOptions(False, True, True, False))
    for future in begin(state, tmp_path / "a"), begin(state, tmp_path / "b", async_stager=stager).upload_completion:
        assert len(future.result(60).state_dict_metadata) == count
    assert loaded(tmp_path / "b", **{"399": torch.empty(4)})["399"].tolist() == [399.0] * 4
    lane = group_saves_of(None, no_dist=True)
    lane.saver.close()
    assert not lane.saver.alive()
    with pytest.raises(SaverDied):
        lane.saver.ask("plan")


COLLECTS = """
import gc, threading, torch
from shardkeep.dcp._impl.process import pickle_with_tensors

def send():
    for _ in range(3):
        pickle_with_tensors([{str(n): torch.full((4,), float(n)) for n in range(400)}]).memory.close()

gc.freeze()  # or each collection goes through all of torch
sending = threading.Thread(target=send)
sending.start()
while sending.is_alive():
    gc.collect()
"""


def test_garbage_may_be_collected_while_a_state_is_sent():
    """Training that collects garbage meanwhile does not crash: a pickler that is cleared is not seen half cleared."""
    done = warm_python("-c", COLLECTS)
    assert (done.returncode, done.stderr) == (0, "")


# On ranks


def allow_children():
    """Ranks of the pool are daemons, which may not have children; those of a real job are not."""
    multiprocessing.current_process()._config["daemon"] = False


def save_spread(folder):
    allow_children()
    state = state_of_ranks()
    expected = holds(state)
    begin(state, f"{folder}/a", Telling).result(60)
    found = blank(state_of_ranks())
    load(found, storage_reader=theirs.FileSystemReader(f"{folder}/a"))
    same = holds(found) == expected

    died = "nothing"
    try:
        begin({"w": numbered(4)}, f"{folder}/b", Dying).result(60)
    except CheckpointException as error:
        died = str(error).strip().splitlines()[-2]
    begin({"w": numbered(4)}, f"{folder}/c").result(60)
    talked = ""
    try:
        begin({"w": numbered(4)}, f"{folder}/d", Talking).result(60)
    except CheckpointException as error:
        talked = str(error)
    group_saves_of(None, no_dist=False).saver.close()
    return same, "SIGKILL in step 'write'" in died, "No backend type" in talked


def test_savers_of_several_ranks(rank_pool, tmp_path):
    """Each rank's process saves its part and knows its rank; one that dies fails the save on all ranks at once."""
    assert rank_pool.run(2, save_spread, str(tmp_path)) == [(True, True, True)] * 2
    assert [note(tmp_path / "a", rank)[1] for rank in range(2)] == [(0, 2), (1, 2)]
    assert (tmp_path / "c" / ".metadata").exists()
    assert not (tmp_path / "b" / ".metadata").exists()


def from_a_daemon(folder):
    multiprocessing.current_process()._config["daemon"] = True
    executor = _ProcessBasedAsyncCheckpointExecutor()
    future = executor.execute_save({"w": numbered(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    try:
        future.result(60)
    except SaverDied as error:
        return str(error)


def test_a_process_that_cannot_be_started_says_what_to_do(rank_pool, tmp_path):
    assert "AsyncCheckpointerType.THREAD" in rank_pool.run(1, from_a_daemon, str(tmp_path), init=False)[0]
