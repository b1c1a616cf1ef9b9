"""Saves that a process of their own writes: what they hold, and what becomes of them when somebody dies."""

import errno
import gc
import os
import resource
import signal
import textwrap
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.engine.process import client, rpc
from shardkeep.engine.process.client import SharedMemory, WriterProcess, writer_manager
from shardkeep.engine.process.rpc import ReplyDeadline, WaitPolicy
from shardkeep.engine.process.server import CreateFile, WriteBytes, WriteRuns
from shardkeep.errors import WriterDied
from shardkeep.storage.base import spec_of
from shardkeep.storage.buffers import address_of
from shardkeep.storage.local import LocalStore, process_start
from tests.asynchronous.scene import PATIENCE_S, full, same, saved_in, says
from tests.asynchronous.test_snapshots import tensors_of
from tests.engine.samples import random_tensor
from tests.warm.python import warm_python

QUICK = sk.Options(io_threads=2, timeout_s=20)
HASTY = sk.Options(io_threads=2, timeout_s=0.5)
MIB = 1 << 20
STRICT = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # forks may
sys.warnoptions[:] = ["error"]  # for the process that writes
"""


def save(state, where, **more):
    return sk.async_save(state, where, writer="process", **{"options": QUICK, **more})


def large(seed=0, mib=20):
    """More than one window, in tensors that end anywhere."""
    return {
        "large": random_tensor((mib * MIB // 2 + 3,), torch.bfloat16, seed),
        "odd": random_tensor((1001,), torch.int8, seed + 1),
        "strided": random_tensor((300, 200), torch.float32, seed + 2).t(),
        "empty": torch.empty(0, 4),
        "scalar": random_tensor((), torch.float64, seed + 3),
        "small": [random_tensor((n,), torch.float16, seed + n) for n in range(1, 200)],
        "twice": {"a": (shared := random_tensor((70_001,), torch.int64, seed)), "b": shared},
        "words": "as they are",
    }


def started_child(folder):
    save(full(0), os.path.join(folder, "first")).result(PATIENCE_S)
    return writer_manager().pid


def until(happened):
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def until_asked(handle):
    process = writer_manager()._process
    until(lambda: handle.done() or process._free.qsize() < len(process._pipes))
    assert not handle.done()


def names(where):
    return sorted(os.listdir(where)) if os.path.isdir(where) else []


def run_script(text, *arguments):
    """Run a script in which a warning is an error, in a process of its own that has imported torch before."""
    return warm_python("-c", STRICT + textwrap.dedent(text), *arguments, timeout_s=PATIENCE_S)


def test_the_state_of_the_call_is_saved(place):
    """Every tensor is changed right after the call, over several saves in the same memory: each has its old bits."""
    for n in range(3):
        state, wanted = large(seed=n), large(seed=n)
        handle = save(state, f"{place}-{n}")
        for tensor in tensors_of(state):
            tensor.zero_()
        handle.result(PATIENCE_S)
        assert same(saved_in(f"{place}-{n}"), wanted)


def test_any_name_that_the_system_allows(place, monkeypatch):
    """A path may be relative, and not be text at all; where it leads is settled in the call."""
    folder = os.fsdecode(os.fsencode(place) + b"-\xff")
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    save(full(1), "below").result(PATIENCE_S)
    where = sk.LocalStore("later")
    monkeypatch.chdir("/")
    save(full(2), where).result(PATIENCE_S)
    assert says(f"{folder}/below") == {1}
    assert says(f"{folder}/later") == {2}


def test_it_writes_what_threads_write(place):
    found = []
    for writer in ("process", "thread"):
        where = f"{place}-{writer}"
        save_id = sk.async_save(large(), where, writer=writer, options=QUICK).result(PATIENCE_S).save_id
        files = {}
        for name in names(where):
            with open(f"{where}/{name}", "rb") as file:
                files[name.replace(save_id, "")] = file.read().replace(save_id.encode(), b"")
        found.append({name: data for name, data in files.items() if name.endswith(".safetensors")})
    assert found[0]
    assert found[0] == found[1]


def stop(pid):
    """Make a process hang, and wait until it does: it may be in the middle of something."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        states = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", encoding="ascii") as file:
                states.append(file.read().rpartition(")")[2].split()[0])
        if set(states) == {"T"}:
            return
        time.sleep(0.001)
    raise AssertionError(f"process {pid} did not stop: {states}")


