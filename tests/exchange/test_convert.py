"""Conversions between all layouts, there and back: bit for bit, whole trees, and nothing half done."""

import itertools
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import shardkeep as sk
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.engine.samples import all_dtypes, bits, random_tensor
from tests.exchange.samples import files_in, in_any_order, training_state
from tests.protocol.samples import quietly

LAYOUTS = ("native", "dcp", "safetensors")
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))

KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
LEAVES = st.one_of(
    st.builds(random_tensor, SHAPES, KINDS, st.integers(0, 99)),
    st.integers(-(1 << 40), 1 << 40),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.none(),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(0, 5)),
)
KEYS = st.text("abcdef_é", min_size=1, max_size=4)
STATES = st.dictionaries(
    KEYS, st.one_of(LEAVES, st.dictionaries(KEYS, LEAVES, min_size=1, max_size=3)), min_size=1, max_size=5
)


@settings(max_examples=30)
@given(state=STATES, pair=st.sampled_from(PAIRS))
def test_any_state_goes_through_any_two_layouts(tmp_path_factory, state, pair):
    """Through one layout and on to another, every tensor and every plain value comes out as it went in."""
    where = tmp_path_factory.mktemp("pairs")
    sk.save(state, where / "native")
    sk.convert(where / "native", where / "one", pair[0])
    sk.convert(where / "one", where / "two", pair[1])
    for place in ("one", "two"):
        checkpoint = sk.open(where / place)
        checkpoint.verify()
        assert in_any_order(checkpoint.to_dict()) == in_any_order(state)


