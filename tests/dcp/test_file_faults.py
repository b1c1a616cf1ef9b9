"""Saves in torch's layout during which something goes wrong, at every step there is."""

import contextlib
import errno
import io
import itertools
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardkeep import dcp
from shardkeep.errors import CheckpointError, StorageError, StorageFull
from shardkeep.storage.file_systems import FileSystem
from tests.dcp.faulty import files_named
from tests.dcp.sides import causes_of, failure_of, quietly
from tests.faults.calls import ASKING, CHANGING, strike_at
from tests.faults.scene import no_leaks
from tests.toolkit.samples import numbered

CALLS = (*CHANGING, *ASKING, "listdir", "stat")


def state_of(k: int) -> dict[str, Any]:
    return {
        "w": torch.full((90, 50), float(k)),
        "t": torch.full((64, 64), float(k)).t(),
        "b": torch.full((99,), k),
        "step": k,
    }


def save(where: str, k: int, *, writer: type | None = None, **options: Any) -> Any:
    """Save it on this process alone; return the error, if any."""
    return quietly(saved_loudly, where, k, writer=writer, **options)


def saved_loudly(where: str, k: int, *, writer: type | None = None, **options: Any) -> Any:
    made = (writer or dcp.FileSystemWriter)(where, **{"thread_count": 2, **options})
    try:
        dcp.save(state_of(k), storage_writer=made, no_dist=True)
    except dcp.CheckpointException as error:
        return causes_of(error)[0]
    return None


def level_at(where: str) -> int:
    into = {"w": torch.zeros(90, 50), "t": torch.zeros(64, 64), "b": torch.zeros(99, dtype=torch.int64), "step": None}
    quietly(dcp.load, into, checkpoint_id=where, no_dist=True)
    k = into["step"]
    for key in ("w", "t", "b"):
        assert into[key].eq(k).all(), (key, k, into[key].unique().tolist())
    return k


def clean(where: str) -> bool:
    return set(os.listdir(where)) == {".metadata", *files_named(where)}


@pytest.mark.parametrize(
    ("number", "done"),
    [(errno.EIO, False), (errno.EIO, True), (errno.ENOSPC, False)],
    ids=["EIO", "EIO-done", "ENOSPC"],
)
def test_any_call_fails(place: str, number: int, done: bool) -> None:
    """A call that fails, even after its work is done, loses no checkpoint: an OSError that leaves nothing, or none."""

    def strike(name: str, call: Any) -> Any:
        if done and name not in ("open", "scandir", "listdir", "stat"):  # what they return would be lost
            call()
        raise OSError(number, os.strerror(number))

    assert save(place, 0) is None
    earlier = failures = 0
    for n in itertools.count(step=1 if number == errno.EIO and not done else 3):
        with no_leaks(), strike_at(n, strike, CALLS) as made:
            error = save(place, earlier + 1)
        if len(made) <= n:
            assert error is None
            assert level_at(place) == earlier + 1
            break
        struck = f"{n}: {made[n]}"
        found = level_at(place)
        if error is None:
            assert found == earlier + 1, struck
        else:
            failures += 1
            assert isinstance(error, OSError), (struck, error)
            assert error.errno == number, struck
            if not made[n].startswith(("stat", "mkdir", "listdir")):  # of those, the system says the file
                assert isinstance(error, StorageFull if number == errno.ENOSPC else StorageError), struck
                assert place in str(error), struck
            assert found in (earlier, earlier + 1), struck
            if found == earlier and not made[n].startswith("unlink"):
                assert clean(place), (struck, os.listdir(place))
        earlier += 2
        assert save(place, earlier) is None, struck
        assert level_at(place) == earlier, struck
        left = set(os.listdir(place)) - files_named(place) - {".metadata"}
        assert left <= {os.path.basename(made[n])}, struck
        for name in left:
            os.unlink(os.path.join(place, name))
    assert n >= 30
    assert failures >= 8


class Dead(BaseException):
    """The process is no more."""


