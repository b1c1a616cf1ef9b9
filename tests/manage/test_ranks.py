"""Checkpointers of several ranks."""

import logging
import os
import signal
import time
from itertools import pairwise

import pytest
import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.manage.decisions import Decision, StepDecisions
from shardkeep.manage.schedule import Clock
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.manage.scene import checkpointer, damage, empty_state, state_at, tear, train


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


def signal_to_all(root):
    saved = []
    with checkpointer(root, signals=("SIGUSR1",)) as ckpt:
        for step in range(1, 30):
            torch.distributed.barrier()
            if step == 5 + rank():  # later on some ranks
                os.kill(os.getpid(), signal.SIGUSR1)
            if ckpt.step(step, state_at(step)) is not None:
                saved.append(step)
    return saved


def test_a_signal_to_all_ranks_is_one_signal(tmp_path, rank_pool):
    """It reaches them at different steps, and one save is made."""
    results = rank_pool.run(4, signal_to_all, tmp_path)
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 1


def resume(root):
    state = empty_state()
    with checkpointer(root, every_steps=2, keep_last=2) as ckpt:
        step = ckpt.restore_latest(state)
        skipped = [each.step for each in ckpt.last_restore.skipped] if ckpt.last_restore else []
        same = torch.equal(state["w"], state_at(step)["w"])
        saved = train(ckpt, range(step, step + 5))
        return step, skipped, saved, same


def test_all_ranks_walk_back_to_the_same_step(tmp_path, rank_pool):
    """Past torn and damaged ones."""
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        train(ckpt, range(1, 6))
    tear(tmp_path / "step-5")
    damage(tmp_path / "step-4")
    results = rank_pool.run(2, resume, tmp_path)
    assert results[0] == results[1]
    assert results[0] == (3, [4], [4, 6], True)


def fail_on(root, broken, kind):
    """Save with something wrong on one rank; return what each call raised."""
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
    """No key is written for a step that is not saved."""
    assert rank_pool.run(2, pure, tmp_path) == [([2, 4], 0)] * 2


def keys_left(root):
    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_default_store()
    counts = []
    with checkpointer(root, every_steps=50) as ckpt:
        for step in range(1, 60):
            ckpt.step(step, state_at(step))
            if step in (5, 45):
                torch.distributed.barrier()
                time.sleep(0.05)  # the last reader deletes
                counts.append(store.num_keys())
                torch.distributed.barrier()
    return counts[1] - counts[0]


def test_decisions_are_deleted_again(tmp_path, rank_pool):
    """Forty decisions later the store has no more keys."""
    assert max(rank_pool.run(3, keys_left, tmp_path)) <= 2  # a gloo barrier may leave keys of its own


def different(root):
    try:
        with checkpointer(root, every_steps=2 + rank()) as ckpt:
            ckpt.step(1, state_at(1))
    except sk.RanksDisagree as error:
        return str(error)
    return ""


def test_different_arguments_are_found_out(tmp_path, rank_pool):
    """Before anything is saved, on all ranks."""
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
    """End a run in which the last step is not saved; return what was raised."""
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


# -- decisions themselves, by ranks in threads


def test_rank_0_decides_and_paces():
    """Others get its decisions, at the same calls, and these get rarer while steps are quick."""
    now = [0.0]

    def main(world):
        agreement = StepDecisions(world, "s", Clock(monotonic=lambda: now[0]))
        seen = []
        for step in range(100):
            if agreement.reached():
                made = agreement.decision(step, lambda asked: Decision(step=step, why=f"{step}"), ())  # noqa: B023
                seen.append((step, made.why))
            if world.rank == 0:
                now[0] += 0.1
        return seen

    results = run_thread_ranks(3, main)
    assert results[0] == results[1] == results[2]
    steps = [step for step, _ in results[0]]
    gaps = [b - a for a, b in pairwise(steps)]
    assert gaps[:3] == [2, 4, 8] or gaps[0] <= 2
    assert 9 <= gaps[-1] <= 11
    assert len(steps) < 20


def test_a_silent_rank_0_is_named():
    """A rank that waits in vain says for whom, and at which step."""

    def main(world):
        if world.rank:
            StepDecisions(world, "s").decision(7, lambda asked: Decision(step=7), ())

    outcomes = thread_outcomes(2, main, timeout_s=0.2)
    assert isinstance(outcomes[1], sk.RanksSilent)
    assert outcomes[1].ranks == [0]
    assert "step 7" in str(outcomes[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_key_value_store_is_explained(rank):
    """Rank 0 may be the one that raises, because torchrun itself may have held the store."""
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("localhost", server.port, is_master=False)
    decisions = StepDecisions(World(rank, 2, client, timeout_s=5), "s")
    del server
    with pytest.raises(sk.RanksSilent, match="held the key-value store has ended: rank 0, or torchrun itself"):
        decisions.decision(7, lambda asked: Decision(step=7), ("save",))


def test_ranks_at_different_steps_are_found_out():
    """A loop that lost count gets an error."""

    def main(world):
        step = 5 + world.rank
        StepDecisions(world, "s").decision(step, lambda asked: Decision(step=step), ())

    outcomes = thread_outcomes(2, main)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], sk.RanksDisagree)


def test_thread_ranks_share_one_root(tmp_path, caplog):
    """The world may be given; a step is announced once."""
    caplog.set_level(logging.INFO, logger="shardkeep")

    def main(world):
        with checkpointer(tmp_path, every_steps=2, group=world, asynchronous=False) as ckpt:
            train(ckpt, range(1, 5))
            return ckpt.all_steps()

    assert run_thread_ranks(2, main)[0] == [2, 4]
    assert sum("saving step" in each.message for each in caplog.records) == 2
