"""What a save refuses before it writes, which ties it keeps, and what it insists on before it commits."""

import math
import threading
import time

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.engine import workers
from shardkeep.engine.native_save import NativeSave
from shardkeep.engine.writer import write_files
from shardkeep.errors import CheckpointError, StateError, StorageError
from shardkeep.format import record as record_format
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import native
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.engine.test_many_files import job

SHAPE = (8, 4)


def box(*pieces, shape=SHAPE):
    return sk.ShardedBox.of(pieces, shape=shape, dtype=torch.float32)


def names(place):
    return sorted(path.name for path in place.glob("*"))


# What the record can hold


@pytest.mark.parametrize("step", [1.5, "3", True, 1 << 63, -(1 << 63) - 1, math.nan])
def test_a_step_that_is_no_number_is_refused_before_anything_changes(tmp_path, step):
    sk.save({"x": torch.ones(3)}, tmp_path, step=1)
    before = names(tmp_path)
    with pytest.raises(StateError, match="step is"):
        sk.save({"x": torch.zeros(3)}, tmp_path, step=step, overwrite=True)
    assert names(tmp_path) == before
    assert sk.open(tmp_path).record.step == 1


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7])
def test_every_whole_number_is_a_step(tmp_path, step):
    report = sk.save({"x": torch.ones(3)}, tmp_path, step=step)
    assert type(report.step) is int
    assert sk.open(tmp_path).record.step == 7


ENDLESS = {}
ENDLESS["me"] = ENDLESS


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        (ENDLESS, "meta"),
        ({"a": {"b": [1.0, math.nan]}}, r"meta\['a'\]\['b'\]\[1\] .* nan"),
        ({"a": math.inf}, r"meta\['a'\] .* inf"),
        ({"a": b"x"}, r"meta\['a'\] .* bytes"),
        ({"a": {1, 2}}, r"meta\['a'\] .* set"),
        ({"a": {1: 2}}, r"meta\['a'\] .* key 1"),
        ({1: 2}, "meta .* key 1"),
        ({"a": 1 << 64}, r"meta\['a'\] "),
        ({"a": np.float64(1)}, r"meta\['a'\] "),
        ({"a": "\ud800"}, "meta cannot"),
        ([("a", 1)], "meta is a list"),
        ("text", "meta is a str"),
    ],
)
def test_meta_that_json_would_change_is_refused_before_anything_is_written(meta, what):
    store = MemoryStore()
    store.create = None  # planning writes nothing
    with pytest.raises(StateError, match=what):
        sk.save({"x": torch.ones(3)}, store, meta=meta)
    assert list(store.list()) == []


def test_meta_comes_back_as_it_was_given(tmp_path):
    """Every plain JSON value survives; tuples become lists."""
    meta = {"a": [1, 2.5, None, True, "é"], "b": {"c": (1, (2,))}, "d": (1 << 64) - 1, "e": -(1 << 63)}
    sk.save({"x": torch.ones(3)}, tmp_path, meta=meta)
    assert sk.open(tmp_path).record.meta == {**meta, "b": {"c": [1, [2]]}}


def test_a_shape_no_reader_takes_is_refused(tmp_path):
    """An empty tensor of a shape beyond the reader's limits fails in the plan; one just inside is saved and opens."""
    with pytest.raises(StateError, match=r"'x' has shape \(0, 288230376151711744\)"):
        sk.save({"x": torch.empty(0, 1 << 58)}, tmp_path / "a")
    assert names(tmp_path / "a") == []
    sk.save({"x": torch.empty(0, 1 << 57)}, tmp_path / "b")
    assert sk.open(tmp_path / "b")["x"].shape == (0, 1 << 57)


@pytest.mark.parametrize(("module", "part"), [(native, "decode_index"), (record_format, "decode_record")])
def test_what_cannot_be_read_is_never_committed(tmp_path, monkeypatch, module, part):
    """Index and record are read back before either is put; if that fails, the old checkpoint stays."""
    sk.save({"x": torch.ones(3)}, tmp_path, step=1)
    before = names(tmp_path)
    decode = getattr(module, part)

    def refuse(data, where):
        if where.startswith("the "):
            raise sk.MalformedFile("no reader takes this")
        return decode(data, where=where)

    monkeypatch.setattr(module, part, refuse)
    with pytest.raises(StateError, match="no reader takes this"):
        sk.save({"x": torch.zeros(3)}, tmp_path, step=2, overwrite=True)
    assert names(tmp_path) == before
    assert sk.open(tmp_path).record.step == 1


# Ties


def full():
    return torch.arange(32.0).reshape(SHAPE)


def half(rank):
    return full()[4 * rank : 4 * rank + 4], (4 * rank, 0)


