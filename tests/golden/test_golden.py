"""Checkpoints that earlier versions wrote are read by this one."""

import pytest
import torch

import shardkeep as sk
from tests.engine.samples import bits
from tests.golden.make import HERE, full_state

VERSIONS = sorted(path.name for path in HERE.glob("v*"))


def test_there_is_one_for_every_version():
    """
    Every format version so far has its golden checkpoint.
    """
    from shardkeep.format.record import VERSION

    assert [f"v{number}" for number in range(1, VERSION + 1)] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoints_read_as_they_were_written(version):
    """
    Whole tree, tied tensors, per-rank values, record and checksums.
    """
    ck = sk.open(HERE / version)
    tree = ck.to_dict()

    assert tree.pop("rng") == {0: 0, 1: 10}
    assert bits(tree) == bits(full_state())
    assert tree["model"]["weight"] is tree["model"]["tied"]
    assert (ck.step, ck.meta, ck.record.world_size) == (7, {"golden": True}, 2)
    assert [str(box) for box in ck["model.weight"].boxes] == ["[0:4,0:5]", "[4:7,0:5]"]
    ck.verify()


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoints_load_in_place(version):
    """
    A template of another layout is filled.
    """
    weight = torch.zeros(7, 5)
    sk.load({"model": {"weight": weight}}, HERE / version, include="model.weight")
    assert torch.equal(weight, full_state()["model"]["weight"])
