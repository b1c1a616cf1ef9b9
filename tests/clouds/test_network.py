"""Answers that are lost on the way from Azure and Google: what was done is not taken for a failure, nor done twice."""

import secrets

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StorageError
from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from shardkeep.testing.store_contract import read_blob, sample
from tests.object_store.proxy import Proxy, Rule

PART = 5 << 20
THE_END = "comp=blocklist|^(?!.*partNumber).*uploadId="
"""Of an upload in parts, to Azure or Google."""


@pytest.fixture
def proxy(cloud):
    with Proxy(cloud.port) as proxy:
        yield proxy


@pytest.fixture
def place(cloud, proxy):
    options = {**cloud.options, "part_bytes": PART, "requests": 4, "retries": 3, "timeout_s": 20}
    options["endpoint"] = options["endpoint"].replace(str(cloud.port), str(proxy.port))
    found = open_place(cloud.url(f"network/{secrets.token_hex(4)}"), **options)
    assert isinstance(found, ObjectStore)
    found.put("first", b"x")  # conditions are tried out with this
    return found


def test_the_lost_answer_to_the_end_of_an_upload(place, proxy):
    """To ask for it again says that the parts are gone: the object is looked for, and is there."""
    data = sample(2 * PART + 99)
    proxy.rules = [Rule("lose_answer", method="PUT|POST", path=THE_END, times=1)]
    writer = place.create("a", len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()
    assert proxy.counts.faults["lose_answer"] == 1
    assert read_blob(place, "a") == data


def test_the_lost_answer_to_a_put(place, proxy):
    """One that is to create only, and one over a version: what is there is compared with what was sent."""
    proxy.rules = [Rule("lose_answer", method="PUT", path="(/|%2F)a$", times=1)]
    place.put("a", b"one")
    seen = place.version("a")
    proxy.rules = [Rule("lose_answer", method="PUT", path="(/|%2F)a$", times=1)]
    place.put("a", b"two", over=seen)
    assert proxy.counts.faults["lose_answer"] == 1
    assert place.get("a", limit=3) == b"two"
    with pytest.raises(StorageError, match="replaced or deleted by another writer"):
        place.put("a", b"three", over=seen)


@pytest.mark.parametrize("fault", ["slow_down", "cut_answer", "refuse"])
def test_a_save_and_a_load_through_a_bad_network(place, proxy, fault):
    """Requests that fail in passing are made again; every bit arrives."""
    state = {"w": torch.randn(3 << 20), "step": 3}
    proxy.rules = [Rule(fault, chance=0.2, first=True)]
    sk.save(state, place.place("ckpt"))
    found = {"w": torch.zeros(3 << 20), "step": 0}
    sk.load(found, place.place("ckpt"))
    assert proxy.counts.faults[fault] > 0
    assert torch.equal(found["w"], state["w"])