def test_the_process_is_small_patient_and_hard_to_disturb(place):
    """It has no torch, is niced, outlives signals that are meant for all processes of a job, and is used again."""
    pid = started_child(place)
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        assert "libtorch" not in maps.read()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(pid) == pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(pid, number)
    save(full(5), f"{place}-5").result(PATIENCE_S)
    assert says(f"{place}-5") == {5}
    assert writer_manager().pid == pid


def test_signals_before_it_is_ready_do_not_end_it(place):
    """What a terminal or a scheduler sends to all is withheld until the process can ignore it."""
    handle = save(full(1), place)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(writer_manager().pid, number)
    handle.result(PATIENCE_S)
    assert says(place) == {1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_while_a_request_is_under_way(place, number):
    """The save fails at once and says who died of what, leaves nothing, and the next one starts a new process."""
    pid = started_child(place)
    stop(pid)
    handle = save(large(), f"{place}-2")
    until_asked(handle)
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(WriterDied, match=rf"pid {pid}\) was killed by {number.name}") as raised:
        handle.result(PATIENCE_S)
    assert "next one starts a new process" in raised.value.hint
    assert names(f"{place}-2") == []
    save(full(3), f"{place}-2").result(PATIENCE_S)
    assert says(f"{place}-2") == {3}
    assert writer_manager().pid != pid


def test_killed_with_a_file_half_written(place, monkeypatch):
    save(full(1), place).result(PATIENCE_S)
    before = names(place)
    ask, half_written = WriterProcess.ask, []

    def ask_and_kill(self, request, *more, **named):
        reply = ask(self, request, *more, **named)
        if isinstance(request, WriteRuns) and not half_written:
            half_written.extend(name for name in names(place) if name.endswith(".safetensors") and name not in before)
            os.kill(self.pid, signal.SIGKILL)
        return reply

    monkeypatch.setattr(WriterProcess, "ask", ask_and_kill)
    handle = save(large(), place, overwrite=True)
    with pytest.raises(WriterDied, match="SIGKILL"):
        handle.result(PATIENCE_S)
    monkeypatch.undo()
    assert half_written
    assert names(place) == before
    assert says(place) == {1}


def test_killed_while_idle(place):
    pid = started_child(place)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not writer_manager()._process.alive())
    save(full(2), f"{place}-2").result(PATIENCE_S)
    assert says(f"{place}-2") == {2}


def test_all_saves_in_flight_fail_with_it(place):
    pid = started_child(place)
    stop(pid)
    handles = [save(full(n), f"{place}-{n}", max_in_flight=2) for n in range(2)]
    until_asked(handles[0])
    os.kill(pid, signal.SIGKILL)
    assert isinstance(handles[0].exception(PATIENCE_S), WriterDied)
    handles[1].outcome()
    with pytest.raises(sk.EarlierSaveFailed, match=f"pid {pid}"):
        save(full(3), f"{place}-3")
    assert names(f"{place}-0") == names(f"{place}-1") == []


def test_an_error_in_the_process_is_raised_here(place):
    pid = started_child(place)
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    handle = save(large(), f"{place}-2")
    with pytest.raises(sk.StorageError, match="EFBIG") as raised:
        handle.result(PATIENCE_S)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.details["name"].endswith(".safetensors")
    assert names(f"{place}-2") == []
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    save(full(2), f"{place}-2").result(PATIENCE_S)
    assert writer_manager().pid == pid


def test_one_that_hangs_is_ended_at_the_deadline(place):
    """The save says that nobody answered, and leaves nothing; the next one starts a new process."""
    pid = started_child(place)
    stop(pid)
    with pytest.raises(WriterDied, match=rf"pid {pid}\) did not answer within") as raised:
        save(full(2), f"{place}-2", options=HASTY).result(PATIENCE_S)
    assert "Options.timeout_s" in raised.value.hint
    assert names(f"{place}-2") == []
    assert not process_start(pid)
    save(full(3), f"{place}-2").result(PATIENCE_S)
    assert says(f"{place}-2") == {3}
    assert writer_manager().pid != pid


