"""
A progress bar for saves, where somebody looks.

In come events; out goes a bar on standard error, from rank 0 alone, and only if that is a terminal. Elsewhere, as in
the logs of a cluster, nothing is shown and rich is not even imported.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from shardkeep.events import Event, SaveBegan, SaveCommitted, SaveFailed, SaveProgressed, on_event
from shardkeep.reports.first_rank import from_first

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console
    from rich.progress import Progress, TaskID

_KINDS = (SaveBegan, SaveProgressed, SaveCommitted, SaveFailed)


def show_progress() -> AbstractContextManager[None]:
    """
    Show how far saves have come while inside, on rank 0, if standard error is a terminal; else do nothing.

    A save has a bar for what is written, and one in the background also one for what is staged: bytes of this rank. A
    bar goes when its save ends.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> with sk.show_progress():
        ...     report = sk.save({"w": torch.ones(4)}, tempfile.mkdtemp() + "/step-1")

    """
    if not _interactive():
        return nullcontext()
    return _shown()


def _interactive() -> bool:
    """Ask the stream itself: rich also believes variables that are meant for colours in logs."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


@contextmanager
def _shown() -> Iterator[None]:
    import rich.progress  # noqa: PLC0415, F401 - only where it is used, and before a thread that saves would import it
    from rich.console import Console  # noqa: PLC0415

    bars = _Bars(Console(stderr=True))
    with on_event(bars.hear, kinds=_KINDS):
        try:
            yield
        finally:
            bars.close()


class _Bars:
    """The bars of the saves under way. Told by several threads."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def hear(self, event: Event) -> None:
        """Show what an event says."""
        with self._lock:
            if isinstance(event, (SaveCommitted, SaveFailed)):
                self._remove(event.where)
            elif isinstance(event, SaveBegan) and from_first(event):
                self._begin(event)
            elif isinstance(event, SaveProgressed):
                self._move(event)

    def close(self) -> None:
        """Take all bars away."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
            self._tasks.clear()

    def _begin(self, event: SaveBegan) -> None:
        if self._progress is None:
            self._progress = _progress(self._console)
            self._progress.start()
        name = os.path.basename(event.where.rstrip("/")) or event.where
        for verb in ("stage", "write") if event.background else ("write",):
            self._tasks[event.where, verb] = self._progress.add_task(f"{verb} {name}", total=None)

    def _move(self, event: SaveProgressed) -> None:
        for verb, done in (("stage", event.bytes_staged), ("write", event.bytes_written)):
            task = self._tasks.get((event.where, verb))
            if self._progress is not None and task is not None:
                self._progress.update(task, completed=done, total=event.bytes_total)

    def _remove(self, where: str) -> None:
        for key in [key for key in self._tasks if key[0] == where]:
            task = self._tasks.pop(key)
            if self._progress is not None:
                self._progress.remove_task(task)
        if not self._tasks:  # no thread draws, and nothing stands between training and its terminal, until the next
            self.close()


def _progress(console: Console) -> Progress:
    from rich.progress import (  # noqa: PLC0415 - only where it is used
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    return Progress(*columns, console=console, transient=True)
