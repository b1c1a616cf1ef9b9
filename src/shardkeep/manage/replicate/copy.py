"""
What the bytes of a checkpoint's files must be as they lie in a store: pieces with their digests, found without any key.

A plain data file has the digests of its blocks in its header, or in a file beside it; a coded one has those of its stored
frames in its table; what is left has one digest in the commit record. So whoever copies a checkpoint knows for each
piece whether it is what was saved, and need not know what it means.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from shardkeep.codecs.coded_store import read_table
from shardkeep.engine.queue import SaveHandle, lower_priority
from shardkeep.engine.reader import read_sidecar
from shardkeep.engine.report import SaveReport
from shardkeep.engine.workers import FollowUpError, run_workers, window_for
from shardkeep.errors import BlobNotFound, ChecksumMismatch, DamagedCheckpoint, SaveCancelled, StorageError, WrongSize
from shardkeep.format.checksum import ALGORITHM, DIGEST_NBYTES, digest
from shardkeep.format.data_file import count_blocks, read_block_digests
from shardkeep.format.frames import MAGIC
from shardkeep.format.record import Blob, FileEntry, Record
from shardkeep.storage.base import BlobReader, BlobWriter, Gets, Opens, Store, innermost, preferred_requests
from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.reread import SecondRead, reread, warn_reread_ok

_DAMAGED_HINT = "the file was damaged after the save: use another copy, or another checkpoint"


class SourceStore(Opens, Gets, Protocol):
    """What proving needs of a store."""

    @property
    def url(self) -> str: ...


class DigestedRange(NamedTuple):
    """Some bytes of a file, and what they must be."""

    start: int
    nbytes: int
    digest: bytes

    def check(self, found: bytes, where: str) -> None:
        """Raise `ChecksumMismatch` where the digest of what was found is another one."""
        if found != self.digest:
            raise ChecksumMismatch(
                f"{where}: bytes {self.start} to {self.start + self.nbytes} are not what was saved",
                hint=_DAMAGED_HINT,
                file=where,
                offset=self.start,
            )

    def insist(self, data: memoryview, store: SourceStore, reader: BlobReader, name: str) -> None:
        """
        Check what was read; where it is damaged, it is read once more, and mended if it came right then.

        Raises:
            ChecksumMismatch: it is damaged still.

        """
        if digest(data) != self.digest and not reread(name, store, reader, self.start, data, self._fits).fits:
            self.check(digest(data), f"{store.url}/{name}")

    def _fits(self, data: bytearray) -> bool:
        return digest(data) == self.digest


@dataclass(frozen=True)
class ExpectedDigests:
    """A file, and what all of its bytes must be."""

    name: str
    nbytes: int
    """How large it is in the store."""
    pieces: list[DigestedRange]
    """Without gaps, in order."""

    def windows(self, nbytes: int) -> Iterator[list[DigestedRange]]:
        """Go through the pieces, as many together as fit into so many bytes, and at least one."""
        window: list[DigestedRange] = []
        for piece in self.pieces:
            if window and piece.start + piece.nbytes - window[0].start > nbytes:
                yield window
                window = []
            window.append(piece)
        if window:
            yield window


def open_sized(store: SourceStore, name: str, nbytes: int) -> BlobReader:
    """
    Open a file that must be of a size.

    Raises:
        WrongSize: it is not, or is missing.

    """
    where = f"{store.url}/{name}"
    try:
        reader = store.open(name)
    except BlobNotFound as exc:
        raise WrongSize(f"{where}: the file is missing", hint="restore it from a copy", file=name) from exc
    if reader.nbytes != nbytes:
        found = reader.nbytes
        reader.close()
        raise WrongSize(
            f"{where}: {found} bytes, the commit record says {nbytes}",
            hint="the file was cut short or changed after the save",
            file=name,
        )
    return reader


def expected_digests(store: SourceStore, record: Record, name: str) -> ExpectedDigests:
    """
    Find out what the bytes of one of a record's files must be; reads only what tells.

    Raises:
        DamagedCheckpoint: what tells is itself not what was saved.

    """
    nbytes = record.at_rest[name]
    for entry in (record.index, *record.files):
        if name == entry.name and entry.chain is not None:
            return ExpectedDigests(name, nbytes, _frame_digests(store, entry, nbytes))
        if name == entry.name and isinstance(entry, FileEntry):
            return ExpectedDigests(name, nbytes, _block_digests(store, entry))
        if name in dict(entry.at_rest):  # the index, or the digests of a data file
            return ExpectedDigests(name, nbytes, [DigestedRange(0, nbytes, _digest_in(entry.checksum))])
    raise KeyError(name)  # unreachable: `at_rest` has no others


def _frame_digests(store: SourceStore, entry: Blob, nbytes: int) -> list[DigestedRange]:
    """Prove a coded file: by the table of its frames."""
    with closing(open_sized(store, entry.name, nbytes)) as reader:
        table = read_table(reader, entry, store)
    frames = [
        DigestedRange(int(table.stored_start[frame]), int(table.stored_nbytes[frame]), table.digest(frame))
        for frame in np.lexsort((table.stored_nbytes, table.stored_start)).tolist()
    ]
    at = len(MAGIC) + sum(frame.nbytes for frame in frames)
    return [
        DigestedRange(0, len(MAGIC), digest(MAGIC)),
        *frames,
        DigestedRange(at, nbytes - at, _digest_in(entry.table_checksum or "")),
    ]


def _block_digests(store: SourceStore, entry: FileEntry) -> list[DigestedRange]:
    """Prove a plain data file: by its header, or by the file that has its digests."""
    count = count_blocks(entry.nbytes - entry.header_nbytes, entry.block_nbytes)
    if entry.blocks is None:
        with closing(open_sized(store, entry.name, entry.nbytes)) as reader:
            header = bytearray(entry.header_nbytes)
            reader.read_into(0, memoryview(header))
            of_header = _digest_in(entry.checksum)
            DigestedRange(0, len(header), of_header).insist(memoryview(header), store, reader, entry.name)
        digests = read_block_digests(header, blocks=count, where=entry.name)
    else:
        of_header, digests = read_sidecar(store, entry, count)
    pieces = [DigestedRange(0, entry.header_nbytes, of_header)]
    for block in range(count):
        start = entry.header_nbytes + block * entry.block_nbytes
        size = min(entry.block_nbytes, entry.nbytes - start)
        pieces.append(DigestedRange(start, size, digests[block * DIGEST_NBYTES : (block + 1) * DIGEST_NBYTES]))
    return pieces


def _digest_in(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix(f"{ALGORITHM}:"))


# Whether what was copied to a store has arrived as it was sent: the service says so, or it is read back.
#
# S3 compares each part of an upload with the SHA-256 that is sent along with it, and refuses what differs. Of
# services that
# only speak its language nobody knows whether they do; others are sent no checksum; and a disk says nothing at all.


def verifies_uploads(store: object) -> bool:
    """Say whether a store is known to have compared all bytes with a checksum before it says that it has them."""
    store = innermost(store)
    if not isinstance(store, ObjectStore):
        return False
    bucket = store.bucket
    return bucket.service == "s3" and bucket.official and bool(bucket.opened.config.get("checksum_algorithm"))


# How promotions keep out of the way: of training by their priority, of a save that is under way by a slow pace.
#
# A save must not share its disk and its network with a copy that nobody waits for. But where saves follow each other
# without
# a pause, a copy that waited for all of them would never end, and the near root would grow: so it is slowed, not
# stopped.

NICENESS = 10
"""More than that of asynchronous saves: they go first."""
_LOOK_S = 0.02
_LOOKS = 10
"""A window each 0.2 s while a save is under way: at most 40 MB a second on a rank."""


class Throttle:
    """Knows whether this rank is saving. Saves are begun by one thread; any thread may give way."""

    def __init__(self, sleep: Callable[[float], object]) -> None:
        """Begin with no save; `sleep` waits for so many seconds."""
        self._sleep = sleep
        self._in_call = False
        self._under_way: list[SaveHandle[SaveReport]] = []

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Be in the call of a save inside."""
        self._in_call = True
        try:
            yield
        finally:
            self._in_call = False

    def until_end_of(self, handle: SaveHandle[SaveReport]) -> None:
        """Count a save as under way until it ends."""
        self._under_way = [*(each for each in self._under_way if not each.done()), handle]

    def is_saving(self) -> bool:
        """Say whether a save is under way."""
        return self._in_call or any(not each.done() for each in self._under_way)

    def give_way(self) -> None:
        """
        Have this thread go last, and wait a moment where a save is under way, no longer than it is.

        Only by threads that copy, once others have asked their stores for something: threads that a package starts with
        its first request, for the whole process, have the priority of the one that made it.
        """
        lower_priority(NICENESS)
        for _ in range(_LOOKS):
            if not self.is_saving():
                return
            self._sleep(_LOOK_S)


