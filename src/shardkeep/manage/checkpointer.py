"""
`Checkpointer`: the checkpoints of a long run. When to save, which checkpoint to restore, which ones to keep.

    a step -> due? (by its number, or decided by rank 0) -> save -> commit -> `latest` -> prune and sweep
                                                                           -> promote, if there is a second root
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from typing_extensions import Self

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.codecs import Codecs
from shardkeep.errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    EarlierSaveFailed,
    LeaseLost,
    NotPromoted,
    RootInUse,
    StateError,
)
from shardkeep.events import Callback, Listening
from shardkeep.events import on_event as listen
from shardkeep.format.record import checked_step
from shardkeep.manage import schedule
from shardkeep.manage.catalog import Catalog, Tiers, Walk
from shardkeep.manage.decisions import Decision, RankContext
from shardkeep.manage.entry import Entry, newest_saves, require_readable
from shardkeep.manage.replicate import ReplicationTerms
from shardkeep.manage.restore import Restored, restore
from shardkeep.manage.retention import Best, KeepBest, Mode, Policy, build_policy, parse_best
from shardkeep.manage.saves import PINNED, Saved, Saves, StepState, UnsavedStep, why_not_to_save
from shardkeep.options import Options
from shardkeep.storage.base import Root, same_place
from shardkeep.storage.resolve import open_root
from shardkeep.storage.retry import RetryingStore, RetryPolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("shardkeep")

_NOW = "now"  # the reason of a save that the caller asked for, whatever exists
_NOTIFY_S = 2.0  # how long a rank that failed may take to notify the others, which may be at the end of their run

OnError = Literal["raise", "warn"] | Callable[[BaseException], object]


class Checkpointer:
    """
    The checkpoints of a training run, below one root. All ranks create one with the same arguments and make the same calls.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> root, state = tempfile.mkdtemp(), {"model": torch.nn.Linear(4, 4)}
        >>> with sk.Checkpointer(root, every_steps=2, keep_last=2) as ckpt:
        ...     start = ckpt.restore_latest(state) or 0
        ...     for step in range(start + 1, 8):
        ...         saved = ckpt.step(step, state)
        ...     ckpt.wait()
        ...     ckpt.all_steps()
        [4, 6]

    """

    _clock = schedule.CLOCK  # tests replace it, in a subclass

    def __init__(
        self,
        root: str | os.PathLike[str] | Root,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        at_steps: Iterable[int] = (),
        signals: Iterable[int | str] = (),
        request_file: str | None = "save-now",
        save_last: bool | Literal["weights"] = True,
        template: str = "step-{step}",
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        keep_hours: float | None = None,
        retention: Policy | None = None,
        asynchronous: bool = True,
        staging: Literal["auto", "overlap", "device", "host"] = "auto",
        writer: Literal["thread", "process"] = "thread",
        max_in_flight: int = 1,
        allow_pickle: bool = False,
        options: Options | None = None,
        group: ProcessGroup | World | None = None,
        on_error: OnError = "raise",
        retries: int = 3,
        takeover: bool = False,
        on_event: Callback | None = None,
        codecs: Codecs = None,
        promote_to: str | os.PathLike[str] | Root | None = None,
        promote_every: int = 1,
        keep_promoted: Policy | None = None,
        promote_required: bool = True,
    ) -> None:
        """
        Write nothing yet: the first save creates the root if it does not exist.

        Args:
            root: a path, a URL, or a root. All ranks must see the same one.
            every_steps: `step` saves whenever a multiple of it is reached.
            every_minutes: `step` saves when this much time has passed since the last save, by rank 0's clock.
            at_steps: `step` saves at these steps.
            signals: `step` saves when one of these signals ("SIGTERM") has reached any rank. It returns when the
                checkpoint is durable, and `should_stop` is True from then on. If that save fails, a later step saves
                again. Needs the main thread.
            request_file: `step` saves when a file of this name appears in the root, and deletes it. None: do not look
                for one. Without this, `every_minutes` and `signals`, ranks communicate only to save.
            save_last: at the end of the `with` block, save the state that was given to the last `step`, if it was not saved.
                Not if an exception ends the block, and not in `close`. "weights": save only the modules of that state.
            template: the name of a step's checkpoint.
            keep_last: keep this many of the newest.
            keep_every: keep those whose step is a multiple of it.
            keep_best: keep the best by a metric: "loss", ("loss", 3), ("score", 3, "max"), or a `KeepBest`. Checkpoints
                without the metric are kept too.
            keep_hours: keep those saved within this many hours.
            retention: a policy of your own. A checkpoint is kept if any of these wants it, if it is pinned, or if it is
                the newest. Without any of them, all are kept.
            asynchronous: save while training goes on. A later call reports the failure of such a save.
            staging: as for `async_save`.
            writer: as for `async_save`.
            max_in_flight: as for `async_save`.
            allow_pickle: as for `save`, and for `load`.
            options: threads, memory and timeouts.
            group: the ranks that take part.
            on_error: what happens when a save fails. "raise": the call raises, or a later call for an asynchronous
                save, the same on all ranks. "warn": the error is logged. A function is called with the error. In any
                case nothing is deleted after a failed save, and the next save is tried. `RootInUse`, `LeaseLost` and
                `CheckpointExists` (this job must restore first) are always raised.
            retries: how often an operation of a store is repeated after a transient error.
            takeover: take the root from another job that saves to it.
            on_event: called with each event of this root.
            codecs: as for `save`.
            promote_to: a second root, such as an object store, to which each checkpoint is copied in the background.
                A restore takes the nearest copy that is whole.
            promote_every: promote steps that are a multiple of it, pinned ones, and at `close` the newest.
            keep_promoted: what is kept in the second root; by default the same as in the first.
            promote_required: keep a checkpoint in the first root until it is promoted, whatever the policies say.

        Raises:
            StateError: an argument is invalid.

        """
        options, clock = options or Options(), self._clock
        roots = [open_root(each, direct=options.direct_io) for each in (root, promote_to) if each is not None]
        if len(roots) > 1 and same_place(*roots):
            hint = "give another place to promote to, or None"
            raise StateError(f"promote_to={promote_to!r} is the root itself", hint=hint)
        every_steps = None if every_steps is None else _whole("every_steps", every_steps)
        every_minutes = None if every_minutes is None else _positive("every_minutes", every_minutes)
        max_in_flight, retries = _whole("max_in_flight", max_in_flight), _whole("retries", retries, least=0)
        at = sorted(map(_valid_step, at_steps))
        wanted_signals = schedule.parse_signals(signals)
        if save_last not in (True, False, "weights"):
            raise StateError(f"save_last={save_last!r}", hint='give True, False or "weights"')
        arguments = [template, every_steps, at, every_minutes, request_file, save_last, asynchronous, max_in_flight]
        retry_policy = RetryPolicy(retries, sleep=clock.sleep)
        self._root = roots[0]
        self._tiers = Tiers(*(Catalog(RetryingStore(each, retry_policy), template) for each in roots))
        self._best = parse_best(keep_best)
        self._errors = _ErrorReporter(on_error, self._root.url)
        self._schedule = schedule.StepSchedule(every_steps, at)
        self._requests = schedule.SaveRequests(self._root, request_file, clock, every_minutes=every_minutes)
        self._ranks = RankContext(
            self._root.url,
            clock,
            group=group,
            timeout_s=options.timeout_s,
            arguments=[*arguments, len(roots)],
        )
        policy = build_policy(
            last=None if keep_last is None else _whole("keep_last", keep_last),
            every=None if keep_every is None else _whole("keep_every", keep_every),
            best=self._best,
            hours=None if keep_hours is None else _positive("keep_hours", keep_hours),
            more=retention,
        )
        promote_every = _whole("promote_every", promote_every)
        terms = ReplicationTerms(every=promote_every, policy=keep_promoted or policy, required=promote_required)
        self._load_options = {"allow_pickle": allow_pickle, "options": options, "group": group}
        self._saves = Saves(
            roots,
            self._tiers,
            self._ranks,
            policy=policy,
            terms=None if promote_to is None else terms,
            retry_policy=retry_policy,
            takeover=takeover,
            max_in_flight=max_in_flight,
            raises=self._errors.raises,
            how=self._load_options if codecs is None else {**self._load_options, "codecs": codecs},
            how_asynchronous={"staging": staging, "writer": writer} if asynchronous else None,
        )
        self._has_rule = bool(wanted_signals or every_steps or at or every_minutes)
        self._exchanges = bool(wanted_signals) or every_minutes is not None or request_file is not None
        """Whether ranks exchange decisions: not needed where only step numbers decide."""
        self._save_last = save_last
        self._decision: Decision | None = None  # what `should_save` found, until `step` or `save` follows it
        self._unsaved: UnsavedStep | None = None  # what the last `step` was given, if no save was due
        self._last_restore: Restored | None = None
        self._should_stop = False
        self._closing = False
        self._closed = False
        # Handlers must be installed last, because nothing after them may fail.
        with ExitStack() as ends:
            ends.callback(self._ranks.close)
            if on_event is not None:
                ends.callback(_listen_below(on_event, self._tiers.urls).stop)
            ends.callback(
                schedule.SignalHandlers(wanted_signals, partial(self._requests.request, schedule.STOP)).remove
            )
            self._ends = ends.pop_all()

    def __repr__(self) -> str:
        return f"Checkpointer({self._root.url!r})"

    # -- saving --------------------------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Saved | None:
        """
        Save the state if a save is due. Call it on all ranks after each step, with the same steps.

        Args:
            step: the number of the finished step, 0 or more, counted over the whole run and all its epochs. After a
                restore, steps are counted from the restored one, and existing later steps are overwritten. The step that
                was restored or saved last is not saved again.
            state: as for `save`.
            metrics: numbers by which checkpoints are compared; rank 0's are stored.
            meta: as for `save`.
            force: save whether it is due or not.

        Returns:
            The handle of the save, or its report where saves are not asynchronous. None if no save was due, if it failed
            and `on_error` is not "raise", or if a pinned checkpoint of this step exists.

        Raises:
            EarlierSaveFailed: an earlier asynchronous save failed; its error is the cause. If a save was due now, it has
                been begun all the same: it is the error's `response`.
            RootInUse: another job saves to this root.
            CheckpointExists: the root has this step or later ones, and nothing was restored.
            StateError: the step is lower than one that was restored or saved.

        """
        made = self._decide_for(step)
        given = StepState(made.step, state, metrics, meta)
        unsaved = UnsavedStep.hold(given, self._ranks.world, weights_only=self._save_last == "weights")
        self._decision = self._unsaved = None
        why = "the caller forces it" if force else made.why
        if not why and self._save_last and self._saves.last_step != made.step:
            self._unsaved = unsaved
        if not why and not self._has_rule and self._ranks.world.rank == 0:
            self._has_rule = True  # said once
            last = ", and the last one at the end of the with block" if self._save_last else ""
            log.warning(
                "%s: without every_steps, at_steps, every_minutes or signals, step() saves only what is asked for%s",
                self._root.url,
                last,
            )
        return self._save_if_due(made, given, why)

    def should_save(self, step: int) -> bool:
        """
        Return whether `step` saves at this step, where it takes time to make the state. Call it on all ranks, before `step`.

        If it returns True, and neither `step` nor `save` follows, the next step is due instead.
        """
        made = self._decide_for(step)
        return bool(made.why) and not self._saves.is_last(made.step)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Saved | None:
        """
        Save the state now, as `step` does, whether a save is due or not. Call it on all ranks.

        `overwrite` replaces a checkpoint of this step; without it, one is an error, unless this job went back from it.
        """
        step = self._valid_next(step)
        made, self._decision, self._unsaved = self._decision, None, None
        if made is None or made.step != step:
            made = Decision(step=step)
        return self._save_if_due(made, StepState(step, state, metrics, meta), _NOW, overwrite=overwrite)

    def request_save(self) -> None:
        """Make the next `step`, or one soon after, save. May be called on any rank, from any thread."""
        if not self._exchanges:
            hint = "give a request_file, every_minutes or signals"
            raise StateError("ranks do not exchange requests here", hint=hint)
        self._requests.request(schedule.SAVE)

    @property
    def should_stop(self) -> bool:
        """Whether a signal has reached any rank, and the checkpoint that it requested is durable; same on all ranks."""
        return self._should_stop

    def _decide_for(self, step: int) -> Decision:
        """Decide once whether a step is due: all ranks, by its number, or as rank 0 says. Steps go up."""
        step = self._valid_next(step)
        before = self._decision or Decision(step=-1)
        if before.step == step:
            return before
        why, made = self._schedule.reached(step), Decision(step=step)
        if self._exchanges:
            made = self._ranks.decide(step, self._requests.take, self._decide)
        # What `should_save` found for an earlier step that was not saved is still due.
        why, stop = why or made.why or before.why, made.stop or before.stop
        self._decision = msgspec.structs.replace(made, why=why, stop=stop)
        return self._decision

    def _save_if_due(self, made: Decision, given: StepState, why: str, *, overwrite: bool = False) -> Saved | None:
        """Save a step if there is a reason; one that exists only if the caller wants it now."""
        errors, saved, stop = self._saves.end(made.failed), None, made.stop
        if why not in ("", _NOW) and self._saves.is_last(made.step):
            why = ""  # it exists
            errors += self._saves.wait()
        durable = stop and not why
        try:
            if why:
                saved = self._save(given, why, errors, wait=stop, overwrite=overwrite)
                durable = stop and saved is not None
        except CheckpointExists as error:
            if PINNED not in error.details or why == _NOW:
                raise
            # If this were raised, the job would end at this step each time that it is started.
            log.warning("step %d is not saved, the next one that is due will be: %s", made.step, error.message)
        finally:
            self._should_stop = self._should_stop or durable
            if stop and not durable:
                self._requests.stop_again = True
        self._errors.report_earlier(errors, saved)
        return saved

    def _decide(self, requested: Collection[str]) -> Decision:
        """On rank 0, perhaps in another thread: decide what is done at the next call that is not decided."""
        why, stop = self._requests.why(requested)
        return Decision(why=why, stop=stop, failed=self._saves.failed())

    def _save(
        self, given: StepState, why: str, errors: list[BaseException], *, wait: bool, overwrite: bool
    ) -> Saved | None:
        errors += self._saves.make_room()
        try:
            with self._errors.kept(errors):
                self._saves.begin(given.step)
                if self._ranks.world.rank == 0:
                    log.info("saving step %d to %s: %s", given.step, self._root.url, why)
                saved = self._saves.save(given, overwrite=overwrite)
                if wait:
                    self._saves.wait_for(saved)
        except (RootInUse, LeaseLost, EarlierSaveFailed):
            raise
        except CheckpointError as error:
            refused = isinstance(error, CheckpointExists) and (PINNED in error.details or not self._saves.begun)
            if refused or self._errors.raises:
                raise
            self._errors.report(error)
            return None
        finally:
            self._requests.restart_timer()
        return saved

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore_latest(self, state: MutableMapping[str, Any], **load_options: Any) -> int | None:
        """
        Fill a state from the newest checkpoint that is whole. Call it on all ranks.

        If a checkpoint is damaged, the one before it is tried; `last_restore` lists what was skipped. It is an error if the
        state does not fit, if all checkpoints of the root are damaged, or if the store fails to give the record of one,
        which may be the newest. To go on without that one, move it out of the root.

        Args:
            state: as for `load`.
            **load_options: as for `load`: strict, include, exclude, rename, cast.

        Returns:
            The step, the same on all ranks; None if there is no checkpoint.

        """

        def choose(most: int | None) -> list[Entry]:
            found = list(islice(self._newest_first(), most))
            if not found:
                self._warn_of_other_templates()
            return found

        return self._restore(state, "the latest checkpoint", choose, load_options)

    def restore(self, step: int, state: MutableMapping[str, Any], **load_options: Any) -> int:
        """
        Fill a state from the checkpoint of a step. Call it on all ranks.

        If later checkpoints exist, what is saved from now on begins a new timeline, and is newer than they are.

        Raises:
            CheckpointNotFound: there is none.

        """
        step = _valid_step(step)

        def choose(_: int | None) -> list[Entry]:
            found = [entry for entry in newest_saves(self._tiers.find(step)) if entry.status != "unfinished"]
            if not found:
                raise self._not_found(step)
            problems = [entry.problem for entry in found if entry.problem is not None]
            if len(problems) == len(found):
                raise problems[0]
            return found

        restored = self._restore(state, f"step {step}", choose, load_options, may_skip=False)
        return step if restored is None else restored

    def restore_best(
        self, state: MutableMapping[str, Any], metric: str | None = None, mode: Mode | None = None, **load_options: Any
    ) -> int | None:
        """
        Fill a state from the best checkpoint by a metric, by default that of `keep_best`. Call it on all ranks.

        As in `restore_latest`, a damaged checkpoint is skipped, and the next best is tried.
        """
        best = self._best_by(metric, mode)

        def choose(_: int | None) -> list[Entry]:
            found = self._readable_committed()
            ranked = best.ranked(found)
            if found and not ranked:
                known = {name for entry in found for name in entry.metrics}
                where, have = " and ".join(self._tiers.urls), ", ".join(sorted(known)) or "none"
                what = "a number for" if best.metric in known else "the metric"
                hint = f"they have {have}; restore_latest() needs no metric"
                raise CheckpointNotFound(f"{where}: no checkpoint has {what} {best.metric!r}", hint=hint)
            return ranked

        return self._restore(state, f"the best checkpoint by {best.metric}", choose, load_options)

    @property
    def last_restore(self) -> Restored | None:
        """What the last restore loaded, from which root, and what it skipped, with reasons."""
        return self._last_restore

    def _restore(
        self,
        state: MutableMapping[str, Any],
        what: str,
        choose: Callable[[int | None], list[Entry]],
        load_options: dict[str, Any],
        *,
        may_skip: bool = True,
    ) -> int | None:
        self._check_open()
        self._saves.watch_leases()
        with self._after_saves():
            self._last_restore = found = restore(
                state,
                world=self._ranks.world,
                what=what,
                roots=self._tiers.urls,
                choose=choose,
                open_store=self._saves.store_to_read,
                may_skip=may_skip,
                **{**self._load_options, **load_options},
            )
            if found is not None:
                if self._ranks.world.rank == 0:
                    why = f": {found.why}" if found.why else ""
                    log.info("step %d is restored from %s%s", found.step, found.where, why)
                self._schedule.last = found.step
                self._unsaved = None
                self._saves.restored(found)
                self._requests.restart_timer()
        return None if found is None else found.step

    def _warn_of_other_templates(self) -> None:
        """Training starts afresh: warn if the root has checkpoints with other names."""
        try:
            found = self._tiers.near.strangers()
        except CheckpointError as error:  # only a warning depends on it
            log.info("%s: cannot look for checkpoints of other names: %s", self._root.url, error)
            return
        text = "%s has no checkpoint of the template %r, but %s: is template=%r meant?"
        for name, template in found.items():
            log.warning(text, self._root.url, self._tiers.near.naming.template, name, template)

    def latest_step(self) -> int | None:
        """
        Return the newest committed step. This rank looks by itself: another rank may see another step a moment later.

        Raises:
            StorageError: a record cannot be read at the moment, and may be the newest.

        """
        return next((entry.step for entry in self._newest_first() if entry.committed), None)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """
        Return the best committed step by a metric, by default that of `keep_best`. This rank looks by itself.

        Raises:
            StorageError: a record cannot be read at the moment, and may be the best.

        """
        return next((entry.step for entry in self._best_by(metric, mode).ranked(self._readable_committed())), None)

    def all_steps(self) -> list[int]:
        """Return all committed steps, sorted. This rank looks by itself."""
        return sorted({entry.step for entry in self._tiers.entries() if entry.committed})

    def pin(self, step: int) -> None:
        """
        Keep the checkpoint of a step whatever the policies say, until `unpin`.

        Raises:
            CheckpointNotFound: there is none, or it has just been deleted.

        """
        if not self._exists(_valid_step(step)):
            raise self._not_found(step)
        name = self._tiers.near.naming.name(step)
        self._tiers.pin(name)
        # A deletion looks for the pin just before it begins: the pin was in time if the checkpoint still exists now.
        if not self._exists(step):
            self._tiers.unpin(name)
            raise self._not_found(step)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policies again."""
        self._tiers.unpin(self._tiers.near.naming.name(_valid_step(step)))

    def delete(self, step: int) -> None:
        """
        Delete the checkpoint of a step, in both roots if there are two, after all saves. Call it on all ranks.

        Raises:
            CheckpointNotFound: there is none.
            StateError: it is pinned.
            RootInUse: another job saves to this root.

        """
        self._check_open()
        step = _valid_step(step)
        with self._after_saves() as errors:
            if self._saves.replicator is not None:
                errors.extend(self._saves.replicator.wait())
            self._saves.delete(step, self._not_found)

    def _exists(self, step: int) -> bool:
        return any(found.committed for found in self._tiers.find(step))

    def _newest_first(self) -> Iterator[Entry]:
        walk = Walk(self._tiers.all)
        return walk.readable(walk.newest_first())

    def _readable_committed(self) -> list[Entry]:
        """Return all copies of the newest save of each step, if the store gives all records."""
        entries = [require_readable(entry, self._tiers.urls) for entry in self._tiers.entries()]
        return [entry for entry in newest_saves(entries) if entry.committed]

    def _best_by(self, metric: str | None, mode: Mode | None) -> KeepBest:
        if metric is None and self._best is None:
            raise StateError("which metric?", hint='give metric="loss", or keep_best to the Checkpointer')
        if self._best is not None and metric in (None, self._best.metric):
            return replace(self._best, mode=mode or self._best.mode)
        return KeepBest(metric or "", mode=mode)

    def _not_found(self, step: int) -> CheckpointNotFound:
        have = ", ".join(map(str, self.all_steps()[-20:])) or "none"
        where = " and ".join(self._tiers.urls)
        return CheckpointNotFound(f"{where}: there is no checkpoint of step {step}", hint=f"there are: {have}")

    # -- ending --------------------------------------------------------------------------------------------------

    def wait(self, *, promotions: bool = True, timeout_s: float | None = None) -> None:
        """
        Wait until all saves are durable, and until what no policy wants is deleted. Call it on all ranks.

        Args:
            promotions: also wait for everything that is to be promoted.
            timeout_s: how long to wait for promotions.

        Raises:
            EarlierSaveFailed: a save failed; its error is the cause. `NotPromoted`: all saves succeeded, and a promotion
                failed.
            TimeoutError: promotions did not end in time; they go on.

        """
        with self._after_saves() as errors:
            if promotions and self._saves.replicator is not None:
                errors.extend(self._saves.replicator.wait(timeout_s))

    @contextmanager
    def _after_saves(self) -> Iterator[list[BaseException]]:
        """Wait for all saves, and report their errors after what is inside, which may add some."""
        errors = self._saves.wait()
        with self._errors.kept(errors):
            yield errors
        self._errors.report_earlier(errors)

    def cancel_promotions(self) -> None:
        """Cancel what is being promoted, until the next save continues it. Call it on all ranks."""
        if self._saves.replicator is not None:
            self._saves.replicator.cancel()

    def close(self, *, timeout_s: float | None = None) -> None:
        """
        Wait for all saves, then release the root, threads and signal handlers.

        It may be called twice; after an interrupt, a second call finishes the job. With a second root, the newest
        checkpoint is promoted whatever its step, and all promotions are waited for. After `timeout_s` they are cancelled,
        and the next job continues them.

        Raises:
            EarlierSaveFailed: a save or a promotion failed, and this was not reported before.

        """
        self._close(timeout_s, newest=True)

    def _close(self, timeout_s: float | None, *, newest: bool) -> None:
        if self._closed:
            return
        newest, self._closing = newest and not self._closing, True
        errors: list[BaseException] = []
        try:
            errors = self._saves.wait()
            with self._errors.kept(errors):
                if self._saves.replicator is not None:
                    errors += self._saves.replicator.finish(timeout_s, newest=newest)
        except BaseException:  # a caller that cannot wait for saves does not wait for promotions either
            self.cancel_promotions()
            raise
        finally:
            with self._ends:
                self._saves.close()
        self._closed = True  # only now, because an interrupted call may be repeated
        self._errors.report_earlier(errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._end_run(None)
            finally:
                self.close()
            return
        try:
            with suppress(CheckpointError):
                self._end_run(error)
            # Other ranks may not get here, so nothing is begun that needs them.
            self._close(None, newest=False)
        except Exception as second:  # noqa: BLE001 - the first error is the important one
            log.error("%s: while %s was raised: %s", self._root.url, type(error).__name__, second)  # noqa: TRY400

    def _end_run(self, error: BaseException | None) -> None:
        """At the end of the block: save the last step if all ranks can; a rank that failed notifies the others."""
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is None or self._closing:
            return
        step, world, title = unsaved.held.step, unsaved.world, f"end of the run in {self._root.url}"
        if not (reason := self._ranks.why_gone(world)):
            if error is not None:
                with rendezvous(replace(world, timeout_s=min(_NOTIFY_S, world.timeout_s)), title):
                    raise CheckpointError(f"{type(error).__name__}: {error}")
            with rendezvous(world, title) as meeting:
                mine = msgspec.json.encode((step, unsaved.why_gone()))
                reason = meeting.agree("end", lambda: mine, why_not_to_save).decode()
        if not reason:
            self._save_if_due(Decision(step=step), unsaved.given(), "the run ends")
        elif world.rank == 0:
            log.warning("%s: the last step, %d, is not saved: %s", self._root.url, step, reason)

    def _valid_next(self, step: Any) -> int:
        self._check_open()
        number = _valid_step(step)
        self._saves.check(number)
        return number

    def _check_open(self) -> None:
        if self._closing:
            raise StateError(f"this Checkpointer of {self._root.url} is closed")


class _ErrorReporter:
    def __init__(self, on_error: OnError, where: str) -> None:
        if on_error not in ("raise", "warn") and not callable(on_error):
            raise StateError(f"on_error={on_error!r}", hint='give "raise", "warn", or a function of the error')
        self.raises = on_error == "raise"
        self._on_error = on_error
        self._where = where

    def report(self, error: BaseException) -> None:
        if callable(self._on_error):
            self._on_error(error)
        else:
            then = "was not reported before" if self.raises else "training goes on"
            what = "a promotion" if isinstance(error, NotPromoted) else "a save"
            log.error("%s: %s failed, and %s: %s", self._where, what, then, error)

    @contextmanager
    def kept(self, errors: Sequence[BaseException]) -> Iterator[None]:
        """If the body fails, also report earlier errors, the first one as the context of the new one."""
        try:
            yield
        except BaseException as error:
            for earlier in errors:
                self.report(earlier)
            if errors and error.__context__ is None:
                error.__context__ = errors[0]
            raise

    def report_earlier(self, errors: Sequence[BaseException], saved: Saved | None = None) -> None:
        """Report errors of asynchronous saves; raise if errors are raised, or another job has taken the root."""
        lost = any(isinstance(error, LeaseLost) or isinstance(error.__cause__, LeaseLost) for error in errors)
        if not errors or not (self.raises or lost):
            for error in errors:
                self.report(error)
            return
        first = errors[0]
        if isinstance(first, NotPromoted):  # errors of saves come first: there are none
            first.response = saved
            raise first
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        earlier = EarlierSaveFailed(
            f"{self._where}: an earlier asynchronous save failed{more}: {first}",
            hint="let only one job save to a root"
            if lost
            else 'on_error="warn" goes on without it; what this call saves is not affected',
        )
        earlier.response = saved
        raise earlier from first


# -- arguments ----------------------------------------------------------------------------------------------------


def _valid_step(step: Any) -> int:
    number = checked_step(step)
    if number is None or number < 0:
        raise StateError(f"step is {step!r}", hint="give a whole number, 0 or more")
    return number


def _whole(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of any type (numpy has its own); raise `StateError` for anything else, or if it is too small."""
    with suppress(TypeError):
        number = operator.index(value)
        if number >= least and not isinstance(value, bool):
            return int(number)
    raise StateError(f"{name}={value!r}", hint=f"give a whole number, {least} or more")


def _positive(name: str, value: Any) -> float:
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if number > 0:
            return number
    raise StateError(f"{name}={value!r}", hint="give a number, more than 0, or None")


def _listen_below(callback: Callback, urls: Sequence[str]) -> Listening:
    """Call a function with the events of these roots and of everything below them."""
    places = tuple(f"{url.rstrip('/')}/" for url in urls)
    return listen(lambda event: f"{event.where}/".startswith(places) and callback(event))
