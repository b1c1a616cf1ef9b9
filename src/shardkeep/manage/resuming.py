"""Restoring checkpoints of a root, and going on from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from shardkeep.errors import CheckpointError, StateError
from shardkeep.manage.browsing import Browser, checked
from shardkeep.manage.entries import Entry
from shardkeep.manage.failures import Failures
from shardkeep.manage.jobs import Job
from shardkeep.manage.lineage import all_told, to_restore
from shardkeep.manage.requests import Requests
from shardkeep.manage.restoring import Restored, candidates, restore
from shardkeep.manage.retention import Mode
from shardkeep.manage.saves import Saves
from shardkeep.manage.schedule import Steps
from shardkeep.manage.tiers import newest_saves, problem_of
from shardkeep.store.roots import Root

log = logging.getLogger("shardkeep")


class Resuming(Browser):
    """The part of a Checkpointer that restores."""

    _root: Root
    _job: Job
    _saves: Saves
    _steps: Steps
    _requests: Requests
    _failures: Failures
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
            found = to_restore(all_told(self._tiers.entries(), self._tiers.urls))
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
        step = checked(step)

        def choose() -> list[Entry]:
            found = [entry for entry in newest_saves(self._tiers.find(step)) if entry.status != "unfinished"]
            if not found:
                raise self._not_found(step)
            if (problem := problem_of(found)) is not None:
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
