"""
One job at a time saves to a root: its rank 0 holds a lease, a blob in the root that it writes anew every so often.

Whose process is certainly gone (it was on this machine) holds nothing. Of a holder elsewhere one can only see whether it
still writes: whoever wants the lease watches it, by a clock that does not jump, and is refused as soon as it moves. If it
was not written for as long as a lease lasts, it is taken over. A job that was taken over finds out before its next
commit at the latest. Reading needs no lease.

It finds out also where the other job has ended by then: whoever takes a lease from somebody who may come back does not
delete it at the end, but writes into it that it is released, and so do all who have it after that. A lease that vanished
is written again, as somebody has tidied up; but not by a job that has not renewed it for as long as it lasts.

It is only ever written over the version that was seen, so that of two who take it at once, or of one who takes and one
who renews it, the store lets one through.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from weakref import WeakValueDictionary

import msgspec

from shardkeep.errors import BlobNotFound, CheckpointError, LeaseLost, MalformedFile, RootInUse, StorageError
from shardkeep.storage.base import Store, Version
from shardkeep.storage.system import host_identity, process_start

log = logging.getLogger("shardkeep")

LEASE_NAME = "lease.json"
LEASE_S = 300.0
_RENEWALS = 10
"""While a lease lasts."""
_MAX_NBYTES = 4096
_READS = 3
"""How often a lease that is not this job's is read, at most, until two answers agree."""
_HOW_TO_TAKE = (
    "wait for that job to end, close its Checkpointer, or save to another root; takeover=True takes the root from it"
)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Which process holds a root."""

    id: str
    """Of the Checkpointer."""
    machine: str
    """As people call it."""
    host: str
    """Machine, boot and process namespace: equal only where process numbers mean the same."""
    pid: int
    started: str
    since: str
    beat: int = 0
    """Goes up with each renewal."""
    contested: bool = False
    """Whether somebody had it before who may come back, and must see then that it was taken."""
    released: bool = False
    """Whether it was given up: it is free, but for whom it was taken from."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}, since {self.since}"


# Leases of this process, by id. One of ours that is not among them was given up, and could not be deleted.
_held: WeakValueDictionary[str, Lease] = WeakValueDictionary()


