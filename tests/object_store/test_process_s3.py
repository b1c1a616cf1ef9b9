"""Saves to a real S3 server that a process of their own writes: what they hold, and what becomes of them when it dies."""

import contextlib
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dcp._impl.async_ import group_saves_of
from shardkeep.dcp.state_dict_saver import AsyncCheckpointerType
from shardkeep.engine.process.client import SharedMemory, WriterProcess, writer_manager
from shardkeep.engine.process.rpc import WaitPolicy
from shardkeep.engine.process.server import CreateFile, FinishFile, WriteBytes
from shardkeep.errors import WriterDied
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.base import spec_of
from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from tests.dcp.sides import quietly
from tests.object_store.jobs import load_and_compare, state_of
from tests.object_store.proxy import Rule
from tests.support.uploads import unfinished

OPTIONS = sk.Options(io_threads=2, host_budget_bytes=128 << 20, timeout_s=60.0)
PART = 5 << 20
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _no_save_outlives_its_test():
    yield
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()


def save(k, where, **more):
    """Begin to save state `k`, and change every tensor of it right after the call."""
    state = state_of(k)
    handle = sk.async_save(state, where, step=k, overwrite=True, writer="process", options=OPTIONS, **more)
    [(weights, _)] = state["model"]["w"].pieces
    weights.zero_()
    state["model"]["b"].zero_()
    return handle


def child():
    pid = writer_manager().pid
    assert pid is not None
    return pid


def until(what):
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def holds(place, k):
    load_and_compare(place, k)
    assert {info.name for info in place.list()} == {RECORD_NAME, *sk.open(place).record.names}


def test_the_state_of_the_call_is_saved(s3_server, s3_place, monkeypatch):
    """Bit for bit, with options, codecs and later variables; no list of processes shows keys; it has no torch."""
    place = s3_place(
        part_bytes=PART, client_options={"connect_timeout": timedelta(seconds=9), "default_headers": {"X-Tests": "1"}}
    )
    save(1, place).result(PATIENCE_S)
    holds(place, 1)
    pid = child()
    secret = s3_server.options["secret_access_key"].encode()
    for file in ("cmdline", "environ"):
        assert secret not in Path(f"/proc/{pid}/{file}").read_bytes()
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "obstore" in maps
    assert "libtorch" not in maps

    keys = sk.Options(keys=sk.KeyRing([bytes(32)]), io_threads=2)
    sk.async_save(state_of(2), place, overwrite=True, codecs=["aes"], writer="process", options=keys).result(PATIENCE_S)
    found = sk.open(place, options=keys)["model.b"].tensor()
    assert torch.equal(found, state_of(2)["model"]["b"])

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    save(3, place.url).result(PATIENCE_S)
    holds(place, 3)
    assert child() == pid


