"""
Windows that another process hashes and writes: what is sent to it is where in shared memory their bytes are.

What a save copied in its call lies in shared memory already, and stays there; all else (what comes from accelerators,
or does not lie in order) is filled into shared windows ahead.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol

import numpy as np

from shardkeep.codec.problems import UnknownCodec
from shardkeep.errors import CheckpointError
from shardkeep.format.columns import IntArray
from shardkeep.run.coding import FileCoding
from shardkeep.run.staging import Staging
from shardkeep.run.write import FileJob, Window
from shardkeep.run.writer_memory import Region, SharedMemory
from shardkeep.run.writer_places import Place
from shardkeep.run.writer_wire import Abandon, Coded, Create, Finish, GiveUp, Reply, Request, WriteBytes, WriteRuns
from shardkeep.store.aligned import address_of
from shardkeep.store.giving_up import hope_held
from shardkeep.store.protocol import BlobWriter, Store


class Asks(Protocol):
    """The other process."""

    def ask(self, request: Request, *, nbytes: int = 0) -> Reply:
        """Have it do something, for which it may have to wait for so many bytes to be durable."""

    def tell(self, said: GiveUp) -> None:
        """Say what has no answer; neither waits nor raises."""


class Target(NamedTuple):
    """Where files go."""

    store: Store
    """As this process has it."""
    place: Place
    """As the other one opens it."""
    lost: set[str]
    """Files that it did not finish and can take back no more, as it is gone: what is left of them is to be looked for."""
    room_nbytes: int = 0
    """For what the store copies there on the way; 0: what it has for all files together."""


class Runs(NamedTuple):
    """Where in shared memory some bytes are."""

    region: Region
    starts: IntArray
    """In this process's memory."""
    sizes: IntArray


class OutsideSink:
    """A sink: another process hashes and writes."""

    def __init__(
        self, outside: Asks, memory: SharedMemory, target: Target, staging: Staging, coding: FileCoding
    ) -> None:
        self._coding = coding
        self._outside = outside
        self._memory = memory
        self._target = target
        self._staging = staging

    def begin(self, job: FileJob) -> BlobWriter:
        """Begin a file."""
        try:
            return _OutsideFile(self._outside, self._target, job, self._coding)
        except BaseException:
            # Nobody knows how far it came, and nobody else knows of the file.
            with contextlib.suppress(CheckpointError):
                self._target.store.delete(job.name)
            raise

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        """Have a window written, and return the digests of its blocks."""
        self._staging.insist()
        runs = shared_runs(window, self._memory)
        if runs is not None:
            return self._write(window, file, runs)
        with self._staging.take(window, own) as data:
            start = address_of(data)
            region = self._memory.region_of(start, start + len(data))
            if region is None:  # unreachable: windows are filled in shared memory
                raise CheckpointError("a window does not lie in shared memory")
            return self._write(window, file, Runs(region, np.array([start]), np.array([len(data)])))

    def _write(self, window: Window, file: BlobWriter, runs: Runs) -> bytes:
        if not isinstance(file, _OutsideFile):  # unreachable: `begin` made it
            raise TypeError(type(file))
        request = WriteRuns(
            file.number,
            window.offset,
            window.job.block_nbytes,
            runs.region.offset,
            runs.region.nbytes,
            (runs.starts - runs.region.address).astype(np.int64).tobytes(),
            runs.sizes.astype(np.int64).tobytes(),
        )
        return self._outside.ask(request).digests


class _OutsideFile:
    """A file that another process writes."""

    def __init__(self, outside: Asks, target: Target, job: FileJob, coding: FileCoding) -> None:
        self._outside = outside
        self._lost = target.lost
        self._nbytes = job.nbytes
        self._name = job.name
        self._coding = coding
        self._over = False
        if (hope := hope_held()) is not None:
            hope.tell(self.give_up)
        told = coding.told(job.name)
        try:
            coded = None if told is None else Coded(*told)
            self.number = outside.ask(Create(target.place, job.name, job.nbytes, coded, target.room_nbytes)).file
        except UnknownCodec as error:
            error.hint = (
                "the process that writes does not run your program: bring the codec by an entry point of a package, or"
                ' pass writer="thread"'
            )
            raise

    def give_up(self) -> None:
        """Let whoever waits for an answer about this file have it soon: something else has failed."""
        if not self._over:
            self._outside.tell(GiveUp(self._name))

    def write_at(self, offset: int, data: memoryview) -> None:
        self._outside.ask(WriteBytes(self.number, offset, bytes(data)))

    def finish(self, nbytes: int | None = None) -> None:
        reply = self._outside.ask(Finish(self.number, nbytes), nbytes=self._nbytes if nbytes is None else nbytes)
        self._over = True
        if reply.seal is not None:
            self._coding.seals[self._name] = reply.seal

    def abandon(self) -> None:
        if not self._over:
            self._over = True
            try:
                self._outside.ask(Abandon(self.number))
            except CheckpointError:  # of a process that is gone, the files are deleted by others
                self._lost.add(self._name)


def shared_runs(window: Window, memory: SharedMemory) -> Runs | None:
    """Say where the bytes of a window are, if all of them are in one region of shared memory."""
    job, rows = window.job, window.rows
    if not job.address[rows.start : rows.stop].all():
        return None
    begins = job.start[rows.start : rows.stop]
    ends = np.append(job.start[rows.start + 1 : rows.stop + 1], job.data_nbytes)[: len(begins)]
    low = np.maximum(begins, window.start)
    sizes = np.minimum(ends, window.stop) - low
    starts = job.address[rows.start : rows.stop] + low - begins
    some = sizes > 0
    starts, sizes = starts[some], sizes[some]
    region = memory.region_of(int(starts.min()), int((starts + sizes).max()))
    return None if region is None else Runs(region, starts, sizes)
