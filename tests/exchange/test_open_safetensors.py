"""Directories of safetensors files, and single ones, opened and loaded as checkpoints."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardkeep as sk
from tests.engine.samples import bits, random_tensor
from tests.hugging_face.samples import full_state
from tests.toolkit.samples import mesh_of

INDEX = "model.safetensors.index.json"


def model():
    """The tensors of full_state, all of which safetensors can hold."""
    return {key: value.contiguous() for key, value in full_state().items()}


def in_two_files(where):
    tensors = model()
    keys = sorted(tensors)
    names = {key: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, key in enumerate(keys)}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in keys if names[key] == name}, where / name)
    (where / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors


@pytest.mark.parametrize("where", ["directory", "links", "memory"])
def test_a_model_in_several_files_is_opened(tmp_path, where):
    """In a directory, a snapshot of Hugging Face's cache (links elsewhere) and any store, it is what the files hold."""
    for name in ("blobs", "links"):
        (tmp_path / name).mkdir()
    tensors = in_two_files(tmp_path / "blobs")
    place = {"directory": tmp_path / "blobs", "links": tmp_path / "links", "memory": sk.MemoryStore()}[where]
    for number, file in enumerate(list((tmp_path / "blobs").iterdir())):
        if where == "memory":
            place.put(file.name, file.read_bytes())
        elif where == "links":
            file.rename(tmp_path / "blobs" / str(number))
            (tmp_path / "links" / file.name).symlink_to(f"../blobs/{number}")
    ck = sk.open(place)
    assert list(ck) == sorted(tensors)
    assert {key: ck[key].shape for key in ck} == {key: tuple(value.shape) for key, value in tensors.items()}
    assert {key: bits(ck[key].tensor()) for key in ck} == {key: bits(value) for key, value in tensors.items()}
    assert bits(ck["deep"][1:, ::2, 3]) == bits(tensors["deep"][1:, ::2, 3])
    assert {key: bits(value) for key, value in ck.to_dict().items()} == {k: bits(v) for k, v in tensors.items()}
    report = ck.verify()
    assert (report.files, report.without_digests) == (2, 2)


def test_a_single_file_is_opened_by_its_path(tmp_path):
    """A path to a safetensors file, whatever else is in its directory, is opened and loaded from."""
    tensors = model()
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({"rows": torch.zeros(2)}, tmp_path / "other.safetensors")
    ck = sk.open(tmp_path / "one.safetensors")
    assert {key: bits(ck[key].tensor()) for key in ck} == {key: bits(value) for key, value in tensors.items()}
    state = {key: torch.empty_like(value) for key, value in tensors.items()}
    sk.load(state, tmp_path / "one.safetensors")
    assert bits(state) == bits(tensors)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("train.py", sk.CheckpointNotFound, r"can read\n  hint: .* safetensors \(.safetensors\) or torch.save \(.pt, "),
        ("empty", sk.CheckpointNotFound, "not a checkpoint"),
        ("a.pt", sk.MalformedFile, "neither a file of torch.save nor of safetensors"),
        ("a.safetensors", sk.MalformedFile, "not a safetensors file"),
    ],
)
def test_a_file_that_is_no_checkpoint_says_so(tmp_path, name, error, says):
    """Whatever their first bytes would mean as the size of a header."""
    (tmp_path / name).write_text("" if name == "empty" else "import shardkeep as sk\n")
    with pytest.raises(error, match=rf"{name}: .*{says}"):
        sk.open(tmp_path / name)


