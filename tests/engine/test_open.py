"""`sk.open`: keys, metadata, lazy slices, verify, forged offsets, odd keys, replaced checkpoints."""

import errno

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.engine import fill as slicing
from shardkeep.options import Options
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.damage.forge import take_apart
from tests.damage.subjects import Subject, blobs_of, store_of
from tests.engine.many_chunks import CountingStore
from tests.engine.samples import bits


@pytest.fixture
def opened(tmp_path):
    state = {
        "w": torch.arange(60.0).reshape(3, 4, 5),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "a": np.arange(3),
        "n": 7,
    }
    sk.save(state, tmp_path / "ck", step=4, meta={"lr": 0.1})
    return sk.open(str(tmp_path / "ck"))


@pytest.fixture
def place(tmp_path):
    sk.save({"w": torch.zeros(9)}, tmp_path / "ck")
    return tmp_path / "ck"


def test_it_is_a_mapping_of_flat_names(opened):
    assert list(opened) == sorted(opened.keys()) == ["a", "half", "n", "w"]
    assert len(opened) == 4
    assert "w" in opened
    assert "x" not in opened
    assert opened["n"] == 7
    with pytest.raises(KeyError, match="x"):
        opened["x"]
    assert (opened.step, opened.meta, opened.record.world_size) == (4, {"lr": 0.1}, 1)
    assert "2 tensors" not in repr(opened)
    assert "3 tensors" in repr(opened)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("model.layers.0.wieght", "did you mean model.layers.0.weight"),
        ("modle.layers.1.bias", "did you mean model.layers.1.bias"),
        ("setp", r"did you mean step or steps\?"),
        ("modle", r"did you mean model\?"),
        ("layers.0.weight", "did you mean model.layers.0.weight"),
        ("model.layers", "prefix of 4 keys: model.layers.0.bias, "),
        ("nothing like it", "no key 'nothing like it'$"),
    ],
)
def test_a_misspelt_key_is_answered_with_near_ones(tmp_path, capsys, asked, says):
    """As on the command line: first those with as many parts; a prefix, with what is below it. It is still a KeyError."""
    layers = {f"layers.{n}.{kind}": torch.zeros(1) for n in (0, 1) for kind in ("weight", "bias")}
    sk.save({"model": layers, "step": 1, "steps.done": 2}, tmp_path / "ck")
    with pytest.raises(KeyError, match=says) as caught:
        sk.open(tmp_path / "ck")[asked]
    assert isinstance(caught.value, sk.CheckpointError)
    assert sk.open(tmp_path / "ck").get(asked, 5) == 5
    if asked != "model.layers":  # `show` shows what is below a prefix
        assert main(["show", str(tmp_path / "ck"), asked]) == 2
        assert caught.value.message in capsys.readouterr().err


def test_a_tensor_knows_what_it_is_before_it_is_read(opened):
    stored = opened["w"]
    assert (stored.shape, stored.dtype, stored.ndim) == ((3, 4, 5), torch.float32, 3)
    assert (stored.nbytes, len(stored)) == (240, 3)
    assert [str(box) for box in stored.boxes] == ["[0:3,0:4,0:5]"]
    assert repr(stored) == "<StoredTensor 'w': float32(3, 4, 5)>"


def test_numpy_views(opened):
    """Arrays, always copies, where numpy has the type, and a hint where it has not."""
    assert np.array_equal(opened["w"].numpy(), np.arange(60.0).reshape(3, 4, 5))
    assert np.array_equal(np.asarray(opened["a"]), np.arange(3))
    with pytest.raises(sk.UnsupportedLeaf, match=r"\.tensor\(\)"):
        opened["half"].numpy()
    with pytest.raises(ValueError, match="always a copy"):
        opened["w"].__array__(copy=False)
    assert opened["w"].__array__(copy=True).shape == (3, 4, 5)


@pytest.mark.parametrize(
    "index",
    [
        (5,), (0, 0, 0, 0), (slice(None, None, -1),), (..., ...), ("a",), (None,), ([0, 1],),
        True, np.True_, torch.tensor(True), np.array([0, 1]), torch.tensor([0, 1]),
    ],
)  # fmt: skip
def test_bad_indices_are_refused(opened, index):
    with pytest.raises((IndexError, ValueError), match="'w'"):
        opened["w"][index]


def test_a_scalar_says_how_it_is_read(tmp_path):
    sk.save({"scale": torch.tensor(2.0)}, tmp_path / "ck")
    scale = sk.open(tmp_path / "ck")["scale"]
    with pytest.raises(IndexError, match=r"'scale'.*; \[...\] reads it"):
        scale[:]
    assert scale[...] == 2


@pytest.mark.parametrize(
    ("shape", "step", "most_nbytes"), [((64, 32, 1024), 16, 2 << 20), ((4 << 20,), 1 << 19, 9 * (64 << 10))]
)
def test_a_large_step_reads_only_what_it_needs(tmp_path, shape, step, most_nbytes):
    """Large rows picked with a step are read one by one, and eight elements of 16 MiB cost eight blocks."""
    full = torch.randn(shape)
    sk.save({"w": full}, tmp_path / "ck")
    store = CountingStore(sk.LocalStore(tmp_path / "ck"))
    assert bits(sk.open(store)["w"][::step]) == bits(full[::step])
    assert store.nbytes["safetensors"] <= most_nbytes


