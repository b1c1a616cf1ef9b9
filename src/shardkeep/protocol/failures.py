"""
What went wrong on which rank, as callers of torch's checkpoint expect to be told.

Exceptions cross ranks as they are, pickled; one that cannot be pickled crosses as its text.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from shardkeep.errors import CheckpointError

WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]


def _wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    frames = traceback.extract_tb(exc.__traceback__)
    # Made anew: what a frame remembers besides (code objects, since Python 3.13) cannot be pickled.
    summary = traceback.StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in frames])
    return exc, summary


def _is_wrapped_exception(obj: Any) -> bool:
    return (
        isinstance(obj, tuple)
        and len(obj) == 2
        and isinstance(obj[0], BaseException)
        and isinstance(obj[1], traceback.StackSummary)
    )


def _get_failure_dict(results: list[Any]) -> dict[int, WRAPPED_EXCEPTION]:
    return {rank: result for rank, result in enumerate(results) if _is_wrapped_exception(result)}


class CheckpointException(BaseException):
    """
    One or more ranks failed in a step of a save or a load; raised on all of them.

    A BaseException, as torch's is: `except Exception` does not catch it.
    """

    def __init__(self, msg: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        super().__init__(msg, failures)
        self._failures = failures

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """The exception of each rank that failed, and where it was raised."""
        return self._failures

    def __str__(self) -> str:
        ranks = ", ".join(map(str, sorted(self._failures)))
        lines = [f"CheckpointException ranks: {ranks} (step {self.args[0]!r})\n"]
        for rank, (error, stack) in sorted(self._failures.items()):
            lines.append(f"Traceback (most recent call last): (RANK {rank})\n")
            lines += traceback.format_list(stack or [])
            lines += traceback.format_exception_only(type(error), error)
        return "".join(lines)


def portable(wrapped: WRAPPED_EXCEPTION) -> WRAPPED_EXCEPTION:
    """Return a failure that another rank can read: the same, or one with its text where it cannot be pickled."""
    error, stack = wrapped
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign class may raise anything when it is pickled or rebuilt
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        return CheckpointError(f"{text} (an exception that cannot be sent between ranks)"), stack
    return wrapped
