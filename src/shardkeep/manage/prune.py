"""Which places of a root this process is saving to or removing, so that it never does both to one."""

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

from shardkeep.errors import CheckpointError, LeaseLost, PruneFailed
from shardkeep.events import Pruned, emit
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts.native import read_record, save_id_of
from shardkeep.manage.catalog import Catalog, Entry, is_pinned
from shardkeep.manage.lease import Lease
from shardkeep.manage.retention import KeepAll, Policy, plan
from shardkeep.storage.base import REMOVING_NAME, is_commit_marker


class CheckpointLocks:
    """Names of places. Used by several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saving: list[str] = []
        self._removing: set[str] = set()

    def begin(self, name: str) -> None:
        """Say that a save to a place begins; waits for a removal of it to end."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._removing)
            self._saving.append(name)

    def end(self, name: str) -> None:
        """Say that a save to a place has ended."""
        with self._changed:
            self._saving.remove(name)

    def names(self) -> set[str]:
        """Name the places that are being saved to."""
        with self._changed:
            return set(self._saving)

    @contextmanager
    def removing(self, name: str) -> Iterator[bool]:
        """Keep saves from a place, inside; gives False where one is under way, and nothing may be removed."""
        with self._changed:
            free = name not in self._saving
            if free:
                self._removing.add(name)
        try:
            yield free
        finally:
            with self._changed:
                if free:
                    self._removing.discard(name)
                self._changed.notify_all()


# What rank 0 does to a root around a save: finds out how things stand before the first one, and after each that
# succeeded
# points to it, deletes what no policy wants, and sweeps what dead writers left.
#
# All of it is done by one thread, in this order, and none of it can fail a save. Before anything is deleted the
# commit
# records are read anew, and the new checkpoint must be among them.

log = logging.getLogger("shardkeep")

LATEST_NAME = "latest"
"""The blob of a root that names its newest checkpoint: a hint for people and scripts."""


