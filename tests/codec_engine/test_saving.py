"""Codecs as an argument: of saves that wait or do not, for all or for some, with keys from wherever they are."""

import errno
import glob
import os

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.codecs.chain import register_codec
from shardkeep.codecs.compression import Zstd
from shardkeep.codecs.keys import new_key
from shardkeep.engine.codecs import plan_codecs
from shardkeep.errors import InvalidCodec, InvalidKey, KeyMissing, UnknownCodec
from shardkeep.format.values import Container, decode_tree
from shardkeep.layouts.native import save_id_of
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.codec_engine.scene import KEYS, MIB, OPTIONS, Counting, InOrderStore, blobs_of, race
from tests.engine.samples import bits, blank_like

register_codec(Counting)


def sample_state():
    return {
        "model": {"w": torch.randn(3 * MIB // 4 + 5), "zeros": torch.zeros(2 * MIB)},
        "optim": {"m": torch.randn(999)},
        "lone": torch.randn(7),
        "lr": 0.1,
    }


def loaded(where, like, options=OPTIONS):
    blank = blank_like(like)
    sk.load(blank, where, options=options)
    return blank


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_asynchronous_saves_go_through_codecs(tmp_path, writer):
    """Threads or another process encode what was the state at the call; that process is given no user's key."""
    state = sample_state()
    before = bits(state)
    handle = sk.async_save(state, tmp_path / "ck", codecs=["float", "zstd", "aes"], options=OPTIONS, writer=writer)
    handle.staged.wait(60)
    state["model"]["w"].zero_()
    report = handle.result(60)
    sk.finish_saves()
    found = loaded(tmp_path / "ck", state)
    assert bits(found) == before
    assert report.bytes_stored < report.bytes_written / 2


def test_a_codec_of_the_program_is_unknown_to_the_process_that_writes(tmp_path):
    """The error says what to do; nothing is left of the save."""
    handle = sk.async_save(sample_state(), tmp_path / "ck", codecs=["test-counting"], writer="process")
    with pytest.raises(UnknownCodec, match=r'writer="thread"'):
        handle.result(60)
    sk.finish_saves()
    assert not os.listdir(tmp_path / "ck")


def test_codecs_by_top_level_key():
    """What is named goes through its chain; the rest stays plain safetensors; equal chains are one."""
    store, state = sk.MemoryStore(), sample_state() | {"other": {"x": torch.ones(5)}, "top": torch.ones(2)}
    sk.save(state, store, codecs={"model": ["zstd"], "lone": [Zstd()], "optim": ["lz4"]})
    record = sk.open(store).record
    chains = {file.name.rpartition("-00000-of")[0]: file.chain for file in record.files}
    assert chains == {"model": 0, "optim": 1, "other": None, "state-c0": None, "state-c1": 0}
    assert [[each["name"] for each in chain] for chain in record.chains] == [["zstd"], ["lz4"]]
    assert all(file.name.endswith(".safetensors") for file in record.files if file.chain is None)
    assert bits(loaded(store, state)) == bits(state)


def test_codecs_of_single_tensors():
    """The closest name counts, whichever comes first; a list may be empty, and what is not there yet may be named."""
    layers = {f"{n}.{what}": torch.full((3,), float(n)) for n in range(3) for what in ("weight", "bias")}
    state = {
        "model": {"layers": layers, "head": torch.ones(2)},
        "optim": {"state": {}},
        "x": [torch.ones(1), torch.ones(2)],
    }
    codecs = {
        "x.1": ["lz4"],
        "optim.state": ["zstd"],
        "model": ["zstd"],
        "model.layers.2.bias": ["lz4"],
        "model.layers.*.bias": [],
        "model.layers.1": ["lz4"],
    }
    store = sk.MemoryStore()
    sk.save(state, store, codecs=codecs)
    assert bits(loaded(store, state)) == bits(state)

    opened = sk.open(store)
    begun = plan_codecs(codecs, tree=lambda: decode_tree(opened.index.tree), keys=None)
    names = {None: "", 0: "lz4", 1: "zstd"}
    assert {key: names[number] for key, number in begun.by_leaf.items()} == {
        "model.layers.0.weight": "zstd",
        "model.layers.0.bias": "",
        "model.layers.1.weight": "lz4",
        "model.layers.1.bias": "",
        "model.layers.2.weight": "zstd",
        "model.layers.2.bias": "lz4",
        "model.head": "zstd",
        "x.0": "",
        "x.1": "lz4",
    }
    assert {file.name.partition("-0")[0]: file.chain for file in opened.record.files} == {
        "model-c0": None,
        "model-c1": 0,
        "model-c2": 1,
        "x-c0": None,
        "x-c1": 0,
    }


SECRET = b"do not write this as it is. " * 9


def secret():
    return torch.frombuffer(bytearray(SECRET), dtype=torch.uint8).clone()


@pytest.mark.parametrize(
    ("state", "top"),
    [
        ({"state.w": secret()}, "state.w"),
        ({"state.": secret(), "state": {"w": torch.ones(3)}}, "state."),
        ({"state": {"w": secret()}, "state.x": torch.ones(3)}, "state"),
        ({"a": torch.ones(3), "a.b": {"c": secret()}}, "a.b"),
        ({"a": {"b.c": secret()}, "a.b": {"d": torch.ones(3)}}, "a"),
        ({0: {"w": secret()}, 1: {"w": torch.ones(3)}}, 0),
        ({0: {"w": secret()}, 1: {"w": torch.ones(3)}}, "0"),
        ({0: {"w": secret()}, "0": {"x": secret()}}, 0),
        ({"p": sk.PerRank({"w": secret()})}, "p"),
    ],
)
def test_what_was_to_be_encrypted_is_nowhere_in_the_clear(state, top):
    """However top-level keys are called, and whatever else there is whose name begins alike."""
    store = sk.MemoryStore()
    sk.save(state | {"x": torch.ones(4)}, store, codecs={top: ["aes"]}, options=OPTIONS)
    assert not [name for name, data in blobs_of(store).items() if SECRET[:20] in data]
    assert [file.chain for file in sk.open(store, options=OPTIONS).record.files].count(0) >= 1


@pytest.mark.parametrize("codecs", [{"a": ["aes"]}, {"b": ["aes"]}, {"a": ["lz4"], "b": ["aes"]}])
def test_tied_tensors_are_encrypted_if_that_was_asked_for_any_of_them(codecs):
    store, tied = sk.MemoryStore(), secret()
    state = {"a": {"w": tied}, "b": {"w": tied, "own": torch.ones(3)}}
    sk.save(state, store, codecs=codecs, options=OPTIONS)
    assert not [name for name, data in blobs_of(store).items() if SECRET[:20] in data]
    assert bits(loaded(store, state)) == bits(state)


def test_a_tensor_that_is_nowhere_in_the_state_is_not_written():
    begun = plan_codecs({"a": ["zstd"]}, tree=lambda: Container("dict", (("a", None), ("b", None))), keys=None)
    assert begun.chain_of(["a", "b"], np.arange(2)) == [0, None]
    with pytest.raises(sk.StateError, match=r"'a\.w'"):
        begun.chain_of(["a", "a.w"], np.arange(2))


def test_a_large_index_is_never_as_little_as_an_enemys():
    """A reader does not take one of which next to nothing is stored: however regular it is, enough is."""
    store = sk.MemoryStore()
    sk.save({"w": torch.ones(3), "zeros": bytes(65 * MIB)}, store, codecs=["zstd"])
    index = sk.open(store).record.index
    assert 65 * MIB < index.nbytes < 1171 * index.stored_nbytes


def test_one_encrypted_part_makes_the_index_secret():
    """With a mapping, too, names of tensors are encrypted once anything is."""
    store = sk.MemoryStore()
    state = {"a": {"plain": torch.ones(3)}, "b": {"x": torch.ones(4)}}
    sk.save(state, store, codecs={"a": ["zstd"], "b": ["aes"]}, options=OPTIONS)
    record = sk.open(store, options=OPTIONS).record
    assert (record.index.chain, record.mac is not None) == (1, True)
    with pytest.raises(KeyMissing):
        sk.open(store)


def test_more_groups_than_files_are_cut_by_chain():
    store = sk.MemoryStore()
    state = {f"k{i}": {"w": torch.full((4,), float(i))} for i in range(12)}
    sk.save(state, store, codecs={"k3": ["zstd"], "k11": ["lz4"]})
    assert bits(loaded(store, state)) == bits(state)
    assert len(sk.open(store).record.files) == 3


@pytest.mark.parametrize(
    ("codecs", "error", "says"),
    [
        (["zsdt"], UnknownCodec, "zsdt"),
        ([3], InvalidCodec, "3"),
        (7, InvalidCodec, "7"),
        (["zstd:x"], InvalidCodec, "x"),
        ({"modle": ["zstd"]}, sk.StateError, "modle"),
        ({"model.x": ["zstd"]}, sk.StateError, r"model\.x"),
        ({"model.w.*": ["zstd"]}, sk.StateError, r"model\.w\.\*"),
        ({0: ["zstd"]}, sk.StateError, "asked for 0, which is no part of the state"),
        (["aes"], KeyMissing, "key"),
    ],
)
def test_what_cannot_be_is_said_on_all_ranks_before_anything_is_written(codecs, error, says):
    """Rank 0's argument counts on both; the place stays empty."""
    store = sk.MemoryStore()

    def save(world):
        with pytest.raises(error, match=says):
            sk.save({"model": {"w": torch.ones(3)}}, store, codecs=codecs if world.rank == 0 else None, group=world)

    run_thread_ranks(2, save)
    assert not blobs_of(store)


def test_keys_come_from_wherever_the_user_has_them(tmp_path, monkeypatch):
    """A file, the environment, a function, an object; a broken file matters only where keys are needed."""
    text, state = new_key(), sample_state()
    (tmp_path / "keys").write_text(f"# first\n{text}\n")
    given = {"path": sk.Options(keys=tmp_path / "keys"), "function": sk.Options(keys=lambda: bytes.fromhex(text))}
    sk.save(state, tmp_path / "ck", codecs=["aes"], options=given["path"])
    for options in given.values():
        assert bits(loaded(tmp_path / "ck", state, options)) == bits(state)
        assert text not in repr(options)
    monkeypatch.setenv("SHARDKEEP_KEY", text)
    assert bits(loaded(tmp_path / "ck", state, None)) == bits(state)
    monkeypatch.setenv("SHARDKEEP_KEY_FILE", str(tmp_path / "gone"))
    with pytest.raises(KeyMissing, match="gone"):
        loaded(tmp_path / "ck", state, None)
    sk.save(state, tmp_path / "plain", codecs=["zstd"])
    assert bits(loaded(tmp_path / "plain", state, None)) == bits(state)
    monkeypatch.delenv("SHARDKEEP_KEY_FILE")
    monkeypatch.setenv("SHARDKEEP_KEY", "short")
    with pytest.raises(InvalidKey, match="SHARDKEEP_KEY"):
        loaded(tmp_path / "ck", state, None)


def test_a_service_is_asked_once_for_a_save(tmp_path):
    """For any number of files and writers."""

    class Service:
        asked = 0

        def wrap(self, data_key):
            Service.asked += 1
            return KEYS.wrap(data_key)

        def unwrap(self, key_id, wrapped):
            Service.asked += 1
            return KEYS.unwrap(key_id, wrapped)

    sk.save(sample_state(), tmp_path / "ck", codecs=["aes"], options=sk.Options(keys=Service()))
    assert Service.asked == 1
    options = sk.Options(keys=Service())
    sk.async_save(sample_state(), tmp_path / "two", codecs=["aes"], options=options, writer="process").result(60)
    sk.finish_saves()
    assert Service.asked == 2


@pytest.mark.parametrize(
    ("kind", "old", "new"), [(sk.MemoryStore, ["aes"], ["zstd", "aes"]), (InOrderStore, None, None)]
)
def test_a_failure_at_any_point_leaves_nothing_and_the_old_checkpoint(kind, old, new):
    """Whichever operation on the store fails, of a save that overwrites a coded checkpoint, or one with digests beside."""
    state, at = {"model": {"w": torch.randn(9)}, "optim": {"m": torch.ones(3)}}, 0
    while True:
        inner = kind()
        sk.save(blank_like(state), inner, codecs=old, options=OPTIONS)
        before = blobs_of(inner)
        store = FaultyStore(inner, "full", at=at, verbs=("create", "write_at", "finish", "put"))
        try:
            sk.save(state, store, codecs=new, overwrite=True, options=sk.Options(keys=KEYS, io_threads=1))
            break
        except sk.StorageFull:
            assert blobs_of(inner) == before
        at += 1
    assert at > 10
    assert bits(loaded(inner, state)) == bits(state)


def test_codecs_need_no_room_for_what_they_save(tmp_path, monkeypatch):
    """A disk with less room than the state: with codecs it is tried, without it is refused before the first byte."""
    store = sk.LocalStore(tmp_path / "ck")
    monkeypatch.setattr(store, "free_nbytes", lambda: 100_000, raising=False)

    def reserve(_fd, nbytes):
        if nbytes > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shardkeep.storage.local.reserve", reserve)
    state = {"m": {"w": torch.zeros(MIB)}}
    with pytest.raises(sk.StorageFull, match="nothing was written"):
        sk.save(state, store)
    sk.save(state, store, codecs=["zstd"])
    assert bits(loaded(store, state)) == bits(state)


@pytest.mark.parametrize("codecs", [None, ["zstd"], {"model": ["lz4"]}])
def test_bytes_come_in_order_where_a_store_wants_them_so(codecs):
    """One thread writes every blob from its first byte to its last; several stay within what they have under way."""
    state = sample_state() | {"large": {"x": torch.randn(5 * MIB)}}
    for threads, slack in ((1, 0), (4, 4 * 2 * 4 * MIB)):
        store = InOrderStore(slack)
        options = sk.Options(io_threads=threads, host_budget_bytes=threads * 8 * MIB)
        sk.save(state, store, codecs=codecs, options=options)
        assert bits(loaded(store, state)) == bits(state)
        sk.open(store).verify()
        record = sk.open(store).record
        assert {info.name for info in store.list()} == {"shardkeep.json", *record.names}
        assert {save_id_of(name) for name in record.names} == {record.save_id}
        assert all((file.blocks is None) == (file.chain is not None) for file in record.files)
        assert {info.name: info.nbytes for info in store.list() if info.name in record.at_rest} == record.at_rest


def test_windows_of_a_large_file_are_parts_of_its_upload():
    """Windows are parts of 8 MiB, but for the first, which follows the header: uploads need no copies."""
    store = InOrderStore(1 << 30)
    sk.save({"m": {"w": torch.zeros(20 * MIB), "x": torch.ones(MIB + 1)}}, store)
    [name] = [info.name for info in store.list() if info.name.endswith(".safetensors")]
    header, *windows = sorted((offset, nbytes) for each, offset, nbytes in store.writes if each == name)
    first, *middle, _last = windows
    assert sum(first) == 8 * MIB
    assert first[0] == header[1] <= MIB
    assert all(offset % (8 * MIB) == 0 and nbytes == 8 * MIB for offset, nbytes in middle)
    assert len(middle) == 9


@pytest.mark.parametrize("overwrite", [True, False])
def test_of_two_saves_that_meet_exactly_one_wins(tmp_path, overwrite):
    """The other learns who won, and its files are gone."""
    if overwrite:
        sk.save({"w": torch.zeros(3)}, tmp_path / "ck", step=0)
    winner, loser = race(lambda: sk.LocalStore(tmp_path / "ck"), overwrite=overwrite, codecs=["zstd"])
    assert winner.save_id in str(loser)
    assert f"step {winner.step}" in str(loser)
    ck = sk.open(tmp_path / "ck")
    ck.verify()
    assert ck["w"].tensor().tolist() == [float(winner.step)] * 3
    assert sorted(map(os.path.basename, glob.glob(f"{tmp_path}/ck/*"))) == sorted(["shardkeep.json", *ck.record.names])
