"""
The roots of a Checkpointer: the near one, which it saves to, and perhaps a far one, which checkpoints are promoted to.

Both are ordinary roots. A promoted checkpoint is the same save in both: of one step the newest save counts, and of one
save the near copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardkeep.errors import CheckpointError
from shardkeep.manage.catalog import Catalog
from shardkeep.manage.entries import Entry
from shardkeep.manage.pins import pin, unpin

NEAR, FAR = 0, 1


class Tiers:
    """One root, or two."""

    def __init__(self, near: Catalog, far: Catalog | None = None) -> None:
        """Look at the near root, and at the far one if there is one."""
        self.near = near
        self.far = far

    def __repr__(self) -> str:
        return f"Tiers({', '.join(repr(each) for each in self.all)})"

    @property
    def all(self) -> list[Catalog]:
        """The catalogues, the nearest first."""
        return [self.near] if self.far is None else [self.near, self.far]

    @property
    def urls(self) -> list[str]:
        """What the roots are called, the nearest first."""
        return [each.root.url for each in self.all]

    @property
    def where(self) -> str:
        """The roots, in messages."""
        return " and ".join(self.urls)

    def entries(self) -> list[Entry]:
        """Return what there is: of one step the newest save first, and of one save the near copy."""
        return merged(entry for tier, each in enumerate(self.all) for entry in _of(tier, each.entries()))

    def find(self, step: int) -> list[Entry]:
        """Return what there is of a step, in the same order."""
        found = [(tier, each.find(step)) for tier, each in enumerate(self.all)]
        return merged(entry for tier, each in found if each is not None for entry in _of(tier, [each]))

    def pin(self, name: str) -> None:
        """Pin a place in all roots: one that is promoted later is pinned, too."""
        for each in self.all:
            pin(each.root, name)

    def unpin(self, name: str) -> None:
        """Unpin a place in all roots."""
        for each in self.all:
            unpin(each.root, name)


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries of several roots, the newest save first, and of one save the near copy; unreadable ones before."""
    # What cannot be read is told of before another copy is taken.
    return sorted(entries, key=lambda entry: (entry.problem is not None, saved_as(entry), -entry.tier), reverse=True)


def newest_saves(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out committed saves of which there is a newer one of the same step, which will take their place."""
    known = list(entries)
    newest: dict[str, tuple[int, str]] = {}
    for entry in known:
        if entry.committed:
            newest[entry.name] = max(saved_as(entry), newest.get(entry.name, (-1, "")))
    return [entry for entry in known if not entry.committed or saved_as(entry) == newest[entry.name]]


def one_a_step(entries: Iterable[Entry]) -> list[Entry]:
    """Return the first committed entry of each step."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.committed:
            found.setdefault(entry.name, entry)
    return list(found.values())


def saved_as(entry: Entry) -> tuple[int, str]:
    """Say what tells saves of one step apart, the newest last: ids of saves sort by time."""
    return entry.timeline, "" if entry.record is None else entry.record.save_id


def same_save(one: Entry, other: Entry) -> bool:
    """Tell whether two entries are copies of one save."""
    return (
        one.record is not None
        and other.record is not None
        and (one.name, one.record.save_id) == (other.name, other.record.save_id)
    )


def _of(tier: int, entries: Iterable[Entry]) -> list[Entry]:
    return [replace(entry, tier=tier) for entry in entries] if tier else list(entries)


def problem_of(entries: Iterable[Entry]) -> CheckpointError | None:
    """Return why none of these can be read, where none can."""
    known = list(entries)
    if any(entry.problem is None for entry in known):
        return None
    return next((entry.problem for entry in known), None)
