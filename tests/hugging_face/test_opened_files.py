"""Which files of a model a load opens: with an index file, those that hold what it asks for."""

import builtins
import json
import os
from contextlib import contextmanager
from unittest import mock

import safetensors
import torch
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file

from shardkeep import dcp
from tests.dcp.sides import failure_of, quietly, side

FILES = 6


def model(where, *, index=True):
    """A model in the form of the hub: two tensors a file."""
    where.mkdir(parents=True)
    weight_map = {}
    for n in range(FILES):
        name = f"model-{n + 1:05}-of-{FILES:05}.safetensors"
        tensors = {f"layer.{n}.{part}": torch.full((3, 2), float(n)) for part in "ab"}
        save_file(tensors, where / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        (where / "model.safetensors.index.json").write_text(text)


@contextmanager
def opened():
    """The safetensors files that are opened inside, by whatever way Python has; of torch's reader, by safetensors."""
    found = set()
    real = {(os, "open"): os.open, (builtins, "open"): builtins.open}

    def watching(function):
        def call(*args, **kwargs):
            path = args[0] if args else kwargs.get("filename")
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).endswith(".safetensors"):
                found.add(os.path.basename(path))
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(os, "open", watching(real[os, "open"])),
        mock.patch.object(builtins, "open", watching(real[builtins, "open"])),
        mock.patch.object(safetensors, "safe_open", watching(safetensors.safe_open)),
    ):
        yield found


def files_opened(name, where, keys):
    """Load these tensors on every rank; return how many files this rank opened."""
    dcp = side(name)
    into = {key: torch.zeros(3, 2) for key in keys}
    with opened() as found:
        quietly(dcp.load, into, storage_reader=dcp.HuggingFaceStorageReader(where), no_dist=True)
    assert all(value.eq(float(key.split(".")[1])).all() for key, value in into.items())
    return len(found)


def test_25_files_that_nobody_asks_for_stay_closed(tmp_path):
    """Line 25: torch opens every file; ours, with an index file, those of the tensors that are asked for."""
    model(tmp_path / "m")
    keys = ["layer.1.a", "layer.1.b", "layer.4.b"]
    assert files_opened("ours", str(tmp_path / "m"), keys) == 2
    assert files_opened("torch", str(tmp_path / "m"), keys) == FILES
    assert files_opened("ours", str(tmp_path / "m"), [f"layer.{n}.a" for n in range(FILES)]) == FILES


def test_without_an_index_all_headers_are_read(tmp_path):
    """Where nothing says which file has a tensor, all are asked."""
    model(tmp_path / "m", index=False)
    assert files_opened("ours", str(tmp_path / "m"), ["layer.1.a"]) == FILES


def test_what_dcp_writes_is_read_so_too(tmp_path):
    """Files that torch's writer or ours put there with an index are opened as they are needed."""
    for name, module in (("torch", theirs), ("ours", dcp)):
        mapping = {f"layer.{n}.a": n + 1 for n in range(FILES)}
        state = {key: torch.full((3, 2), float(n - 1)) for key, n in mapping.items()}
        writer = module.HuggingFaceStorageWriter(str(tmp_path / name), fqn_to_index_mapping=mapping)
        quietly(module.save, state, storage_writer=writer, no_dist=True)
        assert (tmp_path / name / "model.safetensors.index.json").exists()
        assert files_opened("ours", str(tmp_path / name), ["layer.2.a"]) == 1


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
    """
    A tensor that is in another file than the index says, or that it does not name, is found; one that is nowhere is
    missing.
    """
    model(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    index["weight_map"] |= {"layer.0.a": second, "layer.9.x": first}
    del index["weight_map"]["layer.2.b"]
    path.write_text(json.dumps(index))
    for key in ("layer.0.a", "layer.2.b"):
        assert files_opened("ours", str(tmp_path / "m"), [key]) == FILES
    error = failure_of(files_opened, "ours", str(tmp_path / "m"), ["layer.9.x"])
    assert "layer.9.x" in str(error)
    assert "'layer.9.x' in" in caplog.text


def test_files_of_two_saves_are_told(tmp_path):
    """Two files that the index names and that are of different saves are an error when both are needed."""
    mapping = {"layer.0.a": 1, "layer.1.a": 2}
    state = {key: torch.full((3, 2), float(n - 1)) for key, n in mapping.items()}
    for name in ("x", "y"):
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / name), fqn_to_index_mapping=mapping)
        quietly(dcp.save, state, storage_writer=writer, no_dist=True)
    second = "model-00002-of-00002.safetensors"
    (tmp_path / "x" / second).write_bytes((tmp_path / "y" / second).read_bytes())
    error = failure_of(files_opened, "ours", str(tmp_path / "x"), list(mapping))
    assert "different saves" in str(error)


def test_metadata_may_be_changed(tmp_path):
    """A reader's metadata take changes, like the dicts of torch's, and the model's other tensors stay as they are."""
    (tmp_path / "m").mkdir()
    save_file({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "m" / "model.safetensors")
    entries = dcp.HuggingFaceStorageReader(str(tmp_path / "m")).read_metadata().state_dict_metadata
    entries["c"] = entries.pop("a")
    entries["b"] = entries["c"]
    assert sorted(entries) == ["b", "c"]
    assert len(entries) == 2
    assert "a" not in entries
    assert entries["b"].size == entries["c"].size == torch.Size([3])
    entries.clear()
    assert not entries
