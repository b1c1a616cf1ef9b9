"""Conversions of what is broken, hostile or absent: a clear error, nothing half-written, the source untouched."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from shardkeep.dcp import format_utils as ours
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.state_dict_saver import save
from shardkeep.errors import (
    CheckpointError,
    CheckpointNotFound,
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedFile,
    PickleRefused,
    StateError,
    StorageError,
    WrongSize,
)
from tests.engine.samples import Trap
from tests.protocol.samples import quietly
from tests.storage.system import no_file_above
from tests.toolkit.samples import numbered, seen

OLD = b"what was there"


class Config:
    def __init__(self):
        self.width = 3

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


def everything_in(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def checkpoint_in(folder, state=None):
    quietly(save, state or {"w": numbered(100, 3), "step": 1}, checkpoint_id=folder)
    return folder


def fails_to_torch(tmp_path, expected, *, match=None):
    """Convert a checkpoint that is broken: the error says so, and all is as it was."""
    (tmp_path / "file.pt").write_bytes(OLD)
    before = everything_in(tmp_path)
    with pytest.raises(CheckpointException, match=match) as caught:
        ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, expected)
    assert everything_in(tmp_path) == before
    return error


def data_file(folder):
    [path] = folder.glob("*.distcp")
    return path


def test_an_absent_checkpoint(tmp_path):
    """As in torch, an AssertionError in a CheckpointException; a file there is left alone."""
    (tmp_path / "ck").mkdir()
    fails_to_torch(tmp_path, AssertionError, match="metadata is None")


def test_a_flipped_bit_in_a_data_file(tmp_path):
    """Found by the digests of a checkpoint of ours, with the key and the file in the message."""
    path = data_file(checkpoint_in(tmp_path / "ck", {"w": numbered(100, 3)}))
    data = bytearray(path.read_bytes())
    data[data.index(numbered(100, 3).numpy().tobytes()) + 500] ^= 4
    path.write_bytes(data)
    fails_to_torch(tmp_path, ChecksumMismatch, match=r"__0_0.distcp[\s\S]*'w'")


@pytest.mark.parametrize("left", [None, 0, 700, -1])
def test_a_data_file_that_is_gone_or_was_cut_short(tmp_path, left):
    path = data_file(checkpoint_in(tmp_path / "ck"))
    data = path.read_bytes()
    path.unlink() if left is None else path.write_bytes(data[:left])
    fails_to_torch(tmp_path, WrongSize, match="__0_0.distcp")


@pytest.mark.parametrize("left", [0, 10, -60])
def test_metadata_that_were_cut_short(tmp_path, left):
    path = checkpoint_in(tmp_path / "ck") / ".metadata"
    path.write_bytes(path.read_bytes()[:left])
    fails_to_torch(tmp_path, CheckpointError, match=".metadata")


def forged(folder, change):
    path = checkpoint_in(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_chunks(*chunks):
    def change(metadata):
        made = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        metadata.state_dict_metadata["w"].chunks[:] = made

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_chunks(((0, 0), (99, 3))), "leave a hole"),
        (set_chunks(), "leave a hole"),
        (set_chunks(((0, 0), (100, 2)), ((0, 1), (100, 1))), "at \\(0, 1\\)"),
        (set_chunks(((1, 0), (100, 3))), "at \\(1, 0\\)"),
        (set_chunks(((0,), (300,))), "at \\(0,\\)"),
    ],
    ids=["a hole", "nothing", "an overlap", "outside", "other axes"],
)
def test_chunks_that_do_not_make_the_tensor(tmp_path, change, words):
    """Torch leaves the memory between them as it finds it, and writes that into the file."""
    forged(tmp_path / "ck", change)
    fails_to_torch(tmp_path, MalformedFile, match=f"'w'.*{words}")


@pytest.mark.parametrize("size", [(-2, -150), (0, -1), (1 << 40, 1 << 40)])
def test_sizes_that_no_tensor_has(tmp_path, size):
    def change(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size(size)

    forged(tmp_path / "ck", change)
    fails_to_torch(tmp_path, MalformedFile, match="are not sizes|contradict each other")


@pytest.mark.parametrize("path", [("a", 10**12), ("a", -1)])
def test_paths_that_no_state_has(tmp_path, path):
    forged(tmp_path / "ck", lambda metadata: metadata.planner_data.update(w=path))
    fails_to_torch(tmp_path, MalformedFile, match="'w' cannot be at")


def test_a_path_that_is_none_leaves_the_name(tmp_path):
    """A value whose path is no path stands under its own name; a chunk that is described twice is read once."""

    def change(metadata):
        metadata.planner_data.update(w=("a", None))
        metadata.state_dict_metadata["w"].chunks *= 2

    forged(tmp_path / "ck", change)
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    assert seen(torch.load(tmp_path / "file.pt")) == seen({"w": numbered(100, 3), "step": 1})


def test_an_object_of_an_unknown_class(tmp_path, monkeypatch):
    checkpoint_in(tmp_path / "ck", {"w": numbered(3), "config": Config()})
    error = fails_to_torch(tmp_path, PickleRefused, match="'config'")
    assert "SHARDKEEP_ALLOW_PICKLE" in error.hint
    monkeypatch.setenv("SHARDKEEP_ALLOW_PICKLE", "1")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=False)["config"] == Config()


def test_a_full_disk(tmp_path):
    checkpoint_in(tmp_path / "ck", {"w": torch.zeros(100_000)})
    (tmp_path / "file.pt").write_bytes(OLD)
    before = everything_in(tmp_path)
    with no_file_above(100_000), pytest.raises(StorageError, match="EFBIG"):
        ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    assert everything_in(tmp_path) == before


def test_places_that_no_file_can_have(tmp_path):
    """As from torch.save, a RuntimeError; nothing is made."""
    checkpoint_in(tmp_path / "ck")
    for path in (tmp_path / "no" / "file.pt", tmp_path):
        with pytest.raises(RuntimeError, match=r"exist|directory"):
            ours.dcp_to_torch_save(tmp_path / "ck", path)
    assert os.listdir(tmp_path) == ["ck"]


def fails_to_dcp(tmp_path, expected, *, match=None):
    """Convert a file that is broken, over a checkpoint that is not: all is as it was."""
    if not (tmp_path / "ck").exists():
        checkpoint_in(tmp_path / "ck")
    before = everything_in(tmp_path)
    with pytest.raises(expected, match=match) as caught:
        quietly(ours.torch_save_to_dcp, tmp_path / "file.pt", tmp_path / "ck")
    with pytest.raises(expected):
        ours.torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "new")
    assert everything_in(tmp_path) == before
    assert not (tmp_path / "new").exists()
    return caught.value


def test_an_absent_file(tmp_path):
    assert isinstance(fails_to_dcp(tmp_path, CheckpointNotFound), FileNotFoundError)


@pytest.mark.parametrize("form", [True, False], ids=["archive", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short(tmp_path, share, form):
    path = tmp_path / "file.pt"
    torch.save({"w": numbered(2000), "v": numbered(10)}, path, _use_new_zipfile_serialization=form)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    fails_to_dcp(tmp_path, MalformedFile, match=r"file.pt")


def test_a_flipped_bit_in_a_file(tmp_path):
    """Torch loads it; here the file, its entry and the key are named."""
    path = tmp_path / "file.pt"
    torch.save({"model": {"v": numbered(10), "w": numbered(2000)}}, path)
    data = bytearray(path.read_bytes())
    data[data.index(numbered(2000).numpy().tobytes()) + 5000] ^= 1
    path.write_bytes(data)
    assert not torch.equal(torch.load(path)["model"]["w"], numbered(2000))
    failure = fails_to_dcp(tmp_path, ChecksumMismatch, match=r"file\.pt: bytes .*file/data/1.* they hold 'model\.w'")
    assert failure.details["key"] == "'model.w'"


def test_every_byte_of_a_small_file_counts(tmp_path):
    """Whatever bit of it is flipped: either the conversion fails, or the values are those that were saved."""
    path = tmp_path / "file.pt"
    state = {"w": numbered(3), "step": 7}
    torch.save(state, path)
    good = path.read_bytes()
    failed = 0
    for at in range(0, len(good), 23):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            quietly(ours.torch_save_to_dcp, path, tmp_path / f"{at}")
        except DamagedCheckpoint:
            failed += 1
            assert not (tmp_path / f"{at}").exists()
            continue
        ours.dcp_to_torch_save(tmp_path / f"{at}", tmp_path / "back.pt")
        assert seen(torch.load(tmp_path / "back.pt")) == seen(state), at
    assert failed > 10


@pytest.mark.parametrize("form", [True, False], ids=["archive", "legacy"])
def test_a_hostile_file(tmp_path, form):
    trap = tmp_path / "trap"
    path = tmp_path / "file.pt"
    torch.save({"w": numbered(3), "x": Trap(str(trap))}, path, _use_new_zipfile_serialization=form)
    error = fails_to_dcp(tmp_path, PickleRefused, match="mkdir")
    assert "SHARDKEEP_ALLOW_PICKLE" in error.hint
    assert not trap.exists()


@pytest.mark.parametrize("form", [True, False], ids=["archive", "legacy"])
def test_a_file_with_a_class_of_the_users(tmp_path, monkeypatch, form):
    """Refused, and accepted once torch lists it as safe, or shardkeep allows any pickle."""
    path = tmp_path / "file.pt"
    torch.save({"w": numbered(3), "config": Config()}, path, _use_new_zipfile_serialization=form)
    fails_to_dcp(tmp_path, PickleRefused, match="Config")
    with torch.serialization.safe_globals([Config]):
        quietly(ours.torch_save_to_dcp, path, tmp_path / "safe")
    monkeypatch.setenv("SHARDKEEP_ALLOW_PICKLE", "1")
    quietly(ours.torch_save_to_dcp, path, tmp_path / "any")
    for name in ("safe", "any"):
        ours.dcp_to_torch_save(tmp_path / name, tmp_path / "back.pt")
        assert torch.load(tmp_path / "back.pt", weights_only=False)["config"] == Config()


def test_torch_may_be_told_to_take_no_other_reader(tmp_path, monkeypatch):
    """With TORCH_FORCE_WEIGHTS_ONLY_LOAD only what torch holds for safe is read, and that is."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"w": numbered(3)}, tmp_path / "file.pt")
    quietly(ours.torch_save_to_dcp, tmp_path / "file.pt", tmp_path / "good")
    torch.save({"w": numbered(3), "config": Config()}, tmp_path / "file.pt")
    fails_to_dcp(tmp_path, PickleRefused, match="Config")


