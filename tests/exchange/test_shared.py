"""Exports, conversions and checks that ranks share: the results of one process, and the same failure on all ranks."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.conversion import to_torch
from shardkeep.errors import CheckpointExists, DamagedCheckpoint, RanksDisagree, RanksSilent, StorageFull
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.engine.samples import random_tensor
from tests.exchange.samples import files_in, in_any_order

FORMS = ("native", "dcp", "safetensors", "hf", "torch")


def wide_state():
    return {
        "model": {f"layers.{at}.weight": random_tensor((64, 32 + at), torch.float32, at) for at in range(12)},
        "optim": {"exp_avg": random_tensor((1100, 2000), torch.float32, 50)},
        "rng": sk.PerRank({"seed": 3}),
        "step": 7,
    }


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Let ranks that write torch's layout divide even a small checkpoint."""
    monkeypatch.setattr(to_torch, "_SHARED_FILE_NBYTES", 10_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    where = tmp_path_factory.mktemp("shared") / "from"
    sk.save(wide_state(), where, step=3, meta={"note": "x"})
    return where


def make(source, to, form, **more):
    if form in ("hf", "torch"):
        return sk.export(source, to, format=form, max_shard_bytes="30kB", dtype="bf16", **more)
    return sk.convert(source, to, form, max_shard_bytes="30kB", **more)


def told(report):
    """What a report says, without the time, the place, and names that have the mark of a save."""
    said = {name: value for name, value in vars(report).items() if name not in {"seconds", "to"}}
    return said | ({"files": len(report.files)} if isinstance(report, sk.ExportReport) else {})


def blobs_in(store):
    return {info.name: store.get(info.name, limit=1 << 30) for info in store.list()}


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("form", FORMS)
def test_a_shared_copy_is_that_of_one_process(source, tmp_path, form, ranks):
    """Every rank has the same report; the files are the same byte for byte, or, in layouts of ranks, hold the same."""
    expected = make(source, tmp_path / "alone", form)
    reports = run_thread_ranks(ranks, lambda world: make(source, tmp_path / "shared", form, group=world))
    assert len({repr(told(report)) for report in reports}) == 1
    if form in ("native", "dcp"):
        shared, alone = sk.open(tmp_path / "shared"), sk.open(tmp_path / "alone")
        assert in_any_order(shared.to_dict()) == in_any_order(alone.to_dict())
        assert (shared.step, shared.meta) == (alone.step, alone.meta)
        assert shared.verify().files == len(shared.record.files)
        assert (reports[0].tensors, reports[0].values) == (expected.tensors, expected.values)
    else:
        assert told(reports[0]) == told(expected)
        assert files_in(tmp_path / "shared") == files_in(tmp_path / "alone")


@pytest.mark.parametrize("form", FORMS[:4])
def test_each_rank_writes_a_fair_share(source, form):
    inner = MemoryStore()
    stores = [Measured(inner) for _ in range(2)]
    report = run_thread_ranks(2, lambda world: make(source, stores[world.rank], form, group=world))[0]
    written = [store.nbytes for store in stores]
    whole_tensors = {"dcp": 4 * 1100 * 2000, "safetensors": 4 * 1100 * 2000, "native": 0, "hf": 0}
    assert min(written) > 0
    assert 0 <= sum(written) - report.bytes_written <= 64 << 10
    assert abs(written[0] - written[1]) <= whole_tensors[form] + (64 << 10)


class Measured(FaultyStore):
    nbytes = 0

    def create(self, name, nbytes):
        self.nbytes += nbytes
        return super().create(name, nbytes)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("form", FORMS[:4])
def test_a_full_store_on_one_rank_fails_all_and_leaves_nothing(source, form, failing):
    """Wherever one rank finds the store full, all ranks raise that, and what was there before is all that is there."""
    at = 0
    while True:
        inner = MemoryStore()
        inner.put("notes.txt", b"mine")

        def rank_main(world, inner=inner, at=at):
            store = inner
            if world.rank == failing:
                store = FaultyStore(inner, "full", at=at, verbs={"create", "write_at", "finish"}, lasting=True)
            return make(source, store, form, group=world)

        outcomes = thread_outcomes(3, rank_main)
        if not any(isinstance(outcome, BaseException) for outcome in outcomes):
            break
        assert [type(outcome) for outcome in outcomes] == [StorageFull] * 3
        assert [list(outcome.by_rank) for outcome in outcomes] == [[failing]] * 3
        assert blobs_in(inner) == {"notes.txt": b"mine"}
        at += 1
    assert at >= 3
    assert set(blobs_in(inner)) > {"notes.txt"}


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_copy_leaves_no_directory(source, tmp_path, form):
    """A damaged checkpoint fails all ranks, whichever reads the damage; a directory that was made for the copy is removed."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name, data in files_in(source).items():
        spoiled = bytearray(data)
        spoiled[-100] ^= "model" in name
        (damaged / name).write_bytes(spoiled)
    outcomes = thread_outcomes(3, lambda world: make(damaged, tmp_path / "to" / "copy", form, group=world))
    assert [type(outcome) for outcome in outcomes] == [sk.ChecksumMismatch] * 3
    assert not (tmp_path / "to" / "copy").exists()


@pytest.mark.parametrize(("form", "begins"), [("native", 2), ("dcp", 3), ("safetensors", 3), ("hf", 3)])
def test_an_interrupt_as_the_others_begin_to_write_leaves_nothing(source, tmp_path, form, begins):
    """Ctrl-C may reach rank 0 after its answer has let the others write, before it goes on itself."""
    ended = threading.Event()

    def rank_main(world):
        if world.rank == 0:
            world = replace(world, store=InterruptedStore(world.store, begins, ended))
        try:
            return make(source, tmp_path / "to", form, group=world, progress=interrupt if world.rank else None)
        finally:
            if world.rank:
                ended.set()

    outcomes = thread_outcomes(2, rank_main)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt] * 2
    assert not (tmp_path / "to").exists()


def interrupt(*_):
    raise KeyboardInterrupt


class InterruptedStore:
    """Rank 0's key-value store: Ctrl-C comes with its answer number `last`, and the other rank ends first."""

    def __init__(self, store, last, others_ended):
        self._store, self._left, self._others_ended = store, last, others_ended

    def __getattr__(self, name):
        return getattr(self._store, name)

    def set(self, key, value):
        self._store.set(key, value)
        self._left -= key.endswith("/out")
        if key.endswith("/out") and not self._left:
            self._others_ended.wait(30)
            raise KeyboardInterrupt


def test_a_model_that_is_there_stays(source, tmp_path):
    make(source, tmp_path / "to", "hf")
    before = files_in(tmp_path / "to")
    outcomes = thread_outcomes(2, lambda world: make(source, tmp_path / "to", "hf", group=world))
    assert [type(outcome) for outcome in outcomes] == [CheckpointExists] * 2
    assert files_in(tmp_path / "to") == before
    run_thread_ranks(2, lambda world: sk.export(source, tmp_path / "to", exclude="*.1*", group=world, overwrite=True))
    assert sorted(files_in(tmp_path / "to")) == ["model.safetensors"]


def test_a_checkpoint_of_another_layout_is_replaced_at_the_end(source, tmp_path):
    """Without overwrite all ranks are refused, and what is there stays; with it, only the new checkpoint is left."""
    to = tmp_path / "to"
    make(source, to, "dcp")
    before = files_in(to)
    outcomes = thread_outcomes(3, lambda world: make(source, to, "native", group=world))
    assert [type(outcome) for outcome in outcomes] == [CheckpointExists] * 3
    assert files_in(to) == before
    run_thread_ranks(3, lambda world: make(source, to, "native", group=world, overwrite=True))
    assert not set(files_in(to)) & set(before)
    assert in_any_order(sk.open(to).to_dict()) == in_any_order(sk.open(source).to_dict())


@pytest.mark.parametrize("form", ["hf", "native"])
def test_ranks_with_different_arguments_are_refused(source, tmp_path, form):
    def rank_main(world):
        names = {"exclude": "*.3.*"} if form == "hf" else {"drop": "model.layers.3.weight"}
        return make(source, tmp_path / "to", form, group=world, **(names if world.rank == 2 else {}))

    outcomes = thread_outcomes(3, rank_main)
    assert [type(outcome) for outcome in outcomes] == [RanksDisagree] * 3
    assert "rank 2 was given other arguments" in str(outcomes[1])
    assert not (tmp_path / "to").exists()


def test_encrypted_checkpoints_are_shared(source, tmp_path):
    keys = sk.Options(keys=sk.KeyRing.from_text(sk.new_key()))
    secret, plain = tmp_path / "secret", tmp_path / "plain"
    coded = run_thread_ranks(
        2, lambda world: sk.convert(source, secret, codecs=["zstd", "aes"], group=world, options=keys)
    )
    assert [report.decrypted for report in coded] == [False, False]
    decoded = run_thread_ranks(2, lambda world: make(secret, plain, "native", group=world, options=keys))
    assert [report.decrypted for report in decoded] == [True, True]
    assert in_any_order(sk.open(plain).to_dict()) == in_any_order(sk.open(source).to_dict())


@pytest.mark.parametrize("deep", [True, False])
def test_a_check_is_shared(source, tmp_path, deep):
    """Each rank reads some of the files; damage that any of them finds is raised on all, by file."""
    where = tmp_path / "wide"
    run_thread_ranks(4, lambda world: sk.convert(source, where, group=world))
    reports = run_thread_ranks(3, lambda world: sk.open(where).verify(deep=deep, group=world))
    assert len({repr(told(report)) for report in reports}) == 1
    assert reports[0].files == len(sk.open(where).record.files) >= 3
    damaged = sorted(where.glob("*.safetensors"))[:3]
    for file in damaged:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data if deep else data[:-1])
    outcomes = thread_outcomes(3, lambda world: sk.open(where).verify(deep=deep, group=world))
    assert [type(outcome) for outcome in outcomes] == [DamagedCheckpoint] * 3
    for outcome in outcomes:
        assert len(outcome.details["problems"]) == 3
        assert all(any(file.name in problem for problem in outcome.details["problems"]) for file in damaged)


