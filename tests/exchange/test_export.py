"""Exports to Hugging Face and to torch.load, judged by the safetensors library and by torch."""

import json
import re
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.layouts import safetensors_publish
from shardkeep.testing.faulty_store import FaultyStore
from tests.engine.samples import bits, random_tensor
from tests.engine.test_memory import peak_growth
from tests.exchange.samples import files_in, lose_bits, training_state, write
from tests.storage.system import no_file_above

INDEX = "model.safetensors.index.json"
TIED = "head.weight"


def held_in(where):
    """All tensors of a Hugging Face directory, by the safetensors library; the index must agree with the files."""
    names = sorted(path.name for path in where.glob("*.safetensors"))
    found = {}
    for name in names:
        found |= load_file(where / name)
    if (where / INDEX).exists():
        index = json.loads((where / INDEX).read_text())
        assert set(index["weight_map"].values()) == set(names)
        assert set(index["weight_map"]) == set(found)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def weights():
    return {key: value for key, value in training_state()["model"].items() if key != TIED}


@pytest.mark.parametrize("layout", ["native", "dcp", "safetensors"])
def test_a_checkpoint_of_any_layout_becomes_a_model(tmp_path, layout):
    """Tensors come out without `model.`; of tied weights the first name is stored, the other in the header."""
    state = training_state() if layout != "safetensors" else training_state()["model"] | {TIED: torch.ones(3)}
    write(state, tmp_path / "ck", layout)
    report = sk.export(tmp_path / "ck", tmp_path / "hf")
    expected = weights() if layout == "native" else dict(state.get("model", state))
    assert {k: bits(v) for k, v in held_in(tmp_path / "hf").items()} == {k: bits(v) for k, v in expected.items()}
    assert report.tensors == len(expected)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    assert report.ties == ({TIED: "embed.weight"} if layout == "native" else {})
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} | report.ties


@settings(max_examples=25)
@given(st.data())
def test_files_are_as_large_as_asked_for(tmp_path_factory, data):
    where = tmp_path_factory.mktemp("shards")
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=12))
    limit = data.draw(st.integers(1, 4000))
    state = {f"t{i}": random_tensor((n,), torch.float32, i) for i, n in enumerate(sizes)}
    sk.save(state, where / "ck")
    report = sk.export(where / "ck", where / "hf", max_shard_bytes=limit)
    assert {k: bits(v) for k, v in held_in(where / "hf").items()} == {k: bits(v) for k, v in state.items()}
    for name in report.files:
        tensors = [tensor.nbytes for tensor in load_file(where / "hf" / name).values()]
        assert sum(tensors) <= limit or sum(n > 0 for n in tensors) == 1
    if len(report.files) > 1:
        assert report.files == [
            f"model-{i + 1:05}-of-{len(report.files):05}.safetensors" for i in range(len(report.files))
        ]


@settings(max_examples=20)
@given(st.sampled_from(["bf16", "fp16", "float32", torch.float64]), st.integers(0, 9), st.sampled_from([1, 300, 70000]))
def test_numbers_are_converted_as_torch_converts_them(tmp_path_factory, dtype, seed, count):
    where = tmp_path_factory.mktemp("cast")
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.float8_e4m3fn]
    state = {str(kind): random_tensor((count,), kind, seed) for kind in kinds}
    sk.save(state, where / "ck")
    sk.export(where / "ck", where / "hf", dtype=dtype)
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, torch.float64: torch.float64}
    found = held_in(where / "hf")
    for kind in kinds:
        # NaNs keep no bits across types: compared as numbers.
        floats = kind in kinds[:4]
        meant = state[str(kind)].to(names[dtype]) if floats else state[str(kind)]
        assert found[str(kind)].dtype == meant.dtype
        if floats:
            torch.testing.assert_close(found[str(kind)], meant, rtol=0, atol=0, equal_nan=True)
        else:
            assert bits(found[str(kind)]) == bits(meant)


