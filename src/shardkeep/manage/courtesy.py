"""
How promotions keep out of the way: of training by their priority, of a save that is under way by a slow pace.

A save must not share its disk and its network with a copy that nobody waits for. But where saves follow each other without
a pause, a copy that waited for all of them would never end, and the near root would grow: so it is slowed, not stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from shardkeep.run.handles import SaveHandle
from shardkeep.run.in_flight import stand_back
from shardkeep.run.reports import SaveReport

NICENESS = 10
"""More than that of asynchronous saves: they go first."""
_LOOK_S = 0.02
_LOOKS = 10
"""A window each 0.2 s while a save is under way: at most 40 MB a second on a rank."""


class Courtesy:
    """Knows whether this rank is saving. Saves are begun by one thread; any thread may give way."""

    def __init__(self, sleep: Callable[[float], object]) -> None:
        """Begin with no save; `sleep` waits for so many seconds."""
        self._sleep = sleep
        self._in_call = False
        self._under_way: list[SaveHandle[SaveReport]] = []

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Be in the call of a save inside."""
        self._in_call = True
        try:
            yield
        finally:
            self._in_call = False

    def until_end_of(self, handle: SaveHandle[SaveReport]) -> None:
        """Count a save as under way until it ends."""
        self._under_way = [*(each for each in self._under_way if not each.done()), handle]

    def is_saving(self) -> bool:
        """Say whether a save is under way."""
        return self._in_call or any(not each.done() for each in self._under_way)

    def give_way(self) -> None:
        """
        Have this thread go last, and wait a moment where a save is under way, no longer than it is.

        Only by threads that copy, once others have asked their stores for something: threads that a package starts with
        its first request, for the whole process, have the priority of the one that made it.
        """
        stand_back(NICENESS)
        for _ in range(_LOOKS):
            if not self.is_saving():
                return
            self._sleep(_LOOK_S)