def test_a_check_reads_every_byte_once(source, tmp_path):
    """The ranks together read what one process reads, but for the index, which each opens."""
    where = tmp_path / "wide"
    run_thread_ranks(4, lambda world: sk.convert(source, where, group=world))
    held = MemoryStore()
    for name, data in files_in(where).items():
        held.put(name, data)
    data_files = {file.name for file in sk.open(where).record.files}

    def verify(world):
        store = FaultyStore(held)
        sk.open(store).verify(group=world)
        return {name for name in data_files if f"open {name}" in store.operations}

    read = run_thread_ranks(2, verify)
    assert read[0] | read[1] == data_files
    assert read[0] & read[1] == set()


def export_in_group(source, to, **more):
    group = dist.group.WORLD if dist.is_initialized() else None
    return told(sk.export(source, to, max_shard_bytes="30kB", group=group, **more))


def test_real_ranks_share_an_export(rank_pool, source, tmp_path):
    shared = rank_pool.run(4, export_in_group, source, tmp_path / "shared")
    [alone] = rank_pool.run(1, export_in_group, source, tmp_path / "alone", init=False)
    assert shared == [alone] * 4
    assert files_in(tmp_path / "shared") == files_in(tmp_path / "alone")


def export_on_rank_0(source, to):
    if dist.get_rank() > 0:
        return None
    with pytest.raises(sk.CheckpointNotFound) as refused:
        sk.export(to, to)
    assert "group=" not in refused.value.hint
    return told(sk.export(source, to))


