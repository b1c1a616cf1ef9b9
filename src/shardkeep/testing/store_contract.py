"""
A test suite for stores: subclass `StoreContract`, create a store in `make_store`, and run pytest.

    from shardkeep.testing import StoreContract

    class TestMyStore(StoreContract):
        def make_store(self) -> Store:
            return MyStore(...)

Each test creates its own stores. Needs pytest.
"""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, StorageError, WrongSize
from shardkeep.storage.base import Store, delete_all, is_sequential, preferred_requests, read_range
from shardkeep.storage.buffers import aligned_buffer

BAD_NAMES = ("", ".", "..", ".tmp-1", "-option", "a/b", "../a", "/a", "a\\b", "a\0b", "a\n", "a b", "é", "a" * 252)
GOOD_NAMES = ("a", "0", "A.b-c_d", ".metadata", "__0_0.distcp", "x..y", "model-00001-of-00002.safetensors", "a" * 251)
LARGE_NBYTES = (17 << 20) + 5
"""Size of a blob that is uploaded in more than two parts."""


def same(expected: object, actual: object) -> None:
    """Fail the test unless both are equal, without printing megabytes."""
    if expected != actual:
        pytest.fail(f"expected {str(expected)[:200]}, got {str(actual)[:200]}")


def sample(nbytes: int, seed: int = 0) -> bytes:
    """Return random bytes, so that a misplaced part is noticed."""
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 -- test data, no secret


def write_blob(store: Store, name: str, data: Any, *, room: int | None = None) -> None:
    """Write a whole blob in one part, with more `room` than it needs if that is given."""
    view = memoryview(data)
    writer = store.create(name, view.nbytes if room is None else room)
    writer.write_at(0, view)
    writer.finish(None if room is None else view.nbytes)


def read_blob(store: Store, name: str) -> bytes:
    with closing(store.open(name)) as reader:
        return bytes(read_range(reader, 0, reader.nbytes))


@contextmanager
def raises_errno(code: int, kind: type[StorageError] = StorageError, match: str | None = None) -> Iterator[None]:
    """Fail the test unless an error with this errno is raised."""
    with pytest.raises(kind, match=match) as caught:
        yield
    same(code, caught.value.errno)


def winner(attempt: Callable[[int], object], attempts: int = 8) -> int:
    """Run all attempts at once, and return the one that succeeds. The others must fail with EEXIST."""
    start = threading.Barrier(attempts)

    def one(i: int) -> bool:
        start.wait()
        try:
            attempt(i)
        except StorageError as exc:
            same(errno.EEXIST, exc.errno)
            return False
        return True

    with ThreadPoolExecutor(attempts) as pool:
        won = list(pool.map(one, range(attempts)))
    same(1, sum(won))
    return won.index(True)


