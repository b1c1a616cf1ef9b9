"""Checkpoints of every layout are read by the same path: the same requests, windows and order of files."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as theirs

import shardkeep as sk
from shardkeep import dcp
from shardkeep.engine import fill as engine_fill
from shardkeep.engine import load_session, workers
from shardkeep.engine.fill import _limits
from shardkeep.engine.workers import ACCELERATOR_WINDOW_NBYTES
from shardkeep.options import Options
from shardkeep.storage.local import LocalStore
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.dcp.sides import quietly

LAYOUTS = ["native", "dcp", "torch", "safetensors"]


@pytest.fixture(params=LAYOUTS)
def saved(request, tmp_path):
    state = {f"w{n}": torch.arange(40.0).reshape(5, 8) + n for n in range(4)}
    where = tmp_path / "ck"
    if request.param == "native":
        sk.save(state, where)
    elif request.param == "safetensors":
        sk.save(state, tmp_path / "native")
        sk.export(tmp_path / "native", where, max_shard_bytes=200)
    else:
        kind = dcp if request.param == "dcp" else theirs
        writer = kind.FileSystemWriter(str(where), single_file_per_rank=False)
        quietly(kind.save, state, storage_writer=writer, no_dist=True)
    return where, state


def plans_of_load(monkeypatch, where, state, **changes):
    calls = []
    read_files = engine_fill.read_files

    def spy(files, plans, *args, **named):
        calls.append({"files": [plan.file for plan in plans], **named})
        return read_files(files, plans, *args, **named)

    monkeypatch.setattr(engine_fill, "read_files", spy)
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    source = sk.open(where).source
    rows = np.array([source.index.tensor_rows[key] for key in into], np.int64)
    sizes = np.array([tuple(value.shape) for value in into.values()], np.int64)
    boxes = engine_fill.Boxes(np.zeros_like(sizes), sizes)
    engine_fill.fill(source, rows, boxes, list(into.values()), Options(io_threads=2), **changes)
    for key, value in state.items():
        assert torch.equal(into[key], value)
    return calls


def test_stores_get_the_requests_they_like_and_ranks_begin_with_different_files(saved, monkeypatch):
    """A store gets as many requests as it likes, whatever the layout, and each rank begins with another file."""
    where, state = saved
    monkeypatch.setattr(workers, "preferred_requests", lambda store, threads: 7 * threads)
    [first] = plans_of_load(monkeypatch, where, state, first_file=0.0)
    [second] = plans_of_load(monkeypatch, where, state, first_file=0.5)
    assert first["threads"] == 14
    half = len(first["files"]) // 2
    assert second["files"] == first["files"][half:] + first["files"][:half]
    with mock.patch.object(load_session, "fill", wraps=load_session.fill) as fill:
        sk.load({key: torch.zeros_like(value) for key, value in state.items()}, where)
    assert [call.kwargs["first_file"] for call in fill.call_args_list] == [0.0]


@pytest.mark.parametrize(
    ("where", "remote", "expected"),
    [("disk", False, [0, 0, 0, 0]), ("disk", True, [0, 0, 0.5, 0.5]), ("memory", False, [0, 0.25, 0.5, 0.75])],
)
def test_ranks_with_one_page_cache_begin_with_the_same_file(tmp_path, monkeypatch, where, remote, expected):
    """All of them copy what one has read ahead. Other ranks, and other machines, begin with different files."""
    place = tmp_path if where == "disk" else sk.MemoryStore()
    sk.save({"w": torch.ones(5)}, place)
    monkeypatch.setattr(LocalStore, "remote", remote)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    options = Options(share_reads=False)
    with mock.patch.object(load_session, "fill", wraps=load_session.fill) as fill:
        run_thread_ranks(4, lambda world: sk.load({"w": torch.zeros(5)}, place, group=world, options=options))
    assert sorted(call.kwargs["first_file"] for call in fill.call_args_list) == expected


def test_windows_are_larger_on_accelerators(saved):
    where, _ = saved
    source = sk.open(where).source
    assert (
        _limits(source, [torch.empty(1, device="meta")], Options(host_budget_bytes=1 << 30))[1]
        == ACCELERATOR_WINDOW_NBYTES
    )


def test_starts_are_byte_offsets(saved):
    where, state = saved
    source = sk.open(where).source
    source.locate(np.arange(len(source.index.keys)))
    for key, row in source.index.tensor_rows.items():
        [chunk] = range(*source.index.chunk_rows(row).indices(len(source.index.chunks)))
        entry = source.record.files[int(source.index.chunks.file[chunk])]
        start = entry.header_nbytes + int(source.index.chunks.start[chunk])
        stored = (where / entry.name).read_bytes()[start : start + state[key].nbytes]
        assert stored == state[key].numpy().tobytes()


def test_axes_in_another_order_and_slices_of_them(tmp_path):
    whole = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    quietly(theirs.save, {"w": whole}, checkpoint_id=str(tmp_path / "ck"), no_dist=True)
    opened = sk.open(tmp_path / "ck")
    assert torch.equal(opened["w"].tensor(), whole)
    assert torch.equal(opened["w"][1:3, :, 2], whole[1:3, :, 2])
    into = {"w": torch.zeros(4, 2, 3)}
    sk.load(into, tmp_path / "ck")
    assert torch.equal(into["w"], whole)
