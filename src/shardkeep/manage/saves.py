"""
The saves of a Checkpointer: where each one goes, what it may overwrite, and what happens before the first and after each.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import msgspec
from torch import nn
from torch.optim import Optimizer

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.team import Team
from shardkeep.dist.world import World
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import SaveReport
from shardkeep.engine.save_session import SaveArguments
from shardkeep.errors import (
    CheckpointError,
    CheckpointExists,
    EarlierSaveFailed,
    RanksDisagree,
    StateError,
    StorageError,
)
from shardkeep.events import Retried, emit
from shardkeep.manage import catalog
from shardkeep.manage.catalog import Walk
from shardkeep.manage.decisions import PendingTasks, RankContext
from shardkeep.manage.entry import FAR, NEAR, Entry, build_meta
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import Pruner
from shardkeep.manage.replicate import ReplicationTerms, Replicator
from shardkeep.manage.restore import Restored
from shardkeep.manage.retention import Policy, compared_metrics
from shardkeep.saving import run_save, start_save
from shardkeep.state.patterns import closest
from shardkeep.storage.base import Root, Store
from shardkeep.storage.cancel import run_with_deadline
from shardkeep.storage.retry import RetryingStore, RetryPolicy

T = TypeVar("T")
Saved = SaveHandle[SaveReport] | SaveReport

Labels = Mapping[str, Any] | None

PINNED = "pinned"
"""In the details of a `CheckpointExists` that refuses to overwrite a pinned checkpoint."""

log = logging.getLogger("shardkeep")


@dataclass
class Timeline:
    """
    The timeline that a job saves to. Only rank 0 has to know it.

    A job that restores step 100 while 200 exists, and goes on from there, begins a new timeline. The next `restore_latest`
    takes 150 of the new timeline, and not 200 of the old one. No clock is involved.
    """

    number: int = 0
    after: int | None = None
    """The step that was restored; None if there was none."""
    began_after: tuple[int, int] | None = None
    """The timeline and step after which it began; None for the first timeline."""
    saved: set[int] = field(default_factory=set)

    def may_overwrite(self, step: int) -> bool:
        """Return whether an existing checkpoint of a step was abandoned when this job went back."""
        return self.after is not None and step > self.after and step not in self.saved


def find_timeline(walk: Walk, restored: tuple[int, int] | None, step: int) -> Timeline:
    """Determine the timeline of a job that is about to save its first step; `restored` is a timeline and a step."""
    # A record that cannot be read at the moment is an error: otherwise, the newest timeline's number might be used twice.
    where, highest = " and ".join(walk.roots), walk.newest_timeline

    def began_after(timeline: int) -> tuple[int, int] | None:
        """Return after which timeline and step a timeline began, if one of its records says so; the first one has no origin."""
        there = walk.readable(walk.by_step()) if timeline else ()
        return next((entry.began_after for entry in there if entry.timeline == timeline and entry.began_after), None)

    newest = next(walk.readable(walk.by_step()), None)
    if restored is None:
        if newest is not None and step <= newest.step:
            raise CheckpointExists(
                f"{where} has checkpoints up to step {newest.step}, this job restored none of them and saves step {step}",
                hint="call restore_latest() or restore(step) first, or choose another root",
            )
        return Timeline(highest, began_after=began_after(highest))
    if step < restored[1]:
        raise StateError(
            f"{where}: step {step} is to be saved, and step {restored[1]} was restored",
            hint="count steps over the whole run; to go back, restore an earlier step",
        )
    later = takewhile(lambda entry: entry.step > restored[1], walk.readable(walk.by_step()))
    if highest > restored[0] or any(entry.age > restored for entry in later):
        return Timeline(highest + 1, after=restored[1], began_after=restored)
    return Timeline(restored[0], after=restored[1], began_after=began_after(restored[0]))


class StepState(NamedTuple):
    step: int
    state: Mapping[str, Any]
    metrics: Labels
    meta: Labels


class UnsavedStep(NamedTuple):
    """What `step` was given and did not save, until the next one; its modules and optimizers are not kept alive."""

    held: StepState
    """With weak references to the modules and optimizers of the state."""
    world: World

    @classmethod
    def hold(cls, given: StepState, world: World, *, weights_only: bool) -> UnsavedStep:
        """Hold the state, or only the modules in it; raise `StateError` if there is none."""
        state = given.state
        if not isinstance(state, Mapping):
            raise StateError(f"the state is a {type(state).__name__}", hint='give a dict, as in {"model": model}')
        if weights_only and not (state := _modules_of(state)):
            raise StateError(
                'save_last="weights" saves the modules of the state, and there is none in it',
                hint="put the module itself into the state, and not its state_dict()",
            )
        held = {key: ref(each) if isinstance(each, (nn.Module, Optimizer)) else each for key, each in state.items()}
        return cls(given._replace(state=held), world)

    def given(self) -> StepState:
        held = self.held.state.items()
        return self.held._replace(state={key: each() if isinstance(each, ref) else each for key, each in held})

    def why_gone(self) -> str:
        """Return why it cannot be saved any more; empty if it can."""
        gone = [key for key, each in self.given().state.items() if each is None and self.held.state[key] is not None]
        return f"{', '.join(map(str, gone))} of its state no longer exists" if gone else ""


def _modules_of(state: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: _modules_of(each) for key, each in state.items() if isinstance(each, Mapping)}
    modules = {key: each for key, each in state.items() if isinstance(each, nn.Module) or inner.get(key)}
    return {**modules, **{key: each for key, each in inner.items() if each}}


def why_not_to_save(payloads: list[bytes]) -> list[bytes]:
    """Decide on rank 0 whether all ranks can save the last step; the answer says why not."""
    ends = [msgspec.json.decode(each, type=tuple[int, str]) for each in payloads]
    if len(steps := {step for step, _ in ends}) > 1:
        raise RanksDisagree(
            f"ranks ended at the steps {sorted(steps)}, and the last one is not saved",
            hint="call step() on all ranks, with the same steps in the same order",
        )
    reasons = [f"on rank {rank}, {reason}" for rank, (_, reason) in enumerate(ends) if reason]
    return ["; ".join(reasons[:3]).encode()] * len(payloads)


class Saves:
    def __init__(
        self,
        roots: Sequence[Root],
        tiers: catalog.Tiers,
        ranks: RankContext,
        *,
        policy: Policy,
        terms: ReplicationTerms | None,
        retry_policy: RetryPolicy,
        takeover: bool,
        max_in_flight: int,
        raises: bool,
        how: Mapping[str, Any],
        how_asynchronous: Mapping[str, Any] | None,
    ) -> None:
        """
        `tiers` are the roots with retries. `raises`: errors of saves are raised by a later call. `how` has the arguments of
        all saves, `how_asynchronous` those of asynchronous ones, or None if saves are synchronous.
        """
        self._pending = PendingTasks(raises=raises)
        self._last: tuple[int, Saved | None] | None = None  # the step that was restored or saved last, and its save
        self._highest: int | None = None
        self._roots, self._root = roots, roots[NEAR]
        self._tiers, self._catalog = tiers, tiers.near
        self._ranks, self._retry_policy, self._max_in_flight = ranks, retry_policy, max_in_flight
        self._how, self._how_asynchronous = how, how_asynchronous
        self._compared = compared_metrics(policy) | compared_metrics(terms.policy if terms else None)
        """Metrics that policies compare, without those that a save lacked, which was a warning."""
        self._leases = [Lease(each.root, ranks.clock, takeover=takeover) for each in tiers.all]
        self._lease = self._leases[NEAR]
        spared = lambda near: self.replicator.coordinator.unreplicated(near) if self.replicator else ()  # noqa: E731
        self._pruner = Pruner(tiers.near, policy, self._lease, ranks.clock.now, spared=spared)
        self._in_call = False  # whether this rank is inside the call of a save
        self._swept = True  # whether the pruner has begun to sweep
        self.replicator: Replicator | None = None
        if terms is not None:
            self.replicator = Replicator(
                roots[FAR],
                tiers,
                ranks,
                self._pruner,
                terms,
                lease=self._leases[FAR],
                options=how["options"],
                retry_policy=retry_policy,
                is_saving=lambda: self._in_call or self._pending.running(),
            )
        self._background, self._pruners = [self._pending], [self._pruner]
        if self.replicator is not None:
            self._background.append(self.replicator.rounds)
            self._pruners.append(self.replicator.coordinator.pruner)
        self._timeline: Timeline | None = None  # where this job saves; None until `begin`, and again after a restore
        self._restored: Restored | None = None

    def watch_leases(self) -> None:
        """Begin to watch the leases of the roots: the time that a restore takes is not waited for again."""
        if self._ranks.world.rank == 0:
            for lease in self._leases:
                lease.watch()

    def restored(self, restored: Restored) -> None:
        self._restored = restored
        self._timeline = None
        self._last, self._highest = (restored.step, None), restored.step
        for tier, pruner in enumerate(self._pruners):
            pruner.distrusted = {each.name for each in restored.skipped if each.tier == tier}

    def check(self, step: int) -> None:
        """Raise `StateError` for a step below the last one: it would count as older, and be deleted first."""
        if self._highest is not None and step < self._highest:
            raise StateError(
                f"{self._root.url}: step {step} comes after step {self._highest}, which this job restored or saved",
                hint="count steps over the whole run, not over an epoch; to go back, restore(step) first",
            )

    def is_last(self, step: int) -> bool:
        """Return whether a step was restored or saved last; waits for its save, because a failed one does not count."""
        if self._last is None or self._last[0] != step:
            return False
        saved = self._last[1]
        return not isinstance(saved, SaveHandle) or saved.outcome() is None

    @property
    def last_step(self) -> int | None:
        """The step that was restored or saved last, even if its save has failed since."""
        return None if self._last is None else self._last[0]

    def failed(self) -> list[list[int]]:
        return [tasks.failed() for tasks in self._background]

    def end(self, failed: Sequence[Collection[int]]) -> list[BaseException]:
        pairs = zip(self._background, failed, strict=False)
        return [error for tasks, numbers in pairs for error in tasks.end(numbers)]

    def make_room(self) -> list[BaseException]:
        errors = self._pending.end_all(but=self._max_in_flight - 1)
        # One round of deletes may run beside a save, so that old checkpoints never pile up; the other ranks wait.
        self._pruner.catch_up(self._max_in_flight, within_s=self._ranks.world.timeout_s / 2)
        return errors

    def wait(self) -> list[BaseException]:
        errors = self._pending.end_all()
        self._pruner.wait()
        return errors

    def wait_for(self, saved: Saved) -> None:
        """Wait for the last save, and for the deletes after it; raise its error."""
        if isinstance(saved, SaveHandle):
            for error in self._pending.end([self._pending.count - 1]):
                raise error
        self._pruner.wait()

    def close(self) -> None:
        with ExitStack() as ends:  # the last one first, each of them even if another one fails
            if self.replicator is not None:
                ends.callback(self.replicator.close)
            ends.callback(run_with_deadline, self._lease.release, "shardkeep-release")
            ends.callback(self._pruner.close)
            if self.replicator is not None:
                ends.callback(self.replicator.stop)  # before the near root is released, because it reads from there

    def _on_rank_0(self, title: str, work: Callable[[], T], kind: type[T]) -> T:
        """Do something on rank 0, for which all ranks wait; longer than usual, because the lease of a dead job must expire."""
        world = replace(self._ranks.world, alone_s=2 * self._ranks.clock.lease_s)
        with rendezvous(world, title) as meeting:
            return Team(world, meeting).on_rank_0("begin", work, kind)

    @property
    def begun(self) -> bool:
        """Whether `begin` has succeeded since the last restore."""
        return self._timeline is not None

    def begin(self, step: int) -> None:
        """Before the first save, and the first after a restore: acquire the root, and find the timeline."""
        if self._timeline is not None:
            return
        found: list[Timeline] = []

        def acquire() -> str:
            self._lease.acquire()
            if self.replicator is not None:
                self.replicator.coordinator.acquire_root()
            restored = None if self._restored is None else (self._restored.timeline, self._restored.step)
            walk = Walk(self._tiers.all)
            found.append(timeline := find_timeline(walk, restored, step))
            if timeline.number > walk.newest_timeline:  # see `Walk`
                self._catalog.root.delete(catalog.LATEST_NAME)
            for entry in walk.looked_at:  # not in the background: the next save may need the room
                if entry.tier == NEAR and entry.status == "unfinished":
                    self._pruner.sweep_one(entry.name)
            self._swept = False
            return secrets.token_hex(8)

        session = self._on_rank_0(f"begin to save step {step} to {self._root.url}", acquire, str)
        # Only after the meeting, so that all ranks begin again if one of them failed.
        self._timeline = next(iter(found), Timeline())
        if self.replicator is not None:
            self.replicator.begin(session)

    def save(self, given: StepState, *, overwrite: bool) -> Saved:
        step, state, metrics, meta = given
        self._last, self._highest = None, step
        timeline = self._timeline or Timeline()
        name = self._catalog.naming.name(step)
        labels: Labels = None
        refusal: CheckpointError | None = None
        try:
            labels = build_meta(meta, metrics, timeline.number, timeline.began_after)
            overwrite = overwrite or self._may_overwrite(name, step, timeline)
        except (CheckpointExists, StateError) as error:
            refusal = error

        def check() -> None:
            if refusal is not None:  # raised inside the save, so that it reaches all ranks
                raise refusal

        place, first = self._root.place(name), self._ranks.world.rank == 0
        before_put = self._lease.check if first else None
        store = self._retrying(place, step, before_put)
        request = SaveArguments(where=store, step=step, meta=labels, overwrite=overwrite, check=check, **self._how)
        if first:
            if refusal is None:
                self._warn_of_missing_metrics(step, metrics or {})
            self._pruner.locks.acquire(name)
        other_failure: EarlierSaveFailed | None = None
        saved: Saved
        try:
            self._in_call = True
            if self._how_asynchronous is not None:
                saved = start_save(state, request, max_in_flight=self._max_in_flight, **self._how_asynchronous)
            else:
                saved = run_save(state, request)
        except EarlierSaveFailed as error:  # of a save outside this Checkpointer
            other_failure, saved = error, error.response
        except BaseException:
            for tasks in self._background:
                tasks.skip()
            if first:
                self._pruner.locks.release(name)
                self._sweep()
            raise
        finally:
            self._in_call = False
        self._last = step, saved
        if isinstance(saved, SaveHandle):
            self._pending.add(saved)
        if first:
            self._pruner.after_save(name, lambda: _succeeded(saved, step, timeline))
            self._sweep()
        if self.replicator is not None:
            self.replicator.after(saved, name)
        if other_failure is not None:
            raise other_failure
        return saved

    def _sweep(self) -> None:
        """Begin to sweep once, after a save and not beside it, because many records are read for it."""
        if not self._swept:
            self._swept = True
            self._pruner.begin()

    def _warn_of_missing_metrics(self, step: int, given: Mapping[str, Any]) -> None:
        for name in sorted(self._compared - given.keys()):
            self._compared.discard(name)
            near = closest(name, given.keys())
            log.warning(
                "step %d has no metric %r, by which checkpoints are compared, and is kept; it has %s%s",
                step,
                name,
                ", ".join(map(repr, given)) or "none",
                f": is keep_best={near!r} meant?" if near else "",
            )

    def _may_overwrite(self, name: str, step: int, timeline: Timeline) -> bool:
        """Return whether to overwrite a checkpoint of this step; raise `CheckpointExists` where the save must not."""
        coordinator = None if self.replicator is None else self.replicator.coordinator
        is_far = coordinator is not None and coordinator.has(name)
        if not timeline.may_overwrite(step):
            if is_far:
                raise CheckpointExists(
                    f"{self._roots[FAR].url}/{name}: a committed checkpoint is already there",
                    hint="save(..., overwrite=True) replaces it, or choose other roots",
                )
            return False
        try:
            pinned = (coordinator and coordinator.is_pinned(name)) or catalog.is_pinned(self._catalog.root, name)
            near = self._catalog.find(step) if pinned else None
            refused = pinned and (is_far or (near is not None and near.status != "unfinished"))
        except CheckpointError as error:
            log.warning("%s: cannot look for pins of step %d: %s", self._root.url, step, error)
            refused = True
        if refused:
            raise CheckpointExists(
                f"{self._root.url}/{name} is pinned, and is not overwritten by a job that has gone back from it",
                hint=f"unpin({step}), or save(..., overwrite=True)",
                **{PINNED: True},
            )
        return True

    def delete(self, step: int, not_found: Callable[[int], CheckpointError]) -> None:
        """Delete the checkpoint of a step from all roots, by rank 0; called by all ranks, after all saves."""
        name, root = self._catalog.naming.name(step), self._catalog.root

        def remove() -> None:
            for lease in self._leases:
                lease.acquire()
            found = [entry for entry in self._tiers.find(step) if entry.status != "unfinished"]
            if not found:
                raise not_found(step)
            if any(entry.pinned for entry in found):
                raise StateError(f"{self._root.url}/{name} is pinned, and is not deleted", hint=f"unpin({step}) first")
            for entry in found:
                self._pruners[entry.tier].remove(entry, "delete")
            root.delete(catalog.LATEST_NAME)
            if (newest := self._catalog.latest()) is not None:
                root.put(catalog.LATEST_NAME, f"{newest.name}\n".encode(), replace=True)
            if self.replicator is not None:
                self.replicator.coordinator.acquire_root()  # it knows what the far root has

        self._on_rank_0(f"delete step {step} of {self._root.url}", remove, type(None))
        if self.last_step == step:
            self._last = None  # it may be saved again

    def store_to_read(self, entry: Entry) -> Store:
        place = self._roots[entry.tier].place(entry.name)
        # Files of torch's layout may have any name, or be links; their reader uses the plain store.
        return place if entry.layout == "torch" else self._retrying(place, entry.step)

    def _retrying(self, place: Store, step: int, before_put: Callable[[], object] | None = None) -> RetryingStore:
        about: dict[str, Any] = {"rank": self._ranks.world.rank, "where": place.url, "step": step}

        def on_retry(attempt: int, error: StorageError, wait_s: float) -> None:
            what: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
            emit(Retried, partial(Retried, **about, **what, attempt=attempt, wait_s=wait_s))

        return RetryingStore(place, replace(self._retry_policy, on_retry=on_retry), before_put=before_put)


def _succeeded(saved: Saved, step: int, timeline: Timeline) -> bool:
    error = saved.outcome() if isinstance(saved, SaveHandle) else None
    if error is None:
        timeline.saved.add(step)
    elif isinstance(saved, SaveHandle):  # logged now, because the next call that would raise it may be far away
        saved.log_failure(error)
    return error is None
