"""A bar on stderr while bytes are read, where somebody looks at it and it takes long enough to wonder."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from shardkeep.cli.output import is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from typing_extensions import Self

_PATIENCE_S = 0.5
"""What is over by then needs no bar."""


class Progress:
    """How much of a number of bytes is done. Nothing is drawn, and rich not imported, unless stderr is a terminal."""

    def __init__(self, what: str, total_nbytes: int) -> None:
        self._what = what
        self._total = total_nbytes
        self._done = 0
        self._began = time.monotonic()
        self._looked_at = is_terminal(sys.stderr)
        self._bar: Bar | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, nbytes: int) -> None:
        """Say that so many more bytes are done; from any thread."""
        with self._lock:
            self._done += nbytes
            if not self._looked_at:
                return
            if self._bar is None:
                if time.monotonic() - self._began < _PATIENCE_S:
                    return
                self._bar = self._start()
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _start(self) -> Bar:
        from rich import progress  # noqa: PLC0415 - heavy, and rarely drawn
        from rich.console import Console  # noqa: PLC0415

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task(self._what, total=self._total)
        bar.start()
        return bar
