"""
Asynchronous saves: the handle a caller holds, and the queue that runs saves on background threads.

A failure that the caller never retrieves is logged once, and raised by the next save or by `finish_saves`; if it is
not, a line at exit names the save. The save whose call raises it runs all the same: other ranks may not know of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from typing_extensions import Self

from shardkeep.display import OneLine, format_size
from shardkeep.dist.rank_errors import attach_remote_traceback
from shardkeep.errors import CheckpointError, CheckpointException, EarlierSaveFailed, SaveCancelled
from shardkeep.events import log_safely
from shardkeep.options import per_process

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_MOST_THREADS = 64
_NICENESS = 5
_POLL_S = 1.0
"""Python may miss a Ctrl-C that arrives just as a wait begins, until the wait ends: so no wait is longer than this."""


@dataclass(frozen=True, repr=False)
class SaveProgress(OneLine):
    """How far a save has come on this rank."""

    phase: str
    """"planning", "staging", "writing", "committing"; in the end "done", "failed" or "cancelled"."""
    bytes_staged: int = 0
    """Bytes copied since the call."""
    bytes_written: int = 0
    bytes_total: int = 0
    """Bytes this rank writes; 0 until the plan is made."""
    staging_waits: bool = False
    """The state is larger than the host memory it is staged through (`Options.staging_bytes`): staging waits for the disk."""

    def __str__(self) -> str:
        moved = f"{format_size(self.bytes_staged)} staged and {format_size(self.bytes_written)} written"
        return f"{self.phase}, {moved} of {format_size(self.bytes_total)}" if self.bytes_total else self.phase


class Staged:
    """Whether the state of a save has been copied: from then on every tensor of it may be changed."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        self._process_id = os.getpid()

    def __repr__(self) -> str:
        return f"Staged({'done' if self.done() else 'waiting'})"

    def done(self) -> bool:
        """Return whether the state may be changed; also true if the save failed and will not read it."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """
        Wait until the state may be changed.

        Raises:
            TimeoutError: it is not copied after `timeout` seconds.
            CheckpointError: the save failed before; the state may be changed then, too.

        """
        _wait(timeout, self._future, "the state was not copied", self._process_id).result()

    def wait_without_raising(self) -> None:
        wait([self._future])


class SaveHandle(Generic[T]):
    """A save that runs in the background. Retrieve its outcome here, or the next save raises its failure."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.staged = Staged()
        """When the state may be changed."""
        self.retrieved = False
        """Whether the caller knows how the save ended."""
        self.reported_later = False
        """Whether its owner raises the failure later, so that the next save does not; it is still logged at exit."""
        self._logged = False
        self._future: Future[T] = Future()
        self._process_id = os.getpid()
        self._cancelled = threading.Event()
        self._cancel_called = False
        self._committing = False
        self._lock = threading.Lock()
        self._progress = SaveProgress("planning")

    def __repr__(self) -> str:
        return f"SaveHandle({self.where!r}, {self.progress.phase})"

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """
        Wait for the checkpoint to be durable and committed, and return the report.

        Raises:
            TimeoutError: it is not committed after `timeout` seconds; the save goes on.
            CheckpointError: it failed; the same on all ranks.

        """
        return self._ended(timeout).result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save to end, and return its failure, or None."""
        return self._ended(timeout).exception()

    def outcome(self) -> BaseException | None:
        return _wait(None, self._future, "the save is not complete", self._process_id).exception()

    def _ended(self, timeout: float | None) -> Future[T]:
        ended = _wait(timeout, self._future, "the save is not complete", self._process_id)
        self.retrieved, self.reported_later = True, False
        return ended

    @property
    def progress(self) -> SaveProgress:
        """How far the save has come."""
        return self._progress

    def cancel(self) -> bool:
        """
        Cancel the save, on all ranks; return whether that is still possible.

        The save ends soon after with the failure `SaveCancelled`, and leaves no files behind.
        """
        with self._lock:
            self._cancel_called = True
            if self.done():
                cancelled = isinstance(self._future.exception(), SaveCancelled)  # perhaps by another rank
                self.retrieved = self.retrieved or cancelled
                return cancelled
            if self._committing:
                return False
            self._cancelled.set()
        self.retrieved = True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.result()
        else:  # the error of the block matters more than how the save ended
            self._future.exception()

    def outcome_to(self, future: Future[T]) -> None:
        """Set how the save ended in another future, too."""
        self._future.add_done_callback(
            lambda ended: set_outcome(future, None if ended.exception() else ended.result(), ended.exception())
        )

    def log_failure(self, error: BaseException | None) -> None:
        """Log how the save failed, once, whichever thread is the first to do so."""
        with self._lock:
            was_logged, self._logged = self._logged, True
        if not was_logged:
            log_safely(logging.ERROR, "an asynchronous save, to %s, failed", self.where, exc_info=error)

    def wanted(self) -> bool:
        return not self._cancelled.is_set()

    def begin_commit(self) -> None:
        """Raise SaveCancelled if the save was cancelled; from here on it cannot be."""
        with self._lock:
            if self._cancelled.is_set():
                raise SaveCancelled(f"the save to {self.where} was cancelled")
            self._committing = True

    def set_progress(self, phase: str, *, staged: int = 0, written: int = 0, total: int = 0) -> None:
        self._progress = SaveProgress(phase, staged, written, total, self._progress.staging_waits)

    def set_staging_waits(self) -> None:
        self._progress = replace(self._progress, staging_waits=True)

    def end_staging(self, error: BaseException | None = None) -> None:
        """Note that the state is not read any more. May be called again."""
        with contextlib.suppress(InvalidStateError), self._lock:
            set_outcome(self.staged._future, None, error)

    def end(self, result: T | None = None, error: BaseException | None = None) -> None:
        self.end_staging(error)
        cancelled = isinstance(error, SaveCancelled)
        with self._lock:
            # `cancel` came too late here, but another rank's was in time.
            self.retrieved = self.retrieved or (cancelled and self._cancel_called)
            phase = "done" if error is None else "cancelled" if cancelled else "failed"
            self._progress = replace(self._progress, phase=phase)
            set_outcome(self._future, result, error)


def set_outcome(future: Future[Any], result: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _wait(timeout: float | None, future: Future[T], what: str, process_id: int) -> Future[T]:
    """Wait for a future. `Future.result(timeout)` would not do: the save itself may fail with a TimeoutError."""
    if not future.done() and os.getpid() != process_id:
        raise CheckpointError(
            f"this handle belongs to a save of process {process_id}, and a fork of it never learns how that save ends",
            hint="wait for the handle in the process that called async_save",
        )
    if timeout is None:
        while wait([future], _POLL_S).not_done:
            pass
    elif wait([future], timeout).not_done:
        raise TimeoutError(f"{what} within {timeout:g} s")
    return future


class SaveQueue:
    """Runs saves on background threads; with one thread, one after the other. `begin` is called by one thread at a time."""

    def __init__(self, *, threads: int = _MOST_THREADS, cancels_at_exit: bool = True) -> None:
        """Start no thread yet. `cancels_at_exit`: the first Ctrl-C at exit cancels the saves; else it only warns."""
        self._process_id = os.getpid()
        self._most_threads = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="shardkeep-save")
        self._cancels_at_exit = cancels_at_exit
        # Runs before the standard library shuts its executors down: a save in progress at exit still needs threads.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]  # there is no public way
        self._begun: list[SaveHandle[Any]] = []
        self._failed: list[SaveHandle[Any]] = []

    def begin(self, save: SaveHandle[Any], box: list[Callable[[], Any]]) -> None:
        """Run a save on a thread. Its function is popped from the box when it starts, so that nothing here holds the state."""
        self._threads.submit(self._run, save, box)
        # After `submit`: a Ctrl-C in between must not leave a save in the list that never ends.
        self._begun.append(save)

    def wait_until_fewer_than(self, limit: int) -> None:
        while len(pending := self.pending()) >= limit:
            pending[0].outcome()

    def pending(self) -> list[SaveHandle[Any]]:
        self._begun = [each for each in self._begun if not each.done()]
        return self._begun

    def _take_failed(self, than: SaveHandle[Any] | None = None, *, at_exit: bool = False) -> list[SaveHandle[Any]]:
        """Return the saves whose failures were never retrieved, once; `than` is a save that was just begun."""
        ended = [self._failed.pop(0) for _ in range(len(self._failed))]  # one by one: saves append to it meanwhile
        unretrieved = [each for each in ended if not each.retrieved or (at_exit and each.reported_later)]
        failed = [each for each in unretrieved if each is not than]
        self._failed += [each for each in ended if each is than or (each.reported_later and not at_exit)]
        for each in failed:
            each.retrieved = True
        return failed

    def take_failure(self, *, hint: str, than: SaveHandle[Any] | None = None) -> EarlierSaveFailed | None:
        """Return the failures that were never retrieved as one error, once; `than` is a save that was just begun."""
        if not (failed := self._take_failed(than)):
            return None
        errors = [each.outcome() for each in failed]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        what = str(errors[0]).strip() or type(errors[0]).__name__
        earlier = EarlierSaveFailed(
            f"an earlier asynchronous save, to {failed[0].where}, failed{more}: {what}", hint=hint
        )
        earlier.__cause__ = errors[0]
        return earlier

    def finish(self) -> None:
        self.wait_until_fewer_than(1)
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(self._most_threads, thread_name_prefix="shardkeep-save")

    def _run(self, save: SaveHandle[Any], box: list[Callable[[], Any]]) -> None:
        lower_priority()
        try:
            work = [box.pop()]
        except IndexError:  # the call was interrupted, and has taken it back
            return
        try:
            result = work.pop()()  # nothing here may hold the state when the save has ended
        except BaseException as error:  # noqa: BLE001 - kept in the handle
            cancelled = isinstance(error, SaveCancelled)  # on this rank or on another
            if cancelled:
                log_safely(logging.INFO, "an asynchronous save, to %s, was cancelled", save.where)
            else:
                attach_remote_traceback(error)
                if not save.retrieved:
                    save.log_failure(error)
            drop_frames(error)
            if not cancelled:
                self._failed.append(save)
            save.end(error=error)
        else:
            save.end(result)

    def _at_exit(self) -> None:
        """Wait for pending saves; log which failures were never retrieved. The exit code does not change."""
        if os.getpid() != self._process_id:  # a fork has none of the threads to wait for
            return
        try:
            try:
                self.wait_until_fewer_than(1)
            except KeyboardInterrupt:
                self._interrupted_at_exit()
            self.finish()
            for each in self._take_failed(at_exit=True):
                each.log_failure(each.outcome())
                text = (
                    "the save to %s failed, and its result was never retrieved; wait for saves before the program ends"
                )
                log_safely(logging.ERROR, text, each.where)
        except KeyboardInterrupt:
            if pending := self.pending():  # the second Ctrl-C: leave without waiting
                _log_abandoned(pending)
                raise
            self._at_exit()  # there may be a failure to log

    def _interrupted_at_exit(self) -> None:
        """Handle the first Ctrl-C at exit: cancel what can be cancelled, and wait again."""
        pending = list(self.pending())
        if self._cancels_at_exit:
            for each in pending:
                each.cancel()
        else:
            places = ", ".join(each.where for each in pending)
            log.warning(
                "interrupted at exit: waiting for saves to %s; interrupt again to leave them incomplete", places
            )
        self.wait_until_fewer_than(1)
        # Others were committed before they could be cancelled, or failed, which is logged as any failure is.
        if lost := [each for each in pending if isinstance(each.outcome(), SaveCancelled)]:
            _log_abandoned(lost)


def _log_abandoned(saves: Sequence[SaveHandle[Any]]) -> None:
    places = ", ".join(each.where for each in saves)
    log_safely(logging.ERROR, "interrupted at exit: abandoned before they were complete: saves to %s", places)


def drop_frames(error: BaseException) -> None:
    """Clear the frames of an exception, which hold the state; those in a CheckpointException go: its text has them."""
    todo: list[tuple[BaseException | None, bool]] = [(error, False)]
    seen: set[int] = set()
    while todo:
        each, is_inside = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        inner = [found for found, _ in each.failures.values()] if isinstance(each, CheckpointException) else []
        is_inside = is_inside or bool(inner)
        if is_inside:
            each.__traceback__ = None
        todo += [(found, is_inside) for found in (*inner, each.__context__, each.__cause__)]


def lower_priority(niceness: int = _NICENESS) -> None:
    """Let training go first where cores are short; threads that this one starts inherit the priority."""
    if sys.platform == "linux":  # where each thread has a priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


pending_saves = per_process(SaveQueue)
