"""`sk.open` and `sk.load` of torch's layout: what is read, and when."""

import dataclasses
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from msgspec import structs
from torch.distributed.tensor import Shard

import shardkeep as sk
from shardkeep import dcp
from shardkeep.engine import torch_source as torch_values
from shardkeep.errors import CheckpointException, ChecksumMismatch, DamagedCheckpoint
from shardkeep.format.boxes import ints, pack
from shardkeep.format.index import decode_index, encode_index
from shardkeep.layouts.torch import Columns, sealed, unsealed
from tests.dcp.sides import quietly
from tests.toolkit.samples import mesh_of, numbered, seen, spread_out


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
    raw, _ = unsealed((tmp_path / ".metadata").read_bytes(), "here")
    (tmp_path / ".metadata").write_bytes(sealed([raw + b"shardkeep columns " + bytes(16)]))
    into = {"w": torch.zeros(3), "step": 0}
    quietly(dcp.load, into, checkpoint_id=tmp_path, no_dist=True)
    assert (into["w"].tolist(), into["step"], sk.open(tmp_path)["step"]) == ([1, 1, 1], 7, 7)
    old = tmp_path / f".metadata.{'0' * 32}.columns"
    old.write_bytes(b"old")
    os.utime(old, (0, 0))
    quietly(dcp.save, {"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert not old.exists()


def save_of_everything(folder: str) -> None:
    """Save shards, replicas, an uneven part that some ranks do not have, and objects; in several files a rank."""
    mesh, rank = mesh_of(dist.get_world_size()), dist.get_rank()
    state = {
        "cut": spread_out(numbered(10, 6), mesh, Shard(0)),
        "across": spread_out(numbered(3, 8, dtype=torch.bfloat16), mesh, Shard(1)),
        "few": spread_out(numbered(2), mesh, Shard(0)),
        "nested": {"copy": numbered(5, 5), "list": [torch.tensor(3), {"step": 7}], "\u00fc": "text"},
        f"own{rank}": torch.full((4,), float(rank)),
        "bytes": b"raw",
    }
    quietly(dcp.save, state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2))


def described(folder: Path) -> tuple[object, ...]:
    opened = sk.open(folder)
    index, files = opened.index, [file.name for file in opened.record.files]

    def place(row: int, tensor: int) -> tuple[str, str, int]:
        box = index.chunks.boxes.box(row, len(index.shape(tensor)))
        return str(box), files[index.chunks.file[row]], int(index.chunks.start[row])

    count, tensors = len(index.chunks), range(len(index.keys))
    chunks = [sorted(place(row, each) for row in range(*index.chunk_rows(each).indices(count))) for each in tensors]
    forms = [(key.decode(), index.dtype(row), index.shape(row)) for row, key in enumerate(index.keys.all())]
    record = structs.replace(opened.record, index=None, files=sorted(opened.record.files, key=lambda file: file.name))
    return record, forms, chunks, seen(opened.to_dict(allow_pickle=True))


def test_columns_say_what_the_pickle_says(tmp_path: Path, rank_pool) -> None:
    """What is opened from the columns of `.metadata` is what is opened from its pickle, which torch reads."""
    folder, path = tmp_path / "ck", tmp_path / "ck" / ".metadata"
    rank_pool.run(3, save_of_everything, str(folder))
    whole = path.read_bytes()
    raw, behind = unsealed(whole, "here")
    sk.open(folder).verify()
    of_columns = described(folder)
    path.write_bytes(sealed([b"no pickle at all"], behind))  # which is not looked at, except by `verify`
    os.utime(path, ns=(path.stat().st_atime_ns, time_of := path.stat().st_mtime_ns))
    unread = described(folder)
    with pytest.raises(DamagedCheckpoint):
        sk.open(folder).verify()
    path.write_bytes(sealed([raw]))
    os.utime(path, ns=(time_of, time_of))
    of_pickle = described(folder)
    assert unread[1:] == of_columns[1:] == of_pickle[1:]
    assert unread[0] == of_pickle[0]


def test_what_only_torch_reads_has_no_columns(tmp_path: Path) -> None:
    made = quietly(torch.quantize_per_tensor, torch.arange(6.0), 0.5, 0, torch.qint8)
    for name, odd in (("quantized", made), ("empty", torch.zeros(0, 3))):
        folder = tmp_path / name
        quietly(dcp.save, {"odd": odd, "w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
        assert not unsealed((folder / ".metadata").read_bytes(), "here")[1]
        into = {"odd": torch.empty_like(odd), "w": torch.zeros(2)}
        quietly(dcp.load, into, checkpoint_id=folder, no_dist=True)
        assert torch.equal(into["odd"], odd)
        assert into["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": ["__0_0.distcp"] * 2},
        {"items": pack(np.array([[0], [0]]))},
        {"items": pack(np.array([[0, 0], [1 << 40, 1 << 40]]))},
        {"items": b""},
        {"items": bytes((77, 1))},
        {"objects": pack(np.array([[5], [0], [9]]))},
        {"objects": pack(np.array([[0], [0], [-9]]))},
        {"objects": b""},
        {"index": b"SKINDEX1"},
        {"sums": {"__0_0.distcp": "few"}},
    ],
)
def test_hostile_columns_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Columns that contradict each other or the files raise our errors, or the pickle is read instead."""
    quietly(dcp.save, {"w": torch.ones(3), "v": torch.ones(3), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    raw, behind = unsealed(path.read_bytes(), "here")
    fields = dict(zip(Columns.__struct_fields__, msgspec.msgpack.decode(behind), strict=True))
    path.write_bytes(sealed([raw], msgspec.msgpack.encode(list({**fields, **change}.values()))))
    into, expected = {"w": torch.zeros(3), "v": torch.zeros(3), "step": 0}, ([1, 1, 1], 7)
    try:
        quietly(dcp.load, into, checkpoint_id=tmp_path, no_dist=True)
    except CheckpointException:
        expected = [0, 0, 0], 0
    assert (into["w"].tolist(), into["step"]) == expected
    with pytest.raises(DamagedCheckpoint):
        sk.open(tmp_path).to_dict()


def test_verify_compares_the_columns_with_the_pickle(tmp_path: Path) -> None:
    """Torch reads the pickle, and shardkeep the columns: if they name different bytes for a tensor, that is damage."""
    quietly(dcp.save, {"a": torch.zeros(3), "b": torch.ones(3), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    sk.open(tmp_path).verify()
    path = tmp_path / ".metadata"
    raw, behind = unsealed(path.read_bytes(), "here")
    fields = msgspec.msgpack.decode(behind)
    index = decode_index(fields[0], where="here")
    swapped = index.chunks.take(np.array([1, 0]))
    fields[0] = encode_index(dataclasses.replace(index, chunks=swapped))
    fields[1] = pack(ints(fields[1]).reshape(2, 2)[:, [1, 0]])
    path.write_bytes(sealed([raw], msgspec.msgpack.encode(fields)))
    assert sk.open(tmp_path)["a"][:].tolist() == [1, 1, 1]
    with pytest.raises(DamagedCheckpoint, match="its columns, which shardkeep reads, and its pickle"):
        sk.open(tmp_path).verify()


def test_the_collector_does_not_scan_a_load_again_and_again(tmp_path: Path) -> None:
    """While thousands of tensors are compared with the checkpoint, the cycle collector runs a few times, not once for each hundred."""
    count, runs = 10_000, list[str]()
    quietly(dcp.save, {f"w{n}": torch.ones(2) for n in range(count)}, checkpoint_id=tmp_path, no_dist=True)
    into = {f"w{n}": torch.zeros(2) for n in range(count)}

    def note(phase: str, info: object) -> None:
        runs.append(phase)

    gc.callbacks.append(note)
    try:
        quietly(dcp.load, into, checkpoint_id=tmp_path, no_dist=True)
    finally:
        gc.callbacks.remove(note)
    assert runs.count("start") < count / 200
    assert gc.isenabled()
    assert all(each.tolist() == [1, 1] for each in into.values())
