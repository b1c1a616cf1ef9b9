"""
Opening files that `torch.save` wrote: checked, mapped where that can be, and without running anything they name.
"""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

import torch

from shardkeep.errors import CheckpointNotFound, ChecksumMismatch, MalformedFile, PickleRefused
from shardkeep.format import crc
from shardkeep.options import Options
from shardkeep.protocol.objects import load_plain
from shardkeep.run.workers import run_workers, window_for
from shardkeep.state.toolkit.trees import flatten_state_dict
from shardkeep.store.files import Descriptors, open_files, read_at, storage_errors

_ZIP = b"PK\3\4"
_LOCAL_NBYTES = 30


class _Entry(NamedTuple):
    name: str
    start: int
    nbytes: int
    crc: int


def load_torch_file(path: str | os.PathLike[str]) -> Any:
    """
    Return what a file of `torch.save` holds, on the CPU. Tensors are mapped: their bytes are read when looked at.

    Every entry of the file is compared with its checksum first. Files of the form that torch wrote before version 1.6
    have none, and are read into memory.

    Raises:
        CheckpointNotFound: there is no such file.
        PickleRefused: it names a class that is not known to be safe, and the user did not say that any is.
        ChecksumMismatch: its bytes are not those that were written.
        MalformedFile: it is no file of `torch.save`.

    """
    where = os.path.abspath(os.fspath(path))
    if not os.path.isfile(where):
        raise CheckpointNotFound(f"{where}: there is no such file", file=where)
    with storage_errors("cannot read", where):
        files = open_files(where, os.O_RDONLY, direct=False, follow_links=True)
        with closing(files):
            begin = bytearray(len(_ZIP))
            mapped = read_at(files.buffered, memoryview(begin), 0) == len(_ZIP) and begin == _ZIP
            if mapped:
                _check(files, _entries(files, where), where)
    return _load(where, mapped=mapped)


def _load(where: str, *, mapped: bool, device: str = "cpu") -> Any:
    how: dict[str, Any] = {"map_location": device, "mmap": mapped and device == "cpu"}
    try:
        if Options().allow_pickle:
            return torch.load(where, weights_only=False, **how)
        if mapped:  # others are several pickles in a row, which only torch's own reader tells apart
            try:
                return load_plain(where, **how)
            except PickleRefused:
                pass
        return torch.load(where, weights_only=True, **how)
    except pickle.UnpicklingError as error:
        said = next((line.strip() for line in str(error).splitlines() if "nsupported" in line), None)
        if said is None:
            raise MalformedFile(f"{where}: not a file that torch.save wrote: {error}", file=where) from error
        raise PickleRefused(
            f"{where} is a pickle that is not known to be safe: {said}",
            hint="if you trust the file: torch.serialization.add_safe_globals([that class]) first,"
            " or SHARDKEEP_ALLOW_PICKLE=1 in the environment for any",
            file=where,
        ) from error
    except Exception as error:  # torch raises whatever the contents of a broken file lead to
        raise MalformedFile(f"{where}: not a file that torch.save wrote: {error!r}", file=where) from error


def _entries(files: Descriptors, where: str) -> list[_Entry]:
    """Return what the file's directory says, if it can be one of torch's."""
    try:
        with zipfile.ZipFile(where) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, IndexError) as error:
        raise MalformedFile(
            f"{where}: no archive of torch.save, or one that was cut short: {error}",
            hint="copy the file again",
            file=where,
        ) from error
    names = [each.filename for each in listed]
    # Torch would take a compiled program for what it is, and load it with another loader.
    program = any(name.endswith("/constants.pkl") for name in names)
    if program or len(set(names)) < len(names) or any(each.compress_type for each in listed):
        raise MalformedFile(f"{where}: an archive that torch.save did not write", file=where)
    return [_entry(files, each, where) for each in listed]


def _entry(files: Descriptors, listed: zipfile.ZipInfo, where: str) -> _Entry:
    header = bytearray(_LOCAL_NBYTES)
    inside = 0 <= listed.header_offset < files.nbytes
    got = read_at(files.buffered, memoryview(header), listed.header_offset) if inside else 0
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = listed.header_offset + _LOCAL_NBYTES + lengths
    if got < _LOCAL_NBYTES or header[:4] != _ZIP or start + listed.file_size > files.nbytes:
        raise MalformedFile(f"{where}: {listed.filename} is not where the directory says", file=where)
    return _Entry(listed.filename, start, listed.file_size, listed.CRC)


def _check(files: Descriptors, entries: list[_Entry], where: str) -> None:
    """Read everything once, on several threads, and compare it with the checksums; it stays at hand for the next read."""
    options = Options()
    threads, window = window_for(options.io_threads, options.host_budget_bytes)
    found: dict[tuple[int, int], int] = {}

    def pieces() -> Iterator[tuple[int, int, int]]:
        for number, entry in enumerate(entries):
            # Torch can be told to write none: then they are 0.
            for at in range(0, entry.nbytes if entry.crc else 0, window):
                yield number, at, min(window, entry.nbytes - at)

    def work(piece: tuple[int, int, int], buffer: memoryview) -> bool:
        number, at, nbytes = piece
        view, done = buffer[:nbytes], 0
        while done < nbytes:
            got = read_at(files.buffered, view[done:], entries[number].start + at + done)
            if not got:
                raise MalformedFile(f"{where}: the file was cut short while it was read", file=where)
            done += got
        found[number, at] = zlib.crc32(view)
        return True

    run_workers(pieces(), work, threads=threads, buffer_nbytes=window)
    sums: dict[int, int] = {}
    for (number, at), each in sorted(found.items()):
        nbytes = min(window, entries[number].nbytes - at)
        sums[number] = crc.combine(sums[number], each, nbytes) if number in sums else each
    for number, got_crc in sums.items():
        entry = entries[number]
        if got_crc != entry.crc:
            keys = _keys_at(where, entry.start)
            of_keys = f" ({', '.join(map(repr, keys))})" if keys else ""
            raise ChecksumMismatch(
                f"{where}: {entry.name}{of_keys} has the checksum {got_crc:08x}, the file says {entry.crc:08x}",
                hint="the file was damaged after it was written: copy it again",
                file=where,
                keys=keys,
                offset=entry.start,
            )


def _keys_at(where: str, start: int) -> list[str]:
    """Return the keys of the tensors whose bytes begin here, if they can be found out."""
    with suppress(Exception):  # the file is damaged, and this is only for the message
        flat, _ = flatten_state_dict(_load(where, mapped=True, device="meta"))
        return [
            key
            for key, value in flat.items()
            if isinstance(value, torch.Tensor) and getattr(value.untyped_storage(), "_checkpoint_offset", None) == start
        ]
    return []
