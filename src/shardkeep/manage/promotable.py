"""Which checkpoints are still to be promoted: a pure function of what the two roots have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime

from shardkeep.errors import DamagedCheckpoint
from shardkeep.manage.entries import Entry
from shardkeep.manage.lineage import newest_first
from shardkeep.manage.retention import Policy, plan
from shardkeep.manage.tiers import saved_as

SaveOf = tuple[str, str]
"""A place, and the id of a save in it."""


def save_of(entry: Entry) -> SaveOf:
    """Say which save an entry is."""
    return entry.name, "" if entry.record is None else entry.record.save_id


def to_promote(
    near: Iterable[Entry],
    far: Iterable[Entry],
    policy: Policy,
    now: datetime,
    *,
    every: int = 1,
    left_out: Collection[SaveOf] = (),
    newest: bool = False,
) -> list[Entry]:
    """
    Name the near checkpoints that are to be in the far root and are not, the newest first.

    Args:
        near: what the near root has.
        far: what the far root has.
        policy: what is kept there: what it would delete at once is not promoted.
        now: with its time zone.
        every: only steps that are a multiple of it, and those that are pinned.
        left_out: saves that cannot be promoted.
        newest: the newest one as well, whatever its step.

    """
    there = {entry.name: entry for entry in far}
    mine = [
        entry
        for entry in newest_first(near)
        if entry.committed and entry.record is not None and save_of(entry) not in left_out
    ]
    due = [entry for at, entry in enumerate(mine) if entry.step % every == 0 or entry.pinned or (newest and at == 0)]
    fresh = {entry.name: entry for entry in due if _may_replace(entry, there.get(entry.name))}
    # What the far root would have after all promotions: whatever of that goes at once need not come first.
    after = [entry for name, entry in there.items() if name not in fresh]
    kept = {entry.name for entry in plan([*after, *fresh.values()], policy, now).kept}
    return [entry for entry in fresh.values() if entry.name in kept]


def _may_replace(entry: Entry, there: Entry | None) -> bool:
    """Tell whether a checkpoint is to be put where another one is, perhaps: only an older save or a damaged one goes."""
    if there is None or there.status == "unfinished":
        return True
    if there.problem is not None:
        return isinstance(there.problem, DamagedCheckpoint)
    return there.record is not None and saved_as(there) < saved_as(entry)
