"""
What torch's checkpoint does wrong, lines 1 to 14 of the list in `dcp_contract.md`: seen there, and absent here.

Each docstring names its line. Torch's behaviour is asserted as it was found, so that a torch which has repaired a line
makes its test fail, and the list stays true.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pickle
import signal
import threading
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardkeep.errors import CheckpointError, ChecksumMismatch, DamagedCheckpoint, PickleRefused, RanksDisagree
from tests.dcp import faulty
from tests.dcp.sides import SIDES, causes_of, failure_of, part, quietly, side
from tests.faults.forks import Fork
from tests.protocol.samples import clear_torchs_plans
from tests.toolkit.samples import numbered, seen


def state_of(k: int) -> dict[str, Any]:
    return {**{f"t{n}": numbered(50, 4) + 1000 * k + n for n in range(4)}, "step": k}


def level_at(dcp: Any, folder: str) -> Any:
    into = {**{f"t{n}": torch.full((50, 4), -1.0) for n in range(4)}, "step": None}
    quietly(dcp.load, into, checkpoint_id=folder, no_dist=True)
    return [int(into[f"t{n}"][0, 0].item() - n) // 1000 for n in range(4)] + [into["step"]]


def whole(k: int) -> list[int]:
    return [k] * 5


# 1


def fails_in_a_thread(name: str, folder: str) -> Any:
    """A writer of two threads, the second of which finds the disk full."""
    dcp = side(name)
    failed = threading.Event()

    class Full(part(name, "filesystem").FileSystem):  # type: ignore[misc]
        @contextlib.contextmanager
        def create_stream(self, path: Any, mode: str) -> Any:
            with super().create_stream(path, mode) as stream:
                if str(path).endswith(".distcp") and mode == "wb":
                    if threading.current_thread() is not threading.main_thread() and not failed.is_set():
                        failed.set()
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    failed.wait(10)
                yield stream

    writer = dcp.FileSystemWriter(folder, thread_count=2)
    writer.fs = Full()
    return quietly(dcp.save, state_of(1), storage_writer=writer, no_dist=True)


def test_1_a_failed_writer_thread_fails_the_save(tmp_path: Any, monkeypatch: Any) -> None:
    """Line 1: ENOSPC in a writer's thread is lost by torch's save; ours raises it and leaves no file."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    metadata = fails_in_a_thread("torch", str(tmp_path / "torch"))
    assert len(metadata.state_dict_metadata) == 5
    assert len(metadata.storage_data or ()) < 5  # none at all if every thread failed
    failure = causes_of(failure_of(level_at, side("torch"), str(tmp_path / "torch")))[0]
    assert isinstance(failure, KeyError) or metadata.storage_data is None
    cause = causes_of(failure_of(fails_in_a_thread, "ours", str(tmp_path / "ours")))[0]
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "ours") == []


# 2


def overwrite_and_die(pipe: Any, name: str, folder: str, call: int) -> None:
    """Save over a checkpoint; be killed at the n-th file that is opened for writing."""
    dcp = side(name)
    made = []

    def die(kind: str, path: Any) -> None:
        made.append(path)
        if len(made) > call:
            pipe.send(len(made))
            os.kill(os.getpid(), signal.SIGKILL)

    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    with faulty.before_writing(die):
        quietly(dcp.save, state_of(2), storage_writer=writer, no_dist=True)
    pipe.send("saved")


def killed_while_overwriting(name: str, folder: str, call: int) -> Any:
    quietly(
        side(name).save,
        state_of(1),
        storage_writer=side(name).FileSystemWriter(folder, single_file_per_rank=False),
        no_dist=True,
    )
    with Fork(overwrite_and_die, name, folder, call) as fork:
        assert fork.join() == -signal.SIGKILL
    return level_at(side(name), folder)


def test_2_the_old_checkpoint_stays_whole(tmp_path: Any) -> None:
    """Line 2: killed in the middle of overwriting, the old checkpoint of torch is half new; ours is as it was."""
    assert set(killed_while_overwriting("torch", str(tmp_path / "torch"), 2)) == {1, 2}
    assert killed_while_overwriting("ours", str(tmp_path / "ours"), 2) == whole(1)


