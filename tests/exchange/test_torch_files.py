"""Files of torch.save, opened, loaded, converted and exported as checkpoints; torch.load says what they hold."""

import argparse
import json
import os
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.format.pickles import Opaque
from shardkeep.testing.faulty_store import FaultyStore
from tests.damage.bounds import bounded
from tests.dcp.test_hostile_pickles import Mine, quietly
from tests.engine.samples import Trap, bits, random_tensor
from tests.engine.test_memory import MIB, peak_growth
from tests.exchange.samples import in_any_order, training_state
from tests.toolkit.samples import mesh_of

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.complex64, torch.uint16])


@st.composite
def views(draw):
    """A tensor that is any part of a larger one: sliced with steps, its axes in any order, expanded, as it lies in memory."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    view = random_tensor(tuple(shape), draw(DTYPES), draw(st.integers(0, 9)))
    for axis, n in enumerate(shape):
        low = draw(st.integers(0, n))
        step = draw(st.integers(1, 4))
        view = view[(slice(None),) * axis + (slice(low, None, step),)]
    view = view.permute(draw(st.permutations(range(view.dim()))))
    if draw(st.integers(0, 4)) == 0:
        view = view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)
    return torch.nn.Parameter(view) if view.dtype.is_floating_point and draw(st.booleans()) else view


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.complex_numbers(),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.arange(6).reshape(2, 3), np.zeros((0, 2)),
                     torch.bfloat16, torch.Size([2, 3]), torch.device("cuda:1"), torch.strided, {1, 2}, range(3)]),
)  # fmt: skip
KEYS = st.one_of(st.text("abc é", min_size=1, max_size=3), st.integers(-3, 99))
TREES = st.recursive(
    st.one_of(views(), VALUES),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), TREES, max_size=4), st.sampled_from([2, 4]))
def test_a_file_holds_what_torch_loads(tmp_path_factory, state, protocol):
    """Any nesting of tensors, parts of tensors, and values comes back as from torch.load: kinds, order, dtypes and bits."""
    where = tmp_path_factory.mktemp("any") / "file.pt"
    torch.save(state, where, pickle_protocol=protocol)
    assert bits(sk.open(where).to_dict()) == bits(torch.load(where, weights_only=False))
    sk.open(where).verify()


@settings(max_examples=100)
@given(views(), st.data())
def test_parts_are_read_as_torch_slices_them(tmp_path_factory, tensor, data):
    """A slice of a part of a larger tensor, with any steps, and as the memory of another layout is filled with it."""
    where = tmp_path_factory.mktemp("slices") / "file.pt"
    torch.save({"t": tensor}, where)
    steps = [st.slices(n).filter(lambda s: 0 < (s.step or 1) < 1 << 60) for n in tensor.shape]
    picked = tuple(data.draw(st.tuples(*steps)))
    stored = torch.load(where)["t"]
    assert bits(sk.open(where)["t"][picked]) == bits(stored[picked])
    into = {"t": torch.empty_like(stored.mT.contiguous().mT if stored.dim() > 1 else stored)}
    sk.load(into, where)
    assert bits(into["t"]) == bits(stored)
    if stored.dtype in (torch.float32, torch.bfloat16):
        wider = {"t": torch.zeros(stored.shape, dtype=torch.float64)}
        sk.load(wider, where, cast=True)
        torch.testing.assert_close(wider["t"], stored.detach().double(), rtol=0, atol=0, equal_nan=True)


def test_tensors_of_one_memory_are_tied(tmp_path):
    """The same view of one storage is one tensor under two names; other views of it have the elements that they show."""
    base = torch.arange(12.0).reshape(3, 4)
    tensor = torch.ones(3)
    tensor.note = "an attribute"
    torch.save({"a": base, "b": base, "row": base[1], "same": base.view(3, 4), "tagged": tensor}, tmp_path / "file.pt")
    found = sk.open(tmp_path / "file.pt").to_dict()
    assert found["a"] is found["b"] is found["same"]
    assert torch.equal(found["row"], base[1])
    assert torch.equal(found["tagged"], tensor)
    assert sk.open(tmp_path / "file.pt").record.totals.tensor_bytes == base.nbytes + 16 + 12


def rewritten(source, target, change, how=zipfile.ZIP_STORED):
    """Write an archive again, entry by entry; `change(name, data)` returns the data, or None to leave it out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", how) as new:
        for name in old.namelist():
            data = change(name.partition("/")[2], old.read(name))
            if data is not None:
                new.writestr(name, data)