class PutContract:
    """The promises about `put`, `get` and `version`: small blobs that are written in one step. A part of `StoreContract`."""

    def make_store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Store:
        return self.make_store()

    @pytest.mark.parametrize("data", [b"", b"abc", sample(1_000_001)])
    def test_put_get(self, store: Store, data: bytes) -> None:
        """`get` and `open` return what was put."""
        store.put("a", data)
        same(data, store.get("a", limit=len(data)))
        same(data, read_blob(store, "a"))

    def test_put_replaces_only_on_request(self, store: Store) -> None:
        """An existing blob is an error and is not changed, unless `replace` is given."""
        store.put("a", b"old, and longer", replace=True)
        with raises_errno(errno.EEXIST):
            store.put("a", b"new")
        same(b"old, and longer", store.get("a", limit=99))
        same(["a"], [blob.name for blob in store.list()])
        store.put("a", b"new", replace=True)
        same(b"new", store.get("a", limit=3))

    def test_one_of_many_puts_wins(self, store: Store) -> None:
        """Of puts racing for one name, exactly one succeeds, and its bytes are complete."""
        won = winner(lambda i: store.put("a", bytes([i]) * 10_000))
        same(bytes([won]) * 10_000, store.get("a", limit=10_000))

    def test_put_over_a_version(self, store: Store) -> None:
        """With `over`, a blob is replaced only if it still has that version; a deleted one is not created again."""
        same(None, store.version("a"))
        store.put("a", b"one")
        first = store.version("a")
        same(first, store.version("a"))
        store.put("a", b"two", over=first)
        second = store.version("a")
        same(False, first == second)
        same(2, len({first, second}))
        with raises_errno(errno.EEXIST, match="replaced or deleted by another writer"):
            store.put("a", b"new", over=first)
        same(b"two", store.get("a", limit=3))
        store.delete("a")
        with raises_errno(errno.EEXIST):
            store.put("a", b"new", over=second)
        same([], list(store.list()))

    def test_one_of_many_swaps_wins(self, store: Store) -> None:
        """Of puts racing to replace one version, exactly one succeeds."""
        store.put("a", b"begin")
        for turn in range(2):
            seen, said = store.version("a"), sample(1000, seed=turn)
            won = winner(lambda i: store.put("a", bytes([i]) + said, over=seen))  # noqa: B023 - used at once
            same(bytes([won]) + said, store.get("a", limit=1001))

    def test_put_is_atomic(self, store: Store) -> None:
        """A reader during a replacement sees the old bytes or the new ones, never a mix."""
        versions = [bytes([i]) * (10_000 + i) for i in range(2)]
        store.put("a", versions[0])

        def replace() -> None:
            for i in range(30):
                store.put("a", versions[i % 2], replace=True)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(replace)
            while not done.done():
                same(True, store.get("a", limit=20_000) in versions)
                same(True, read_blob(store, "a") in versions)
            done.result()

    def test_get_limit(self, store: Store) -> None:
        """A blob of exactly the limit is read; one byte more is an error."""
        store.put("a", b"12345")
        same(b"12345", store.get("a", limit=5))
        with pytest.raises(MalformedFile, match="a: 5 bytes, expected at most 4"):
            store.get("a", limit=4)


