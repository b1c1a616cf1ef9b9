"""`shardkeep export`: what it writes, what it says, and how it ends."""

import pytest
import torch
from safetensors.torch import load_file

import shardkeep as sk
from shardkeep.cli.export import parse_rename
from shardkeep.cli.output import UsageError
from tests.cli.conftest import data_file, flip, state_of
from tests.engine.samples import bits


def test_a_model_is_exported(shardkeep, checkpoint, tmp_path):
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
    answer = shardkeep("export", checkpoint, tmp_path / "hf", "--prefix", "")
    assert answer.code == 0
    assert "left out" in answer.err
    assert "step" in answer.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s/a/b/", ("a", "b")),
        ("s|^x.|y/|", ("^x.", "y/")),
        ("s/a//g", ("a", "")),
        *((text, None) for text in ("a=b", "s/a/b", "s//b/", "s/a/b/i", "sxaxbx", "s")),
    ],
)
def test_renames_are_understood(text, expected):
    """Substitutions as in sed, with any sign for the slash. Anything else is refused."""
    if expected is None:
        with pytest.raises(UsageError, match="rename"):
            parse_rename(text)
    else:
        assert parse_rename(text) == expected


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5 kb", 1500), ("77", 77), (2e6, 2000000)]
    + [(text, None) for text in ("", "5 parsecs", "-1GB", "1e9", -1, b"5GB", float("inf"), float("nan"), True)],
)
def test_a_size_is_understood_wherever_one_is_taken(shardkeep, checkpoint, tmp_path, monkeypatch, text, nbytes):
    """In options, their variables, exports, object stores and on the command line: bytes, powers of ten or of two."""

    def variable():
        with monkeypatch.context() as patch:
            patch.setenv("SHARDKEEP_STAGING_BYTES", text)
            return sk.Options().staging_bytes

    takers = {
        "host_budget_bytes": lambda: sk.Options(host_budget_bytes=text).host_budget_bytes,
        "max_shard_bytes": lambda: sk.export(checkpoint, tmp_path / "hf", max_shard_bytes=text) and nbytes,
        "part_bytes": lambda: sk.open_place("s3://b/c", part_bytes=text, region="x").bucket.policy.part_bytes,
    }
    if text and isinstance(text, str):
        takers["SHARDKEEP_STAGING_BYTES"] = variable
        answer = shardkeep("export", checkpoint, tmp_path / "cli", f"--shard-size={text}")
        assert (answer.code, "--shard-size" in answer.err) == ((0, False) if nbytes else (2, True))
    for name, take in takers.items():
        if nbytes is None:
            with pytest.raises(sk.StateError, match=f"{name}=.* is not a size"):
                take()
        elif name != "part_bytes" or nbytes >= 5 << 20:
            assert take() == nbytes
