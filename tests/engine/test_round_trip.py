"""One process: what is saved is what is loaded, for every kind of leaf."""

import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import shardkeep as sk
from tests.engine.samples import Colour, all_dtypes, bits, blank_like, random_tensor, rich_state


def test_every_kind_of_leaf_comes_back(tmp_path):
    """Every kind of leaf loads bit for bit into a blank state; without a template, containers and types come back."""
    state = rich_state()
    sk.save(state, tmp_path / "ck")
    blank = blank_like(state)
    report = sk.load(blank, tmp_path / "ck")
    tree = sk.open(tmp_path / "ck").to_dict()
    assert bits(blank) == bits(state)
    assert (report.missing, report.unexpected, report.cast) == ([], [], {})
    state["rng"] = {0: state["rng"].value}
    assert bits(tree) == bits(state)


def test_autograd_notices_that_a_tensor_was_filled(tmp_path):
    """Backward through a tensor that was loaded over raises, as after any in-place change."""
    weight = torch.randn(3, requires_grad=True)
    sk.save({"w": weight}, tmp_path / "ck")
    loss = (weight * weight).sum()
    sk.load({"w": weight}, tmp_path / "ck")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cast_is_opt_in_and_reported(tmp_path):
    saved = torch.randn(100, 10)
    sk.save({"a": {"w": saved}, "b": {"w": saved}}, tmp_path / "ck")
    state = {"a": {"w": torch.zeros(100, 10, dtype=torch.bfloat16)}, "b": {"w": torch.zeros(100, 10)}}
    with pytest.raises(sk.StateMismatch, match=r"a\.w: bfloat16 in the state, float32 in the checkpoint"):
        sk.load(state, tmp_path / "ck")
    with pytest.raises(sk.StateMismatch):
        sk.load(state, tmp_path / "ck", cast="b")
    assert not state["a"]["w"].any()
    report = sk.load(state, tmp_path / "ck", cast="a.*")
    assert report.cast == {"a.w": "float32 -> bfloat16"}
    assert torch.equal(state["a"]["w"], saved.bfloat16())


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype_is_valid_safetensors(tmp_path, dtype):
    tensor = random_tensor((6, 4), dtype)
    sk.save({"w": tensor}, tmp_path / "ck")
    [name] = [name for name in os.listdir(tmp_path / "ck") if name.endswith(".safetensors")]
    with safe_open(tmp_path / "ck" / name, "pt") as file:
        assert list(file.keys()) == ["w"]
    if dtype not in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu):  # the library's torch side cannot build these yet
        found = load_file(tmp_path / "ck" / name)["w"].contiguous()
        assert found.view(torch.uint8).numpy().tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_whole_tensors_load_with_safetensors_as_they_are(tmp_path):
    """A checkpoint of whole tensors is a set of plain safetensors files, names and all, aligned for direct I/O."""
    state = {"model": {f"w{i}": torch.randn(i + 1, 1024) for i in range(5)}, "optim": {"m": torch.randn(3)}}
    sk.save(state, tmp_path / "ck")
    files = {name.split("-")[0]: name for name in os.listdir(tmp_path / "ck") if name.endswith(".safetensors")}
    model = load_file(tmp_path / "ck" / files["model"])
    assert sorted(files) == ["model", "optim"]
    assert {key: bits(value) for key, value in model.items()} == {
        f"model.{key}": bits(value) for key, value in state["model"].items()
    }
    raw = (tmp_path / "ck" / files["model"]).read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0


def test_either_group_of_files_can_be_dropped(tmp_path):
    state = {"model": {"w": torch.randn(4)}, "optim": {"m": torch.randn(4)}}
    sk.save(state, tmp_path / "ck")
    [optim] = (tmp_path / "ck").glob("optim-*")
    optim.unlink()
    blank = {"model": {"w": torch.zeros(4)}}
    sk.load(blank, tmp_path / "ck", include="model")
    assert torch.equal(blank["model"]["w"], state["model"]["w"])
    with pytest.raises(sk.WrongSize, match=r"optim-.*missing"):
        sk.load(blank_like(state), tmp_path / "ck")


def test_pickle_is_an_opt_in_at_both_ends(tmp_path):
    state = {"deep": {"thing": Colour}, "w": torch.ones(2)}
    with pytest.raises(sk.UnsupportedLeaf, match=r"deep\.thing"):
        sk.save(state, tmp_path / "ck")
    assert not (tmp_path / "ck").exists() or not list((tmp_path / "ck").iterdir())
    sk.save(state, tmp_path / "ck", allow_pickle=True)
    blank = {"deep": {"thing": None}, "w": torch.zeros(2)}
    with pytest.raises(sk.PickleRefused, match=r"deep\.thing"):
        sk.load(blank, tmp_path / "ck")
    assert not blank["w"].any()
    sk.load(blank, tmp_path / "ck", allow_pickle=True)
    assert blank["deep"]["thing"] is Colour


def test_numpy_arrays_are_filled_in_place(tmp_path):
    saved = np.random.default_rng(0).normal(size=(50, 3))
    sk.save({"a": saved}, tmp_path / "ck")
    mine = np.zeros((50, 3))
    sk.load({"a": mine}, tmp_path / "ck")
    assert np.array_equal(mine, saved)
    assert isinstance(sk.open(tmp_path / "ck").to_dict()["a"], np.ndarray)


def test_empty_states(tmp_path):
    for number, state in enumerate(({}, {"a": {}, "b": []})):
        sk.save(state, tmp_path / str(number))
        assert sk.open(tmp_path / str(number)).to_dict() == state
        sk.load(dict(state), tmp_path / str(number))


def test_a_user_may_call_a_tensor_anything(tmp_path):
    """Names that mean something in safetensors, in our own names or in a path are only names."""
    names = ["__metadata__", "w[0:4]", "../../etc", "a b", "ünï", "", ".", "@3", "x/y", "\n"]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    sk.save(state, tmp_path / "ck")
    assert bits(sk.open(tmp_path / "ck").to_dict()) == bits(state)
    assert {path.suffix for path in (tmp_path / "ck").iterdir()} == {".json", ".skindex", ".safetensors"}