class StoreContract(PutContract):
    """The promises of `shardkeep.storage.base`, one test each."""

    MANY = 1001
    """Blobs that are listed and deleted together: more than one page of a listing, which has 1000 on S3."""

    @pytest.mark.parametrize("room", [None, 3_000_001])
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 2_000_001, 3_000_001])
    def test_round_trip(self, store: Store, nbytes: int, room: int | None) -> None:
        """Reading returns what was written and no more, also if `finish` ends a blob early; one without bytes exists, too."""
        data = sample(nbytes)
        write_blob(store, "a", data, room=room)
        same(data, read_blob(store, "a"))
        same(data, store.get("a", limit=nbytes))
        same([("a", nbytes)], [(blob.name, blob.nbytes) for blob in store.list()])

    def test_a_large_blob(self, store: Store) -> None:
        """Parts of odd sizes, shuffled, from several threads, make one blob, of which several threads read any ranges."""
        data = sample(LARGE_NBYTES)
        _write_shuffled(store, data, {4096, 8192, 1 << 20, 8 << 20, 16 << 20}, 20)
        _check_ranges(store, data, [(start, 3_000_001) for start in range(0, len(data), 3_000_001)])
        _check_ranges(store, data, [(i * 9973, 100_000 + i * 997) for i in range(100)])
        same([("a", LARGE_NBYTES)], [(blob.name, blob.nbytes) for blob in store.list()])

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 12345])
    @pytest.mark.parametrize("shift", [0, 1, 64])
    def test_any_alignment(self, store: Store, offset: int, shift: int) -> None:
        """Offsets and memory need no alignment, written or read."""
        nbytes = (1 << 20) + 4097
        data = sample(nbytes, seed=offset + shift)
        memory = aligned_buffer(nbytes + shift)[shift:]
        memory[:] = data
        writer = store.create("a", offset + nbytes)
        writer.write_at(0, memoryview(bytes(offset)))
        writer.write_at(offset, memory)
        writer.finish()
        memory[:] = bytes(nbytes)
        with closing(store.open("a")) as reader:
            reader.read_into(offset, memory)
        same(data, bytes(memory))

    def test_buffers_of_other_items(self, store: Store) -> None:
        """A contiguous buffer of any shape and item type is as good as bytes."""
        array = np.arange(6000, dtype=np.float32).reshape(20, 300)
        write_blob(store, "a", array)
        into = np.zeros_like(array)
        with closing(store.open("a")) as reader:
            reader.read_into(0, into.data)
        same(array.tolist(), into.tolist())

    def test_one_of_many_creates_wins(self, store: Store) -> None:
        """Of creates racing for one name, one succeeds, and the others and later ones fail with EEXIST."""
        won = winner(lambda i: write_blob(store, "a", bytes([i])))
        with raises_errno(errno.EEXIST):
            store.create("a", 3)
        same(bytes([won]), read_blob(store, "a"))

    @pytest.mark.parametrize("end", [-1, 11])
    def test_a_blob_ends_inside(self, store: Store, end: int) -> None:
        """An end outside the declared size is refused, and the blob can be abandoned."""
        writer = store.create("a", 10)
        writer.write_at(0, memoryview(bytes(10)))
        with raises_errno(errno.EINVAL, match="cannot end"):
            writer.finish(end)
        writer.abandon()
        same([], list(store.list()))

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 11), (10, 1), (1 << 40, 1)])
    def test_parts_stay_inside(self, store: Store, offset: int, nbytes: int) -> None:
        """A part that does not fit the declared size is refused."""
        writer = store.create("a", 10)
        with pytest.raises(StorageError):
            writer.write_at(offset, memoryview(bytes(nbytes)))
        writer.abandon()

    def test_abandon_removes(self, store: Store) -> None:
        """An abandoned blob is gone, its name is free, and abandoning again is harmless."""
        writer = store.create("a", 3)
        writer.write_at(0, memoryview(b"abc"))
        writer.abandon()
        writer.abandon()
        same([], list(store.list()))
        write_blob(store, "a", b"new")
        writer.abandon()
        same(b"new", read_blob(store, "a"))

    def test_finished_is_final(self, store: Store) -> None:
        """A finished blob does not change, and outlives `abandon`."""
        writer = store.create("a", 3)
        writer.write_at(0, memoryview(b"abc"))
        writer.finish()
        with pytest.raises(StorageError):
            writer.write_at(0, memoryview(b"xyz"))
        writer.abandon()
        same(b"abc", read_blob(store, "a"))

    @pytest.mark.parametrize("nbytes", [10, 5 << 20])
    @pytest.mark.parametrize("beyond", [1, 5000])
    def test_reading_past_the_end(self, store: Store, nbytes: int, beyond: int) -> None:
        """A read the blob cannot fill is an error that names blob, offset, wanted and got."""
        write_blob(store, "a", bytes(nbytes))
        with closing(store.open("a")) as reader, pytest.raises(WrongSize, match="/a: wanted") as caught:
            reader.read_into(3, memoryview(bytearray(nbytes - 3 + beyond)))
        same({"name": "a", "offset": 3, "wanted": nbytes - 3 + beyond, "got": nbytes - 3}, caught.value.details)

    def test_readers_at_their_limits(self, store: Store) -> None:
        """A negative offset is an error, not the end of the blob; closing a reader again is harmless."""
        write_blob(store, "a", b"abc")
        reader = store.open("a")
        same(3, reader.nbytes)
        with pytest.raises(CheckpointError):
            reader.read_into(-1, memoryview(bytearray(1)))
        reader.close()
        reader.close()

    def test_reader_and_delete(self, store: Store) -> None:
        """An open reader of a deleted blob gives the right bytes or `BlobNotFound`, nothing else."""
        write_blob(store, "a", b"abc")
        into = bytearray(3)
        with closing(store.open("a")) as reader:
            store.delete("a")
            try:
                reader.read_into(0, memoryview(into))
            except BlobNotFound:
                return
        same(b"abc", bytes(into))

    @pytest.mark.parametrize("verb", ["open", "get"])
    def test_missing(self, store: Store, verb: str) -> None:
        """A missing blob raises `BlobNotFound`, which is a FileNotFoundError."""
        same(True, issubclass(BlobNotFound, FileNotFoundError))
        with raises_errno(errno.ENOENT, BlobNotFound, "nothing-here"):
            _call(store, verb, "nothing-here")

    def test_list(self, store: Store) -> None:
        """A listing has each blob once, in order of name, with its size and a time that is about now."""
        same([], list(store.list()))
        before = time.time()
        store.put("b", b"12")
        write_blob(store, "c", b"123")
        store.put("a", b"1")
        blobs = list(store.list())
        same([("a", 1), ("b", 2), ("c", 3)], [(blob.name, blob.nbytes) for blob in blobs])
        same(True, all(abs(blob.modified_s - before) < 60 for blob in blobs))

    def test_delete(self, store: Store) -> None:
        """A deleted blob is gone, the others stay, and deleting it again is not an error."""
        store.delete("a")
        store.put("a", b"1")
        store.put("b", b"2")
        store.delete("a")
        store.delete("a")
        same(["b"], [blob.name for blob in store.list()])
        with pytest.raises(BlobNotFound):
            store.get("a", limit=1)

    def test_many(self, store: Store) -> None:
        """More blobs than fit in one request are listed, in order of name, and deleted, even if some do not exist."""
        names = [f"blob-{i:05}" for i in range(self.MANY)]
        shuffled = random.Random(1).sample(names, len(names))  # noqa: S311 -- test data, no secret
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b"x", replace=True), shuffled))
        same(names, [blob.name for blob in store.list()])
        delete_all(store, [])
        delete_all(store, [*names[:-1], "nothing-here"])
        same(names[-1:], [blob.name for blob in store.list()])

    @pytest.mark.parametrize("name", BAD_NAMES, ids=[ascii(name[:9]) for name in BAD_NAMES])
    def test_bad_names(self, store: Store, name: str) -> None:
        """A name that could reach outside the store is refused by every verb."""
        for verb in ("create", "open", "put", "get", "version", "delete"):
            with pytest.raises(MalformedFile, match="is not a blob name"):
                _call(store, verb, name)
        same([], list(store.list()))

    @pytest.mark.parametrize("name", GOOD_NAMES, ids=[name[:9] for name in GOOD_NAMES])
    def test_good_names(self, store: Store, name: str) -> None:
        """Every allowed name works with every verb."""
        store.put(name, b"1")
        same([name], [blob.name for blob in store.list()])
        store.delete(name)
        write_blob(store, name, b"2")
        same(b"2", store.get(name, limit=1))

    def test_url_and_preferences(self, store: Store) -> None:
        """Messages begin with the store's url; it says whether it wants parts in order, and how many requests at once."""
        with pytest.raises(BlobNotFound) as caught:
            store.open("a")
        same(True, str(caught.value).startswith(store.url))
        same(True, is_sequential(store) in {True, False})
        same(True, preferred_requests(store, 3) >= 1)