@pytest.mark.parametrize("order", ["big", "little", None])
def test_files_of_other_machines(tmp_path, order):
    """The byte order that a file states is that of its numbers; a file of an older torch states none."""
    state = {
        "f": torch.arange(6.0).reshape(2, 3).t(),
        "c": torch.tensor([1 + 2j]),
        "i": torch.arange(4),
        "b": torch.ones(2).bool(),
    }
    torch.save(state, tmp_path / "plain.pt")
    sizes = {"data/0": 4, "data/1": 4, "data/2": 8, "data/3": 1}

    def change(name, data):
        if name == "byteorder":
            return order and order.encode()
        if order != "big" or name not in sizes:
            return data
        return np.frombuffer(data, f"u{sizes[name]}").byteswap().tobytes()

    rewritten(tmp_path / "plain.pt", tmp_path / "file.pt", change)
    assert bits(torch.load(tmp_path / "file.pt")) == bits(state)
    assert bits(sk.open(tmp_path / "file.pt").to_dict()) == bits(state)
    assert bits(sk.open(tmp_path / "file.pt")["f"][1:, 1]) == bits(state["f"][1:, 1])


def load_sharded(where):
    state = {
        "model": {
            "w": distribute_tensor(torch.zeros(6, 8), mesh_of(dist.get_world_size()), [Shard(1)]),
            "v": torch.zeros(3),
        }
    }
    sk.load(state, where, include="model")
    return bits(state["model"]["w"].full_tensor()), bits(state["model"]["v"])


def test_ranks_load_their_parts(rank_pool, tmp_path):
    state = {"model": {"w": torch.randn(12, 8)[::2], "v": torch.ones(3)}, "step": 3}
    torch.save(state, tmp_path / "file.ckpt")
    expected = bits(state["model"]["w"]), bits(state["model"]["v"])
    assert set(rank_pool.run(3, load_sharded, str(tmp_path / "file.ckpt"))) == {expected}


def test_a_module_and_its_optimizer_are_loaded(tmp_path):
    model = torch.nn.Linear(3, 2)
    torch.save({"model": model.state_dict(), "epoch": 4, "args": {"lr": 0.1}}, tmp_path / "last.pth")
    other, state = torch.nn.Linear(3, 2), {"epoch": 0, "args": {"lr": 0.0}}
    sk.load({"model": other, **state}, tmp_path / "last.pth")
    assert bits(other.state_dict()) == bits(model.state_dict())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    sk.load({"model": other}, tmp_path / "weights.pt", rename="model.{}".format)


@pytest.mark.parametrize("form", ["one file", "two files", "beside safetensors"])
@pytest.mark.parametrize("where", ["directory", "memory"])
def test_models_of_hugging_face(tmp_path, form, where):
    """`pytorch_model.bin`, or the files that its index names; safetensors files beside them count, as in transformers."""
    model = training_state()["model"]
    place = sk.MemoryStore()
    if form == "two files":
        homes = {key: f"pytorch_model-0000{1 + at % 2}-of-00002.bin" for at, key in enumerate(model)}
        for name in set(homes.values()):
            torch.save({key: model[key] for key in model if homes[key] == name}, tmp_path / name)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    else:
        torch.save(model, tmp_path / "pytorch_model.bin")
    if form == "beside safetensors":
        sk.save({"w": torch.ones(2)}, tmp_path / "other")
        sk.export(tmp_path / "other", tmp_path)
        model = {"w": torch.ones(2)}
    for file in tmp_path.iterdir():
        if file.is_file():
            place.put(file.name, file.read_bytes())
    opened = sk.open(tmp_path if where == "directory" else place)
    assert in_any_order(opened.to_dict()) == in_any_order(model)
    opened.verify()