# Files of a checkpoint from one store to another, as they are stored, every byte checked on the way.
#
# They go in windows, several at once, within a budget of memory. What lies in the target already is read there and
# checked
# against the same digests: what is sound is not copied again, whatever is not is replaced. What was copied is read
# back,
# too, unless the service has compared it with a checksum.


@dataclass(frozen=True, kw_only=True)
class CopyLimits:
    """How much of the machine copying takes."""

    threads: int
    """Where the stores do not mind."""
    budget_nbytes: int


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """What copying did."""

    nbytes: int
    """That were copied."""
    found_nbytes: int
    """That were there already, and are sound."""
    files: int
    """That were copied."""


def _no_pause() -> None:
    """Wait for nobody."""


def copy_files(
    source: Store,
    target: Store,
    record: Record,
    names: Sequence[str],
    limits: CopyLimits,
    wanted: Callable[[], bool],
    give_way: Callable[[], None] = _no_pause,
) -> CopyReport:
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

    def damaged_in(store: Store, proofs: Sequence[ExpectedDigests]) -> dict[str, DamagedCheckpoint]:
        check = _Pass(store, None, wanted, give_way)
        check.run(proofs, limits)
        return check.damaged

    sizes = record.at_rest
    there = {info.name: info.nbytes for info in target.list()}
    proofs = [expected_digests(source, record, name) for name in names]
    candidates = [proof for proof in proofs if there.get(proof.name) == proof.nbytes]
    sound = {proof.name for proof in candidates}.difference(damaged_in(target, candidates))
    for name in set(names).difference(sound).intersection(there):
        target.delete(name)
    rest = [proof for proof in proofs if proof.name not in sound]
    _Pass(source, target, wanted, give_way).run(rest, limits)
    if not verifies_uploads(target):
        for name, why in damaged_in(target, rest).items():
            raise StorageError(
                f"{target.url}/{name} was written, and is not read back as it was: {why.message}",
                hint="the store or its disk changes bytes: look at its log; the copy is not used, and made anew",
                name=name,
                offset=why.details.get("offset"),
                errno=errno.EIO,
            ) from why
    found = sum(sizes[name] for name in sound)
    return CopyReport(nbytes=sum(sizes[name] for name in names) - found, found_nbytes=found, files=len(rest))