@pytest.mark.parametrize("form", ["hf", "torch"])
@pytest.mark.parametrize(
    ("dtype", "infinite"), [("fp16", ["d", "f", "h"]), ("bf16", ["d", "f"]), ("fp32", ["d"]), ("fp64", []), (None, [])]
)
def test_finite_numbers_that_become_infinite_are_reported(tmp_path, form, dtype, infinite):
    """The report names each tensor in which a cast makes a finite number infinite, and no other."""
    model = {
        "a": torch.tensor([1.0, float("inf"), float("nan")]),
        "d": torch.tensor([[1.0, 2.0], [-float("inf"), 1e300]], dtype=torch.float64),
        "f": torch.tensor([1.0, -3.4e38]),
        "h": torch.tensor([70000.0]).bfloat16(),
    }
    sk.save({"model": model}, tmp_path / "ck")
    assert sk.export(tmp_path / "ck", tmp_path / "out", dtype=dtype, format=form).infinite == infinite


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"include": "model.layers"}, {"layers.0.weight", "layers.0.bias", "layers.1.weight"}),
        ({"exclude": ["*.bias", "model.layers.1"], "include": "*layers*"}, {"layers.0.weight"}),
        ({"include": "*layers.1*", "rename": [(r"layers\.(\d+)", r"h.\1")]}, {"h.1.weight"}),
        ({"include": "*layers.1*", "rename": {re.compile("^"): "base."}}, {"base.layers.1.weight"}),
        ({"include": "*layers*", "rename": lambda name: None if "bias" in name else name.upper()},
         {"LAYERS.0.WEIGHT", "LAYERS.1.WEIGHT"}),
        ({"prefix": "optim."}, {"exp_avg"}),
        ({"prefix": "optim"}, {"exp_avg"}),
        ({"prefix": "model.layers.1."}, {"weight"}),
        ({"prefix": "", "include": "optim.exp_avg"}, {"optim.exp_avg"}),
    ],
)  # fmt: skip
def test_names_are_chosen_and_changed(tmp_path, how, names):
    sk.save(training_state(), tmp_path / "ck")
    sk.export(tmp_path / "ck", tmp_path / "hf", **how)
    assert set(held_in(tmp_path / "hf")) == names


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"include": "model.lairs"}, sk.StateError, "lairs"),
        ({"include": "modle"}, sk.StateError, "did you mean model"),
        ({"rename": {"lyers": "h"}}, sk.StateError, "did you mean layers"),
        ({"rename": [(r"^module\.", "")]}, sk.StateError, "a function may match nothing"),
        ({"exclude": "*"}, sk.StateError, "none"),
        ({"prefix": "nothing."}, sk.StateError, "nothing"),
        ({"rename": lambda _: "same"}, sk.KeyCollision, "same"),
        ({"rename": lambda _: 3}, sk.StateError, "no name"),
        ({"dtype": "int8"}, sk.StateError, "int8"),
        ({"format": "onnx"}, sk.StateError, "onnx"),
        ({"max_shard_bytes": 0}, sk.StateError, "max_shard_bytes"),
        ({"config": "no-such-directory"}, sk.StateError, "no-such-directory"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, how, error, says):
    """Arguments that pick nothing, give one name to two tensors or are unknown raise before anything is written."""
    sk.save(training_state(), tmp_path / "ck")
    with pytest.raises(error, match=says):
        sk.export(tmp_path / "ck", tmp_path / "hf", **how)
    assert not (tmp_path / "hf").exists() or not list((tmp_path / "hf").iterdir())


class AppState(Stateful):
    """The object of torch's tutorial: model and optimizer as one."""

    def __init__(self, model, optimizer, **options):
        self.parts, self.options = (model, optimizer), StateDictOptions(**options)

    def state_dict(self):
        model, optimizer = get_state_dict(*self.parts, options=self.options)
        return {"model": model, "optim": optimizer}


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("layout", ["dcp", "native"])
@pytest.mark.parametrize("form", ["app", "app, flat", "lightning", "state dicts", "at the top", "optimizer alone"])
def test_optimizer_state_is_not_exported(capsys, tmp_path, layout, form):
    """Wherever it stands, files hold the model alone, unless asked for by name; report and command list the rest."""
    model, optimizer = trained()
    app = AppState(model, optimizer, flatten_optimizer_state_dict=form == "app, flat").state_dict()
    state, optimizers = {
        "app": ({"app": app}, "app.optim"),
        "app, flat": ({"app": app}, "app.optim"),
        "lightning": ({"state_dict": app["model"], "optimizer_0": app["optim"]}, "optimizer_0"),
        "state dicts": ({"model_state_dict": app["model"], "other": app["optim"]}, "other"),
        "at the top": ({**app["model"], **app["optim"]}, "state"),
        "optimizer alone": ({"w": torch.ones(2), "slow": {"state": app["optim"].get("state")}}, "slow"),
    }[form]
    write(state, tmp_path / "ck", layout)
    report = sk.export(tmp_path / "ck", tmp_path / "hf")
    assert report.skipped == {optimizers: 12}
    expected = {"w": torch.ones(2)} if form == "optimizer alone" else model.state_dict()
    assert {k: bits(v) for k, v in held_in(tmp_path / "hf").items()} == {k: bits(v) for k, v in expected.items()}
    assert main(["export", str(tmp_path / "ck"), str(tmp_path / "again")]) == 0
    assert f"left out: {optimizers} (12 tensors)" in capsys.readouterr().out
    asked = sk.export(tmp_path / "ck", tmp_path / "asked", prefix="", include=f"{optimizers}.*exp_avg")
    assert (asked.tensors, asked.skipped) == (4, {})


