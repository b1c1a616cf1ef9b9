"""
Files of a checkpoint from one store to another, as they are stored, every byte checked on the way.

They go in windows, several at once, within a budget of memory. What lies in the target already is read there and checked
against the same digests: what is sound is not copied again, whatever is not is replaced. What was copied is read back,
too, unless the service has compared it with a checksum.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import xxhash

from shardkeep.errors import DamagedCheckpoint, SaveCancelled, StorageError, WrongSize
from shardkeep.format.checksum import digest
from shardkeep.format.record import Record
from shardkeep.layout.rereading import Again, tell_healed
from shardkeep.manage.arrival import is_checked_by_service
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
    files: int
    """That were copied."""


def _at_once() -> None:
    """Wait for nobody."""


def copy_blobs(
    source: Store,
    target: Store,
    record: Record,
    names: Sequence[str],
    limits: Limits,
    wanted: Callable[[], bool],
    give_way: Callable[[], None] = _at_once,
) -> Copied:
    """
    Copy files of a checkpoint, and make them durable; those that are in the target already are only checked.

    On return all of them are in the target as they must be: they were read there, or the service has checked them.

    Args:
        source: where the checkpoint is.
        target: where to; nobody else writes there.
        record: of the checkpoint.
        names: which of its files.
        limits: threads and memory.
        wanted: is asked now and then whether to go on.
        give_way: is called before each window, by the thread that copies it, and may wait.

    Raises:
        DamagedCheckpoint: the source is not what was saved.
        StorageError: a store fails, or the target does not give back what was written.
        SaveCancelled: it was not to go on.

    """

    def damaged_in(store: Store, proofs: Sequence[Proof]) -> dict[str, DamagedCheckpoint]:
        check = _Pass(store, None, wanted, give_way)
        check.run(proofs, limits)
        return check.damaged

    sizes = record.at_rest
    there = {info.name: info.nbytes for info in target.list()}
    proofs = [prove(source, record, name) for name in names]
    candidates = [proof for proof in proofs if there.get(proof.name) == proof.nbytes]
    sound = {proof.name for proof in candidates}.difference(damaged_in(target, candidates))
    for name in set(names).difference(sound).intersection(there):
        target.delete(name)
    rest = [proof for proof in proofs if proof.name not in sound]
    _Pass(source, target, wanted, give_way).run(rest, limits)
    if not is_checked_by_service(target):
        for name, why in damaged_in(target, rest).items():
            raise StorageError(
                f"{target.url}/{name} was written, and is not read back as it was: {why.message}",
                hint="the store or its disk changes bytes: look at its log; the copy is not used, and made anew",
                name=name,
                offset=why.details.get("offset"),
                errno=errno.EIO,
            ) from why
    found = sum(sizes[name] for name in sound)
    return Copied(nbytes=sum(sizes[name] for name in names) - found, found_nbytes=found, files=len(rest))


class _File:
    """A file on its way."""

    def __init__(self, proof: Proof, windows: int, reader: BlobReader, writer: BlobWriter | None) -> None:
        self.proof = proof
        self.reader = reader
        self.writer = writer
        self.left = windows


class _Pass:
    """One reading of files, which are written elsewhere, or only checked."""

    def __init__(
        self, source: Store, target: Store | None, wanted: Callable[[], bool], give_way: Callable[[], None]
    ) -> None:
        self.damaged: dict[str, DamagedCheckpoint] = {}
        """Those that are not as they must be, where they are only checked, and why."""
        self._source = source
        self._target = target
        self._wanted = wanted
        self._give_way = give_way
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
            self._give_way()  # here, where all threads come one by one: it is the pace of all of them together
            writer = None if self._target is None else self._target.create(proof.name, proof.nbytes)
            try:
                reader = open_sized(self._source, proof.name, proof.nbytes)
            except BaseException as error:
                if writer is None and isinstance(error, WrongSize):  # it has gone since it was listed
                    self.damaged[proof.name] = error
                    continue
                if writer is not None:
                    writer.abandon()
                raise
            file = _File(proof, len(windows), reader, writer)
            with self._lock:
                self._open[proof.name] = file
            for number, window in enumerate(windows):
                if number:
                    self._give_way()
                yield file, window

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
                piece.insist(window[piece.start - start :][: piece.nbytes], self._source, file.reader, file.proof.name)
        except DamagedCheckpoint as error:
            if self._target is not None:
                raise
            self.damaged.setdefault(file.proof.name, error)
            return
        if file.writer is not None:
            file.writer.write_at(start, window)

    def _move_long(self, file: _File, piece: Piece, buffer: memoryview, where: str) -> None:
        """Move a piece that has one digest and does not fit: first it is only read, to know what its parts must be."""
        name = file.proof.name

        def read(offset: int, nbytes: int) -> memoryview:
            file.reader.read_into(offset, buffer[:nbytes])
            return buffer[:nbytes]

        parts, found = _cut(piece, read, len(buffer))
        if found != piece.digest:
            with closing(Again(name, self._source, file.reader)) as again:
                parts, found = _cut(piece, again.read, len(buffer))
            piece.check(found, where)
            tell_healed(name, piece.start, piece.nbytes)
        if file.writer is None:
            return
        for part in parts:
            window = read(part.start, part.nbytes)
            part.insist(window, self._source, file.reader, name)
            file.writer.write_at(part.start, window)

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


def _cut(piece: Piece, read: Callable[[int, int], bytearray | memoryview], nbytes: int) -> tuple[list[Piece], bytes]:
    """Read a piece in parts; return these as they were found, and the digest of all of it."""
    whole, parts = xxhash.xxh3_128(), []
    for start in range(piece.start, piece.start + piece.nbytes, nbytes):
        data = read(start, min(nbytes, piece.start + piece.nbytes - start))
        whole.update(data)
        parts.append(Piece(start, len(data), digest(data)))
    return parts, whole.digest()
