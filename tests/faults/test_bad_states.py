"""One rank's data is wrong: every rank hears of it in the same words, and not one file is written."""

import os

import pytest

import shardkeep as sk
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.faults.bad_states import CASES, fail_in_turn
from tests.faults.scene import assert_saved, checkpoint_at, names_in, no_leaks, save_all


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("there", ["a checkpoint", "nothing"])
def test_every_rank_raises_the_same(place, case, there):
    """Every rank raises the same error with rank and key; no file is added, and the same ranks can save right after."""
    bad = CASES[case]
    if there == "a checkpoint":
        assert_saved(save_all(3, place, 0))
    before = names_in(place) if os.path.exists(place) else set()
    with no_leaks():
        outcomes = thread_outcomes(
            3,
            lambda world: sk.save(
                bad.state(world.rank), place, overwrite=True, check_replicas=bad.check_replicas, group=world
            ),
        )
    for outcome in outcomes:
        assert type(outcome) is type(outcomes[0])
        assert isinstance(outcome, bad.error), outcome
        assert str(outcome) == str(outcomes[0])
        for words in bad.says:
            assert words in str(outcome)
    assert (names_in(place) if os.path.exists(place) else set()) == before
    if there == "a checkpoint":
        assert checkpoint_at(place) == 0
    assert_saved(save_all(3, place, 1))
    assert checkpoint_at(place) == 1


def test_every_rank_raises_the_same_on_real_ranks(rank_pool, place):
    assert_saved(save_all(3, place, 0))
    before = names_in(place)
    heard = rank_pool.run(3, fail_in_turn, place)
    assert heard[1] == heard[0]
    assert heard[2] == heard[0]
    for (kind, message, _), bad in zip(heard[0], CASES.values(), strict=True):
        assert issubclass(getattr(sk, kind), bad.error)
        for words in bad.says:
            assert words in message
    assert names_in(place) == before
    assert checkpoint_at(place) == 0