def test_a_file_that_holds_no_state(tmp_path):
    """A single tensor has no key to be saved under."""
    torch.save(numbered(3), tmp_path / "file.pt")
    fails_to_dcp(tmp_path, StateError, match="holds a Tensor")


@pytest.mark.parametrize("kind", ["text", "zip", "compressed", "twice", "program"])
def test_other_files(tmp_path, kind):
    path = tmp_path / "file.pt"
    if kind == "text":
        path.write_text("hello, world\n" * 100)
    elif kind == "program":
        quietly(torch.jit.save, quietly(torch.jit.script, torch.nn.ReLU()), path)
    else:
        torch.save({"w": numbered(3)}, tmp_path / "good.pt")
        how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w", how) as made:
            if kind == "zip":
                made.writestr("a/b", "c")
            else:
                for name in good.namelist():
                    made.writestr(name, good.read(name))
            if kind == "twice":
                with pytest.warns(UserWarning, match="Duplicate"):
                    made.writestr("good/data/0", bytes(12))
    fails_to_dcp(tmp_path, MalformedFile, match=r"file\.pt")


def test_a_destination_that_cannot_be_written(tmp_path):
    torch.save({"w": numbered(3)}, tmp_path / "file.pt")
    (tmp_path / "ck").write_bytes(OLD)
    before = everything_in(tmp_path)
    with pytest.raises(CheckpointException):
        ours.torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "ck")
    assert everything_in(tmp_path) == before
