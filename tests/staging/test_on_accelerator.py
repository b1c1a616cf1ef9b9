"""Stagers on an accelerator: copies come after the work that made the tensors and before what changes them."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as theirs

from shardkeep.dcp._impl.async_ import AsyncCheckpointerType, async_save
from shardkeep.dcp.filesystem import FileSystemWriter
from shardkeep.dcp.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from shardkeep.engine.snapshot import take_snapshot
from shardkeep.engine.tensors import TorchScattered
from shardkeep.engine.workers import windows_for
from tests.asynchronous.test_on_accelerator import ROUNDS, delay, fill, fresh_state, tensors_of, values
from tests.protocol.samples import quietly

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")


def rounds(stage, state):
    """Change the state right after each stage, with work still queued before and after; return what was staged."""
    found = []
    for step in range(ROUNDS):
        delay(random)
        fill(state, step)
        staged = stage(state)
        fill(state, 99)
        delay(random)
        assert all(tensor.is_cpu for tensor in tensors_of(staged))
        found.append(values(staged))
    return found


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("options", [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (1, 0, 1, 1), (1, 1, 1, 1)])
def test_values_are_those_of_the_call(options, side):
    """Whatever the options and the stream, each of 50 snapshots by one stager has the values queued before it."""
    stager = DefaultStager(StagingOptions(*map(bool, options)))
    stage = (lambda state: stager.stage(state).result(60)) if options[2] else stager.stage
    stream = torch.Stream(torch.accelerator.current_accelerator()) if side else contextlib.nullcontext()
    with stream:
        found = rounds(stage, fresh_state())
    assert found == [{float(step)} for step in range(ROUNDS)]
    assert stager._state_dict_stager._memory.kept_bytes < 60_000_000
    stager.close()


@pytest.mark.parametrize("cache", [False, True])
def test_the_blocking_stager_waits(cache):
    stager = BlockingAsyncStager(cache_staged_state_dict=cache)
    assert rounds(stager.stage, fresh_state()) == [{float(step)} for step in range(ROUNDS)]
    stager.close()


def test_pinned_memory_is_used_again_and_given_back():
    stager = DefaultStager(StagingOptions(True, False, False, True))
    state = {"w": torch.ones(1_000_000, device=torch.accelerator.current_accelerator())}
    places = set()
    for _ in range(20):
        staged = stager.stage(state)
        assert staged["w"].is_pinned()
        places.add(staged["w"].data_ptr())
        del staged
    assert len(places) == 1
    stager.close()
    assert stager._state_dict_stager._memory.kept_bytes == 0
    again = DefaultStager(StagingOptions(True, True, False, True)).stage(state)  # the same pages may be pinned again
    assert again["w"].is_pinned()
    assert again["w"].is_shared()


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_saves_from_an_accelerator(tmp_path, kind):
    state = {"w": torch.zeros(500_000, device=torch.accelerator.current_accelerator())}
    stager = DefaultStager()
    uploads = []
    for step in range(5):
        delay(random)
        state["w"].fill_(step)
        writer = FileSystemWriter(tmp_path / str(step))
        response = quietly(async_save, state, storage_writer=writer, async_stager=stager, async_checkpointer_type=kind)
        response.staging_completion.result(60)
        state["w"].fill_(-1)
        uploads.append(response.upload_completion)
        time.sleep(random.random() / 100)
    for step, upload in enumerate(uploads):
        upload.result(120)
        found = {"w": torch.empty(500_000)}
        quietly(theirs.load, found, storage_reader=theirs.FileSystemReader(tmp_path / str(step)), no_dist=True)
        assert found["w"].eq(step).all()
    stager.close()


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("room", [0.5, 0.0], ids=["copied on the device", "no room"])
def test_saves_without_a_stager(tmp_path, monkeypatch, kind, room):
    """The state may be changed when the call returns, whether it was copied on the device or to host memory."""
    monkeypatch.setattr("shardkeep.engine.snapshot._ROOM", room)
    state = fresh_state()
    uploads = []
    for step in range(5):
        delay(random)
        fill(state, step)
        place = tmp_path / str(step)
        uploads.append(quietly(async_save, state, checkpoint_id=place, async_checkpointer_type=kind, no_dist=True))
        fill(state, -1)
    for step, upload in enumerate(uploads):
        upload.result(120)
        found = {key: torch.empty_like(value, device="cpu") for key, value in state.items() if torch.is_tensor(value)}
        quietly(theirs.load, found, storage_reader=theirs.FileSystemReader(tmp_path / str(step)), no_dist=True)
        assert values(found) == {float(step)}


def device_pieces(tensors):
    return take_snapshot(tensors, staging="device", optimizers=[])


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_copies_on_the_device_come_between(side):
    """A copy on the device has what was queued before it, bit for bit and without a graph, and nothing later."""
    device = torch.accelerator.current_accelerator()
    bits = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn]
    state = [torch.empty_like(bits).view(dtype) for dtype in (*dtypes, torch.int64, torch.bool, torch.uint16)]
    weight = torch.nn.Parameter(torch.zeros(1000, 1000, device=device))
    with torch.Stream(device) if side else contextlib.nullcontext():
        for step in range(ROUNDS):
            delay(random)
            for tensor in state:
                tensor.view(torch.uint8).copy_(bits)
            weight.detach().fill_(step)
            found = device_pieces([*state, weight, state[0]])
            for tensor in state:
                tensor.view(torch.uint8).zero_()
            weight.detach().fill_(-1)
            torch.accelerator.synchronize()
            copies = found.tensors
            assert all(torch.equal(copy.view(torch.uint8), bits) for copy in copies[: len(state)])
            assert copies[-1].data_ptr() == copies[0].data_ptr()
            assert not copies[-2].requires_grad
            assert (copies[-2] == step).all()


def test_memory_of_copies_that_are_given_up_is_free_for_the_caller():
    """Copies that nobody wants any more, still queued, do not write into what the caller puts in their memory next."""
    device = torch.accelerator.current_accelerator()
    state = [torch.zeros(4 << 20, device=device) for _ in range(8)]
    for step in range(ROUNDS):
        delay(random)
        device_pieces(state).tensors.clear()
        mine = [torch.full_like(tensor, step + 1.0) for tensor in state]
        torch.accelerator.synchronize()
        assert all(bool((tensor == step + 1).all()) for tensor in mine)


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_each_thread_with_a_window_has_a_stream_after_the_callers(side):
    """Threads copy on streams of their own, the same ones each time, after what their caller has queued."""
    device = torch.accelerator.current_accelerator()
    target = torch.zeros(1 << 20, device=device)
    seen = []

    def work(lend):
        lend()
        stream = torch.accelerator.current_stream()
        value = target.max().item()
        return stream.stream_id, value

    with torch.Stream(device) if side else contextlib.nullcontext():
        own = torch.accelerator.current_stream().stream_id
        for step in range(ROUNDS):
            delay(random)
            target.fill_(step)
            memory = [TorchScattered(target, target.dtype)]
            with windows_for(memory, 1 << 20, 4) as lend, ThreadPoolExecutor(4) as pool:
                found = [future.result() for future in [pool.submit(work, lend) for _ in range(4)]]
            assert {value for _, value in found} == {float(step)}
            seen += [stream for stream, _ in found]
        assert torch.accelerator.current_stream().stream_id == own
    assert side or own not in seen  # of side streams torch has no more than a few, in turn
    assert len(set(seen)) <= 4
