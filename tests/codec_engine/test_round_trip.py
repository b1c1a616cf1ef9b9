"""What went through codecs comes back bit for bit, whatever the codecs, the ranks and the way it is read."""

import os
import tempfile

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.codecs.chain import register_codec
from shardkeep.engine.codecs import closest_patterns
from shardkeep.format.values import Container, leaf_keys
from tests.codec_engine.scene import MIB, OPTIONS, Counting, InOrderStore, blobs_of
from tests.engine.samples import bits, blank_like, rich_state
from tests.engine.test_reshard import cases, reshard

register_codec(Counting)
CODECS = ["zstd", "zstd:3", "lz4", "float", "aes", "test-counting"]
chains = st.lists(st.sampled_from(CODECS), max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(), chains, st.sampled_from(["memory", "files", "in order"]))
def test_any_layout_loads_into_any_other_through_any_chain(case, chain, kind):
    """Every rank gets exactly its part of tensors that other ranks saved in another layout, through random codecs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        where = {"memory": sk.MemoryStore(), "files": folder, "in order": InOrderStore(slack=1 << 30)}[kind]
        record = reshard(case, where, codecs=chain, options=OPTIONS)
    assert record.version == (2 if chain or (kind == "in order" and record.files) else 1)


def test_every_kind_of_leaf_in_several_windows(tmp_path):
    """A state of many kinds, and tensors of many windows and odd sizes, written and read by several threads."""
    state = rich_state()
    state["large"] = {"a": torch.randn(3, MIB + 1), "b": torch.zeros(5 * MIB, dtype=torch.int8), "c": torch.randn(77)}
    report = sk.save(state, tmp_path / "ck", codecs=["float", "zstd", "aes"], options=OPTIONS)
    blank = blank_like(state)
    sk.load(blank, tmp_path / "ck", options=OPTIONS)
    assert bits(blank) == bits(state)
    stored = sum(os.path.getsize(tmp_path / "ck" / name) for name in os.listdir(tmp_path / "ck"))
    record = sk.open(tmp_path / "ck", options=OPTIONS).record
    assert stored == record.stored_nbytes + os.path.getsize(tmp_path / "ck" / "shardkeep.json")
    assert report.bytes_stored == record.stored_nbytes - dict(record.index.at_rest)[record.index.name]
    assert report.bytes_stored < 0.9 * report.bytes_written


def test_nothing_of_an_encrypted_state_is_readable():
    """Neither names nor values nor bytes of tensors stand in any file, and the record is what docs say is readable."""
    store = sk.MemoryStore()
    state = {"model": {"secret_name": torch.full((1000,), 1.2345678)}, "api": "secret-value", "step": 3}
    sk.save(state, store, codecs=["aes"], meta={"run": "a"}, options=OPTIONS)
    everything = b"".join(blobs_of(store).values())
    for secret in (b"secret", np.float32(1.2345678).tobytes() * 2, bytes(range(32)), bytes(range(32)).hex().encode()):
        assert secret not in everything
    assert b'"run"' in everything


def test_a_small_read_decodes_few_frames():
    """A row of a large tensor costs the frames it lies in: not the file, and not the same frame twice."""
    store = sk.MemoryStore()
    full = torch.arange(16 * MIB // 4, dtype=torch.int32).reshape(16, -1)
    sk.save({"m": {"w": full}}, store, codecs=["test-counting"])
    ck = sk.open(store)
    assert torch.equal(ck["m.w"][3, :5], full[3, :5])  # the table and the header are known from here on
    Counting.taken()
    assert torch.equal(ck["m.w"][5, 17:99], full[5, 17:99])
    assert Counting.taken()[0] == 1
    assert torch.equal(ck["m.w"][2:5], full[2:5])
    assert Counting.taken()[0] == 3


def test_frames_are_read_once_by_a_whole_load():
    """A load of everything decodes each frame once, with the header's and the index's."""
    store = sk.MemoryStore()
    full = torch.arange(20 * MIB // 4, dtype=torch.int32)
    sk.save({"m": {"w": full}}, store, codecs=["test-counting"])
    Counting.taken()
    state = {"m": {"w": torch.zeros_like(full)}}
    sk.load(state, store, options=sk.Options(io_threads=1))
    assert torch.equal(state["m"]["w"], full)
    assert Counting.taken()[0] == 20 + 2


PARTS = st.sampled_from(["a", "b", "ab", "a.b", "*", "", "x\ny"])
NODES = st.recursive(
    st.none(),
    lambda below: st.dictionaries(PARTS, below, max_size=3).map(lambda made: Container("dict", tuple(made.items()))),
    max_leaves=8,
)
TREES = st.dictionaries(PARTS, NODES, min_size=1, max_size=4).map(lambda made: Container("dict", tuple(made.items())))
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=3).map(".".join), max_size=5, unique=True)


def fits(name, leaf):
    cuts = [at for at, char in enumerate(leaf) if char == "."]
    return any(matches(name, leaf[:cut]) for cut in [*cuts, len(leaf)])


def matches(name, text):
    """Of a pattern with stars and a text, character by character."""
    if not name:
        return not text
    if name[0] == "*":
        return any(matches(name[1:], text[at:]) for at in range(len(text) + 1))
    return bool(text) and text[0] == name[0] and matches(name[1:], text[1:])


def closer(name):
    return name.count("."), -sum("*" in part for part in name.split("."))


@given(TREES, NAMES)
def test_the_closest_name_counts(tree, names):
    """Of those that fit a leaf, one with the most parts, then with the fewest wildcards, then the first."""
    by_leaf, unfit = closest_patterns(names, tree)
    assert list(by_leaf) == list(dict.fromkeys(leaf_keys(tree)))
    for leaf, number in by_leaf.items():
        fitting = [name for name in names if fits(name, leaf)]
        assert (None if number is None else names[number]) == max(fitting, key=closer, default=None)
    assert not {number for number in by_leaf.values() if number is not None}.intersection(unfit)
    assert not [names[number] for number in unfit if any(fits(names[number], leaf) for leaf in by_leaf)]


def test_what_is_empty_may_be_named():
    """What will be in an optimizer that has not stepped yet may be named; what is beside it may not."""
    tree = Container("dict", (("optim", Container("dict", (("state", Container("dict", ())),))), ("w", None)))
    names = ["optim.state", "optim", "*.state", "optim.state.*.exp_avg", "optim.state.x.y", "w"]
    wrong = [
        "optim.stat",
        "optim.stat.x",
        "optim.states.x",
        "w.x",
        "state",
        "ww",
        "*.wieght",
        "opt*.exp_avg",
        "optim.*.x",
    ]
    assert [[*names, *wrong][number] for number in closest_patterns([*names, *wrong], tree)[1]] == wrong
