"""Of several writers one wins: in threads, in processes, when answers are lost, and where conditions are ignored."""

import errno
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.store.fsspec_root import FsspecRoot
from shardkeep.store.local import LocalStore
from shardkeep.store.object_root import ObjectRoot
from shardkeep.store.object_swap import SmallObjects
from shardkeep.store.protocol import Store, Version
from shardkeep.store.swaps import Swaps
from shardkeep.testing.s3_server import S3Server

Opened = Callable[..., ObjectRoot]

_RACER = """
import json, sys
from shardkeep.errors import StorageError
from shardkeep.store.place import open_store
url, me, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = open_store(url, direct=True)
won = []
print("ready", flush=True)
sys.stdin.readline()
for i in range(rounds):
    try:
        store.put(f"new-{i}", f"{me} {i}".encode())
        won.append(f"new-{i}")
    except StorageError as error:
        assert error.errno == 17, error
    while True:
        seen = store.version("counter")
        said = json.loads(store.get("counter", limit=10_000))
        try:
            store.put("counter", json.dumps([*said, f"{me} {i}"]).encode(), over=seen)
            break
        except StorageError as error:
            assert error.errno == 17, error
print(json.dumps(won))
"""


def race(url: str, environment: dict[str, str], rounds: int) -> list[list[str]]:
    """Let two processes put the same names, and add to one list by swapping; returns what each was told it won."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, url, me, str(rounds)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in "ab"
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    found = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        found.append(json.loads(out))
    return found


@pytest.mark.parametrize("kind", ["s3", "local"])
def test_two_processes(s3_place: Opened, s3_server: S3Server, tmp_path: Any, kind: str) -> None:
    """Each name is won by one of them, whose bytes are there, and of what both add to one blob nothing is lost."""
    store: Store = s3_place() if kind == "s3" else LocalStore(tmp_path)
    rounds = 4 if kind == "s3" else 100
    store.put("counter", b"[]")
    a, b = race(store.url, s3_server.environment, rounds)
    assert sorted([*a, *b]) == sorted(f"new-{i}" for i in range(rounds))
    for me, won in (("a", a), ("b", b)):
        for name in won:
            assert store.get(name, limit=99).decode() == f"{me} {name[4:]}"
    added = json.loads(store.get("counter", limit=10_000))
    assert sorted(added) == sorted(f"{me} {i}" for me in "ab" for i in range(rounds))


class _Careless(SmallObjects):
    """A service that says that all is well, and looks at no condition."""

    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        super().send(name, data)


def test_a_service_that_ignores_conditions_is_found_out(s3_place: Opened) -> None:
    """It is tried out once, leaves nothing behind, and the user is told once; a name that is taken is still refused."""
    store = s3_place(settle_s=0.01, requests=9)
    small = _Careless(store.bucket, store.prefix, store.url)
    swaps = Swaps(small, store.url, settle_s=0.01, lock=store.bucket.lock, warned=store.bucket.warned)
    with pytest.warns(UserWarning, match="does not check the conditions of puts"):
        swaps.put("a", b"old")
    assert [info.name for info in store.list()] == ["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StorageError) as caught:
            swaps.put("a", b"new")
    assert caught.value.errno == errno.EEXIST
    assert store.get("a", limit=9) == b"old"
    swaps.put("a", b"new", over=small.version("a"))
    assert store.get("a", limit=9) == b"new"


def test_who_is_overtaken_without_conditions_is_told(s3_place: Opened) -> None:
    """Another's bytes a moment later mean that the other has won."""
    store = s3_place(conditional_puts=False)

    class _Overtaken(_Careless):
        def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
            super().send(name, data)
            super().send(name, b"theirs")

    small = _Overtaken(store.bucket, store.prefix, store.url)
    swaps = Swaps(small, store.url, settle_s=0.0, lock=threading.Lock(), warned={"conditions"})
    with pytest.raises(StorageError) as caught:
        swaps.put("a", b"mine")
    assert caught.value.errno == errno.EEXIST


class _LosesAnswers(SmallObjects):
    """Does what it is asked, and fails to say so, once."""

    lost = 0

    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        super().send(name, data, create=create, over=over)
        if not self.lost:
            self.lost += 1
            raise StorageError("lost", errno=errno.ETIMEDOUT)


@pytest.mark.parametrize("swap", [False, True], ids=["create", "over"])
def test_a_lost_answer_is_no_failure(s3_place: Opened, swap: bool) -> None:
    """What is refused because of our own first attempt was ours; what somebody else put is not."""
    store = s3_place()
    small = _LosesAnswers(store.bucket, store.prefix, store.url)
    swaps = Swaps(small, store.url, settle_s=0.0, lock=threading.Lock(), warned=set())
    seen = None
    if swap:
        store.put("a", b"old")
        seen = store.version("a")
    swaps.put("a", b"mine", over=seen)
    assert (small.lost, store.get("a", limit=9)) == (1, b"mine")
    # The same bytes by somebody else, and no answer lost: refused.
    with pytest.raises(StorageError) as caught:
        swaps.put("a", b"mine", over=seen)
    assert caught.value.errno == errno.EEXIST


def test_what_is_gone_cannot_be_replaced(s3_place: Opened) -> None:
    """Services that answer a swap of a deleted object with "not found" mean that it was deleted meanwhile."""
    store = s3_place()

    class _Amazon(SmallObjects):
        def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
            raise BlobNotFound("404 NoSuchKey", errno=errno.ENOENT)

    small = _Amazon(store.bucket, store.prefix, store.url)
    swaps = Swaps(small, store.url, settle_s=0.0, lock=threading.Lock(), warned=set())
    with pytest.raises(StorageError, match="deleted by another writer meanwhile") as caught:
        swaps.put("a", b"mine", over=Version("tag"))
    assert caught.value.errno == errno.EEXIST


def test_fsspec_says_what_it_cannot_do(tmp_path: Any) -> None:
    """A file system whose puts look and then put is treated as one without conditions, with a warning."""
    assert FsspecRoot(MemoryFileSystem(), "/x", "mem://x").keeps_conditions(None)
    root = FsspecRoot(LocalFileSystem(), str(tmp_path), "local://x", settle_s=0.01)
    assert not root.keeps_conditions(None)
    with pytest.warns(UserWarning, match="^local: this service does not check"):
        root.place("step-1").put("a", b"x")
    assert list(root.places()) == ["step-1"]
    root.remove("step-1")
    root.remove("step-1")
    assert list(root.places()) == []
    (tmp_path / "empty").mkdir()
    root.drop_empty("empty")
    root.drop_empty("empty")
    assert list(tmp_path.iterdir()) == []
