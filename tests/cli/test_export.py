"""`shardkeep export`: what it writes, what it says, and how it ends."""

import pytest
import torch
from safetensors.torch import load_file

from shardkeep.cli.export import parse_rename, parse_size
from shardkeep.cli.output import UsageError
from tests.cli.conftest import data_file, flip, state_of
from tests.engine.samples import bits


def test_a_model_is_exported(shardkeep, checkpoint, tmp_path):
    """The words on the command line reach the export: names, dtype and file sizes; the answer says what was written."""
    answer = shardkeep(
        "export", checkpoint, tmp_path / "hf", "--dtype", "bf16", "--shard-size", "3kB",
        "--rename", r"s/^layers\./h./", "--exclude", "*.bias",
    )  # fmt: skip
    assert answer.code == 0
    assert "3 tensors" in answer.out
    assert "head.weight is tied to embed.weight" in answer.out
    names = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(names) == 3
    found = {}
    for name in names:
        found |= load_file(tmp_path / "hf" / name)
    model = state_of(30)["model"]
    expected = {"embed.weight": "embed.weight", "h.0.weight": "layers.0.weight", "h.10.weight": "layers.10.weight"}
    assert {k: bits(v) for k, v in found.items()} == {k: bits(model[v].bfloat16()) for k, v in expected.items()}


def test_one_json_document_is_printed(shardkeep, checkpoint, tmp_path):
    """With --json, stdout is one document that has the files, the ties and what was left out."""
    answer = shardkeep("export", checkpoint, tmp_path / "m.pt", "--format", "torch", "--json")
    assert answer.code == 0
    assert answer.json["files"] == ["m.pt"]
    assert answer.json["ties"] == {"head.weight": "embed.weight"}
    assert bits(torch.load(tmp_path / "m.pt", weights_only=True)["embed.weight"]) == bits(
        state_of(30)["model"]["embed.weight"]
    )


def test_what_cannot_be_done_ends_with_two(shardkeep, checkpoint, tmp_path):
    """A target that is taken, a damaged checkpoint and one that is not there end with 2, and say what to do."""
    assert shardkeep("export", checkpoint, tmp_path / "hf").code == 0
    again = shardkeep("export", checkpoint, tmp_path / "hf")
    assert (again.code, "--overwrite" in again.err) == (2, True)
    assert shardkeep("export", checkpoint, tmp_path / "hf", "--overwrite").code == 0
    assert shardkeep("export", tmp_path / "nothing", tmp_path / "x").code == 2
    flip(data_file(checkpoint), -10)
    damaged = shardkeep("export", checkpoint, tmp_path / "y", "--json")
    assert (damaged.code, damaged.json["error"]["kind"]) == (2, "ChecksumMismatch")


def test_values_that_are_left_out_are_told(shardkeep, checkpoint, tmp_path):
    """Plain values that a Hugging Face model cannot hold are named on stderr."""
    answer = shardkeep("export", checkpoint, tmp_path / "hf", "--prefix", "")
    assert answer.code == 0
    assert "left out" in answer.err
    assert "step" in answer.err


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5e9), ("512MiB", 512 << 20), ("1.5 kb", 1500), ("77", 77)])
def test_sizes_are_understood(text, nbytes):
    """Powers of ten and of two, with and without B, mean what disks and memory mean by them."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "5 parsecs", "-1GB", "0", "1e9"])
def test_what_is_no_size_is_refused(text):
    """Anything else is refused with an example."""
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "pair"), [("s/a/b/", ("a", "b")), ("s|^x.|y/|", ("^x.", "y/")), ("s/a//g", ("a", ""))]
)
def test_renames_are_written_as_in_sed(text, pair):
    """Any sign may stand for the slash, and the replacement may be empty."""
    assert parse_rename(text) == pair


@pytest.mark.parametrize("text", ["a=b", "s/a/b", "s//b/", "s/a/b/i", "sxaxbx", "s"])
def test_what_is_no_rename_is_refused(text):
    """What sed would not take, or means otherwise there, is refused."""
    with pytest.raises(UsageError, match="rename"):
        parse_rename(text)
