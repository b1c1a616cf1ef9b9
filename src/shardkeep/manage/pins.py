"""Checkpoints that are kept whatever a policy says: each has a blob of its own in the root."""

from __future__ import annotations

from shardkeep.errors import BlobNotFound, MalformedFile
from shardkeep.store.protocol import Deletes, Gets, Lists, Puts

_PREFIX = "pin."
_MAX_NBYTES = 4096


def pinned(root: Lists) -> set[str]:
    """Name the places that are pinned."""
    return {info.name.removeprefix(_PREFIX) for info in root.list() if info.name.startswith(_PREFIX)}


def is_pinned(root: Gets, name: str) -> bool:
    """Say whether a place is pinned at this moment."""
    try:
        root.get(_PREFIX + name, limit=_MAX_NBYTES)
    except BlobNotFound:
        return False
    except MalformedFile:  # somebody has written something into it
        return True
    return True


def pin(root: Puts, name: str) -> None:
    """Keep a place."""
    root.put(_PREFIX + name, b"", replace=True)


def unpin(root: Deletes, name: str) -> None:
    """Leave a place to the policies again."""
    root.delete(_PREFIX + name)
