"""What becomes of a save that failed: it is raised, logged, or given to a function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from shardkeep.errors import EarlierSaveFailed, StateError
from shardkeep.manage.problems import LeaseLost, NotPromoted

log = logging.getLogger("shardkeep")

OnError = Literal["raise", "warn"] | Callable[[BaseException], object]


class Failures:
    """Tells of saves that failed, as the user wants it."""

    def __init__(self, on_error: OnError, where: str) -> None:
        """Say how; `where` is the root, in messages."""
        if on_error not in ("raise", "warn") and not callable(on_error):
            raise StateError(f"on_error={on_error!r}", hint='give "raise", "warn", or a function of the error')
        self.raises = on_error == "raise"
        self._on_error = on_error
        self._where = where

    def tell(self, error: BaseException) -> None:
        """Tell of a failure that is not raised."""
        if callable(self._on_error):
            self._on_error(error)
        else:
            goes_on = "was not told of before" if self.raises else "training goes on"
            what = "a promotion" if isinstance(error, NotPromoted) else "a save"
            log.error("%s: %s failed, and %s: %s", self._where, what, goes_on, error)

    @contextmanager
    def keeping(self, errors: Sequence[BaseException]) -> Iterator[None]:
        """Do something that may fail; then earlier failures are told as well, and are the context of the new one."""
        try:
            yield
        except BaseException as error:
            for earlier in errors:
                self.tell(earlier)
            if errors and error.__context__ is None:
                error.__context__ = errors[0]
            raise

    def tell_earlier(self, errors: Sequence[BaseException], saved: Any = None) -> None:
        """
        Tell of asynchronous saves that failed.

        Raises:
            EarlierSaveFailed: where failures are raised, or the root is another job's now; `saved` is its response.

        """
        lost = any(isinstance(error, LeaseLost) or isinstance(error.__cause__, LeaseLost) for error in errors)
        if not errors or not (self.raises or lost):
            for error in errors:
                self.tell(error)
            return
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        first = errors[0]
        if isinstance(first, NotPromoted):  # saves come before promotions: none failed
            first.response = saved
            raise first
        earlier = EarlierSaveFailed(
            f"{self._where}: an earlier asynchronous save failed{more}: {errors[0]}",
            hint="let only one job save to a root"
            if lost
            else 'on_error="warn" goes on without it; what this call saves is not affected',
        )
        earlier.response = saved
        raise earlier from errors[0]