class Lease:
    """The right to save to a root. May be used by several threads."""

    def __init__(
        self,
        root: Store,
        *,
        lasts_s: float = LEASE_S,
        takeover: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """
        Take nothing yet.

        Args:
            root: whose.
            lasts_s: how long it lasts when it is not renewed.
            takeover: take it from whoever has it.
            clock: never jumps.
            sleep: waits.

        """
        self._root = root
        self._lasts_s = lasts_s
        self._takeover = takeover
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = ""
        self._written_s = 0.0
        """When a write that succeeded was begun, by the clock."""
        self.gone: set[str] = set()
        """Hosts of holders whose lease ran out: their saves are dead."""
        self._mine = Holder(
            id=secrets.token_hex(8),
            machine=socket.gethostname(),
            host=host_identity(),
            pid=os.getpid(),
            started=process_start(os.getpid()),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    @property
    def held(self) -> bool:
        """Whether it was taken, and nothing says that it was lost since."""
        return self._thread is not None and not self._lost and not self._ended.is_set()

    def take(self) -> None:
        """
        Take the lease, and renew it from now on; does nothing where it is held.

        Raises:
            RootInUse: somebody else has it; names them.
            LeaseLost: somebody took it from this job.

        """
        if self._thread is not None:
            self.insist()
            return
        _held[self._mine.id] = self
        try:
            while not self._try():
                pass
        except BaseException:
            _held.pop(self._mine.id, None)
            raise
        self._thread = threading.Thread(target=self._keep, daemon=True, name="shardkeep-lease")
        self._thread.start()
        atexit.register(self.release)

    def insist(self) -> None:
        """
        Look once more whether it is still this job's.

        Raises:
            LeaseLost: it is not.

        """
        with self._lock:
            self._renew_or_lose(write=False)
        if self._lost:
            raise LeaseLost(
                f"{self._root.url}: {self._lost}; this one does no more",
                hint="let only one job save to a root; what was committed before is as it was",
            )

    def release(self) -> None:
        """Give it up, if it is still this job's. Never raises; safe when called twice."""
        atexit.unregister(self.release)
        self._ended.set()
        if self._thread is None or self._mine.pid != os.getpid():
            return
        if self._thread is not threading.current_thread():
            self._thread.join(self._lasts_s / _RENEWALS)
        with self._lock, suppress(CheckpointError):
            version = self._root.version(LEASE_NAME) if self._mine.contested else None
            if not self._lost and self._is_mine(self._read()):
                if self._mine.contested:
                    self._mine = msgspec.structs.replace(self._mine, released=True)
                    self._write(version)
                else:
                    self._root.delete(LEASE_NAME)
        _held.pop(self._mine.id, None)
        self._lost = self._lost or "the lease was given up"

    # -- taking --------------------------------------------------------------------------------------------------

    def _try(self) -> bool:
        """Take it if it is free, dead or to be taken over; False where things have changed meanwhile."""
        if self._write(None):
            return True
        version = self._root.version(LEASE_NAME)  # before it is read: what is written over is what was seen, or nothing
        seen = self._read()
        if seen is None or version is None:
            return False
        if self._is_mine(seen):  # a network may repeat a request that was carried out
            self._written_s = self._clock()
            return True
        holder = _decoded(seen)
        free = holder is not None and (holder.released or _certainly_gone(holder))
        if not self._takeover and not free:
            if holder and holder.host == self._mine.host:
                whose = "this process itself" if holder.pid == os.getpid() else str(holder)
                raise RootInUse(f"{self._root.url}: another Checkpointer saves here ({whose})", hint=_HOW_TO_TAKE)
            if not self._outwait(seen, holder):
                return False
            if holder:
                self.gone.add(holder.host)
        contested = not free or (holder is not None and holder.contested)
        self._mine = msgspec.structs.replace(self._mine, contested=contested)
        if not self._write(version):
            return False
        if not (holder and holder.released):
            log.warning("%s: taken over from %s", self._root.url, holder or "an unreadable lease")
        return self._is_mine(self._read())

    def _outwait(self, seen: bytes, holder: Holder | None) -> bool:
        """Watch a lease of elsewhere; True when it has run out, False when it is gone, and refused when it moves."""
        # Whatever age the store's clock gives it, it is watched for a while: that clock may have jumped.
        renewal_s = self._lasts_s / _RENEWALS
        wait_s = max(1.5 * renewal_s, self._lasts_s - self._age_s())
        log.warning("%s is held by %s: waiting %.0f s for a sign of it", self._root.url, holder or "somebody", wait_s)
        until = self._clock() + wait_s
        while self._clock() < until:
            self._sleep(min(1.0, renewal_s / 4))
            now = self._read()
            if now is None:
                return False
            if now != seen:
                moved = _decoded(now)
                if moved and moved.released:
                    return False
                raise RootInUse(
                    f"{self._root.url}: another job saves here ({moved or 'unreadable'})", hint=_HOW_TO_TAKE
                )
        return True

    def _age_s(self) -> float:
        """Say how old the lease is by the store's own clock, which a blob that is made just now tells."""
        probe = "lease-probe"  # of one name for all, so that none stays whose maker was killed
        self._root.put(probe, b"", replace=True)
        when = {info.name: info.modified_s for info in self._root.list()}
        self._root.delete(probe)
        if probe not in when or LEASE_NAME not in when:  # another job asks too, or the lease is gone
            return 0.0
        return when[probe] - when[LEASE_NAME]

    # -- keeping -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._ended.wait(self._lasts_s / _RENEWALS) and not self._lost:
            try:
                with self._lock:
                    if not self._ended.is_set():
                        self._renew_or_lose(write=True)
            except CheckpointError as error:
                log.warning("%s: the lease could not be renewed: %s", self._root.url, error)

    def _renew_or_lose(self, *, write: bool) -> None:
        if self._lost or self._thread is None:
            return
        version = self._root.version(LEASE_NAME) if write else None
        seen = self._read()
        if self._is_lost(seen):
            return
        if write:
            self._mine = msgspec.structs.replace(self._mine, beat=self._mine.beat + 1)
        if (write or seen is None) and not self._write(version if seen else None):
            now = self._read()
            if seen is None and now is None:  # but something was in the way
                self._lose("another job came and went here")
            self._is_lost(now)

    def _is_lost(self, seen: bytes | None) -> bool:
        if seen is None:
            idle_s = self._clock() - self._written_s
            if idle_s >= self._lasts_s:
                self._lose(
                    f"another job may have saved here: the lease is gone, and was not renewed for {idle_s:.0f} s"
                )
        elif not self._is_mine(seen):
            holder = _decoded(seen)
            saves = "has saved here since" if holder and holder.released else "saves here now"
            self._lose(f"another job {saves} ({holder or 'an unreadable lease'})")
        return bool(self._lost)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            log.error("%s: %s", self._root.url, why)

    def _write(self, over: Version | None) -> bool:
        """Write it over a version, or where there is none; False where there is another."""
        begun_s = self._clock()
        try:
            self._root.put(LEASE_NAME, msgspec.json.encode(self._mine), over=over)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        self._written_s = begun_s
        return True

    def _read(self) -> bytes | None:
        """Read it; one that is not this job's until two answers agree: bytes change on the way, also those of a name."""
        seen = self._read_once()
        for _ in range(_READS - 1):
            if seen is None or self._is_mine(seen):
                break
            before, seen = seen, self._read_once()
            if seen == before:
                break
        return seen

    def _read_once(self) -> bytes | None:
        try:
            return self._root.get(LEASE_NAME, limit=_MAX_NBYTES)
        except BlobNotFound:
            return None
        except MalformedFile:  # far too long
            return b"unreadable"

    def _is_mine(self, seen: bytes | None) -> bool:
        holder = _decoded(seen or b"")
        return holder is not None and holder.id == self._mine.id


def _decoded(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _certainly_gone(holder: Holder) -> bool:
    if holder.host != host_identity():
        return False
    return process_start(holder.pid) != holder.started or (holder.pid == os.getpid() and holder.id not in _held)
