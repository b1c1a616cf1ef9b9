"""`sk.open` and `sk.load` of torch's layout: what is read, and when; through columns and without them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as theirs

import shardkeep as sk
from shardkeep import dcp
from shardkeep.engine import torch_source as torch_contents
from shardkeep.engine import torch_source as torch_values
from shardkeep.errors import ChecksumMismatch, DamagedCheckpoint
from tests.dcp.sides import quietly

COUNT = 1050


def state() -> dict[str, Any]:
    """Many tensors, some of them odd, and objects."""
    return {
        "model": {f"layer.{n}.weight": torch.full((n % 3, 2), float(n)) for n in range(COUNT)},
        "scalar": torch.tensor(5),
        "list": [torch.ones(2), {"a": 1}],
        "é": {"x": np.int64(3), "y": {1, 2}},
        "step": 7,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with columns."""
    where = tmp_path_factory.mktemp("saved") / "ck"
    quietly(dcp.save, state(), checkpoint_id=where, no_dist=True)
    return where


def without_columns(where: Path, to: Path) -> Path:
    """The same checkpoint, in links, as it is when its columns are lost."""
    to.mkdir()
    for name in os.listdir(where):
        if not name.endswith(".columns"):
            os.link(where / name, to / name)
    return to


def test_columns_and_pickle_open_alike(saved: Path, tmp_path: Path) -> None:
    """
    The record, the index and all that is in it are the same, however they were read.
    """
    bare = without_columns(saved, tmp_path / "bare")
    one, other = sk.open(saved), sk.open(bare)
    assert one.record == other.record
    assert list(one) == list(other)
    assert (one.index.tree, one.index.keys.all()) == (other.index.tree, other.index.keys.all())
    for mine, its in zip(one.index.tensors.columns(), other.index.tensors.columns(), strict=True):
        assert np.array_equal(mine, its)
    assert np.array_equal(one.index.chunk_ends, other.index.chunk_ends)
    assert np.array_equal(one.index.chunks.file, other.index.chunks.file)
    assert np.array_equal(one.index.chunks.offsets, other.index.chunks.offsets)
    made, also = one.to_dict(allow_pickle=True), other.to_dict(allow_pickle=True)
    for found in (made, also):
        assert found["step"] == 7
        assert found["é"] == {"x": 3, "y": {1, 2}}
        assert found["list"][1] == {"a": 1}
        assert found["list"][0].tolist() == [1, 1]
        for key, value in state()["model"].items():
            assert torch.equal(found["model"][key], value)
    one.verify()
    other.verify()


@pytest.mark.parametrize("columns", [True, False])
def test_metadata_are_read_once(saved: Path, tmp_path: Path, columns: bool) -> None:
    """
    `open`, and `load` on the rank that finds the checkpoint, read and decode what it holds one time.
    """
    where = saved if columns else without_columns(saved, tmp_path / "bare")
    with mock.patch.object(torch_contents, "read_index", wraps=torch_contents.read_index) as read:
        assert sk.open(where)["step"] == 7
        assert read.call_count == 1
        into = {"step": 0, "scalar": torch.tensor(0)}
        sk.load(into, where, strict=False)
        assert read.call_count == 2
    assert into == {"step": 7, "scalar": torch.tensor(5)}


def test_an_object_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """
    A damaged object hinders nobody who does not ask for it; whoever does is told, as `verify` is.
    """
    objects = {f"o{n}": bytes([n]) * (900 << 10) for n in range(4)}
    quietly(theirs.save, {"w": torch.ones(3), **objects}, checkpoint_id=str(tmp_path / "torch"), no_dist=True)
    quietly(dcp.save, {"w": torch.ones(3), **objects}, checkpoint_id=str(tmp_path / "ours"), no_dist=True)
    for name, damaged in (("torch", DamagedCheckpoint), ("ours", ChecksumMismatch)):
        [path] = (tmp_path / name).glob("*.distcp")
        data = bytearray(path.read_bytes())
        at = data.find(objects["o3"][:64])
        data[at + 100_000] ^= 0xFF
        path.write_bytes(data)
        opened = sk.open(tmp_path / name)
        assert set(opened) == {"w", *objects}
        assert opened["w"].tensor().tolist() == [1, 1, 1]
        assert opened["o0"] == objects["o0"]
        assert opened["o0"] == objects["o0"]
        with pytest.raises(DamagedCheckpoint):
            opened.verify()
        if name == "ours":
            with pytest.raises(damaged):
                opened["o3"]


def test_many_small_objects_are_read_together(tmp_path: Path) -> None:
    """
    A thousand objects, asked for one by one in the order of their names, are read in a few reads.
    """
    objects = {f"o{n}": {"value": n} for n in range(1000)}
    quietly(dcp.save, objects, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True)  # fmt: skip
    opened = sk.open(tmp_path)
    with mock.patch.object(torch_values, "read_raw", wraps=torch_values.read_raw) as read:
        assert {key: opened[key] for key in sorted(objects)} == objects
    assert 1 <= read.call_count <= 20


def test_verify_reads_the_pickle_too(saved: Path, tmp_path: Path) -> None:
    """
    Damage to `.metadata` that opening does not see, because there are columns, is found by `verify`.
    """
    where = without_columns(saved, tmp_path / "ck")
    [columns] = saved.glob(".metadata.*.columns")
    os.link(columns, where / columns.name)
    data = bytearray((where / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (where / ".metadata").unlink()
    (where / ".metadata").write_bytes(data)
    opened = sk.open(where)
    assert opened["step"] == 7
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata"):
        opened.verify()
