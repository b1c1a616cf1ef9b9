"""
The asynchronous saves of this process that have not ended, and the failures that nobody has asked for.

Each save runs on a thread of its own. So many at a time are allowed as the caller says; the next one waits in its call.
A failure that nobody asks for is logged, and raised by the next save or by `finish`; at exit it is printed, and the process
ends with a code that is not 0. The next save is made all the same: other ranks may not know of the failure yet, or have
asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from typing_extensions import Self

from shardkeep.dist.rank_errors import attach_remote_traceback
from shardkeep.errors import CheckpointError, CheckpointException, EarlierSaveFailed, SaveCancelled
from shardkeep.events import log_safely

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType


# What a caller holds of a save that goes on while training does.

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
        _wait(timeout, self._future, "the state was not copied", self._process_id).result()

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
        ended = _wait(timeout, self._future, "the save is not complete", self._process_id)
        self._note_asked()
        return ended.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save to end, and return what went wrong, if anything did."""
        ended = _wait(timeout, self._future, "the save is not complete", self._process_id)
        self._note_asked()
        return ended.exception()

    def outcome(self) -> BaseException | None:
        """Wait, return what went wrong, and leave it to be asked for."""
        return _wait(None, self._future, "the save is not complete", self._process_id).exception()

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
        wait_for_all([self._future])

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


def wait_for_all(futures: Collection[Future[Any]]) -> None:
    """Wait for all. Not for long at a time: a Ctrl-C that comes just as Python begins to wait is noticed when it ends."""
    while wait(futures, _NOTICE_S).not_done:
        pass


def _wait(timeout: float | None, future: Future[T], what: str, process_id: int) -> Future[T]:
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


# The exit code of this process: kept as the program gave it, and made a failure where it gave none.
#
# Python has settled on its code before it calls anything at exit, and nothing that is called then can change it.
# `os._exit` could end the process there, but with it would go all that comes later: threads that are waited for,
# other
# handlers, files that are flushed as they are collected. So Python ends as always, and the C library, whose `exit` it
# calls
# with its code when all that is done, is told to end with another one. What is skipped are handlers in C that were
# there
# before, such as destructors of static objects; output that C still holds is flushed.

log = logging.getLogger("shardkeep")

_FAILED = 1
_MOST = 0xFF
"""What a system keeps of an exit code."""


class ExitCode:
    """What this process ends with. Used by one thread at a time."""

    def __init__(self) -> None:
        self._before = sys.exit
        self._watching = False
        self._inside = False
        self._given = 0

    def watch(self) -> None:
        """Note what `sys.exit` is given: at exit there is no way to ask for it. A raised `SystemExit` is not noted."""
        if not self._watching and not _interactive():
            self._watching = True
            self._before = sys.exit
            sys.exit = self._exit

    def look_away(self) -> None:
        """Put `sys.exit` back, unless somebody else has put theirs over ours."""
        if self._watching and sys.exit == self._exit:
            sys.exit = self._before
            self._watching = False

    def fail(self) -> int | None:
        """
        End with a failure, called at exit; return its code, or None where the code is left alone.

        It is what the program gave to `sys.exit`, or 1 if that was nothing or 0. Left alone is a program that ends with
        an error that Python has printed, or a Ctrl-C: its code is not 0. So is a session that somebody sits at, and a
        process that does not end by C's `exit`, or not when Python ends.
        """
        if _interactive() or getattr(sys, "last_value", None) is not None or not _ends_by_exit():
            return None
        code = self._given or _FAILED
        try:
            libc = ctypes.CDLL(None)
            at_exit = libc["__cxa_atexit"]  # which hands an argument on, as `atexit` does not
        except (AttributeError, OSError, TypeError):  # another C library: the text has to do
            return None
        at_exit.argtypes = [ctypes.c_void_p] * 3
        for call, argument in (("_exit", code), ("fflush", None)):  # the last one is called first
            at_exit(ctypes.cast(libc[call], ctypes.c_void_p), argument, None)
        return code

    def _exit(self, status: object = None, /) -> NoReturn:
        if self._inside:  # by way of somebody who kept this one from an earlier time
            raise SystemExit(status)
        if threading.current_thread() is threading.main_thread():  # in others it ends the thread alone
            self._given = _code_of(status)
        self._inside = True
        try:
            self._before(status)  # type: ignore[arg-type]  # whatever it is
        finally:
            self._inside = False


@cache
def exit_code() -> ExitCode:
    """Return that of this process."""
    return ExitCode()


def report_at_exit(error: BaseException | None = None) -> None:
    """Print an error that nobody is left to catch, and let whoever started this process know: a scheduler reads no texts."""
    if error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
    if (code := exit_code().fail()) is not None:
        log.error("a save is lost, and nobody had asked for it: this process ends with exit code %d", code)


def report_cancelled_at_exit(places: Iterable[str]) -> None:
    """Say which saves somebody would not wait for, and end with a failure."""
    report_at_exit()
    log.error("interrupted at exit: given up before they were complete: saves to %s", ", ".join(places))


def _code_of(status: object) -> int:
    if status is None:
        return 0
    return status & _MOST if isinstance(status, int) else _FAILED  # anything else is printed


def _ends_by_exit() -> bool:
    """
    Say whether this process ends by C's `exit`, and with its interpreter.

    Those that `multiprocessing` forks, itself or by its server, end by `_exit`; a program that Python is embedded in has
    no command line of Python's, and goes on after it.
    """
    forked = multiprocessing.parent_process() is not None and "--multiprocessing-fork" not in sys.orig_argv
    return bool(sys.orig_argv) and not forked


