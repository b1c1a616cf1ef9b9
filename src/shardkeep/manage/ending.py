"""Waiting for what a Checkpointer has begun, and giving back what it holds."""

from __future__ import annotations

import logging
from types import TracebackType

from typing_extensions import Self

from shardkeep.events import Callback, Event, Listening
from shardkeep.events import on_event as listen
from shardkeep.manage.resuming import Resuming
from shardkeep.manage.signals import Handlers

log = logging.getLogger("shardkeep")


class Ending(Resuming):
    """The part of a Checkpointer that waits and ends."""

    _handlers: Handlers
    _listening: Listening | None
    _gone: bool = False

    def wait(self, *, promotions: bool = True, timeout_s: float | None = None) -> None:
        """
        Wait for all saves to be durable, and for what no policy wants to be deleted; called by all ranks.

        Args:
            promotions: wait for all that is to be promoted, too.
            timeout_s: how long to wait for promotions.

        Raises:
            EarlierSaveFailed: one failed; why is its cause. `NotPromoted`: all is saved, and something not promoted.
            TimeoutError: promotions are not over in time; they go on.

        """
        errors = self._saves.wait()
        with self._failures.keeping(errors):
            errors += self._saves.promotions.wait(timeout_s) if promotions else []
        self._failures.tell_earlier(errors)

    def cancel_promotions(self) -> None:
        """Give up what is being promoted, until the next save; what was copied is found then. Called by all ranks."""
        self._saves.promotions.cancel()

    def close(self, *, timeout_s: float | None = None) -> None:
        """
        Wait for all saves, then give back the root, threads and signal handlers. Safe when called twice; after an
        interrupt, a second call finishes the job.

        With a root to promote to, the newest checkpoint is promoted whatever its step, and all promotions are waited
        for: for `timeout_s` at most, then they are cancelled, and the next job goes on with them.

        Raises:
            EarlierSaveFailed: a save failed, or a promotion, and it was not told before.

        """
        self._close(timeout_s, newest=True)

    def _close(self, timeout_s: float | None, *, newest: bool) -> None:
        if self._gone:
            return
        newest, self._closed = newest and not self._closed, True
        errors: list[BaseException] = []
        try:
            errors = self._saves.wait()
            with self._failures.keeping(errors):
                errors += self._saves.promotions.finish(timeout_s, newest=newest)
        except BaseException:  # who cannot wait for saves does not wait for these
            self.cancel_promotions()
            raise
        finally:
            self._handlers.remove()
            self._saves.close()
            if self._listening is not None:
                self._listening.stop()
        self._gone = True  # only now: whoever was interrupted may call again
        self._failures.tell_earlier(errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            # Other ranks may not come here: nothing is begun that needs them.
            self._close(None, newest=False)
        except Exception as second:  # noqa: BLE001 - the first one tells more
            log.error("%s: while %s was raised: %s", self._root.url, type(error).__name__, second)  # noqa: TRY400


def listen_below(callback: Callback, urls: list[str]) -> Listening:
    """Call a function with the events of these roots, and of all that is below them."""
    places = tuple(url.rstrip("/") + "/" for url in urls)

    def hear(event: Event) -> None:
        if event.where in urls or event.where.startswith(places):
            callback(event)

    return listen(hear)