@pytest.mark.parametrize("hangs", [False, True])
def test_a_cancelled_save_leaves_nothing(place, hangs, monkeypatch):
    """A slow process goes on when it answers; one that hangs is ended, long before the deadline, and replaced."""
    monkeypatch.setattr(client, "CANCELLED_S", rpc.CANCELLED_S if hangs else PATIENCE_S)
    pid = started_child(place)
    stop(pid)
    handle = save(large(), f"{place}-2", options=sk.Options(io_threads=2, timeout_s=10 * PATIENCE_S))
    until_asked(handle)
    assert handle.cancel()
    if not hangs:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(handle.exception(PATIENCE_S), sk.SaveCancelled)
    assert names(f"{place}-2") == []
    assert not (hangs and process_start(pid))
    save(full(3), f"{place}-2").result(PATIENCE_S)
    assert says(f"{place}-2") == {3}
    assert (writer_manager().pid != pid) == hangs


def test_a_cancel_does_not_end_what_another_save_needs(place):
    pid = started_child(place)
    stop(pid)
    cancelled, other = (save(full(n), f"{place}-{n}", max_in_flight=2) for n in range(2))
    until_asked(cancelled)
    assert cancelled.cancel()
    time.sleep(1.5 * rpc.CANCELLED_S)
    os.kill(pid, signal.SIGCONT)
    assert isinstance(cancelled.exception(PATIENCE_S), sk.SaveCancelled)
    other.result(PATIENCE_S)
    assert names(f"{place}-0") == []
    assert says(f"{place}-1") == {1}
    assert writer_manager().pid == pid


@pytest.fixture
def alone():
    memory = SharedMemory()
    process = WriterProcess(memory.fd, 1)
    yield process
    process.close()
    memory.close()


def place_in(folder):
    return spec_of(LocalStore(folder, direct=False, durable=False))


@pytest.mark.parametrize("broken", ["send", "receive"])
def test_an_answer_that_nobody_took_is_not_given_to_another_request(tmp_path, alone, monkeypatch, broken):
    """A request breaks off before its answer was received whole: the process is ended, and nobody asks it again."""
    patience = WaitPolicy(PATIENCE_S)
    assert alone.ask(CreateFile(place_in(tmp_path), "first", 10), patience).file == 1
    before = getattr(rpc, broken)

    def breaks_off(pipe, *more):
        before(pipe, *more)
        raise MemoryError

    monkeypatch.setattr(rpc, broken, breaks_off)
    with pytest.raises(MemoryError):
        alone.ask(CreateFile(place_in(tmp_path), "second", 10), patience)
    monkeypatch.undo()
    assert not alone.alive()
    assert not process_start(alone.pid)
    with pytest.raises(WriterDied, match=r"broke off \(MemoryError\)"):
        alone.ask(CreateFile(place_in(tmp_path), "third", 10), patience)


def test_a_request_larger_than_its_pipe_does_not_wait_for_ever(tmp_path, alone):
    """Such a request arrives whole; a process that hangs takes no more than a part of it, and is ended."""
    data = os.urandom(5 * MIB)
    file = alone.ask(CreateFile(place_in(tmp_path), "blob", len(data)), WaitPolicy(PATIENCE_S)).file
    alone.ask(WriteBytes(file, 0, data), WaitPolicy(PATIENCE_S))
    assert (tmp_path / "blob").read_bytes() == data
    stop(alone.pid)
    with pytest.raises(WriterDied, match="did not answer"):
        alone.ask(WriteBytes(file, 0, data), WaitPolicy(0.3))
    assert not process_start(alone.pid)


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch):
    """A job that goes on after hours, with all its processes, ends none of them for not having answered."""
    waiting, now = ReplyDeadline(WaitPolicy(1.0)), [time.monotonic()]
    monkeypatch.setattr(rpc.time, "monotonic", lambda: now[0])
    now[0] += 10_000
    waiting.check()
    for _ in range(7):
        now[0] += rpc.SLICE_S
        waiting.check()
    now[0] += 10_000
    with pytest.raises(rpc.NoReply, match="within 1 s"):
        waiting.check()


def test_a_python_that_does_not_start_is_told(place, monkeypatch):
    """Where no process can be started, the call says so; one that ends by itself says with which code."""
    import multiprocessing.spawn

    monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda: "/no/such/python")
    with pytest.raises(WriterDied, match="could not be started"):
        save(full(1), place)
    monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda: "/bin/false")
    with pytest.raises(WriterDied, match="ended with code 1"):
        save(full(1), place).result(PATIENCE_S)
    monkeypatch.undo()
    save(full(2), place).result(PATIENCE_S)
    assert says(place) == {2}