def test_parts_beside_the_model_are_reported(tmp_path):
    state = training_state() | {"ema": {"a": torch.ones(2), "b": {"c": torch.ones(1)}}}
    sk.save(state, tmp_path / "ck")
    assert sk.export(tmp_path / "ck", tmp_path / "hf").skipped == {"optim": 1, "array": 1, "ema": 2}
    assert sk.export(tmp_path / "ck", tmp_path / "2", exclude=["ema", "array"]).skipped == {"optim": 1}


def test_plain_values_are_left_out_and_told(tmp_path):
    sk.save({"w": torch.ones(3), "step": 1, "deep": {"name": "x"}}, tmp_path / "ck")
    assert sk.export(tmp_path / "ck", tmp_path / "hf").left_out == ["step", "deep.name"]


@pytest.mark.parametrize(
    ("form", "bad"), [("hf", torch.ones(3, dtype=torch.complex128)), ("torch", frozenset({1}))], ids=["hf", "torch"]
)
def test_what_a_form_cannot_hold_is_refused(tmp_path, form, bad):
    """A dtype that safetensors lacks, or a value that `torch.load(weights_only=True)` would not open."""
    sk.save({"good": torch.ones(3), "bad": bad}, tmp_path / "ck")
    with pytest.raises(sk.UnsupportedLeaf, match="'bad'"):
        sk.export(tmp_path / "ck", tmp_path / "to", format=form)
    assert not (tmp_path / "to").exists()


def test_a_model_may_be_converted_in_its_place(tmp_path):
    write({"a": torch.arange(5.0), "b": torch.ones(3)}, tmp_path / "hf", "safetensors")
    sk.export(tmp_path / "hf", tmp_path / "hf", dtype="bf16", max_shard_bytes=10, overwrite=True)
    assert bits(held_in(tmp_path / "hf")["a"]) == bits(torch.arange(5.0).bfloat16())


