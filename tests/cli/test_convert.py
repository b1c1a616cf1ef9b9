"""`shardkeep convert`: between all layouts, and how it ends."""

from argparse import Namespace

import pytest
import torch

import shardkeep as sk
from tests.cli.conftest import state_of
from tests.exchange.samples import in_any_order


@pytest.mark.parametrize("layout", ["native", "dcp", "safetensors"])
def test_a_checkpoint_is_converted_there_and_back(shardkeep, checkpoint, tmp_path, layout):
    there = shardkeep("convert", checkpoint, tmp_path / "there", "--to", layout)
    assert (there.code, "7 tensors" in there.out, f"as {layout}" in there.out) == (0, True, True)
    back = shardkeep("convert", tmp_path / "there", tmp_path / "back", "--json")  # to native, as sk.convert
    assert (back.code, back.json["layout"], back.json["tensors"]) == (0, "native", 7)
    assert in_any_order(sk.open(tmp_path / "back").to_dict()) == in_any_order(state_of(30))


def test_names_are_dropped(shardkeep, checkpoint, tmp_path):
    assert shardkeep("convert", checkpoint, tmp_path / "a", "--to", "safetensors", "--drop", "optim").code == 0
    assert not [key for key in sk.open(tmp_path / "a") if key.startswith("optim")]
    wrong = shardkeep("convert", checkpoint, tmp_path / "b", "--to", "native", "--drop", "optimum")
    assert (wrong.code, "optimum" in wrong.err) == (2, True)


def test_what_torch_has_no_place_for_is_told(shardkeep, checkpoint, tmp_path):
    """Step and meta of the commit record, and, by its name, what ranks saved as their own, which is a plain dict there."""
    answer = shardkeep("convert", checkpoint, tmp_path / "a", "--to", "dcp")
    assert ("step, meta" in answer.err, "PerRank" in answer.err) == (True, False)
    sk.save({"w": torch.ones(2), "rng": sk.PerRank({"k": 1})}, tmp_path / "b")
    answer = shardkeep("convert", tmp_path / "b", tmp_path / "c", "--to", "dcp")
    assert (answer.code, "PerRank of 'rng'" in answer.err, "step" in answer.err) == (0, True, False)


def test_what_cannot_be_done_ends_with_two(shardkeep, checkpoint, tmp_path):
    """A taken target, the checkpoint's own place and an unknown layout end with 2; hints name arguments of the command."""
    taken = shardkeep("convert", checkpoint, checkpoint.parent / "step-20", "--to", "native")
    assert (taken.code, "hint: pass --overwrite to replace it" in taken.err) == (2, True)
    torch.save({"w": torch.ones(2), "odd": Namespace(lr=1)}, tmp_path / "odd.pt")
    refused = shardkeep("convert", tmp_path / "odd.pt", tmp_path / "a").err
    assert "hint: pass --allow-pickle if you trust it, or leave it out: --drop 'odd'" in refused
    assert "hint: pass allow_pickle=True" in shardkeep("show", tmp_path / "odd.pt", "odd").err
    assert shardkeep("convert", checkpoint, checkpoint, "--to", "native", "--overwrite").code == 2
    assert shardkeep("convert", checkpoint, tmp_path / "a", "--to", "zarr").code == 2
