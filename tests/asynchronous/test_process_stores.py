"""Which stores the process that writes can open, what is said of others, and what it imports for them."""

import subprocess
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import shardkeep as sk
from shardkeep.engine.process.client import writer_manager
from shardkeep.storage.base import spec_of
from shardkeep.storage.fsspec import FsspecStore
from shardkeep.storage.object_store import ObjectStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.scene import PATIENCE_S, full, says

KEYS = {"access_key_id": "AKIA", "secret_access_key": "hunter2"}
UNCONDITIONAL = pytest.mark.filterwarnings("ignore:local. this service does not check")


def save(state, where):
    return sk.async_save(state, where, writer="process", options=sk.Options(io_threads=2, timeout_s=20))


@UNCONDITIONAL
def test_a_place_that_fsspec_opens(place):
    """It is opened again with its options, and what is there is what was saved; a path with options likewise."""
    save(full(1), sk.open_place(f"local://{place}/a", auto_mkdir=True)).result(PATIENCE_S)
    save(full(2), sk.open_place(f"{place}/b", durable=False)).result(PATIENCE_S)
    assert says(f"{place}/a") == {1}
    assert says(f"{place}/b") == {2}


@UNCONDITIONAL
def test_an_error_of_a_place_that_fsspec_opens(place):
    """A directory that cannot be made there is an error that names the file, and the process goes on."""
    with open(place, "wb"):
        pass
    with pytest.raises(sk.StorageError, match=f"local://{place}/"):
        save(full(1), f"local://{place}/below").result(PATIENCE_S)
    save(full(2), f"local://{place}-2").result(PATIENCE_S)
    assert says(f"{place}-2") == {2}


class Mine(ObjectStore):
    pass


def in_bucket(**options):
    """Nobody answers there."""
    return sk.open_place("s3://bucket/runs", endpoint="http://127.0.0.1:1", retries=0, **KEYS, **options)


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        (lambda: sk.open_place("memory://runs/a"), "MemoryStore in another process"),
        (lambda: FsspecStore(MemoryFileSystem(), "/a", "ram://a"), "MemoryFileSystem in another process"),
        (lambda: sk.open_place("simplecache::memory://a"), "SimpleCacheFileSystem in another process"),
        (lambda: sk.open_place("local:///a", hook=print), "the option 'hook' .* builtin_function"),
        (lambda: in_bucket(credential_provider=lambda: KEYS), "the option 'credential_provider' .* a function"),
        (lambda: Mine(in_bucket().bucket, "runs/", "s3://bucket/runs"), "a Mine in another process"),
        (lambda: FaultyStore(in_bucket()), "a FaultyStore in another process"),
    ],
)
def test_what_cannot_be_opened_there_is_refused_in_the_call(opened, said):
    """What only this process has, and stores of other classes: the error says what to do; no process is started."""
    with pytest.raises(sk.CheckpointError, match=said) as raised:
        save(full(1), opened())
    assert 'writer="thread"' in raised.value.hint
    assert "hunter2" not in str(raised.value)
    assert writer_manager().pid is None


@pytest.mark.parametrize("opened", [in_bucket, lambda: sk.open_place("local:///a", password="hunter2")])
def test_the_words_for_a_store_are_not_shown(opened):
    """They have the keys in them, which the process needs, and what is printed of them has not."""
    words = spec_of(opened())
    assert "hunter2" in words.options.values()
    assert "hunter2" not in repr(words)


def test_the_process_imports_what_it_needs():
    """Before it writes to an object store, no package that only object stores need."""
    found = subprocess.run(
        [sys.executable, "-c", "import sys, shardkeep.engine.process.server; print(*sys.modules)"],
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    ).stdout.split()  # fmt: skip
    assert "shardkeep.storage.local" in found
    others = {"torch", "obstore", "fsspec", "boto3"}
    assert others.isdisjoint(found)