@pytest.mark.parametrize("fault", ["lost", "misplaced", "elsewhere"])
def test_an_index_that_is_wrong(tmp_path, fault):
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "model" / "a.bin")
    torch.save({"v": torch.ones(2)}, tmp_path / "b.bin")
    home = {"lost": "b.bin", "misplaced": "a.bin", "elsewhere": "../b.bin"}[fault]
    index = {"weight_map": {"w": "a.bin", "v": home}}
    (tmp_path / "model" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(sk.CheckpointError, match="'v'" if fault == "misplaced" else "b.bin"):
        sk.open(tmp_path / "model")


@pytest.mark.parametrize("layout", ["native", "dcp", "safetensors"])
def test_a_file_becomes_a_checkpoint(capsys, tmp_path, layout):
    """`convert` keeps all of it, also parts of larger tensors, and `diff` with the file finds nothing."""
    state = training_state() | {"part": torch.randn(20, 30)[3:9, ::7], "sizes": [1, 2]}
    torch.save(state, tmp_path / "file.pt")
    assert main(["convert", str(tmp_path / "file.pt"), str(tmp_path / "ck"), "--to", layout]) == 0
    assert main(["diff", str(tmp_path / "file.pt"), str(tmp_path / "ck")]) == 0
    assert "no difference: 17 keys" in capsys.readouterr().out
    assert in_any_order(sk.open(tmp_path / "ck").to_dict()) == in_any_order(sk.open(tmp_path / "file.pt").to_dict())


def test_the_commands_take_a_file(capsys, tmp_path):
    """`ls`, `show`, `verify` and `export`; the optimizer of a file is not exported."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    file = str(tmp_path / "last.ckpt")
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}, file)
    for words in (["ls", file], ["show", file, "state_dict.weight"], ["show", file, "epoch"], ["verify", file]):
        assert main(words) == 0
    assert main(["export", file, str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert "left out: optimizer_states.0 (6 tensors)" in said
    assert list(sk.open(tmp_path / "hf")) == ["bias", "weight"]
    assert main(["show", file, "state_dict.wieght"]) == 2
    assert "did you mean state_dict.weight" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_file_in_a_store_is_read_by_ranges(request, tmp_path, kind):
    """Given by its URL, it is opened and loaded, and a small tensor of it takes few bytes."""
    root = request.getfixturevalue("s3_root") if kind == "s3" else "memory://torch-files"
    state = {"large": torch.randn(1 << 20), "small": torch.ones(5), "odd": torch.ones(4, 4)[:, ::3]}
    torch.save(state, tmp_path / "file.pt")
    sk.open_place(root).put("file.pt", (tmp_path / "file.pt").read_bytes())
    into = {"small": torch.zeros(5), "odd": torch.zeros(4, 2)}
    report = sk.load(into, f"{root}/file.pt", include=["small", "odd"])
    assert report.bytes_read < 200
    assert bits(into) == bits({key: state[key] for key in into})
    assert bits(sk.open(f"{root}/file.pt").to_dict()) == bits(state)


def test_large_files_are_not_held_in_memory(tmp_path):
    """Converting a file takes the budget and a little, whatever its tensors are, and every window goes to its place."""
    base = torch.arange(1 << 26, dtype=torch.int32).view(512, 1 << 17)
    torch.save({"w": base[:, ::2], "t": base[:256].t()}, tmp_path / "file.pt")
    del base
    options = sk.Options(io_threads=2, host_budget_bytes=16 * MIB)
    to = tmp_path / "ck"
    assert peak_growth(lambda: sk.convert(tmp_path / "file.pt", to, options=options)) < 64 * MIB
    assert os.path.getsize(tmp_path / "file.pt") > 256 * MIB
    rows, columns = torch.arange(512)[:, None], torch.arange(1 << 17)
    assert torch.equal(sk.open(to)["w"].tensor(), ((rows << 17) + columns[::2]).int())
    assert torch.equal(sk.open(to)["t"].tensor(), ((rows[:256] << 17) + columns).int().t())


def test_classes_are_values_that_need_permission(tmp_path):
    """Objects of other classes neither run nor hide the tensors beside them; with `allow_pickle` they come back."""
    odd = {"mine": Mine(3), "args": argparse.Namespace(lr=0.1), "kind": Mine, "type": int, "list": [1, Mine(4)],
           "sparse": torch.eye(2).to_sparse(), "conj": torch.tensor([1j]).conj(), "keys": {torch.float32: torch.ones(1)}}  # fmt: skip
    torch.save({"w": torch.ones(3), "step": 1, "deep": odd}, tmp_path / "file.pt")
    found = sk.open(tmp_path / "file.pt")
    assert (found["step"], found["w"][1].item(), len(found)) == (1, 1.0, 10)
    for key in odd:
        with pytest.raises(sk.PickleRefused, match=f"'deep.{key}'"):
            found[f"deep.{key}"]
    state = {"w": torch.zeros(3), "step": 0}
    sk.load(state, tmp_path / "file.pt", include=["w", "step"])
    assert bits(state) == bits({"w": torch.ones(3), "step": 1})
    with pytest.raises(sk.PickleRefused, match="drop='deep"):
        sk.convert(tmp_path / "file.pt", tmp_path / "refused")
    sk.convert(tmp_path / "file.pt", tmp_path / "ck", allow_pickle=True)
    (tmp_path / "file.pt").rename(tmp_path / "moved.pt")  # a copy does not need the file
    for where in (tmp_path / "moved.pt", tmp_path / "ck"):
        again = sk.open(where).to_dict(allow_pickle=True)["deep"]
        assert [again[key] for key in ("mine", "args", "kind", "type", "list")] == list(odd.values())[:5]
        assert torch.equal(again["sparse"].to_dense(), torch.eye(2))
        assert bits(again["conj"]) == bits(odd["conj"])
        assert again["keys"] == {torch.float32: torch.ones(1)}


def test_a_class_that_is_not_here(tmp_path, monkeypatch):
    """Permission does not help if a class cannot be imported: the error names the value, and the rest is read without it."""
    torch.save({"w": torch.ones(3), "mine": Mine(3)}, tmp_path / "file.pt")
    monkeypatch.delattr("tests.dcp.test_hostile_pickles.Mine")
    with pytest.raises(sk.UnsupportedLeaf, match="'mine'"):
        sk.open(tmp_path / "file.pt").to_dict(allow_pickle=True)
    with pytest.raises(sk.UnsupportedLeaf, match="'mine'"):
        sk.convert(tmp_path / "file.pt", tmp_path / "ck", allow_pickle=True)
    assert sk.convert(tmp_path / "file.pt", tmp_path / "ck", drop="mine").tensors == 1


def test_nothing_runs(tmp_path):
    """A pickle that would make a directory makes none, whatever is read; with permission it does: so it would have."""
    torch.save({"w": torch.ones(3), "x": Trap(str(tmp_path / "trap"))}, tmp_path / "file.pt")
    opened = sk.open(tmp_path / "file.pt")
    assert bits(opened["w"].tensor()) == bits(torch.ones(3))
    opened.verify()
    for read in (
        lambda: opened["x"],
        opened.to_dict,
        lambda: sk.load({"w": torch.ones(3), "x": None}, tmp_path / "file.pt"),
    ):
        with pytest.raises(sk.PickleRefused, match="'x'"):
            read()
    assert not (tmp_path / "trap").exists()
    opened.to_dict(allow_pickle=True)
    assert (tmp_path / "trap").exists()


@pytest.mark.parametrize("kind", ["old", "module", "tensor", "list", "program", "zip", "compressed", "twice"])
def test_other_files_say_what_they_are(tmp_path, kind):
    """The old format, objects that are no dict, compiled programs and other archives: an error that says what to do."""
    file = tmp_path / "file.pt"
    whole = {"module": torch.nn.Sequential(torch.nn.Linear(2, 2)), "tensor": torch.ones(3), "list": [torch.ones(2)]}
    torch.save(whole.get(kind, {"w": torch.ones(3)}), file, _use_new_zipfile_serialization=kind != "old")
    if kind == "program":
        quietly(torch.jit.save, quietly(torch.jit.script, torch.nn.ReLU()), file)
    elif kind == "zip":
        with zipfile.ZipFile(file, "w") as made:
            made.writestr("a/b", "c")
    elif kind == "compressed":
        rewritten(file, tmp_path / "new", lambda _, data: data, zipfile.ZIP_DEFLATED)
        (tmp_path / "new").rename(file)
    elif kind == "twice":
        with zipfile.ZipFile(file, "a") as made, pytest.warns(UserWarning, match="Duplicate"):
            made.writestr("file/data/0", bytes(12))
    says = {
        "old": r"before version 1\.6[\s\S]*torch\.save\(torch\.load\(", "module": "holds a torch.nn.modules.container.Sequential",
        "tensor": "holds a Tensor", "list": "holds a list",
    }  # fmt: skip
    expected = {"old": sk.UnsupportedVersion, "module": sk.StateError, "tensor": sk.StateError, "list": sk.StateError}
    with pytest.raises(
        expected.get(kind, sk.MalformedFile), match=says.get(kind, r"file\.pt: not an archive of torch\.save")
    ):
        sk.open(file)


REFUSED = (sk.DamagedCheckpoint, sk.StateError, sk.PickleRefused)


def test_every_byte_counts(tmp_path):
    """Whatever bit is flipped: an error, or exactly what was saved; of the bytes of tensors, `verify` names the tensor."""
    state = {"w": torch.arange(6.0), "part": torch.arange(20.0)[::3], "step": 7, "name": "x" * 40}
    torch.save(state, tmp_path / "good.pt")
    good, file = (tmp_path / "good.pt").read_bytes(), tmp_path / "file.pt"
    expected = bits(sk.open(tmp_path / "good.pt").to_dict())
    inside = good.index(state["w"].numpy().tobytes())
    for at in [*range(0, len(good), 7), *range(inside, inside + 24)]:
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        file.write_bytes(data)
        try:
            opened = sk.open(file)
            found = opened.to_dict()
        except REFUSED:
            continue
        if inside <= at < inside + 24:
            with pytest.raises(sk.DamagedCheckpoint, match="they hold 'w'"):
                opened.verify()
        elif bits(found) != expected:
            with pytest.raises(sk.DamagedCheckpoint, match=r"file\.pt"):
                opened.verify()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_files_that_were_cut_short(tmp_path, share):
    torch.save({"w": torch.arange(2000.0)}, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(sk.DamagedCheckpoint, match=r"file\.pt"):
        sk.open(tmp_path / "file.pt")


@pytest.mark.parametrize(("name", "save"), [("pytorch_model.bin", torch.save), ("model.safetensors", save_file)])
def test_a_failing_disk_is_told_apart_from_damage(tmp_path, name, save):
    strided = torch.ones(4, 4)[:, ::3]
    save({"w": torch.ones(3), "v": strided.contiguous() if save is save_file else strided}, tmp_path / name)
    inner = sk.MemoryStore()
    inner.put(name, (tmp_path / name).read_bytes())
    calm = FaultyStore(inner)
    sk.open(calm).to_dict()
    for at in range(len(calm.operations)):
        with pytest.raises(sk.StorageError):
            sk.open(FaultyStore(inner, "error", at=at)).to_dict()


def forged(tmp_path, pickled, storages=(bytes(64),)):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as made:
        made.writestr("file/data.pkl", pickled)
        for number, data in enumerate(storages):
            made.writestr(f"file/data/{number}", data)
    return tmp_path / "file.pt"


def tensor_of(
    storage=b"X\x01\0\0\x000", offset=b"K\0", shape=b"K\x04\x85", strides=b"K\x01\x85", kind=b"ctorch\nFloatStorage\n"
):
    pid = b"(X\x07\0\0\0storage" + kind + storage + b"X\x03\0\0\0cpuK\x10tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + offset + shape + strides + b"\x89)tR"


def of_dict(value):
    return b"\x80\x02}X\x01\0\0\0w" + value + b"s."


BIG = b"\x8a\x08" + (1 << 61).to_bytes(8, "little")
LAUGHS = b"]q\0" + b"".join(b"](h%ch%ch%ceq%c" % (n, n, n, n + 1) for n in range(60))
FORGED = {
    "another storage": tensor_of(storage=b"X\x01\0\0\x007"),
    "beyond its storage": tensor_of(offset=b"K\x0d"),
    "a negative offset": tensor_of(offset=b"J\xff\xff\xff\xff"),
    "a negative stride": tensor_of(strides=b"J\xff\xff\xff\xff\x85"),
    "more strides than axes": tensor_of(strides=b"K\x01K\x01\x86"),
    "no number": tensor_of(shape=b"X\x01\0\0\0a\x85"),
    "more elements than there are": tensor_of(shape=BIG + b"\x85", strides=b"K\0\x85"),
    "a repeated terabyte": tensor_of(shape=b"\x8a\x08" + (1 << 38).to_bytes(8, "little") + b"\x85", strides=b"K\0\x85"),
    "lists in lists": LAUGHS,
    "a long text, often": b"(" + b"X\0\0\x10\0" + b"a" * (1 << 20) + b"q\0" + b"h\0" * 200_000 + b"l",
    "a list in itself": b"]q\0h\0a",
    "nothing but depth": b"]" * 5000 + b"a" * 4999,
    "a storage that is text": b"X\x03\0\0\0abcQ",
    "a subclass of nothing": b"ctorch._tensor\n_rebuild_from_type_v2\n(K\x01ctorch\nTensor\n)}tR",
    "an attribute of torch": b"ctorch\nTensor\n}X\x01\0\0\0aK\x01sb",
    "an attribute of what is unknown": b"ca\nb\n}X\x01\0\0\0aK\x01sb",
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
def test_forged_files_are_refused(tmp_path, value):
    file = forged(tmp_path, of_dict(value))

    def attack():
        with pytest.raises(REFUSED):
            sk.open(file).to_dict()

    before = dict(vars(Opaque))
    bounded(attack, mib=96)
    assert dict(vars(Opaque)) == before


def test_an_archive_that_lies_about_its_entries(tmp_path):
    """Offsets and sizes of the directory that lead out of the file, or to no entry, are errors and no allocation."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "good.pt")
    good = (tmp_path / "good.pt").read_bytes()
    heads = [at for at in range(len(good)) if good[at : at + 4] == b"PK\1\2"]
    for head in heads:
        for field, size in ((20, 8), (24, 4), (42, 4)):  # both sizes, one of them, the offset
            for number in (0, 1, 1 << 20, (1 << 32) - 2, (1 << 32) - 1):
                data = bytearray(good)
                data[head + field : head + field + size] = number.to_bytes(4, "little") * (size // 4)
                (tmp_path / "file.pt").write_bytes(data)
                try:
                    found = sk.open(tmp_path / "file.pt").to_dict()
                except REFUSED:
                    continue
                assert bits(found) == bits({"w": torch.arange(6.0)})
