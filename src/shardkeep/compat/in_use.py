"""
Writers and planners hold the state of the save that they are used for: two saves at once would mix their data.

So each save of this process takes a place in line for its writer and its planner when it is called, and begins when
the saves before it that use one of them have ended. Places are taken for both at once, so that no two saves wait for
each other; and saves have deadlines, so that nobody waits for ever.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("shardkeep")


class Turn:
    """The place of one save in the lines for its objects; taken on the thread that saves, or given up."""

    def __init__(self, lines: Lines, objects: list[Any], what: str, thread: Callable[[], int | None]) -> None:
        self.what = what
        self.thread = thread
        """Tells which thread saves, if it has been started."""
        self._lines = lines
        self._objects = objects  # held, so that no other object gets their ids
        lines.join(self, objects)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the saves before this one, and hold the objects meanwhile."""
        try:
            self._lines.wait(self, self._objects)
            yield
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Leave the lines; those behind go on."""
        self._lines.leave(self, self._objects)
        self._objects = []


class Lines:
    """Who uses what, and who is next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[int, list[Turn]] = {}

    def join(self, turn: Turn, objects: list[Any]) -> None:
        """Stand at the end of each object's line."""
        with self._changed:
            for each in objects:
                self._lines.setdefault(id(each), []).append(turn)

    def wait(self, turn: Turn, objects: list[Any]) -> None:
        """Wait until a turn is the first everywhere."""
        with self._changed:
            told = False
            while (found := self._before(turn, objects)) is not None:
                if not told:
                    told = True
                    used, other = found
                    log.warning(
                        "a save to %s waits for the one to %s, which uses the same %s",
                        turn.what,
                        other.what,
                        type(used).__qualname__,
                    )
                self._changed.wait()

    def leave(self, turn: Turn, objects: list[Any]) -> None:
        """Stand in no line any more."""
        with self._changed:
            for each in objects:
                line = self._lines[id(each)]
                line.remove(turn)
                if not line:
                    del self._lines[id(each)]
            self._changed.notify_all()

    def _before(self, turn: Turn, objects: list[Any]) -> tuple[Any, Turn] | None:
        """
        Return an object that is in use, and by whom.

        A save does not wait for one of its own thread: that is around it, or comes after it.
        """
        for each in objects:
            first = self._lines[id(each)][0]
            if first is not turn and first.thread() != threading.get_ident():
                return each, first
        return None


@functools.cache  # saves outlive the calls that began them; a forked process has none of its parent's
def _lines_of(process_id: int) -> Lines:
    del process_id
    return Lines()


def stand_in_line(*objects: Any, what: str, thread: Callable[[], int | None] | None = None) -> Turn:
    """
    Take a place for a save.

    Args:
        objects: what it uses; None is nothing.
        what: where it goes, for messages.
        thread: tells which thread will save; by default this one.

    """
    distinct = {id(each): each for each in objects if each is not None}
    here = threading.get_ident()
    return Turn(_lines_of(os.getpid()), list(distinct.values()), what, thread or (lambda: here))


def place_of(checkpoint_id: str | os.PathLike[str] | None, storage_writer: object) -> str:
    """Say where a save goes, for messages."""
    place = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "checkpoint_id", None)
    return f"{os.fspath(place)!r}" if isinstance(place, (str, os.PathLike)) else type(storage_writer).__qualname__
