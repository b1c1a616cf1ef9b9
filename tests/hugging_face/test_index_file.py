"""What a reader finds in a model of several files: all tensors, also where the index file is wrong."""

import json

import torch
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file

from shardkeep import dcp
from tests.dcp.sides import failure_of, quietly

FILES = 6


def model(where):
    where.mkdir(parents=True)
    weight_map = {}
    for n in range(FILES):
        name = f"model-{n + 1:05}-of-{FILES:05}.safetensors"
        tensors = {f"layer.{n}.{part}": torch.full((3, 2), float(n)) for part in "ab"}
        save_file(tensors, where / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (where / "model.safetensors.index.json").write_text(text)


def loaded(where, keys):
    """Load these tensors, and compare them with what `model` made."""
    into = {key: torch.zeros(3, 2) for key in keys}
    quietly(dcp.load, into, storage_reader=dcp.HuggingFaceStorageReader(where), no_dist=True)
    assert all(value.eq(float(key.split(".")[1])).all() for key, value in into.items())


def test_metadata_are_those_of_all_files(tmp_path):
    """Looked at as a whole, they are what they were: all tensors, all places, as torch has them."""
    model(tmp_path / "m")
    ours = dcp.HuggingFaceStorageReader(str(tmp_path / "m")).read_metadata()
    torchs = theirs.HuggingFaceStorageReader(str(tmp_path / "m")).read_metadata()
    assert set(ours.state_dict_metadata) == set(torchs.state_dict_metadata)
    assert len(ours.state_dict_metadata) == len(ours.storage_data) == 2 * FILES
    for index, info in torchs.storage_data.items():
        assert ours.storage_data[index].relative_path == info.relative_path
        assert ours.storage_data[index].shape == info.shape


def test_an_index_that_is_wrong(tmp_path, caplog):
    """A tensor in another file than the index says, or not named by it, is found; one that is nowhere is missing."""
    model(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    index["weight_map"] |= {"layer.0.a": second, "layer.9.x": first}
    del index["weight_map"]["layer.2.b"]
    path.write_text(json.dumps(index))
    loaded(tmp_path / "m", ["layer.0.a", "layer.2.b"])
    error = failure_of(loaded, tmp_path / "m", ["layer.9.x"])
    assert "layer.9.x" in str(error)
    assert "'layer.9.x' in" in caplog.text
