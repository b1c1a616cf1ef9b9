"""Which places of a root this process is saving to or removing, so that it never does both to one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class InUse:
    """Names of places. Used by several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saving: list[str] = []
        self._removing: set[str] = set()

    def begin(self, name: str) -> None:
        """Say that a save to a place begins; waits for a removal of it to end."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._removing)
            self._saving.append(name)

    def end(self, name: str) -> None:
        """Say that a save to a place has ended."""
        with self._changed:
            self._saving.remove(name)

    def names(self) -> set[str]:
        """Name the places that are being saved to."""
        with self._changed:
            return set(self._saving)

    @contextmanager
    def removing(self, name: str) -> Iterator[bool]:
        """Keep saves from a place, inside; gives False where one is under way, and nothing may be removed."""
        with self._changed:
            free = name not in self._saving
            if free:
                self._removing.add(name)
        try:
            yield free
        finally:
            with self._changed:
                if free:
                    self._removing.discard(name)
                self._changed.notify_all()
