"""Saves keep to their budget of memory, codecs and parts of uploads included; and how a budget is divided."""

import pytest
import torch

import shardkeep as sk
from shardkeep.engine.workers import MIN_WINDOW_NBYTES, divide_budget
from shardkeep.storage import multipart
from shardkeep.storage.buffers import MemoryBudget
from shardkeep.storage.cancel import CancelScope
from shardkeep.testing.store_contract import read_blob, sample
from tests.engine.samples import bits
from tests.engine.test_memory import peak_growth

MIB = 1 << 20
SLACK = 24 * MIB
"""Threads' stacks and arenas, connections, the allocator's own; as on local disks."""


@pytest.mark.parametrize(("budget", "codecs"), [(32, ["float"]), (16, None)], ids=["32 coded", "16 plain"])
def test_a_save_to_s3_stays_within_its_budget(s3_place, budget, codecs):
    options = sk.Options(host_budget_bytes=budget * MIB)
    place = s3_place()
    sk.save({"warm": torch.randn(3 * MIB)}, place, codecs=codecs, options=options)  # threads, connections, modules
    state = {f"m{i}": {"w": torch.randn(budget * MIB // 4)} for i in range(3)}
    assert peak_growth(lambda: sk.save(state, place, overwrite=True, codecs=codecs, options=options)) < (
        budget * MIB + SLACK
    )
    found = {key: {"w": torch.zeros_like(value["w"])} for key, value in state.items()}
    for each in found.values():
        each["w"].fill_(1)  # its memory is there before it is measured
    assert peak_growth(lambda: sk.load(found, place, options=options)) < budget * MIB + SLACK
    assert bits(found) == bits(state)


def test_an_asynchronous_save_with_codecs_stays_within_its_budget(s3_place):
    """Besides the copy of the state, which is made in the call, it holds no more than one that is waited for."""
    options = sk.Options(host_budget_bytes=32 * MIB)
    place = s3_place()
    sk.save({"warm": torch.randn(3 * MIB)}, place, codecs=["float"], options=options)
    state = {f"m{i}": {"w": torch.randn(8 * MIB)} for i in range(3)}

    def saved():
        sk.async_save(state, place, overwrite=True, codecs=["float"], options=options).result()

    try:
        assert peak_growth(saved) < (96 + 32) * MIB + SLACK
    finally:
        sk.finish_saves()


@pytest.mark.parametrize("codecs", [None, ["float"]], ids=["plain", "coded"])
def test_an_absurd_budget_makes_a_save_slow_and_no_more(s3_place, codecs):
    """With one byte to work in, one thread writes with the least there is, and every bit comes back."""
    options = sk.Options(host_budget_bytes=1)
    place = s3_place(part_bytes=5 * MIB)
    state = {f"m{i}": {"w": torch.randn(3 * MIB // 2)} for i in range(2)}
    sk.save(state, place, codecs=codecs, options=options)
    found = {key: {"w": torch.zeros_like(value["w"])} for key, value in state.items()}
    sk.load(found, place, options=options)
    assert bits(found) == bits(state)


@pytest.mark.parametrize("piece", [5 * MIB, 3 * MIB], ids=["whole parts", "pieces"])
def test_no_upload_on_terms_waits_for_itself(s3_place, monkeypatch, piece):
    """Where parts were promised in order and come backwards, without any room, they are taken all the same at last."""
    monkeypatch.setattr(multipart, "_LONG_GRACE_S", 0.05)
    place = s3_place(part_bytes=5 * MIB)
    data = sample(15 * MIB)
    with CancelScope(budget=MemoryBudget(0)).active():
        writer = place.create("a", len(data))
    for at in reversed(range(0, len(data), piece)):
        writer.write_at(at, memoryview(data)[at : at + piece])
    writer.finish()
    assert read_blob(place, "a") == data


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("part", [0, 5 * MIB, 8 * MIB, 64 * MIB])
def test_what_is_shared_out_is_no_more_than_the_budget(part, coded):
    """Windows, what codecs hold, parts and room fit in; if nothing does, one thread has the least there is."""
    for threads in (1, 2, 8, 16, 64):
        for budget in (1, 7 * MIB, 16 * MIB, 32 * MIB, 100 * MIB, 256 * MIB, 4096 * MIB):
            shares = divide_budget(threads, budget, coded=coded, part_nbytes=part)
            window = shares.window_nbytes
            each = window + (2 * min(window, 4 * MIB) + 2 * MIB if coded else 0) + (0 if part else window)
            held = shares.threads * each + (shares.threads - 1) * part + shares.room_nbytes
            least = shares.threads == 1 and window == MIN_WINDOW_NBYTES and shares.room_nbytes == part
            assert held <= budget or least
            assert 1 <= shares.threads <= threads
            assert window % MIB == 0


def test_windows_stay_parts_where_they_are_sent_as_they_are():
    """With little memory a plain upload has few threads, whose windows need no copies; a default one has all."""
    assert divide_budget(16, 256 * MIB, part_nbytes=8 * MIB)[:2] == (16, 8 * MIB)
    assert divide_budget(16, 64 * MIB, part_nbytes=8 * MIB)[:2] == (4, 8 * MIB)
    assert divide_budget(16, 16 * MIB, part_nbytes=8 * MIB)[:2] == (1, 8 * MIB)
