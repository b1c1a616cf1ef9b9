"""`sk.open` and `sk.load` of torch's layout: what is read, and when."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as theirs

import shardkeep as sk
from shardkeep import dcp
from shardkeep.engine import torch_source as torch_values
from shardkeep.errors import ChecksumMismatch, DamagedCheckpoint
from shardkeep.format.pickles import sealed, unsealed
from tests.dcp.sides import quietly


def test_an_object_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """A damaged object hinders nobody who does not ask for it; whoever does is told, as `verify` is."""
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
    """A thousand objects, asked for one by one in the order of their names, are read in a few reads."""
    objects = {f"o{n}": {"value": n} for n in range(1000)}
    quietly(dcp.save, objects, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True)  # fmt: skip
    opened = sk.open(tmp_path)
    with mock.patch.object(torch_values, "read_items", wraps=torch_values.read_items) as read:
        assert {key: opened[key] for key in sorted(objects)} == objects
    assert 1 <= read.call_count <= 20


def test_objects_of_other_files_stay_unread_and_threads_may_ask(tmp_path: Path, monkeypatch) -> None:
    """An object costs a read of its own file only, and threads that ask at the same time each get theirs."""
    objects = {f"o{n}": {"value": n} for n in range(20)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    quietly(dcp.save, objects, storage_writer=writer, planner=planner, no_dist=True)
    opened = sk.open(tmp_path)
    with mock.patch.object(torch_values, "read_items", wraps=torch_values.read_items) as read:
        assert opened["o7"] == {"value": 7}
    assert [len(call.args[1]) for call in read.call_args_list] == [1]

    monkeypatch.setattr(torch_values, "_KEPT_OBJECTS_NBYTES", 0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            asked = [f"o{n % 20}" for n in range(200)]
            assert list(threads.map(opened.__getitem__, asked)) == [objects[key] for key in asked]
    finally:
        sys.setswitchinterval(before)


def test_an_old_copy_of_the_metadata_is_ignored(tmp_path: Path) -> None:
    """A `.metadata` that older versions wrote ends in two digests, of which the first named a second file."""
    quietly(dcp.save, {"w": torch.ones(3), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    raw = unsealed((tmp_path / ".metadata").read_bytes(), "here")
    (tmp_path / ".metadata").write_bytes(sealed(raw + b"shardkeep columns " + bytes(16)))
    into = {"w": torch.zeros(3), "step": 0}
    quietly(dcp.load, into, checkpoint_id=tmp_path, no_dist=True)
    assert (into["w"].tolist(), into["step"], sk.open(tmp_path)["step"]) == ([1, 1, 1], 7, 7)
    old = tmp_path / f".metadata.{'0' * 32}.columns"
    old.write_bytes(b"old")
    os.utime(old, (0, 0))
    quietly(dcp.save, {"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert not old.exists()
