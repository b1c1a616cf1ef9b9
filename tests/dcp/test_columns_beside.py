"""The columns beside a large `.metadata`: used where they are its own and sound, never otherwise, and kept tidy."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as theirs

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dcp import state_dict_loader
from shardkeep.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
from shardkeep.errors import ChecksumMismatch
from shardkeep.layouts.column_metadata import columns_of
from shardkeep.layouts.lazy_dicts import LazyDict
from shardkeep.layouts.torch_values import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
from shardkeep.storage.file_systems import FileSystem
from tests.dcp.sides import failure_of, quietly
from tests.faults.calls import CHANGING, strike_at

COUNT = 1100


def state_of(k: float, count: int = COUNT) -> dict[str, Any]:
    """A state of many tensors, and an object, that say `k`."""
    return {"model": {f"layer.{n}.weight": torch.full((2,), k + n) for n in range(count)}, "step": [k]}


def save(where: Any, k: float, count: int = COUNT, **options: Any) -> None:
    """Save such a state on this process alone."""
    quietly(dcp.save, state_of(k, count), storage_writer=dcp.FileSystemWriter(where, **options), no_dist=True)


def level_at(where: Any, module: Any = dcp) -> float:
    """Say which `k` a few values of the checkpoint have."""
    wanted = ("layer.3.weight", "layer.1099.weight")
    into: dict[str, Any] = {"model": {key: torch.zeros(2) for key in wanted}, "step": None}
    quietly(module.load, into, checkpoint_id=str(where), no_dist=True)
    [k] = into["step"]
    assert all(into["model"][key].eq(k + int(key.split(".")[1])).all() for key in wanted)
    return float(k)


def columns_in(where: Any) -> list[str]:
    """The files with columns in a directory."""
    return sorted(name for name in os.listdir(where) if name.endswith(".columns"))


def is_lazy(where: Any) -> bool:
    """Say whether a reader takes the columns; what it says is what the pickle says."""
    found = dcp.FileSystemReader(where).read_metadata()
    lazy = {isinstance(each, LazyDict) for each in (found.state_dict_metadata, found.storage_data, found.planner_data)}
    with open(os.path.join(where, ".metadata"), "rb") as file:
        said = pickle.load(file)
    assert list(found.state_dict_metadata) == list(said.state_dict_metadata)
    assert list(found.planner_data.items()) == list(said.planner_data.items())
    assert list(found.storage_data) == list(said.storage_data)
    assert len(lazy) == 1
    return lazy.pop()


def test_a_large_checkpoint_has_columns_and_torch_reads_it(tmp_path: Path) -> None:
    """
    There is one file with columns, named by what `.metadata` ends with; torch does not mind. A small checkpoint has
    none.
    """
    save(tmp_path / "large", 1)
    [name] = columns_in(tmp_path / "large")
    assert re.fullmatch(r"\.metadata\.[0-9a-f]{32}\.columns", name)
    assert bytes.fromhex(name.split(".")[2]) in (tmp_path / "large" / ".metadata").read_bytes()[-100:]
    assert is_lazy(tmp_path / "large")
    assert level_at(tmp_path / "large") == level_at(tmp_path / "large", theirs) == 1
    save(tmp_path / "small", 1, 10)
    assert columns_in(tmp_path / "small") == []
    assert not is_lazy(tmp_path / "small")


def test_everything_is_loaded_through_columns(tmp_path: Path) -> None:
    """
    A load of all keys, and one that makes the state, give what was saved.
    """
    save(tmp_path, 1)
    into = state_of(0)
    quietly(dcp.load, into, checkpoint_id=tmp_path, no_dist=True)
    made = quietly(state_dict_loader._load_state_dict_from_keys, checkpoint_id=tmp_path)
    some = quietly(
        state_dict_loader._load_state_dict_from_keys, {"step", "model.layer.3.weight"}, checkpoint_id=tmp_path
    )
    assert some == {"step": [1], "model": {"layer.3.weight": some["model"]["layer.3.weight"]}}
    for found in (into, made):
        assert found["step"] == [1]
        assert len(found["model"]) == COUNT
        assert all(torch.equal(found["model"][key], value) for key, value in state_of(1)["model"].items())


def test_torchs_own_load_reads_through_our_reader(tmp_path: Path) -> None:
    """
    Torch's `load` with our reader gets metadata in torch's own classes, as ever.
    """
    save(tmp_path, 1)
    into: dict[str, Any] = {"model": {"layer.3.weight": torch.zeros(2)}, "step": None}
    quietly(theirs.load, into, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert into["step"] == [1]
    assert into["model"]["layer.3.weight"].tolist() == [4, 4]


def test_each_save_leaves_its_own_columns_only(tmp_path: Path) -> None:
    """
    An overwriting save takes the old columns away; one that is small leaves none.
    """
    save(tmp_path, 1)
    first = columns_in(tmp_path)
    save(tmp_path, 2)
    second = columns_in(tmp_path)
    assert len(first) == len(second) == 1
    assert first != second
    assert is_lazy(tmp_path)
    assert level_at(tmp_path) == 2
    save(tmp_path, 3, 10)
    assert columns_in(tmp_path) == []


def test_what_torch_writes_has_no_columns(tmp_path: Path) -> None:
    """
    After torch has overwritten the checkpoint, the columns that it left lying are not used; our next save removes them.
    """
    save(tmp_path, 1)
    left = columns_in(tmp_path)
    quietly(theirs.save, state_of(2), checkpoint_id=str(tmp_path), no_dist=True)
    assert columns_in(tmp_path) == left
    assert not is_lazy(tmp_path)
    assert level_at(tmp_path) == 2
    for name in left:
        os.utime(tmp_path / name, (0, 0))
    save(tmp_path, 3)
    assert len(columns_in(tmp_path)) == 1
    assert columns_in(tmp_path) != left


def test_columns_that_are_gone_damaged_or_anothers_are_not_used(tmp_path: Path) -> None:
    """
    Without them, with any byte of them changed, cut short, or with those of another save in their place, the pickle is
    read.
    """
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    [name], [other] = columns_in(tmp_path / "a"), columns_in(tmp_path / "b")
    path = tmp_path / "a" / name
    data = path.read_bytes()
    step = len(data) // 12
    for at in range(0, len(data), step):
        for bad in (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at]):
            path.write_bytes(bad)
            assert not isinstance(dcp.FileSystemReader(tmp_path / "a").read_metadata().storage_data, LazyDict)
    assert level_at(tmp_path / "a") == 1
    shutil.copy(tmp_path / "b" / other, path)
    assert not is_lazy(tmp_path / "a")
    shutil.copy(tmp_path / "b" / other, tmp_path / "a" / other)
    assert not is_lazy(tmp_path / "a")
    path.unlink()
    assert not is_lazy(tmp_path / "a")
    path.mkdir()
    assert not is_lazy(tmp_path / "a")
    path.rmdir()
    path.write_bytes(data)
    assert is_lazy(tmp_path / "a")
    assert level_at(tmp_path / "a") == 1


def test_metadata_put_back_find_their_own_columns_or_none(tmp_path: Path) -> None:
    """
    `.metadata` of an earlier save in the place of the new one are not read with the new one's columns.
    """
    save(tmp_path, 1)
    kept = (tmp_path / ".metadata").read_bytes()
    save(tmp_path, 2)
    (tmp_path / ".metadata").write_bytes(kept)
    assert not is_lazy(tmp_path)


def test_damage_to_the_pickle(tmp_path: Path) -> None:
    """
    With its columns sound, a checkpoint whose pickle is damaged still loads; without them, it is an error.
    """
    save(tmp_path, 1)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    assert level_at(tmp_path) == 1
    [name] = columns_in(tmp_path)
    (tmp_path / name).unlink()
    error = failure_of(dcp.FileSystemReader(tmp_path).read_metadata)
    assert isinstance(error, ChecksumMismatch)


def test_a_save_that_fails_takes_its_columns_back(tmp_path: Path) -> None:
    """
    Whichever of the last calls of the system fails, one checkpoint is there and its columns are used; those of a save
    that failed are gone.
    """
    save(tmp_path, 0)

    def strike(name: str, call: Any) -> Any:
        raise OSError(5, "struck")

    def attempt(n: int, k: int) -> tuple[list[str], bool]:
        with strike_at(n, strike, CHANGING) as made:
            try:
                save(tmp_path, k)
            except dcp.CheckpointException:
                return made, True
        return made, False

    k, outcomes = 1, set()
    calls, _ = attempt(-1, k)
    for n in range(len(calls) - 14, len(calls)):
        [before] = columns_in(tmp_path)
        made, failed = attempt(n, k + 1)
        found = level_at(tmp_path)
        outcomes.add((failed, found == k + 1))
        assert is_lazy(tmp_path)
        if found == k:
            assert failed, made[n]
            assert columns_in(tmp_path) == [before], made[n]
        for name in columns_in(tmp_path):  # what a removal failed to remove goes with the next save, if it is older
            os.utime(tmp_path / name, (0, 0))
        k += 2
        save(tmp_path, k)
        assert len(columns_in(tmp_path)) == 1, made[n]
    assert {(True, False), (False, True)} <= outcomes


def test_ranks_that_save_alone_have_columns_of_their_own(tmp_path: Path) -> None:
    """
    A rank's own metadata have columns; a save of all ranks takes both away.
    """
    writer = dcp.FileSystemWriter(tmp_path)
    quietly(dcp.save, state_of(1), storage_writer=writer, no_dist=True, use_collectives=False)
    [name] = columns_in(tmp_path)
    assert re.fullmatch(r"__0\.metadata\.[0-9a-f]{32}\.columns", name)
    found = dcp.FileSystemReader(tmp_path).read_metadata(rank=0)
    assert isinstance(found.storage_data, LazyDict)
    assert level_at(tmp_path) == 1
    os.utime(tmp_path / name, (0, 0))
    save(tmp_path, 2)
    assert [each.startswith(".metadata.") for each in columns_in(tmp_path)] == [True]
    quietly(dcp.save, state_of(3), storage_writer=writer, no_dist=True, use_collectives=False)
    assert [each.startswith("__0.metadata.") for each in columns_in(tmp_path)] == [True]
    assert level_at(tmp_path) == 3


def test_a_native_save_takes_columns_away(tmp_path: Path) -> None:
    """
    A native checkpoint saved over one of torch's layout leaves none of its files.
    """
    save(tmp_path, 1)
    sk.save({"w": torch.ones(2)}, tmp_path, overwrite=True)
    assert columns_in(tmp_path) == []
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_columns_on_other_file_systems(tmp_path: Path, scheme: str) -> None:
    """
    Where files are streams, columns are written, used, replaced, and done without.
    """
    where = f"{scheme}://{tmp_path}/ck"
    for k in (1, 2):
        quietly(dcp.save, state_of(k), storage_writer=FsspecWriter(where), no_dist=True)
    fs, _ = fsspec.core.url_to_fs(where)
    [columns] = [path for path in fs.ls(where, detail=False) if path.endswith(".columns")]

    def read() -> Any:
        into: dict[str, Any] = {"model": {"layer.3.weight": torch.zeros(2)}, "step": None}
        reader = FsspecReader(where)
        quietly(dcp.load, into, storage_reader=reader, no_dist=True)
        assert into["step"] == [2]
        assert into["model"]["layer.3.weight"].tolist() == [5, 5]
        return reader.storage_data

    assert isinstance(read(), LazyDict)
    fs.rm(columns)
    assert not isinstance(read(), LazyDict)


class Changing(dcp.DefaultSavePlanner):
    """Changes the metadata of a save."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, self.change(metadata) or metadata