@settings(max_examples=25)
@given(st.integers(1, 7), st.sampled_from([torch.float32, torch.float64, torch.int16]), st.integers(0, 3))
def test_tensors_may_begin_anywhere(tmp_path_factory, shift, dtype, cut):
    where = tmp_path_factory.mktemp("askew")
    tensor = random_tensor((9, 5), dtype, shift)
    raw = tensor.numpy().tobytes()
    name = {torch.float32: "F32", torch.float64: "F64", torch.int16: "I16"}[dtype]
    header = json.dumps(
        {
            "pad": {"dtype": "U8", "shape": [shift], "data_offsets": [0, shift]},
            "w": {"dtype": name, "shape": [9, 5], "data_offsets": [shift, shift + len(raw)]},
        }
    ).encode()
    (where / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(shift) + raw)
    ck = sk.open(where)
    assert bits(ck["w"].tensor()) == bits(tensor)
    assert bits(ck["w"][cut:, cut]) == bits(tensor[cut:, cut])


def load_shards(where):
    """On a rank: load a model into shards along another axis on each rank's mesh; return the whole, gathered."""
    mesh = mesh_of(dist.get_world_size())
    state = {
        "rows": distribute_tensor(torch.zeros(9, 7), mesh, [Shard(1)]),
        "ints": torch.zeros(8, 2, dtype=torch.int64),
    }
    report = sk.load(state, where, include=["rows", "ints"], strict=True)
    assert isinstance(state["rows"], DTensor)
    return bits(state["rows"].full_tensor()), bits(state["ints"]), report.save_id


def test_ranks_load_their_shards(rank_pool, tmp_path):
    tensors = in_two_files(tmp_path)
    found = rank_pool.run(2, load_shards, str(tmp_path))
    assert found[0][:2] == (bits(tensors["rows"]), bits(tensors["ints"]))
    assert found[0] == found[1]


def test_what_a_save_left_is_no_model(tmp_path):
    sk.save({"w": torch.ones(4)}, tmp_path)
    (tmp_path / "shardkeep.json").unlink()
    with pytest.raises(sk.CheckpointNotFound, match="did not finish"):
        sk.open(tmp_path)


def test_a_save_beside_a_model_leaves_it_alone(tmp_path):
    """Saving into a directory that holds a model is no error, keeps its files, and is what is opened from then on."""
    tensors = in_two_files(tmp_path)
    sk.save({"new": torch.ones(4)}, tmp_path)
    assert list(sk.open(tmp_path)) == ["new"]
    held = {**load_file(tmp_path / "model-00001-of-00002.safetensors")}
    held |= load_file(tmp_path / "model-00002-of-00002.safetensors")
    assert {key: bits(value) for key, value in held.items()} == {key: bits(value) for key, value in tensors.items()}


@pytest.mark.parametrize("damage", ["cut short", "lost", "scrambled", "misplaced"])
def test_damage_is_found_when_it_is_opened(tmp_path, damage):
    """A file that is cut short, lost, scrambled, or lacks what the index says is in it is an error that names it."""
    in_two_files(tmp_path)
    opened = sk.open(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    if damage == "lost":
        file.unlink()
    elif damage == "misplaced":
        index = json.loads((tmp_path / INDEX).read_text())
        index["weight_map"]["gone"] = file.name
        (tmp_path / INDEX).write_text(json.dumps(index))
    else:
        file.write_bytes(data[:-3] if damage == "cut short" else data[:9] + bytes([data[9] ^ 0xFF]) + data[10:])
    with pytest.raises(sk.DamagedCheckpoint, match={"lost": "missing", "misplaced": "'gone'"}.get(damage, file.name)):
        sk.open(tmp_path)
    with pytest.raises(sk.DamagedCheckpoint):
        opened.verify()


def test_an_index_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "secret.safetensors")
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    with pytest.raises(sk.DamagedCheckpoint):
        sk.open(tmp_path / "model")


def test_one_name_in_two_files_is_refused(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(sk.DamagedCheckpoint, match="'w'"):
        sk.open(tmp_path)


def test_files_that_are_replaced_meanwhile_are_noticed(tmp_path):
    """Verify says that what it opened is no longer there."""
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    ck = sk.open(tmp_path)
    save_file({"w": torch.ones(4)}, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "model.safetensors")
    with pytest.raises(sk.DamagedCheckpoint):
        ck.verify()