def counts(pid):
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        mapped = len(maps.readlines())
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), mapped


def test_thirty_saves_take_no_more_than_three(place):
    """Shared memory, file descriptors, threads and mappings of both processes stay as they are; all is given back."""
    gc.collect()
    before = counts("self")
    seen = []
    for n in range(33):
        save(large(seed=n, mib=5), place, overwrite=True).result(PATIENCE_S)
        hold = writer_manager()
        seen.append((*counts("self")[:2], *counts(hold.pid), os.fstat(hold._shared_memory()[1].fd).st_blocks))
    for column in zip(*seen, strict=True):
        assert min(column[-5:]) <= max(column[:3])  # a thread that ends may still be counted once
    pid = writer_manager().pid
    sk.finish_saves()
    assert writer_manager().pid is None
    assert not process_start(pid)
    assert counts("self")[0] <= before[0]


def test_memory_that_is_dropped_is_given_back():
    """A region is known while a view of it lives; afterwards its memory is free, and its address nobody's."""
    shared = SharedMemory()
    first, second = shared.buffer(5 * MIB), shared.buffer(3 * MIB + 1)
    for each in (first, second):
        each.tensor.fill_(7)
    at = address_of(first.view)

    def region_of(start, size):
        return shared.locate(np.array([start]), np.array([size]))

    assert region_of(at + MIB, 4 * MIB)[:2] == (0, 5 * MIB)
    assert region_of(at + MIB, 4 * MIB + 1) is None
    assert os.fstat(shared.fd).st_blocks * 512 >= 8 * MIB
    view = first.tensor[3:]
    del first, each
    assert region_of(at, 1)
    del view
    assert region_of(at, 1) is None
    assert os.fstat(shared.fd).st_blocks * 512 < 5 * MIB
    assert bytes(second.view) == b"\7" * (3 * MIB + 1)
    shared.close()


