"""One of several concurrent writers wins: in processes, when answers are lost, and on services that ignore conditions."""

import errno
import json
import os
import subprocess
import sys
import warnings

import pytest
from fsspec.implementations.local import LocalFileSystem

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.base import Version
from shardkeep.storage.fsspec import FsspecStore, _shared
from shardkeep.storage.local import LocalStore
from shardkeep.storage.object_store import ObjectStore
from shardkeep.testing.store_contract import raises_errno

_RACER = """
import json, sys
from shardkeep.errors import StorageError
from shardkeep.storage.resolve import open_store
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


def race(url, environment, rounds):
    """Let two processes put the same names, and add to one list by swapping; returns what each of them won."""
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
def test_two_processes(s3_place, s3_server, tmp_path, kind):
    store = s3_place() if kind == "s3" else LocalStore(tmp_path)
    rounds = 4 if kind == "s3" else 100
    store.put("counter", b"[]")
    a, b = race(store.url, s3_server.environment, rounds)
    assert sorted([*a, *b]) == sorted(f"new-{i}" for i in range(rounds))
    for me, won in (("a", a), ("b", b)):
        for name in won:
            assert store.get(name, limit=99).decode() == f"{me} {name[4:]}"
    added = json.loads(store.get("counter", limit=10_000))
    assert sorted(added) == sorted(f"{me} {i}" for me in "ab" for i in range(rounds))


class _Careless(ObjectStore):
    """A service that ignores conditions and reports success."""

    def send(self, name, data, *, create=False, over=None):
        super().send(name, data)


def test_a_service_that_ignores_conditions_is_detected(s3_place):
    """The probe runs once, leaves nothing behind, and one warning is given; a name that is taken is still refused."""
    store = s3_place(settle_s=0.01, requests=9)
    small = _Careless(store.bucket, store.prefix, store.url)
    with pytest.warns(UserWarning, match="does not check the conditions of puts"):
        small.put("a", b"old")
    assert [info.name for info in store.list()] == ["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raises_errno(errno.EEXIST):
            small.put("a", b"new")
    assert store.get("a", limit=9) == b"old"
    small.put("a", b"new", over=small.version("a"))
    assert store.get("a", limit=9) == b"new"


class _HalfCareful(ObjectStore):
    """A service that checks whether an object exists, but not its version."""

    def send(self, name, data, *, create=False, over=None):
        super().send(name, data, create=create)


def test_each_condition_has_its_own_probe(s3_place):
    """A service may check one condition and ignore the other: of two writers that replace one version, one is refused."""
    store = s3_place(settle_s=0.01, requests=10)
    small = _HalfCareful(store.bucket, store.prefix, store.url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.put("a", b"old")
    seen = small.version("a")
    with pytest.warns(UserWarning, match="does not check the conditions of puts"):
        small.put("a", b"first", over=seen)
    with raises_errno(errno.EEXIST):
        small.put("a", b"second", over=seen)
    assert store.get("a", limit=9) == b"first"
    assert [info.name for info in store.list()] == ["a"]
    careful = s3_place(requests=11)
    careful.put("a", b"old")
    careful.put("a", b"new", over=careful.version("a"))
    assert sorted(careful.bucket.probed.values()) == [True, True]


def test_the_probe_of_a_killed_process_is_deleted(s3_place):
    """The next probe deletes it. If another process deletes the object of a probe, the condition does not count as ignored."""
    store = s3_place(requests=12)
    store.put("shardkeep.probe", b"1", replace=True)

    class Beside(ObjectStore):
        """Another process probes, too, and deletes its object at the worst moment."""

        def send(self, name, data, *, create=False, over=None):
            if data == b"333" and name == "shardkeep.probe":
                store.delete(name)
            super().send(name, data, create=create, over=over)

    other = s3_place(requests=13)
    small = Beside(other.bucket, store.prefix, store.url)
    assert small.checks_conditions(None)
    assert small.checks_conditions(Version("x"))
    assert list(store.list()) == []


def test_without_conditions_a_put_that_was_overwritten_is_an_error(s3_place):
    """If another writer's bytes are there a moment later, the other writer has won."""
    store = s3_place(conditional_puts=False, settle_s=0.0)
    store.bucket.warned.add("conditions")

    class _Overtaken(_Careless):
        def send(self, name, data, *, create=False, over=None):
            super().send(name, data)
            super().send(name, b"theirs")

    small = _Overtaken(store.bucket, store.prefix, store.url)
    with raises_errno(errno.EEXIST):
        small.put("a", b"mine")


class _LosesAnswers(ObjectStore):
    """Serves the first request, but loses its answer."""

    lost = 0

    def send(self, name, data, *, create=False, over=None):
        super().send(name, data, create=create, over=over)
        if not self.lost:
            self.lost += 1
            raise StorageError("lost", errno=errno.ETIMEDOUT)


@pytest.mark.parametrize("swap", [False, True], ids=["create", "over"])
def test_a_lost_answer_is_no_failure(s3_place, swap):
    """A put that is refused because of our own first attempt succeeded; one refused because of another writer did not."""
    store = s3_place(conditional_puts=True)
    small = _LosesAnswers(store.bucket, store.prefix, store.url)
    seen = None
    if swap:
        store.put("a", b"old")
        seen = store.version("a")
    small.put("a", b"mine", over=seen)
    assert (small.lost, store.get("a", limit=9)) == (1, b"mine")
    # The same bytes by another writer, and no answer lost: refused.
    with raises_errno(errno.EEXIST):
        small.put("a", b"mine", over=seen)


@pytest.mark.parametrize(
    ("retry_s", "retried", "times"), [(60.0, False, 4), (60.0, True, 1), (1e-9, False, 1)], ids=["4", "retried", "late"]
)
def test_a_put_is_not_retried_beyond_its_limits(s3_place, monkeypatch, retry_s, retried, times):
    """What the client library has retried, and what fails after `retry_s`, is not retried."""
    store = s3_place(conditional_puts=True, retry_s=retry_s)
    sent = []

    class _Busy(ObjectStore):
        def send(self, name, *_, **__):
            sent.append(name)
            raise StorageError("503", errno=errno.EBUSY, retried=retried)

    monkeypatch.setattr("shardkeep.storage.retry.backoff_s", lambda _: 0.001)
    with pytest.raises(StorageError, match="503"):
        _Busy(store.bucket, store.prefix, store.url).put("a", b"x")
    assert sent == ["a"] * times


def test_a_probe_whose_answer_is_lost_is_repeated(s3_place):
    store = s3_place(requests=12)
    small = _LosesAnswers(store.bucket, store.prefix, store.url)
    assert small.checks_conditions(None)
    assert small.lost == 1
    assert list(store.list()) == []


def test_what_is_gone_cannot_be_replaced(s3_place):
    """Services that answer a swap of a deleted object with "not found" mean that it was deleted meanwhile."""
    store = s3_place(conditional_puts=True)

    class _Amazon(ObjectStore):
        def send(self, name, data, *, create=False, over=None):
            raise BlobNotFound("404 NoSuchKey", errno=errno.ENOENT)

    small = _Amazon(store.bucket, store.prefix, store.url)
    with raises_errno(errno.EEXIST, match="deleted by another writer"):
        small.put("a", b"mine", over=Version("tag"))


def test_fsspec_has_no_conditions(tmp_path):
    """A file system whose puts look and then put is treated as one without conditions, with a warning."""
    _shared.cache_clear()  # it warns once
    root = FsspecStore(LocalFileSystem(), str(tmp_path), "local://x", settle_s=0.01)
    assert not root.checks_conditions(None)
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
