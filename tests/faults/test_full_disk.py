"""A real file system that is really full."""

import errno
import os

import pytest
import torch

import shardkeep as sk
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.engine.samples import bits
from tests.faults.scene import OPTIONS, assert_saved, checkpoint_at, files_of_checkpoint, names_in, no_leaks, save_all

PAGE = 4096


@pytest.fixture
def tiny(tiny_disk):
    return str(tiny_disk / "ck")


@pytest.fixture(autouse=True)
def _found_late(monkeypatch):
    """A disk may fill up after a save was told that there is room: as if nobody had asked."""
    monkeypatch.setattr("shardkeep.storage.local.LocalStore.free_nbytes", lambda self: None)


def free_pages(place):
    status = os.statvfs(os.path.dirname(place))
    return status.f_bavail * status.f_frsize // PAGE


def big_state(rows, ranks=1, rank=0):
    w = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    share = rows // ranks
    mine = sk.ShardedBox(w[rank * share : (rank + 1) * share], offsets=(rank * share, 0), shape=w.shape)
    return {"w": mine if ranks > 1 else w, "rows": rows}


@pytest.mark.parametrize("reserves", [True, False], ids=["fallocate", "no-fallocate"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_that_does_not_fit(tiny, monkeypatch, ranks, reserves):
    """StorageFull on every rank, with file and errno, at reserving or in a write; all is as before, and a smaller save works."""
    if not reserves:
        monkeypatch.setattr("shardkeep.storage.local.reserve", lambda fd, nbytes: None)

    def save(rows):
        return thread_outcomes(
            ranks,
            lambda world: sk.save(
                big_state(rows, ranks, world.rank), tiny, overwrite=True, group=world, options=OPTIONS
            ),
        )

    assert_saved(save(768))
    before, free = names_in(tiny), free_pages(tiny)
    with no_leaks():
        outcomes = save(1536)
    for outcome in outcomes:
        assert type(outcome) is sk.StorageFull
        assert outcome.errno == errno.ENOSPC
        assert outcome.details["name"].endswith(".safetensors")
        assert f"{tiny}/{outcome.details['name']}" in str(outcome)
        assert "free some space" in outcome.hint
    assert (names_in(tiny), free_pages(tiny)) == (before, free)
    ck = sk.open(tiny)
    ck.verify()
    assert bits(ck.to_dict()) == bits(big_state(768))

    assert_saved(save(960))
    assert bits(sk.open(tiny).to_dict()) == bits(big_state(960))
    assert names_in(tiny) == files_of_checkpoint(tiny)


def test_any_amount_of_free_space(tiny):
    """From no page to just enough: StorageFull and nothing changed, or success. Claim, data, index and record run out of space."""
    save_all(1, tiny, 0)
    before = free_pages(tiny)
    save_all(1, tiny, 1)
    need = (8 << 20) // PAGE - before + 4
    filler = os.path.join(os.path.dirname(tiny), "filler")
    ran_out = set()
    latest, spare = 1, 0
    while spare <= need:
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (free_pages(tiny) - spare) * PAGE)
        assert free_pages(tiny) == spare
        names = names_in(tiny)
        with no_leaks():
            [outcome] = save_all(1, tiny, 2 + spare)
        if isinstance(outcome, BaseException):
            assert type(outcome) is sk.StorageFull, spare
            ran_out.add(outcome.details["name"].split("-")[0])
            assert names_in(tiny) == names, spare
        else:
            latest = 2 + spare
        assert checkpoint_at(tiny) == latest, spare
        assert names_in(tiny) == files_of_checkpoint(tiny), spare
        os.unlink(filler)
        # Near both ends every page counts; in the middle the large file is what does not fit.
        spare += 1 if spare < 12 or spare > need - 40 else 17
    assert ran_out == {"claim", "model", "optim", "index", "shardkeep.json"}
    assert latest == 2 + need
