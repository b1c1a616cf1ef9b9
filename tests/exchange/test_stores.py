"""Conversions and exports with both ends in stores: S3 for real, fsspec, and memory where every step can be made to fail."""

import io
import json
import re
import uuid

import pytest
import torch
from safetensors.torch import load as load_safetensors

import shardkeep as sk
from shardkeep.codecs.keys import KeyRing
from shardkeep.conversion import to_file
from shardkeep.layouts.safetensors_publish import NOTE_NAME, begin_save, prepare_directory, publish_model
from shardkeep.storage.fsspec import FsspecStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_place
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.engine.samples import bits, random_tensor
from tests.exchange.samples import in_any_order, training_state
from tests.object_store.proxy import Proxy, Rule
from tests.support.uploads import unfinished

INDEX = "model.safetensors.index.json"
FEW_TRIES = {"timeout_s": 60.0, "retries": 2, "retry_s": 60.0}


@pytest.fixture(params=["memory", "s3", "fsspec"])
def root(request, monkeypatch, tmp_path, recwarn):
    """The URL of an empty place; nothing is written to the directory that the test is in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if request.param == "s3":
        yield request.getfixturevalue("s3_root")
    elif request.param == "fsspec":
        monkeypatch.setitem(FsspecStore.__init__.__kwdefaults__, "settle_s", 0.0)  # no other writer
        yield f"local://{tmp_path}/place"
    elif request.param == "directory":
        yield f"{tmp_path}/place"
    else:
        yield f"memory://{uuid.uuid4().hex}"
    assert list((tmp_path / "here").iterdir()) == []


def names_at(where):
    return [info.name for info in open_place(where).list()]


def blob_at(where, name):
    return open_place(where).get(name, limit=1 << 30)


def test_every_layout_from_store_to_store(root):
    """A state goes from layout to layout, each in a place of a store, comes back bit for bit, and is verified."""
    state = training_state()
    sk.save(state, f"{root}/a", step=3, meta={"note": "x"})
    path = ["native", "safetensors", "native", "dcp", "safetensors", "native"]
    for number, layout in enumerate(path):
        where = f"{root}/{chr(ord('a') + number)}"
        report = sk.convert(where, f"{root}/{chr(ord('b') + number)}", layout, max_shard_bytes=1000)
        assert report.layout == layout
        sk.open(report.to).verify()
        if number == 2:
            found = sk.open(report.to)
            assert (found.step, found.meta) == (3, {"note": "x"})
            assert bits(found.to_dict()) == bits(state)
    assert in_any_order(sk.open(report.to).to_dict()) == in_any_order(state)


@pytest.mark.parametrize("root", ["memory", "s3", "fsspec", "directory"], indirect=True)
def test_a_conversion_replaces_any_layout(root):
    """A checkpoint of any layout is replaced only if asked for; then the new one and unrelated files are there."""
    for k in (1, 2):
        sk.save({"w": torch.full((300,), float(k))}, f"{root}/{k}")
    for before in ("native", "dcp", "safetensors"):
        for after in ("native", "dcp", "safetensors"):
            to = f"{root}/{before}-{after}"
            sk.convert(f"{root}/1", to, before)
            open_place(to).put("notes.txt", b"mine")
            with pytest.raises(sk.CheckpointExists):
                sk.convert(f"{root}/2", to, after)
            assert sk.open(to)["w"][0] == 1
            sk.convert(f"{root}/2", to, after, overwrite=True)
            assert torch.equal(sk.open(to)["w"].tensor(), torch.full((300,), 2.0))
            fresh = sk.convert(f"{root}/2", f"{to}-fresh", after).to
            assert len(names_at(to)) == len(names_at(fresh)) + 1
            assert blob_at(to, "notes.txt") == b"mine"
    spelled = [f"{root}/1/", *([root.replace("s3://", "s3a://") + "/1"] if root.startswith("s3://") else [])]
    for same in spelled:
        with pytest.raises(sk.CheckpointError, match="its own place"):
            sk.convert(f"{root}/1", same, "native", overwrite=True)
        with pytest.raises(sk.StateError, match="the root itself"):
            sk.Checkpointer(f"{root}/1", promote_to=same)


@pytest.mark.parametrize("root", ["memory", "s3", "fsspec", "directory"], indirect=True)
def test_exported_models(root):
    """The safetensors library reads models of one file or several, also in place of others; configuration is copied."""
    for name in ("config.json", "tokenizer.json", "model.bin"):
        open_place(f"{root}/base").put(name, b"{}")
    for turn, most in enumerate([5e9, 5e9, 100, 100, 5e9]):
        state = {"model": {f"l{i}.w": random_tensor((40,), torch.float32, 10 * turn + i) for i in range(3)}}
        sk.save(state, f"{root}/{turn}")
        report = sk.export(
            f"{root}/{turn}", f"{root}/hf", config=f"{root}/base", max_shard_bytes=most, overwrite=turn > 0
        )
        names = names_at(f"{root}/hf")
        indexed = len(report.files) > 1 or "://" in root  # a directory is renamed into place, a store needs a marker
        assert sorted([*report.files, "config.json", "tokenizer.json", *([INDEX] if indexed else [])]) == names
        found = {}
        for name in report.files:
            found |= load_safetensors(blob_at(f"{root}/hf", name))
        assert in_any_order(found) == in_any_order(state["model"])
        assert in_any_order(sk.open(f"{root}/hf").to_dict()) == in_any_order(state["model"])
        if indexed:
            weights = json.loads(blob_at(f"{root}/hf", INDEX))["weight_map"]
            assert set(weights.values()) == set(report.files)
        if most > 100:
            [alone] = (sk.open(f"{root}/hf/{name}") for name in report.files)
            assert in_any_order(alone.to_dict()) == in_any_order(state["model"])
    with pytest.raises(sk.CheckpointExists, match="a model is already there"):
        sk.export(f"{root}/0", f"{root}/hf")
    with pytest.raises(sk.CheckpointExists, match="another layout"):
        sk.export(f"{root}/0", f"{root}/1", overwrite=True)


@pytest.mark.parametrize("root", ["memory", "s3", "fsspec", "directory"], indirect=True)
def test_files_for_torch_load(root, monkeypatch):
    states = [{"w": random_tensor((5000,), torch.float32, k), "step": k} for k in range(3)]
    for k, state in enumerate(states):
        sk.save(state, f"{root}/{k}")

    def found():
        return torch.load(io.BytesIO(blob_at(f"{root}/out", "w.pt")), weights_only=True)

    sk.export(f"{root}/0", f"{root}/out/w.pt", format="torch")
    assert bits(found()) == bits(states[0])
    with pytest.raises(sk.CheckpointExists):
        sk.export(f"{root}/1", f"{root}/out/w.pt", format="torch")
    sk.export(f"{root}/1", f"{root}/out/w.pt", format="torch", overwrite=True)
    assert bits(found()) == bits(states[1])
    monkeypatch.setattr(to_file, "_MOST_HELD_NBYTES", 1000)
    if root.startswith(("s3:", "/")):
        sk.export(f"{root}/2", f"{root}/out/w.pt", format="torch", overwrite=True)
        assert bits(found()) == bits(states[2])
    else:
        with pytest.raises(sk.StorageError, match="in one step"):
            sk.export(f"{root}/2", f"{root}/out/w.pt", format="torch", overwrite=True)
        assert bits(found()) == bits(states[1])
    assert names_at(f"{root}/out") == ["w.pt"]
    with pytest.raises(sk.CheckpointError, match="no file"):
        sk.export(f"{root}/0", "memory://x", format="torch")


@pytest.mark.parametrize("form", ["torch", "hf", "native"])
def test_a_directory_is_made_where_it_is_missing(tmp_path, form):
    state = {"w": random_tensor((50,), torch.float32, 1)}
    sk.save(state, tmp_path / "a")
    for where in (f"file://{tmp_path}/new/one/w.pt", f"{tmp_path}/other/two/w.pt"):
        sk.export(tmp_path / "a", where, format=form)
    for where in (tmp_path / "new/one/w.pt", tmp_path / "other/two/w.pt"):
        found = torch.load(where, weights_only=True) if form == "torch" else sk.open(where).to_dict()
        assert bits(found) == bits(state)


def test_a_large_file_for_torch_load_is_replaced_in_one_step(s3_root):
    """The old file is read until the new one, larger than the memory, is complete; a failure leaves nothing of it."""
    root = s3_root
    options = sk.Options(host_budget_bytes=16 << 20, io_threads=2)
    states = [{"w": torch.full((3 << 20,), float(k)), "step": k} for k in range(2)]  # two parts
    for k, state in enumerate(states):
        sk.save(state, f"{root}/{k}", options=options)

    def found():
        return torch.load(io.BytesIO(blob_at(f"{root}/out", "w.pt")), weights_only=True)["step"]

    def export(k, progress=None):
        sk.export(f"{root}/{k}", f"{root}/out/w.pt", format="torch", overwrite=True, options=options, progress=progress)

    def fail_late(done, total):
        if done == total:
            raise KeyboardInterrupt

    seen = []
    export(0)
    with pytest.raises(KeyboardInterrupt):
        export(1, fail_late)
    assert found() == 0
    assert unfinished(open_place(f"{root}/out")) == []
    export(1, lambda done, total: seen.append(found()) if done == total else None)
    assert seen == [0]
    assert torch.equal(torch.load(io.BytesIO(blob_at(f"{root}/out", "w.pt")), weights_only=True)["w"], states[1]["w"])
    assert names_at(f"{root}/out") == ["w.pt"]


def write_bytes(url, data, meant=None, budget_nbytes=1 << 20):
    def write(store, name):
        writer = store.create(name, len(data))
        writer.write_at(0, memoryview(data))
        writer.finish()

    def check(store, name):
        if store.get(name, limit=1 << 30) != (data if meant is None else meant):
            raise sk.ChecksumMismatch("other bytes")

    to_file._write_blob(*to_file.file_at(url), len(data), write, check, replace=True, most_held=budget_nbytes // 2)


def test_equal_bytes_take_the_place_of_a_file(s3_root):
    data = bytes(9 << 20)
    for _ in range(2):
        write_bytes(f"{s3_root}/w.pt", data)
    assert blob_at(s3_root, "w.pt") == data


@pytest.mark.parametrize("fault", ["lose_answer", "refuse"])
def test_the_last_request_of_a_replacement_goes_wrong(s3_server, monkeypatch, fault):
    """If its answer is lost, the new file is found. If it never arrives, the old file is there, and that is said."""
    old, new = bytes(9 << 20), bytes([1]) * (9 << 20)
    with Proxy(s3_server.port) as proxy:
        monkeypatch.setattr(to_file, "open_store", lambda url, direct: open_place(url, **FEW_TRIES))
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value.replace(f":{s3_server.port}", f":{proxy.port}"))
        root = s3_server.url(f"exchange-{uuid.uuid4().hex}")
        write_bytes(f"{root}/w.pt", old)
        times = 1 if fault == "lose_answer" else None
        proxy.rules = [Rule(fault, method="POST", path="uploadId", times=times)]
        if times:
            write_bytes(f"{root}/w.pt", new)
        else:
            with pytest.raises(sk.StorageError):
                write_bytes(f"{root}/w.pt", new)
        assert proxy.counts.faults[fault]
        proxy.rules = []
        assert blob_at(root, "w.pt") == (new if times else old)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("problem", [sk.StorageError("reset"), KeyboardInterrupt(), sk.ChecksumMismatch("other bytes")])
def test_a_file_for_torch_load_that_cannot_be_read_back(monkeypatch, problem, replaces):
    """If a file cannot be read back it stays, also in the place of another; a damaged one that is new goes."""
    root = f"memory://{uuid.uuid4().hex}"
    states = [{"w": random_tensor((500,), torch.float32, k)} for k in range(2)]
    for k, state in enumerate(states):
        sk.save(state, f"{root}/{k}")
    if replaces:
        sk.export(f"{root}/0", f"{root}/out/w.pt", format="torch")
    real = MemoryStore.open
    with monkeypatch.context() as patch:
        fails = lambda store, name: store.url == f"{root}/out" and name == "w.pt"  # noqa: E731
        patch.setattr(MemoryStore, "open", lambda *blob: fail(problem) if fails(*blob) else real(*blob))
        with pytest.raises(type(problem)):
            sk.export(f"{root}/1", f"{root}/out/w.pt", format="torch", overwrite=True)
    gone = isinstance(problem, sk.ChecksumMismatch) and not replaces
    assert names_at(f"{root}/out") == ([] if gone else ["w.pt"])
    if not gone:
        found = torch.load(io.BytesIO(blob_at(f"{root}/out", "w.pt")), weights_only=True)
        assert bits(found) == bits(states[1])


def fail(problem):
    raise problem


def test_a_file_for_torch_load_is_looked_at_before_it_replaces_another():
    url = f"memory://{uuid.uuid4().hex}/w.pt"
    write_bytes(url, b"good", budget_nbytes=1000)
    with pytest.raises(sk.ChecksumMismatch):
        write_bytes(url, b"evil", meant=b"good", budget_nbytes=1000)
    assert blob_at(url.removesuffix("/w.pt"), "w.pt") == b"good"


def test_codecs(root):
    """Conversions and native exports go through codecs; layouts that others could not read any more refuse them."""
    keys = KeyRing.from_text(bytes(range(32)).hex(), named="test")
    state = training_state()
    sk.save(state, f"{root}/a")
    options = sk.Options(keys=keys)
    sk.convert(f"{root}/a", f"{root}/coded", codecs=["float", "aes"], options=options)
    assert bits(sk.open(f"{root}/coded", options=options).to_dict()) == bits(state)
    with pytest.raises(sk.CheckpointError, match="key"):
        sk.open(f"{root}/coded")
    assert not any(name.endswith(".safetensors") for name in names_at(f"{root}/coded"))
    report = sk.export(
        f"{root}/coded", f"{root}/weights", format="native", codecs=["float"], dtype="bf16", options=options
    )
    found = sk.open(f"{root}/weights").to_dict()
    model = state["model"]
    assert list(found) == list(model)
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.items()}
    assert bits(found) == bits(expected)
    assert report.ties == {"head.weight": "embed.weight"}
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    with pytest.raises(sk.CheckpointError, match="its own place"):
        sk.export(f"{root}/a", f"{root}/a", format="native", overwrite=True)
    for other in ("hf", "torch"):
        with pytest.raises(sk.StateError, match="codecs are for format='native'"):
            sk.export(f"{root}/a", f"{root}/x", format=other, codecs=["zstd"])


@pytest.mark.parametrize("most", [5e9, 100])
def test_a_death_anywhere_leaves_the_old_model_or_the_new(most):
    """Wherever an export to a store dies, the old or the new model is opened; the next export leaves nothing of it."""
    states = [{f"l{i}": random_tensor((40,), torch.float32, 10 * k + i) for i in range(3)} for k in range(2)]
    sources = [MemoryStore() for _ in states]
    for state, source in zip(states, sources, strict=True):
        sk.save(state, source)
    seen = set()
    for at in range(200):
        store = MemoryStore()
        sk.export(sources[0], store, max_shard_bytes=most)
        dying = FaultyStore(store, "crash", at=at, verbs=("create", "write_at", "finish", "put", "delete"))
        try:
            sk.export(sources[1], dying, max_shard_bytes=most, overwrite=True)
        except InjectedCrash:
            found = bits(sk.open(store).to_dict())
            assert found in [bits(state) for state in states]
            seen.add(found == bits(states[1]))
            sk.export(sources[0], store, max_shard_bytes=most, overwrite=True)
            assert bits(sk.open(store).to_dict()) == bits(states[0])
            assert {info.name for info in store.list()} <= {*(file.name for file in sk.open(store).record.files), INDEX}
        else:
            break
    assert bits(sk.open(store).to_dict()) == bits(states[1])
    assert seen == {True, False}


def test_a_failure_takes_back_what_was_written():
    """Whatever operation of an export fails, an empty place is empty again, and one with a model has that model."""
    source, before = MemoryStore(), MemoryStore()
    sk.save({"w": torch.ones(300), "v": torch.ones(300)}, source)
    sk.export(source, before)
    for at in range(100):
        store, fresh = MemoryStore(), MemoryStore()
        sk.export(source, store)
        old = {info.name: store.get(info.name, limit=1 << 20) for info in store.list()}
        failed = 0
        for inner, replaces in ((store, True), (fresh, False)):
            faulty = FaultyStore(inner, "error", at=at, verbs=("create", "write_at", "finish"))
            try:
                sk.export(source, faulty, max_shard_bytes=1300, overwrite=replaces)
            except sk.StorageError:
                failed += 1
        if not failed:
            break
        assert {info.name: store.get(info.name, limit=1 << 20) for info in store.list()} == old
        assert list(fresh.list()) == []
    assert at > 4


def test_a_place_where_nothing_was_finished_holds_nothing():
    """Shards of an export that died in an empty place are no checkpoint, though a listing shows them."""
    source, store = MemoryStore(), MemoryStore()
    sk.save({"w": torch.ones(300), "v": torch.ones(300)}, source)
    dying = FaultyStore(store, "crash", at=1, verbs=("finish",))
    with pytest.raises(InjectedCrash):
        sk.export(source, dying, max_shard_bytes=1300)
    [left, *_, note] = [info.name for info in store.list()]
    assert left.startswith("model-00001-of-00002-")
    assert note == NOTE_NAME
    with pytest.raises(sk.CheckpointNotFound):
        sk.open(store)
    report = sk.export(source, store)
    assert [info.name for info in store.list()] == [*report.files, INDEX]


def test_of_two_exports_at_once_one_is_told(root):
    """An export that ends after another one began in the same place is not committed, and says so."""
    store, file = open_place(f"{root}/hf"), "model-00001-of-00001.safetensors"
    first = begin_save(store, str(uuid.uuid4()), prepare_directory(store))
    found = prepare_directory(store)
    begin_save(store, str(uuid.uuid4()), found)
    store.put(first.written(file), b"")
    with pytest.raises(sk.CheckpointExists, match="another save began"):
        publish_model(store, first, [file], weights=None, replaces_saves=False)
    assert names_at(f"{root}/hf") == [NOTE_NAME]
    with pytest.raises(sk.CheckpointNotFound):
        sk.open(f"{root}/hf")
    with pytest.raises(sk.CheckpointExists, match="another save began"):
        begin_save(store, str(uuid.uuid4()), found)


class Hangs:
    """A store that hangs before it does something; blobs appear when finished, over others, as large ones do on S3."""

    def __init__(self, inner, at, meanwhile):
        self.inner, self.url, self._at, self._meanwhile = inner, inner.url, at, [meanwhile]

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def create(self, name, nbytes):
        return Late(self, name, nbytes)

    def put(self, name, data, **how):
        if re.fullmatch(self._at, name) and self._meanwhile:
            self._meanwhile.pop()()
        self.inner.put(name, data, **how)


class Late:
    def __init__(self, store, name, nbytes):
        self._store, self._name, self._data = store, name, bytearray(nbytes)

    def write_at(self, offset, data):
        self._data[offset : offset + len(data)] = data

    def finish(self, nbytes=None):
        self._store.put(self._name, bytes(self._data), replace=True)

    def abandon(self):
        pass


@pytest.mark.parametrize("at", ["model-00002-of.*", INDEX + ".new.*", NOTE_NAME, INDEX])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_export_that_hung_never_mixes_with_another(at, overwrite):
    states = [{f"l{i}": torch.full((40,), 10.0 * k + i) for i in range(2)} for k in range(3)]
    sources = [MemoryStore() for _ in states]
    for state, source in zip(states, sources, strict=True):
        sk.save(state, source)
    store = MemoryStore()
    if overwrite:
        sk.export(sources[0], store, max_shard_bytes=200)

    def export(k, to, **how):
        return sk.export(sources[k], to, max_shard_bytes=200, **how)

    hanging = Hangs(store, at, lambda: export(2, store, overwrite=overwrite or at == INDEX))
    if at == INDEX:  # committed already
        export(1, hanging, overwrite=overwrite)
    else:
        with pytest.raises(sk.CheckpointError):
            export(1, hanging, overwrite=overwrite)
    assert bits(sk.open(store).to_dict()) == bits(states[2])
    assert [info.name for info in store.list()] == [*(file.name for file in sk.open(store).record.files), INDEX]


def test_what_is_published_is_not_taken_back(root):
    """A process that finds a save under way, and is slower than it, leaves alone what has become a model since."""
    store, file = open_place(f"{root}/hf"), "model-00001-of-00001.safetensors"
    first = begin_save(store, str(uuid.uuid4()), prepare_directory(store))
    store.put(first.written(file), b"")

    def complete():
        publish_model(store, first, [file], weights={"w": file}, replaces_saves=False)

    with pytest.raises(sk.CheckpointExists, match="another save began"):
        prepare_directory(Hangs(store, NOTE_NAME, complete))
    assert names_at(f"{root}/hf") == [first.final(file), INDEX]
