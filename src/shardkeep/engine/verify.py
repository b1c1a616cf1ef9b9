"""
What is wrong with the files of a checkpoint, every byte of them read; as far as that can be told without its keys.

What is stored of coded files has digests of its own. So a checkpoint that is encrypted can be checked by those who cannot
read it: what they cannot know is whether somebody who has no key either replaced a file and its digests.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from shardkeep.codecs.coded_store import collecting_damage, damaged_frame, damaged_frames, read_table
from shardkeep.engine.reader import (
    DigestCache,
    KeysAt,
    ReadableStore,
    adjacent_blocks,
    damage_of,
    open_checked,
    open_sized,
    read_files,
)
from shardkeep.errors import CheckpointError, DamagedCheckpoint
from shardkeep.format.boxes import IntArray
from shardkeep.format.frames import FrameTable
from shardkeep.format.record import Blob, FileEntry, Record
from shardkeep.plan.load_plan import every_block

_MOST_RANGES = 20
"""Damaged ranges of one file that are listed; the rest is counted."""
_BATCH = 64
"""Frames, of a megabyte or less, that one thread checks before it takes others."""
_SAYS_WHERE = re.compile(r"\bbytes? \d")
"""More than the word, which may be a part of a file's name."""


def damage_of_file(
    store: ReadableStore,
    files: Sequence[FileEntry],
    number: int,
    *,
    digests: DigestCache,
    keys_at: KeysAt,
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
    try:
        open_checked(store, file, digests)[0].close()
    except DamagedCheckpoint as exc:
        raise _placed(exc) from exc.__cause__
    coded: list[DamagedCheckpoint] = []
    store = collecting_damage(store, coded)  # otherwise verification would stop at the first damaged frame
    plan = every_block(number, file.data_nbytes, window_nbytes=window_nbytes)
    damaged: list[int] = []
    read_files(
        store,
        files,
        [plan],
        {},
        keys_at=keys_at,
        threads=threads,
        window_nbytes=window_nbytes,
        digests=digests,
        damaged=damaged,
    )
    if coded:
        yield from _few(file, [_with_keys(error, file, number, keys_at) for error in _once(coded)])
        return
    yield from _few(file, [damage_of(file, number, blocks, keys_at) for blocks in adjacent_blocks(damaged)])


def _placed(error: DamagedCheckpoint) -> DamagedCheckpoint:
    """Say in words where in the file it is, of what has one digest for many bytes: headers, tables, digests."""
    offset = error.details.get("offset")
    if offset is None or _SAYS_WHERE.search(error.message):
        return error
    return type(error)(f"{error.message}, from byte {offset} on", hint=error.hint, **error.details)


def _once(errors: list[DamagedCheckpoint]) -> list[DamagedCheckpoint]:
    """Take each frame once, in order: windows may share one."""
    return [*{error.details.get("offset", 0): error for error in sorted(errors, key=_offset)}.values()]


def _offset(error: DamagedCheckpoint) -> int:
    return int(error.details.get("offset", 0))


def _with_keys(error: DamagedCheckpoint, file: FileEntry, number: int, keys_at: KeysAt) -> DamagedCheckpoint:
    start, stop = (error.details.get(name, 0) - file.header_nbytes for name in ("plain_start", "plain_stop"))
    keys = keys_at(number, start, stop) if stop > 0 else "the header"
    return DamagedCheckpoint(f"{error.message}; they hold {keys}", hint=error.hint, **error.details)


def _few(file: Blob, errors: Sequence[CheckpointError]) -> Iterator[CheckpointError]:
    yield from errors[:_MOST_RANGES]
    if len(errors) > _MOST_RANGES:
        yield DamagedCheckpoint(f"{file.name}: {len(errors) - _MOST_RANGES} more damaged ranges")


def stored_damage(
    store: ReadableStore, record: Record, *, deep: bool, threads: int, window_nbytes: int
) -> Iterator[CheckpointError]:
    """
    Go through what is damaged in the files of a native checkpoint whose keys are not at hand.

    With `deep` every byte is read, else sizes, tables and headers. Files are read by several threads, and so are the parts
    of one that is large, as many in all as `threads`.
    """
    blobs: list[Blob] = [record.index, *record.files]
    at_once = min(threads, len(blobs))
    each, over = threads // at_once, threading.Event()

    def look(number: int, blob: Blob) -> list[CheckpointError]:
        try:
            if blob.chain is not None:
                return list(_few(blob, _stored_damage(store, blob, each if deep else 0, over)))
            if isinstance(blob, FileEntry) and deep:
                return list(
                    damage_of_file(
                        store,
                        record.files,
                        number,
                        digests=DigestCache(),
                        keys_at=_no_key,
                        threads=each,
                        window_nbytes=window_nbytes,
                    )
                )
            if isinstance(blob, FileEntry):
                open_checked(store, blob)[0].close()
        except DamagedCheckpoint as exc:
            return [_placed(exc)]
        return []

    with ThreadPoolExecutor(at_once, thread_name_prefix="shardkeep-verify") as pool:
        try:
            for found in pool.map(look, range(-1, len(record.files)), blobs):
                yield from found
        finally:  # where the store failed, or nobody wants to know more, the rest is not read first
            over.set()
            pool.shutdown(cancel_futures=True)


def _no_key(*_: object) -> str:
    return "what only the encrypted index tells"


def _stored_damage(store: ReadableStore, blob: Blob, threads: int, over: threading.Event) -> list[CheckpointError]:
    """Check a coded file, all of its frames by so many threads; by none: only its table."""
    with closing(open_sized(store, blob.name, dict(blob.at_rest)[blob.name])) as reader:
        table = read_table(reader, blob, store)

        def look(rows: IntArray) -> list[int]:
            if over.is_set():
                return []
            try:
                return [int(rows[row]) for row in damaged_frames(reader, blob, _some(table, rows), store)]
            except DamagedCheckpoint:
                raise
            except BaseException:  # the store failed: nothing is known, and the rest need not be read
                over.set()
                raise

        if not threads:
            return []
        with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep-frames") as pool:
            damaged = [frame for found in pool.map(look, _batches(table)) for frame in found]
    return [damaged_frame(blob, table, frame) for frame in damaged]


def _batches(table: FrameTable) -> list[IntArray]:
    """Share out frames as they lie in a file; one of no frames is looked at, too."""
    order = np.argsort(table.stored_start, kind="stable")
    return [order[at : at + _BATCH] for at in range(0, max(1, len(order)), _BATCH)]


def _some(table: FrameTable, rows: IntArray) -> FrameTable:
    return FrameTable(
        start=table.start[rows],
        nbytes=table.nbytes[rows],
        stored_start=table.stored_start[rows],
        stored_nbytes=table.stored_nbytes[rows],
        number=table.number[rows],
        digests=b"".join(table.digest(int(row)) for row in rows),
    )