@contextlib.contextmanager
def dead_from(n: int) -> Iterator[list[str]]:
    """From the n-th call of `os` on, no call that would change anything is made; the list grows with every call."""

    def end(*_: Any) -> Any:
        raise Dead

    def wrap(name: str) -> Any:
        real = getattr(os, name)
        return lambda *args, **kwargs: end() if len(made) > n else real(*args, **kwargs)

    with strike_at(n, end, CALLS) as made, mock.patch.multiple(os, **{name: wrap(name) for name in CHANGING}):
        yield made


def test_dead_from_any_call_on(place: str) -> None:
    """A process that dies at any call leaves the old or the new checkpoint, and the next save removes its files."""

    assert save(place, 0) is None
    kept = set()
    for n in itertools.count():
        earlier = 2 * n
        with contextlib.suppress(Dead, dcp.CheckpointException), dead_from(n) as made:
            save(place, earlier + 1)
        if len(made) <= n:
            break
        found = level_at(place)
        assert found in (earlier, earlier + 1), f"{n}: {made[n]}"
        kept.add(found - earlier)
        assert save(place, earlier + 2) is None, f"{n}: {made[n]}"
        assert level_at(place) == earlier + 2
        left = set(os.listdir(place)) - files_named(place) - {".metadata"}
        # Named after a process that lives: ours.
        assert all(name.startswith(".tmp-") for name in left), f"{n}: {made[n]}: {left}"
        for name in left:
            os.unlink(os.path.join(place, name))
    assert n >= 20
    assert kept == {0, 1}


# Streams


class Faulty(FileSystem):
    def __init__(self, at: int, number: int = errno.EIO) -> None:
        self.at = at
        self.number = number
        self.made: list[str] = []
        self._lock = threading.Lock()

    def step(self, what: str) -> None:
        with self._lock:
            self.made.append(what)
            if len(self.made) == self.at + 1:
                raise OSError(self.number, os.strerror(self.number))

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Any:
        self.step(f"open {path}")
        with super().create_stream(path, mode) as stream:
            yield _Stream(stream, self, str(path)) if mode == "wb" else stream

    def rename(self, path: Any, new_path: Any) -> None:
        self.step(f"rename {path}")
        super().rename(path, new_path)

    def rm_file(self, path: Any) -> None:
        self.step(f"rm {path}")
        super().rm_file(path)

    def exists(self, path: Any) -> bool:
        self.step(f"exists {path}")
        return super().exists(path)

    def mkdir(self, path: Any) -> None:
        self.step(f"mkdir {path}")
        super().mkdir(path)


class _Stream(io.RawIOBase):
    def __init__(self, raw: Any, fs: Faulty, path: str) -> None:
        self._raw, self._fs, self._path = raw, fs, path

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._fs.step(f"write {self._path}")
        # Less than was asked for, as raw streams may.
        return int(self._raw.write(memoryview(data).cast("B")[:100_000]))

    def tell(self) -> int:
        return int(self._raw.tell())

    def flush(self) -> None:
        if not self._raw.closed:  # as it is when this is deleted, of which Python 3.13 and later report errors
            self._raw.flush()

    def fileno(self) -> int:
        return int(self._raw.fileno())


def writer_of(fs: Faulty) -> type:
    class Writer(dcp.FileSystemWriter):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fs = fs

    return Writer


def test_any_operation_of_a_file_system_fails(place: str) -> None:
    """In a user's file system too: the old or the new checkpoint is whole, and the error is the file system's own."""
    assert save(place, 0, writer=writer_of(Faulty(-1))) is None
    failures = 0
    for n in itertools.count():
        earlier = 2 * n
        fs = Faulty(n)
        before = set(os.listdir(place))
        error = save(place, earlier + 1, writer=writer_of(fs), thread_count=1)
        if len(fs.made) <= n:
            assert error is None
            break
        found = level_at(place)
        assert found in (earlier, earlier + 1), fs.made[n]
        if error is None:
            assert found == earlier + 1, fs.made[n]
        else:
            failures += 1
            assert isinstance(error, OSError), (fs.made[n], error)
            assert error.errno == errno.EIO, fs.made[n]
            if found == earlier:
                left = set(os.listdir(place)) - before - {".metadata.tmp"}
                assert not left, (fs.made[n], left)
        assert save(place, earlier + 2, writer=writer_of(Faulty(-1))) is None, fs.made[n]
        assert level_at(place) == earlier + 2, fs.made[n]
    assert n >= 25
    assert failures >= 15