def test_opening_reads_no_tensor_data(place):
    """Open, list and look at shapes: no data file is opened. One that the record names and that is gone was lost."""
    for path in place.glob("*.safetensors"):
        path.unlink()
    stored = sk.open(place)["w"]
    assert stored.shape == (9,)
    with pytest.raises(sk.WrongSize, match="missing"):
        stored[...]


def test_to_dict_reads_all_tensors_together(tmp_path):
    state = {"m": {f"t{i}": torch.full((3,), float(i)) for i in range(300)}, "o": {"x": torch.ones(2)}, "n": 3}
    sk.save(state, tmp_path / "ck")
    store = CountingStore(sk.LocalStore(tmp_path / "ck"))
    found = sk.open(store).to_dict()
    assert bits(found) == bits(state)
    assert store.calls.count("open safetensors") <= 4
    assert store.calls.count("read safetensors") == 4


def test_slices_read_a_header_once(tmp_path):
    sk.save({"w": torch.arange(10.0)}, tmp_path / "ck")
    store = CountingStore(sk.LocalStore(tmp_path / "ck"))
    checkpoint = sk.open(store)
    assert [checkpoint["w"][i].item() for i in range(5)] == [0, 1, 2, 3, 4]
    assert store.calls.count("read safetensors") == 1 + 5


def test_tied_leaves_of_two_kinds_come_back_as_their_own_kind():
    """A torch tensor and a numpy array of one memory are read back as a tensor and an array, still tied."""
    forgery = take_apart(_saved({"a": (shared := torch.arange(4.0)), "b": shared}))
    forgery.put("origin", forgery.rows["b"], 1)
    found = sk.open(store_of(forgery.blobs())).to_dict()
    assert isinstance(found["a"], torch.Tensor)
    assert isinstance(found["b"], np.ndarray)
    found["a"][0] = 9
    assert found["b"].tolist() == [9, 1, 2, 3]


def test_tensors_that_share_bytes_of_a_file_are_refused_before_memory_is_made(monkeypatch):
    """An index that declares the same bytes as many tensors could ask for any amount of memory."""
    forgery = take_apart(_saved({f"t{i}": torch.zeros(64) for i in range(8)}))
    forgery.set("start", np.zeros(8))
    forgery.set("shape", np.full((8, 1), 65 + 64))
    forgery.set("sizes", np.full((8, 1), 65 + 64))
    monkeypatch.setattr(slicing.torch, "empty", None)
    with pytest.raises(sk.MalformedFile, match="more than their files hold"):
        sk.open(store_of(forgery.blobs())).to_dict()


STEPS = [
    np.s_[::2], np.s_[1::3, ::5], np.s_[:, 3], np.s_[::7, :, ::2], np.s_[2, ::2, 1::4], np.s_[..., ::31], np.s_[5:6, ::3],
    np.s_[::4, 2:5, 7], np.s_[:, :, ::2], np.s_[::40, ::40, ::40], np.s_[3:3, ::2],
]  # fmt: skip


@pytest.mark.parametrize("band", [64, 1 << 10, 1 << 20])
@pytest.mark.parametrize("apart", [256, 64 << 10])
def test_steps_give_what_torch_gives_whatever_the_band(tmp_path, monkeypatch, band, apart):
    full = torch.arange(30 * 9 * 33, dtype=torch.int32).reshape(30, 9, 33)
    sk.save({"w": full}, tmp_path / "ck")
    monkeypatch.setattr(slicing, "_BAND_NBYTES", band)
    monkeypatch.setattr(slicing, "_LARGE_GAP_NBYTES", apart)
    monkeypatch.setattr(slicing, "_MOST_PARTS", 7)
    stored = sk.open(tmp_path / "ck")["w"]
    assert [bits(stored[item]) for item in STEPS] == [bits(full[item]) for item in STEPS]


def test_a_small_step_holds_one_band_at_a_time(tmp_path, monkeypatch):
    """What is read to be thinned out is within the budget, however large the slice's extent is."""
    full = torch.arange(4 << 20, dtype=torch.int32)
    sk.save({"w": full}, tmp_path / "ck")
    held = []
    fill = slicing.fill
    monkeypatch.setattr(slicing, "fill", lambda *a, **k: held.append(sum(t.nbytes for t in a[3])) or fill(*a, **k))
    found = sk.open(tmp_path / "ck", options=Options(host_budget_bytes=4 << 20))["w"][::9]
    assert bits(found) == bits(full[::9])
    assert max(held) <= 1 << 20


