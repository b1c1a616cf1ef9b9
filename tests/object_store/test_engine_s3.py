"""What the engine asks of a real S3 server. `tests/clouds/test_engine.py` has what it does on any service."""

import numpy as np
import torch

import shardkeep as sk
from shardkeep.layouts import orphans as leftovers
from tests.engine.many_chunks import write_many_chunks


def test_a_row_of_a_large_tensor_costs_little(proxy, s3_place):
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


def test_one_tensor_of_many_chunks_takes_three_requests(proxy, s3_place):
    """
    The record, a look for that of another layout, and the first 64 KiB of the index answer for name and shape of a tensor,
    for where its rows are, and for a value; a row takes the digests of its file, and its block.
    """
    write_many_chunks(s3_place(path="tests/many-chunks"))
    place = s3_place(endpoint=proxy.endpoint, path="tests/many-chunks")

    proxy.rules = []
    checkpoint = sk.open(place)
    weight = checkpoint["model.layers.050.weight"]
    assert weight.shape == (1000, 3)
    kinds = [request.path.rpartition(".")[2] for request in proxy.counts.requests]
    assert kinds == ["json", "metadata", "skindex"]
    assert proxy.counts.received < 80 << 10

    proxy.rules = []
    assert weight[7].tolist() == [71.0, 72.0, 73.0]
    assert checkpoint["step"] == 12
    kinds = [request.path.rpartition(".")[2] for request in proxy.counts.requests]
    assert kinds == ["safetensors", "blocks", "safetensors"]  # the rest of the index came with its first bytes


def test_places_that_are_gone_cost_nothing(s3_place, monkeypatch):
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
