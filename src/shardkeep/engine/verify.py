"""
Find damage in the files of a checkpoint by reading every byte, with or without its keys.

The stored form of coded files has digests of its own, so an encrypted checkpoint can be verified without the key. What that
cannot detect is a file that was replaced together with its digests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import SCRATCH_NBYTES, FrameReader, collecting_damage, read_table
from shardkeep.engine.reader import (
    DigestCache,
    KeysAt,
    adjacent_blocks,
    damage_of,
    open_checked,
    open_sized,
    read_files,
)
from shardkeep.errors import CheckpointError, DamagedCheckpoint
from shardkeep.format.record import Blob, FileEntry, Record
from shardkeep.plan.load_plan import every_block
from shardkeep.storage.base import ReadableStore
from shardkeep.storage.buffers import ScratchPool

_MOST_RANGES = 20
"""How many damaged ranges of a file are listed; the rest are counted."""
_STEP_NBYTES = 64 << 20
"""How much of a coded file a thread verifies at a time."""


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
    """Read a whole file and yield the damage in it; raise if its size is wrong, or its header is damaged."""
    file = files[number]
    # The size must be checked first, because the plan relies on the size in the record.
    open_checked(store, file, digests)[0].close()
    coded: list[DamagedCheckpoint] = []
    damaged: list[int] = []
    read_files(
        collecting_damage(store, coded),  # otherwise verification would stop at the first damaged frame
        files,
        [every_block(number, file.data_nbytes, window_nbytes=window_nbytes)],
        {},
        keys_at=keys_at,
        threads=threads,
        window_nbytes=window_nbytes,
        digests=digests,
        damaged=damaged,
    )
    if not coded:
        yield from _few(file, [damage_of(file, number, blocks, keys_at) for blocks in adjacent_blocks(damaged)])
        return
    errors: list[CheckpointError] = []
    for error in _by_offset(coded):
        start, stop = (error.details.get(name, 0) - file.header_nbytes for name in ("plain_start", "plain_stop"))
        keys = keys_at(number, start, stop) if stop > 0 else "the header"
        errors.append(DamagedCheckpoint(f"{error.message}; they hold {keys}", hint=error.hint, **error.details))
    yield from _few(file, errors)


def _few(file: Blob, errors: Sequence[CheckpointError]) -> Iterator[CheckpointError]:
    yield from errors[:_MOST_RANGES]
    if len(errors) > _MOST_RANGES:
        yield DamagedCheckpoint(f"{file.name}: {len(errors) - _MOST_RANGES} more damaged ranges")


def stored_damage(
    store: ReadableStore, record: Record, *, deep: bool, threads: int, window_nbytes: int
) -> Iterator[CheckpointError]:
    """
    Yield the damage in the files of a native checkpoint whose keys are not available.

    With `deep` every byte is read, else only sizes, tables and headers. `threads` are divided over files, and over the
    parts of large files.
    """
    blobs: list[Blob] = [record.index, *record.files]
    at_once = min(threads, len(blobs))
    each, over = threads // at_once, threading.Event()

    def damage(number: int, blob: Blob) -> Iterator[CheckpointError]:
        if blob.chain is not None:
            yield from _few(blob, _coded_damage(store, blob, each if deep else 0, over))
        elif isinstance(blob, FileEntry) and deep:
            yield from damage_of_file(
                store,
                record.files,
                number,
                digests={},
                keys_at=lambda *_: "tensors that only the encrypted index names",
                threads=each,
                window_nbytes=window_nbytes,
            )
        elif isinstance(blob, FileEntry):
            open_checked(store, blob)[0].close()

    def look(number: int, blob: Blob) -> list[CheckpointError]:
        try:
            return list(damage(number, blob))
        except DamagedCheckpoint as exc:
            return [exc]

    with ThreadPoolExecutor(at_once, thread_name_prefix="shardkeep-verify") as pool:
        try:
            for found in pool.map(look, range(-1, len(record.files)), blobs):
                yield from found
        finally:  # if the store failed, or the caller stops early, the rest is not read
            over.set()
            pool.shutdown(cancel_futures=True)


def _coded_damage(store: ReadableStore, blob: Blob, threads: int, over: threading.Event) -> list[DamagedCheckpoint]:
    """Verify a coded file: all of its frames, or with 0 threads only its table."""
    errors: list[DamagedCheckpoint] = []
    with closing(open_sized(store, blob.name, dict(blob.at_rest)[blob.name])) as stored:
        table = read_table(stored, blob, store)
        reader = FrameReader(stored, blob, table, CodecChain([], []), ScratchPool(SCRATCH_NBYTES), store, errors)

        def look(start: int) -> None:
            if not over.is_set():
                try:
                    reader.check(start, min(start + _STEP_NBYTES, blob.nbytes))
                except BaseException as error:
                    if not isinstance(error, DamagedCheckpoint):  # the store failed, so the rest need not be read
                        over.set()
                    raise

        if threads:
            with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep-frames") as pool:
                list(pool.map(look, range(0, blob.nbytes, _STEP_NBYTES)))
    return _by_offset(errors)


def _by_offset(errors: Sequence[DamagedCheckpoint]) -> list[DamagedCheckpoint]:
    """Sort errors, and drop copies: two reads may share a frame."""
    found = {int(error.details.get("offset", 0)): error for error in errors}
    return [error for _, error in sorted(found.items())]