def test_what_ranks_saved_as_their_own_is_named_where_it_becomes_a_dict(tmp_path):
    """Torch's layout has no PerRank: its values are all there, and the report names it; the other layouts keep it."""
    sk.save({"w": torch.ones(3), "in": {"rng": sk.PerRank({"seed": torch.arange(4), "k": 1})}}, tmp_path / "a")
    assert sk.convert(tmp_path / "a", tmp_path / "dcp", "dcp").left_out == ["PerRank of 'in.rng'"]
    assert sk.open(tmp_path / "dcp")["in.rng.0.seed"][...].tolist() == [0, 1, 2, 3]
    for layout in ("native", "safetensors"):
        assert sk.convert(tmp_path / "a", tmp_path / layout, layout).left_out == []
        state = {"w": torch.zeros(3), "in": {"rng": sk.PerRank({"seed": torch.zeros(4, dtype=torch.int64), "k": 0})}}
        sk.load(state, tmp_path / layout)
        assert state["in"]["rng"].value["seed"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("max_shard_bytes", [5e9, 100])
def test_other_safetensors_files_are_no_part_of_what_was_converted(tmp_path, max_shard_bytes):
    """An adapter that lies in the directory, even with names of the model, is not opened as part of it, and stays."""
    sk.save(training_state(), tmp_path / "a")
    (tmp_path / "b").mkdir()
    save_file({"model.scale": torch.zeros(3), "lora": torch.ones(2)}, tmp_path / "b" / "adapter_model.safetensors")
    before = (tmp_path / "b" / "adapter_model.safetensors").read_bytes()
    sk.convert(tmp_path / "a", tmp_path / "b", "safetensors", max_shard_bytes=max_shard_bytes)
    assert in_any_order(sk.open(tmp_path / "b").to_dict()) == in_any_order(training_state())
    assert (tmp_path / "b" / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("there", [False, True])
def test_a_conversion_that_fails_leaves_nothing(tmp_path, layout, there):
    """Damage in the source is an error that names the tensor; no files or new directories are left, old ones stay."""
    sk.save({"a": torch.arange(100.0), "z": torch.arange(5000.0)}, tmp_path / "ck")
    [file] = (tmp_path / "ck").glob("*.safetensors")
    with file.open("r+b") as data:
        data.seek(-4, os.SEEK_END)
        data.write(b"\xff" * 4)
    to = tmp_path / "new" / "to"
    if there:
        to.mkdir(parents=True)
        (to / "notes.txt").write_text("mine")
    with pytest.raises(sk.ChecksumMismatch, match="'z'"):
        sk.convert(tmp_path / "ck", to, layout)
    assert (tmp_path / "new").exists() == there
    assert not there or list(files_in(to)) == ["notes.txt"]


@pytest.mark.parametrize("layout", ["native", "safetensors"])
def test_nothing_of_a_checkpoint_is_lost(tmp_path, layout):
    sk.save(training_state(), tmp_path / "ck", step=3, meta={"note": [1, "x"]})
    sk.convert(tmp_path / "ck", tmp_path / "new", layout)
    checkpoint = sk.open(tmp_path / "new")
    found = checkpoint.to_dict()
    assert bits(found) == bits(training_state())
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert (checkpoint.step, checkpoint.meta) == (3, {"note": [1, "x"]})


def test_torch_reads_what_was_converted(tmp_path):
    """Torch loads a converted checkpoint into a state of the same form; step and meta are reported as left out."""
    sk.save(training_state(), tmp_path / "ck", step=3, meta={"note": 1})
    report = sk.convert(tmp_path / "ck", tmp_path / "dcp", "dcp")
    assert report.left_out == ["step", "meta"]
    state = {
        "model": {key: torch.zeros_like(value) for key, value in training_state()["model"].items()},
        "optim": {"exp_avg": torch.zeros(31, 8), "groups": [{"lr": 0.0, "betas": (0, 0)}]},
        "step": 0,
        "name": "",
    }
    quietly(theirs.load, state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = {key: value for key, value in training_state().items() if key != "array"}
    assert in_any_order(state) == in_any_order(expected)


def test_other_tools_see_the_tensors(tmp_path):
    sk.save(training_state(), tmp_path / "ck")
    sk.convert(tmp_path / "ck", tmp_path / "st", "safetensors")
    found = load_file(tmp_path / "st" / "model.safetensors")
    assert bits(found["model.layers.1.weight"]) == bits(training_state()["model"]["layers.1.weight"])
    assert bits(found["array"]) == bits(torch.from_numpy(training_state()["array"]))


def test_a_state_is_loaded_from_converted_files(tmp_path):
    sk.save(training_state(), tmp_path / "ck")
    sk.convert(tmp_path / "ck", tmp_path / "st", "safetensors", max_shard_bytes=600)
    assert len(list((tmp_path / "st").glob("*.safetensors"))) > 2
    state = training_state()
    for tensor in state["model"].values():
        tensor.zero_()
    state["step"] = 0
    sk.load(state, tmp_path / "st")
    assert bits(state) == bits(training_state())


def save_shards(where):
    rank = dist.get_rank()
    rows = sk.ShardedBox(torch.arange(6.0).reshape(2, 3) + 10 * rank, offsets=(2 * rank, 0), shape=(4, 3))
    sk.save({"w": rows, "rng": sk.PerRank({"seed": rank, "noise": torch.full((2,), float(rank))})}, where)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_become_whole_and_ranks_keep_their_own(rank_pool, tmp_path, layout):
    """What several ranks saved is converted by one process: tensors whole, and each rank's own state still its own."""
    rank_pool.run(2, save_shards, str(tmp_path / "ck"))
    sk.convert(tmp_path / "ck", tmp_path / "new", layout)
    before, after = sk.open(tmp_path / "ck").to_dict(), sk.open(tmp_path / "new").to_dict()
    assert bits(after["w"]) == bits(before["w"])
    assert in_any_order(
        list(after["rng"].values() if isinstance(after["rng"], dict) else after["rng"])
    ) == in_any_order(list(before["rng"].values()))


def test_every_dtype_goes_where_it_can(tmp_path):
    """All dtypes come through the native layout; safetensors files refuse those they lack, by name, or drop them."""
    state = {str(kind).removeprefix("torch."): random_tensor((4, 6), kind, 1) for kind in all_dtypes()}
    sk.save(state, tmp_path / "ck")
    sk.convert(tmp_path / "ck", tmp_path / "native")
    assert bits(sk.open(tmp_path / "native").to_dict()) == bits(state)
    with pytest.raises(sk.UnsupportedLeaf, match="safetensors files cannot hold"):
        sk.convert(tmp_path / "ck", tmp_path / "st", "safetensors")
    assert not (tmp_path / "st").exists()
    lacking = ["complex32", "complex128", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]
    lacking += [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
    sk.convert(tmp_path / "ck", tmp_path / "st", "safetensors", drop=[name for name in lacking if name in state])
    kept = {name: value for name, value in state.items() if name not in lacking}
    assert bits(sk.open(tmp_path / "st").to_dict()) == bits(kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_are_dropped(tmp_path, layout):
    sk.save(training_state(), tmp_path / "ck")
    sk.convert(tmp_path / "ck", tmp_path / "new", layout, drop=["optim", "array", "model.embed.weight", "n*"])
    expected = training_state()
    del expected["optim"], expected["array"], expected["model"]["embed.weight"], expected["name"]
    assert in_any_order(sk.open(tmp_path / "new").to_dict()) == in_any_order(expected)


def test_a_part_of_a_list_is_not_dropped(tmp_path):
    """Items of a list have numbers for names: dropping some would rename others, and is refused."""
    sk.save({"l": [torch.ones(2), torch.zeros(2)]}, tmp_path / "ck")
    with pytest.raises(sk.StateError, match="change their positions"):
        sk.convert(tmp_path / "ck", tmp_path / "new", drop="l.0")
    with pytest.raises(sk.StateError, match="matches no name"):
        sk.convert(tmp_path / "ck", tmp_path / "new", drop="m")


class Odd:
    def __init__(self, number):
        self.number = number


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pickled_values_go_along_only_if_allowed(tmp_path, layout):
    sk.save({"w": torch.ones(2), "odd": Odd(3)}, tmp_path / "ck", allow_pickle=True)
    with pytest.raises(sk.PickleRefused, match="odd"):
        sk.convert(tmp_path / "ck", tmp_path / "no", layout)
    assert not (tmp_path / "no").exists()
    sk.convert(tmp_path / "ck", tmp_path / "without", layout, drop="odd")
    assert list(sk.open(tmp_path / "without")) == ["w"]
    sk.convert(tmp_path / "ck", tmp_path / "with", layout, allow_pickle=True)
    assert sk.open(tmp_path / "with").get_item("odd", allow_pickle=True).number == 3


@pytest.mark.parametrize("fault", ["error", "full", "crash", "flip"])
def test_whatever_fails_the_old_checkpoint_stays(fault):
    """Any operation of the target may fail, lose bits or be the process's last: what was committed is intact."""
    source = sk.MemoryStore()
    sk.save({"w": random_tensor((400,), torch.float32, 1), "b": torch.ones(3), "step": 1}, source)
    old, new = bits({"w": torch.zeros(2)}), bits(sk.open(source).to_dict())

    def target():
        store = sk.MemoryStore()
        sk.save({"w": torch.zeros(2)}, store)
        return store

    calm = FaultyStore(target())
    sk.convert(source, calm, overwrite=True)
    outcomes = set()
    for at in range(len(calm.operations)):
        inner = target()
        try:
            sk.convert(source, FaultyStore(inner, fault, at=at), overwrite=True)
        except (sk.CheckpointError, InjectedCrash):
            outcomes.add("failed")
            if fault == "flip":  # of the record or the index, as it replaced the old one: at least it is an error
                continue
        found = sk.open(inner)
        found.verify()
        assert bits(found.to_dict()) in (old, new)
    assert "failed" in outcomes


def test_what_makes_no_sense_is_refused(tmp_path):
    sk.save({"w": torch.ones(3)}, tmp_path / "ck")
    with pytest.raises(sk.StateError, match="zarr"):
        sk.convert(tmp_path / "ck", tmp_path / "x", "zarr")
    with pytest.raises(sk.CheckpointNotFound):
        sk.convert(tmp_path / "nothing", tmp_path / "x", "native")
    for layout in ("safetensors", "dcp"):
        with pytest.raises(sk.StateError, match="codecs are for layout='native'"):
            sk.convert(tmp_path / "ck", tmp_path / "x", layout, codecs=["zstd"])
    assert not (tmp_path / "x").exists()
