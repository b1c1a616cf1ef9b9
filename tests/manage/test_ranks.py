"""Checkpointers of several ranks."""

import gc
import logging
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.manage.decisions import Decision, StepDecisions
from shardkeep.manage.schedule import Clock
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.manage.scene import checkpointer, damage, empty_state, state_at, tear, train, until


def rank():
    return torch.distributed.get_rank()


def job(root, signalled, asked, ahead):
    """Train a while; one rank gets a signal, one is asked for a save; `ahead`: ask before each step whether it is saved."""
    saved, stop = [], []
    with checkpointer(root, every_steps=10, signals=("SIGUSR1",), keep_last=3) as ckpt:
        start = ckpt.restore_latest(empty_state()) or 0
        for step in range(start + 1, 40):
            torch.distributed.barrier()  # as training does
            if rank() == asked and step == 3:
                ckpt.request_save()
            if rank() == signalled and step == 15:
                os.kill(os.getpid(), signal.SIGUSR1)
            if (not ahead or ckpt.should_save(step)) and ckpt.step(step, state_at(step)) is not None:
                saved.append(step)
            if ckpt.should_stop:
                stop.append(step)
                break
        ckpt.delete(saved[0])
        assert saved[0] not in ckpt.all_steps()
        done = ckpt.latest_step() == saved[-1]
    return saved, stop, done


@pytest.mark.parametrize(("signalled", "asked", "ahead"), [(2, 3, False), (2, 3, True), (0, 0, False)])
def test_all_ranks_save_the_same_steps(tmp_path, rank_pool, signalled, asked, ahead):
    """A signal or a request on one rank makes all save, once, at the same step, and stop at the same one."""
    results = rank_pool.run(4, job, tmp_path, signalled, asked, ahead)
    assert all(result == results[0] for result in results)
    saved, stop, done = results[0]
    assert saved[1] == 10
    assert saved[0] in (3, 4)
    assert saved[2] in (15, 16)
    assert len(saved) == 3
    assert stop == [saved[2]]
    assert done
    assert sk.Catalog(tmp_path).latest().step == saved[2]


def resume(root):
    state = empty_state()
    with checkpointer(root, every_steps=2, keep_last=2) as ckpt:
        step = ckpt.restore_latest(state)
        skipped = [each.step for each in ckpt.last_restore.skipped] if ckpt.last_restore else []
        same = torch.equal(state["w"], state_at(step)["w"])
        saved = train(ckpt, range(step, step + 5))
        return step, skipped, saved, same


def test_all_ranks_walk_back_to_the_same_step(tmp_path, rank_pool):
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        train(ckpt, range(1, 6))
    tear(tmp_path / "step-5")
    damage(tmp_path / "step-4")
    results = rank_pool.run(2, resume, tmp_path)
    assert results[0] == results[1]
    assert results[0] == (3, [4], [4, 6], True)


def fail_on(root, broken, kind):
    said = []
    state = state_at(1)
    if rank() == broken:
        state["odd"] = object()
    ckpt = checkpointer(root, asynchronous=kind == "asynchronous", request_file="save-now")
    for step in range(1, 6):
        try:
            ckpt.step(step, state if step == 1 else state_at(step), force=step in (1, 4))
            said.append("")
        except sk.CheckpointError as error:
            said.append(type(error.__cause__ if isinstance(error, sk.EarlierSaveFailed) else error).__name__)
        torch.distributed.barrier()
    ckpt.close()
    return said


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_a_failure_on_one_rank_is_told_on_all(tmp_path, rank_pool, kind):
    """By its own error; the ranks that learn of it later do so at one and the same step; later saves work."""
    results = rank_pool.run(3, fail_on, tmp_path, 1, kind)
    assert all("".join(result) == "UnsupportedLeaf" for result in results), results
    assert results[0] == results[2]
    if kind == "synchronous":
        assert results[0] == results[1]
    assert sk.Catalog(tmp_path).latest().step == 4


def pure(root):
    from torch.distributed import distributed_c10d as c10d

    ckpt = checkpointer(root, every_steps=2, request_file=None)
    before = c10d._get_default_store().num_keys()
    torch.distributed.barrier()
    saved = train(ckpt, range(1, 2))
    after = c10d._get_default_store().num_keys()
    torch.distributed.barrier()
    saved += train(ckpt, range(2, 5))
    ckpt.close()
    return saved, after - before


def test_steps_that_say_it_themselves_need_no_talk(tmp_path, rank_pool):
    assert rank_pool.run(2, pure, tmp_path) == [([2, 4], 0)] * 2


