"""
What is wrong with the files of a checkpoint, every byte of them read; as far as that can be told without its keys.

What is stored of coded files has digests of its own. So a checkpoint that is encrypted can be checked by those who cannot
read it: what they cannot know is whether somebody who has no key either replaced a file and its digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from shardkeep.errors import BlobNotFound, CheckpointError, DamagedCheckpoint, WrongSize
from shardkeep.format.record import Blob, FileEntry, Record
from shardkeep.layout.coded_store import DecodingStore
from shardkeep.layout.frame_reader import check_size, damaged_frame, damaged_frames, read_table
from shardkeep.plan.ranges import every_block
from shardkeep.run.read import Headers, KeyAt, Reads, damage_of, neighbours, open_checked, read_files

_MOST_RANGES = 20
"""Damaged ranges of one file that are listed; the rest is counted."""


def damage_of_file(
    store: Reads,
    files: Sequence[FileEntry],
    number: int,
    *,
    headers: Headers,
    key_at: KeyAt,
    threads: int,
    window_nbytes: int,
) -> Iterator[CheckpointError]:
    """
    Read all of a file, and go through what is damaged in it.

    Raises:
        DamagedCheckpoint: it is not even as large as it should be, or its header is damaged.

    """
    file = files[number]
    # The real size first: a plan is as long as the record says the file is.
    open_checked(store, file, headers)[0].close()
    coded: list[DamagedCheckpoint] = []
    if isinstance(store, DecodingStore):
        store = store.noting(coded)  # or the first damaged frame would be the only one that is found
    plan = every_block(number, file.nbytes - file.header_nbytes, window_nbytes=window_nbytes)
    damaged: list[int] = []
    read_files(
        store,
        files,
        [plan],
        {},
        key_at=key_at,
        threads=threads,
        window_nbytes=window_nbytes,
        headers=headers,
        damaged=damaged,
    )
    if coded:
        yield from _few(file, [_with_keys(error, file, number, key_at) for error in _once(coded)])
        return
    yield from _few(file, [damage_of(file, number, blocks, key_at) for blocks in neighbours(damaged)])


def _once(errors: list[DamagedCheckpoint]) -> list[DamagedCheckpoint]:
    """Take each frame once, in order: windows may share one."""
    return [*{error.details.get("offset", 0): error for error in sorted(errors, key=_offset)}.values()]


def _offset(error: DamagedCheckpoint) -> int:
    return int(error.details.get("offset", 0))


def _with_keys(error: DamagedCheckpoint, file: FileEntry, number: int, key_at: KeyAt) -> DamagedCheckpoint:
    start, stop = (error.details.get(name, 0) - file.header_nbytes for name in ("plain_start", "plain_stop"))
    keys = key_at(number, start, stop) if stop > 0 else "the header"
    return DamagedCheckpoint(f"{error.message}; they hold {keys}", hint=error.hint, **error.details)


def _few(file: Blob, errors: Sequence[CheckpointError]) -> Iterator[CheckpointError]:
    yield from errors[:_MOST_RANGES]
    if len(errors) > _MOST_RANGES:
        yield DamagedCheckpoint(f"{file.name}: {len(errors) - _MOST_RANGES} more damaged ranges")


def stored_damage(
    store: Reads, record: Record, *, deep: bool, threads: int, window_nbytes: int
) -> Iterator[CheckpointError]:
    """
    Go through what is damaged in the files of a native checkpoint whose keys are not at hand.

    With `deep` every byte is read, else sizes, tables and headers.
    """
    blobs: list[Blob] = [record.index, *record.files]
    for number, blob in enumerate(blobs, -1):
        try:
            if blob.chain is not None:
                yield from _few(blob, list(_stored_damage(store, blob, deep=deep)))
            elif isinstance(blob, FileEntry) and deep:
                yield from damage_of_file(
                    store,
                    record.files,
                    number,
                    headers=Headers(),
                    key_at=lambda *_: "what only the encrypted index tells",
                    threads=threads,
                    window_nbytes=window_nbytes,
                )
            elif isinstance(blob, FileEntry):
                open_checked(store, blob)[0].close()
        except DamagedCheckpoint as exc:
            yield exc


def _stored_damage(store: Reads, blob: Blob, *, deep: bool) -> Iterator[CheckpointError]:
    try:
        reader = store.open(blob.name)
    except BlobNotFound as exc:
        raise WrongSize(f"{blob.name}: the file is missing", hint="restore it from a copy", file=blob.name) from exc
    with closing(reader):
        check_size(reader, blob)
        table = read_table(reader, blob)
        if deep:
            yield from (damaged_frame(blob, table, frame) for frame in damaged_frames(reader, blob, table))