def test_a_script_that_ends_early_has_its_checkpoint(place):
    """Without a guard around its main part, and without a wait: it runs once, and the process ends with it."""
    ran = run_script(
        """
        import sys, torch, shardkeep as sk
        from shardkeep.engine.process.client import writer_manager
        print("ran")
        state = {"w": torch.full((3_000_000,), 4.0), "few": [torch.full((4,), 4.0)]}
        sk.async_save(state, sys.argv[1], writer="process")
        print(writer_manager().pid)
        """,
        place,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    once, pid = ran.stdout.split()
    assert once == "ran"
    assert says(place) == {4}
    until(lambda: not process_start(int(pid)))


def test_a_script_ends_though_its_writer_hangs(place):
    """It cancels a save, or gives it a deadline, and does not wait: the process is ended, and so is the script."""
    ran = run_script(
        """
        import os, signal, sys, torch, shardkeep as sk
        from shardkeep.engine.process.client import writer_manager
        for n, timeout_s in enumerate((600, 0.5)):
            sk.async_save({"w": torch.ones(9)}, f"{sys.argv[1]}-{n}", writer="process").result()
            pid = writer_manager().pid
            os.kill(pid, signal.SIGSTOP)
            options = sk.Options(timeout_s=timeout_s)
            handle = sk.async_save({"w": torch.ones(9)}, f"{sys.argv[1]}-late-{n}", writer="process", options=options)
            print(pid)
            if n == 0:
                handle.cancel()
                handle.outcome()
        """,
        place,
    )
    assert ran.returncode == 0
    assert "its result was never retrieved" in ran.stderr  # of the second save
    assert "did not answer within" in ran.stderr
    assert not any(process_start(int(pid)) for pid in ran.stdout.split())
    assert names(f"{place}-late-0") == names(f"{place}-late-1") == []


def test_a_trainer_killed_in_a_save_takes_its_writer_along(place):
    """No checkpoint is seen, the process ends though a fork of the trainer lives on, and the next save cleans up."""
    ran = run_script(
        """
        import os, signal, sys, time, torch, shardkeep as sk
        from shardkeep.engine.process.client import writer_manager
        sk.async_save({"w": torch.ones(3)}, sys.argv[1] + "-0", writer="process").result()
        process = writer_manager()._process
        fork = os.fork()
        if not fork:
            os.close(1); os.close(2)
            time.sleep(60)
            os._exit(0)
        ask, asked = process.ask, []
        def ask_and_die(request, *more, **named):
            reply = ask(request, *more, **named)
            asked.append(request)
            if len(asked) == 2:
                print(process.pid, fork, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return reply
        process.ask = ask_and_die
        sk.async_save({"w": torch.ones(20_000_000)}, sys.argv[1], writer="process").result()
        """,
        place,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pid, fork = map(int, ran.stdout.split())
    try:
        until(lambda: not process_start(pid))
        assert process_start(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
    assert any(name.endswith(".safetensors") for name in names(place))
    with pytest.raises(sk.CheckpointNotFound):
        sk.open(place)
    save_id = sk.save(full(1), place).save_id
    assert says(place) == {1}
    assert all(save_id in name for name in names(place) if name.endswith(".safetensors"))


def test_a_fork_of_the_trainer_harms_nothing(place):
    ran = run_script(
        """
        import os, sys, torch, shardkeep as sk
        from shardkeep.engine.process.client import writer_manager
        hold = writer_manager()
        sk.async_save({"w": torch.ones(3)}, sys.argv[1] + "-0", writer="process").result()
        buffer = hold._shared_memory()[1].buffer(1 << 20)
        buffer.tensor.fill_(7)
        pid, fork = hold.pid, os.fork()
        if not fork:
            del buffer
            assert writer_manager() is not hold
            hold.end()
            hold._process.close()
            os._exit(0)
        assert os.waitpid(fork, 0)[1] == 0
        assert bytes(buffer.view) == bytes([7]) * (1 << 20)
        sk.async_save({"w": torch.full((5,), 6.0), "few": []}, sys.argv[1], writer="process").result()
        assert hold.pid == pid
        """,
        place,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert says(place) == {6}


def on_ranks(where, killed):
    """One rank's process is killed in the second save; return how that failed, and who wrote the last one."""
    rank = dist.get_rank()
    state = {"mine": sk.PerRank(torch.full((3_000_000,), float(rank))), "w": torch.ones(10)}
    save(state, f"{where}-0").result(PATIENCE_S)
    pid = writer_manager().pid
    if rank == killed:
        stop(pid)
    handle = save(state, f"{where}-1")
    if rank == killed:
        until_asked(handle)
        os.kill(pid, signal.SIGKILL)
    error = handle.exception(PATIENCE_S)
    save(state, f"{where}-2").result(PATIENCE_S)
    later = writer_manager().pid
    sk.finish_saves()
    return type(error).__name__, str(error), pid, later


@pytest.mark.parametrize("killed", [0, 1])
def test_all_ranks_hear_of_one_that_lost_its_process(rank_pool, place, killed):
    """The save fails on both ranks with the same words, before a deadline, and leaves nothing; the next succeeds."""
    outcomes = rank_pool.run(2, on_ranks, place, killed)
    assert {kind for kind, *_ in outcomes} == {"WriterDied"}
    (text,) = {text for _, text, *_ in outcomes}
    assert (
        f"rank {killed}: the process that writes checkpoints (pid {outcomes[killed][2]}) was killed by SIGKILL" in text
    )
    assert names(f"{place}-1") == []
    assert [pid == later for _, _, pid, later in outcomes] == [rank != killed for rank in range(2)]
    found = saved_in(f"{place}-2")["mine"]
    assert [torch.equal(found[rank], torch.full((3_000_000,), float(rank))) for rank in range(2)] == [True, True]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("staging", ["auto", "overlap", "device", "host"])
def test_from_an_accelerator(place, staging):
    """Tensors there are copied to shared windows, and changed as soon as the handle allows it."""
    device = torch.accelerator.current_accelerator()
    for n in range(5):
        state = {"there": torch.full((20_000_000,), float(n), device=device), "here": torch.full((5,), float(n))}
        handle = save(state, f"{place}-{n}", staging=staging)
        handle.staged.wait(PATIENCE_S)
        for tensor in state.values():
            tensor.fill_(-1)
        handle.result(PATIENCE_S)
        assert all(bool((tensor == n).all()) for tensor in saved_in(f"{place}-{n}").values())
