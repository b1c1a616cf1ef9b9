"""Looking at the checkpoints of a Checkpointer's roots by their steps; each process by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardkeep.errors import CheckpointNotFound, StateError
from shardkeep.format.record import checked_step
from shardkeep.manage.entries import Entry
from shardkeep.manage.lineage import all_told, newest_first
from shardkeep.manage.retention import KeepBest, Mode
from shardkeep.manage.tiers import Tiers, newest_saves, one_a_step


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
        return sorted(entry.step for entry in one_a_step(self._committed()))

    def pin(self, step: int) -> None:
        """
        Keep the checkpoint of a step whatever the policies say, until `unpin`.

        Raises:
            CheckpointNotFound: there is none, or it has just been deleted.

        """
        if not self._is_there(checked(step)):
            raise self._not_found(step)
        name = self._tiers.near.naming.name(step)
        self._tiers.pin(name)
        # Whoever deletes looks for the pin just before: it was put in time if the checkpoint is there now.
        if not self._is_there(step):
            self._tiers.unpin(name)
            raise self._not_found(step)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policies again."""
        self._tiers.unpin(self._tiers.near.naming.name(checked(step)))

    def _is_there(self, step: int) -> bool:
        return any(found.committed for found in self._tiers.find(step))

    def _committed(self) -> list[Entry]:
        """Return all copies of the newest save of each step."""
        return _committed(self._tiers.entries())

    def _all_committed(self) -> list[Entry]:
        """Return the same, unless the store does not give all records now."""
        return _committed(all_told(self._tiers.entries(), self._tiers.urls))

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


def _committed(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in newest_saves(entries) if entry.committed]


def checked(step: Any) -> int:
    """Return a step that a checkpoint can be named after; raise `StateError` for any other."""
    number = checked_step(step)
    if number is None or number < 0:
        raise StateError(f"step is {step!r}", hint="give a whole number, 0 or more")
    return number