def different(root):
    try:
        with checkpointer(root, every_steps=2 + rank()) as ckpt:
            ckpt.step(1, state_at(1))
    except sk.RanksDisagree as error:
        return str(error)
    return ""


def test_different_arguments_are_found_out(tmp_path, rank_pool):
    for said in rank_pool.run(2, different, tmp_path):
        assert "same arguments" in said


def in_use(root):
    try:
        with checkpointer(root) as ckpt:
            ckpt.save(1, state_at(1))
    except sk.RootInUse as error:
        return str(error)
    return ""


def test_a_root_in_use_is_refused_on_all_ranks(tmp_path, rank_pool):
    """Rank 0 alone looks at the lease."""
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
        for said in rank_pool.run(2, in_use, tmp_path):
            assert f"process {os.getpid()} on" in said


def end_of_run(root, how):
    group = torch.distributed.new_group()
    state = {"w": torch.full((8,), float(rank())), "own": sk.PerRank(rank())}
    try:
        with checkpointer(root, every_steps=10, group=group) as ckpt:
            for step in range(1, 13):
                state["model"] = torch.nn.Linear(1, 1)
                ckpt.step(step, state)
            if how == "one fails" and rank() == 1:
                raise ZeroDivisionError
            if how == "the group ends":
                torch.distributed.destroy_process_group(group)
            if how == "gone" and rank() == 1:
                del state["model"]
    except (sk.CheckpointError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "steps", "said"),
    [
        ("clean", [10, 12], ("", "")),
        ("one fails", [10], ("CheckpointError: rank 1: ZeroDivisionError: ", "ZeroDivisionError: ")),
        ("the group ends", [10], ("", "")),
        ("gone", [10], ("", "")),
    ],
)
def test_all_ranks_save_the_last_step_or_none_does(tmp_path, rank_pool, how, steps, said):
    """A rank that fails notifies the others, which would wait for it otherwise."""
    for expected, heard in zip(said, rank_pool.run(2, end_of_run, tmp_path, how), strict=True):
        assert heard.startswith(expected)
        assert bool(heard) == bool(expected)
    assert sorted(entry.step for entry in sk.Catalog(tmp_path)) == steps
    assert sk.open(tmp_path / f"step-{steps[-1]}").record.world_size == 2


def decisions_of(world, *, decide=lambda asked: Decision(why=" ".join(asked)), asked=(), **clock):
    """Return the decisions of a rank, which saves what it is asked for; `asked` are requests that reach this rank."""
    return StepDecisions(world, "s", lambda: [asked.pop() for _ in asked[:1]], decide, Clock(**clock))


