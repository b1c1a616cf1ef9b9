"""What users give: numbers of any kind that is a number (numpy has its own) and of the right size, roots; or an error."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

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
from shardkeep.events import Callback, Event, Listening
from shardkeep.events import on_event as listen
from shardkeep.format.record import checked_step
from shardkeep.manage.catalog import (
    Catalog,
    Entry,
    Tiers,
    common_problem,
    newest_first,
    newest_saves,
    one_per_step,
    require_readable,
    restore_order,
)
from shardkeep.manage.decisions import Decision, RankContext
from shardkeep.manage.replicate.coordinator import ReplicationTerms
from shardkeep.manage.replicate.copy import CopyLimits
from shardkeep.manage.restore import Restored, candidates, restore
from shardkeep.manage.retention import Best, KeepBest, Mode, Policy, build_policy, parse_best
from shardkeep.manage.saves import PINNED, Saved, Saves
from shardkeep.manage.schedule import (
    REQUEST_KINDS,
    Clock,
    SaveRequests,
    SignalHandlers,
    StepSchedule,
    Timer,
    parse_signals,
)
from shardkeep.options import Options
from shardkeep.storage.base import Root
from shardkeep.storage.resolve import open_root
from shardkeep.storage.retry import RetryingRoot, RetryPolicy
from shardkeep.storage.same_place import same_place

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def checked_int(name: str, value: Any, least: int) -> int:
    """Return a whole number; raise `StateError` for anything else, and for one that is too small."""
    try:
        number = operator.index(value)
    except TypeError as exc:
        raise StateError(f"{name}={value!r}", hint=f"give a whole number, {least} or more") from exc
    if number < least or isinstance(value, bool):
        raise StateError(f"{name}={value!r}", hint=f"give a whole number, {least} or more")
    return int(number)


def checked_int_or_none(name: str, value: Any, least: int) -> int | None:
    """As `whole`, or None."""
    return None if value is None else checked_int(name, value, least)


def checked_positive_or_none(name: str, value: Any) -> float | None:
    """Return a number above 0, or None; raise `StateError` for anything else."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise StateError(f"{name}={value!r}", hint="give a number, more than 0, or None") from exc
    if not number > 0:
        raise StateError(f"{name}={value!r}", hint="give a number, more than 0, or None")
    return number


def open_roots(
    near: str | os.PathLike[str] | Root, far: str | os.PathLike[str] | Root | None, *, direct: bool
) -> list[Root]:
    """Return the root to save to, and the one to promote to, if any; raise `StateError` where they are one and the same."""
    if far is None:
        return [open_root(near, direct=direct)]
    roots = [open_root(each, direct=direct) for each in (near, far)]
    if same_place(*roots):
        raise StateError(f"promote_to={far!r} is the root itself", hint="give another place to promote to, or None")
    return roots


# Looking at the checkpoints of a Checkpointer's roots by their steps; each process by itself.


