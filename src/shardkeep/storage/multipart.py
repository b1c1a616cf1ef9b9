"""
Writers of object stores: multipart uploads, whose object appears all at once when it is finished, or never.

A thread hands the parts of an upload to obstore in order, which sends several at a time. A part that one write brings
whole, when it is its turn, is sent from the caller's memory, and the write returns when obstore has released it. Other
parts are assembled from copies. A whole part that arrives early waits a moment for the parts before it, and is then
copied as well, because a thread that writes out of order cannot wait for itself.

All uploads to a bucket share a memory budget for copies, or use that of their `CancelScope`. Beyond the budget, each
upload may hold one part that is being assembled or sent, and the parts behind a gap. A scope with a budget promises that
parts arrive nearly in order; there, an early part waits much longer before it is copied beyond the budget.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
import weakref
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.base import Version, check_fits, checked_end, conflict
from shardkeep.storage.buffers import copy, flat
from shardkeep.storage.cancel import CANCEL_DEADLINE_S, CANCELLED, current_scope, run_cancellable, spawn_daemon
from shardkeep.storage.object_client import object_errors, obstore
from shardkeep.storage.retry import TRANSIENT

_GRACE_S = 0.1
"""How long an early part waits for those before it; other threads are at most a window behind."""
_LONG_GRACE_S = 5.0
"""The same, where the budget is used up and parts were promised nearly in order."""
_POLL_S = 0.5
_DEADLINE_S = CANCEL_DEADLINE_S


class _PartBuffer:
    def __init__(self, memory: Any) -> None:
        self.memory = memoryview(memory)
        self._stops: dict[int, int] = {}
        """Where pieces behind a gap begin and end."""
        self.ready = 0
        """How many bytes are there without a gap from the beginning."""

    def note(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        while (end := self._stops.pop(self.ready, None)) is not None:
            self.ready = end


class _Aborted(Exception):
    """Raised inside obstore's iteration over the parts, which makes it abort the upload."""


