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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkeep.events import Event, SaveBegan, SaveCommitted, SaveFailed, SaveProgressed, on_event
from shardkeep.reports.metrics import from_rank_zero

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console
    from rich.progress import Progress, TaskID

_KINDS = (SaveBegan, SaveProgressed, SaveCommitted, SaveFailed)
_BETWEEN_S = 0.1
_PATIENCE_S = 2.0
"""How long the end of a block waits for a terminal."""


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
    """
    The bars of the saves under way. Told by several threads, drawn by one of its own.

    A terminal that takes no more (Ctrl-S, a stalled connection) then stops that thread, and no save.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._changed = threading.Condition()
        self._saves: dict[str, _Bar] = {}
        self._closing = False
        # A daemon: where the terminal hangs, the process must still be able to end.
        self._thread = threading.Thread(target=self._draw, name="shardkeep-progress", daemon=True)
        self._thread.start()

    def hear(self, event: Event) -> None:
        """Note what an event says."""
        with self._changed:
            if isinstance(event, (SaveCommitted, SaveFailed)):
                self._saves.pop(event.where, None)
            elif isinstance(event, SaveBegan) and from_rank_zero(event):
                self._saves[event.where] = _Bar(("stage", "write") if event.background else ("write",))
            elif isinstance(event, SaveProgressed) and event.where in self._saves:
                bar = self._saves[event.where]
                bar.done, bar.total = {"stage": event.bytes_staged, "write": event.bytes_written}, event.bytes_total
            self._changed.notify()

    def close(self) -> None:
        """Take all bars away, as long as the terminal lets us."""
        with self._changed:
            self._closing = True
            self._saves.clear()
            self._changed.notify()
        self._thread.join(_PATIENCE_S)

    def _draw(self) -> None:
        """Draw until `close`: while there are saves, a few times a second."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._saves or self._closing)
                if self._closing:
                    return
            with _progress(self._console) as progress:
                self._draw_saves(progress)

    def _draw_saves(self, progress: Progress) -> None:
        """Draw until no save is left: then nothing stands between training and its terminal until the next."""
        tasks: dict[tuple[str, str], TaskID] = {}
        while True:
            with self._changed:
                if not self._saves:
                    return
                bars = {
                    (where, verb): (bar.done.get(verb, 0), bar.total)
                    for where, bar in self._saves.items()
                    for verb in bar.verbs
                }
            for key in tasks.keys() - bars.keys():
                progress.remove_task(tasks.pop(key))
            for key, (done, total) in bars.items():
                where, verb = key
                if key not in tasks:
                    name = os.path.basename(where.rstrip("/")) or where
                    tasks[key] = progress.add_task(f"{verb} {name}", total=None)
                progress.update(tasks[key], completed=done, total=total or None)
            progress.refresh()
            with self._changed:
                self._changed.wait_for(lambda: not self._saves, timeout=_BETWEEN_S)


@dataclass
class _Bar:
    """How far one save has come."""

    verbs: tuple[str, ...]
    done: dict[str, int] = field(default_factory=dict)
    total: int = 0


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
    # Not redirected: what training prints meanwhile goes where it would have gone.
    return Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
