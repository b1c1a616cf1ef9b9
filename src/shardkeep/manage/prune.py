"""
What rank 0 does to a root after each successful save: update `latest`, delete what no policy wants, sweep what dead saves left.

One thread does all of it, in this order, and none of it can fail a save. Before anything is deleted, the root is listed, and
three kinds of commit records are read again: those of the new checkpoint, of checkpoints because of which others are not
wanted any more, and of checkpoints to delete. Other records are read once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice

from shardkeep.display import format_count
from shardkeep.errors import CheckpointError, LeaseLost
from shardkeep.events import Pruned, PruneFailed, emit
from shardkeep.layouts import orphans
from shardkeep.layouts.native import read_record, save_id_of
from shardkeep.manage.catalog import LATEST_NAME, Catalog, KnownEntries, is_pinned, map_in_threads
from shardkeep.manage.entry import Entry
from shardkeep.manage.lease import Lease
from shardkeep.manage.retention import KeepAll, Policy, plan
from shardkeep.storage.base import REMOVING_NAME, is_commit_marker

log = logging.getLogger("shardkeep")

_DELETES = 8
"""How many checkpoints are deleted at a time: most of that time is spent waiting for the disk or the network."""
_PLACES = 64  # how many directories are swept before a save may have its turn


class CheckpointLocks:
    """Keeps this process from deleting a checkpoint while it saves or copies it. Used by several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_use: list[str] = []
        self._deleting: set[str] = set()

    def acquire(self, name: str) -> None:
        """Mark a checkpoint as in use; waits until a deletion of it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._deleting)
            self._in_use.append(name)

    def release(self, name: str) -> None:
        with self._changed:
            self._in_use.remove(name)

    def names(self) -> set[str]:
        with self._changed:
            return set(self._in_use)

    @contextmanager
    def deleting(self, name: str) -> Iterator[bool]:
        """Block uses of a checkpoint inside; yields False where it is in use, and nothing may be deleted."""
        with self._changed:
            free = name not in self._in_use
            if free:
                self._deleting.add(name)
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._deleting.discard(name)
                    self._changed.notify_all()


class Pruner:
    def __init__(
        self,
        catalog: Catalog,
        policy: Policy,
        lease: Lease,
        now: Callable[[], datetime],
        *,
        spared: Callable[[list[Entry]], Collection[str]] = lambda _: (),
        resumed: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`spared` returns names that must not be deleted now, `resumed` whether an unfinished checkpoint is continued."""
        self.distrusted: set[str] = set()
        """Checkpoints that could not be restored: they do not count as kept, and are not deleted."""
        self._catalog, self._root = catalog, catalog.root
        self._policy, self._now = policy, now
        self.lease, self.locks = lease, CheckpointLocks()
        self._spared, self._resumed = spared, resumed
        self._known = KnownEntries(catalog)
        self._known_empty: set[str] = set()
        """Directories that were found empty: they are not swept again until something is in them."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardkeep-prune")
        self._after_saves: deque[Future[None]] = deque()
        self._others: list[Future[object]] = []  # what was begun besides, until `wait`
        self._closed = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        self._submit(partial(self.sweep_some, self.sweeping()))

    def sweeping(self) -> Iterator[None]:
        """Sweep every directory; yields after each."""
        entries = self._known.look()
        self._sweep_unfinished(entries)
        for entry in entries:
            self._carefully(entry.name, partial(self._sweep_beside, entry))
            yield

    def sweep_some(self, sweeping: Iterator[None]) -> None:
        """Sweep some more directories, and let what waits for the thread go first before the next ones."""
        try:
            if sum(1 for _ in islice(sweeping, _PLACES)) == _PLACES:
                self._submit(partial(self.sweep_some, sweeping))
        except Exception as error:  # noqa: BLE001 - what is found here is no part of any save
            self._report_failure("", error, None)

    def after_save(self, name: str, succeeded: Callable[[], bool]) -> None:
        """Prune in the background once a save has ended; `succeeded` waits for its end."""

        def work() -> None:
            try:
                done = succeeded()
            finally:
                self.locks.release(name)
            if done:
                self.distrusted.discard(name)  # it was overwritten
                self.prune(name, latest=name)

        self._after_saves.append(self._thread.submit(work))

    def after_replication(self, name: str) -> None:
        """Delete, in the background, what had to stay until a checkpoint was copied; does nothing after `close`."""
        self._submit(partial(self.prune, name))

    def _submit(self, work: Callable[[], object]) -> None:
        with self._lock:
            if not self._closed:
                self._others = [each for each in self._others if not each.done()] + [self._thread.submit(work)]

    def wait(self) -> None:
        """Wait for everything that was begun. Submits nothing: the interpreter may be shutting down."""
        self.catch_up(0)
        with self._lock:
            others, self._others = self._others, []
        futures.wait(others)

    def catch_up(self, but: int, within_s: float | None = None) -> None:
        """Wait for everything except what follows the last `but` saves, or until the time is up."""
        tasks = list(self._after_saves)
        late = futures.wait(tasks[: max(0, len(tasks) - but)], within_s).not_done
        while self._after_saves and self._after_saves[0].done():
            self._after_saves.popleft().result()
        if late:
            log.warning("%s: old checkpoints are deleted more slowly than new ones are saved", self._root.url)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._thread.shutdown()

    def prune(self, name: str, latest: str | None = None) -> set[str]:
        """Point to the latest checkpoint, if there is a new one, delete, sweep; return what was deleted; never raises."""
        deleted: set[str] = set()
        try:
            if latest is not None:
                # The version must be read before the lease: a job that takes the root over later is not overwritten then.
                seen = self._root.version(LATEST_NAME)
                self.lease.check()
                self._root.put(LATEST_NAME, f"{latest}\n".encode(), over=seen)
            if not isinstance(self._policy, KeepAll):
                self._sweep_unfinished(self._delete_unwanted(name, deleted, is_new=latest is not None))
        except Exception as error:  # noqa: BLE001 - a committed save must not fail because of this
            self._report_failure("", error, None)
        return deleted

    def _delete_unwanted(self, just: str, deleted: set[str], *, is_new: bool) -> list[Entry]:
        self._known.forget(just)
        entries = self._known.look()
        while True:
            trusted, bad = entries, self.distrusted
            if bad:
                trusted = [replace(each, status="damaged") if each.name in bad else each for each in entries]
            if not any(each.name == just and each.committed for each in trusted):
                # A checkpoint that was copied may have been deleted since, together with everything else.
                level = logging.WARNING if is_new else logging.DEBUG
                log.log(level, "%s: %s was committed, but is not visible: nothing is deleted", self._root.url, just)
                return []
            uncopied = self._spared(trusted)
            spared = {*([just] if is_new else []), *self.locks.names(), *uncopied}
            _, to_delete, committed = plan(trusted, self._policy, self._now(), spared=spared)
            reasons = {committed[0].name, *uncopied, *self._policy.relies_on(committed)}
            unread = {*reasons, *(each.name for each in to_delete)} - self._known.fresh if to_delete else ()
            if not unread:
                break
            entries = self._known.read_again(unread)
        done = map_in_threads(self._delete, to_delete, _DELETES, "shardkeep-delete")
        deleted |= {entry.name for entry, is_gone in zip(to_delete, done, strict=True) if is_gone}
        return entries

    def _delete(self, entry: Entry) -> bool:
        with self.locks.deleting(entry.name) as free:
            if not free:
                return False
            self.lease.check()
            try:
                if is_pinned(self._root, entry.name):  # since the records were read
                    return False
                self.remove(entry, "retention")
            except CheckpointError as error:
                self._report_failure(entry.name, error, entry.step)
                return False
            return True

    def remove(self, entry: Entry, reason: str) -> None:
        where = f"{self._root.url}/{entry.name}"
        self._known.forget(entry.name)
        self._root.remove(entry.name)
        log.info("removed %s", where)
        emit(Pruned, partial(Pruned, rank=0, where=where, step=entry.step, nbytes=entry.nbytes, reason=reason))

    def _sweep_unfinished(self, entries: Sequence[Entry]) -> None:
        """Remove what dead saves and interrupted removals left; never raises anything but LeaseLost."""
        # Empty directories are not among the entries. Some object stores list them for ever.
        self._known_empty.intersection_update(self._known.empty)
        empty = [name for name in self._known.empty if name not in self._known_empty]
        for name in [*(entry.name for entry in entries if entry.status == "unfinished"), *empty]:
            self._carefully(name, partial(self._sweep, name))

    def sweep_one(self, name: str) -> None:
        """Remove what dead saves left in one directory, with or without a checkpoint; raises nothing but LeaseLost."""

        def sweep() -> None:
            step = self._catalog.naming.step(name)
            entry = None if step is None else self._catalog.find(step)
            if entry is None or entry.status == "unfinished":
                self._sweep(name)
            else:
                self._sweep_beside(entry)

        self._carefully(name, sweep)

    def _carefully(self, name: str, work: Callable[[], None]) -> None:
        """Work on a directory that is not in use; report a failure, and raise nothing but LeaseLost."""
        with self.locks.deleting(name) as free:
            if not free or self._resumed(name):
                return
            try:
                work()
            except LeaseLost:
                raise
            except CheckpointError as error:
                self._report_failure(name, error, self._catalog.naming.step(name))

    def _sweep_beside(self, entry: Entry) -> None:
        """Remove what dead saves left beside a checkpoint; lists its files only, if there is nothing else."""
        store = self._root.place(entry.name)
        if not entry.save_id or not {save_id_of(info.name) for info in store.list()} - {None, entry.save_id}:
            return
        self.lease.check()
        found = orphans.survey(store, self.lease.gone)
        # The record is read by name, because a listing may miss it; and after the survey, because what is dead by then and
        # not in the record never will be.
        orphans.delete_files(store, set(found.dead).difference(read_record(store).names))

    def _sweep(self, name: str) -> None:
        """Remove what dead saves left in a directory without a checkpoint; and the directory if it is empty."""
        self.lease.check()
        store = self._root.place(name)
        found = orphans.survey(store, self.lease.gone)
        # After the survey: a save that had ended by then, and is not committed now, never will be.
        names = [info.name for info in store.list()]
        if not found.over or any(map(is_commit_marker, names)):
            return
        if REMOVING_NAME in names:
            self._root.remove(name)
            return
        orphans.delete_files(store, found.dead)
        if found.dead:
            log.info("swept %s of dead saves from %s", format_count(len(found.dead), "file"), store.url)
        self._root.drop_empty(name)
        if not names:
            self._known_empty.add(name)

    def _report_failure(self, name: str, error: BaseException, step: int | None) -> None:
        where = f"{self._root.url}/{name}" if name else self._root.url
        log.warning("%s could not be cleaned up: %s", where, error, exc_info=error)
        kind, message = type(error).__name__, str(error)
        emit(PruneFailed, partial(PruneFailed, rank=0, where=where, step=step, kind=kind, message=message))
