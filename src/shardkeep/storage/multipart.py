"""
Writers of object stores: multipart uploads, whose object appears all at once when it is finished, or never.

A thread hands the parts of an upload to obstore in order, which sends several at a time. A part that one write brings
whole is sent from the caller's memory, and the write returns when obstore has released it. Other parts are assembled
from copies. A part that arrives early waits a moment for the parts before it, and is then copied as well, because a
thread that writes out of order cannot wait for itself.

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.base import Version, check_fits, checked_end
from shardkeep.storage.buffers import copy, flat
from shardkeep.storage.cancel import CANCEL_DEADLINE_S, CANCELLED, current_scope, run_cancellable, spawn_daemon
from shardkeep.storage.object_client import Bucket, object_errors, obstore
from shardkeep.storage.retry import TRANSIENT

_GRACE_S = 0.1
"""How long an early part waits for those before it; other threads are at most a window behind."""
_LONG_GRACE_S = 5.0
"""The same, where the budget is used up and parts were promised nearly in order."""
_POLL_S = 0.5
_DEADLINE_S = CANCEL_DEADLINE_S


class PartBuffer:
    """A part that is assembled from pieces."""

    def __init__(self, memory: Any) -> None:
        self.memory = memoryview(memory)
        self._filled: list[tuple[int, int]] = []

    def fill(self, start: int, stop: int) -> bool:
        """Note that a piece is there; returns whether the part is complete."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._filled, (start, stop)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._filled = merged
        return self.first_gap() >= len(self.memory)

    def first_gap(self) -> int:
        """Return how many bytes are there without a gap from the beginning."""
        return self._filled[0][1] if self._filled and not self._filled[0][0] else 0


