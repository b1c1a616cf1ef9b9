"""A save that fails after another one with the same writer, into the same directory."""

import os

import pytest
import torch
import torch.distributed as dist

from shardkeep.dcp import filesystem, state_dict_loader, state_dict_saver
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultSavePlanner
from tests.protocol.samples import quietly


class Failing(DefaultSavePlanner):
    """Fails on one rank, before anything is written there."""

    def __init__(self, rank):
        super().__init__()
        self.failing = rank

    def finish_plan(self, new_plan):
        if dist.get_rank() == self.failing:
            raise OSError("not now")
        return super().finish_plan(new_plan)


def save_twice(folder, failing):
    state = {"a": torch.ones(3), "b": torch.ones(4)}
    writer = filesystem.FileSystemWriter(folder)
    quietly(state_dict_saver.save, state, storage_writer=writer)
    dist.barrier()
    before = set(os.listdir(folder))
    dist.barrier()
    with pytest.raises(CheckpointException, match="not now"):
        quietly(state_dict_saver.save, state, storage_writer=writer, planner=Failing(failing))
    dist.barrier()
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    state_dict_loader.load(into, storage_reader=filesystem.FileSystemReader(folder))
    return before <= set(os.listdir(folder)), all(torch.equal(into[key], state[key]) for key in state)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_save_removes_nothing_of_the_one_before(rank_pool, tmp_path, failing):
    """
    A rank that wrote nothing for the failed save does not take back what it wrote for the one before.
    """
    assert rank_pool.run(2, save_twice, str(tmp_path), failing) == [(True, True)] * 2
