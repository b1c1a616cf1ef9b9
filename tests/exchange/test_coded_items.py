"""Checkpoints of torch's layout whose items go through codecs, as conversions write them."""

import math

import pytest
import torch
import torch.distributed.checkpoint as theirs
from hypothesis import given
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep import dcp
from shardkeep.conversion.to_torch import cut
from shardkeep.format.boxes import Box, whole
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.engine.samples import bits, random_tensor
from tests.exchange.samples import in_any_order, training_state
from tests.protocol.samples import quietly

SMALL = sk.Options(host_budget_bytes=4 << 20, io_threads=2)


@pytest.mark.parametrize("codecs", [["zstd"], ["float", "zstd:3", "aes"]])
def test_the_drop_in_reads_what_was_coded(tmp_path, monkeypatch, codecs):
    """
    All of a state, a tensor that is cut among it, comes back bit for bit through `shardkeep.dcp`, `open` and another
    conversion; torch says that it does not know the extension.
    """
    monkeypatch.setenv("SHARDKEEP_KEY", bytes(range(32)).hex())
    large = torch.zeros(3, 1000, 200)  # some chunks of a megabyte
    large[1] = random_tensor((1000, 200), torch.float32, 9)
    state = {**training_state(), "large": large}
    sk.save(state, tmp_path / "native")
    report = sk.convert(tmp_path / "native", tmp_path / "dcp", "dcp", codecs=codecs, options=SMALL)
    assert report.bytes_written < large.nbytes
    found = sk.open(tmp_path / "dcp")
    found.verify()
    assert in_any_order(found.to_dict()) == in_any_order(state)
    into = {"large": torch.ones_like(large), "optim": {"exp_avg": torch.ones(31, 8)}, "step": 0}
    quietly(dcp.load, into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert bits(into) == bits({"large": large, "optim": {"exp_avg": state["optim"]["exp_avg"]}, "step": 7})
    assert len(dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata["large"].chunks) > 2
    sk.convert(tmp_path / "dcp", tmp_path / "back", "native")
    assert in_any_order(sk.open(tmp_path / "back").to_dict()) == in_any_order(state)
    with pytest.raises(theirs.CheckpointException, match=r"stream\.shardkeep"):
        quietly(theirs.load, {"large": large}, checkpoint_id=tmp_path / "dcp", no_dist=True)


class _Service:
    """Keys of a service, which only whoever has this object can ask."""

    def __init__(self):
        self._ring = sk.KeyRing.from_text(sk.new_key())

    def wrap(self, data_key):
        return self._ring.wrap(data_key)

    def unwrap(self, key_id, wrapped):
        return self._ring.unwrap(key_id, wrapped)


def test_keys_of_the_options_open_what_they_closed(tmp_path):
    """
    What was converted with keys of the options is opened, loaded, checked, converted and exported with them, and not
    without; its keys are not rotated, and it says so.
    """
    options = sk.Options(keys=_Service())
    state = training_state()
    sk.save(state, tmp_path / "native")
    sk.convert(tmp_path / "native", tmp_path / "dcp", "dcp", codecs=["aes"], options=options)
    found = sk.open(tmp_path / "dcp", options=options)
    found.verify()
    assert in_any_order(found.to_dict()) == in_any_order(state)
    into = {"optim": {"exp_avg": torch.ones(31, 8)}, "step": 0}
    sk.load(into, tmp_path / "dcp", strict=False, options=options)
    assert bits(into) == bits({"optim": {"exp_avg": state["optim"]["exp_avg"]}, "step": 7})
    sk.convert(tmp_path / "dcp", tmp_path / "back", "native", options=options)
    assert in_any_order(sk.open(tmp_path / "back").to_dict()) == in_any_order(state)
    assert sk.export(tmp_path / "dcp", tmp_path / "hf", options=options).tensors
    with pytest.raises(sk.KeyMissing) as caught:
        sk.open(tmp_path / "dcp").to_dict()
    assert "new_key" not in caught.value.hint
    with pytest.raises(sk.KeyMissing) as caught:
        sk.save(state, tmp_path / "other", codecs=["aes"])
    assert "new_key" in caught.value.hint
    with pytest.raises(sk.WrongKey):
        sk.open(tmp_path / "dcp", options=sk.Options(keys=_Service()))["optim.exp_avg"][:]
    with pytest.raises(sk.CheckpointError, match="torch layout: keys cannot be rotated here"):
        sk.rotate_keys(tmp_path / "dcp", options=options)


def test_no_codecs_are_no_codecs(tmp_path):
    """
    An empty mapping of codecs is nothing, and torch reads what is written.
    """
    sk.save({"w": torch.ones(3)}, tmp_path / "native")
    sk.convert(tmp_path / "native", tmp_path / "dcp", "dcp", codecs={})
    into = {"w": torch.zeros(3)}
    quietly(theirs.load, into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert into["w"].sum() == 3


@pytest.mark.parametrize("fault", ["error", "crash", "flip"])
def test_a_conversion_that_fails_changes_nothing(fault):
    """
    Whichever step fails, or data are stored as other bytes, the checkpoint that was there is the one that is opened,
    or the new one whole; without a crash nothing is left of the one that failed.
    """
    source = MemoryStore()
    sk.save({"w": torch.full((500,), 2.0), "n": 2}, source)

    def old():
        store = MemoryStore()
        sk.convert(source, store, "dcp", codecs=["zstd"])
        sk.save({"w": torch.full((500,), 1.0), "n": 1}, other := MemoryStore())
        sk.convert(other, store, "dcp", codecs=["zstd"], overwrite=True)
        return store

    verbs = ("write_at",) if fault == "flip" else ("create", "write_at", "finish", "put")
    counting = FaultyStore(old())
    sk.convert(source, counting, "dcp", codecs=["zstd"], overwrite=True)
    for at in range(sum(each.split()[0] in verbs for each in counting.operations)):
        store = old()
        before = {info.name for info in store.list()}
        try:
            sk.convert(
                source,
                FaultyStore(store, fault, at=at, verbs=verbs),
                "dcp",
                codecs=["zstd"],
                overwrite=True,
                options=SMALL,
            )
        except (sk.CheckpointError, InjectedCrash):
            if sk.open(store)["n"] == 1 and fault != "crash":
                assert {info.name for info in store.list()} == before
        assert sk.open(store)["n"] in (1, 2)
        assert torch.equal(sk.open(store)["w"].tensor(), torch.full((500,), float(sk.open(store)["n"])))


@given(sizes=st.lists(st.integers(0, 7), max_size=4).map(tuple), most=st.integers(1, 200))
def test_a_box_is_cut_into_all_of_its_elements(sizes, most):
    """
    The pieces are in order, have every element once, and are no larger than they may be, unless they have one element.
    """
    numbers = torch.arange(math.prod(sizes)).reshape(sizes)
    pieces: list[Box] = list(cut(whole(sizes), 4, most))
    found = [numbers[tuple(slice(o, o + n) for o, n in zip(p.offsets, p.sizes, strict=True))].flatten() for p in pieces]
    assert torch.equal(torch.cat(found), numbers.flatten())
    assert all(piece.volume * 4 <= most or piece.volume == 1 for piece in pieces)
