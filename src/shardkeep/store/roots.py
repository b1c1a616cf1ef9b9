"""
A root: one place that has many places below it, each of which holds a checkpoint.

A root is a store for small blobs of its own, which say something about all of its places. Nothing is renamed or moved.
A place is removed so that nobody takes what is left of it for a checkpoint: what makes it one goes first, and a mark
that says so stays until all the rest is gone, so that a removal that was cut short can be told from a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from shardkeep.errors import StorageError
from shardkeep.format.record import RECORD_NAME
from shardkeep.store.protocol import Deletes, Lists, Puts, Store, delete_all

log = logging.getLogger("shardkeep")

REMOVING_NAME = "shardkeep.removing"
"""The mark of a place that is being removed. It means nothing where there is a commit."""


class Root(Store, Protocol):
    """A place that has places below it."""

    def places(self) -> Iterator[str]:
        """Name all places below, in no order; reads nothing of them. A root that does not exist has none."""

    def place(self, name: str) -> Store:
        """Return a place below, which need not exist."""

    def remove(self, name: str) -> None:
        """
        Delete a place and all that is in it, what makes it a checkpoint first; one that is not there is no error.

        A place that is a link to elsewhere is unlinked, and what it leads to stays.
        """

    def drop_empty(self, name: str) -> None:
        """Delete a place if nothing is in it."""


class _Empties(Lists, Puts, Deletes, Protocol):
    """What emptying needs of a store."""

    @property
    def url(self) -> str: ...


def makes_a_checkpoint(name: str) -> bool:
    """Tell whether a blob makes a checkpoint exist, in any layout: the commit record, or torch's metadata."""
    return name == RECORD_NAME or name.endswith(".metadata")


def empty(store: _Empties) -> None:
    """Delete all blobs of a place, what makes it a checkpoint first."""
    names = [info.name for info in store.list()]
    if not names:
        return
    marked = _mark(store)
    commits = list(filter(makes_a_checkpoint, names))
    others = [name for name in names if name not in {*commits, REMOVING_NAME}]
    waiting = [*commits, *others]
    # One by one, until it can no longer be taken for a checkpoint, nor for something else than a removal.
    while waiting and (not marked or makes_a_checkpoint(waiting[0])):
        store.delete(waiting.pop(0))
        # Without a mark, what a removal leaves that is cut short now would stay for ever.
        marked = marked or _mark(store)
    delete_all(store, waiting)
    store.delete(REMOVING_NAME)


def _mark(store: _Empties) -> bool:
    """Say that a place is being removed, if that can be said: on a full disk it cannot, and room is what comes of removing."""
    try:
        store.put(REMOVING_NAME, b"", replace=True)
    except StorageError as exc:
        log.info("%s is removed without a mark: %s", store.url, exc)
        return False
    return True