# 3


def test_3_torch_has_a_moment_without_metadata(tmp_path: Any, monkeypatch: Any) -> None:
    """Line 3, torch: old metadata are removed before the new ones are named, and the directory is not made durable."""
    folder = str(tmp_path / "ck")
    dcp = side("torch")
    system = part("torch", "filesystem").FileSystem
    quietly(dcp.save, state_of(1), checkpoint_id=folder)
    there: list[bool] = []
    real = system.rename
    monkeypatch.setattr(
        system, "rename", lambda *a: (there.append(os.path.exists(os.path.join(folder, ".metadata"))), real(*a))[1]
    )
    directories = faulty.synced_directories(lambda: quietly(dcp.save, state_of(2), checkpoint_id=folder))
    assert there == [False]
    assert directories == []


def test_3_there_are_metadata_at_every_moment(tmp_path: Any) -> None:
    """Line 3: at every change there are readable metadata, old or new, and their names are durable in the end."""
    folder = str(tmp_path / "ck")
    dcp = side("ours")
    quietly(dcp.save, state_of(1), checkpoint_id=folder)
    steps = []

    def look(kind: str, path: Any) -> None:
        ids = dcp.FileSystemReader(folder).read_metadata().storage_meta.save_id
        steps.append(ids)

    with faulty.before_changes(look):
        quietly(dcp.save, state_of(2), checkpoint_id=folder)
    assert len(steps) >= 8
    assert len(dict.fromkeys(steps)) == 2
    assert steps == sorted(steps, key=list(dict.fromkeys(steps)).index)
    assert folder in faulty.synced_directories(lambda: quietly(dcp.save, state_of(3), checkpoint_id=folder))


# 4


