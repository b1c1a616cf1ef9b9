"""Whether two stores are one place, however each of them was named."""

from __future__ import annotations

import os

from shardkeep.storage.base import Root, Store, innermost
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.object_store import ObjectStore


def same_place(one: Store | Root, other: Store | Root) -> bool:
    """Say whether two stores or roots are one place, also where it is written in two ways."""
    a, b = innermost(one), innermost(other)
    if isinstance(a, LocalStore) and isinstance(b, LocalStore):
        return _same_directory(a.url, b.url)
    if isinstance(a, ObjectStore) and isinstance(b, ObjectStore):
        return (a.bucket.home, a.bucket.name, a.prefix) == (b.bucket.home, b.bucket.name, b.prefix)
    if isinstance(a, MemoryStore) and isinstance(b, MemoryStore):
        return a is b  # two that have no name are called the same
    return a is b or a.url.rstrip("/") == b.url.rstrip("/")


def _same_directory(one: str, other: str) -> bool:
    """Compare directories of this machine: by what they are, which mounts and links may show twice, or by their paths."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one is not there, or may not be looked at
        return os.path.realpath(one) == os.path.realpath(other)
