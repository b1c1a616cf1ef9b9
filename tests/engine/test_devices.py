"""What is asked of accelerators."""

import torch

import shardkeep as sk
from tests.engine.samples import bits


def test_a_state_in_host_memory_asks_no_accelerator(monkeypatch):
    """torch refuses CUDA to whatever is forked after the first question, be it only whether there is a device."""

    def refuse(*_, **__):
        raise AssertionError("an accelerator was asked")

    for name in ("is_available", "device_count", "current_device_index", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    state = {"w": torch.arange(1000.0), "columns": torch.arange(12).view(3, 4).t(), "step": 1}
    places = [sk.MemoryStore(), sk.MemoryStore()]
    sk.save(state, places[0])
    sk.async_save(state, places[1]).result(60)
    for place in places:
        found = {"w": torch.zeros(1000), "columns": torch.zeros(4, 3, dtype=torch.int64), "step": 0}
        sk.load(found, place)
        assert bits(found) == bits(state)
