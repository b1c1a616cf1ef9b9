"""
The lease of a root: one job at a time saves to a root, and its rank 0 holds the lease.

The lease is a file in the root that its holder rewrites regularly. Reading a root needs no lease.

- If the holder was a process of this machine that no longer exists, the lease is free.
- If the holder is on another machine, a new job watches the lease, from its restore on. When the lease is renewed, the new
  job is refused. When it was not renewed for a whole term, by the monotonic clock of the new job since it first saw that
  renewal, the new job takes it over. No clock of another machine is involved.
- A lease that is two terms old or more by the clock of the store is watched only until a living holder would have renewed
  it, so a clock that has jumped takes it from no living job. One term is an allowance for clocks that differ, because some
  file systems give a file the time of the machine that writes it.
- A job whose lease was taken over notices before its next commit at the latest, even if the other job has ended by
  then: a job that takes a lease from a holder that may come back marks it as contested, and a contested lease is never
  deleted, but marked as released.
- If the file vanishes, the holder writes it again, since it was probably deleted by hand. A holder that has not renewed
  its lease in time does not: another job may have come and gone.
- Every write is conditional on the version that was read, so when two processes write at once, the store accepts one.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timezone
from weakref import WeakValueDictionary

import msgspec

from shardkeep.dist.world import collision_hint
from shardkeep.errors import BlobNotFound, CheckpointError, LeaseLost, MalformedFile, RootInUse
from shardkeep.manage.schedule import CLOCK, Clock
from shardkeep.storage.base import Root, Store, Version, explaining_place, put_if_unchanged
from shardkeep.storage.cancel import spawn_daemon
from shardkeep.storage.local import host_identity, process_start

log = logging.getLogger("shardkeep")

LEASE_NAME = "lease.json"
_RENEWALS = 30  # how often a lease is renewed in a term
_RENEWED_EVERY_S = 30.0  # how often a holder renews a lease that does not say it
_LOOKS = 4 * _RENEWALS  # how often the lease is looked at in the background, at most
_SAY_EVERY_S = 10.0
_MAX_NBYTES = 4096
_READS = 3  # how often another job's lease is read, at most, until two answers agree
_HOW_TO_TAKE = (
    "wait for that job to end, close its Checkpointer, or save to another root; takeover=True takes the root from it"
)
_HOW_TO_SKIP = "If that job has ended, Checkpointer(..., takeover=True) does not wait"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a root; the contents of the lease file."""

    id: str
    machine: str
    host: str
    """Machine, boot and process namespace: equal only where process ids mean the same."""
    pid: int
    started: str
    since: str
    beat: int = 0
    """Incremented by each renewal."""
    contested: bool = False
    """Whether a previous holder may come back, and must see then that the lease was taken."""
    released: bool = False
    """Whether the lease is free again. A previous holder still sees that it was taken."""
    renewed_every_s: float = _RENEWED_EVERY_S
    """How often its holder renews it."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine}, since {self.since}"


# The leases of this process, by id. A lease of this process that is not here was released, but could not be deleted.
_held: WeakValueDictionary[str, Lease] = WeakValueDictionary()


class Lease:
    """The right to save to a root. May be used by several threads."""

    def __init__(self, root: Store, clock: Clock = CLOCK, *, takeover: bool = False) -> None:
        """`takeover`: take the lease from any holder."""
        self._root, self._takeover = root, takeover
        self._clock, self._sleep, self._lasts_s = clock.monotonic, clock.sleep, clock.lease_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = ""  # why the lease was lost; empty while it was not
        self._written_s = 0.0  # when the last successful write began, by the clock
        self._watching: Future[None] | None = None
        self._seen: tuple[bytes | None, float] = None, 0.0
        """What was read last, and when it was first read, by the clock: it was not renewed since."""
        self.gone: set[str] = set()  # hosts whose lease expired: their saves are dead
        self._mine = Holder(
            id=secrets.token_hex(8),
            machine=socket.gethostname(),
            host=host_identity(),
            pid=os.getpid(),
            started=process_start(os.getpid()),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            renewed_every_s=self._lasts_s / _RENEWALS,
        )

    def watch(self) -> None:
        """Begin to watch the lease in the background, so that the time until `acquire` counts as waiting for it."""
        if self._thread is None and not self._takeover and (self._watching is None or self._watching.done()):
            self._watching = spawn_daemon(self._watch, "shardkeep-lease-watch")

    def acquire(self) -> None:
        """Acquire the lease and renew it from now on, or raise `RootInUse`; where it is held already, check it."""
        if self._thread is not None:
            self.check()
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

    def check(self) -> None:
        """Read the lease once more; raise `LeaseLost` if this job does not hold it any more."""
        with self._lock:
            self._renew_or_lose(write=False)
        if self._lost:
            raise LeaseLost(
                f"{self._root.url}: {self._lost}; this job saves and deletes nothing more there",
                hint="let only one job save to a root; what was committed before is intact",
            )

    def release(self) -> None:
        """Release the lease, if this job still holds it. Never raises; safe when called twice."""
        atexit.unregister(self.release)
        self._ended.set()
        if self._mine.pid != os.getpid():
            return
        if self._watching is not None:
            futures.wait([self._watching], self._lasts_s / _RENEWALS)
        if self._thread is None:
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
        self._lost = self._lost or "the lease was released"

    def _try(self) -> bool:
        """Write the lease if it is free, expired or to be taken over; return False if it changed meanwhile."""
        if self._write(None):
            return True
        # The version must be read before the contents, so that a write replaces either what was seen, or nothing.
        version = self._root.version(LEASE_NAME)
        seen = self._read()
        if seen is None or version is None:
            return False
        if self._is_mine(seen):  # a network may repeat a request that was carried out
            self._written_s = self._clock()
            return True
        holder = _decoded(seen)
        here = holder is not None and holder.host == self._mine.host
        free = holder is not None and (
            holder.released
            or (here and process_start(holder.pid) != holder.started)
            or (here and holder.pid == os.getpid() and holder.id not in _held)
        )
        if not self._takeover and not free:
            if holder and here:
                whose = "this process itself" if holder.pid == os.getpid() else str(holder)
                raise RootInUse(
                    f"{self._root.url}: another Checkpointer saves here ({whose})", hint=collision_hint(_HOW_TO_TAKE)
                )
            if not self._wait_for_expiry(seen, holder):
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

    def _wait_for_expiry(self, seen: bytes, holder: Holder | None) -> bool:
        """Watch another machine's lease; return whether it expired; raise `RootInUse` when it is renewed."""
        now, unchanged_s = self._look()
        term_s = self._lasts_s
        # Long enough to see a renewal, however old the lease looks, because the store's clock may have jumped.
        renewed_every_s = holder.renewed_every_s if holder else _RENEWED_EVERY_S
        enough_s = min(term_s, 1.5 * max(renewed_every_s, self._mine.renewed_every_s))
        if unchanged_s < term_s:
            enough_s = max(enough_s, unchanged_s + term_s - max(unchanged_s, self._age_s() - term_s))
        said_s = -_SAY_EVERY_S
        while now == seen:
            left_s = enough_s - unchanged_s
            if left_s <= 0:
                return True
            if unchanged_s >= said_s + _SAY_EVERY_S:
                said_s = unchanged_s
                text = "%s: waiting for the lease of %s, which was not renewed for %.0f s: it is free in %.0f s. %s"
                log.warning(text, self._root.url, holder or "an unknown job", unchanged_s, left_s, _HOW_TO_SKIP)
            self._sleep(min(1.0, term_s / 40, left_s))
            now, unchanged_s = self._look()
        renewed = _decoded(now or b"")
        if now is None or (renewed and renewed.released):
            return False
        raise RootInUse(
            f"{self._root.url}: another job saves here ({renewed or 'unreadable'})", hint=collision_hint(_HOW_TO_TAKE)
        )

    def _look(self) -> tuple[bytes | None, float]:
        """Read the lease, and return for how long it was not renewed, as far as this process has seen."""
        # From the end of the first read to the beginning of this one: it may be longer, and never less. Another thread may
        # look at the same time; what it notes is later, and shortens the time only.
        now_s, seen = self._clock(), self._read()
        if seen != self._seen[0]:
            self._seen = seen, self._clock()
        return seen, max(0.0, now_s - self._seen[1])

    def _watch(self) -> None:
        for _ in range(_LOOKS):
            seen, unchanged_s = self._look()
            holder = _decoded(seen or b"")
            known = seen is None or unchanged_s >= self._lasts_s or (holder and holder.host == self._mine.host)
            if known or self._thread is not None or self._ended.wait(self._lasts_s / _RENEWALS):
                return

    def _age_s(self) -> float:
        """Return how old the lease is by the store's own clock, which the time of a new file shows."""
        probe = "lease-probe"  # the same name for all jobs, so that a killed job leaves at most one
        self._root.put(probe, b"", replace=True)
        when = {info.name: info.modified_s for info in self._root.list()}
        self._root.delete(probe)
        if probe not in when or LEASE_NAME not in when:  # another job probes too, or the lease was deleted
            return 0.0
        return when[probe] - when[LEASE_NAME]

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
            if seen is None and now is None:  # yet the write found another lease there
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
        begun_s = self._clock()
        with explaining_place(self._root):
            done = put_if_unchanged(self._root, LEASE_NAME, msgspec.json.encode(self._mine), over)
        if done:
            self._written_s = begun_s
        return done

    def _read(self) -> bytes | None:
        """Read the lease; another job's until two answers agree, because a network may corrupt what is read."""
        before: bytes | None = None
        for _ in range(_READS):
            try:
                seen = self._root.get(LEASE_NAME, limit=_MAX_NBYTES)
            except BlobNotFound:
                return None
            except MalformedFile:  # far too long
                seen = b"unreadable"
            if seen == before or self._is_mine(seen):
                break
            before = seen
        return seen

    def _is_mine(self, seen: bytes | None) -> bool:
        holder = _decoded(seen or b"")
        return holder is not None and holder.id == self._mine.id


def running_holder(root: Root) -> str:
    """Return which running job holds the lease of a root, as far as one look shows; empty if none does."""
    try:
        holder = _decoded(root.get(LEASE_NAME, limit=_MAX_NBYTES))
        written_s = max((info.modified_s for info in root.list() if info.name == LEASE_NAME), default=0.0)
    except BlobNotFound:
        return ""
    except CheckpointError:
        holder = None
    if holder is None:
        return "a lease that cannot be read"
    here = holder.host == host_identity()
    holds = process_start(holder.pid) == holder.started if here else time.time() - written_s < CLOCK.lease_s
    return str(holder) if holds and not holder.released else ""


def _decoded(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