def _interactive() -> bool:
    """Say whether somebody sits at a prompt; IPython and notebooks set one as well."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


_MOST_AT_ONCE = 64
_NICENESS = 5


class PendingSaves:
    """Saves under way. `begin` and `make_room` are called by one thread at a time."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._threads = _threads()
        # Before the standard library shuts its executors: a save that is under way at exit still needs threads.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]  # there is no public way
        self._under_way: list[SaveHandle[Any]] = []
        self._failed: list[SaveHandle[Any]] = []

    def make_room(self, most: int) -> None:
        """Wait until fewer than so many saves are under way."""
        while len(under_way := self._still_under_way()) >= most:
            under_way[0].wait_for_end()

    def begin(self, handle: SaveHandle[T], box: list[Callable[[], T]]) -> None:
        """Carry a save out on a thread; what is to be done is taken out of its box when it begins."""
        exit_code().watch()
        self._threads.submit(self._carry_out, handle, box)
        # After that: a Ctrl-C in between must not leave one to be waited for that never ends.
        self._under_way.append(handle)

    def earlier_failure(
        self, than: SaveHandle[Any] | None = None, *, at_exit: bool = False
    ) -> EarlierSaveFailed | None:
        """Return the failure of a save that has ended and that nobody has asked for, once; not of one just begun."""
        ended = [self._failed.pop(0) for _ in range(len(self._failed))]  # one by one: saves add to them meanwhile
        failed = [each for each in ended if (each.told_later if at_exit else not each.asked) and each is not than]
        self._failed += [each for each in ended if each is than or (each.told_later and not at_exit)]
        if not failed:
            return None
        for each in failed:
            each.asked = True
        return earlier_save_failed(
            failed[0].where,
            [each.exception() for each in failed],
            hint="ask each handle for its result before the next save; what this call saves is not affected",
        )

    def finish(self) -> None:
        """
        Wait for all saves, and end their threads.

        Raises:
            EarlierSaveFailed: one failed, and nobody has asked for it.

        """
        self.make_room(1)
        self._threads.shutdown()
        self._threads = _threads()
        exit_code().look_away()
        if (earlier := self.earlier_failure()) is not None:
            raise earlier

    def _still_under_way(self) -> list[SaveHandle[Any]]:
        self._under_way = [each for each in self._under_way if not each.done()]
        return self._under_way

    def _carry_out(self, handle: SaveHandle[T], box: list[Callable[[], T]]) -> None:
        lower_priority()
        try:
            # Taken out of its box: nothing here may hold the state when the handle is done.
            held = [box.pop()]
        except IndexError:  # given up by a call that was interrupted
            return
        try:
            result = held.pop()()
        except BaseException as error:  # noqa: BLE001 - read by whoever asks, or raised by the next save
            cancelled = isinstance(error, SaveCancelled)  # on whichever rank: somebody wanted it so
            if cancelled:
                log_safely(logging.INFO, "an asynchronous save, to %s, was cancelled", handle.where)
            else:
                attach_remote_traceback(error)
                if not handle.asked:
                    log_safely(logging.ERROR, "an asynchronous save, to %s, failed", handle.where, exc_info=error)
            drop_frames(error)
            if not cancelled:
                self._failed.append(handle)
            handle.end(error=error)
        else:
            handle.end(result)

    def _at_exit(self) -> None:
        if os.getpid() != self._process_id:  # a fork, which has none of the threads to wait for
            return
        try:
            try:
                self.make_room(1)
            except KeyboardInterrupt:
                self._give_up_at_exit()
            self.finish()
            if (earlier := self.earlier_failure(at_exit=True)) is not None:
                raise earlier
        except CheckpointError as error:
            report_at_exit(error)
        except KeyboardInterrupt:
            if places := [each.where for each in self._still_under_way()]:  # the second one: nothing is waited for
                report_cancelled_at_exit(places)
                raise
            self._at_exit()  # perhaps something is still to be told

    def _give_up_at_exit(self) -> None:
        """Cancel all saves, and wait for what that takes."""
        given_up = list(self._still_under_way())
        for each in given_up:
            each.cancel()
        self.make_room(1)
        # It may have been too late for some, which are committed, or have failed and are told of as others are.
        if lost := [each.where for each in given_up if isinstance(each.outcome(), SaveCancelled)]:
            report_cancelled_at_exit(lost)


def drop_frames(error: BaseException | None, *, said: bool = False, seen: set[int] | None = None) -> None:
    """
    Drop what the frames that an exception passed through hold: the state is among it, and exceptions are kept.

    Those that a CheckpointException tells of go altogether: its text says where it was.
    """
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    inner = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    said = said or bool(inner)
    if said:
        error.__traceback__ = None
    for each in (error.__cause__, error.__context__, *inner):
        drop_frames(each, said=said, seen=seen)


def _threads() -> ThreadPoolExecutor:
    """Make no thread yet."""
    return ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="shardkeep-save")


def lower_priority(niceness: int = _NICENESS) -> None:
    """Let training go first where cores are short; threads that this one starts do the same."""
    if sys.platform == "linux":  # where threads have priorities of their own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def earlier_save_failed(where: str, errors: Sequence[BaseException | None], *, hint: str) -> EarlierSaveFailed:
    """Make the error of saves that failed, the first of them to `where`, and that nobody has asked for."""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    what = str(errors[0]).strip() or type(errors[0]).__name__
    earlier = EarlierSaveFailed(f"an earlier asynchronous save, to {where}, failed{more}: {what}", hint=hint)
    earlier.__cause__ = errors[0]
    return earlier


@functools.cache  # saves outlive the calls that began them; a forked process has none of its parent's threads
def _pending_saves_of(process_id: int) -> PendingSaves:
    del process_id
    return PendingSaves()


def pending_saves() -> PendingSaves:
    """Return the saves of this process."""
    return _pending_saves_of(os.getpid())
