"""
Many checkpoints over a long run: when one is saved, which one is restored, which are kept.

    a step -> due? (by its number, or agreed with rank 0) -> save -> commit -> `latest` -> prune and sweep
                                                                            -> promote, if there is a second root
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from shardkeep.errors import CheckpointError, CheckpointExists, EarlierSaveFailed, StateError
from shardkeep.events import Callback
from shardkeep.manage.agreement import Decision
from shardkeep.manage.arguments import positive_or_none, roots_of, whole, whole_or_none
from shardkeep.manage.browsing import checked
from shardkeep.manage.catalog import Catalog
from shardkeep.manage.copying import Limits
from shardkeep.manage.ending import Ending, listen_below
from shardkeep.manage.failures import Failures, OnError
from shardkeep.manage.jobs import Job
from shardkeep.manage.policies import Best, best_of, policy_of
from shardkeep.manage.problems import LeaseLost, RootInUse
from shardkeep.manage.promoting import Terms
from shardkeep.manage.requests import KINDS, Requests
from shardkeep.manage.retention import Policy
from shardkeep.manage.saves import PINNED, Saved, Saves
from shardkeep.manage.schedule import Steps, Timer
from shardkeep.manage.seams import Seams
from shardkeep.manage.signals import Handlers, numbers_of
from shardkeep.manage.tiers import Tiers
from shardkeep.options import Options
from shardkeep.ranks.world import World
from shardkeep.run.coding import Codecs
from shardkeep.store.retrying import Patience
from shardkeep.store.retrying_root import RetryingRoot
from shardkeep.store.roots import Root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("shardkeep")


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
        seams: Seams | None = None,
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
        self._seams = seams or Seams()
        roots = roots_of(root, promote_to, direct=self._options.direct_io)
        self._root = roots[0]
        every_steps = whole_or_none("every_steps", every_steps, 1)
        every_minutes = positive_or_none("every_minutes", every_minutes)
        max_in_flight, retries = whole("max_in_flight", max_in_flight, 1), whole("retries", retries, 0)
        promote_every = whole("promote_every", promote_every, 1)
        patience = Patience(retries, sleep=self._seams.sleep)
        super().__init__(
            Tiers(*(Catalog(RetryingRoot(each, patience), template) for each in roots)), best_of(keep_best)
        )
        self._failures = Failures(on_error, self._root.url)
        at = sorted(map(checked, at_steps))
        self._steps = Steps(every_steps, at)
        self._requests = Requests(
            self._root,
            request_file,
            Timer(every_minutes, self._seams.clock),
            clock=self._seams.clock,
            interval_s=self._seams.interval_s,
        )
        wanted = numbers_of(signals)
        self._job = Job(
            self._root,
            self._seams,
            group=group,
            timeout_s=self._options.timeout_s,
            talks=bool(wanted) or every_minutes is not None or request_file is not None,
            told=[template, every_steps, at, every_minutes, request_file, asynchronous, max_in_flight, len(roots)],
        )
        policy = policy_of(
            last=whole_or_none("keep_last", keep_last, 1),
            every=whole_or_none("keep_every", keep_every, 1),
            best=self._best,
            hours=positive_or_none("keep_hours", keep_hours),
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
            else Terms(every=promote_every, policy=keep_promoted or policy, required=promote_required),
            limits=Limits(threads=self._options.io_threads, budget_nbytes=self._options.host_budget_bytes // 2),
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
            self._handlers = Handlers(wanted, self._requests.stop.raise_)
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
        step = checked(step)
        self._saves.check(step)
        why, stop, failed, unpromoted = self._steps.reached(step), False, list[int](), list[int]()
        if force:
            why = "the caller wants it"
        if self._job.talks:
            if self._job.world.rank > 0 and (asked := self._requests.take()):
                self._job.agreement.ask(asked)
            if self._job.agreement.reached():
                made = self._job.agreement.decision(step, lambda asked: self._decide(step, asked), KINDS)
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
        step = checked(step)
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
