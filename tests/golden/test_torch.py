"""Checkpoints that torch itself wrote, by version (`make_torch.py`), are read by this one through either door."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

import shardkeep as sk
from shardkeep import dcp
from shardkeep.layouts import torch_values
from tests.engine.samples import bits
from tests.golden.make import HERE
from tests.golden.make_torch import state_of
from tests.protocol.samples import quietly

VERSIONS = sorted(path.name for path in (HERE / "torch").iterdir())


def emptied(value):
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [emptied(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("version", VERSIONS)
def test_torchs_checkpoints_load(version):
    expected = state_of()
    loaded = emptied(expected)
    quietly(dcp.load, loaded, checkpoint_id=HERE / "torch" / version)
    assert bits(loaded) == bits(expected)
    whole = sk.open(HERE / "torch" / version).to_dict()
    assert {key: bits(each) for key, each in whole["model"].items()} == {
        key: bits(each) for key, each in expected["model"].items()
    }
    assert whole["step"] == expected["step"]


def test_what_is_written_can_be_read_by_older_versions(tmp_path, monkeypatch):
    """The properties of a tensor are pickled without the strides, which torch before 2.15 does not take."""
    monkeypatch.setattr(torch_values, "_HAS_STRIDES", True)  # as with 2.15
    quietly(dcp.save, state_of(), checkpoint_id=tmp_path)
    lengths = []
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda _, state: lengths.append(len(state)))
    pickle.loads((tmp_path / ".metadata").read_bytes(), fix_imports=False)
    assert set(lengths) == {5}
