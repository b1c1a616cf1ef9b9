"""What a job tidies up in a bucket, and what that costs."""

from collections.abc import Callable

import pytest
import torch

import shardkeep as sk
from shardkeep.layouts import orphans as leftovers
from shardkeep.storage.object_store import ObjectStore

Opened = Callable[..., ObjectStore]


def test_places_that_are_gone_cost_nothing(s3_place: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was found empty is not looked at again, though the service still lists it."""
    root, looked = s3_place(), []
    with sk.Checkpointer(root, every_steps=1, keep_last=1, asynchronous=False) as ckpt:
        real_survey = leftovers.survey
        monkeypatch.setattr(
            leftovers, "survey", lambda store, *more: looked.append(store.url) or real_survey(store, *more)
        )
        for step in range(1, 6):
            ckpt.step(step, {"w": torch.ones(3)})
            ckpt.wait()
        assert ckpt.all_steps() == [5]
    assert max(map(looked.count, looked)) == 3  # twice by its own save, and once when it was gone
