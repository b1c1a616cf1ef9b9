"""
Opening files that `torch.save` wrote: checked, mapped where that can be, and without running anything they name.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

import torch

from shardkeep.errors import BlobNotFound, CheckpointNotFound, ChecksumMismatch, MalformedFile, PickleRefused
from shardkeep.exchange.archive_blob import is_blob, local_path, open_blob
from shardkeep.format import crc
from shardkeep.options import Options
from shardkeep.protocol.objects import load_plain
from shardkeep.run.workers import run_workers, window_for
from shardkeep.state.toolkit.trees import flatten_state_dict
from shardkeep.storages.blob_streams import BlobInput
from shardkeep.store.paths import PathStore
from shardkeep.store.protocol import BlobReader

_ZIP = b"PK\3\4"
_LOCAL_NBYTES = 30
_READ_AHEAD_NBYTES = 1 << 20


class _Entry(NamedTuple):
    name: str
    start: int
    nbytes: int
    crc: int


def load_torch_file(path: str | os.PathLike[str]) -> Any:
    """
    Return what a file of `torch.save` holds, on the CPU. Tensors are mapped: their bytes are read when looked at.

    Every entry of the file is compared with its checksum first. Files of the form that torch wrote before version 1.6
    have none, and are read into memory. So is a file of a store, given by its URL.

    Raises:
        CheckpointNotFound: there is no such file.
        PickleRefused: it names a class that is not known to be safe, and the user did not say that any is.
        ChecksumMismatch: its bytes are not those that were written.
        MalformedFile: it is no file of `torch.save`.

    """
    blob = isinstance(path, str) and is_blob(path)
    where = os.fspath(path) if blob else os.path.abspath(local_path(path))
    try:
        if not blob and not os.path.isfile(where):
            raise BlobNotFound(f"{where}: there is no such file", file=where)
        reader = open_blob(where) if blob else PathStore(direct=False).open(where)
    except BlobNotFound as exc:
        raise CheckpointNotFound(f"{where}: there is no such file", file=where) from exc
    with closing(reader):
        begin = bytearray(min(len(_ZIP), reader.nbytes))
        reader.read_into(0, memoryview(begin))
        archive = begin == _ZIP
        if archive:
            _check(reader, _entries(reader, where), where)
        return _load(where, archive=archive, blob=reader if blob else None)


def _load(where: str, *, archive: bool, blob: BlobReader | None = None, device: str = "cpu") -> Any:
    how: dict[str, Any] = {"map_location": device, "mmap": archive and device == "cpu" and blob is None}

    def source() -> Any:
        return where if blob is None else _stream(blob)

    try:
        if Options().allow_pickle:
            return torch.load(source(), weights_only=False, **how)
        if archive:  # others are several pickles in a row, which only torch's own reader tells apart
            try:
                return load_plain(source(), **how)
            except PickleRefused:
                pass
        return torch.load(source(), weights_only=True, **how)
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


def _stream(reader: BlobReader) -> io.BufferedReader:
    return io.BufferedReader(BlobInput(reader, closes=False), _READ_AHEAD_NBYTES)


def _entries(reader: BlobReader, where: str) -> list[_Entry]:
    """Return what the file's directory says, if it can be one of torch's."""
    try:
        with zipfile.ZipFile(_stream(reader)) as archive:
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
    return [_entry(reader, each, where) for each in listed]


def _entry(reader: BlobReader, listed: zipfile.ZipInfo, where: str) -> _Entry:
    header = bytearray(_LOCAL_NBYTES)
    if 0 <= listed.header_offset <= reader.nbytes - _LOCAL_NBYTES:
        reader.read_into(listed.header_offset, memoryview(header))
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = listed.header_offset + _LOCAL_NBYTES + lengths
    if header[:4] != _ZIP or start + listed.file_size > reader.nbytes:
        raise MalformedFile(f"{where}: {listed.filename} is not where the directory says", file=where)
    return _Entry(listed.filename, start, listed.file_size, listed.CRC)


def _check(reader: BlobReader, entries: list[_Entry], where: str) -> None:
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
        view = buffer[:nbytes]
        reader.read_into(entries[number].start + at, view)
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
            keys = _keys_at(where, reader, entry.start)
            of_keys = f" ({', '.join(map(repr, keys))})" if keys else ""
            raise ChecksumMismatch(
                f"{where}: {entry.name}{of_keys} has the checksum {got_crc:08x}, the file says {entry.crc:08x}",
                hint="the file was damaged after it was written: copy it again",
                file=where,
                keys=keys,
                offset=entry.start,
            )


def _keys_at(where: str, reader: BlobReader, start: int) -> list[str]:
    """Return the keys of the tensors whose bytes begin here, if they can be found out."""
    with suppress(Exception):  # the file is damaged, and this is only for the message
        flat, _ = flatten_state_dict(_load(where, archive=True, blob=reader if is_blob(where) else None, device="meta"))
        return [
            key
            for key, value in flat.items()
            if isinstance(value, torch.Tensor) and getattr(value.untyped_storage(), "_checkpoint_offset", None) == start
        ]
    return []
