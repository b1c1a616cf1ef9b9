"""
What a save or a load tells of itself on this rank: events while it goes on, and one line on rank 0 when it is done.

Nothing here changes how the call ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardkeep.errors import SaveCancelled, StateError
from shardkeep.events import (
    Event,
    LoadBegan,
    LoadFailed,
    LoadFinished,
    SaveBegan,
    SaveCommitted,
    SaveFailed,
    SaveProgressed,
    SaveStaged,
    SaveWritten,
    Slowest,
    say,
    tell,
)
from shardkeep.format.record import checked_step
from shardkeep.run.phases import seconds_by_name

if TYPE_CHECKING:
    from shardkeep.run.phases import Phases
    from shardkeep.run.reports import LoadReport, SaveReport

_BETWEEN_PROGRESS_S = 0.1
_WORTH_SAYING_S = 0.01


class _Telling:
    """What is said of one call."""

    def __init__(self, phases: Phases, *, rank: int, where: str, step: Any = None) -> None:
        """Say nothing yet. A step that no record can hold is not told."""
        self.phases = phases
        self._rank = rank
        self._where = _plain(where)
        self._step: int | None = None
        with contextlib.suppress(StateError):
            self._step = checked_step(step)

    def _tell(self, what: type[Event], **figures: Any) -> None:
        tell(what, lambda: what(**{"rank": self._rank, "where": self._where, "step": self._step, **figures}))


class SaveTelling(_Telling):
    """What is said of one save."""

    _next_progress_s = 0.0

    @contextlib.contextmanager
    def made(self, *, background: bool) -> Iterator[None]:
        """Tell that a save begins, and if what is inside fails, that it failed."""
        self._tell(SaveBegan, background=background)
        try:
            yield
        except BaseException as error:
            self._tell(
                SaveFailed,
                called_s=self.phases.called_s,
                kind=type(error).__name__,
                message=_text(error),
                cancelled=isinstance(error, SaveCancelled),
                seconds=self.phases.now(),
                phases=self.phases.spans,
            )
            raise

    def staged(self, seconds: float) -> None:
        """Tell that the state may be changed."""
        self._tell(SaveStaged, seconds=seconds)

    def written(self, nbytes: int) -> None:
        """Tell that this rank's files are written."""
        self._tell(SaveWritten, seconds=self.phases.now(), bytes_written=nbytes)

    def progressed(self, *, staged: int, written: int, total: int) -> None:
        """Tell how far it has come, a few times a second at most."""
        if self.phases.now() < self._next_progress_s and written < total:
            return
        self._next_progress_s = self.phases.now() + _BETWEEN_PROGRESS_S
        self._tell(SaveProgressed, bytes_staged=staged, bytes_written=written, bytes_total=total)

    def committed(self, saved: SaveReport) -> None:
        """Tell that the checkpoint is there, and log it."""
        self._step = saved.step
        if self._rank == 0:
            queued_s = seconds_by_name(saved.phases).get("queue", 0.0)
            say(
                logging.INFO,
                "saved %s: %.3f GB in %.2f s (%.2f GB/s): blocked %.2f s%s, staged %.2f s, written %.2f s%s",
                self._where,
                saved.bytes_total / 1e9,
                saved.seconds,
                saved.gb_per_s,
                saved.blocked_s,
                f" ({queued_s:.2f} s by earlier saves)" if queued_s >= _WORTH_SAYING_S else "",
                saved.staged_s,
                saved.written_s,
                _blame(saved.slowest),
            )
        self._tell(
            SaveCommitted,
            called_s=self.phases.called_s,
            save_id=saved.save_id,
            tensors=saved.tensors,
            bytes_total=saved.bytes_total,
            bytes_written=saved.bytes_written,
            seconds=saved.seconds,
            blocked_s=saved.blocked_s,
            staged_s=saved.staged_s,
            written_s=saved.written_s,
            gb_per_s=saved.gb_per_s,
            phases=list(saved.phases),
            ranks=list(saved.ranks),
            slowest=saved.slowest,
        )


class LoadTelling(_Telling):
    """What is said of one load."""

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Tell that a load begins, and if what is inside fails, that it failed."""
        self._tell(LoadBegan)
        try:
            yield
        except BaseException as error:
            self._tell(
                LoadFailed,
                called_s=self.phases.called_s,
                kind=type(error).__name__,
                message=_text(error),
                seconds=self.phases.now(),
                phases=self.phases.spans,
            )
            raise

    def finished(self, loaded: LoadReport) -> None:
        """Tell that the state is filled, and log it."""
        self._step = loaded.step
        read = sum(span.nbytes for each in loaded.ranks for span in each.spans if span.name == "read")
        total = read or loaded.bytes_read
        gb_per_s = total / max(loaded.seconds, 1e-9) / 1e9
        if self._rank == 0:
            took = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in seconds_by_name(loaded.phases).items())
            say(
                logging.INFO,
                "loaded %s: %.3f GB in %.2f s (%.2f GB/s): %s%s",
                self._where,
                total / 1e9,
                loaded.seconds,
                gb_per_s,
                took,
                _blame(loaded.slowest),
            )
        self._tell(
            LoadFinished,
            called_s=self.phases.called_s,
            save_id=loaded.save_id,
            bytes_read=loaded.bytes_read,
            bytes_received=loaded.bytes_received,
            bytes_total=total,
            seconds=loaded.seconds,
            gb_per_s=gb_per_s,
            phases=list(loaded.phases),
            ranks=list(loaded.ranks),
            slowest=loaded.slowest,
        )


def _blame(slowest: Slowest | None) -> str:
    return "" if slowest is None else f"; slowest: {slowest}"


def _text(error: BaseException) -> str:
    try:
        return _plain(str(error))
    except Exception:  # noqa: BLE001 - an error that cannot be told is still the one to raise
        return type(error).__name__


def _plain(text: str) -> str:
    """Return text that JSON can carry: names of files may hold what UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()
