"""
Which checkpoints come before which: those that led to the newest one first, then those of pasts that were given up.

A job that goes back to step 100 while 150 and 200 exist, and saves 110, leaves them behind: whoever cannot have 110
wants 100, and not 200. Each record of a timeline says which step of which timeline it began after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.manage.entries import Entry


def newest_first(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries: the newest timeline, then what it came from, each by step; then all that was given up."""
    known = list(entries)
    reach = _reach(known)

    def order(entry: Entry) -> tuple[bool, int, int, str]:
        return entry.step <= reach.get(entry.timeline, -1), entry.timeline, entry.step, entry.name

    return sorted(known, key=order, reverse=True)


def to_restore(entries: Iterable[Entry]) -> list[Entry]:
    """
    Order entries for a restore: one whose record cannot be read may be of any timeline, and counts as of the newest.

    To take it for an old one would be to pass over what may be the newest checkpoint without a word.
    """
    known = list(entries)
    newest = max((entry.timeline for entry in known), default=0)
    return newest_first(replace(entry, timeline=newest) if entry.problem is not None else entry for entry in known)


def all_told(entries: Iterable[Entry], roots: Sequence[str]) -> list[Entry]:
    """
    Return entries, each of which was read or is damaged; `roots` are what their roots are called, the nearest first.

    Raises:
        StorageError: the store does not give one of the records now. It may be whole, of any timeline, and the newest: to
            pass over it would be to lose what was trained since, so that somebody has to say so, by moving it away.

    """
    known = list(entries)
    for entry in known:
        problem = entry.problem
        if isinstance(problem, StorageError) and not isinstance(problem, BlobNotFound):
            where = f"{roots[entry.tier]}/{entry.name}"
            ways = [problem.hint] if problem.hint else []
            ways.append("try again when the store answers")
            ways.append(f"to go on without this checkpoint, move {where} out of the root")
            if entry.tier:
                ways.append("to go on without the far root, leave promote_to out")
            raise StorageError(
                f"{where} cannot be looked at now, and may be the newest checkpoint: {problem.message}",
                hint="; ".join(ways),
                **problem.details,
            ) from problem
    return known


def began_after(entries: Iterable[Entry], timeline: int) -> tuple[int, int] | None:
    """Say after which timeline and step a timeline began, if one of its records tells."""
    return next((entry.began_after for entry in entries if entry.timeline == timeline and entry.began_after), None)


def _reach(entries: list[Entry]) -> dict[int, float]:
    """Up to which step each timeline led to the newest one; those that did not are not there."""
    timeline: int = max((entry.timeline for entry in entries), default=0)
    step = math.inf
    reach: dict[int, float] = {}
    while timeline not in reach:
        reach[timeline] = step
        origin = began_after(entries, timeline)
        if origin is not None and origin[0] < timeline:
            timeline, step = origin[0], min(step, origin[1])
    return reach
