"""Curves of saves and loads in TensorBoard: `sk.on_event(TensorBoard("runs/a/tensorboard"))`."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from shardkeep.codecs.base import require_module
from shardkeep.events import Event
from shardkeep.reports.metrics import failed_call, from_rank_zero, metrics_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A callback for `on_event`: scalars below "checkpoint/" over each step (without one: 0, 1, ...), written by rank 0."""

    def __init__(self, to: str | os.PathLike[str] | SummaryWriter) -> None:
        """Take a folder, or a writer that you close; rank 0 creates the files at the first event. Needs tensorboard."""
        self._module = require_module(
            "torch.utils.tensorboard", package="tensorboard", wanted_by="the TensorBoard report"
        )
        self._folder = os.fspath(to) if isinstance(to, (str, os.PathLike)) else None
        self._writer: SummaryWriter | None = None if isinstance(to, (str, os.PathLike)) else to
        self._closed = False
        self._lock = threading.Lock()
        self._failures = {"save": 0, "load": 0}
        self._unnumbered = 0

    def __call__(self, event: Event) -> None:
        figures, failed = metrics_of(event), failed_call(event)
        if not (figures or failed) or not from_rank_zero(event):
            return
        with self._lock:  # several threads may save at the same time
            if self._closed:
                return
            if failed:
                self._failures[failed] += 1
                figures = {f"{failed}/failures": self._failures[failed]}
            step = event.step
            if step is None:
                step, self._unnumbered = self._unnumbered, self._unnumbered + 1
            if self._writer is None:
                self._writer = self._module.SummaryWriter(self._folder)
            for name, value in figures.items():
                self._writer.add_scalar(f"checkpoint/{name}", value, step, walltime=event.time_s)
            self._writer.flush()

    def close(self) -> None:
        """Close the files, unless the writer came from the caller. Later events are not written."""
        with self._lock:
            self._closed = True
            if self._folder is not None and self._writer is not None:
                self._writer.close()
                self._writer = None
