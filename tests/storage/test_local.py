"""What is particular to files: hostile directories, full disks, failing calls."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.engine.peers import peers_of
from shardkeep.errors import BlobNotFound, MalformedFile, StorageError, StorageFull
from shardkeep.storage import base, local
from shardkeep.storage.buffers import ALIGNMENT, aligned_buffer
from shardkeep.storage.local import LocalStore, open_files
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.store_contract import raises_errno, read_blob, sample, write_blob
from tests.storage.system import MIB, drop_cached, failing, is_direct, linux_only, no_file_above


@pytest.fixture
def tiny(tiny_disk):
    return LocalStore(tiny_disk)


@contextmanager
def closing_abandoned(writer):
    try:
        yield
    finally:
        writer.abandon()


# -- a hostile directory


@pytest.mark.parametrize("verb", ["open", "get"])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "socket", "device"])
def test_only_regular_files_are_read(store, tmp_path, kind, verb):
    store.put("a", b"1")
    planted = tmp_path / "store" / "planted"
    if kind == "symlink":
        (tmp_path / "secret").write_bytes(b"secret")
        planted.symlink_to(tmp_path / "secret")
    elif kind == "dangling":
        planted.symlink_to(tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(planted)
    elif kind == "directory":
        planted.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(planted))
    else:
        try:
            os.mknod(planted, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("may not make devices here")

    with pytest.raises((MalformedFile, StorageError), match="planted"):
        store.get("planted", limit=99) if verb == "get" else store.open("planted")
    assert [blob.name for blob in store.list()] == ["a"]


def test_writes_do_not_follow_links(store, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    store.put("a", b"1")
    (tmp_path / "store" / "planted").symlink_to(victim)
    with pytest.raises(StorageError):
        store.create("planted", 3)
    with pytest.raises(StorageError):
        store.put("planted", b"new")
    store.put("planted", b"new", replace=True)
    assert victim.read_bytes() == b"precious"
    assert store.get("planted", limit=3) == b"new"


def test_strange_files_are_not_listed(store, tmp_path):
    store.put("a", b"1")
    for name in (".tmp-0123", "with space", "ünï", "~backup"):
        (tmp_path / "store" / name).write_bytes(b"x")
    assert [blob.name for blob in store.list()] == ["a"]


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    store = LocalStore(tmp_path / "file")
    for attempt in (lambda: store.put("a", b""), lambda: store.open("a"), store.list, lambda: store.create("a", 1)):
        with raises_errno(errno.ENOTDIR, match="Not a directory"):
            attempt()


# -- a full or failing disk


def test_a_full_disk_is_known_at_create(tiny):
    with pytest.raises(StorageFull, match=r"/big: cannot create: No space left on device \(errno ENOSPC\)") as caught:
        tiny.create("big", 64 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert "free some space" in caught.value.hint
    assert list(tiny.list()) == []
    write_blob(tiny, "fits", bytes(4 * MIB))


def test_memory_is_not_taken_before_it_is_written(tiny):
    """On a file system in memory, taking space would write every page twice: it is only checked that there is enough."""
    with closing_abandoned(tiny.create("fits", 4 * MIB)):
        assert os.stat(Path(tiny.url) / "fits").st_blocks == 0


def test_a_full_disk_stops_a_write(tiny, monkeypatch):
    """Where space cannot be taken before, the write that finds the disk full says at which offset."""
    monkeypatch.setattr(local, "reserve", lambda fd, nbytes: None)
    writer = tiny.create("big", 16 * MIB)
    writer.write_at(0, memoryview(bytes(4 * MIB)))
    with pytest.raises(StorageFull, match=f"at offset {4 * MIB}") as caught:
        writer.write_at(4 * MIB, memoryview(bytes(12 * MIB)))
    writer.abandon()
    assert caught.value.details == {"name": "big", "offset": 4 * MIB, "errno": errno.ENOSPC}
    assert list(tiny.list()) == []


@linux_only
@pytest.mark.parametrize("verb", ["create", "put"])
def test_file_size_limit(store, verb):
    store.put("a", b"1")
    with no_file_above(MIB), pytest.raises(StorageError, match="EFBIG") as caught:
        store.create("big", 2 * MIB) if verb == "create" else store.put("big", bytes(2 * MIB))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(store.url) == ["a"]


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "ftruncate"])
def test_finish_reports_and_abandon_cleans(store, monkeypatch, call):
    """Bytes that could not be made durable are an error of `finish`; the blob can then be abandoned."""
    writer = store.create("a", 10)
    monkeypatch.setattr(writer, "_nbytes", 20)  # so that there is something to truncate
    failing(call, errno.EIO, monkeypatch)
    with pytest.raises(StorageError, match=r"/a: cannot make durable: Input/output error \(errno EIO\)"):
        writer.finish()
    writer.abandon()
    assert os.listdir(store.url) == []


@pytest.mark.parametrize(
    ("call", "replace"),
    [(call, replace) for call in ("pwrite", "fdatasync", "fsync", "close") for replace in (True, False)]
    + [("replace", True), ("link", False)],
)
def test_a_failed_put_keeps_the_old_blob(store, monkeypatch, call, replace):
    store.put("a", b"old")
    with monkeypatch.context() as patch:
        if call == "close":
            patch.setattr(os, "close", _close_late)
        else:
            failing(call, errno.EIO, patch)
        with pytest.raises(StorageError) as caught:
            store.put("a", b"new", replace=replace)
    assert caught.value.errno in {errno.EIO, errno.EEXIST}
    assert os.listdir(store.url) == ["a"]
    # Only the directory's fsync comes after the replacing.
    assert store.get("a", limit=3) == (b"new" if replace and call == "fsync" else b"old")


def _close_late(fd, real=os.close):
    real(fd)
    raise OSError(errno.EIO, "late write error")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_put_without_hard_links(store, monkeypatch, number):
    failing("link", number, monkeypatch)
    store.put("a", b"old")
    with raises_errno(errno.EEXIST):
        store.put("a", b"new")
    assert store.get("a", limit=3) == b"old"
    assert os.listdir(store.url) == ["a"]


CRASHING = """
import os, sys
from shardkeep.storage.local import LocalStore
setattr(os, sys.argv[2], lambda *args: os._exit(9))
LocalStore(sys.argv[1]).put("a", b"new", replace=True)
"""


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "replace", "fsync"])
def test_a_crash_inside_put_leaves_old_or_new(store, call):
    """A process that dies before the replace leaves the old bytes; what it leaves besides is not listed."""
    store.put("a", b"old")
    died = subprocess.run([sys.executable, "-c", CRASHING, store.url, call], check=False)
    assert died.returncode == 9
    assert store.get("a", limit=3) == (b"new" if call == "fsync" else b"old")
    assert [blob.name for blob in store.list()] == ["a"]


def test_messages_name_place_and_errno(store, monkeypatch):
    write_blob(store, "a", bytes(100))
    failing("preadv", errno.EIO, monkeypatch)
    with closing(store.open("a")) as reader, pytest.raises(StorageError) as caught:
        reader.read_into(7, memoryview(bytearray(3)))
    assert str(caught.value) == f"{store.url}/a: cannot read at offset 7: Input/output error (errno EIO)"
    assert caught.value.details == {"name": "a", "offset": 7, "errno": errno.EIO}
    assert isinstance(caught.value.__cause__, OSError)


def test_failed_opens_leak_nothing(store, monkeypatch):
    """A second open that fails, or meets another file, costs direct I/O and nothing else."""
    data = sample(3 * MIB)
    write_blob(store, "a", data)
    failing("open", errno.EINVAL, monkeypatch, when=lambda path, flags, *_: bool(flags & os.O_DIRECT))
    assert read_blob(store, "a") == data
    write_blob(store, "b", data)
    assert read_blob(store, "b") == data
    with pytest.raises(BlobNotFound):
        store.open("missing")
    with pytest.raises(StorageError):
        store.create("a", 3)


# -- short and refused calls


@pytest.mark.parametrize("most", [1000, 5000, 70_000])
def test_short_reads_and_writes(store, monkeypatch, most):
    pwrite, preadv, data = os.pwrite, os.preadv, sample(2 * MIB + 77)
    memory = aligned_buffer(len(data))
    memory[:] = data

    def pieces(fd):
        return -(-most // ALIGNMENT) * ALIGNMENT if is_direct(fd) else most

    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: pwrite(fd, view[: pieces(fd)], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][: pieces(fd)]], offset))
    writer = store.create("a", len(data))
    writer.write_at(0, memory)
    writer.finish()
    drop_cached(store, "a", 0, len(data))
    assert read_blob(store, "a") == data


def test_direct_writes_refused(store, monkeypatch):
    failing("pwrite", errno.EINVAL, monkeypatch, when=is_direct)
    failing("preadv", errno.EINVAL, monkeypatch, when=is_direct)
    data = aligned_buffer(3 * MIB)
    data[:] = sample(3 * MIB)
    writer = store.create("a", len(data))
    writer.write_at(0, data)
    writer.finish()
    drop_cached(store, "a", 0, len(data))
    assert read_blob(store, "a") == bytes(data)


def test_a_write_that_goes_nowhere(store, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: 0)
    writer = store.create("a", 3)
    with pytest.raises(StorageError, match="wrote nothing"):
        writer.write_at(0, memoryview(b"abc"))
    writer.abandon()


def test_descriptors_outlive_close_while_in_use(store):
    """A descriptor closed by one thread stays open for another that is using it, and takes no new users."""
    store.put("a", b"abc")
    files = open_files(os.path.join(store.url, "a"), os.O_RDONLY, direct=True)
    with files:
        files.close()
        assert os.pread(files.buffered, 3, 0) == b"abc"
        with pytest.raises(OSError, match="already closed"):
            files.__enter__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files.buffered)
    files.close()


def test_a_closed_reader_says_so(store):
    store.put("a", b"abc")
    reader = store.open("a")
    reader.close()
    with pytest.raises(StorageError, match="already closed"):
        reader.read_into(0, memoryview(bytearray(1)))


def test_a_lock_that_is_never_let_go_is_an_error_that_passes(store, tmp_path, monkeypatch):
    """A process that was stopped while it held the lock does not block others for ever, and nothing is replaced meanwhile."""
    store.put("a", b"old")
    monkeypatch.setattr(local, "_LOCK_TIMEOUT_S", 0.05)
    other = os.open(tmp_path / "store", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.put("b", b"new names need no lock")
        with raises_errno(errno.EBUSY, match="held the lock on the directory"):
            store.put("a", b"new", replace=True)
    finally:
        os.close(other)
    assert sorted(os.listdir(tmp_path / "store")) == ["a", "b"]
    store.put("a", b"new", over=store.version("a"))
    assert store.get("a", limit=9) == b"new"


def test_a_file_system_without_locks_still_swaps(store, monkeypatch):
    """Versions are compared nevertheless; any other failure to lock is an error."""

    def refuse(code):
        def flock(*_):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(local.fcntl, "flock", flock)

    store.put("a", b"old")
    seen = store.version("a")
    refuse(errno.EOPNOTSUPP)
    store.put("a", b"new", over=seen)
    with raises_errno(errno.EEXIST):
        store.put("a", b"newer", over=seen)
    refuse(errno.EIO)
    with raises_errno(errno.EIO):
        store.put("a", b"newer", replace=True)
    assert store.get("a", limit=9) == b"new"


def test_a_version_is_of_bytes_and_of_when(store, tmp_path):
    """Bytes that change in place, or are put anew a while later, are of another version; to look changes nothing."""
    store.put("a", b"one")
    first = store.version("a")
    os.utime(tmp_path / "store" / "a", ns=(1, 1))
    assert store.version("a") != first
    second = store.version("a")
    (tmp_path / "store" / "a").write_bytes(b"two")
    os.utime(tmp_path / "store" / "a", ns=(1, 1))
    assert store.version("a") != second


def test_temporary_files_of_other_users_stay(tmp_path, monkeypatch):
    """Their processes may be hidden, and look dead."""
    left = tmp_path / re.sub(r"-\d+-\w*-", "-4194999-1-", local.temporary_name("converting"))
    left.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        local.clear_temporaries(str(tmp_path))
    assert left.exists()
    local.clear_temporaries(str(tmp_path))
    assert not left.exists()


@pytest.mark.parametrize(
    ("kind", "is_remote"),
    [(0xEF53, False), (0x01021994, False), (0x6969, True), (0x0BD00BD0, True), (0x65735546, True), (0, False)],
    ids=["ext4", "tmpfs", "NFS", "Lustre", "FUSE", "unknown"],
)
def test_reads_from_network_file_systems_are_shared(store, monkeypatch, kind, is_remote):
    """By default ranks share reads from a file system that is not on a disk of this machine, and from no other."""
    monkeypatch.setattr(local, "_file_system", lambda _fd: kind)
    store.put("a", b"1")
    assert base.is_remote(FaultyStore(store)) == is_remote
    assert (peers_of(store, World(0, 2), sk.Options()) is not None) == is_remote
    assert peers_of(store, World(0, 2), sk.Options(share_reads=False)) is None