class OwnMetadata(Metadata):
    """Metadata of somebody's own class."""


def add_notes(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.layer.3.weight"]
    entry.note = entry.chunks[0].note = "mine"


def of_own_class(metadata: Any) -> Any:
    return OwnMetadata(**vars(metadata))


def without_offsets(metadata: Any) -> None:
    metadata.state_dict_metadata["extra"] = dataclasses.replace(
        metadata.state_dict_metadata["model.layer.3.weight"], size=None
    )


def saved_with(where: Any, change: Any, count: int) -> Any:
    """Save with such a planner; gives `.metadata` as Python reads it."""
    writer = dcp.FileSystemWriter(where)
    quietly(dcp.save, state_of(1, count), storage_writer=writer, planner=Changing(change), no_dist=True)
    with open(os.path.join(where, ".metadata"), "rb") as file:
        return pickle.load(file)


@pytest.mark.parametrize("count", [10, COUNT])
def test_what_a_planner_adds_to_entries_is_kept(tmp_path: Path, count: int) -> None:
    """
    Attributes that a planner gave an entry and a chunk are read again, as from torch, in small and large checkpoints.
    """
    said = saved_with(tmp_path, add_notes, count).state_dict_metadata
    read = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for found in (said, read):
        entry = found["model.layer.3.weight"]
        assert entry.note == entry.chunks[0].note == "mine"
        assert entry.size == (2,)
    assert columns_in(tmp_path) == []
    into: dict[str, Any] = {"model": {"layer.3.weight": torch.zeros(2)}}
    quietly(theirs.load, into, checkpoint_id=str(tmp_path), no_dist=True)
    assert into["model"]["layer.3.weight"].tolist() == [4, 4]


@pytest.mark.parametrize("change", [of_own_class, without_offsets])
def test_odd_metadata_are_saved_without_columns(tmp_path: Path, change: Any) -> None:
    """
    Metadata of a class of somebody's own, or with odd entries, are saved as they are: a save does not fail for columns.
    """
    said = saved_with(tmp_path, change, COUNT)
    assert isinstance(said, OwnMetadata) == (change is of_own_class)
    assert columns_in(tmp_path) == []
    assert len(said.storage_data) == COUNT + 1


def test_whatever_goes_wrong_with_columns_the_save_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """
    An error of any kind while columns are made is logged, and there are none.
    """

    metadata = Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo("f", 0, 1)})
    metadata.state_dict_metadata["w"] = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])
    metadata.state_dict_metadata["w"].properties.memory_format = "none"  # type: ignore[assignment]
    with caplog.at_level("WARNING", "shardkeep"):
        assert columns_of(metadata) is None
    assert "no columns" in caplog.text


