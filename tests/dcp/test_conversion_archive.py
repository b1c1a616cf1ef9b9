"""Archives of torch.save with many and with huge storages, as torch and Python's zipfile read them."""

import multiprocessing
import os
import pickle
import signal
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.conversion.pipeline import TensorPart
from shardkeep.conversion.to_file import Pickled, destination, pickle_state, write_archive
from shardkeep.format.boxes import whole
from shardkeep.format.data_file import combine_crc32
from shardkeep.format.dtypes import of_torch
from shardkeep.format.torch_zip import STORAGE_ALIGNMENT, ArchiveLayout

U8 = of_torch(torch.uint8)
ARCHIVE = Pickled(pickle.dumps({}), [TensorPart("x", 0, whole((10_000,)), U8)])


def zeros_crc(nbytes):
    """The checksum of that many zeros, without going through them."""
    whole, power = 0, (zlib.crc32(b"\0"), 1)
    while nbytes:
        value, length = power
        if nbytes & 1:
            whole = combine_crc32(whole, value, length) if whole else value
        power = combine_crc32(value, value, length), 2 * length
        nbytes >>= 1
    return whole


def write_sparse(path, layout, sizes, values):
    """Write an archive whose storages are zeros but for a first byte each: the zeros are holes of the file."""
    sums = []
    for value, nbytes in zip(values, sizes, strict=True):
        rest = zeros_crc(nbytes - 1)
        sums.append(
            combine_crc32(zlib.crc32(bytes([value])), rest, nbytes - 1) if nbytes > 1 else zlib.crc32(bytes([value]))
        )
    with open(path, "wb") as file:
        for number, value in enumerate(values):
            file.write(layout.before(number, sums))
            assert file.tell() == layout.starts[number]
            file.write(bytes([value]))
            file.seek(layout.starts[number] + sizes[number])
        file.write(layout.before(len(sizes), sums))
        assert file.tell() == layout.nbytes


def test_storages_of_more_than_four_gigabytes_and_beyond_them(tmp_path):
    sizes = [5 << 30, 3, 1 << 32, 7, (1 << 32) - 1]
    state = {str(number): TensorPart(str(number), 0, whole((nbytes,)), U8) for number, nbytes in enumerate(sizes)}
    pickled = pickle_state(state)
    path = tmp_path / "file.pt"
    write_sparse(path, ArchiveLayout(pickled.data, sizes), sizes, [1, 2, 3, 4, 5])
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert [value.shape[0] for value in loaded.values()] == sizes
    assert [int(value[0]) for value in loaded.values()] == [1, 2, 3, 4, 5]
    assert [int(value[-1]) for value in loaded.values()] == [0, 0, 0, 0, 0]
    with zipfile.ZipFile(path) as archive:
        assert [info.file_size for info in archive.infolist()[3:]] == sizes
        for number in (1, 3):
            assert archive.read(f"archive/data/{number}")[0] == number + 1
        with archive.open("archive/data/2") as large:
            assert large.read(2) == b"\3\0"


def test_more_storages_than_two_bytes_can_count(tmp_path):
    count = 70_000
    pickled = pickle_state({"all": [TensorPart("x", 0, whole((1,)), U8) for _ in range(count)]})
    number_of = {id(storage): number for number, storage in enumerate(pickled.storages)}
    write_archive(
        destination(tmp_path / "file.pt"),
        pickled,
        lambda parts: [part.into.__setitem__(0, number_of[id(part.part)] % 251) for part in parts],
    )
    # What torch.load reads records with; it takes its time over so many tensors.
    reader = torch._C.PyTorchFileReader(str(tmp_path / "file.pt"))
    for number in (0, 1, 65_535, 65_536, count - 1):
        assert reader.get_record(f"data/{number}") == bytes([number % 251])
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert len(archive.namelist()) == count + 3
        assert archive.read(f"archive/data/{count - 1}") == bytes([(count - 1) % 251])


@settings(max_examples=60, deadline=None)
@given(storages=st.lists(st.binary(max_size=300), max_size=12), pickled=st.binary(max_size=200))
def test_any_archive_is_one_row_of_bytes(tmp_path_factory, storages, pickled):
    """Every storage stands at its multiple of 64, and zipfile finds all of it intact."""
    layout = ArchiveLayout(pickled, [len(each) for each in storages])
    sums = [zlib.crc32(each) for each in storages]
    made = b""
    for number, each in enumerate(storages):
        made += layout.before(number, sums)
        assert (len(made), len(made) % STORAGE_ALIGNMENT) == (layout.starts[number], 0)
        made += each
    made += layout.before(len(storages), sums)
    assert len(made) == layout.nbytes
    path = tmp_path_factory.mktemp("archive") / "file.zip"
    path.write_bytes(made)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data.pkl") == pickled
        assert [archive.read(f"archive/data/{number}") for number in range(len(storages))] == storages


@pytest.mark.parametrize("at", ["fill", "finish"])
def test_a_failure_leaves_what_was_there(tmp_path, at, monkeypatch):
    """While the file is filled, or when it is to take its place: the old one stays, and nothing beside it."""
    path = tmp_path / "file.pt"
    path.write_bytes(b"old")

    def fill(parts):
        if at == "fill":
            raise KeyboardInterrupt

    def no_replace(src, dst):
        raise PermissionError(13, "not allowed")

    if at == "finish":
        monkeypatch.setattr(os, "replace", no_replace)
    with pytest.raises((KeyboardInterrupt, OSError)):
        write_archive(destination(path), ARCHIVE, fill)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.pt"]


def unfinished(folder):
    return {name for name in os.listdir(folder) if name.startswith(".")}


def writing(path, fill, *args):
    process = multiprocessing.get_context("fork").Process(
        target=write_archive, args=(destination(path), ARCHIVE, lambda parts: fill(parts, *args))
    )
    process.start()
    return process


def die(parts):
    os.kill(os.getpid(), signal.SIGKILL)


def wait(parts, pipe):
    pipe.send("here")
    pipe.recv()
    parts[0].into[:] = b"2" * len(parts[0].into)


def test_what_killed_processes_left_is_removed(tmp_path, monkeypatch):
    """By the next conversion into the directory, also one that fails; a process of another machine may be alive."""
    for _ in range(2):
        process = writing(tmp_path / "file.pt", die)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    left = unfinished(tmp_path)
    assert len(left) == 1, "the second has removed what the first left"
    with monkeypatch.context() as changed:
        changed.setattr("shardkeep.storage.local.host_identity", lambda: "another")
        write_archive(destination(tmp_path / "file.pt"), ARCHIVE, lambda parts: None)
    assert unfinished(tmp_path) == left
    with pytest.raises(ZeroDivisionError):
        write_archive(destination(tmp_path / "file.pt"), ARCHIVE, lambda parts: 1 // 0)
    assert os.listdir(tmp_path) == ["file.pt"]


def test_what_living_processes_write_is_theirs(tmp_path):
    path = tmp_path / "file.pt"
    here, there = multiprocessing.get_context("fork").Pipe()
    process = writing(path, wait, there)
    assert here.recv() == "here"
    before = unfinished(tmp_path)
    assert len(before) == 1
    write_archive(destination(path), ARCHIVE, lambda parts: parts[0].into.__setitem__(slice(None), b"1" * 10_000))
    assert unfinished(tmp_path) == before
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/0") == b"1" * 10_000
    here.send("go on")
    process.join()
    assert process.exitcode == 0
    assert os.listdir(tmp_path) == ["file.pt"]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/0") == b"2" * 10_000
