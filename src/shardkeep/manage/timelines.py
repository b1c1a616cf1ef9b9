"""
Which attempt at its steps a job makes, and which steps it may overwrite.

A job that restores step 100 while 200 exists, and goes on from there, saves other steps than those that are there. They
are of a new timeline, which is newer than the old one whatever its numbers: the next `restore_latest` takes 150 of the
new one and not 200 of the old. No clock has a say in this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardkeep.errors import CheckpointExists, StateError
from shardkeep.manage.entries import Entry
from shardkeep.manage.lineage import all_told, began_after, to_restore


@dataclass
class Timeline:
    """Where a job is. Only rank 0 has to know."""

    number: int = 0
    after: int | None = None
    """The step it goes on from; None where nothing was restored."""
    began_after: tuple[int, int] | None = None
    """Which timeline and step it began after; None for the first."""
    saved: set[int] = field(default_factory=set)
    """Steps that it has committed."""

    def may_overwrite(self, step: int) -> bool:
        """Say whether what there is of a step is of a past that this job has gone back from."""
        return self.after is not None and step > self.after and step not in self.saved


def timeline_of(
    entries: Sequence[Entry], restored: tuple[int, int] | None, step: int, *, roots: Sequence[str]
) -> Timeline:
    """
    Find out where a job is that is about to save its first step.

    Args:
        entries: what the root has.
        restored: timeline and step that were restored.
        step: what is to be saved.
        roots: what the roots are called, the nearest first.

    Raises:
        CheckpointExists: nothing was restored, and the root has this step or later ones.
        StateError: the step is before the one that was restored.
        StorageError: a record cannot be read now, which may be of the newest timeline: its number would be used twice.

    """
    where = " and ".join(roots)
    there = [entry for entry in to_restore(all_told(entries, roots)) if entry.status != "unfinished"]
    highest = max((entry.timeline for entry in there), default=0)
    if restored is None:
        newest = max((entry.step for entry in there), default=-1)
        if step <= newest:
            raise CheckpointExists(
                f"{where} has checkpoints up to step {newest}, this job restored none of them and saves step {step}",
                hint="call restore_latest() or restore(step) first, or choose another root",
            )
        return Timeline(highest, began_after=began_after(there, highest))
    if step < restored[1]:
        raise StateError(
            f"{where}: step {step} is to be saved, and step {restored[1]} was restored",
            hint="count steps over the whole run; to go back, restore an earlier step",
        )
    newer = any(entry.age > restored for entry in there)
    if newer:
        return Timeline(highest + 1, after=restored[1], began_after=restored)
    return Timeline(restored[0], after=restored[1], began_after=began_after(there, restored[0]))
