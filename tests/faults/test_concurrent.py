"""Several saves to one place at the same time."""

import contextlib
import os
import random
import time
from functools import partial

import pytest
import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import native
from shardkeep.testing.faulty_store import InjectedCrash
from tests.engine.samples import bits
from tests.faults.doomed import compete, hold_a_save, level_at, save_level
from tests.faults.forks import Fork
from tests.faults.scene import IN_ORDER, files_of_checkpoint, names_in
from tests.faults.turns import Turns, TurnStore, play

SCHEDULES = 50


def small_state(k):
    return {"a": {"w": torch.full((33,), float(k))}, "b": {"w": torch.full((5, 5), k)}, "k": k}


def save_small(k, store, *, overwrite=True):
    return sk.save(small_state(k), store, step=k, overwrite=overwrite, group=World(0, 1), options=IN_ORDER)


def die_saving(k, at, store):
    return save_small(k, store.dying(at))


def small_at(store):
    """Verify and read the checkpoint in a store; say which it is."""
    ck = sk.open(store, options=IN_ORDER)
    ck.verify()
    assert bits(ck.to_dict()) == bits(small_state(ck.step))
    return ck.step


def blobs_of_checkpoint(store):
    record = native.read_record(store)
    return {RECORD_NAME, record.index.name, *(file.name for file in record.files)}


def assert_nothing_is_left(store):
    """One more save finds the way clear, and then there is its checkpoint and nothing else."""
    save_small(99, store)
    assert small_at(store) == 99
    assert {blob.name for blob in store.list()} == blobs_of_checkpoint(store)


def play_on(store, seed, *games):
    """Play games, each a function of a store, in an order drawn by lot; return their outcomes, and the story of it."""
    turns = Turns(random.Random(seed), len(games))
    outcomes = play(turns, [partial(game, TurnStore(store, turns, player)) for player, game in enumerate(games)])
    return outcomes, "\n".join([f"seed {seed}", *turns.order])


@pytest.mark.parametrize("players", [2, 3])
@pytest.mark.parametrize("overwrite", [True, False])
def test_saves_in_any_order_of_steps(players, overwrite):
    """Of saves that overwrite one, a reported one is there, whole; without overwrite one succeeds, the others see CheckpointExists."""
    beaten = 0
    for seed in range(SCHEDULES):
        store = sk.MemoryStore()
        if overwrite:
            save_small(0, store)
        saves = [partial(save_small, player + 1, overwrite=overwrite) for player in range(players)]
        outcomes, story = play_on(store, seed, *saves)
        saved = [outcome.step for outcome in outcomes if isinstance(outcome, sk.SaveReport)]
        for outcome in outcomes:
            assert isinstance(outcome, (sk.SaveReport, sk.CheckpointExists)), (outcome, story)
        assert len(saved) == 1 or (overwrite and saved), story
        beaten += any("another save committed a checkpoint here meanwhile" in str(outcome) for outcome in outcomes)
        assert small_at(store) in saved, story
        assert_nothing_is_left(store)
    assert beaten >= SCHEDULES // 10, "the saves hardly met"


def test_one_of_two_dies_on_the_way():
    """One dies at a random step: there is what the survivor reported, the earlier one, or a commit of the dead one."""
    for seed in range(SCHEDULES):
        store = sk.MemoryStore()
        save_small(0, store)
        dies_at = random.Random(seed).randrange(16)
        (first, second), story = play_on(store, seed, partial(save_small, 1), partial(die_saving, 2, dies_at))
        assert isinstance(first, (sk.SaveReport, sk.CheckpointExists)), story
        assert isinstance(second, (sk.SaveReport, sk.CheckpointExists, InjectedCrash)), story
        assert small_at(store) in ({1, 2} if isinstance(first, sk.SaveReport) else {0, 2}), story
        assert_nothing_is_left(store)


def test_a_reader_between_the_steps_of_a_save():
    """A reader sees one checkpoint or the other, whole, or an error of ours; never a mixture."""
    seen = set()
    for seed in range(SCHEDULES):
        store = sk.MemoryStore()
        save_small(0, store)
        (saved, read), story = play_on(store, seed, partial(save_small, 1), small_at)
        assert isinstance(saved, sk.SaveReport), story
        assert read in (0, 1) or isinstance(read, sk.CheckpointError), (story, read)
        seen.add("error" if isinstance(read, BaseException) else read)
    assert seen == {0, 1, "error"}


def test_processes_that_save_to_one_place(place):
    """Processes that overwrite one checkpoint never tear it; the last was reported as saved, and is there alone."""
    save_level(place, 0)
    looked = 0
    with contextlib.ExitStack() as stack:
        forks = [stack.enter_context(Fork(compete, place, 1000 * number)) for number in (1, 2, 3)]
        until = time.monotonic() + 3
        while time.monotonic() < until:
            try:
                level_at(place)
                looked += 1
            except sk.CheckpointError as exc:
                if "replaced by another save" not in str(exc) and "missing" not in str(exc):
                    raise
        for fork in forks:
            fork.pipe.send("stop")
        reports = [fork.pipe.recv() for fork in forks]
        assert [fork.join() for fork in forks] == [0, 0, 0]
    saved = set().union(*(done for done, _ in reports))
    assert all(kinds <= {"CheckpointExists"} for _, kinds in reports)
    assert len(saved) >= 3
    assert looked
    assert level_at(place) in saved
    save_level(place, 9999)
    assert names_in(place) == files_of_checkpoint(place)


def test_a_place_where_another_process_is_saving(place, monkeypatch):
    save_level(place, 0)
    with Fork(hold_a_save, place, 1) as fork:
        pid = fork.pipe.recv()
        assert level_at(place) == 0
        before = names_in(place)
        assert len(before - files_of_checkpoint(place)) >= 2
        with pytest.raises(sk.CheckpointExists, match=rf"another save is writing here \(process {pid}\)"):
            save_level(place, 2)
        monkeypatch.setenv("WORLD_SIZE", "2")  # the other one is a rank of the same job
        for overwrite in (True, False):
            with pytest.raises(sk.CheckpointExists) as caught:
                sk.save({"x": torch.ones(1)}, place, overwrite=overwrite)
            assert "no process group: call torch.distributed.init_process_group first" in caught.value.hint
        assert names_in(place) == before
        fork.pipe.send("go on")
        assert fork.join() == 0
    assert level_at(place) == 1
    save_level(place, 2)
    assert level_at(place) == 2
    assert names_in(place) == files_of_checkpoint(place)


def test_a_claim_of_another_machine_is_respected(place):
    """Files claimed on another machine, whose processes cannot be seen, stay until a day after their last change."""
    save_level(place, 0)
    save_id = native.new_save_id()
    foreign = [native.claim_name(save_id), native.data_name("model", 0, 1, save_id)]
    for name in foreign:
        with open(os.path.join(place, name), "w", encoding="utf-8") as file:
            file.write('{"host": "elsewhere", "pid": 1, "started": "1"}')
    save_level(place, 1)
    assert names_in(place) == files_of_checkpoint(place) | set(foreign)
    yesterday = time.time() - 25 * 3600
    for name in foreign:
        os.utime(os.path.join(place, name), (yesterday, yesterday))
    save_level(place, 2)
    assert names_in(place) == files_of_checkpoint(place)