def data_file(folder: str) -> str:
    [name] = [name for name in os.listdir(folder) if name.endswith(".distcp")]
    return os.path.join(folder, name)


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_4_torch_loads_a_flipped_byte(tmp_path: Any) -> None:
    """Line 4, torch: a byte of a tensor that changed on disk is loaded without a word."""
    dcp = side("torch")
    folder = str(tmp_path / "ck")
    quietly(dcp.save, {"w": torch.full((1000,), 3.0)}, checkpoint_id=folder)
    flip(data_file(folder), os.path.getsize(data_file(folder)) // 2)
    into = {"w": torch.zeros(1000)}
    quietly(dcp.load, into, checkpoint_id=folder)
    assert not torch.equal(into["w"], torch.full((1000,), 3.0))


@pytest.mark.parametrize("wholly", [True, False])
def test_4_a_flipped_byte_is_found(tmp_path: Any, wholly: bool) -> None:
    """Line 4: a byte that changed in a data file, its digests or the metadata is an error with file, key and offset."""
    dcp = side("ours")
    folder = str(tmp_path / "ck")
    state = {"w": numbered(40, 500), "obj": {"a": list(range(300))}, "b": numbered(10)}
    quietly(dcp.save, state, checkpoint_id=folder)
    data = data_file(folder)
    into = {"w": torch.zeros(40, 500), "obj": {"a": None}, "b": torch.zeros(10)}
    if not wholly:
        into = {"b": torch.zeros(10)}
    reads = dcp.FileSystemReader(folder).read_metadata().storage_data
    [small] = [place for index, place in reads.items() if index.fqn == "b"]
    spots = range(3, os.path.getsize(data), 4999) if wholly else range(small.offset, small.offset + small.length, 97)
    for at in spots:
        flip(data, at)
        error = causes_of(failure_of(dcp.load, dict(into), checkpoint_id=folder))[0]
        flip(data, at)
        assert isinstance(error, ChecksumMismatch), at
        assert error.details["file"] == os.path.basename(data)
        assert error.details["offset"] <= at
        assert "'w'" in str(error) or "'b'" in str(error) or "'obj.a'" in str(error)
    for at in range(0, os.path.getsize(f"{data}.sums"), 11):
        flip(f"{data}.sums", at)
        error = causes_of(failure_of(dcp.load, dict(into), checkpoint_id=folder))[0]
        flip(f"{data}.sums", at)
        assert isinstance(error, DamagedCheckpoint), at
        assert error.details["file"] == f"{os.path.basename(data)}.sums"
    quietly(dcp.load, dict(into), checkpoint_id=folder)


def test_4_a_flipped_byte_of_metadata_is_found(tmp_path: Any) -> None:
    """Line 4: each changed byte of the metadata is found, but for words before their digest, which do no harm."""
    dcp = side("ours")
    folder = str(tmp_path / "ck")
    quietly(dcp.save, {"w": numbered(4), "n": 1}, checkpoint_id=folder)
    path = os.path.join(folder, ".metadata")
    with open(path, "rb") as file:
        end = file.read().rindex(b"shardkeep xxh3_128 ")
    words = range(end, end + len(b"shardkeep xxh3_128 "))
    for at in range(os.path.getsize(path)):
        if at in words:
            continue
        flip(path, at)
        error = failure_of(dcp.FileSystemReader(folder).read_metadata)
        flip(path, at)
        assert isinstance(error, DamagedCheckpoint | PickleRefused), (at, error)
        assert path in str(error)


# 6


class Config:
    lr = 3


def test_6_a_partial_load_keeps_what_it_cannot_find(tmp_path: Any) -> None:
    """Line 6: a partial load of objects that the checkpoint lacks makes them None in torch, and leaves them here."""
    for name in SIDES:
        dcp = side(name)
        folder = str(tmp_path / name)
        quietly(dcp.save, {"w": numbered(2)}, checkpoint_id=folder)
        kept = {"set": {1}, "array": np.ones(2), "config": Config(), "list": [{1}, np.zeros(1)]}
        for reads in SIDES:  # with torch's reader ours goes item by item
            into = {"w": torch.zeros(2), "sub": dict(kept), **kept}
            reader, planner = side(reads).FileSystemReader(folder), dcp.DefaultLoadPlanner(allow_partial_load=True)
            if name == "torch" == reads:
                quietly(dcp.load, into, storage_reader=reader, planner=planner)
                assert [into[key] for key in ("set", "array", "config")] == [None] * 3
            elif name == "ours":
                quietly(dcp.load, into, storage_reader=reader, planner=planner)
                assert all(holder[key] is value for holder in (into, into["sub"]) for key, value in kept.items())
            assert into["w"].tolist() == ([0, 1] if name in ("ours", reads) else [0, 0])


# 7


def test_7_the_plan_cache_sees_what_changes(tmp_path: Any) -> None:
    """Line 7: with kept plans, torch lists a state that is bf16 now as fp32, and both saves return one object."""
    kept = {}
    for name in SIDES:
        dcp = side(name)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        made = [
            quietly(dcp.save, {"w": numbered(4).to(dtype)}, checkpoint_id=str(tmp_path / f"{name}{n}"), planner=planner)
            for n, dtype in enumerate((torch.float32, torch.bfloat16))
        ]
        kept[name] = (str(made[1].state_dict_metadata["w"].properties.dtype), made[0] is made[1])
        if name == "ours":
            into = {"w": torch.zeros(4, dtype=torch.bfloat16)}
            quietly(dcp.load, into, checkpoint_id=str(tmp_path / "ours1"))
            assert into["w"].tolist() == [0, 1, 2, 3]
            assert made[0].storage_meta.checkpoint_id != made[1].storage_meta.checkpoint_id
    clear_torchs_plans()
    assert kept == {"torch": ("torch.float32", True), "ours": ("torch.bfloat16", False)}


def test_7_planners_do_not_share_their_caches(tmp_path: Any) -> None:
    """Line 7: two planners save two states in turn: torch's share plans by their class, ours do not."""
    found = {}
    for name in SIDES:
        dcp = side(name)
        one, two = (dcp.DefaultSavePlanner(enable_plan_caching=True) for _ in range(2))
        quietly(dcp.save, {"a": numbered(2)}, checkpoint_id=str(tmp_path / f"{name}a"), planner=one)
        sent = []
        two.set_up_planner({"a": numbered(2)}, dcp.metadata.StorageMeta(), True)
        sent.append(two.create_local_plan().usable)
        found[name] = sent
    clear_torchs_plans()
    assert found == {"torch": [False], "ours": [True]}


# 9


def load_with_half_the_metadata(name: str, folder: str) -> Any:
    dcp = side(name)
    rank = dist.get_rank()
    quietly(dcp.save, {"mine": numbered(4) + rank}, checkpoint_id=folder, use_collectives=False)
    dist.barrier()

    class Half(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if rank == 0:
                kwargs["rank"] = 0  # as if they were those of all
            elif "rank" not in kwargs:
                raise FileNotFoundError("not here yet")
            return super().read_metadata(*args, **kwargs)

    into = {"mine": torch.zeros(4)}
    quietly(dcp.load, into, storage_reader=Half(folder))


def save_or_load(folder: str) -> None:
    dcp = side("ours")
    (dcp.load if dist.get_rank() else dcp.save)({"w": torch.zeros(4)}, checkpoint_id=folder)


def test_9_ranks_that_make_different_calls(rank_pool: Any, tmp_path: Any) -> None:
    """The error of every rank says who saves and who loads, as after `if os.path.exists(path): load` in two processes."""
    for one in rank_pool.outcomes(2, save_or_load, str(tmp_path / "ours")):
        [said] = {str(each) for each in causes_of(one.error).values()}
        assert "rank 0: called 'checkpoint save'\nrank 1: called 'checkpoint load'" in said


def test_9_ranks_that_find_different_metadata(rank_pool: Any, tmp_path: Any) -> None:
    """Line 9: one rank finds the metadata of all, another only its own: torch waits for ever, ours says so."""
    outcomes = rank_pool.outcomes(2, load_with_half_the_metadata, "ours", str(tmp_path / "ours"))
    for one in outcomes:
        assert any(isinstance(each, RanksDisagree) for each in causes_of(one.error).values()), one.trace
    with pytest.raises(Exception, match=r"did not finish|failed"):
        rank_pool.run(2, load_with_half_the_metadata, "torch", str(tmp_path / "torch"), timeout_s=5)


# 10


def test_10_a_cast_is_told(tmp_path: Any, caplog: Any) -> None:
    """Line 10: 1e5 loaded into fp16 is inf, silently with torch; ours warns with the key and the dtypes."""
    for name in SIDES:
        dcp = side(name)
        quietly(dcp.save, {"w": torch.tensor([1e5])}, checkpoint_id=str(tmp_path / name))
        into = {"w": torch.zeros(1, dtype=torch.float16)}
        reader = side("torch").FileSystemReader(str(tmp_path / name))
        with caplog.at_level(logging.DEBUG):
            caplog.clear()
            quietly(dcp.load, into, storage_reader=reader)
        assert into["w"].isinf().all()
        said = [each.getMessage() for each in caplog.records if "float16" in each.getMessage()]
        assert bool(said) == (name == "ours")
    assert "w" in said[0]
    assert "float32" in said[0]


# 12


def xor_and_tail(name: str) -> Any:
    """Two extensions that do not commute: one changes every byte, one adds an end."""
    kinds = part(name, "_extension")

    class Stream(io.IOBase):
        def __init__(self, raw: Any, first: Any, last: bytes) -> None:
            self.raw, self.first, self.last = raw, first, last

        def write(self, data: Any) -> int:
            return self.raw.write(self.first(bytes(data)))

        def tell(self) -> int:
            return self.raw.tell()

        def close(self) -> None:
            if not self.closed:
                self.raw.write(self.last)
            super().close()

    def extension(name: str, first: Any, last: bytes, back: Any) -> Any:
        class Transform(kinds.StreamTransformExtension):  # type: ignore[misc,name-defined]
            @staticmethod
            def registry_name() -> str:
                return f"stream.{name}"

            @staticmethod
            def from_descriptor(version: str) -> Any:
                return Transform()

            def get_descriptor(self) -> str:
                return f"stream.{name}/1"

            def transform_to(self, output: Any) -> Any:
                return Stream(output, first, last)

            def transform_from(self, input: Any) -> Any:  # noqa: A002 - torch's name
                return io.BytesIO(back(input.read()))

        return Transform

    def xor(data: bytes) -> bytes:
        return bytes(each ^ 0x5A for each in data)

    def without_end(data: bytes) -> bytes:
        if not data.endswith(b"the end"):
            raise ValueError("no end")
        return data.removesuffix(b"the end")

    both = extension("xor", xor, b"", xor), extension("tail", bytes, b"the end", without_end)
    registry = kinds.ExtensionRegistry()
    for each in both:
        registry.register(each)
    return [each() for each in both], registry


@pytest.mark.parametrize("order", [1, -1])
def test_12_two_extensions_on_one_stream(tmp_path: Any, order: int) -> None:
    """Line 12: two extensions that do not commute, in either order: torch cannot read what it wrote, ours can."""
    for name in SIDES:
        dcp = side(name)
        extensions, registry = xor_and_tail(name)
        folder = str(tmp_path / name)
        writer = dcp.FileSystemWriter(folder, _extensions=extensions[::order])
        quietly(dcp.save, {"w": numbered(6), "n": [3]}, storage_writer=writer)
        into = {"w": torch.zeros(6), "n": None}
        reader = dcp.FileSystemReader(folder, _extension_registry=registry)
        if name == "torch":
            failure_of(dcp.load, into, storage_reader=reader)
        else:
            quietly(dcp.load, into, storage_reader=reader)
            assert seen(into) == seen({"w": numbered(6), "n": [3]})


# 14


class Bad:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_14_hostile_metadata_run_nothing(tmp_path: Any) -> None:
    """Line 14: a pickle in the place of the metadata runs what it likes in torch, and nothing here."""
    for name in SIDES:
        dcp = side(name)
        folder, mark = tmp_path / name, tmp_path / f"{name}-was-here"
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(Bad(str(mark))))
        error = failure_of(dcp.load, {"w": torch.zeros(1)}, checkpoint_id=str(folder))
        assert mark.exists() == (name == "torch")
    assert "mkdir" in str(error)


def test_14_hostile_objects_run_nothing(tmp_path: Any) -> None:
    """Line 14: an object of the checkpoint runs what it likes in torch, and nothing here, where the key is named."""
    for name in SIDES:
        dcp = side(name)
        folder, mark = str(tmp_path / name), tmp_path / f"{name}-was-here"
        quietly(dcp.save, {"w": numbered(1), "cfg": {"x": Bad(str(mark))}}, checkpoint_id=folder)
        into = {"w": torch.zeros(1), "cfg": {"x": None}}
        if name == "torch":
            quietly(dcp.load, into, checkpoint_id=folder)
            assert mark.exists()
            continue
        cause = causes_of(failure_of(dcp.load, into, checkpoint_id=folder))[0]
        assert not mark.exists()
        assert isinstance(cause, PickleRefused)
        assert "'cfg.x'" in str(cause)
        assert "add_safe_globals" in str(cause)


BOMBS = {
    "a memo of 2**31": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "text of 2**62 bytes": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b".",
    "bytes of 2**40": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    "a frame of 2**60": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"N.",
    "a bytearray by its size": b"\x80\x04cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    "nothing": b"",
    "lists in lists": b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b".",
    "a number of a million digits": b"\x80\x04L" + b"9" * 1_000_000 + b"L\n.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_14_memory_bombs(tmp_path: Any, bomb: str) -> None:
    """Line 14: a few bytes in the place of the metadata that ask for all the memory there is are refused."""
    (tmp_path / ".metadata").write_bytes(BOMBS[bomb])
    with faulty.no_more_memory(512 << 20):
        error = failure_of(side("ours").FileSystemReader(str(tmp_path)).read_metadata)
    assert isinstance(error, DamagedCheckpoint | PickleRefused), error
    assert ".metadata" in str(error)


OBJECT_BOMBS = {
    "a decimal of a billion digits": b"\x80\x02cbuiltins\nint\ncdecimal\nDecimal\nX\x0c\0\0\x001e1000000000\x85R\x85R.",
    "a list of a long range": b"\x80\x02cbuiltins\nlist\ncbuiltins\nrange\n\x8a\x05\0\0\0\0\x10\x85R\x85R.",
    "a bytearray by its size": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R.",
    "a storage by its size": b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x05\0\0\0\0\x10\x85R.",
}


@pytest.mark.parametrize("bomb", OBJECT_BOMBS)
def test_14_memory_bombs_among_objects(bomb: str) -> None:
    """Line 14: an object whose pickle asks plain constructors for all the memory, or time, is refused by name."""
    plain, made = io.BytesIO(), io.BytesIO()
    torch.save([1], plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(made, "w") as archive:
        for entry in source.infolist():
            forged = entry.filename.endswith("data.pkl")
            archive.writestr(entry.filename, OBJECT_BOMBS[bomb] if forged else source.read(entry))
    dcp = side("ours")
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"cfg": None}, dcp.Metadata({}), True)
    index = part("ours", "metadata").MetadataIndex("cfg")
    item = dcp.ReadItem(part("ours", "planner").LoadItemType.BYTE_IO, index, (0,), index, (0,), (0,))
    made.seek(0)
    with faulty.no_more_memory(512 << 20):
        error = failure_of(planner.load_bytes, item, made)
    assert isinstance(error, DamagedCheckpoint | PickleRefused), error
    assert "'cfg'" in str(error)


def _set(name: str, **fields: Any) -> Any:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        target = {"entry": entry, "chunk": entry.chunks[0], "properties": entry.properties}.get(name)
        target = target or next(place for index, place in metadata.storage_data.items() if index.fqn == "w")
        vars(target).update(fields)

    return change


FORGED = {
    "a negative size": _set("chunk", sizes=torch.Size([-6])),
    "a size that is no number": _set("entry", size=(2, "3")),
    "offsets of another dimension": _set("chunk", offsets=torch.Size([0, 0, 0])),
    "a size of 2**62": _set("chunk", sizes=torch.Size([1 << 62, 3])),
    "no chunks": _set("entry", chunks=None),
    "a dtype in words": _set("properties", dtype="float32"),
    "a dtype that is larger": _set("properties", dtype=torch.complex128),
    "a place behind the end": _set("place", offset=1 << 40),
    "a place before the beginning": _set("place", offset=-10),
    "a length that is no number": _set("place", length=3.5),
    "a file above": _set("place", relative_path="../.metadata"),
    "a file elsewhere": _set("place", relative_path="/etc/passwd"),
    "no file": _set("place", relative_path=None),
    "bytes before the item": _set("place", shardkeep_data_start=-4096),
    "bytes behind the item": _set("place", shardkeep_data_start=1 << 40),
    "an extension nobody has": _set("place", transform_descriptors=["stream.nobody/1"]),
    "extensions without names": _set("place", transform_descriptors=[3]),
    "storage data that are none": lambda metadata: vars(metadata).update(storage_data=7),
}


@pytest.mark.parametrize("forged", FORGED)
def test_14_forged_metadata(tmp_path: Any, forged: str) -> None:
    """Line 14: impossible metadata in torch's own classes are refused, or reach no other memory and no other file."""
    folder = str(tmp_path / "ck")
    quietly(side("torch").save, {"w": numbered(2, 3), "n": 1}, checkpoint_id=folder)
    path = os.path.join(folder, ".metadata")
    with open(path, "rb") as file:
        metadata = pickle.load(file)
    FORGED[forged](metadata)
    with open(path, "wb") as file:
        pickle.dump(metadata, file)
    into = {"w": torch.zeros(2, 3), "n": None}
    failed: Any = None
    try:
        quietly(side("ours").load, into, checkpoint_id=folder)
    except side("ours").CheckpointException as error:
        failed = causes_of(error)[0]
    if failed is None:
        assert seen(into) == seen({"w": numbered(2, 3), "n": 1})
    else:
        assert isinstance(failed, CheckpointError | ValueError), failed
