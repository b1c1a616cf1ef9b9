"""Files in the places of a run that no checkpoint will ever name: what dead writers and removals cut short have left."""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.cli.roots import Run
from shardkeep.errors import DamagedCheckpoint, UnsupportedVersion
from shardkeep.layout import leftovers
from shardkeep.layout.native import save_id_of
from shardkeep.manage.entries import Entry
from shardkeep.store.protocol import Store
from shardkeep.store.roots import REMOVING_NAME


@dataclass(frozen=True)
class Litter:
    """What can go from one place."""

    entry: Entry
    names: list[str]
    nbytes: int
    reason: str


def find_litter(run: Run, entry: Entry) -> Litter | None:
    """Find what can go from a place; None where nothing can, or somebody may still be writing there."""
    store = run.catalog.root.place(entry.name)
    sizes = {info.name: info.nbytes for info in store.list()}
    found = leftovers.survey(store)
    if not entry.committed and REMOVING_NAME in sizes and found.over:
        return Litter(entry, list(sizes), sum(sizes.values()), "its removal was cut short")
    names = _unnamed(store, found)
    if not names:
        return None
    nbytes = sum(sizes.get(name, 0) for name in names)
    return Litter(entry, names, nbytes, "left by a save that did not finish")


def _unnamed(store: Store, found: leftovers.Survey) -> list[str]:
    try:
        return leftovers.unnamed(store, found)
    except (DamagedCheckpoint, UnsupportedVersion):
        return []  # the record may be mended


def sweep(run: Run, litter: Litter) -> None:
    """Delete what was found and is litter still, file by file: a save that has begun there since keeps its own."""
    now = find_litter(run, litter.entry)
    if now is None:
        return
    store = run.catalog.root.place(litter.entry.name)
    going = leftovers.claims_last(set(now.names) & set(litter.names))
    leftovers.sweep_uploads_of(store, {save_id for name in going if (save_id := save_id_of(name))})
    for name in sorted(going, key=REMOVING_NAME.__eq__):  # the mark goes last of all
        store.delete(name)
    run.catalog.root.drop_empty(litter.entry.name)
