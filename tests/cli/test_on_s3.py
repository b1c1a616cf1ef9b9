"""Every command that takes a place takes the URL of one: on a real S3 server and in memory, with the words it has for disks."""

import uuid

import obstore
import pytest
import torch

import shardkeep as sk
from shardkeep.cli import bench
from tests.cli.conftest import state_of


@pytest.fixture(scope="module")
def bucket_url(s3_server):
    """A place in a bucket; the environment says where that is."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        yield s3_server.url(f"cli-{uuid.uuid4().hex}")


@pytest.fixture(scope="module", params=["s3", "memory"])
def run_url(request):
    url = (request.getfixturevalue("bucket_url") if request.param == "s3" else "memory://cli") + "/run"
    for step in (10, 20, 30):
        sk.save(state_of(step), f"{url}/step-{step}", step=step, meta={"metrics": {"loss": 3.0 - step / 20}})
    return url


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
        (["verify", "{run}/step-30", "--quick"], "no data was read"),
        (["prune", "{run}", "--keep-last", "2", "--dry-run"], "1 checkpoint to delete"),
        (["doctor", "{run}"], "safe, by "),
    ],
)
def test_looking(shardkeep, run_url, words, said):
    answer = shardkeep(*(word.format(run=run_url) for word in words))
    assert answer.code == 0, answer.err
    assert said.format(run=run_url) in answer.out


def test_any_name_and_folders(shardkeep, run_url):
    """Checkpoints of any name are listed and verified, and a prefix of runs is listed as runs."""
    folder = f"{run_url}-folder"
    for name, step in (("epoch=3-step=300", 300), ("best one", 400)):
        sk.save(state_of(1), f"{folder}/a/{name}", step=step)
    assert shardkeep("ls", f"{folder}/a", "--names").out.splitlines() == ["best one", "epoch=3-step=300"]
    assert shardkeep("ls", folder, "--names").out.splitlines() == ["a"]
    assert "2 of 2 checkpoints sound" in shardkeep("verify", folder).out
    assert shardkeep("pin", f"{run_url}/step-10").code == shardkeep("unpin", f"{run_url}/step-10").code == 0


def test_what_is_not_there(shardkeep, run_url):
    """A misspelt URL gets a suggestion; a checkpoint is not a run."""
    answer = shardkeep("ls", f"{run_url}/stepp-30")
    assert answer.code == 2
    assert "step-30" in answer.err
    answer = shardkeep("prune", f"{run_url}/step-30", "--keep-last", "1")
    assert answer.code == 2
    assert f"give the directory that contains it: {run_url}" in answer.err
    assert "there is no run here" in shardkeep("prune", f"{run_url}s", "--keep-last", "1").err


@pytest.mark.parametrize("command", ["ls", "bench"])
def test_a_bucket_that_is_not_there(shardkeep, bucket_url, command):
    answer = shardkeep(command, "s3://no-such-bucket/run")
    assert answer.code == 2
    assert "no-such-bucket" in answer.err
    assert "measuring" not in answer.err


def test_differences(shardkeep, run_url):
    answer = shardkeep("diff", f"{run_url}/step-10", f"{run_url}/step-20")
    assert answer.code == 1
    assert "model.embed.weight" in answer.out
    assert shardkeep("diff", f"{run_url}/step-10", f"{run_url}/step-10").code == 0


def test_there_and_back(shardkeep, run_url, tmp_path):
    away = run_url.removesuffix("run")
    assert shardkeep("convert", f"{run_url}/step-20", f"{away}dcp", "--to", "dcp").code == 0
    assert shardkeep("convert", f"{away}dcp", tmp_path / "back", "--to", "native").code == 0
    assert shardkeep("export", f"{run_url}/step-20", f"{away}hf").code == 0
    model = state_of(20)["model"]
    assert torch.equal(sk.open(tmp_path / "back")["model.embed.weight"][:], model["embed.weight"])
    assert torch.equal(sk.open(f"{away}hf")["layers.10.weight"][:], model["layers.10.weight"])
    assert shardkeep("verify", f"{away}dcp", f"{away}hf").code == 0


def test_prune(shardkeep, run_url):
    other = run_url + "-pruned"
    for step in (1, 2, 3):
        sk.save(state_of(step), f"{other}/step-{step}", step=step)
    assert shardkeep("prune", other, "--keep-last", "1", "--yes").code == 0
    assert [entry.step for entry in sk.Catalog(other).entries()] == [3]
    assert not [*sk.open_place(f"{other}/step-1").list(), *sk.open_place(f"{other}/step-2").list()]
    assert shardkeep("verify", other).code == 0


def test_rotate(shardkeep, run_url, tmp_path, monkeypatch):
    """Afterwards the new key alone opens the checkpoint, and no data were written."""
    place, keys = sk.open_place(f"{run_url}-secret/step-1"), tmp_path / "keys"
    monkeypatch.setenv("SHARDKEEP_KEY_FILE", str(keys))
    old, new = sk.new_key(), sk.new_key()
    keys.write_text(old)
    sk.save(state_of(1), place, step=1, codecs=["float", "aes"])
    before = [info for info in place.list() if info.name.endswith(".skframes")]
    keys.write_text(f"{new}\n{old}\n")
    assert "1 checkpoint rotated" in shardkeep("rotate", f"{run_url}-secret").out
    assert [info for info in place.list() if info.name.endswith(".skframes")] == before != []
    keys.write_text(new)
    assert torch.equal(sk.open(place)["model.embed.weight"][:], state_of(1)["model"]["embed.weight"])


def objects_below(url):
    root = sk.open_place(url)
    return [each["path"] for chunk in obstore.list(root.bucket.client, root.prefix) for each in chunk]


def test_bench(shardkeep, bucket_url):
    """The store is measured, and shardkeep beside it; nothing is left, and it is said that torch is left out."""
    answer = shardkeep("bench", f"{bucket_url}/bench", "--gb", "0.02", "--rounds", "1")
    assert answer.code == 0
    assert "torch DCP is left out" in answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert [row[:-4] for row in rows[3:]] == [["raw"], ["shardkeep"]]
    assert rows[2] == ["GB/s", "write", "of-raw", "read", "of-raw"]
    assert objects_below(f"{bucket_url}/bench") == []


def test_bench_that_fails_leaves_nothing(shardkeep, bucket_url, monkeypatch):
    url = f"{bucket_url}/failing"
    sk.open_place(url).put("mine", b"x")

    def fail(name, where, nbytes, rounds):
        sk.open_place(f"{where}/round").put("a", b"x")
        raise sk.StorageError("injected")

    monkeypatch.setattr(bench, "measure", fail)
    answer = shardkeep("bench", url)
    assert answer.code == 2
    assert "injected" in answer.err
    assert [path.rpartition("/")[2] for path in objects_below(url)] == ["mine"]
