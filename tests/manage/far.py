"""Roots that tests promote to: in memory, where they can fail, wait and count."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from shardkeep.errors import StorageError
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import Fault, FaultyStore


class FarRoot:
    """A root whose places call a function before each operation, with the verb and the name."""

    def __init__(self, before: Callable[[str, str], object] | None = None) -> None:
        self.inner = MemoryStore()
        self.url = self.inner.url
        self.before = before
        self.seen: list[str] = []
        """What was done below it: "verb name"."""

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.inner, verb)

    def place(self, name: str) -> Any:
        return _Place(self, self.inner.place(name))

    def count(self, verb: str, start: str = "") -> int:
        """How often something was done to blobs whose names begin so."""
        return sum(each.startswith(f"{verb} {start}") for each in self.seen)

    def names(self, place: str) -> list[str]:
        """What is in a place."""
        return [info.name for info in self.inner.place(place).list()]


class _Place(FaultyStore):
    def __init__(self, root: FarRoot, inner: Any) -> None:
        super().__init__(inner)
        self._root = root

    def begin(self, verb: str, name: str) -> Fault | None:
        self._root.seen.append(f"{verb} {name}")
        if self._root.before is not None:
            self._root.before(verb, name)
        return super().begin(verb, name)


class Broken:
    """Fails a verb, from when it is set, on names that begin in some way."""

    def __init__(self, verb: str = "", start: str = "", code: int = errno.EACCES) -> None:
        self.verb, self.start, self.code = verb, start, code

    def __call__(self, verb: str, name: str) -> None:
        if verb == self.verb and name.startswith(self.start):
            raise StorageError(f"injected: {verb} {name}", errno=self.code, name=name)


def far_root(before: Callable[[str, str], object] | None = None) -> Any:
    """Make one; to the types it is any root."""
    return FarRoot(before)
