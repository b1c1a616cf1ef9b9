"""The engine on a real S3 server: ranks, resharding, races, ranged reads, many checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import orphans as leftovers
from shardkeep.storage.object_store import ObjectStore
from tests.object_store.jobs import load_by_url, race, save_by_url
from tests.object_store.proxy import Proxy
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server

Opens = Callable[..., ObjectStore]


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with Proxy(s3_server.port) as proxy:
        yield proxy


def names_in(place: ObjectStore) -> set[str]:
    return {info.name for info in place.list()}


def places_of(root: ObjectStore) -> list[str]:
    """Name the places that have anything in them; this server goes on listing others for a while."""
    return sorted(name for name in root.places() if list(root.place(name).list()))


def test_ranks_save_and_any_number_of_ranks_load(rank_pool: RankPool, s3_server: S3Server, s3_place: Opens) -> None:
    """Saved by three ranks and loaded bit for bit by any number; no file is written on the machine."""
    place = s3_place()
    rank_pool.run(3, save_by_url, place.url, s3_server.environment, 10)
    for ranks in (2, 4):
        rank_pool.run(ranks, load_by_url, place.url, s3_server.environment, 11)
    ck = sk.open(place)
    assert ck.verify().files > 0
    assert ck.step == 11
    assert [ck[f"rng.@{rank}"] for rank in range(3)] == [[11, rank] for rank in range(3)]
    assert names_in(place) == {RECORD_NAME, *ck.record.names}


def test_of_machines_that_commit_at_once_one_wins(rank_pool: RankPool, s3_server: S3Server, s3_place: Opens) -> None:
    """Of four that commit to one place in the same moment one wins, and nothing of the others is left."""
    place = s3_place()
    for k in (10, 20):
        ends = rank_pool.run(4, race, place.url, s3_server.options, k)
        assert ends.count("won") == 1, ends
        ck = sk.open(place)
        ck.verify()
        assert ck.step == k + ends.index("won")
        assert torch.equal(ck["w"].tensor(), torch.full((999,), ck.step))
        for end in ends:
            assert end == "won" or ck.record.save_id in end, ends
        assert names_in(place) == {RECORD_NAME, *ck.record.names}


def test_a_row_of_a_large_tensor_costs_little(proxy: Proxy, s3_place: Opens) -> None:
    """One row of 20 MB is read by one request for the blocks around it: with opening, less than a hundredth passes."""
    weights = torch.randn(5000, 1024)
    place = s3_place(endpoint=proxy.endpoint)
    sk.save({"w": weights}, place)

    proxy.rules = []
    ck = sk.open(place)
    assert torch.equal(ck["w"][4321], weights[4321])
    assert proxy.counts.received < weights.nbytes / 100
    assert {request.method for request in proxy.counts.requests} == {"GET"}

    proxy.rules = []
    assert np.array_equal(ck["w"][17:19].numpy(), weights[17:19].numpy())
    assert [request.path.rpartition(".")[2] for request in proxy.counts.requests] == ["safetensors"] * 2
    assert proxy.counts.received <= 192 << 10


def test_many_checkpoints_in_a_bucket(s3_server: S3Server, s3_place: Opens) -> None:
    """A Checkpointer keeps its last two, holds its root against others, and restores the newest that is whole."""
    root = s3_place()
    state = {"w": torch.zeros(1000), "step": 0}
    with sk.Checkpointer(root, every_steps=1, keep_last=2) as ckpt:
        for step in range(1, 5):
            state["w"].fill_(step)
            ckpt.step(step, {**state, "step": step})
        ckpt.wait()
        assert ckpt.all_steps() == [3, 4]
        with pytest.raises(sk.RootInUse), sk.Checkpointer(root) as other:
            other.save(9, state)
    assert places_of(root) == ["step-3", "step-4"]
    assert root.get("latest", limit=99) == b"step-4\n"
    assert names_in(root) == {"latest"}
    assert [entry.step for entry in sk.Catalog(root)] == [4, 3]

    flip_a_bit(root.place("step-4"), ".safetensors")
    with sk.Checkpointer(root) as ckpt:
        assert ckpt.restore_latest(state) == 3
    assert state["step"] == 3
    assert state["w"].eq(3).all()


def flip_a_bit(place, end: str) -> None:
    [name] = [info.name for info in place.list() if info.name.endswith(end)]
    data = bytearray(place.get(name, limit=1 << 24))
    data[-3] ^= 1
    place.put(name, bytes(data), replace=True)


Opened = Callable[..., ObjectStore]


def test_places_that_are_gone_cost_nothing(s3_place: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was found empty is not looked at again, though the service still lists it."""
    root, looked = s3_place(), []
    with sk.Checkpointer(root, every_steps=1, keep_last=1, asynchronous=False) as ckpt:
        real_survey = leftovers.survey
        monkeypatch.setattr(
            leftovers, "survey", lambda store, *more: looked.append(store.url) or real_survey(store, *more)
        )
        for step in range(1, 6):
            ckpt.step(step, {"w": torch.ones(3)})
            ckpt.wait()
        assert ckpt.all_steps() == [5]
    assert max(map(looked.count, looked)) == 3  # twice by its own save, and once when it was gone
