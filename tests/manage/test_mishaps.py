"""What users, disks and other jobs do to a Checkpointer."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkeep as sk
from shardkeep.manage.timelines import timeline_of
from tests.manage.scene import checkpointer, empty_state, state_at, train


def test_steps_that_go_down_are_refused(tmp_path: Path) -> None:
    """As those that begin anew in each epoch: they would be older than what is there, and deleted at once."""
    with checkpointer(tmp_path, every_steps=10, keep_last=2) as ckpt:
        assert train(ckpt, range(1, 31)) == [10, 20, 30]
        for call in (ckpt.step, ckpt.save):
            with pytest.raises(sk.StateError, match="step 1 comes after step 30") as caught:
                call(1, state_at(1))
            assert "whole run" in str(caught.value)
        ckpt.wait()
        assert ckpt.all_steps() == [20, 30]
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        ckpt.restore_latest(empty_state())
        with pytest.raises(sk.StateError, match="comes after step 30"):
            ckpt.step(1, state_at(1), force=True)
        ckpt.restore(20, empty_state())
        assert train(ckpt, range(21, 23)) == [21, 22]
    with pytest.raises(sk.StateError, match="step 3 is to be saved, and step 4 was restored"):
        timeline_of([], (0, 4), 3, where="here")