def test_rank_0_may_export_alone(rank_pool, source, tmp_path):
    reports = rank_pool.run(2, export_on_rank_0, source, tmp_path / "to")
    assert [report is None for report in reports] == [False, True]
    assert (tmp_path / "to" / "model.safetensors").exists()


def export_without_group(source, to):
    try:
        sk.export(source, to, format="native")
    except CheckpointExists as error:
        return error.hint
    return "written"


def test_ranks_that_export_each_for_itself_learn_of_the_group(rank_pool, source, tmp_path):
    """If all ranks call without `group`, one wins, and the others are told how to share the work."""
    hints = rank_pool.run(3, export_without_group, source, tmp_path / "to")
    assert hints.count("written") == 1
    assert sum("group=torch.distributed.group.WORLD" in hint for hint in hints) == 2


def export_with_a_death(source, to, dies):
    kind = DyingStore if dist.get_rank() == dies else FaultyStore
    store, options = kind(sk.open_place(str(to))), sk.Options(timeout_s=2.0)
    try:
        return told(sk.export(source, store, max_shard_bytes="30kB", group=dist.group.WORLD, options=options))
    except RanksSilent as error:
        return error.ranks


class DyingStore(FaultyStore):
    def create(self, name, nbytes):
        writer = super().create(name, nbytes)
        os.kill(os.getpid(), signal.SIGKILL)
        return writer


def test_a_rank_that_dies_is_named_and_its_files_are_removed(rank_pool, source, tmp_path):
    """The others raise in time, and nothing of the export is left, not even the file that the dead rank had begun."""
    heard = rank_pool.run(3, export_with_a_death, source, tmp_path / "to", 1, expect_death=[1])
    assert heard == [[1], None, [1]]
    assert sorted(files_in(tmp_path / "to")) == ["shardkeep-publish.json"]
    make(source, tmp_path / "to", "hf")  # which finishes
