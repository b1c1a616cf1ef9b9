"""A call to the operating system that goes wrong, or is the last one, for every call of an overwriting save."""

import errno
import itertools
import os
import signal

import pytest

import shardkeep as sk
from shardkeep.storage.local import LocalStore
from tests.faults.calls import ASKING, CHANGING, strike_at
from tests.faults.doomed import level_at, save_and_die_at, save_levels
from tests.faults.forks import Fork
from tests.faults.scene import assert_saved, checkpoint_at, files_of_checkpoint, names_in, no_leaks, save_all


@pytest.mark.parametrize("ranks", [1, 3])
def test_killed_at_any_call(place, ranks):
    """A process killed between any two calls leaves a whole checkpoint, old or new; the next save removes its files."""
    assert_saved(save_levels(place, 0, ranks))
    earlier, kept = 0, set()
    # Three ranks do not take the same order twice, so that every call of theirs would say little more than some.
    for n in itertools.count(step=1 if ranks == 1 else 4):
        with Fork(save_and_die_at, place, ranks, earlier + 1, n) as fork:
            ended = fork.join()
            struck = fork.said()
        if not struck:
            assert ended == 0
            assert level_at(place) == earlier + 1
            break
        assert ended == -signal.SIGKILL
        found = level_at(place)
        assert found in (earlier, earlier + 1), struck
        kept.add(found - earlier)
        earlier += 2
        assert_saved(save_levels(place, earlier, ranks), f"{n}: {struck}")
        assert names_in(place) == files_of_checkpoint(place), f"{n}: {struck}"
    assert n >= 50
    assert kept == {0, 1}


@pytest.mark.parametrize(("number", "done"), [(errno.EIO, False), (errno.EIO, True), (errno.ENOSPC, False)])
def test_any_call_fails(place, number, done):
    """A call that fails, even after its work is done, loses no checkpoint: an error that leaves nothing, or success."""

    def strike(name, call):
        if done and name not in ("open", "scandir"):  # what they return would be lost
            call()
        raise OSError(number, os.strerror(number))

    save_all(1, place, 0)
    failures = 0
    for n in itertools.count():
        earlier = 2 * n
        store = LocalStore(place)
        with no_leaks(), strike_at(n, strike, CHANGING + ASKING) as made:
            [outcome] = save_all(1, store, earlier + 1)
        if len(made) <= n:
            assert_saved([outcome])
            assert checkpoint_at(place) == earlier + 1
            break
        struck = f"{n}: {made[n]}"
        found = checkpoint_at(place)
        if isinstance(outcome, BaseException):
            failures += 1
            assert type(outcome) is (sk.StorageFull if number == errno.ENOSPC else sk.StorageError), struck
            assert outcome.errno == number, struck
            assert place in str(outcome), struck
            assert ".tmp" not in str(outcome), struck
            replaced = any(call.startswith("replace") for call in made[: n + done])
            assert found == earlier + replaced, struck
            if not replaced and not made[n].startswith("unlink"):
                assert names_in(place) == files_of_checkpoint(place), struck
        else:
            assert found == earlier + 1, struck
        assert_saved(save_all(1, place, earlier + 2), struck)
        left = names_in(place) - files_of_checkpoint(place)
        # A temporary file that the disk would not let go of stays while the process that made it lives.
        assert left <= {os.path.basename(made[n])}, struck
        assert not left or (made[n].startswith("unlink") and not done), struck
        for name in left:
            os.unlink(os.path.join(place, name))
    assert n >= 50
    assert failures >= 30
