"""What the engine asks of a real S3 server. `tests/clouds/test_engine.py` has what it does on any service."""

import numpy as np
import torch

import shardkeep as sk
from shardkeep.layouts import orphans as leftovers


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
