"""Objects: reading while they change, roots, and ways to name a place."""

import errno
import os
import subprocess
import sys
from contextlib import closing

import pytest

from shardkeep.errors import BlobNotFound, CheckpointError, StorageError
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.base import REMOVING_NAME, is_sequential, part_nbytes_of, preferred_requests
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.object_store import HEAD_BYTES, ObjectStore
from shardkeep.storage.resolve import open_place, open_root, open_store
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from shardkeep.testing.store_contract import raises_errno, sample, write_blob
from tests.support.s3_server import BUCKET


@pytest.mark.parametrize("nbytes", [10, HEAD_BYTES + 1])
def test_a_reader_never_mixes_two_objects(s3_place, nbytes):
    """One that was replaced since it was opened is an error; what was read with the opening is still right."""
    store = s3_place()
    old = sample(nbytes)
    store.put("a", old)
    with closing(store.open("a")) as reader:
        store.put("a", sample(nbytes, seed=1), replace=True)
        into = bytearray(nbytes)
        if nbytes <= HEAD_BYTES:
            reader.read_into(0, memoryview(into))
            assert into == old
            return
        with raises_errno(errno.ENOENT, BlobNotFound, match="was replaced since it was opened"):
            reader.read_into(0, memoryview(into))


def test_the_head_of_a_blob_comes_with_its_opening(s3_place):
    """It is at hand even when the service is not; the rest is not said to be."""
    store = s3_place()
    store.put("a", sample(HEAD_BYTES + 100))
    with closing(store.open("a")) as reader:
        assert reader.cached(0, HEAD_BYTES)
        assert not reader.cached(1, HEAD_BYTES)
        store.delete("a")
        into = bytearray(1000)
        reader.read_into(50, memoryview(into))
        assert into == sample(HEAD_BYTES + 100)[50:1050]
    with pytest.raises(StorageError, match="is closed"):
        reader.read_into(0, memoryview(into))


def test_the_head_of_a_blob_is_fetched_once(proxy, s3_place):
    """A longer read that begins in it, as that of a long header, asks for the rest."""
    store, data = s3_place(endpoint=proxy.endpoint), sample(2 * HEAD_BYTES)
    store.put("a", data)
    proxy.rules = []
    into = bytearray(len(data) - 10)
    with closing(store.open("a")) as reader:
        reader.read_into(10, memoryview(into))
    assert into == data[10:]
    assert (len(proxy.counts.requests), proxy.counts.received) == (2, len(data))


def test_a_place_is_removed_with_what_makes_it_a_checkpoint_first(s3_place, monkeypatch):
    """The record alone, then all the rest at once, then the mark; other places and the root's own blobs stay."""
    root = s3_place()
    for name in ("a", "b", RECORD_NAME):
        root.place("step-1").put(name, b"x")
    root.place("step-10").put(RECORD_NAME, b"x")
    root.put("latest", b"step-10")
    root.bucket.client.put(f"{root.prefix}step-1/deeper/not a name", b"x")
    deleted = []
    original = ObjectStore.delete_all

    def delete_all(self, names):
        deleted.append(list(names))
        original(self, names)

    monkeypatch.setattr("shardkeep.storage.object_store.ObjectStore.delete_all", delete_all)
    assert sorted(root.places()) == ["step-1", "step-10"]
    root.remove("step-1")
    root.remove("step-1")
    assert deleted == [[RECORD_NAME], ["a", "b"], [REMOVING_NAME]]
    assert list(root.place("step-1").list()) == []
    assert [info.name for info in root.place("step-10").list()] == [RECORD_NAME]
    assert [info.name for info in root.list()] == ["latest"]
    root.drop_empty("step-1")


def test_preferences_of_a_store(s3_place):
    store = RetryingStore(s3_place(requests=7, part_bytes=6 << 20), RetryPolicy(1))
    assert is_sequential(store)
    assert preferred_requests(store, 2) == 7
    assert part_nbytes_of(store) == 6 << 20
    assert part_nbytes_of(MemoryStore()) == 0  # it takes bytes in any order, and keeps none
    assert not is_sequential(RetryingStore(MemoryStore(), RetryPolicy(1)))
    assert preferred_requests(RetryingStore(MemoryStore(), RetryPolicy(1)), 2) == 2


