"""Every command that takes a place takes the URL of one: on a real S3 server, with the words it has for disks."""

import pytest
import torch

import shardkeep as sk
from tests.cli.conftest import state_of


@pytest.fixture(scope="module")
def run_url(s3_server):
    """A run of three checkpoints in a bucket; the environment says where that is."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        url = s3_server.url("cli/run")
        for step in (10, 20, 30):
            sk.save(state_of(step), f"{url}/step-{step}", step=step, meta={"metrics": {"loss": 3.0 - step / 20}})
        yield url


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "{run}"], "3 checkpoints"),
        (["ls", "{run}/step-30", "model"], "model.embed.weight"),
        (["show", "{run}/step-30", "model.embed.weight"], "[64, 32]"),
        (["show", "{run}/step-30", "step"], "30"),
        (["du", "{run}"], "step-20"),
        (["du", "{run}/step-30"], "optimizer"),
        (["cat", "{run}/step-30"], '"step": 30'),
        (["latest", "{run}"], "{run}/step-30"),
        (["verify", "{run}"], "3 of 3 checkpoints sound"),
        (["verify", "{run}/step-30", "--deep"], "ok"),
        (["prune", "{run}", "--keep-last", "2", "--dry-run"], "1 checkpoint to delete"),
    ],
)
def test_looking(shardkeep, run_url, words, said):
    """What looks at a run or a checkpoint."""
    answer = shardkeep(*(word.format(run=run_url) for word in words))
    assert answer.code == 0, answer.err
    assert said.format(run=run_url) in answer.out


def test_what_is_not_there(shardkeep, run_url):
    """A misspelt place is told with the one that was meant; a checkpoint is no run; a bucket that is not there is said."""
    answer = shardkeep("ls", f"{run_url}/stepp-30")
    assert answer.code == 2
    assert "step-30" in answer.err
    answer = shardkeep("prune", f"{run_url}/step-30", "--keep-last", "1")
    assert answer.code == 2
    assert f"give the place it is in: {run_url}" in answer.err
    assert "nothing is there" in shardkeep("prune", f"{run_url}s", "--keep-last", "1").err
    answer = shardkeep("ls", "s3://no-such-bucket/run")
    assert answer.code == 2
    assert "no-such-bucket" in answer.err


def test_differences(shardkeep, run_url):
    """Two checkpoints in a bucket are compared."""
    answer = shardkeep("diff", f"{run_url}/step-10", f"{run_url}/step-20")
    assert answer.code == 1
    assert "model.embed.weight" in answer.out
    assert shardkeep("diff", f"{run_url}/step-10", f"{run_url}/step-10").code == 0


def test_there_and_back(shardkeep, run_url, tmp_path):
    """Converted to torch's layout and exported to Hugging Face inside the bucket, and converted back to a disk: exact."""
    away = run_url.removesuffix("run")
    assert shardkeep("convert", f"{run_url}/step-20", f"{away}dcp", "--to", "dcp").code == 0
    assert shardkeep("convert", f"{away}dcp", tmp_path / "back", "--to", "native").code == 0
    assert shardkeep("export", f"{run_url}/step-20", f"{away}hf").code == 0
    model = state_of(20)["model"]
    assert torch.equal(sk.open(tmp_path / "back")["model.embed.weight"][:], model["embed.weight"])
    assert torch.equal(sk.open(f"{away}hf")["layers.10.weight"][:], model["layers.10.weight"])
    assert shardkeep("verify", f"{away}dcp", f"{away}hf", "--deep").code == 0


def test_prune(shardkeep, run_url):
    """What no rule keeps is deleted from the bucket, all of it; what is kept is sound."""
    other = run_url + "-pruned"
    for step in (1, 2, 3):
        sk.save(state_of(step), f"{other}/step-{step}", step=step)
    assert shardkeep("prune", other, "--keep-last", "1", "--yes").code == 0
    assert [entry.step for entry in sk.Catalog(other).entries()] == [3]
    assert not [*sk.open_place(f"{other}/step-1").list(), *sk.open_place(f"{other}/step-2").list()]
    assert shardkeep("verify", other, "--deep").code == 0
