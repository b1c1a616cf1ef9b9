"""Looking at the checkpoints of a root by their steps; each process by itself."""

from __future__ import annotations

from typing import Any

from shardkeep.errors import CheckpointNotFound, StateError
from shardkeep.format.record import checked_step
from shardkeep.manage.catalog import Catalog
from shardkeep.manage.entries import Entry
from shardkeep.manage.pins import pin, unpin
from shardkeep.manage.retention import KeepBest, Mode


class Browser:
    """The steps of a root."""

    def __init__(self, catalog: Catalog, best: KeepBest | None) -> None:
        """Look at a root, whose best checkpoints are those that `best` keeps."""
        self._catalog = catalog
        self._best = best

    def latest_step(self) -> int | None:
        """Return the newest committed step. This rank looks by itself: others may see another one a moment later."""
        return next((entry.step for entry in self._committed()), None)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """Return the best committed step by a metric, by default that of `keep_best`; this rank looks by itself."""
        return next((entry.step for entry in self._best_by(metric, mode).ranked(self._committed())), None)

    def all_steps(self) -> list[int]:
        """Return all committed steps, sorted; this rank looks by itself."""
        return sorted(entry.step for entry in self._committed())

    def pin(self, step: int) -> None:
        """
        Keep the checkpoint of a step whatever the policies say, until `unpin`.

        Raises:
            CheckpointNotFound: there is none, or it has just been deleted.

        """
        if not self._is_there(checked(step)):
            raise self._not_found(step)
        name = self._catalog.naming.name(step)
        pin(self._catalog.root, name)
        # Whoever deletes looks for the pin just before: it was put in time if the checkpoint is there now.
        if not self._is_there(step):
            unpin(self._catalog.root, name)
            raise self._not_found(step)

    def unpin(self, step: int) -> None:
        """Leave the checkpoint of a step to the policies again."""
        unpin(self._catalog.root, self._catalog.naming.name(checked(step)))

    def _is_there(self, step: int) -> bool:
        found = self._catalog.find(step)
        return found is not None and found.committed

    def _committed(self) -> list[Entry]:
        return [entry for entry in self._catalog.entries() if entry.committed]

    def _best_by(self, metric: str | None, mode: Mode | None) -> KeepBest:
        if metric is None and self._best is None:
            raise StateError("which metric?", hint='give metric="loss", or keep_best to the Checkpointer')
        known = self._best if self._best is not None and metric in (None, self._best.metric) else None
        return KeepBest(metric or (known.metric if known else ""), mode=mode or (known.mode if known else "min"))

    def _not_found(self, step: int) -> CheckpointNotFound:
        have = ", ".join(map(str, self.all_steps()[-20:])) or "none"
        where = self._catalog.root.url
        return CheckpointNotFound(f"{where}: there is no checkpoint of step {step}", hint=f"there are: {have}")


def checked(step: Any) -> int:
    """Return a step that a checkpoint can be named after; raise `StateError` for any other."""
    number = checked_step(step)
    if number is None or number < 0:
        raise StateError(f"step is {step!r}", hint="give a whole number, 0 or more")
    return number