class _File:
    """A file on its way."""

    def __init__(self, proof: ExpectedDigests, windows: int, reader: BlobReader, writer: BlobWriter | None) -> None:
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

    def run(self, proofs: Sequence[ExpectedDigests], limits: CopyLimits) -> None:
        """Go through all files."""
        if not proofs:
            return
        stores = [self._source] if self._target is None else [self._source, self._target]
        threads = max(preferred_requests(each, limits.threads) for each in stores)
        threads, window_nbytes = window_for(threads, limits.budget_nbytes)
        try:
            run_workers(self._tasks(proofs, window_nbytes), self._move, threads=threads, buffer_nbytes=window_nbytes)
        finally:
            self._give_up()

    def _tasks(
        self, proofs: Sequence[ExpectedDigests], window_nbytes: int
    ) -> Iterator[tuple[_File, list[DigestedRange]]]:
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

    def _move(self, task: tuple[_File, list[DigestedRange]], buffer: memoryview) -> bool:
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
            raise FollowUpError("another window could not be copied") from error
        return True  # a disk or a network was waited for

    def _move_pieces(self, file: _File, pieces: list[DigestedRange], buffer: memoryview) -> None:
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

    def _move_long(self, file: _File, piece: DigestedRange, buffer: memoryview, where: str) -> None:
        """Move a piece that has one digest and does not fit: first it is only read, to know what its parts must be."""
        name = file.proof.name

        def read(offset: int, nbytes: int) -> memoryview:
            file.reader.read_into(offset, buffer[:nbytes])
            return buffer[:nbytes]

        parts, found = _split(piece, read, len(buffer))
        if found != piece.digest:
            with closing(SecondRead(name, self._source, file.reader)) as again:
                parts, found = _split(piece, again.read, len(buffer))
            piece.check(found, where)
            warn_reread_ok(name, piece.start, piece.nbytes)
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


def _split(
    piece: DigestedRange, read: Callable[[int, int], bytearray | memoryview], nbytes: int
) -> tuple[list[DigestedRange], bytes]:
    """Read a piece in parts; return these as they were found, and the digest of all of it."""
    whole, parts = xxhash.xxh3_128(), []
    for start in range(piece.start, piece.start + piece.nbytes, nbytes):
        data = read(start, min(nbytes, piece.start + piece.nbytes - start))
        whole.update(data)
        parts.append(DigestedRange(start, len(data), digest(data)))
    return parts, whole.digest()
