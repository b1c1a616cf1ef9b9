"""The checkpointer object: torch's cannot save at all; ours does what the functions do."""

import pathlib
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torchs
from torch.distributed.checkpoint._checkpointer import _Checkpointer as Theirs

from shardkeep.dcp._checkpointer import _Checkpointer
from shardkeep.dcp.metadata import Metadata
from tests.protocol.samples import Counter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def made(place, kind=_Checkpointer, **options):
    return kind(torchs.FileSystemWriter(place), torchs.FileSystemReader(place), **options)


def test_torchs_own_cannot_save(tmp_path):
    """Recorded: it hands `save` an argument that it does not take."""
    with pytest.raises(TypeError, match="coordinator_rank"):
        made(tmp_path, Theirs).save({"w": torch.ones(2)})


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_what_it_saves_it_loads(tmp_path, way):
    """Tensors and objects, saved at once or in the background; torch's loads it too."""
    checkpointer = made(tmp_path, no_dist=True)
    saved = getattr(checkpointer, way)({"w": torch.arange(3.0), "c": Counter(7)})
    metadata = saved if way == "save" else saved.result()
    assert type(metadata) is Metadata
    assert sorted(metadata.state_dict_metadata) == ["c.count", "c.log", "w"]
    for kind in (_Checkpointer, Theirs):
        state = {"w": torch.zeros(3), "c": Counter(0)}
        made(tmp_path, kind).load(state)
        assert (state["w"].tolist(), state["c"].count) == ([0, 1, 2], 7)


def test_it_keeps_what_it_was_given(tmp_path):
    options = {"coordinator_rank": 1, "no_dist": True, "load_planner": torchs.DefaultLoadPlanner()}
    assert set(vars(made(tmp_path, **options))) == set(vars(made(tmp_path, Theirs, **options)))
    assert made(tmp_path, **options).coordinator_rank == 1


class Led(torchs.FileSystemWriter):
    def finish(self, metadata, results):
        super().finish(metadata, results)
        (pathlib.Path(self.path) / "by").write_text(str(torch.distributed.get_rank()))


def save_and_load(place):
    warnings.simplefilter("ignore")
    rank = torch.distributed.get_rank()
    checkpointer = _Checkpointer(Led(place), torchs.FileSystemReader(place), coordinator_rank=1)
    checkpointer.save({f"w{rank}": torch.full((2,), float(rank)), "c": Counter(5)})
    state = {"w0": torch.zeros(2), "w1": torch.zeros(2), "c": Counter(0)}
    checkpointer.load(state)
    return (
        (pathlib.Path(place) / "by").read_text(),
        state["w0"].sum().item(),
        state["w1"].sum().item(),
        state["c"].count,
    )


def test_the_coordinator_is_who_was_asked_for(rank_pool, tmp_path):
    """On two ranks with rank 1 deciding, rank 1 finishes the checkpoint, and both load all of it."""
    assert rank_pool.run(2, save_and_load, str(tmp_path)) == [("1", 0.0, 2.0, 5)] * 2