def _write_shuffled(store: Store, data: bytes, cuts: set[int], more: int) -> None:
    """Write a blob from several threads in random order, cut at these and `more` other offsets."""
    memory = aligned_buffer(len(data))
    memory[:] = data
    rng = random.Random(1)  # noqa: S311 -- test data, no secret
    ends = sorted({0, len(data), *cuts, *(rng.randrange(len(data)) for _ in range(more))})
    parts = list(itertools.pairwise(ends))
    rng.shuffle(parts)
    writer = store.create("a", len(data))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: writer.write_at(part[0], memory[part[0] : part[1]]), parts))
    writer.finish()


def _check_ranges(store: Store, data: bytes, ranges: list[tuple[int, int]]) -> None:
    """Read parts of the blob "a" in several threads at once."""

    def matches(part: tuple[int, int]) -> bool:
        wanted = data[part[0] : sum(part)]
        into = bytearray(len(wanted))
        reader.read_into(part[0], memoryview(into))
        return into == wanted

    with closing(store.open("a")) as reader, ThreadPoolExecutor(4) as pool:
        same(len(data), reader.nbytes)
        same(True, all(pool.map(matches, ranges)))


def _call(store: Store, verb: str, name: str) -> None:
    more: dict[str, dict[str, Any]] = {"create": {"nbytes": 1}, "put": {"data": b"1"}, "get": {"limit": 9}}
    getattr(store, verb)(name, **more.get(verb, {}))
