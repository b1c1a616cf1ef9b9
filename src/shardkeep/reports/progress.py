"""Progress bars for saves. Where standard error is no terminal, as in the logs of a cluster, rich is not imported."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardkeep.events import Event, SaveBegan, SaveCommitted, SaveFailed, SaveProgressed, on_event
from shardkeep.reports.metrics import from_rank_zero

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_KINDS = (SaveBegan, SaveProgressed, SaveCommitted, SaveFailed)
_BETWEEN_S = 0.1
_PATIENCE_S = 2.0
"""How long leaving the block waits for a terminal that does not accept output."""


@contextmanager
def show_progress() -> Iterator[None]:
    """
    Show the progress of saves inside this block, on rank 0, if standard error is a terminal.

    Each save has a bar for the bytes that this rank has written. An asynchronous save also has one for the bytes that are
    staged. A bar disappears when its save ends.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> with sk.show_progress():
        ...     report = sk.save({"w": torch.ones(4)}, tempfile.mkdtemp() + "/step-1")

    """
    # Not as rich sees it, which also accepts variables that only mean colours in logs.
    interactive = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
    if not interactive:
        yield
        return
    import rich.progress  # noqa: PLC0415, F401 - only if needed, and before the drawing thread imports it
    from rich.console import Console  # noqa: PLC0415

    bars = _Bars(Console(stderr=True))
    with on_event(bars.hear, kinds=_KINDS):
        try:
            yield
        finally:
            bars.close()


class _Bars:
    """The bars of the running saves. One thread draws; if the terminal blocks (Ctrl-S), it waits, and no save does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._changed = threading.Condition()
        self._saves: dict[str, dict[str, int]] = {}
        """By place: the bytes that are done by verb ("stage", "write"), and the total."""
        self._closing = False
        # A daemon, because the process must be able to exit while the terminal blocks.
        self._thread = threading.Thread(target=self._draw, name="shardkeep-progress", daemon=True)
        self._thread.start()

    def hear(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, (SaveCommitted, SaveFailed)):
                self._saves.pop(event.where, None)
            elif isinstance(event, SaveBegan) and from_rank_zero(event):
                self._saves[event.where] = {**({"stage": 0} if event.background else {}), "write": 0, "total": 0}
            elif isinstance(event, SaveProgressed) and (bar := self._saves.get(event.where)):
                bar |= {"stage": event.bytes_staged} if "stage" in bar else {}
                bar |= {"write": event.bytes_written, "total": event.bytes_total}
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._saves.clear()
            self._changed.notify()
        self._thread.join(_PATIENCE_S)

    def _draw(self) -> None:
        """Draw a few times a second while there are saves, until `close`, or until the terminal is gone."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._saves or self._closing)
                if self._closing:
                    return
            try:
                with byte_progress(self._console, auto_refresh=False) as progress:
                    self._draw_saves(progress)
            except (OSError, ValueError):  # disconnected, or standard error was closed
                return

    def _draw_saves(self, progress: Progress) -> None:
        """Draw until no save is left. Between saves, training has the terminal to itself."""
        tasks: dict[tuple[str, str], TaskID] = {}
        while True:
            with self._changed:
                if not self._saves:
                    return
                bars = {
                    (where, verb): (done, bar["total"])
                    for where, bar in self._saves.items()
                    for verb, done in bar.items()
                    if verb != "total"
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


def byte_progress(console: Console, *, auto_refresh: bool) -> Progress:
    from rich import progress  # noqa: PLC0415 - only if needed

    # Without redirection, what the program prints meanwhile goes to its own streams.
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=auto_refresh,
        redirect_stdout=False,
        redirect_stderr=False,
    )
