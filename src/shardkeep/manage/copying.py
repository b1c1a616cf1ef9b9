"""
Files of a checkpoint from one store to another, as they are stored, every byte checked on the way.

They go in windows, several at once, within a budget of memory. What lies in the target already is read there and checked
against the same digests: what is sound is not copied again, whatever is not is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from shardkeep.errors import DamagedCheckpoint, SaveCancelled, WrongSize
from shardkeep.format.checksum import digest
from shardkeep.format.record import Record
from shardkeep.manage.proofs import Piece, Proof, open_sized, prove
from shardkeep.run.workers import Consequence, run_workers, window_for
from shardkeep.store.protocol import BlobReader, BlobWriter, Store, requests_of


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of the machine copying takes."""

    threads: int
    """Where the stores do not mind."""
    budget_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What copying did."""

    nbytes: int
    """That were copied."""
    found_nbytes: int
    """That were there already, and are sound."""


def copy_blobs(
    source: Store, target: Store, record: Record, names: Sequence[str], limits: Limits, wanted: Callable[[], bool]
) -> Copied:
    """
    Copy files of a checkpoint, and make them durable; those that are in the target already are only checked.

    Args:
        source: where the checkpoint is.
        target: where to; nobody else writes there.
        record: of the checkpoint.
        names: which of its files.
        limits: threads and memory.
        wanted: is asked now and then whether to go on.

    Raises:
        DamagedCheckpoint: the source is not what was saved.
        SaveCancelled: it was not to go on.

    """
    sizes = record.at_rest
    there = {info.name: info.nbytes for info in target.list()}
    proofs = [prove(source, record, name) for name in names]
    sound = _sound_ones(target, [proof for proof in proofs if there.get(proof.name) == proof.nbytes], limits, wanted)
    for name in set(names).difference(sound).intersection(there):
        target.delete(name)
    rest = [proof for proof in proofs if proof.name not in sound]
    _Pass(source, target, wanted).run(rest, limits)
    found = sum(sizes[name] for name in sound)
    return Copied(nbytes=sum(sizes[name] for name in names) - found, found_nbytes=found)


def _sound_ones(store: Store, proofs: Sequence[Proof], limits: Limits, wanted: Callable[[], bool]) -> set[str]:
    """Name those that are in a store as they must be."""
    check = _Pass(store, None, wanted)
    check.run(proofs, limits)
    return {proof.name for proof in proofs} - check.damaged


class _File:
    """A file on its way."""

    def __init__(self, proof: Proof, windows: int, reader: BlobReader, writer: BlobWriter | None) -> None:
        self.proof = proof
        self.reader = reader
        self.writer = writer
        self.left = windows


class _Pass:
    """One reading of files, which are written elsewhere, or only checked."""

    def __init__(self, source: Store, target: Store | None, wanted: Callable[[], bool]) -> None:
        self.damaged: set[str] = set()
        """Those that are not as they must be, where they are only checked."""
        self._source = source
        self._target = target
        self._wanted = wanted
        self._lock = threading.Lock()
        self._open: dict[str, _File] = {}
        self._failed = False

    def run(self, proofs: Sequence[Proof], limits: Limits) -> None:
        """Go through all files."""
        if not proofs:
            return
        stores = [self._source] if self._target is None else [self._source, self._target]
        threads = max(requests_of(each, limits.threads) for each in stores)
        threads, window_nbytes = window_for(threads, limits.budget_nbytes)
        try:
            run_workers(self._tasks(proofs, window_nbytes), self._move, threads=threads, buffer_nbytes=window_nbytes)
        finally:
            self._give_up()

    def _tasks(self, proofs: Sequence[Proof], window_nbytes: int) -> Iterator[tuple[_File, list[Piece]]]:
        """Open files one after the other, and cut them up; called under a lock."""
        for proof in proofs:
            windows = list(proof.windows(window_nbytes))
            writer = None if self._target is None else self._target.create(proof.name, proof.nbytes)
            try:
                reader = open_sized(self._source, proof.name, proof.nbytes)
            except BaseException as error:
                if writer is None and isinstance(error, WrongSize):  # it has gone since it was listed
                    self.damaged.add(proof.name)
                    continue
                if writer is not None:
                    writer.abandon()
                raise
            file = _File(proof, len(windows), reader, writer)
            with self._lock:
                self._open[proof.name] = file
            yield from ((file, window) for window in windows)

    def _move(self, task: tuple[_File, list[Piece]], buffer: memoryview) -> bool:
        file, pieces = task
        try:
            if not self._wanted():
                raise SaveCancelled("copying was cancelled")
            if file.proof.name not in self.damaged:
                self._move_pieces(file, pieces, buffer)
            self._end_of(file)
        except BaseException as error:
            with self._lock:
                first, self._failed = not self._failed, True
            # At once: another thread may wait for a part that never comes.
            self._give_up()
            if first:
                raise
            raise Consequence("another window could not be copied") from error
        return True  # a disk or a network was waited for

    def _move_pieces(self, file: _File, pieces: list[Piece], buffer: memoryview) -> None:
        where = f"{self._source.url}/{file.proof.name}"
        try:
            if pieces[0].nbytes > len(buffer):
                [piece] = pieces
                self._move_long(file, piece, buffer, where)
                return
            start = pieces[0].start
            window = buffer[: pieces[-1].start + pieces[-1].nbytes - start]
            file.reader.read_into(start, window)
            for piece in pieces:
                piece.check(digest(window[piece.start - start :][: piece.nbytes]), where)
        except DamagedCheckpoint:
            if self._target is not None:
                raise
            self.damaged.add(file.proof.name)
            return
        if file.writer is not None:
            file.writer.write_at(start, window)

    def _move_long(self, file: _File, piece: Piece, buffer: memoryview, where: str) -> None:
        """Move a piece that has one digest and does not fit; the file is not finished if it turns out to be wrong."""
        found = xxhash.xxh3_128()
        for at in range(0, piece.nbytes, len(buffer)):
            window = buffer[: min(len(buffer), piece.nbytes - at)]
            file.reader.read_into(piece.start + at, window)
            found.update(window)
            if file.writer is not None:
                file.writer.write_at(piece.start + at, window)
        piece.check(found.digest(), where)

    def _end_of(self, file: _File) -> None:
        with self._lock:
            file.left -= 1
            if file.left:
                return
        file.reader.close()
        if file.writer is not None:
            file.writer.finish()
        with self._lock:
            self._open.pop(file.proof.name, None)

    def _give_up(self) -> None:
        """Close what is still open, and leave nothing of it."""
        with self._lock:
            files, self._open = list(self._open.values()), {}
        for file in files:
            if file.writer is not None:
                file.writer.abandon()
            file.reader.close()
