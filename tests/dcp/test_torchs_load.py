"""Our readers handed to torch's own `load`, which knows nothing of ours: what it asks of metadata is answered."""

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file

import shardkeep.dcp as ours
from shardkeep.layouts.torch_values import Metadata
from tests.protocol.samples import quietly


class Renaming(ours.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        return super().read_metadata(*args, **kwargs)


@pytest.fixture
def saved(tmp_path):
    quietly(ours.save, {"w": torch.arange(4.0), "o": {"x": (1, 2)}}, checkpoint_id=tmp_path / "ck")
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.arange(4.0)}, tmp_path / "hf" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("planner", [theirs.DefaultLoadPlanner, ours.DefaultLoadPlanner])
@pytest.mark.parametrize("reader", [ours.FileSystemReader, Renaming])
def test_tensors_and_objects_are_loaded(saved, reader, planner):
    state = {"w": torch.zeros(4), "o": {"x": 0}}
    quietly(theirs.load, state, storage_reader=reader(saved / "ck"), planner=planner())
    assert (state["w"].tolist(), state["o"]) == ([0, 1, 2, 3], {"x": (1, 2)})
    found = quietly(theirs.state_dict_loader._load_state_dict_from_keys, storage_reader=reader(saved / "ck"))
    assert (found["w"].tolist(), found["o"]) == ([0, 1, 2, 3], {"x": (1, 2)})


@pytest.mark.parametrize("planner", [theirs.DefaultLoadPlanner, ours.DefaultLoadPlanner])
@pytest.mark.parametrize(
    ("reader", "folder"),
    [
        (ours.FileSystemReader, "ck"),
        (ours.HuggingFaceStorageReader, "hf"),
        (ours.QuantizedHuggingFaceStorageReader, "hf"),
    ],
)
def test_a_tensor_of_another_size_is_refused(saved, reader, folder, planner):
    """A part of the stored one would fit."""
    state = {"w": torch.zeros(4)}
    quietly(theirs.load, state, storage_reader=reader(saved / folder), planner=planner())
    assert state["w"].tolist() == [0, 1, 2, 3]
    state = {"w": torch.full((3,), 7.0)}
    with pytest.raises(theirs.CheckpointException, match=r"Size mismatch between saved torch.Size\(\[4\]\)"):
        quietly(theirs.load, state, storage_reader=reader(saved / folder), planner=planner())
    assert state["w"].tolist() == [7, 7, 7]


def test_digests_are_compared(saved):
    """They reach the reader through metadata in torch's classes, too."""
    [path] = (saved / "ck").glob("*.distcp")
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(4.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(theirs.CheckpointException, match="are not what was saved"):
        quietly(theirs.load, {"w": torch.zeros(4)}, storage_reader=ours.FileSystemReader(saved / "ck"))


def test_others_are_given_ours(saved):
    reader = ours.FileSystemReader(saved / "ck")
    assert type(reader.read_metadata()) is Metadata
    seen = []

    class Looking(ours.DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata, is_coordinator):
            seen.append(type(metadata))
            super().set_up_planner(state_dict, metadata, is_coordinator)

    quietly(ours.load, {"w": torch.zeros(4)}, storage_reader=reader, planner=Looking())
    assert seen == [Metadata]


def test_handlers_of_torchs_exception_catch_ours(tmp_path):
    """It stays ours, has both failures and text, and survives being sent to another rank."""
    with pytest.raises(theirs.api.CheckpointException, match="nothing") as caught:
        quietly(ours.load, {"w": torch.zeros(2)}, checkpoint_id=tmp_path / "nothing")
    assert isinstance(caught.value, ours.CheckpointException)
    sent = pickle.loads(pickle.dumps(ours.CheckpointException("read", {1: (ValueError("x"), None)})))
    assert isinstance(sent, theirs.CheckpointException)
    assert (list(sent.failures), "ValueError: x" in str(sent)) == ([1], True)


class InBytes:
    """A `Stateful` that keeps its state in a buffer, as examples of PyTorch do."""

    def __init__(self, data=b""):
        self.buffer = io.BytesIO(data)
        self.buffer.seek(1)

    def state_dict(self):
        return {"buffer": self.buffer}

    def load_state_dict(self, state):
        self.buffer = state["buffer"]


@pytest.mark.parametrize("reading", [ours, theirs])
@pytest.mark.parametrize("writing", [ours, theirs])
def test_buffers_of_bytes(tmp_path, writing, reading):
    """They are plain bytes and a position: no pickle has to be allowed."""
    quietly(writing.save, {"s": InBytes(b"abc"), "b": io.BytesIO(b"x" * 5)}, checkpoint_id=tmp_path)
    state = {"s": InBytes(), "b": io.BytesIO()}
    quietly(reading.load, state, checkpoint_id=tmp_path)
    assert (state["s"].buffer.read(), state["b"].getvalue()) == (b"bc", b"x" * 5)