def test_paths_beside_other_planner_data(tmp_path: Path) -> None:
    """
    One more thing among the planner data neither gets lost nor flattens what `sk.open` shows.
    """

    def add(metadata: Any) -> None:
        metadata.planner_data["format"] = 3

    saved_with(tmp_path, add, COUNT)
    assert len(columns_in(tmp_path)) == 1
    assert sorted(sk.open(tmp_path).to_dict()) == ["model", "step"]
    assert dcp.FileSystemReader(tmp_path).read_metadata().planner_data["format"] == 3


class Refusing(FileSystem):
    """Raises an error of its own for columns."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Any:
        if str(path).endswith(".columns"):
            raise RuntimeError("AccessDenied")
        with super().create_stream(path, mode) as stream:
            yield stream


def test_any_error_of_a_file_system_leaves_the_pickle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """
    Where a file system refuses the columns with an error of its own, `.metadata` is read, with a warning.
    """
    save(tmp_path, 1)
    reader = dcp.FileSystemReader(tmp_path)
    reader.fs = Refusing()
    into: dict[str, Any] = {"step": None}
    with caplog.at_level("WARNING", "shardkeep"):
        quietly(dcp.load, into, storage_reader=reader, no_dist=True)
    assert into["step"] == [1]
    assert "AccessDenied" in caplog.text
