"""
An upload in parts: a thread hands them to the library in order, which sends several at a time.

A part that one write brings whole is sent from the writer's own memory, and is waited for until the library has let go
of it; pieces of parts are copied together. What comes before its turn waits for what is missing, for a moment, and is
then copied too: a thread that writes in some order of its own cannot wait for itself. All uploads to a bucket share the
room for copies, or all on the same terms do (`giving_up.Hope`); beyond it, each has one part that is put together or
sent, and those behind a gap. Terms with a room of their own promise that parts come nearly in order: there, what is
early waits long before it is copied beyond that room.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.base import checked_end
from shardkeep.storage.buffers import PartBuffer, Parts, copy, flat
from shardkeep.storage.cancel import (
    CANCEL_DEADLINE_S,
    CANCELLED,
    current_scope,
    run_cancellable,
    spawn_daemon,
)
from shardkeep.storage.object_client import Bucket, object_errors, obstore, retry_request
from shardkeep.storage.retry import TRANSIENT

_PATIENCE_S = 0.1
"""For what is missing before a part; other threads are a window behind, not more."""
_LONG_PATIENCE_S = 5.0
"""For it, where there is no room left and parts were promised nearly in order."""
_LOOK_S = 0.5
_LONGEST_S = CANCEL_DEADLINE_S


class _Abandoned(Exception):
    """Ends an upload from inside, which makes the library take it back."""


class MultipartUpload:
    """A blob on its way. Its parts are written by any number of threads."""

    def __init__(self, bucket: Bucket, path: str, *, url: str, name: str, nbytes: int) -> None:
        """Nothing is sent before the first part is whole."""
        self._bucket = bucket
        self._path = path
        self._url = url
        self._name = name
        self._nbytes = nbytes
        self._size = bucket.manners.part_bytes_for(nbytes)
        self._state = threading.Condition()
        self._parts = Parts(self._size, nbytes)
        self._held: set[int] = set()
        """Parts in the hands of the library."""
        self._copies: set[int] = set()
        """Parts that wait or are sent and are in memory of ours."""
        self._patience_s = _PATIENCE_S
        self._in_vain = -1
        """The part for which a copy behind it waited longer than that."""
        self._thread: threading.Thread | None = None
        self._request: Future[None] | None = None
        """The one that puts all of it."""
        self._end: int | None = None
        self._failure: StorageError | None = None
        self._doubt: StorageError | None = None
        """What was said at the very end, which may have been reached all the same."""
        self.may_appear = False
        """Whether there is an object now, or may be."""
        self._failed_s = math.inf
        self._given_up = self._left = False
        """Whether others failed, and nobody waits for this any more."""
        self.hope = hope = current_scope()
        """On which terms it is made, if there are any."""
        self._in_order = hope is not None and hope.room is not None
        self._room = bucket.room if hope is None or hope.room is None else hope.room
        if hope is not None:
            hope.tell(self.give_up)

    @property
    def in_doubt(self) -> bool:
        """Whether the answer to the last request was lost, or was that there is nothing to put together any more."""
        return self._doubt is not None

    def write(self, offset: int, view: memoryview) -> None:
        """Take some bytes; their memory can be used for something else on return."""
        lent: list[int] = []
        try:
            for number, start, piece in self._parts.cut(offset, view):
                if len(piece) == self._size < self._nbytes:
                    self._lend(number, piece)
                    lent.append(number)
                else:
                    self._copy_in(number, start, piece)
            with self._state:
                self._wait_for(lent)
        except BaseException as exc:
            # The caller may use its memory again, from which the library may yet send.
            if lent or not isinstance(exc, StorageError):
                self.fail(self.error(f"a write was cut short: {exc!r}", offset, errno.ECANCELED))
            raise

    def close(self, end: int) -> memoryview | None:
        """End the blob there: returns its bytes where they are one part of which nothing was sent, else sends the rest."""
        with self._state:
            self._insist()
            if (problem := self._parts.close(end)) is not None:
                raise self.error(f"cannot end after {end} bytes: {problem}", None)
            if self._thread is None:
                return self._parts.whole(end)
            self._end = end
            self._state.notify_all()
        while self._failure is None and self._is_sending():
            self._join(time.monotonic() + _LOOK_S)
        with self._state:
            self._insist()
        return None

    def put(self, send: Callable[[], None]) -> None:
        """Let a blob of one part be sent in one request, which is waited for no longer than there is hope."""
        # Until it is known that it is not: an answer may be lost, or waiting for it be cut short.
        self.may_appear = True

        def sent() -> None:
            try:
                send()
            except StorageError as error:
                self.may_appear = error.errno != errno.EEXIST  # that one is somebody else's
                raise
            finally:
                self._remove_if_left()

        if self.hope is None:
            sent()
            return
        self._request = request = spawn_daemon(sent, f"put {self._name}")
        while self._failure is None and not request.done():
            wait([request], _LOOK_S)
        if request.done():
            request.result()
        with self._state:
            self._insist()

    def cancel(self) -> None:
        """End it without an object, if that can be; never raises."""
        self.fail(self.error("was abandoned", None, errno.ECANCELED))
        # One that stalls takes itself back when it comes to; but one that is ending may yet appear, and who waits for it
        # may be about to write another one of that name. Names of what is given up are not used again.
        quick = self._end is None or self._given_up
        self._join(self._failed_s + (_LONGEST_S if quick else self._bucket.manners.retry_s))
        with self._state:
            self._left = self._given_up

    def give_up(self) -> None:
        """Let everybody who waits raise, as other work failed, and `cancel` wait for a few seconds from now at most."""
        self._given_up = True
        self.fail(self.error(CANCELLED, None, errno.ECANCELED))

    def remove(self) -> None:
        """Delete the object, if that can be; never raises. What was given up is not waited for long."""
        if not self._given_up:
            self._delete()
            return
        # From when it was given up, as in `cancel`: there may be many, and one after the other is waited for.
        left_s = self._failed_s + 2 * _LONGEST_S - time.monotonic()
        wait([spawn_daemon(self._delete, f"delete {self._name}")], max(0.0, left_s))

    def check_size(self, end: int) -> None:
        """Insist that all of it arrived."""

        def look() -> int:
            with object_errors("cannot look at", self._url, self._name):
                return int(obstore().head(self._bucket.client, self._path)["size"])

        try:
            found = run_cancellable(look, f"{self._url}/{self._name}", self.hope)
        except BlobNotFound:
            self._is_not_there()
            raise
        if found != end:
            raise self.error(f"{found} bytes arrived of {end}", None)

    def _delete(self) -> None:
        with contextlib.suppress(StorageError), object_errors("cannot delete", self._url, self._name):
            obstore().delete(self._bucket.client, self._path)

    def _is_not_there(self) -> None:
        """Raise why, if that is known."""
        if self._doubt is not None:
            self.fail(self._doubt)
        with self._state:
            self._insist()

    def fail(self, error: StorageError) -> None:
        """Let everybody who waits raise this."""
        with self._state:
            self._failure = self._failure or error
            self._failed_s = min(self._failed_s, time.monotonic())
            self._state.notify_all()

    def error(self, what: str, offset: int | None, number: int = errno.EINVAL) -> StorageError:
        """Make an error that says where."""
        return StorageError(f"{self._url}/{self._name}: {what}", name=self._name, offset=offset, errno=number)

    # -- parts -------------------------------------------------------------------------------------------------

    def _lend(self, number: int, piece: memoryview) -> None:
        with self._state:
            self._insist()
            self._accept(number, np.frombuffer(piece, np.uint8))

    def _copy_in(self, number: int, start: int, piece: memoryview) -> None:
        building = self._building(number)
        copy(building.memory[start : start + len(piece)], piece)
        with self._state:
            # A last part that is short goes when the blob ends, and where it does; one alone likewise.
            if building.fill(start, start + len(piece)) and len(building.memory) == self._size < self._nbytes:
                self._copies.add(number)
                self._accept(number, np.frombuffer(building.memory, np.uint8))

    def _building(self, number: int) -> PartBuffer:
        """Return a part to copy into, when there is room for it."""
        room, patience_s = self._room, _LONG_PATIENCE_S if self._in_order else _PATIENCE_S
        until = time.monotonic() + patience_s
        while True:
            with self._state:
                self._insist()
                if self._parts.is_gone(number):
                    raise self._sent_already(number)
                if (building := self._parts.building(number)) is not None:
                    return building
                # Copies that go by themselves make room in the end; for all else the caller itself may be waited for.
                now, going, missing = time.monotonic(), self._going(), self._parts.missing()
                until = now + patience_s if going else until
                early = number > missing and missing != self._in_vain and now < until
                memory = room.take(self._parts.nbytes_of(number), must=not going and not early)
                if memory is not None:
                    if now >= until and not self._in_order:
                        self._in_vain = missing
                    return self._parts.build(number, memory)
            room.wait(_PATIENCE_S)

    def _accept(self, number: int, part: Any) -> None:
        if not self._parts.accept(number, part):
            raise self._sent_already(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name=f"upload {self._name}", daemon=True)
            self._thread.start()
        self._state.notify_all()

    def _going(self) -> bool:
        """Tell whether copies go by themselves: those behind a gap wait for bytes that the caller may bring yet."""
        missing = self._parts.missing()
        return any(number < missing for number in self._copies)

    def _wait_for(self, lent: list[int]) -> None:
        """Wait until the library has let go of memory that is not ours."""
        began = time.monotonic()
        while lent := [number for number in lent if self._parts.waits(number) or number in self._held]:
            early = [number for number in lent if number > self._parts.missing()]
            waited_s = time.monotonic() - began
            if not early or waited_s < self._patience_s:
                self._pause(max(0.001, self._patience_s - waited_s) if early else _LOOK_S)
                continue
            self._patience_s = 0.0
            must = not self._in_order or waited_s > _LONG_PATIENCE_S
            if (memory := self._room.take(self._size, must=must)) is None:
                self._pause(_PATIENCE_S)
                continue
            self._copies.add(early[0])
            self._parts.replace_by_copy(early[0], memory)
            lent.remove(early[0])
        self._insist()

    def _pause(self, seconds: float = _LOOK_S) -> None:
        self._insist()
        self._state.wait(seconds)

    # -- the thread that sends ---------------------------------------------------------------------------------

    def _upload(self) -> None:
        manners, what = self._bucket.manners, f"to upload {self._url}/{self._name}"
        try:
            # Parts that were given away cannot be given again, and what failed elsewhere is not to be.
            retry_request(manners, what, self._send, can=lambda: not self._parts.next and self._failure is None)
            self.may_appear = True
        except _Abandoned:
            pass
        except StorageError as error:
            # It may be there all the same: the last answer may have been lost. To ask for it again says "NoSuchUpload".
            self.may_appear = self._end is not None
            if self.may_appear and (error.errno in TRANSIENT or error.details.get("code") == "NoSuchUpload"):
                self._doubt = error
            else:
                self.fail(error)
        except BaseException as exc:  # noqa: BLE001 - raised where parts are written
            self.fail(self.error(f"cannot upload: {exc!r}", None, errno.EIO))
        self._remove_if_left()

    def _remove_if_left(self) -> None:
        """Delete what came to be late, when it was to be none; if this process is gone, it is swept as its save is."""
        with self._state:
            left = self._left and self.may_appear
        if left:
            self._delete()

    def _send(self) -> None:
        with object_errors("cannot upload", self._url, self._name):
            obstore().put(
                self._bucket.client, self._path, self, use_multipart=True,
                chunk_size=self._size, max_concurrency=self._bucket.manners.requests + 1,  # waits here, in `__next__`
            )  # fmt: skip

    def __iter__(self) -> MultipartUpload:
        """Be the parts, in order, for the library."""
        return self

    def __next__(self) -> Any:
        """Give the library the next part, and keep no reference to it."""
        slots = self._bucket.slots
        while True:
            with self._state:
                while not self._parts.waits(self._parts.next):
                    self._look()
                    # While they are under way it can still be taken back; a short last one waits for the end anyway.
                    if self._end is not None and all(number >= self._end // self._size for number in self._held):
                        raise StopIteration
                    self._state.wait(_LOOK_S)
            # Only with a part in hand, or all of them could be kept by blobs whose parts wait for one.
            while not slots.acquire(timeout=_LOOK_S):
                self._look()
            with self._state:
                if self._parts.waits(self._parts.next):
                    number, part = self._parts.take()
                    self._held.add(number)
                    weakref.finalize(part, self._let_go, number).atexit = False
                    return part
            slots.release()

    def _look(self) -> None:
        if self._failure is not None:
            raise _Abandoned

    def _let_go(self, number: int) -> None:
        """Is called when the library has sent a part and forgotten it, or has given up."""
        self._bucket.slots.release()
        with self._state:
            self._held.discard(number)
            self._copies.discard(number)
            self._state.notify_all()

    # -- ends --------------------------------------------------------------------------------------------------

    def _join(self, until: float) -> None:
        while self._is_sending() and time.monotonic() < until:  # in pieces: Ctrl-C gets through
            if self._thread is not None:
                self._thread.join(_LOOK_S)
            if self._request is not None:
                wait([self._request], _LOOK_S)

    def _is_sending(self) -> bool:
        by_thread = self._thread is not None and self._thread.is_alive()
        return by_thread or (self._request is not None and not self._request.done())

    def _insist(self) -> None:
        """Raise what has gone wrong. To write again would not mend it, so it is no error that passes."""
        if (error := self._failure) is not None:
            number = errno.ECANCELED if error.errno in TRANSIENT else error.errno
            kind = StorageError if isinstance(error, BlobNotFound) else type(error)
            raise kind(error.message, hint=error.hint, **{**error.details, "errno": number})

    def _sent_already(self, number: int) -> StorageError:
        return self.error("these bytes were sent already", number * self._size)


# A new blob of an object store: it is seen all at once when it is finished, or not at all.
#
# A large one is uploaded in parts. One of one part is put in one request, only if there is none of its name.


class ObjectWriter:
    """A new blob of an object store."""

    def __init__(
        self, bucket: Bucket, path: str, *, url: str, name: str, nbytes: int, put: Callable[[memoryview], None]
    ) -> None:
        """Begin one; `put` stores a blob of one part, if there is none of that name."""
        self._url = url
        self._name = name
        self._nbytes = nbytes
        self._put = put
        self._upload = MultipartUpload(bucket, path, url=url, name=name, nbytes=nbytes)
        self._closed = False
        self._over = False

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        if self._closed or offset < 0 or offset + len(view) > self._nbytes:
            what = f"{len(view)} bytes at offset {offset} do not fit an open blob of {self._nbytes}"
            raise self._upload.error(what, offset)
        self._upload.write(offset, view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(f"{self._url}/{self._name}", self._name, nbytes, self._nbytes)
        if self._closed:
            raise self._upload.error("is closed already", None)
        self._closed = True
        whole = self._upload.close(end)
        if whole is None:
            self._upload.check_size(end)
        else:
            self._upload.put(lambda: self._put(whole))
        self._over = True

    def abandon(self) -> None:
        if self._over:
            return
        self._over = self._closed = True
        self._upload.cancel()
        if self._upload.may_appear:
            self._upload.remove()