class ObjectWriter:
    """
    A new blob, or one that replaces another. A large one is uploaded in parts, one of a single part is put in one request.

    Parts are invisible until the last request assembles them under the name. A blob that is replaced stays until then, and
    if anything fails: it is never deleted.
    """

    def __init__(self, store: Any, name: str, nbytes: int, *, replaces: bool = False) -> None:
        """Begin a blob of an `ObjectStore`; raises a `StorageError` with EEXIST if it exists, unless it `replaces` it."""
        self._store, self._bucket, self._path = store, store.bucket, store.prefix + name
        self._url, self._name, self._nbytes, self._replaces = store.url, name, nbytes, replaces
        self._where = f"{store.url}/{name}"
        self._scope = scope = current_scope()
        self._before: Version | None = run_cancellable(lambda: store.version(name), self._where, scope)
        if self._before is not None and not replaces:
            raise conflict(self._where, name)
        self._closed = self._over = False
        self._size = self._bucket.policy.part_bytes_for(nbytes)
        self._state = threading.Condition()
        self._next = 0
        """The number of the part that obstore takes next."""
        self._partial: dict[int, _PartBuffer] = {}
        self._complete: dict[int, Any] = {}
        """Parts that wait to be taken."""
        self._sending: set[int] = set()
        self._copies: set[int] = set()
        """Parts in our own memory that wait or are being sent."""
        self._sender: Future[None] | None = None
        self._end: int | None = None
        self._failure: StorageError | None = None
        self._failed_s = math.inf
        self._doubt: StorageError | None = None
        """The error of the last request, which may have succeeded nevertheless, or says that there is no such upload."""
        self._may_appear = False
        """Whether the object exists, or may appear."""
        self._cancelled = self._left = False
        """Whether the scope was cancelled; whether the caller has stopped waiting for the upload."""
        self._budget, self._patience_s = self._bucket.budget, _GRACE_S
        if scope is not None:
            scope.on_cancel(self.cancel)
            if scope.budget is not None:
                self._budget, self._patience_s = scope.budget, _LONG_GRACE_S

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        check_fits(self._where, self._name, offset, len(view), self._nbytes, is_open=not self._closed)
        lent: set[int] = set()
        try:
            at = 0
            while at < len(view):
                number, start = divmod(offset + at, self._size)
                piece = view[at : at + self._size - start]
                at += len(piece)
                buffer = self._buffer(number, piece if len(piece) == self._size < self._nbytes else None)
                if buffer is None:
                    lent.add(number)
                    continue
                copy(buffer.memory[start : start + len(piece)], piece)
                with self._state:
                    buffer.note(start, start + len(piece))
                    # A short last part, and an only part, are sent when the blob ends.
                    if buffer.ready == self._size < self._nbytes:
                        self._copies.add(number)
                        self._accept(number, buffer.memory)
                del buffer  # its memory counts against the budget
            with self._state:
                while lent and not lent.isdisjoint([*self._complete, *self._sending]):
                    self._pause()
                self._raise_failure()
        except BaseException as exc:
            # The caller may reuse its memory, from which obstore may still send.
            if lent or not isinstance(exc, StorageError):
                self._fail(self._error(f"a write was interrupted: {exc!r}", offset, errno.ECANCELED))
            raise

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(self._where, self._name, nbytes, self._nbytes)
        if self._closed:
            raise self._error("the blob is already closed")
        self._closed = True
        only_part = self._close(end)
        if only_part is not None:
            self._sender = spawn_daemon(lambda: self._put_whole(only_part), f"put {self._name}")
        while self._failure is None and not self._sent():
            pass
        if self._sender is not None and self._sender.done():
            self._sender.result()
        with self._state:
            self._raise_failure()
        if only_part is None:
            self._check_arrived(end)
        self._over = True

    def abandon(self) -> None:
        if self._over:
            return
        self._over = self._closed = True
        self._fail(self._error("was abandoned", None, errno.ECANCELED))
        # A stalled upload aborts itself when it continues. But one whose last request is on its way may still appear, and
        # the caller may be about to write a blob of that name: wait for it, unless its name is not used again.
        quick = self._end is None or self._cancelled
        until = self._failed_s + (_DEADLINE_S if quick else self._bucket.policy.retry_s)
        while time.monotonic() < until and not self._sent():
            pass
        with self._state:
            self._left = self._cancelled
        if self._may_appear and self._cancelled:
            # Counted from the moment of the cancellation, as above: many uploads may be removed one after the other.
            left_s = self._failed_s + 2 * _DEADLINE_S - time.monotonic()
            wait([spawn_daemon(self._delete, f"delete {self._name}")], max(0.0, left_s))
        elif self._may_appear:
            self._delete()

    def cancel(self) -> None:
        """Make all waiting calls raise, and `abandon` wait for a few seconds from now at most."""
        self._cancelled = True
        self._fail(self._error(CANCELLED, None, errno.ECANCELED))

    def _missing(self) -> int:
        number = self._next
        while number in self._complete:
            number += 1
        return number

    def _buffer(self, number: int, whole: memoryview | None) -> _PartBuffer | None:
        """Return the buffer of a part, when the budget allows it; None if the part is `whole` and was taken as it is."""
        began = moved = time.monotonic()
        while True:
            with self._state:
                self._raise_failure()
                missing = self._missing()
                if number < missing or number in self._complete:
                    raise self._error("these bytes were sent already", number * self._size)
                if (buffer := self._partial.get(number)) is not None:
                    return buffer
                if whole is not None and number == missing:
                    self._accept(number, whole)
                    return None
                # Copies that are being sent will free memory; those behind a gap wait for the caller's own bytes.
                now, moving = time.monotonic(), any(copied < missing for copied in self._copies)
                moved = now if moving else moved
                if whole is None or now >= began + _GRACE_S:
                    nbytes = min(self._size, self._nbytes - number * self._size)
                    in_vain = number == missing or now >= moved + self._patience_s
                    memory = self._budget.take(nbytes, must=in_vain and not moving)
                    if memory is not None:
                        self._partial[number] = _PartBuffer(memory)
                        return self._partial[number]
                if whole is not None:  # its turn may come
                    self._state.wait(_GRACE_S)
            if whole is None:
                self._budget.wait(_GRACE_S)

    def _accept(self, number: int, part: memoryview) -> None:
        self._partial.pop(number, None)
        self._complete[number] = np.frombuffer(part, np.uint8)
        if self._sender is None:
            self._sender = spawn_daemon(self._upload, f"upload {self._name}")
        self._state.notify_all()

    def _pause(self) -> None:
        self._raise_failure()
        self._state.wait(_POLL_S)

    def _close(self, end: int) -> memoryview | None:
        """End the blob, which completes its last part; returns its bytes if it is one part of which nothing was sent."""
        last, rest = divmod(end, self._size)
        with self._state:
            self._raise_failure()
            missing = self._missing()
            partial = self._partial.get(missing)
            there = missing * self._size + (partial.ready if partial else 0)
            if self._next > last or any(number >= last for number in self._complete):
                raise self._error(f"cannot end after {end} bytes: more than that was written")
            if there < end:
                raise self._error(f"cannot end after {end} bytes: nothing was written at offset {there}")
            if self._sender is None:
                return partial.memory[:end] if partial else memoryview(b"")
            if partial is not None and rest:
                self._complete[last] = np.frombuffer(partial.memory[:rest], np.uint8)
            self._end = end
            self._state.notify_all()
        return None

    def _upload(self) -> None:
        def send() -> None:
            with object_errors("cannot upload", self._url, self._name):
                obstore().put(
                    self._bucket.client, self._path, self, use_multipart=True,
                    chunk_size=self._size, max_concurrency=self._bucket.policy.requests + 1,  # limited in `__next__`
                )  # fmt: skip

        try:
            # Parts that obstore has taken cannot be sent again, and an upload that failed elsewhere must not be.
            self._bucket.retry(f"upload {self._where}", send, can=lambda: not self._next and self._failure is None)
            self._may_appear = True
        except _Aborted:
            pass
        except StorageError as error:
            # The object may exist nevertheless: the last answer may have been lost, and its retry says "NoSuchUpload".
            self._may_appear = self._end is not None
            if self._may_appear and (error.errno in TRANSIENT or error.details.get("code") == "NoSuchUpload"):
                self._doubt = error
            else:
                self._fail(error)
        except BaseException as exc:  # noqa: BLE001 - raised where parts are written
            self._fail(self._error(f"cannot upload: {exc!r}", None, errno.EIO))
        self._delete_if_left()

    def __iter__(self) -> ObjectWriter:
        return self

    def __next__(self) -> Any:
        """Give obstore the next part, and keep no reference to it."""
        with self._state:
            while self._next not in self._complete:
                self._check_aborted()
                # While full parts are being sent the upload can still be aborted; a short last one waits for the end.
                if self._end is not None and all(number >= self._end // self._size for number in self._sending):
                    raise StopIteration
                self._state.wait(_POLL_S)
        # Only with a part at hand: otherwise uploads whose parts wait for another upload could hold all slots.
        while not self._bucket.slots.acquire(timeout=_POLL_S):
            self._check_aborted()
        with self._state:
            number, self._next = self._next, self._next + 1
            part = self._complete.pop(number)
            self._sending.add(number)
            weakref.finalize(part, self._released, number).atexit = False
            return part

    def _check_aborted(self) -> None:
        if self._failure is not None:
            raise _Aborted

    def _released(self, number: int) -> None:
        self._bucket.slots.release()
        with self._state:
            self._sending.discard(number)
            self._copies.discard(number)
            self._state.notify_all()

    def _put_whole(self, data: memoryview) -> None:
        self._may_appear = True  # until proven otherwise: the answer may be lost, or the wait for it interrupted
        try:
            self._store.put(self._name, data, replace=self._replaces)
        except StorageError as error:
            self._may_appear = error.errno != errno.EEXIST  # then the object belongs to another writer
            raise
        finally:
            self._delete_if_left()

    def _check_arrived(self, end: int) -> None:
        """Raise if the object does not have this size, or if the last answer was lost and the object is not new."""

        def look() -> int:
            with object_errors("cannot look up", self._url, self._name):
                return int(obstore().head(self._bucket.client, self._path)["size"])

        try:
            found = run_cancellable(look, self._where, self._scope)
        except BlobNotFound:
            if self._doubt is None:
                raise
            found = -1
        if self._doubt is not None and (found < 0 or self._store.version(self._name) == self._before):
            self._fail(self._doubt)
            with self._state:
                self._raise_failure()
        if found != end:
            raise self._error(f"the service has {found} bytes of {end}")

    def _delete(self) -> None:
        with contextlib.suppress(StorageError), object_errors("cannot delete", self._url, self._name):
            if not self._replaces:
                obstore().delete(self._bucket.client, self._path)

    def _delete_if_left(self) -> None:
        """Delete an object that appeared after its upload was cancelled."""
        with self._state:
            left = self._left and self._may_appear
        if left:
            self._delete()

    def _sent(self) -> bool:
        """Wait a moment for what is being sent, a short one, so that Ctrl-C gets through; return whether it is all sent."""
        return self._sender is None or not wait([self._sender], _POLL_S).not_done

    def _fail(self, error: StorageError) -> None:
        """Make all waiting calls raise this error, unless there was one before."""
        with self._state:
            self._failure = self._failure or error
            self._failed_s = min(self._failed_s, time.monotonic())
            self._state.notify_all()

    def _raise_failure(self) -> None:
        """Raise what has failed, as an error that is not retried: writing again would not help."""
        if (error := self._failure) is not None:
            number = errno.ECANCELED if error.errno in TRANSIENT else error.errno
            kind = StorageError if isinstance(error, BlobNotFound) else type(error)
            raise kind(error.message, hint=error.hint, **{**error.details, "errno": number})

    def _error(self, what: str, offset: int | None = None, number: int = errno.EINVAL) -> StorageError:
        return StorageError(f"{self._where}: {what}", name=self._name, offset=offset, errno=number)