def test_the_environment_of_the_place_counts(s3_server, s3_place, monkeypatch):
    """Variables that changed since a place was opened lead its saves to no other server."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    place = open_place(s3_place().url)
    assert isinstance(place, ObjectStore)
    for name in s3_server.environment:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    save(1, place).result(PATIENCE_S)
    holds(place, 1)


@pytest.mark.parametrize("codecs", [None, ["lz4"]])
def test_memory_of_the_process_is_bounded(s3_place, codecs):
    """Many tensors that do not lie end to end: it takes no more of its own than the budget, and the save succeeds."""
    place = s3_place()
    save(1, place).result(PATIENCE_S)
    [line] = [line for line in Path(f"/proc/{child()}/status").read_text().splitlines() if line.startswith("VmData")]
    most = (int(line.split()[1]) << 10) + OPTIONS.host_budget_bytes
    resource.prlimit(child(), resource.RLIMIT_DATA, (most, most))
    state = {str(n): torch.rand(100_001 + n) for n in range(200)}
    more = {"overwrite": True, "codecs": codecs, "options": OPTIONS}
    sk.async_save(state, place, writer="process", **more).result(PATIENCE_S)
    ck = sk.open(place)
    assert all(torch.equal(ck[name].tensor(), state[name]) for name in ("0", "77", "199"))


def test_killed_in_the_middle_of_an_upload(proxy, s3_place):
    """The save fails at once, the checkpoint before it stays, and the next save starts a new process."""
    place = s3_place(endpoint=proxy.endpoint, part_bytes=PART)
    proxy.rules = []
    save(1, place).result(PATIENCE_S)
    pid = child()
    proxy.rules = [Rule("stall", path="partNumber=2")]
    handle = save(2, place)
    until(lambda: bool(proxy.counts.faults))
    assert unfinished(place)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WriterDied, match=rf"pid {pid}\) was killed by SIGKILL"):
        handle.result(PATIENCE_S)
    holds(place, 1)
    proxy.rules = []
    save(3, place).result(PATIENCE_S)
    holds(place, 3)
    assert child() != pid


def test_cancelled_in_the_middle_of_an_upload(proxy, s3_place):
    """The process takes back what it has sent, and lives; nothing of the save stays."""
    place = s3_place(endpoint=proxy.endpoint, part_bytes=PART)
    proxy.rules = [Rule("delay", path="partNumber=1", delay_s=2)]
    handle = save(1, place)
    until(lambda: bool(proxy.counts.faults))
    assert handle.cancel()
    assert isinstance(handle.exception(PATIENCE_S), sk.SaveCancelled)
    assert list(place.list()) == []
    assert unfinished(place) == []
    pid = child()
    save(2, place).result(PATIENCE_S)
    holds(place, 2)
    assert child() == pid


def write_all(process, file, data):
    """Write a file; a failure may be raised only at its end."""
    process.ask(WriteBytes(file, 0, data), WaitPolicy(PATIENCE_S))
    process.ask(FinishFile(file), WaitPolicy(PATIENCE_S))


def test_files_of_a_save_that_has_failed_do_not_wait(proxy, s3_place):
    target = spec_of(s3_place(endpoint=proxy.endpoint, part_bytes=PART, retries=0, timeout_s=10 * PATIENCE_S))
    data, patience = bytes(2 * PART), WaitPolicy(PATIENCE_S)

    def begin(name):
        return process.ask(CreateFile(target, f"{name}.safetensors", len(data)), patience).file

    memory = SharedMemory()
    with contextlib.closing(memory), contextlib.closing(WriterProcess(memory.fd, 2)) as process:
        whole = begin("whole-" + "f" * 20)
        for save_id in ("0" * 20, "1" * 20):
            proxy.rules = [Rule("stall", path="stalls.*partNumber"), Rule("broken", path="breaks.*partNumber")]
            stalls, breaks = begin(f"stalls-{save_id}"), begin(f"breaks-{save_id}")
            with ThreadPoolExecutor(1) as thread:
                waits = thread.submit(process.ask, WriteBytes(stalls, 0, data), patience)
                until(lambda: bool(proxy.counts.faults["stall"]))
                if save_id == "0" * 20:
                    with pytest.raises(sk.StorageError, match=r"breaks-.*500"):
                        write_all(process, breaks, data)
                else:
                    process.notify(f"another-{save_id}.safetensors".encode())
                with pytest.raises(sk.StorageError, match="was cancelled because another part of the save failed"):
                    waits.result(PATIENCE_S)
        write_all(process, whole, data)


def on_ranks(url, options, wrong):
    """Save with wrong keys on one rank, then with the right ones; return how the first one failed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {**options, **({"secret_access_key": "hunter2"} if rank == wrong else {})}
    failed = sk.async_save(
        state_of(1, rank, size), open_place(url, **mine), writer="process", options=OPTIONS
    ).exception(PATIENCE_S)
    place = open_place(url, **options)
    sk.async_save(state_of(2, rank, size), place, writer="process", options=OPTIONS).result(PATIENCE_S)
    load_and_compare(place, 2, rank, size)
    sk.finish_saves()
    return [type(failed).__name__, str(failed), getattr(failed, "hint", "")]


def test_all_ranks_hear_of_wrong_keys(rank_pool, s3_server, s3_place):
    """All ranks say whose process was refused and show no key; with the right keys the next save succeeds."""
    place = s3_place()
    failures = rank_pool.run(2, on_ranks, place.url, s3_server.options, 1)
    assert failures[0] == failures[1]
    kind, text, hint = failures[0]
    assert kind == "StorageError"
    assert "rank 1" in text
    assert ".safetensors" in text
    assert "403" in text
    assert "check credentials and permissions" in hint
    assert "hunter2" not in text + hint
    holds(place, 2)


def end_saver():
    """End the process, if there is one: another has the variables that are set now."""
    saver = group_saves_of(None, no_dist=True).saver
    if saver is not None:
        saver.close()


def test_a_state_in_torchs_layout(s3_server, monkeypatch):
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    where = s3_server.url("tests/process-dcp")
    state, found = {"w": torch.arange(1_000_003.0), "step": 3}, {"w": torch.zeros(1_000_003), "step": 0}
    end_saver()
    saved = quietly(
        dcp.async_save, state, checkpoint_id=where, async_checkpointer_type=AsyncCheckpointerType.PROCESS, no_dist=True
    )
    state["w"].zero_()
    saved.result(120)
    end_saver()
    quietly(dcp.load, found, checkpoint_id=where, no_dist=True)
    assert torch.equal(found["w"], torch.arange(1_000_003.0))
    assert found["step"] == 3