def test_a_url_and_the_environment_are_enough(s3_server, s3_place, monkeypatch, tmp_path):
    """Keys and endpoint come from the usual variables; a place is the same however it is named."""
    mine = s3_place()
    write_blob(mine.place("step-1"), "a", b"abc")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP")  # the endpoint says http:// itself
    monkeypatch.chdir(tmp_path)
    by_url = open_store(f"{mine.url}/step-1/", direct=True)
    assert by_url.url == f"{mine.url}/step-1"
    assert by_url.get("a", limit=3) == b"abc"
    assert list(open_root(f"S3{mine.url[2:]}", direct=True).places()) == ["step-1"]
    assert "step-1" not in open_root(f"s3://{BUCKET}", direct=True).places()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "changed")
    with pytest.raises(StorageError, match="403"):
        open_store(mine.url, direct=True).get("a", limit=3)
    assert os.listdir(tmp_path) == []


def test_keys_of_a_profile(s3_server, s3_place, monkeypatch, tmp_path):
    mine = s3_place()
    mine.put("a", b"x")
    options = s3_server.options
    file = tmp_path / "credentials"
    file.write_text(
        f"[tests]\naws_access_key_id = {options['access_key_id']}\n"
        f"aws_secret_access_key = {options['secret_access_key']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    where = {"endpoint": s3_server.endpoint, "region": "us-east-1"}
    assert open_place(mine.url, profile="tests", **where).get("a", limit=1) == b"x"
    monkeypatch.setenv("AWS_PROFILE", "tests")
    with pytest.raises(StorageError, match="InvalidAccessKeyId"):  # as with the AWS tools, keys come before a profile
        open_place(mine.url, **where).get("a", limit=1)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert open_place(mine.url, **where).get("a", limit=1) == b"x"
    with pytest.raises(CheckpointError, match="'absent' gives no keys"):
        open_place(mine.url, profile="absent", **where)


_FORKS = """
import os, signal, sys
from shardkeep.storage.resolve import open_place
before, other = sys.argv[1:]
store = open_place(before)
if not os.fork():  # nothing was used yet: this one may
    store.put("first", b"x")
    os._exit(0)
assert os.wait()[1] == 0
store.put("second", b"x")
slots = store.bucket.slots
while slots.acquire(blocking=False):  # by threads that a child does not have
    pass
for url in (before, other):
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        try:
            open_place(url, requests=3 if url == other else None).put("third", b"x")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "it hangs"
"""


def test_a_forked_process_raises_and_does_not_hang(s3_server, s3_place):
    first, other = s3_place(), s3_place()
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, first.url, other.url],
        env={**os.environ, **s3_server.environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CheckpointError s3://") == 2
    assert done.stdout.count("was forked after the store was used") == 2
    assert done.stdout.count("spawn or forkserver") == 2
    assert [info.name for info in first.list()] == ["first", "second"]


def test_memory_is_one_place_a_name():
    store = open_store("memory://tests-objects/runs/step-1", direct=True)
    store.put("a", b"x")
    root = open_root("memory://tests-objects/runs", direct=True)
    assert list(root.places()) == ["step-1"]
    assert root.place("step-1").get("a", limit=1) == b"x"
    assert list(open_root("memory://tests-objects", direct=True).places()) == ["runs"]
    assert list(open_root("memory://tests-others", direct=True).places()) == []
    open_root("memory://tests-objects", direct=True).remove("runs")
    assert list(root.places()) == []


def test_a_path_has_options_too(tmp_path):
    assert open_place(tmp_path, direct=False).url == str(tmp_path)
    for where in (tmp_path, "memory://tests-objects"):
        with pytest.raises(CheckpointError, match="no option 'endpoint'"):
            open_place(where, endpoint="http://x")


def test_what_is_missing_to_open_a_place_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CheckpointError, match=r"pip install 'shardkeep\[cloud\]'"):
        open_store("gs://a-bucket-never-opened/run", direct=True)
