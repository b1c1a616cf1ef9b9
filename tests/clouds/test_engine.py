"""The engine on S3, Azure and Google: ranks, races, uploads in parts, many checkpoints, codecs, the command line."""

import itertools

import pytest
import torch

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.format.record import RECORD_NAME
from shardkeep.testing.store_contract import read_blob, sample
from tests.object_store.jobs import load_by_url, race, save_by_url

PART = 5 << 20


@pytest.fixture(params=["s3", "azure", "google"])
def cloud(request):
    return request.getfixturevalue(f"{request.param}_server")


def names_in(place):
    return {info.name for info in place.list()}


def places_of(root):
    """Name the places that have anything in them; the S3 server goes on listing others for a while."""
    return sorted(name for name in root.places() if list(root.place(name).list()))


def test_ranks_save_and_others_load(rank_pool, cloud, cloud_place):
    """Saved by two ranks, in their call and in the background, by variables alone, and loaded bit for bit by others."""
    place = cloud_place()
    rank_pool.run(2, save_by_url, place.url, cloud.environment, 10)
    for ranks in (1, 3):
        rank_pool.run(ranks, load_by_url, place.url, cloud.environment, 11)
    ck = sk.open(place)
    assert ck.verify().files > 0
    assert ck.step == 11
    assert [ck[f"rng.@{rank}"] for rank in range(2)] == [[11, rank] for rank in range(2)]
    assert names_in(place) == {RECORD_NAME, *ck.record.names}


def test_of_machines_that_commit_at_once_one_wins(rank_pool, cloud, cloud_place):
    """Four that know nothing of each other commit to an empty place, then over a checkpoint: each time one wins."""
    place = cloud_place()
    for k in (10, 20):
        ends = rank_pool.run(4, race, place.url, cloud.options, k)
        assert ends.count("won") == 1, ends
        ck = sk.open(place)
        ck.verify()
        assert ck.step == k + ends.index("won")
        assert torch.equal(ck["w"].tensor(), torch.full((999,), ck.step))
        assert all(end == "won" or "another save committed a checkpoint here meanwhile" in end for end in ends), ends
        assert names_in(place) == {RECORD_NAME, *ck.record.names}


def test_large_blobs_go_up_in_parts(cloud_place):
    place = cloud_place(part_bytes=PART, requests=4)
    data = sample(3 * PART + 12345)
    cuts = [*range(0, len(data), PART), len(data)]
    writer = place.create("a", 10 * PART)
    for start, stop in reversed(list(itertools.pairwise(cuts))):
        writer.write_at(start, memoryview(data)[start:stop])
    writer.finish(len(data))
    assert read_blob(place, "a") == data
    writer = place.create("b", 3 * PART)
    writer.write_at(0, memoryview(data)[: 2 * PART])
    writer.abandon()
    assert names_in(place) == {"a"}
    writer = place.create("b", 2 * PART)
    writer.write_at(0, memoryview(data)[PART : 3 * PART])
    writer.finish()
    assert read_blob(place, "b") == data[PART : 3 * PART]


def test_many_checkpoints_and_the_command_line(cloud, cloud_place, monkeypatch, capsys):
    """A run keeps its last two, holds its root against others, and is listed, checked and pruned by its URL."""
    root = cloud_place()
    state = {"w": torch.zeros(1000), "step": 0}
    with sk.Checkpointer(root, every_steps=1, keep_last=2) as ckpt:
        for step in range(1, 5):
            state["w"].fill_(step)
            ckpt.step(step, {**state, "step": step})
        ckpt.wait()
        with pytest.raises(sk.RootInUse), sk.Checkpointer(root) as other:
            other.save(9, state)
    assert places_of(root) == ["step-3", "step-4"]
    assert names_in(root) == {"latest"}
    assert root.get("latest", limit=99) == b"step-4\n"
    assert [entry.step for entry in sk.Catalog(root)] == [4, 3]
    with sk.Checkpointer(root) as ckpt:
        assert ckpt.restore_latest(state) == 4
    assert state["w"].eq(4).all()

    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    for words, said in [
        (["ls", root.url], "2 checkpoints"),
        (["verify", root.url], "2 of 2 checkpoints sound"),
        (["prune", root.url, "--keep-last", "1", "--yes"], "step-3"),
        (["latest", root.url], f"{root.url}/step-4"),
    ]:
        assert main(words) == 0, capsys.readouterr()
        assert said in capsys.readouterr().out
    assert places_of(root) == ["step-4"]


def test_codecs_and_other_layouts(cloud_place):
    """A checkpoint that is compressed is loaded, converted to torch's layout beside it, and back: every bit is the same."""
    root = cloud_place()
    state = {"w": torch.randn(300, 1000), "zeros": torch.zeros(1 << 20), "step": 7}
    sk.save(state, root.place("packed"), codecs=["float", "zstd"])
    sk.convert(root.place("packed"), root.place("torch"), layout="dcp")
    sk.convert(root.place("torch"), root.place("back"), layout="native")
    for name in ("packed", "back"):
        found = {"w": torch.empty(300, 1000), "zeros": torch.ones(1 << 20), "step": 0}
        sk.load(found, root.place(name))
        assert torch.equal(found["w"], state["w"])
        assert found["zeros"].eq(0).all()
        assert found["step"] == 7
        sk.open(root.place(name)).verify()
