"""Pickles in a checkpoint: hostile ones change nothing, the user's classes are read beside plain values."""

import datetime as dt
import io
import logging
import pathlib

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import dcp
from shardkeep.dcp._impl.planners import load_object
from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.layouts import torch_values as metadata
from shardkeep.layouts import torch_values as stored_items
from shardkeep.layouts.torch import decode_torch_metadata
from shardkeep.layouts.torch_pickle import decode_metadata
from tests.protocol.samples import quietly

KINDS = [
    metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.BytesStorageMetadata, metadata.TensorProperties, metadata.StorageMeta, stored_items._StorageInfo,
]  # fmt: skip


class Mine:
    def __init__(self, value: int = 1) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


class Planner(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, made = super().create_global_plan(all_plans)
        made.planner_data = {"mine": Mine(), **made.planner_data}
        return plans, made


def patching(module: str, name: str) -> bytes:
    """Make a pickle that sets an attribute of what a name gives."""
    return f"\x80\x04c{module}\n{name}\n(N}}X\x06\0\0\0existsK\x01stb0N.".encode("latin1")


@pytest.mark.parametrize("decode", [decode_metadata, decode_torch_metadata])
@pytest.mark.parametrize("kind", [*KINDS, pathlib.PosixPath])
def test_metadata_change_no_class(decode, kind):
    """Sixty bytes in the place of `.metadata` that set an attribute of a class of the process."""
    place = "filesystem" if kind is stored_items._StorageInfo else "metadata"
    module = "pathlib" if kind is pathlib.PosixPath else f"torch.distributed.checkpoint.{place}"
    before = dict(vars(kind))
    with pytest.raises(MalformedFile):
        decode(patching(module, kind.__name__), where=".metadata")
    assert dict(vars(kind)) == before


def test_metadata_change_no_member_of_an_enumeration():
    call = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R"
    with pytest.raises(MalformedFile):
        decode_metadata(b"\x80\x04" + call + b"}X\x06\0\0\0_name_K\x01sb0N.", where=".metadata")
    assert metadata._MEM_FORMAT_ENCODING(0).name == "TORCH_CONTIGUOUS_FORMAT"


def again(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return load_object(file, key="k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_tensors_inside_objects(dtype):
    """Those whose storages have no class of their own as well."""
    value = torch.arange(6).reshape(2, 3).to(dtype)
    made, parameter, date = again((value.T, torch.nn.Parameter(torch.ones(2)), dt.date(2026, 1, 2)))
    assert (made.dtype, made.stride()) == (dtype, value.T.stride())
    assert made.view(torch.uint8 if dtype.itemsize == 1 else dtype).tolist() == (
        value.T.view(torch.uint8 if dtype.itemsize == 1 else dtype).tolist()
    )
    assert (type(parameter), date) == (torch.nn.Parameter, dt.date(2026, 1, 2))


@pytest.mark.parametrize("beside", [dt.timedelta(3), pathlib.Path("x"), np.arange(3), torch.ones(2)])
def test_safe_classes_beside_plain_values(beside):
    with pytest.raises(PickleRefused, match="Mine"):
        again([Mine(3), beside])
    with torch.serialization.safe_globals([Mine]):
        mine, other = again([Mine(3), beside])
    assert mine == Mine(3)
    assert np.array_equal(other, beside)


def test_forged_states_of_dtypes_inside_objects_do_not_reach_numpy():
    """Flags that say that the elements are objects: numpy would follow numbers as if they were addresses."""
    file = io.BytesIO()
    torch.save(np.arange(3), file)
    flags = b"J\xff\xff\xff\xff" * 2 + b"K%ct"
    forged = file.getvalue().replace(flags % 0, flags % 255)
    assert forged != file.getvalue()
    made = load_object(io.BytesIO(forged), key="k")
    assert (made.tolist(), made.dtype.flags) == ([0, 1, 2], np.arange(3).dtype.flags)


@pytest.mark.parametrize("kind", [int, pathlib.PosixPath])
def test_a_class_as_a_value_is_refused(kind):
    """Rather than that something else comes back; one that torch itself holds for safe comes back."""
    with pytest.raises(PickleRefused):
        again({"kind": kind})
    assert again({"kind": torch.Size}) == {"kind": torch.Size}


def test_classes_in_metadata_are_told_of_and_read_if_allowed(tmp_path, caplog, monkeypatch):
    """A planner's own class: a warning at save names it, and it is read only if the user allows it, in either way."""
    with caplog.at_level(logging.WARNING, "shardkeep"):
        quietly(dcp.save, {"w": torch.ones(2), "o": {1, 2}}, checkpoint_id=tmp_path)
        assert "metadata contain" not in caplog.text
        quietly(dcp.save, {"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=Planner())
    said = [each.getMessage() for each in caplog.records if "Mine" in each.getMessage()]
    assert len([each for each in said if "metadata contain" in each]) == 1
    with pytest.raises(PickleRefused, match="Mine"):
        shardkeep.open(tmp_path)

    def check():
        state = {"w": torch.zeros(2)}
        quietly(dcp.load, state, checkpoint_id=tmp_path)
        assert state["w"].tolist() == [1, 1]
        assert shardkeep.open(tmp_path)["w"][...].tolist() == [1, 1]
        found = dcp.FileSystemReader(tmp_path).read_metadata()
        assert found.planner_data["mine"] == Mine()
        assert found.state_dict_metadata["w"].properties.memory_format == torch.contiguous_format

    with torch.serialization.safe_globals([Mine]):
        check()
    monkeypatch.setenv("SHARDKEEP_ALLOW_PICKLE", "1")
    check()
