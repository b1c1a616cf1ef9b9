"""What a caller holds of a save that goes on while training does."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import Self

from shardkeep.errors import CheckpointError, SaveCancelled

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

T = TypeVar("T")

_NOTICE_S = 1.0


@dataclass(frozen=True)
class SaveProgress:
    """How far a save has come on this rank."""

    phase: str
    """"planning", "staging", "writing", "committing"; in the end "done", "failed" or "cancelled"."""
    bytes_staged: int = 0
    """What has been copied since the call."""
    bytes_written: int = 0
    bytes_total: int = 0
    """What this rank writes; 0 until it is known."""
    staging_waits: bool = False
    """The state is larger than the host memory it is staged through (`Options.staging_bytes`): staging waits for the disk."""


class Staged:
    """Whether the state of a save has been copied: from then on every tensor of it may be changed."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        self._process_id = os.getpid()

    def done(self) -> bool:
        """Say whether it has; also where the save failed, and will never need it."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """
        Wait until it has.

        Raises:
            TimeoutError: it has not after `timeout` seconds.
            CheckpointError: the save failed before; the state may be changed then, too.

        """
        _within(timeout, self._future, "the state was not copied", self._process_id).result()

    def wait_either_way(self) -> None:
        """Wait until the state may be changed, and leave a failure to be asked for."""
        wait([self._future])


class SaveHandle(Generic[T]):
    """A save that goes on in the background. Its end must be asked for, here or by the next save."""

    def __init__(self, where: str) -> None:
        """Begin to wait for a save to a place."""
        self.where = where
        self.staged = Staged()
        """When the state may be changed."""
        self.asked = False
        """Whether the caller knows how it ended."""
        self.told_later = False
        """Whether somebody has taken it on to tell of its failure: no other save does, but the end of the process does."""
        self._future: Future[T] = Future()
        self._process_id = os.getpid()
        self._cancelled = threading.Event()
        self._given_up = False
        self._committing = False
        self._lock = threading.Lock()
        self._progress = SaveProgress("planning")

    def __repr__(self) -> str:
        return f"SaveHandle({self.where!r}, {self.progress.phase})"

    def done(self) -> bool:
        """Say whether the save has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """
        Wait for the checkpoint to be durable and committed, and return the report.

        Raises:
            TimeoutError: it is not after `timeout` seconds; the save goes on.
            CheckpointError: it failed; the same on all ranks.

        """
        ended = _within(timeout, self._future, "the save is not complete", self._process_id)
        self._note_asked()
        return ended.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save to end, and return what went wrong, if anything did."""
        ended = _within(timeout, self._future, "the save is not complete", self._process_id)
        self._note_asked()
        return ended.exception()

    def outcome(self) -> BaseException | None:
        """Wait, return what went wrong, and leave it to be asked for."""
        return _within(None, self._future, "the save is not complete", self._process_id).exception()

    def _note_asked(self) -> None:
        self.asked, self.told_later = True, False

    @property
    def progress(self) -> SaveProgress:
        """How far it has come."""
        return self._progress

    def cancel(self) -> bool:
        """
        Give the save up, on all ranks; return whether that is still possible.

        It ends soon after, as one that failed with `SaveCancelled`, and leaves nothing behind.
        """
        with self._lock:
            self._given_up = True
            if self.done():
                cancelled = isinstance(self._future.exception(), SaveCancelled)  # perhaps by another rank
                self.asked = self.asked or cancelled
                return cancelled
            if self._committing:
                return False
            self._cancelled.set()
        self.asked = True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.result()
        else:  # which tells more than how the save ended
            self._future.exception()

    # -- what the save says ------------------------------------------------------------------------------------

    def wait_for_end(self) -> None:
        """Wait, and leave its result to be asked for."""
        wait_for_ends([self._future])

    def wanted(self) -> bool:
        """Say whether nobody has cancelled it."""
        return not self._cancelled.is_set()

    def insist(self) -> None:
        """Raise if it was cancelled; after this it cannot be."""
        with self._lock:
            if self._cancelled.is_set():
                raise SaveCancelled(f"the save to {self.where} was cancelled")
            self._committing = True

    def tell(self, phase: str, *, staged: int = 0, written: int = 0, total: int = 0) -> None:
        """Say how far it has come."""
        self._progress = SaveProgress(phase, staged, written, total, self._progress.staging_waits)

    def tell_that_staging_waits(self) -> None:
        """Say that it is staged through less memory than it takes."""
        self._progress = replace(self._progress, staging_waits=True)

    def end_staging(self, error: BaseException | None = None) -> None:
        """Say that the state is needed no more."""
        with contextlib.suppress(Exception), self._lock:  # it may have been said before
            if error is None:
                self.staged._future.set_result(None)
            else:
                self.staged._future.set_exception(error)

    def end(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Say how it ended."""
        self.end_staging(error)
        cancelled = isinstance(error, SaveCancelled)
        with self._lock:
            # Too late here, but another rank was in time.
            self.asked = self.asked or (cancelled and self._given_up)
            if error is None:
                self._progress = replace(self._progress, phase="done")
                self._future.set_result(result)  # type: ignore[arg-type]  # one of the two is given
            else:
                self._progress = replace(self._progress, phase="cancelled" if cancelled else "failed")
                self._future.set_exception(error)


def wait_for_ends(futures: Collection[Future[Any]]) -> None:
    """Wait for all. Not for long at a time: a Ctrl-C that comes just as Python begins to wait is noticed when it ends."""
    while wait(futures, _NOTICE_S).not_done:
        pass


def _within(timeout: float | None, future: Future[T], what: str, process_id: int) -> Future[T]:
    """Wait for a future, apart from asking it: a save may fail with a TimeoutError of its own, as ranks were silent."""
    if not future.done() and os.getpid() != process_id:  # a fork has none of the threads that save
        raise CheckpointError(
            f"a save of process {process_id} was asked for in a fork of it, where its end is never known",
            hint="ask in the process that called async_save",
        )
    wait([future], timeout)
    if not future.done():
        raise TimeoutError(f"{what} within {timeout:g} s")
    return future
