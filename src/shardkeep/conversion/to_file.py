"""
One file that `torch.load` opens, written from an opened checkpoint: a flat dict of tensors and plain values.

The file is laid out first and then written in windows. A digest of each tensor is taken as its bytes are read; before
the file gets its name it is read back and compared with them; in a store, where it has it already, right after.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Any

import xxhash

from shardkeep.conversion import torch_archive as archive_file
from shardkeep.conversion.pipeline import PartReader, Progress
from shardkeep.conversion.select import Selection
from shardkeep.conversion.torch_archive import TensorPlaceholder, file_exists, pickle_state
from shardkeep.engine.reader import Source
from shardkeep.errors import CheckpointExists, ChecksumMismatch, StorageError, UnsupportedLeaf
from shardkeep.format.index import Index
from shardkeep.format.torch_zip import ArchiveLayout
from shardkeep.format.values import decode_value
from shardkeep.options import Options
from shardkeep.storage.base import BlobReader, preferred_requests


def write_torch_file(
    to: str, picked: Selection, source: Source, *, overwrite: bool, options: Options, progress: Progress | None
) -> tuple[int, set[str]]:
    """
    Write the file; it replaces what is at its place once it is complete, if `overwrite` was given.

    Returns:
        Its size, and keys of tensors of which finite numbers became infinite when they were converted.

    Raises:
        CheckpointExists: something is there.

    """
    path = archive_file.destination(to, make_directory=True)
    if file_exists(path) and not overwrite:
        raise _taken(to)
    layout, names = _layout(picked, source, options)
    threads = preferred_requests(source.store, options.io_threads)
    gathering = PartReader(source, threads=threads, budget_nbytes=options.host_budget_bytes // 2)
    done, total = [0], sum(layout.sizes)
    hashes = [xxhash.xxh3_128() for _ in names]

    def fill(parts: list[archive_file.StoragePart]) -> None:
        gathering.fill([(picked.tensors[names[each.storage]], each.start, each.stop, each.into) for each in parts])
        for each in parts:
            hashes[each.storage].update(each.into)
        if progress is not None:
            done[0] += sum(len(each.into) for each in parts)
            progress(done[0], total)

    def check(reader: BlobReader) -> None:
        buffer = memoryview(bytearray(archive_file.window_nbytes(options.host_budget_bytes)))
        for name, start, nbytes, meant in zip(names, layout.starts, layout.sizes, hashes, strict=True):
            found = xxhash.xxh3_128()
            for at in range(0, nbytes, len(buffer)):
                piece = buffer[: min(len(buffer), nbytes - at)]
                reader.read_into(start + at, piece)
                found.update(piece)
            if found.digest() != meant.digest():
                raise ChecksumMismatch(
                    f"{to}: {name!r} at offset {start} was not written as it was read",
                    hint="the disk or its driver is at fault: write to another one",
                    key=name,
                    file=to,
                    offset=start,
                )

    try:
        archive_file.write_archive(
            path, layout, fill, replace=overwrite, check=check, budget_nbytes=options.host_budget_bytes
        )
    except StorageError as exc:
        if exc.errno == errno.EEXIST:
            raise _taken(to) from exc
        raise
    return layout.nbytes, gathering.infinite


def _layout(picked: Selection, source: Source, options: Options) -> tuple[ArchiveLayout, list[str]]:
    """Return where everything goes, and the name of the tensor of each storage."""
    stand_ins = {name: TensorPlaceholder(name, part.box.sizes, part.dtype) for name, part in picked.tensors.items()}
    state: dict[str, Any] = {}
    for name in picked.names:
        if name in picked.values:
            state[name] = _value(source.index, picked.values[name], options)
        else:
            # The same stand-in for names that are tied: torch.load gives one tensor under both.
            state[name] = stand_ins[picked.ties.get(name, name)]
    pickled = pickle_state(state)
    names = [each.key for each in pickled.storages if isinstance(each, TensorPlaceholder)]
    return ArchiveLayout(pickled.data, [picked.tensors[name].nbytes for name in names]), names


def _value(index: Index, key: str, options: Options) -> Any:
    value = decode_value(index.value_data.raw(index.value_rows[key]), key=key, allow_pickle=options.allow_pickle)
    if not _is_plain(value):
        raise UnsupportedLeaf(
            f"{key!r} is or holds what torch.load does not open with weights_only=True: a {type(value).__name__}",
            hint=f"leave it out: exclude={key!r}",
            key=key,
        )
    return value


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _taken(to: str) -> CheckpointExists:
    return CheckpointExists(f"{to} is already there", hint="pass overwrite=True (--overwrite) to replace it")