def damage(path, offsets):
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("blocks", "ranges", "more"),
    [
        ((0, 3, 4, 9), [(0, 1), (3, 5), (9, 10)], []),
        (range(0, 60, 2), [(n, n + 1) for n in range(0, 40, 2)], ["10 more"]),
    ],
)
def test_verify_lists_damaged_ranges(tmp_path, blocks, ranges, more):
    """Neighbouring blocks are one range; all ranges of a file are named, or the first twenty, and the rest counted."""
    sk.save({"w": torch.zeros(1 << 20), "v": torch.zeros(9)}, tmp_path / "ck")
    (path,) = (tmp_path / "ck").glob("*.safetensors")
    checkpoint = sk.open(tmp_path / "ck")
    header, block = checkpoint.record.files[0].header_nbytes, checkpoint.record.files[0].block_nbytes
    damage(path, [header + block * n + 5 for n in blocks])
    with pytest.raises(sk.DamagedCheckpoint) as caught:
        checkpoint.verify()
    found = [problem.split(": ")[1].split(" are")[0] for problem in caught.value.details["problems"]]
    named = [f"bytes {header + a * block} to {header + b * block}" for a, b in ranges]
    assert found == [*named, *(f"{each} damaged ranges" for each in more)]


def test_verify_does_not_call_a_failing_disk_damage(place):
    """An I/O error says nothing about what is stored: it comes through as itself."""
    with pytest.raises(sk.StorageError) as caught:
        sk.open(FaultyStore(sk.LocalStore(place), at=1, verbs=["read_into"], lasting=True)).verify()
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("name", ["shardkeep.json", "index-*"])
def test_verify_reads_record_and_index_again(place, name):
    checkpoint = sk.open(place)
    checkpoint.verify()
    (path,) = place.glob(name)
    damage(path, [path.stat().st_size // 2])
    with pytest.raises(sk.DamagedCheckpoint):
        checkpoint.verify()


def test_verify_decodes_values_and_takes_a_pickle_for_sound():
    """A value that is no value is damage, even under right checksums; one that may not be unpickled is none."""
    store = MemoryStore()
    sk.save({"p": Odd(), "n": [1, 2]}, store, allow_pickle=True)
    sk.open(store).verify()
    forgery = take_apart(_saved({"n": [1, 2]}))
    key = forgery.strings("value_keys", "value_key_ends")[0].decode()
    forgery.set_value(key, b"\xc1")
    with pytest.raises(sk.DamagedCheckpoint, match="malformed"):
        sk.open(store_of(forgery.blobs())).verify()


class Odd:
    """Has no form but a pickle."""


@pytest.mark.parametrize("key", [5, None, "\ud800", ("w",)])
def test_what_can_be_no_key_is_not_there(opened, key):
    """KeyError, None and False, as a dict has it."""
    with pytest.raises(KeyError):
        opened[key]
    assert opened.get(key) is None
    assert key not in opened


def test_a_checkpoint_replaced_while_open_says_so(place):
    checkpoint = sk.open(place)
    sk.save({"w": torch.ones(9)}, place, overwrite=True)
    for use in (lambda: checkpoint["w"][...], checkpoint.to_dict):
        with pytest.raises(sk.WrongSize, match="replaced by another save") as caught:
            use()
        assert "again" in caught.value.hint
    with pytest.raises(sk.DamagedCheckpoint, match="replaced by another save"):
        checkpoint.verify()


def test_a_checkpoint_replaced_between_record_and_index_says_so(place, monkeypatch):
    """The same while it is being opened."""
    store = sk.LocalStore(place)
    get = store.get

    def overtaken(name, *, limit):
        if name.startswith("index"):
            monkeypatch.setattr(store, "get", get)
            sk.save({"w": torch.ones(9)}, place, overwrite=True)
        return get(name, limit=limit)

    monkeypatch.setattr(store, "get", overtaken)
    with pytest.raises(sk.WrongSize, match="replaced by another save"):
        sk.open(store)


def _saved(state):
    store = MemoryStore()
    sk.save(state, store)
    return Subject("small", blobs_of(store), None, None)


def test_of_a_large_header_a_row_needs_only_the_digests(tmp_path):
    """A row of a file with 20,000 tensors is read without their names; damage to these is found by `verify`."""
    sk.save({f"w{n}": torch.full((64,), float(n)) for n in range(20_000)}, tmp_path / "ck")
    (path,) = (tmp_path / "ck").glob("*.safetensors")
    store = CountingStore(sk.LocalStore(tmp_path / "ck"))
    checkpoint = sk.open(store)
    header = checkpoint.record.files[0].header_nbytes
    assert header > 1_000_000
    assert checkpoint["w123"][1:3].tolist() == [123.0, 123.0]
    assert store.nbytes["safetensors"] < header / 10
    damage(path, [header - 5000])
    assert sk.open(tmp_path / "ck")["w123"][0] == 123
    everything = {f"w{n}": torch.zeros(64) for n in range(20_000)}
    for look in (sk.open(tmp_path / "ck").verify, checkpoint.verify, lambda: sk.load(everything, tmp_path / "ck")):
        with pytest.raises(sk.CheckpointError, match="the header has checksum"):
            look()
    damage(path, [header - 5000, path.read_bytes().index(b"shardkeep.blocks") + 30])
    with pytest.raises(sk.DamagedCheckpoint, match=r"header|are not what was saved"):
        sk.open(tmp_path / "ck")["w0"][0]
