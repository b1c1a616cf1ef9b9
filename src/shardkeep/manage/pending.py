"""Saves, or promotions, of a Checkpointer that have not ended, or whose failure was not told yet."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from shardkeep.run.handles import SaveHandle


class Ends(Protocol):
    """Something that goes on in the background."""

    def done(self) -> bool:
        """Say whether it has ended, well or not."""

    def exception(self) -> BaseException | None:
        """Wait for its end, and return what went wrong, if anything did."""


class Pending:
    """They have numbers, the same on all ranks. Used by one thread."""

    def __init__(self, *, raises: bool = False) -> None:
        """Take none yet; `raises`: whether failures are raised, so that one that never was is an error of the process."""
        self._raises = raises
        self._handles: dict[int, Ends] = {}
        self.count = 0
        """Of all saves that were begun."""

    def add(self, handle: Ends) -> None:
        """Take a save that was begun; its failure is told by its Checkpointer, and by nobody else."""
        if isinstance(handle, SaveHandle):
            handle.asked, handle.told_later = True, self._raises
        self._handles[self.count] = handle
        self.count += 1

    def skip(self) -> None:
        """Count a save that failed in its call here, as it may be under way on other ranks."""
        self.count += 1

    def failed(self) -> list[int]:
        """Number those that have failed by now, on this rank; forget those that ended well."""
        ended = [number for number, handle in self._handles.items() if handle.done()]
        failed = [number for number in ended if _error_of(self._handles[number]) is not None]
        for number in set(ended) - set(failed):
            del self._handles[number]
        return failed

    def before(self, number: int) -> list[int]:
        """Number those that were begun before one."""
        return [each for each in self._handles if each < number]

    def end(self, numbers: Collection[int]) -> list[BaseException]:
        """Wait for saves to end, forget them, and return what went wrong."""
        errors = []
        for number in sorted(numbers):
            handle = self._handles.get(number)
            if handle is None:  # it ended well here, or its call has raised
                continue
            error = _error_of(handle)
            del self._handles[number]
            if isinstance(handle, SaveHandle):
                handle.told_later = False
            if error is not None:
                errors.append(error)
        return errors


def _error_of(handle: Ends) -> BaseException | None:
    """Wait, and return what went wrong; that is told by whoever asks here, and not by having asked."""
    return handle.outcome() if isinstance(handle, SaveHandle) else handle.exception()
