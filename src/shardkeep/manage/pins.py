"""Checkpoints that are kept whatever a policy says: each has a blob of its own in the root."""

from __future__ import annotations

from shardkeep.store.protocol import Deletes, Lists, Puts

_PREFIX = "pin."


def pinned(root: Lists) -> set[str]:
    """Name the places that are pinned."""
    return {info.name.removeprefix(_PREFIX) for info in root.list() if info.name.startswith(_PREFIX)}


def pin(root: Puts, name: str) -> None:
    """Keep a place."""
    root.put(_PREFIX + name, b"", replace=True)


def unpin(root: Deletes, name: str) -> None:
    """Leave a place to the policies again."""
    root.delete(_PREFIX + name)