def test_configuration_and_tokenizer_are_copied(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.model", "modeling_x.py", "model.safetensors", "pytorch_model.bin", INDEX):
        (base / name).write_bytes(f"{name}\n".encode())
    sk.save(training_state(), tmp_path / "ck")
    sk.export(tmp_path / "ck", tmp_path / "hf", config=base)
    copied = {name: data for name, data in files_in(tmp_path / "hf").items() if not name.startswith("model.safe")}
    assert copied == {n: f"{n}\n".encode() for n in ("config.json", "tokenizer.model", "modeling_x.py")}


def test_a_configuration_that_is_there_is_not_replaced_unasked(tmp_path, monkeypatch):
    """Another config.json at the target is refused, or replaced with overwrite; an added one goes if that fails."""
    base, to = tmp_path / "base", tmp_path / "hf"
    base.mkdir()
    to.mkdir()
    (base / "config.json").write_text("new")
    (base / "tokenizer.json").write_text("new")
    (to / "config.json").write_text("old")
    sk.save(training_state(), tmp_path / "ck")
    with pytest.raises(sk.CheckpointExists, match=r"config\.json"):
        sk.export(tmp_path / "ck", to, config=base)
    assert files_in(to) == {"config.json": b"old"}

    def full(*_, **__):
        raise sk.StorageFull("no space for the index file")

    monkeypatch.setattr(safetensors_publish, "publish_model", full)
    with pytest.raises(sk.StorageFull):
        sk.export(tmp_path / "ck", to, config=base, overwrite=True)
    monkeypatch.undo()
    assert files_in(to) == {"config.json": b"old"}
    sk.export(tmp_path / "ck", to, config=base, overwrite=True)
    assert (to / "config.json").read_text() == (to / "tokenizer.json").read_text() == "new"


@pytest.mark.parametrize("layout", ["native", "dcp"])
def test_torch_opens_the_file_safely(tmp_path, layout):
    """`torch.load(weights_only=True)` gives tensors, ties and plain values, in the order of the state."""
    write(training_state(), tmp_path / "ck", layout)
    sk.export(tmp_path / "ck", tmp_path / "m.pt", format="torch")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert bits(found) == bits(training_state()["model"])
    if layout == "native":
        assert found[TIED].data_ptr() == found["embed.weight"].data_ptr()
    sk.export(tmp_path / "ck", tmp_path / "all.pt", format="torch", prefix="", exclude=["array"])
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything["step"] == 7
    assert bits(everything["optim.exp_avg"]) == bits(training_state()["optim"]["exp_avg"])


@pytest.mark.parametrize("form", ["hf", "torch"])
def test_damage_in_the_checkpoint_leaves_no_half_model(tmp_path, form):
    """A flipped bit in the source is an error that names file and tensor, and what was at the target is still there."""
    sk.save({"model": {f"w{i}": random_tensor((300, 300), torch.float32, i) for i in range(4)}}, tmp_path / "ck")
    target = tmp_path / "to" / "m" if form == "torch" else tmp_path / "to"
    (tmp_path / "to").mkdir()
    sk.export(tmp_path / "ck", target, format=form)
    before = files_in(tmp_path / "to")
    [file] = (tmp_path / "ck").glob("model-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(sk.ChecksumMismatch, match=r"'model\.w") as caught:
        sk.export(tmp_path / "ck", target, format=form, overwrite=True)
    assert file.name in str(caught.value)
    assert files_in(tmp_path / "to") == before


@pytest.mark.parametrize("form", ["hf", "torch"])
def test_what_was_not_written_as_meant_is_not_published(tmp_path, monkeypatch, form):
    """A file that cannot grow as large as it must be, or of which a disk loses bits, never gets its name; nothing stays."""
    sk.save({"w": random_tensor((1 << 19,), torch.float32, 1)}, tmp_path / "ck")
    (tmp_path / "to").mkdir()
    target = tmp_path / "to" / "m" if form == "torch" else tmp_path / "to"
    with no_file_above(1 << 20), pytest.raises(sk.StorageError, match="EFBIG"):
        sk.export(tmp_path / "ck", target, format=form)
    assert not list((tmp_path / "to").iterdir())
    lose_bits(monkeypatch)
    with pytest.raises(sk.ChecksumMismatch):
        sk.export(tmp_path / "ck", target, format=form)
    assert not list((tmp_path / "to").iterdir())


def test_every_failing_read_of_the_source_is_an_error(tmp_path):
    store = sk.MemoryStore()
    sk.save({"w": torch.ones(300), "b": torch.zeros(5)}, store)
    calm = FaultyStore(store)
    sk.export(calm, tmp_path / "hf")
    before = files_in(tmp_path / "hf")
    for at in range(len(calm.operations)):
        with pytest.raises(sk.StorageError):
            sk.export(FaultyStore(store, "error", at=at), tmp_path / "hf", overwrite=True)
        assert files_in(tmp_path / "hf") == before


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    where = tmp_path_factory.mktemp("large")
    sk.save({"w": torch.ones(50, 1 << 20), "more": {str(i): torch.ones(1 << 18) for i in range(100)}}, where / "ck")
    return where


@pytest.mark.parametrize(
    ("what", "how"),
    [("export", "hf"), ("export", "torch"), ("convert", "native"), ("convert", "dcp"), ("convert", "safetensors")],
)
def test_memory_does_not_grow_with_the_checkpoint(large, what, how):
    options = sk.Options(io_threads=4, host_budget_bytes=32 << 20)
    to = large / f"{what}-{how}"

    def call():
        if what == "export":
            sk.export(large / "ck", to, format=how, dtype="bf16", options=options)
        else:
            sk.convert(large / "ck", to, how, options=options)

    assert peak_growth(call) < (32 + 48) << 20  # threads' stacks, the index, the allocator's own


def test_an_export_that_is_refused_or_fails_touches_nothing_of_others(tmp_path):
    """Neither the files of an export under way, nor a file that came to the place meanwhile; paths are of any class."""
    sk.save({"model": {"w": torch.ones(3)}}, tmp_path / "ck")
    sk.export(tmp_path / "ck", tmp_path / "hf")
    under_way = tmp_path / "hf" / f"model.safetensors.new-{uuid.uuid4()}"
    under_way.touch()
    with pytest.raises(sk.CheckpointExists):
        sk.export(tmp_path / "ck", tmp_path / "hf")
    assert under_way.exists()

    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")

    def interrupt(*_):
        (tmp_path / "new" / "config.json").write_text("a user's")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        sk.export(tmp_path / "ck", tmp_path / "new", config=tmp_path / "config", progress=interrupt)
    assert (tmp_path / "new" / "config.json").read_text() == "a user's"

    def add(*_):
        (tmp_path / "later" / "config.json").write_text("a user's")

    with pytest.raises(sk.StorageError, match="cannot put: File exists"):
        sk.export(tmp_path / "ck", tmp_path / "later", config=tmp_path / "config", progress=add)
    assert files_in(tmp_path / "later") == {"config.json": b"a user's"}

    class Place:
        def __fspath__(self):
            return str(tmp_path / "file.pt")

    assert sk.export(tmp_path / "ck", Place(), format="torch").to == str(tmp_path / "file.pt")