class Pruner:
    """Keeps a root in order."""

    def __init__(
        self, catalog: Catalog, policy: Policy, lease: Lease, in_use: CheckpointLocks, now: Callable[[], datetime]
    ) -> None:
        """
        Begin nothing yet.

        Args:
            catalog: of the root.
            policy: what is kept.
            lease: without which nothing is deleted.
            in_use: places that are being saved to.
            now: tells the time, with its zone.

        """
        self.distrusted: set[str] = set()
        """Places that could not be restored: they do not count as kept, and are left alone."""
        self.spares: Callable[[list[Entry]], Collection[str]] = _none
        """Names what is not deleted now, whatever the policy says."""
        self.resumes: Callable[[str], bool] = _never
        """Tells of a place that is half written whether somebody goes on with it: nothing is swept there."""
        self._catalog = catalog
        self._root = catalog.root
        self._policy = policy
        self._lease = lease
        self._in_use = in_use
        self._now = now
        self._bare: set[str] = set()
        """Places in which nothing was found: they are not swept again before something is."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardkeep-prune")
        self._tasks: deque[Future[None]] = deque()
        # Apart: no save waits for these.
        self._after_promotions: list[Future[set[str]]] = []
        self._closed = False
        self._lock = threading.Lock()

    def survey(self) -> list[Entry]:
        """Sweep, and return what the root has."""
        self._sweep_lost_uploads()  # before claims go, which say who goes on with one
        entries = self._catalog.entries()
        self.sweep(entries)
        for entry in entries:
            self._carefully(entry.name, partial(self._sweep_beside, entry))
        return entries

    def after(self, name: str, succeeded: Callable[[], bool]) -> None:
        """Do what follows a save, once it has ended, in the background."""
        self._tasks.append(self._thread.submit(self._after, name, succeeded))

    def wait(self) -> None:
        """Wait until all is done that was begun."""
        self.catch_up(0)
        with self._lock:
            others, self._after_promotions = self._after_promotions, []
        futures.wait(others)

    def catch_up(self, but: int, within_s: float | None = None) -> None:
        """Wait until all is done but what follows the last so many saves, or until time is up."""
        tasks = list(self._tasks)
        late = futures.wait(tasks[: max(0, len(tasks) - but)], within_s).not_done
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()
        if late:
            log.warning("%s: what no policy wants is deleted more slowly than checkpoints are saved", self._root.url)

    def close(self) -> None:
        """Wait, and end the thread."""
        with self._lock:
            self._closed = True
        self._thread.shutdown()

    def _after(self, name: str, succeeded: Callable[[], bool]) -> None:
        try:
            done = succeeded()
        finally:
            self._in_use.end(name)
        if not done:
            return
        self.distrusted.discard(name)  # it was overwritten
        self.tidy_up(name, latest=name)

    def after_promotion(self, name: str) -> None:
        """Delete, in the background, what had to stay until a checkpoint was promoted; after `close` it stays."""
        with self._lock:
            if not self._closed:
                self._after_promotions.append(self._thread.submit(self.tidy_up, name))

    def tidy_up(self, name: str, latest: str | None = None) -> set[str]:
        """
        Point to the latest checkpoint, if there is a new one, then prune and sweep; never raises.

        Returns:
            What was deleted.

        """
        removed: set[str] = set()
        try:
            if latest is not None:
                self._point_to(latest)
            if not isinstance(self._policy, KeepAll):
                self.sweep(self._prune(name, removed, is_new=latest is not None))
        except Exception as error:  # noqa: BLE001 - a save that is committed has not failed because of this
            self._failed(self._root.url, error, None)
        return removed

    def _point_to(self, name: str) -> None:
        # Asked for before the lease: a job that takes the root over later, and points elsewhere, is not undone.
        seen = self._root.version(LATEST_NAME)
        self._lease.insist()
        self._root.put(LATEST_NAME, f"{name}\n".encode(), over=seen)

    def _prune(self, just: str, removed: set[str], *, is_new: bool) -> list[Entry]:
        """Delete what no policy wants, and return what there was."""
        entries = self._catalog.entries()
        trusted = [replace(each, status="damaged") if each.name in self.distrusted else each for each in entries]
        if not any(each.name == just and each.committed for each in trusted):
            # One that was promoted may have been deleted since, with all the rest that was to go.
            level = logging.WARNING if is_new else logging.DEBUG
            log.log(level, "%s: %s was committed, but is not seen: nothing is deleted", self._root.url, just)
            return []
        spared = {*([just] if is_new else []), *self._in_use.names(), *self.spares(trusted)}
        for entry in plan(trusted, self._policy, self._now(), spared=spared).to_delete:
            with self._in_use.removing(entry.name) as free:
                if free and self._remove(entry):
                    removed.add(entry.name)
        return entries

    def _remove(self, entry: Entry) -> bool:
        where = f"{self._root.url}/{entry.name}"
        self._lease.insist()
        try:
            if is_pinned(self._root, entry.name):  # since the records were read
                return False
            self._root.remove(entry.name)
        except CheckpointError as error:
            self._failed(where, error, entry.step)
            return False
        log.info("removed %s", where)
        emit(Pruned, lambda: Pruned(rank=0, where=where, step=entry.step, nbytes=entry.nbytes, reason="retention"))
        return True

    # -- what dead writers left ----------------------------------------------------------------------------------

    def sweep(self, entries: Sequence[Entry]) -> None:
        """Remove what writers left that are certainly dead, and what is left of removals; never raises but LeaseLost."""
        for name in self._to_sweep(entries):
            self._carefully(name, partial(self._sweep, name))

    def sweep_at(self, name: str) -> None:
        """Remove what dead writers left in one place, whether there is a checkpoint or not; never raises but LeaseLost."""
        self._carefully(name, partial(self._sweep_at, name))

    def _sweep_at(self, name: str) -> None:
        step = self._catalog.naming.step(name)
        entry = None if step is None else self._catalog.find(step)
        if entry is None or entry.status == "unfinished":
            self._sweep(name)
        else:
            self._sweep_beside(entry)

    def _carefully(self, name: str, work: Callable[[], None]) -> None:
        """Work on a place that is not in use, while the lease is held; what fails is told."""
        with self._in_use.removing(name) as free:
            if not free or self.resumes(name):
                return
            try:
                self._lease.insist()
                work()
            except LeaseLost:
                raise
            except CheckpointError as error:
                self._failed(f"{self._root.url}/{name}", error, self._catalog.naming.step(name))

    def _sweep_beside(self, entry: Entry) -> None:
        """Remove what dead saves left beside a checkpoint, sparing all that its record names."""
        if entry.record is None:
            return
        store = self._root.place(entry.name)
        if not {save_id_of(info.name) for info in store.list()} - {None, save_id_of(entry.record.index.name)}:
            return
        found = leftovers.survey(store, self._lease.gone)
        record = read_record(store)  # only now: what is dead and not named by it never will be
        leftovers.sweep_uploads(store, found)
        for each in leftovers.claims_last(set(found.dead).difference(record.names)):
            store.delete(each)

    def _to_sweep(self, entries: Sequence[Entry]) -> list[str]:
        known = {entry.name for entry in entries}
        try:
            places = [name for name in self._root.places() if self._catalog.naming.step(name) is not None]
        except CheckpointError as error:
            self._failed(self._root.url, error, None)
            places = []
        # Places in which nothing is are not among the entries. Some services list them for ever.
        self._bare -= known
        empty = [name for name in places if name not in known and name not in self._bare]
        return [*(entry.name for entry in entries if entry.status == "unfinished"), *empty]

    def _sweep_lost_uploads(self) -> None:
        self._lease.insist()
        try:
            leftovers.sweep_lost_uploads(self._root, self._lease.gone)
        except Exception as error:  # noqa: BLE001 - of a package that saves do without
            log.info("%s: whether there are uploads that nobody goes on with is not known: %s", self._root.url, error)

    def _sweep(self, name: str) -> None:
        store = self._root.place(name)
        found = leftovers.survey(store, self._lease.gone)
        # Only now: a save that was over by then, and has no commit here, never will have.
        names = [info.name for info in store.list()]
        if not found.over or any(map(is_commit_marker, names)):
            return
        leftovers.sweep_uploads(store, found)  # before the claims go, which say whose they are
        if REMOVING_NAME in names:
            self._root.remove(name)
            return
        for each in leftovers.claims_last(found.dead):
            store.delete(each)
        if found.dead:
            log.info("swept %d files of dead saves from %s", len(found.dead), store.url)
        self._root.drop_empty(name)
        if not names:
            self._bare.add(name)

    def _failed(self, where: str, error: BaseException, step: int | None) -> None:
        log.warning("%s could not be tidied up: %s", where, error, exc_info=error)
        kind, message = type(error).__name__, str(error)
        emit(PruneFailed, lambda: PruneFailed(rank=0, where=where, step=step, kind=kind, message=message))


def _none(entries: list[Entry]) -> Collection[str]:  # noqa: ARG001 - whatever there is
    return ()


def _never(name: str) -> bool:  # noqa: ARG001 - whatever it is called
    return False