TIED = {
    "a rank without pieces": lambda rank: dict.fromkeys("ab", box() if rank else box((full(), (0, 0)))),
    "keys in another order": lambda rank: dict.fromkeys("abc" if rank else "cba", box(half(rank))),
    # As a last pipeline stage with the tied head.
    "a rank with one of the names": lambda rank: dict.fromkeys("a" if rank else "ab", full()),
    "a rank with the other": lambda rank: dict.fromkeys("b" if rank else "ab", full()),
}


@pytest.mark.parametrize("case", TIED)
def test_names_that_are_one_memory_wherever_they_are_held_are_written_once(tmp_path, case):
    """Ranks that hold nothing of a name, or have another order, do not undo a tie."""

    def save_and_load(world):
        state = TIED[case](world.rank)
        report = sk.save(state, tmp_path, group=world)
        pieces = [p for leaf in state.values() for p in getattr(leaf, "pieces", [(leaf, (0, 0))])]
        for tensor, _ in pieces:
            tensor.zero_()
        sk.load(state, tmp_path, group=world)
        assert all(torch.equal(piece, full()[at : at + len(piece)]) for piece, (at, _) in pieces)
        return report.bytes_total

    assert run_thread_ranks(2, save_and_load)[0] == 32 * 4
    tree = sk.open(tmp_path).to_dict()
    assert tree["a"] is tree["b"]
    assert torch.equal(tree["a"], full())


def test_names_that_are_tied_on_one_rank_only_are_stored_apart(tmp_path):
    def main(world):
        one, other = full(), full() + 1
        a, b = (one, one) if world.rank == 0 else (one, other)
        rows = slice(4 * world.rank, 4 * world.rank + 4)
        return sk.save(
            {"a": box((a[rows], (rows.start, 0))), "b": box((b[rows], (rows.start, 0)))}, tmp_path, group=world
        )

    assert run_thread_ranks(2, main)[0].bytes_total == 2 * 32 * 4
    tree = sk.open(tmp_path).to_dict()
    assert torch.equal(tree["a"], full())
    assert torch.equal(tree["b"], torch.cat([full()[:4], full()[4:] + 1]))


def test_an_array_and_a_tensor_of_one_memory_are_two_things(tmp_path):
    """A numpy array over a torch tensor's memory is stored by itself; tensors without elements share no memory."""
    tensor = full()
    sk.save({"a": tensor.numpy(), "b": tensor, "c": torch.empty(0, 3), "d": torch.empty(0, 3)}, tmp_path)
    tree = sk.open(tmp_path).to_dict()
    assert isinstance(tree["a"], np.ndarray)
    assert isinstance(tree["b"], torch.Tensor)
    assert tree["c"] is not tree["d"]


# What ranks must agree on


def test_ranks_that_see_other_file_systems_cannot_commit():
    """Rank 0 commits only what it finds in the store, and says whose file it misses; nothing is left anywhere."""
    stores = [MemoryStore(), MemoryStore()]
    stores[1].url = stores[0].url

    def main(world):
        rows = box((full()[4 * world.rank : 4 * world.rank + 4], (4 * world.rank, 0)))
        sk.save({"a": rows}, stores[world.rank], group=world)

    errors = thread_outcomes(2, main)
    assert [type(error) for error in errors] == [StorageError] * 2
    assert all(word in str(errors[0]) for word in ("rank 1 wrote state-00001-of-00002", "one file system"))
    assert [list(store.list()) for store in stores] == [[], []]


def under(key):
    return {"x": {key: {"w": torch.ones(3)}}}


ONE_VALUE = torch.ones(3, dtype=torch.float64)
DIFFER = {
    "meta on one rank": (lambda rank: ({}, {"meta": None if rank else [1]}), StateError, "meta is a list"),
    # That a is whole does not make b so.
    "a tied tensor with a hole": (
        lambda rank: ({"a": box(half(rank)), "b": box() if rank else box(half(rank))}, {}), sk.InvalidShards, "'b'",
    ),
    # It would compare digests with nothing.
    "check_replicas on one rank": (lambda rank: ({}, {"check_replicas": rank == 1}), sk.RanksDisagree, "check_replicas"),
    "an array and a tensor": (
        lambda rank: ({"x": ONE_VALUE if rank else ONE_VALUE.numpy()}, {}), sk.InvalidShards,
        "a numpy array float64(3,) on rank 0 but a torch tensor float64",
    ),
    # The keys 1, 1.0 and True are equal, and no dict holds two of them.
    **{
        f"keys {one!r} and {other!r}": (
            lambda rank, one=one, other=other: (under(other if rank else one), {}), sk.InvalidShards,
            f"'x' has the key {one!r} on one rank and {other!r} on another",
        )
        for one, other in [(1, True), (1, 1.0), ((0, 1), (0, True))]
    },
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFER)
def test_what_ranks_must_agree_on_is_told_to_all_at_once(tmp_path, case):
    """No rank waits for the deadline, and the error says what differs."""
    make, kind, said = DIFFER[case]

    def main(world):
        state, arguments = make(world.rank)
        sk.save(state, tmp_path, group=world, **arguments)

    errors = thread_outcomes(2, main, timeout_s=20)
    assert [type(error) for error in errors] == [kind] * 2
    assert said in str(errors[0])