class Parts:
    """The parts of one blob, all of one size but the last. Does no I/O and no locking."""

    def __init__(self, size: int, nbytes: int) -> None:
        self._size = size
        self._nbytes = nbytes
        self._partial: dict[int, PartBuffer] = {}
        self._complete: dict[int, Any] = {}
        """Parts that wait to be taken."""
        self.next = 0
        """The number of the part that is taken next."""

    def split(self, offset: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Split bytes at the boundaries of parts: the number of a part, the offset in it, and the bytes."""
        at = 0
        while at < len(view):
            number, start = divmod(offset + at, self._size)
            some = min(self._size - start, len(view) - at)
            yield number, start, view[at : at + some]
            at += some

    def nbytes_of(self, number: int) -> int:
        return min(self._size, self._nbytes - number * self._size)

    def is_done(self, number: int) -> bool:
        """Return whether a part is complete or was taken."""
        return number < self.next or number in self._complete

    def buffer(self, number: int) -> PartBuffer | None:
        """Return the buffer of a part that is being assembled, if there is one."""
        return self._partial.get(number)

    def begin(self, number: int, memory: Any) -> PartBuffer:
        self._partial[number] = PartBuffer(memory)
        return self._partial[number]

    def accept(self, number: int, part: Any) -> bool:
        """Take a complete part; False if there was one already."""
        if self.is_done(number):
            return False
        self._partial.pop(number, None)
        self._complete[number] = part
        return True

    def missing(self) -> int:
        """Return the first part that is not complete."""
        number = self.next
        while number in self._complete:
            number += 1
        return number

    def waits(self, number: int) -> bool:
        return number in self._complete

    def take(self) -> tuple[int, Any]:
        """Return the next part, and forget it."""
        number = self.next
        self.next += 1
        return number, self._complete.pop(number)

    def replace_by_copy(self, number: int, memory: Any) -> None:
        """Copy a part that waits, so that its own memory is free again."""
        if number in self._complete:
            memory[:] = self._complete[number]
            self._complete[number] = memory

    def close(self, end: int) -> str | None:
        """End the blob, which completes its last part; returns what is wrong, or None."""
        last, rest = divmod(end, self._size)
        if not self.next and not self._complete and end <= self._size:
            return self._gap_before(end, 0)
        if self.next > last or (self.next == last and not rest and self._complete):
            return "more than that was written, and sent"
        if self.missing() < last or (self.missing() == last and rest):
            problem = self._gap_before(end, self.missing())
            if problem is None and self.missing() == last:
                self._complete[last] = np.frombuffer(self._partial.pop(last).memory[:rest], np.uint8)
            return problem
        for number in [number for number in self._complete if number > last]:
            del self._complete[number]
        if last in self._complete:
            self._complete[last] = self._complete[last][:rest]
        return None

    def _gap_before(self, end: int, number: int) -> str | None:
        partial = self._partial.get(number)
        there = number * self._size + (partial.first_gap() if partial else 0)
        return None if there >= end else f"nothing was written at offset {there}"

    def only_part(self, end: int) -> memoryview:
        """Return the bytes of a blob of one part."""
        return self._partial[0].memory[:end] if end else memoryview(b"")


class _Aborted(Exception):
    """Raised inside obstore's iteration over the parts, which makes it abort the upload."""


class MultipartUpload:
    """An upload in parts, written by any number of threads."""

    def __init__(self, bucket: Bucket, path: str, *, url: str, name: str, nbytes: int) -> None:
        """Prepare an upload; nothing is sent before the first part is complete."""
        self._bucket = bucket
        self._path = path
        self._url = url
        self._name = name
        self._nbytes = nbytes
        self._size = bucket.policy.part_bytes_for(nbytes)
        self._state = threading.Condition()
        self._parts = Parts(self._size, nbytes)
        self._sending: set[int] = set()
        """Parts that obstore holds."""
        self._copies: set[int] = set()
        """Parts in our own memory that wait or are being sent."""
        self._grace_s = _GRACE_S
        self._in_vain = -1
        """The missing part that an early one has waited for in vain."""
        self._thread: threading.Thread | None = None
        self._request: Future[None] | None = None
        """The request that puts a blob of one part."""
        self._end: int | None = None
        self._failure: StorageError | None = None
        self._doubt: StorageError | None = None
        """The error of the last request, which may have succeeded nevertheless."""
        self.may_appear = False
        """Whether the object exists, or may appear."""
        self._failed_s = math.inf
        self._cancelled = self._left = False
        """Whether the scope was cancelled; whether no one waits for the upload any more."""
        self._scope = scope = current_scope()
        self._in_order = scope is not None and scope.budget is not None
        self._budget = bucket.budget if scope is None or scope.budget is None else scope.budget
        if scope is not None:
            scope.on_cancel(self.cancel)

    @property
    def in_doubt(self) -> bool:
        """Whether the answer to the last request was lost, or said that the upload does not exist any more."""
        return self._doubt is not None

    def write(self, offset: int, view: memoryview) -> None:
        """Take some bytes; on return, the caller may reuse their memory."""
        lent: list[int] = []
        try:
            for number, start, piece in self._parts.split(offset, view):
                if len(piece) == self._size < self._nbytes:
                    with self._state:
                        self._raise_failure()
                        self._accept(number, np.frombuffer(piece, np.uint8))
                    lent.append(number)
                else:
                    self._copy_in(number, start, piece)
            with self._state:
                self._wait_for(lent)
        except BaseException as exc:
            # The caller may reuse its memory, from which obstore may still send.
            if lent or not isinstance(exc, StorageError):
                self.fail(self.error(f"a write was interrupted: {exc!r}", offset, errno.ECANCELED))
            raise

    def close(self, end: int) -> memoryview | None:
        """End the blob: send the rest, or return its bytes if it is one part of which nothing was sent."""
        with self._state:
            self._raise_failure()
            if (problem := self._parts.close(end)) is not None:
                raise self.error(f"cannot end after {end} bytes: {problem}", None)
            if self._thread is None:
                return self._parts.only_part(end)
            self._end = end
            self._state.notify_all()
        while self._failure is None and self._is_sending():
            self._join(time.monotonic() + _POLL_S)
        with self._state:
            self._raise_failure()
        return None

    def put(self, send: Callable[[], None]) -> None:
        """Send a blob of one part in one request; stop waiting for it when the scope is cancelled."""
        # True until proven otherwise: the answer may be lost, or the wait for it interrupted.
        self.may_appear = True

        def sent() -> None:
            try:
                send()
            except StorageError as error:
                self.may_appear = error.errno != errno.EEXIST  # then the object belongs to another writer
                raise
            finally:
                self._delete_if_left()

        if self._scope is None:
            sent()
            return
        self._request = request = spawn_daemon(sent, f"put {self._name}")
        while self._failure is None and not request.done():
            wait([request], _POLL_S)
        if request.done():
            request.result()
        with self._state:
            self._raise_failure()

    def abort(self) -> None:
        """End the upload without an object, if possible; never raises."""
        self.fail(self.error("was abandoned", None, errno.ECANCELED))
        # A stalled upload aborts itself when it continues. But one whose last request is on its way may still appear, and
        # the caller may be about to write a blob of that name: wait for it, unless its name is not used again.
        quick = self._end is None or self._cancelled
        self._join(self._failed_s + (_DEADLINE_S if quick else self._bucket.policy.retry_s))
        with self._state:
            self._left = self._cancelled

    def cancel(self) -> None:
        """Make all waiting calls raise, and `abort` wait for a few seconds from now at most."""
        self._cancelled = True
        self.fail(self.error(CANCELLED, None, errno.ECANCELED))

    def remove(self) -> None:
        """Delete the object, if possible; never raises. A cancelled upload is not waited for long."""
        if not self._cancelled:
            self._delete()
            return
        # Counted from the moment of the cancellation, as in `abort`: many uploads may be removed one after the other.
        left_s = self._failed_s + 2 * _DEADLINE_S - time.monotonic()
        wait([spawn_daemon(self._delete, f"delete {self._name}")], max(0.0, left_s))

    def check_size(self, end: int) -> None:
        """Raise if the object does not exist or does not have this size."""

        def look() -> int:
            with object_errors("cannot look up", self._url, self._name):
                return int(obstore().head(self._bucket.client, self._path)["size"])

        try:
            found = run_cancellable(look, f"{self._url}/{self._name}", self._scope)
        except BlobNotFound:
            if self._doubt is not None:
                self.fail(self._doubt)
            with self._state:
                self._raise_failure()
            raise
        if found != end:
            raise self.error(f"the service has {found} bytes of {end}", None)

    def fail(self, error: StorageError) -> None:
        """Make all waiting calls raise this error, unless there was one before."""
        with self._state:
            self._failure = self._failure or error
            self._failed_s = min(self._failed_s, time.monotonic())
            self._state.notify_all()

    def error(self, what: str, offset: int | None, number: int = errno.EINVAL) -> StorageError:
        return StorageError(f"{self._url}/{self._name}: {what}", name=self._name, offset=offset, errno=number)

    def _delete(self) -> None:
        with contextlib.suppress(StorageError), object_errors("cannot delete", self._url, self._name):
            obstore().delete(self._bucket.client, self._path)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _copy_in(self, number: int, start: int, piece: memoryview) -> None:
        buffer = self._buffer(number)
        copy(buffer.memory[start : start + len(piece)], piece)
        with self._state:
            # A short last part, and an only part, are sent when the blob ends.
            if buffer.fill(start, start + len(piece)) and len(buffer.memory) == self._size < self._nbytes:
                self._copies.add(number)
                self._accept(number, np.frombuffer(buffer.memory, np.uint8))

    def _buffer(self, number: int) -> PartBuffer:
        """Return the buffer of a part, when the budget allows it."""
        grace_s = _LONG_GRACE_S if self._in_order else _GRACE_S
        until = time.monotonic() + grace_s
        while True:
            with self._state:
                self._raise_failure()
                if self._parts.is_done(number):
                    raise self._sent_already(number)
                if (buffer := self._parts.buffer(number)) is not None:
                    return buffer
                # Copies that are being sent will free memory. Anything else may be waiting for the caller itself.
                now, moving, missing = time.monotonic(), self._copies_move(), self._parts.missing()
                until = now + grace_s if moving else until
                early = number > missing and missing != self._in_vain and now < until
                memory = self._budget.take(self._parts.nbytes_of(number), must=not moving and not early)
                if memory is not None:
                    if now >= until and not self._in_order:
                        self._in_vain = missing
                    return self._parts.begin(number, memory)
            self._budget.wait(_GRACE_S)

    def _accept(self, number: int, part: Any) -> None:
        if not self._parts.accept(number, part):
            raise self._sent_already(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name=f"upload {self._name}", daemon=True)
            self._thread.start()
        self._state.notify_all()

    def _copies_move(self) -> bool:
        """Return whether copies are sent without further writes; those behind a gap wait for the caller's bytes."""
        missing = self._parts.missing()
        return any(number < missing for number in self._copies)

    def _wait_for(self, lent: list[int]) -> None:
        """Wait until obstore has released parts in the caller's memory."""
        began = time.monotonic()
        while lent := [number for number in lent if self._parts.waits(number) or number in self._sending]:
            early = [number for number in lent if number > self._parts.missing()]
            waited_s = time.monotonic() - began
            if not early or waited_s < self._grace_s:
                self._pause(max(0.001, self._grace_s - waited_s) if early else _POLL_S)
                continue
            self._grace_s = 0.0
            must = not self._in_order or waited_s > _LONG_GRACE_S
            if (memory := self._budget.take(self._size, must=must)) is None:
                self._pause(_GRACE_S)
                continue
            self._copies.add(early[0])
            self._parts.replace_by_copy(early[0], memory)
            lent.remove(early[0])
        self._raise_failure()

    def _pause(self, seconds: float) -> None:
        self._raise_failure()
        self._state.wait(seconds)

    # -- the thread that sends -----------------------------------------------------------------------------------------

    def _upload(self) -> None:
        try:
            # Parts that obstore has taken cannot be sent again, and an upload that failed elsewhere must not be.
            self._bucket.retry(
                f"upload {self._url}/{self._name}",
                self._send,
                can=lambda: not self._parts.next and self._failure is None,
            )
            self.may_appear = True
        except _Aborted:
            pass
        except StorageError as error:
            # The object may exist nevertheless: the last answer may have been lost, and its retry says "NoSuchUpload".
            self.may_appear = self._end is not None
            if self.may_appear and (error.errno in TRANSIENT or error.details.get("code") == "NoSuchUpload"):
                self._doubt = error
            else:
                self.fail(error)
        except BaseException as exc:  # noqa: BLE001 - raised where parts are written
            self.fail(self.error(f"cannot upload: {exc!r}", None, errno.EIO))
        self._delete_if_left()

    def _delete_if_left(self) -> None:
        """Delete an object that appeared after its upload was cancelled."""
        with self._state:
            left = self._left and self.may_appear
        if left:
            self._delete()

    def _send(self) -> None:
        with object_errors("cannot upload", self._url, self._name):
            obstore().put(
                self._bucket.client, self._path, self, use_multipart=True,
                chunk_size=self._size, max_concurrency=self._bucket.policy.requests + 1,  # limited in `__next__`
            )  # fmt: skip

    def __iter__(self) -> MultipartUpload:
        """Return the parts, in order, for obstore."""
        return self

    def __next__(self) -> Any:
        """Give obstore the next part, and keep no reference to it."""
        slots = self._bucket.slots
        while True:
            with self._state:
                while not self._parts.waits(self._parts.next):
                    self._check_aborted()
                    # While full parts are being sent the upload can still be aborted; a short last one waits for the end.
                    if self._end is not None and all(number >= self._end // self._size for number in self._sending):
                        raise StopIteration
                    self._state.wait(_POLL_S)
            # Only with a part at hand: otherwise uploads whose parts wait for another upload could hold all slots.
            while not slots.acquire(timeout=_POLL_S):
                self._check_aborted()
            with self._state:
                if self._parts.waits(self._parts.next):
                    number, part = self._parts.take()
                    self._sending.add(number)
                    weakref.finalize(part, self._released, number).atexit = False
                    return part
            slots.release()

    def _check_aborted(self) -> None:
        if self._failure is not None:
            raise _Aborted

    def _released(self, number: int) -> None:
        """Note that obstore has sent a part and released it, or has failed."""
        self._bucket.slots.release()
        with self._state:
            self._sending.discard(number)
            self._copies.discard(number)
            self._state.notify_all()

    def _join(self, until: float) -> None:
        while self._is_sending() and time.monotonic() < until:  # in short waits, so that Ctrl-C gets through
            if self._thread is not None:
                self._thread.join(_POLL_S)
            if self._request is not None:
                wait([self._request], _POLL_S)

    def _is_sending(self) -> bool:
        by_thread = self._thread is not None and self._thread.is_alive()
        return by_thread or (self._request is not None and not self._request.done())

    def _raise_failure(self) -> None:
        """Raise what has failed, as an error that is not retried: writing again would not help."""
        if (error := self._failure) is not None:
            number = errno.ECANCELED if error.errno in TRANSIENT else error.errno
            kind = StorageError if isinstance(error, BlobNotFound) else type(error)
            raise kind(error.message, hint=error.hint, **{**error.details, "errno": number})

    def _sent_already(self, number: int) -> StorageError:
        return self.error("these bytes were sent already", number * self._size)


class ObjectWriter:
    """
    A new blob, or one that replaces another. A large one is uploaded in parts, one of a single part is put in one request.

    Parts are invisible until the last request assembles them under the name. A blob that is replaced stays until then, and
    if anything fails: it is never deleted.
    """

    def __init__(
        self,
        bucket: Bucket,
        path: str,
        *,
        url: str,
        name: str,
        nbytes: int,
        put: Callable[[memoryview], None],
        replaced: Callable[[], Version | None] | None = None,
    ) -> None:
        """`put` stores a blob of one part. `replaced` is for a blob that replaces another: it returns the stored version."""
        self._where = f"{url}/{name}"
        self._name = name
        self._nbytes = nbytes
        self._put = put
        self._replaced = replaced
        self._before = None if replaced is None else replaced()
        self._upload = MultipartUpload(bucket, path, url=url, name=name, nbytes=nbytes)
        self._closed = False
        self._over = False
        self.in_doubt = False
        """Whether the answer to the last request was lost, so that a replaced blob may still be there."""

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        check_fits(self._where, self._name, offset, len(view), self._nbytes, is_open=not self._closed)
        self._upload.write(offset, view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(self._where, self._name, nbytes, self._nbytes)
        if self._closed:
            raise self._upload.error("is closed already", None)
        self._closed = True
        only_part = self._upload.close(end)
        if self._replaced is None and only_part is not None:
            self._upload.put(lambda: self._put(only_part))
        elif only_part is not None:
            self._put(only_part)
        elif self._replaced is None:
            self._upload.check_size(end)
        self._over = True
        if self._replaced is not None:
            # Not by the size: models of one kind have one size. Nor by the version alone: equal bytes may have the same.
            self.in_doubt = self._upload.in_doubt and self._replaced() == self._before

    def abandon(self) -> None:
        if self._over:
            return
        self._over = self._closed = True
        self._upload.abort()
        if self._upload.may_appear and self._replaced is None:
            self._upload.remove()
