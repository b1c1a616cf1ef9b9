"""`shardkeep verify` of checkpoints in a bucket: whatever is wrong is named, with its place, and is exit code 1."""

import threading

import pytest
import torch

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.codecs.keys import KeyRing
from shardkeep.errors import StorageError
from shardkeep.format.frames import table_nbytes
from shardkeep.layouts.native import read_record
from shardkeep.opening import verify_stored
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_place
from shardkeep.testing.faulty_store import FaultyStore
from tests.support.stores import BeforeStore

OPTIONS = sk.Options(keys=KeyRing([bytes(range(32))]))


def state():
    torch.manual_seed(1)
    return {"model": {"w": torch.randn(700_000)}, "optim": {"m": torch.randn(5000)}, "step": 3}


@pytest.fixture(scope="module")
def bucket(s3_server):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        yield s3_server


def saved(bucket, name, codecs):
    store = open_place(bucket.url(f"verify/{name}"))
    sk.save(state(), store, codecs=codecs, options=OPTIONS, overwrite=True)
    return store


def verify(url, capsys, *more):
    capsys.readouterr()
    code = main(["verify", url, *more])
    return code, " ".join(capsys.readouterr().out.split())


def flip(store, name, at):
    good = bytes(store.get(name, limit=1 << 30))
    bad = bytearray(good)
    bad[at] ^= 1
    store.put(name, bytes(bad), replace=True)
    return good


def test_a_plain_checkpoint(bucket, capsys):
    """A flipped bit, a missing file, damaged digests and a damaged index: each is named, with its place, and alone."""
    store = saved(bucket, "plain", None)
    record = read_record(store)
    [file] = [file for file in record.files if file.name.startswith("model")]
    assert file.blocks is not None
    assert verify(store.url, capsys)[0] == 0

    at = file.header_nbytes + file.block_nbytes + 5
    good = flip(store, file.name, at)
    code, said = verify(store.url, capsys)
    assert code == 1
    begin, end = at - 5, at - 5 + file.block_nbytes
    assert f"{file.name}: bytes {begin} to {end}" in said
    assert "model.w" in said
    assert verify(store.url, capsys, "--quick")[0] == 0  # which says that it did not read every byte
    store.put(file.name, good, replace=True)

    for name, deep_says in ((file.blocks, "from byte 0 on"), (record.index.name, "is not what was saved")):
        good = flip(store, name, 40)
        for more, says in ((("--quick",), ""), ((), deep_says)):
            code, said = verify(store.url, capsys, *more)
            assert (code, name in said, says in said) == (1, True, True), said
        store.put(name, good, replace=True)

    for name in (file.name, file.blocks, record.index.name):
        good = bytes(store.get(name, limit=1 << 30))
        store.delete(name)
        for more in ((), ("--quick",)):
            code, said = verify(store.url, capsys, *more)
            assert (code, name in said, "missing" in said or "is gone" in said) == (1, True, True), said
        store.put(name, good)
    assert verify(store.url, capsys)[0] == 0


def test_an_encrypted_checkpoint_without_its_key(bucket, capsys):
    """A damaged frame, table, or mark, and a missing file: those are named who cannot decode them, and all at once."""
    store = saved(bucket, "coded", ["aes"])
    record = read_record(store)
    first, second = (file.name for file in record.files)
    sizes = record.at_rest
    code, said = verify(store.url, capsys)
    assert code == 0
    assert "no key was given" in said

    goods = {first: flip(store, first, 100), second: flip(store, second, sizes[second] - 30)}
    code, said = verify(store.url, capsys)
    assert code == 1
    assert "2 problems" in said
    assert f"{first}: bytes 8 to " in said
    table_at = sizes[second] - table_nbytes(2)  # of the header, and of the data
    assert f"{second}: the table of frames has checksum" in said
    assert f"from byte {table_at} on" in said
    code, said = verify(store.url, capsys, "--quick")
    assert (code, first in said, second in said) == (1, False, True)
    for name, good in goods.items():
        store.put(name, good, replace=True)

    good = flip(store, record.index.name, 0)
    code, said = verify(store.url, capsys)
    assert (code, f"{record.index.name}: bytes 0 to 8" in said) == (1, True)
    store.put(record.index.name, good, replace=True)

    store.delete(first)
    for more in ((), ("--quick",)):
        code, said = verify(store.url, capsys, *more)
        assert (code, f"{first}: the file is missing" in said) == (1, True)


def test_files_are_read_at_the_same_time():
    """As many as there are threads, and parts of one file where there are fewer files; each byte once."""
    store, together = MemoryStore(), threading.Barrier(3, timeout=20)

    def meet(verb, name):
        if verb == "read_into" and name.startswith("part"):
            with met:
                once = name not in seen
                seen.add(name)
            if once:
                together.wait()

    met, seen = threading.Lock(), set[str]()
    sk.save({f"part{n}": {"w": torch.randn(1000)} for n in range(3)}, store, codecs=["aes"], options=OPTIONS)
    assert verify_stored(BeforeStore(store, meet), options=sk.Options(io_threads=4)).undecoded == 3


def test_many_batches_of_one_file():
    store = MemoryStore()
    sk.save({"w": torch.randn(9 << 18)}, store, codecs=["aes"], options=OPTIONS)
    [file] = read_record(store).files
    for at in (100, 4 << 20, 8 << 20):
        flip(store, file.name, at)
    with pytest.raises(sk.DamagedCheckpoint) as caught:
        verify_stored(store, options=sk.Options(io_threads=8, host_budget_bytes="16MiB"))
    begins = [int(each.split(": bytes ")[1].split()[0]) for each in caught.value.details["problems"]]
    assert begins == sorted(begins)
    assert [at >> 20 for at in begins] == [0, 3, 7]


def test_a_store_that_fails_is_no_damage():
    """It is raised as it is, whatever else is wrong."""
    store = MemoryStore()
    sk.save(state(), store, codecs=["aes"], options=OPTIONS)
    counting = FaultyStore(store)
    verify_stored(counting)
    for at, each in enumerate(counting.operations):
        if each.startswith(("open", "read_into")):
            with pytest.raises(StorageError):
                verify_stored(FaultyStore(store, "error", at=at))