class Gate(torch.distributed.Store):
    """A key-value store that answers only while it is open, and counts what it is asked."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.open, self.asked = inner, threading.Event(), 0
        self.open.set()

    def _ask(self, verb, *args):
        self.asked += 1
        self.open.wait()
        return getattr(self.inner, verb)(*args)

    def set(self, key, value):
        return self._ask("set", key, value)

    def check(self, keys):
        return self._ask("check", keys)

    def compare_set(self, key, expected, desired):
        return self._ask("compare_set", key, expected, desired)


def settled(decisions, ahead=26):
    until(lambda: all(each._decided - each._calls >= ahead for each in decisions))


def test_a_step_finds_its_decision_in_memory():
    """It needs no answer of the key-value store; and while training pauses, no rank asks the store anything."""
    gate = Gate(torch.distributed.HashStore())
    ranks = [decisions_of(World(rank, 3, gate, 20.0), interval_s=2.0) for rank in range(3)]
    for step in range(40):
        for each in ranks:
            each.next(step)
    settled(ranks)
    asked = gate.asked
    time.sleep(1)  # twice as long as between two looks
    assert gate.asked == asked
    gate.open.clear()
    for step in range(40, 45):
        assert [each.next(step).why for each in ranks] == [""] * 3
    gate.open.set()
    for each in ranks:
        each.close()


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_act_at_the_same_call(seed):
    """However they are ahead of each other, whichever rank is asked; each request is honoured once, within 50 steps."""
    random = Random(seed)
    asked_at = {random.randrange(300): random.randrange(4) for _ in range(12)}
    naps = {(random.randrange(4), random.randrange(400)): random.random() / 20 for _ in range(60)}

    def main(world):
        requests, events = [], []
        decisions = decisions_of(world, asked=requests, interval_s=0.02)
        for step in range(400):
            time.sleep(naps.get((world.rank, step), 0))
            if asked_at.get(step) == world.rank:
                requests.append("save")
            if decisions.next(step).why:
                events.append(step)
        decisions.close()
        return events

    results = run_thread_ranks(4, main)
    assert all(events == results[0] for events in results)
    assert 1 <= len(results[0]) <= len(asked_at)


def test_a_request_waits_for_one_slow_step_or_fifty_quick_ones():
    """A slow step is decided just before it is expected; of quick ones, not too many are decided ahead."""
    now, asked = [0.0], []
    decide = lambda _: Decision(why=asked.pop() if asked else "")  # noqa: E731
    store = torch.distributed.HashStore()
    decisions = decisions_of(World(0, 2, store, 20.0), decide=decide, interval_s=0.1, monotonic=lambda: now[0])
    for step in range(8):
        decisions.next(step)
        now[0] += 60
    now[0] -= 10
    asked.append("late in a slow step")
    now[0] += 10
    assert decisions.next(8).why == "late in a slow step"
    for step in range(9, 60):
        now[0] += 1e-4
        decisions.next(step)
    settled([decisions])
    asked.append("among quick steps")
    now[0] += 1e-4
    waited = next(number for number in range(99) if decisions.next(60 + number).why)
    assert 25 <= waited <= 51
    decisions.close()


def test_a_thousand_decisions_leave_the_store_as_it_was():
    """Each of them is to save: only the number of what is decided stays."""
    store = torch.distributed.HashStore()

    def main(rank):
        decisions = decisions_of(World(rank, 3, store, 30.0), decide=lambda _: Decision(why="always"), interval_s=0.1)
        events = sum(bool(decisions.next(step).why) for step in range(1000))
        decisions.close()
        return events

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(main, range(3))) == [1000] * 3
    assert store.num_keys() == 1


def test_a_silent_rank_0_is_named():
    def main(world):
        if world.rank:
            decisions_of(world).next(7)

    outcomes = thread_outcomes(2, main, timeout_s=0.2)
    assert isinstance(outcomes[1], sk.RanksSilent)
    assert outcomes[1].ranks == [0]
    assert "step 7" in str(outcomes[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_key_value_store_is_explained(rank):
    """Rank 0 may be the one that raises, because torchrun itself may have held the store."""
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("localhost", server.port, is_master=False)
    decisions = decisions_of(World(rank, 2, client, timeout_s=5))
    del server
    for _ in range(2):
        with pytest.raises(sk.RanksSilent, match="held the key-value store has ended: rank 0, or torchrun itself"):
            decisions.next(7)


def test_a_key_value_store_that_does_not_answer_is_explained():
    """The thread that waits for it is left to itself."""
    gate = Gate(torch.distributed.HashStore())
    gate.open.clear()
    with pytest.raises(sk.RanksSilent, match="the store did not answer"):
        decisions_of(World(1, 2, gate, timeout_s=0.1)).next(7)
    gate.open.set()


def test_what_fails_while_rank_0_decides_is_raised_there():
    with pytest.raises(ZeroDivisionError):
        decisions_of(World(0, 2, torch.distributed.HashStore(), 5.0), decide=lambda _: 1 / 0).next(7)


@pytest.mark.parametrize("ahead", [False, True])
def test_ranks_at_different_steps_are_found_out(ahead):
    """A loop that lost count gets an error: at once, or while its decisions are made ahead."""

    def main(world):
        decisions = decisions_of(world, interval_s=0.05)
        for step in range(200 if ahead else 1):
            decisions.next(step + world.rank * (step >= 50 * ahead))
            time.sleep(0.01 * ahead)
        decisions.close()

    outcomes = thread_outcomes(2, main)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], sk.RanksDisagree)


def test_a_checkpointer_that_is_dropped_is_freed(tmp_path):
    """With the state that it may hold, although it was not closed and its ranks look for decisions; the thread ends."""

    def main(world):
        ckpt = checkpointer(tmp_path, request_file="save-now", group=world, clock=Clock(interval_s=0.02))
        train(ckpt, range(1, 5))
        return weakref.ref(ckpt)

    dropped = run_thread_ranks(2, main)
    until(lambda: gc.collect() >= 0 and not any(each() for each in dropped))
    until(lambda: not [each for each in threading.enumerate() if each.name == "shardkeep-decisions"])


def test_thread_ranks_share_one_root(tmp_path, caplog):
    """The world may be given; a step is announced once."""
    caplog.set_level(logging.INFO, logger="shardkeep")

    def main(world):
        with checkpointer(tmp_path, every_steps=2, group=world, asynchronous=False) as ckpt:
            train(ckpt, range(1, 5))
            return ckpt.all_steps()

    assert run_thread_ranks(2, main)[0] == [2, 4]
    assert sum("saving step" in each.message for each in caplog.records) == 2