# Ranks


def save_on_ranks(where: str, k: int, victim: int) -> Any:
    """On every rank: save a state whose parts say `k`; on one of them the disk is full."""
    rank = dist.get_rank()

    def full(name: str, call: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = {f"w{rank}": torch.full((5000,), float(k)), "shared": torch.full((9,), k), "step": k}
    with strike_at(0 if rank == victim else -1, full, ("pwrite",)):
        try:
            quietly(dcp.save, state, checkpoint_id=where)
        except dcp.CheckpointException as error:
            return {key: (type(each).__name__, each.errno) for key, each in causes_of(error).items()}
    into = {f"w{rank}": torch.zeros(5000), "shared": torch.zeros(9, dtype=torch.int64), "step": None}
    quietly(dcp.load, into, checkpoint_id=where)
    assert into[f"w{rank}"].eq(k).all()
    assert into["shared"].eq(k).all()
    assert into["step"] == k
    return None


@pytest.mark.parametrize("victim", [0, 2])
def test_the_disk_of_one_rank_is_full(rank_pool: Any, place: str, victim: int) -> None:
    """All ranks raise which one failed and how; the old checkpoint is whole, and nothing of the new one is left."""
    assert rank_pool.run(3, save_on_ranks, place, 1, -1) == [None] * 3
    before = {name: os.stat(os.path.join(place, name)).st_mtime_ns for name in os.listdir(place)}
    assert rank_pool.run(3, save_on_ranks, place, 2, victim) == [{victim: ("StorageFull", errno.ENOSPC)}] * 3
    after_it = {name: os.stat(os.path.join(place, name)).st_mtime_ns for name in os.listdir(place)}
    # Where the coordinator failed, the others cannot know that it committed nothing, and the next save clears up.
    assert before == after_it if victim else before.items() <= after_it.items()
    assert rank_pool.run(3, save_on_ranks, place, 3, -1) == [None] * 3
    assert clean(place)


# Metadata of each rank


def begin_alone(where: str, rank: int, k: int) -> Any:
    """Do what a rank does that saves for itself, up to its data; return what ends it."""
    writer, planner = dcp.FileSystemWriter(where), dcp.DefaultSavePlanner()
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    planner.set_up_planner({"w": numbered(9) + k}, writer.storage_meta(), True)
    plan = quietly(writer.prepare_local_plan, planner.create_local_plan())
    [plan], metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan([plan])
    written = quietly(writer.write_data, planner.finish_plan(plan), planner).value()
    return lambda: writer.finish(metadata, [written])


def value_of(where: str, rank: int) -> float:
    into = {"w": torch.zeros(9)}
    reader = dcp.FileSystemReader(where)
    planner = dcp.DefaultLoadPlanner()
    metadata = reader.read_metadata(rank=rank)
    reader.set_up_storage_reader(metadata, True, rank=rank, use_collectives=False)
    planner.set_up_planner(into, metadata, True)
    reader.read_data(planner.create_local_plan(), planner)
    return into["w"][0].item()


def test_ranks_that_save_for_themselves_leave_each_other_alone(place: str) -> None:
    """Without collectives, a rank that is done early does not take another's unnamed files for those of a dead save."""
    begin_alone(place, 0, 10)()
    begin_alone(place, 1, 20)()
    late = begin_alone(place, 1, 21)
    for name in os.listdir(place):  # as if rank 1 had written long before rank 0 began
        if name.startswith("__1_"):
            os.utime(os.path.join(place, name), (1, 1))
    begin_alone(place, 0, 11)()
    late()
    assert [value_of(place, rank) for rank in (0, 1)] == [11, 21]
    assert len([name for name in os.listdir(place) if name.endswith(".distcp")]) == 2


class Strange:
    """What nobody reads."""


def test_files_of_metadata_that_cannot_be_read_stay(place: str) -> None:
    """A rank that saves for itself beside a checkpoint whose metadata we refuse removes none of its files."""
    os.makedirs(place)
    with open(os.path.join(place, ".metadata"), "wb") as file:
        pickle.dump(Strange(), file)
    for name in ("__0_0.distcp", "__7_3.distcp"):
        with open(os.path.join(place, name), "wb") as file:
            file.write(b"precious")
        os.utime(os.path.join(place, name), (1, 1))
    begin_alone(place, 0, 3)()
    assert value_of(place, 0) == 3
    for name in ("__0_0.distcp", "__7_3.distcp"):
        with open(os.path.join(place, name), "rb") as file:
            assert file.read() == b"precious"


def test_two_saves_at_once(place: str) -> None:
    done: list[int] = []
    refused: list[BaseException] = []

    def go(first: int) -> None:
        for k in range(first, first + 8):
            error = saved_loudly(place, k)
            if error is None:
                done.append(k)
            else:
                refused.append(error)

    def both() -> None:
        threads = [threading.Thread(target=go, args=(first,)) for first in (100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    quietly(both)
    assert done
    assert all(isinstance(error, CheckpointError) for error in refused), refused
    assert save(place, 5) is None
    assert level_at(place) == 5
    assert clean(place)


def test_an_old_checkpoint_is_asked_for_once_it_is_gone(place: str) -> None:
    """A load that began before a save replaced the checkpoint fails in words, rather than mixing two."""
    save(place, 1)
    reader = dcp.FileSystemReader(place)
    kept = reader.read_metadata()
    save(place, 2)

    class Late(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return kept

    into = {"w": torch.zeros(90, 50)}
    error = failure_of(dcp.load, into, storage_reader=Late(place), no_dist=True)
    assert isinstance(causes_of(error)[0], FileNotFoundError)


def test_metadata_are_read_in_their_own_size(place: str) -> None:
    asked = []

    class Greedy(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(-1 if size is None else size)

        def readinto(self, buffer: Any) -> int:
            asked.append(memoryview(buffer).nbytes)
            return super().readinto(buffer)

    class System(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: Any, mode: str) -> Any:
            with Greedy(os.fspath(path), mode) as stream:
                yield stream

    save(place, 1)
    writer = dcp.FileSystemWriter(place)
    writer.fs = System()
    quietly(dcp.save, state_of(2), storage_writer=writer, no_dist=True)
    reader = dcp.FileSystemReader(place)
    reader.fs = System()
    assert len(reader.read_metadata().state_dict_metadata) == 4
    assert asked
    assert all(0 < size <= 1 << 20 for size in asked)


def test_streams_that_take_less_than_they_are_given(place: str) -> None:
    state = {f"layer.{n}.weight": torch.full((2,), float(n)) for n in range(1700)}
    quietly(dcp.save, state, storage_writer=writer_of(Faulty(-1))(place), no_dist=True)
    assert os.path.getsize(os.path.join(place, ".metadata")) > 200_000
    into = {key: torch.zeros(2) for key in state}
    quietly(dcp.load, into, checkpoint_id=place, no_dist=True)
    assert all(into[f"layer.{n}.weight"].eq(n).all() for n in range(1700))


def test_a_file_that_cannot_be_made_durable_fails_the_save(place: str) -> None:
    def fail(name: str, call: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert save(place, 1, writer=writer_of(Faulty(-1))) is None
    for n in range(3):
        with strike_at(n, fail, ("fsync",)) as made:
            error = save(place, 2, writer=writer_of(Faulty(-1)), thread_count=1)
        assert len(made) > n
        assert isinstance(error, OSError)
        assert level_at(place) == 1


def test_no_checkpoint_on_a_file_system_of_the_users(place: str) -> None:
    """The error is that of a missing checkpoint, as for a directory."""
    reader = dcp.FileSystemReader(place)
    reader.fs = Faulty(-1)
    with pytest.raises(dcp.CheckpointException, match="metadata is None; global metadata read failed") as caught:
        quietly(dcp.load, {"a": torch.zeros(2)}, storage_reader=reader, no_dist=True)
    assert isinstance(caught.value.failures[0][0], AssertionError)