# Threads and files


def test_workers_stop_if_one_cannot_be_started(monkeypatch):
    """Where the system gives no more threads, those that run stop instead of doing the whole list."""
    begun, refused = threading.Event(), threading.Event()
    done = []

    class Pool(workers.ThreadPoolExecutor):
        def submit(self, *args):
            if begun.is_set():
                refused.set()
                raise RuntimeError("can't start new thread")
            future = super().submit(*args)
            begun.wait()
            return future

    def work(task, _buffer):
        begun.set()
        refused.wait()
        done.append(task)
        time.sleep(0.01)

    monkeypatch.setattr(workers, "ThreadPoolExecutor", Pool)
    with pytest.raises(RuntimeError, match="can't start"):
        workers.run_workers(range(200), work, threads=2, buffer_nbytes=4096)
    assert len(done) < 200


def test_an_interrupt_while_threads_are_started_waits_for_those_that_are(monkeypatch):
    """A pool does not know of a thread whose start was interrupted; it has ended when the caller goes on."""
    begun, ended = threading.Event(), []

    def work(task, buffer):
        begun.set()
        time.sleep(0.1)
        ended.append(task)
        return True

    def start(thread):
        before(thread)
        begun.wait()
        raise KeyboardInterrupt

    before = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        workers.run_workers(range(200), work, threads=2, buffer_nbytes=4096)
    assert ended == [0]


def test_a_failed_write_removes_its_finished_files():
    class Full(MemoryStore):
        def create(self, name, nbytes):
            if name == "b":
                assert [info.name for info in self.list()] == ["a"]
                raise StorageError("no space")
            return super().create(name, nbytes)

    store = Full()
    with pytest.raises(StorageError, match="no space"):
        write_files(store, [job(name, 4096) for name in "ab"], threads=1, window_nbytes=1 << 20)
    assert list(store.list()) == []


# Places


@pytest.mark.parametrize("where", [None, b"runs/a", 3, {"a": 1}, ["a"]], ids=repr)
def test_what_is_no_place_is_refused(where):
    for call in (sk.save, sk.load):
        with pytest.raises(CheckpointError, match=r"not a place to keep a checkpoint\n  hint: .*pass a path"):
            call({"x": torch.ones(3)}, where)


def test_a_bad_place_on_one_rank_reaches_all_at_once(tmp_path):
    def main(world):
        sk.save({"x": torch.ones(3)}, "s3://bucket" if world.rank else tmp_path, group=world)

    errors = thread_outcomes(2, main, timeout_s=20)
    assert all(isinstance(error, CheckpointError) and not isinstance(error, sk.RanksSilent) for error in errors)
    assert all("s3://bucket" in str(error) for error in errors)


def test_a_damaged_checkpoint_is_replaced_when_asked(tmp_path):
    """Over a record that cannot be read, a save says to pass overwrite=True, and that replaces all of it."""
    sk.save({"x": torch.ones(3)}, tmp_path)
    old = set(names(tmp_path)) - {RECORD_NAME}
    (tmp_path / RECORD_NAME).write_bytes(b"{broken")
    with pytest.raises(sk.CheckpointExists, match=r"cannot be read is already there: .*\n  hint: pass overwrite=True"):
        sk.save({"x": torch.zeros(3)}, tmp_path)
    assert old <= set(names(tmp_path))
    sk.save({"x": torch.zeros(3)}, tmp_path, overwrite=True)
    assert not sk.open(tmp_path).to_dict()["x"].any()
    assert not old & set(names(tmp_path))


@pytest.mark.parametrize(
    ("contents", "said"),
    [(b"\x80\x04broken", "a checkpoint that cannot be read is"), (None, "a committed checkpoint is")],
)
def test_metadata_of_torch_in_the_target(tmp_path, contents, said):
    """A save says that a checkpoint of torch's layout is there, and whether it is damaged."""
    sk.save({"x": torch.ones(3)}, tmp_path / "native")
    sk.convert(tmp_path / "native", tmp_path / "torch", layout="dcp")
    if contents is not None:
        (tmp_path / "torch" / ".metadata").write_bytes(contents)
    with pytest.raises(sk.CheckpointExists, match=f"{said} already there"):
        sk.save({"x": torch.zeros(3)}, tmp_path / "torch")


def test_seconds_end_with_the_commit(tmp_path, monkeypatch):
    """Removing what was replaced is not counted."""
    tidy = NativeSave.tidy
    began = []

    def slow(self):
        began.append(time.monotonic())
        time.sleep(0.3)
        tidy(self)

    monkeypatch.setattr(NativeSave, "tidy", slow)
    start = time.monotonic()
    assert sk.save({"x": torch.ones(3)}, tmp_path).seconds <= began[0] - start + 0.1