class Browser:
    """The steps of a root, or of two."""

    def __init__(self, tiers: Tiers, best: KeepBest | None) -> None:
        """Look at roots, whose best checkpoints are those that `best` keeps."""
        self._tiers = tiers
        self._best = best

    def latest_step(self) -> int | None:
        """
        Return the newest committed step. This rank looks by itself: others may see another one a moment later.

        Raises:
            StorageError: a record cannot be read now, and may be of the newest.

        """
        return next((entry.step for entry in newest_first(self._all_committed())), None)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """
        Return the best committed step by a metric, by default that of `keep_best`; this rank looks by itself.

        Raises:
            StorageError: a record cannot be read now, and may be of the best.

        """
        return next((entry.step for entry in self._best_by(metric, mode).ranked(self._all_committed())), None)

    def all_steps(self) -> list[int]:
        """Return all committed steps, sorted; this rank looks by itself."""
        return sorted(entry.step for entry in one_per_step(self._committed()))

    def pin(self, step: int) -> None:
        """
        Keep the checkpoint of a step whatever the policies say, until `unpin`.

        Raises:
            CheckpointNotFound: there is none, or it has just been deleted.

        """
        if not self._is_there(valid_step(step)):
            raise self._not_found(step)
        name = self._tiers.near.naming.name(step)
        self._tiers.pin(name)
        # Whoever deletes looks for the pin just before: it was put in time if the checkpoint is there now.
        if not self._is_there(step):
            self._tiers.unpin(name)
            raise self._not_found(step)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policies again."""
        self._tiers.unpin(self._tiers.near.naming.name(valid_step(step)))

    def _is_there(self, step: int) -> bool:
        return any(found.committed for found in self._tiers.find(step))

    def _committed(self) -> list[Entry]:
        """Return all copies of the newest save of each step."""
        return _committed_entries(self._tiers.entries())

    def _all_committed(self) -> list[Entry]:
        """Return the same, unless the store does not give all records now."""
        return _committed_entries(require_readable(self._tiers.entries(), self._tiers.urls))

    def _best_by(self, metric: str | None, mode: Mode | None) -> KeepBest:
        if metric is None and self._best is None:
            raise StateError("which metric?", hint='give metric="loss", or keep_best to the Checkpointer')
        known = self._best if self._best is not None and metric in (None, self._best.metric) else None
        return KeepBest(metric or (known.metric if known else ""), mode=mode or (known.mode if known else "min"))

    def _not_found(self, step: int) -> CheckpointNotFound:
        have = ", ".join(map(str, self.all_steps()[-20:])) or "none"
        return CheckpointNotFound(
            f"{self._tiers.where}: there is no checkpoint of step {step}", hint=f"there are: {have}"
        )


def _committed_entries(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in newest_saves(entries) if entry.committed]


def valid_step(step: Any) -> int:
    """Return a step that a checkpoint can be named after; raise `StateError` for any other."""
    number = checked_step(step)
    if number is None or number < 0:
        raise StateError(f"step is {step!r}", hint="give a whole number, 0 or more")
    return number


# What becomes of a save that failed: it is raised, logged, or given to a function.

log = logging.getLogger("shardkeep")

OnError = Literal["raise", "warn"] | Callable[[BaseException], object]


class ErrorReporter:
    """Tells of saves that failed, as the user wants it."""

    def __init__(self, on_error: OnError, where: str) -> None:
        """Say how; `where` is the root, in messages."""
        if on_error not in ("raise", "warn") and not callable(on_error):
            raise StateError(f"on_error={on_error!r}", hint='give "raise", "warn", or a function of the error')
        self.raises = on_error == "raise"
        self._on_error = on_error
        self._where = where

    def tell(self, error: BaseException) -> None:
        """Tell of a failure that is not raised."""
        if callable(self._on_error):
            self._on_error(error)
        else:
            goes_on = "was not told of before" if self.raises else "training goes on"
            what = "a promotion" if isinstance(error, NotPromoted) else "a save"
            log.error("%s: %s failed, and %s: %s", self._where, what, goes_on, error)

    @contextmanager
    def keeping(self, errors: Sequence[BaseException]) -> Iterator[None]:
        """Do something that may fail; then earlier failures are told as well, and are the context of the new one."""
        try:
            yield
        except BaseException as error:
            for earlier in errors:
                self.tell(earlier)
            if errors and error.__context__ is None:
                error.__context__ = errors[0]
            raise

    def tell_earlier(self, errors: Sequence[BaseException], saved: Any = None) -> None:
        """
        Tell of asynchronous saves that failed.

        Raises:
            EarlierSaveFailed: where failures are raised, or the root is another job's now; `saved` is its response.

        """
        lost = any(isinstance(error, LeaseLost) or isinstance(error.__cause__, LeaseLost) for error in errors)
        if not errors or not (self.raises or lost):
            for error in errors:
                self.tell(error)
            return
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        first = errors[0]
        if isinstance(first, NotPromoted):  # saves come before promotions: none failed
            first.response = saved
            raise first
        earlier = EarlierSaveFailed(
            f"{self._where}: an earlier asynchronous save failed{more}: {errors[0]}",
            hint="let only one job save to a root"
            if lost
            else 'on_error="warn" goes on without it; what this call saves is not affected',
        )
        earlier.response = saved
        raise earlier from errors[0]


# Restoring checkpoints of a root, and going on from there.


class Resuming(Browser):
    """The part of a Checkpointer that restores."""

    _root: Root
    _job: RankContext
    _saves: Saves
    _steps: StepSchedule
    _requests: SaveRequests
    _failures: ErrorReporter
    _how_to_load: dict[str, Any]
    _closed: bool = False
    _last_restore: Restored | None = None

    def restore_latest(self, state: MutableMapping[str, Any], **load_options: Any) -> int | None:
        """
        Fill a state from the newest checkpoint that is whole; called by all ranks.

        One that is damaged is passed over for the one before, which `last_restore` tells of. A state that does not fit is
        an error, and so is a root whose checkpoints are all damaged, and a store that does not give the record of one,
        which may be the newest: to go on without it, move it out of the root.

        Args:
            state: as for `load`.
            **load_options: as for `load`: strict, include, exclude, rename, cast.

        Returns:
            The step, on all ranks the same; None where there is no checkpoint.

        """

        def choose() -> list[Entry]:
            found = restore_order(require_readable(self._tiers.entries(), self._tiers.urls))
            if not found:
                self._warn_of_strangers()
            return found

        return self._restore(state, "the latest checkpoint", choose, load_options)

    def restore(self, step: int, state: MutableMapping[str, Any], **load_options: Any) -> int:
        """
        Fill a state from the checkpoint of a step; called by all ranks.

        Where later ones exist, what is saved from now on begins a new timeline: it is newer than they are.

        Raises:
            CheckpointNotFound: there is none.

        """
        step = valid_step(step)

        def choose() -> list[Entry]:
            found = [entry for entry in newest_saves(self._tiers.find(step)) if entry.status != "unfinished"]
            if not found:
                raise self._not_found(step)
            if (problem := common_problem(found)) is not None:
                raise problem
            return found

        restored = self._restore(state, f"step {step}", choose, load_options, walk=False)
        return step if restored is None else restored

    def restore_best(
        self, state: MutableMapping[str, Any], metric: str | None = None, mode: Mode | None = None, **load_options: Any
    ) -> int | None:
        """
        Fill a state from the best checkpoint by a metric, by default that of `keep_best`; called by all ranks.

        As `restore_latest`: one that is damaged is passed over for the next best.
        """
        best = self._best_by(metric, mode)
        what = f"the best checkpoint by {best.metric}"
        return self._restore(state, what, lambda: best.ranked(self._all_committed()), load_options)

    @property
    def last_restore(self) -> Restored | None:
        """What the last restore took, from which root, and what it passed over, with reasons."""
        return self._last_restore

    def _warn_of_strangers(self) -> None:
        """Training begins anew: say so if there are checkpoints that are called otherwise."""
        try:
            strangers = self._tiers.near.strangers()
        except CheckpointError as error:  # only a warning depends on it
            log.info("%s: cannot look for checkpoints of other names: %s", self._root.url, error)
            return
        for name, template in strangers.items():
            log.warning(
                "%s has no checkpoint of the template %r, but %s: is template=%r meant?",
                self._root.url,
                self._tiers.near.naming.template,
                name,
                template,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"this Checkpointer of {self._root.url} is closed")

    def _restore(
        self,
        state: MutableMapping[str, Any],
        what: str,
        choose: Callable[[], list[Entry]],
        load_options: dict[str, Any],
        *,
        walk: bool = True,
    ) -> int | None:
        self._check_open()
        errors = self._saves.wait()
        with self._failures.keeping(errors):
            self._last_restore = found = restore(
                state,
                world=self._job.world,
                what=what,
                roots=self._tiers.urls,
                choose=lambda: candidates(choose()),
                open_place=self._saves.places.to_read,
                walk=walk,
                **{**self._how_to_load, **load_options},
            )
        if found is not None:
            if self._job.world.rank == 0:
                why = f": {found.why}" if found.why else ""
                log.info("step %d is restored from %s%s", found.step, found.where, why)
            self._steps.begin_after(found.step)
            self._saves.restored(found)
            self._requests.timer.restart()
        self._failures.tell_earlier(errors)
        return None if found is None else found.step


# Waiting for what a Checkpointer has begun, and giving back what it holds.


class Ending(Resuming):
    """The part of a Checkpointer that waits and ends."""

    _handlers: SignalHandlers
    _listening: Listening | None
    _gone: bool = False

    def wait(self, *, promotions: bool = True, timeout_s: float | None = None) -> None:
        """
        Wait for all saves to be durable, and for what no policy wants to be deleted; called by all ranks.

        Args:
            promotions: wait for all that is to be promoted, too.
            timeout_s: how long to wait for promotions.

        Raises:
            EarlierSaveFailed: one failed; why is its cause. `NotPromoted`: all is saved, and something not promoted.
            TimeoutError: promotions are not over in time; they go on.

        """
        errors = self._saves.wait()
        with self._failures.keeping(errors):
            errors += self._saves.promotions.wait(timeout_s) if promotions else []
        self._failures.tell_earlier(errors)

    def cancel_promotions(self) -> None:
        """Give up what is being promoted, until the next save; what was copied is found then. Called by all ranks."""
        self._saves.promotions.cancel()

    def close(self, *, timeout_s: float | None = None) -> None:
        """
        Wait for all saves, then give back the root, threads and signal handlers. Safe when called twice; after an
        interrupt, a second call finishes the job.

        With a root to promote to, the newest checkpoint is promoted whatever its step, and all promotions are waited
        for: for `timeout_s` at most, then they are cancelled, and the next job goes on with them.

        Raises:
            EarlierSaveFailed: a save failed, or a promotion, and it was not told before.

        """
        self._close(timeout_s, newest=True)

    def _close(self, timeout_s: float | None, *, newest: bool) -> None:
        if self._gone:
            return
        newest, self._closed = newest and not self._closed, True
        errors: list[BaseException] = []
        try:
            errors = self._saves.wait()
            with self._failures.keeping(errors):
                errors += self._saves.promotions.finish(timeout_s, newest=newest)
        except BaseException:  # who cannot wait for saves does not wait for these
            self.cancel_promotions()
            raise
        finally:
            self._handlers.remove()
            self._saves.close()
            if self._listening is not None:
                self._listening.stop()
        self._gone = True  # only now: whoever was interrupted may call again
        self._failures.tell_earlier(errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            # Other ranks may not come here: nothing is begun that needs them.
            self._close(None, newest=False)
        except Exception as second:  # noqa: BLE001 - the first one tells more
            log.error("%s: while %s was raised: %s", self._root.url, type(error).__name__, second)  # noqa: TRY400


def listen_below(callback: Callback, urls: list[str]) -> Listening:
    """Call a function with the events of these roots, and of all that is below them."""
    places = tuple(url.rstrip("/") + "/" for url in urls)

    def hear(event: Event) -> None:
        if event.where in urls or event.where.startswith(places):
            callback(event)

    return listen(hear)


# Many checkpoints over a long run: when one is saved, which one is restored, which are kept.
#
#     a step -> due? (by its number, or agreed with rank 0) -> save -> commit -> `latest` -> prune and sweep
#                                                                             -> promote, if there is a second root


class Checkpointer(Ending):
    """
    The checkpoints of a training run, below one root; made and used by all ranks alike.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> state = {"model": torch.nn.Linear(4, 4), "step": 0}
        >>> with sk.Checkpointer(tempfile.mkdtemp(), every_steps=2, keep_last=2) as ckpt:
        ...     start = ckpt.restore_latest(state) or 0
        ...     for step in range(start + 1, 8):
        ...         state["step"] = step
        ...         saved = ckpt.step(step, state)
        ...     ckpt.wait()
        ...     ckpt.all_steps()
        [4, 6]

    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Root,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        at_steps: Iterable[int] = (),
        signals: Iterable[int | str] = (),
        request_file: str | None = "save-now",
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
        seams: Clock | None = None,
    ) -> None:
        """
        Touch nothing yet: a root that does not exist is made by the first save.

        Args:
            root: a path, a `file://` URL, or a root. All ranks see the same one.
            every_steps: `step` saves each time that a multiple of it is reached.
            every_minutes: `step` saves when so much time has passed since the last save; rank 0's clock counts.
            at_steps: `step` saves at these.
            signals: `step` saves when one of these came ("SIGTERM"), to whichever rank; it returns when the checkpoint
                is durable, and `should_stop` is True from then on; a save that failed is made again soon, at a later
                step. Needs the main thread.
            request_file: `step` saves when a file of this name appears in the root, and deletes it. None: nobody looks.
                Without this, `every_minutes` and `signals`, ranks never talk to each other but to save.
            template: what the checkpoint of a step is called.
            keep_last: keep so many of the newest.
            keep_every: keep those whose step is a multiple of it.
            keep_best: keep the best by a metric: "loss", ("loss", 3), ("accuracy", 3, "max").
            keep_hours: keep those that are younger.
            retention: a policy of your own. A checkpoint stays if any of these wants it, or if it is pinned, or the
                newest. Without any of them, all stay.
            asynchronous: save while training goes on. The failure of such a save is told by a later call.
            staging: as for `async_save`.
            writer: as for `async_save`.
            max_in_flight: as for `async_save`.
            allow_pickle: as for `save`, and for `load`.
            options: threads, memory and deadlines.
            group: the ranks that take part.
            on_error: what becomes of a save that failed. "raise": the call raises, of an asynchronous save a later call,
                the same on all ranks. "warn": it is logged. Or a function that is called with the error. Whatever it is,
                nothing is deleted after a save that failed, and the next one is tried. That another job has the root,
                or that this one must restore first, is always raised.
            retries: how often an operation of a store is tried again that fails in passing.
            takeover: take the root from another job that saves to it.
            on_event: is called with each event of this root.
            codecs: as for `save`.
            promote_to: a second root, as of an object store, to which each checkpoint that was saved is copied in the
                background. A restore takes the copy that is nearest and whole.
            promote_every: promote steps that are a multiple of it, those that are pinned, and at `close` the newest.
            keep_promoted: what is kept in the second root; by default the same as in the first.
            promote_required: keep in the first root what is still to be promoted, whatever the policies say.
            seams: for tests.

        Raises:
            StateError: an argument makes no sense.

        """
        self._options = options or Options()
        self._seams = seams or Clock()
        roots = open_roots(root, promote_to, direct=self._options.direct_io)
        self._root = roots[0]
        every_steps = checked_int_or_none("every_steps", every_steps, 1)
        every_minutes = checked_positive_or_none("every_minutes", every_minutes)
        max_in_flight, retries = checked_int("max_in_flight", max_in_flight, 1), checked_int("retries", retries, 0)
        promote_every = checked_int("promote_every", promote_every, 1)
        patience = RetryPolicy(retries, sleep=self._seams.sleep)
        super().__init__(
            Tiers(*(Catalog(RetryingRoot(each, patience), template) for each in roots)), parse_best(keep_best)
        )
        self._failures = ErrorReporter(on_error, self._root.url)
        at = sorted(map(valid_step, at_steps))
        self._steps = StepSchedule(every_steps, at)
        self._requests = SaveRequests(
            self._root,
            request_file,
            Timer(every_minutes, self._seams.clock),
            clock=self._seams.clock,
            interval_s=self._seams.interval_s,
        )
        wanted = parse_signals(signals)
        self._job = RankContext(
            self._root,
            self._seams,
            group=group,
            timeout_s=self._options.timeout_s,
            talks=bool(wanted) or every_minutes is not None or request_file is not None,
            told=[template, every_steps, at, every_minutes, request_file, asynchronous, max_in_flight, len(roots)],
        )
        policy = build_policy(
            last=checked_int_or_none("keep_last", keep_last, 1),
            every=checked_int_or_none("keep_every", keep_every, 1),
            best=self._best,
            hours=checked_positive_or_none("keep_hours", keep_hours),
            more=retention,
        )
        self._saves = Saves(
            roots,
            self._tiers,
            self._job,
            self._seams,
            policy=policy,
            terms=None
            if len(roots) == 1
            else ReplicationTerms(every=promote_every, policy=keep_promoted or policy, required=promote_required),
            limits=CopyLimits(threads=self._options.io_threads, budget_nbytes=self._options.host_budget_bytes // 2),
            retries=retries,
            takeover=takeover,
            max_in_flight=max_in_flight,
            asynchronous=asynchronous,
            raises=self._failures.raises,
            how={
                "allow_pickle": allow_pickle,
                "options": self._options,
                "group": group,
                **({} if codecs is None else {"codecs": codecs}),
            },
            how_asynchronous={"staging": staging, "writer": writer, "max_in_flight": max_in_flight},
        )
        self._how_to_load = {"allow_pickle": allow_pickle, "options": self._options, "group": group}
        self._should_stop = False
        self._listening = None if on_event is None else listen_below(on_event, [each.url for each in roots])
        # Last: nothing after it may fail.
        try:
            self._handlers = SignalHandlers(wanted, self._requests.stop.raise_)
        except BaseException:
            if self._listening is not None:
                self._listening.stop()
            raise

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
        Save the state if it is time to; called by all ranks after each step, with the same steps.

        Args:
            step: the number of the step that is done, 0 or more, counted over the whole run and all its epochs. After
                a restore, steps are counted from that one; what there is of later steps is overwritten. The step that
                was restored or saved last is not saved again.
            state: as for `save`.
            metrics: numbers by which checkpoints are compared; rank 0's are kept.
            meta: as for `save`.
            force: save, whether it is time to or not.

        Returns:
            A handle of the save, or its report where saves are not asynchronous; None where it was not time, where it
            failed and `on_error` is not "raise", or where there is a pinned checkpoint of this step.

        Raises:
            EarlierSaveFailed: an earlier asynchronous save failed; why is its cause. If a save was due now, it has been
                begun all the same: it is the error's `response`.
            RootInUse: another job saves to this root.
            CheckpointExists: the root has this step or later ones, and nothing was restored.
            StateError: the step is below one that was restored or saved.

        """
        self._check_open()
        step = valid_step(step)
        self._saves.check(step)
        why, stop, failed, unpromoted = self._steps.reached(step), False, list[int](), list[int]()
        if force:
            why = "the caller wants it"
        if self._job.talks:
            if self._job.world.rank > 0 and (asked := self._requests.take()):
                self._job.agreement.ask(asked)
            if self._job.agreement.reached():
                made = self._job.agreement.decision(step, lambda asked: self._decide(step, asked), REQUEST_KINDS)
                why, stop, failed, unpromoted = why or made.why, made.stop, made.failed, made.unpromoted
        errors = self._saves.end(failed, unpromoted)
        if why and self._saves.is_last(step):
            why = ""  # it is there
            errors += self._saves.wait()
        saved, durable = None, stop and not why
        try:
            if why:
                saved = self._save(step, state, metrics, meta, why=why, errors=errors, wait=stop)
                durable = stop and saved is not None
        except CheckpointExists as error:
            if PINNED not in error.details:
                raise
            # Raised, it would end the job at this step each time that it is started.
            log.warning("step %d is not saved, the next that is due is: %s", step, error.message)
        finally:
            self._should_stop = self._should_stop or durable
            if stop and not durable:
                self._requests.stop_later()
        self._failures.tell_earlier(errors, saved)
        return saved

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
        Save the state now; called by all ranks. As `step`, which it does not replace: it is not asked what is due.

        `overwrite` replaces a checkpoint of this step that is there; without it, one that is not of a past that this
        job has gone back from is an error.
        """
        self._check_open()
        step = valid_step(step)
        self._saves.check(step)
        errors: list[BaseException] = []
        saved = self._save(step, state, metrics, meta, why="now", errors=errors, overwrite=overwrite)
        self._failures.tell_earlier(errors, saved)
        return saved

    def request_save(self) -> None:
        """Have the next `step` save, or one soon after; may be called on any rank, from any thread."""
        if not self._job.talks:
            raise StateError(
                "ranks do not talk about requests here", hint="give a request_file, every_minutes or signals"
            )
        self._requests.save.raise_()

    @property
    def should_stop(self) -> bool:
        """Whether a signal came, to whichever rank, and the checkpoint that it asked for is durable; same on all ranks."""
        return self._should_stop

    # -- inside --------------------------------------------------------------------------------------------------

    def _decide(self, step: int, asked: Collection[str]) -> Decision:
        why, stop = self._requests.why(asked)
        failed, unpromoted = self._saves.failed()
        return Decision(step=step, why=why, stop=stop, failed=failed, unpromoted=unpromoted)

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None,
        meta: Mapping[str, Any] | None,
        *,
        why: str,
        errors: list[BaseException],
        wait: bool = False,
        overwrite: bool = False,
    ) -> Saved | None:
        errors += self._saves.make_room()
        try:
            with self._failures.keeping(errors):
                self._saves.begin(step)
                if self._job.world.rank == 0:
                    log.info("step %d is saved to %s: %s", step, self._root.url, why)
                saved = self._saves.save(step, state, metrics=metrics, meta=meta, overwrite=overwrite)
                if wait:
                    self._saves.wait_for(saved)
        except (RootInUse, LeaseLost, EarlierSaveFailed):
            raise
        except CheckpointError as error:
            refused = isinstance(error, CheckpointExists) and (PINNED in error.details or not self._saves.begun)
            if refused or self._failures.raises:
                raise
            self._failures.tell(error)
            return None
        finally:
            self._requests.timer.restart()
        return saved
