"""
What a save or a load reports: timed phases, events, the report that is returned, and one log line on rank 0.

Clocks of machines differ, so a rank counts from a moment that all have in common: when rank 0's answer to a rendezvous
reached it. Rank 0 converts that to its own time; the error is what an answer takes to arrive, which is milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardkeep import events
from shardkeep.display import OneLine, format_count, format_rate, format_seconds, format_size
from shardkeep.errors import SaveCancelled, StateError
from shardkeep.events import Event, RankPhases, Slowest, Span, emit, log, log_safely
from shardkeep.format.record import checked_step

SAVE_WORK = ("describe", "stage", "write")
"""Phases of a save in which a rank does not wait for another."""
LOAD_WORK = ("plan", "read", "place")
_EXPLAINED = 0.5
"""A rank that stages late writes late: if staging explains this part of the delay, it is named as the reason."""
_PROGRESS_INTERVAL_S = 0.1
_WORTH_LOGGING_S = 0.01

SentPhases = list[Span]
"""Phases as they are sent to rank 0; the first entry is not a phase, but the moment of the call."""


def unlogged(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function of a step as it is: only `dcp` logs the steps, under torch's names."""
    del name
    return function


class Phases:
    def __init__(self) -> None:
        self.called_s = time.perf_counter()
        # Several threads append to it, which is atomic.
        self._spans: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        return sorted(self._spans, key=lambda span: span.begin_s)

    def now(self) -> float:
        return time.perf_counter() - self.called_s

    def add(self, name: str, begin_s: float, end_s: float, nbytes: int = 0) -> None:
        self._spans.append(Span(name, begin_s, max(begin_s, end_s), nbytes))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside as a phase, however it ends."""
        begin_s = self.now()
        try:
            yield
        finally:
            self.add(name, begin_s, self.now())

    def met(self) -> CommonMoment:
        """Return the moment at which rank 0's answer has reached all ranks: now."""
        return CommonMoment(self, self.now())

    def all_ranks(self, ranks: list[RankPhases]) -> list[RankPhases]:
        """On rank 0: complete what all ranks did by what this rank has done since they sent it."""
        return [RankPhases(0, self.spans, ranks[0].late_s), *ranks[1:]] if ranks else []


@dataclass(frozen=True)
class CommonMoment:
    """A moment of a call that all ranks know, by this rank's clock."""

    phases: Phases
    at_s: float
    """Since the call."""

    def sent(self) -> SentPhases:
        """Return the phases of this rank in the form that is sent to rank 0: relative to the moment."""
        return _shifted([Span("call", 0.0, 0.0), *self.phases.spans], -self.at_s)

    def of_ranks(self, sent: list[SentPhases]) -> list[RankPhases]:
        """On rank 0: return what all ranks did, given what they have sent, in their order."""
        first_s = min(call.begin_s for call, *_ in sent)
        return [
            RankPhases(rank, _shifted(did, self.at_s), call.begin_s - first_s) for rank, (call, *did) in enumerate(sent)
        ]


def _shifted(spans: list[Span], by_s: float) -> list[Span]:
    return [Span(span.name, span.begin_s + by_s, span.end_s + by_s, span.nbytes) for span in spans]


def seconds_by_name(spans: list[Span]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    return seconds


def find_slowest(ranks: list[RankPhases], work: tuple[str, ...]) -> Slowest | None:
    """Return the rank whose time for a phase of `work`, or to make the call, is furthest above the median of all ranks."""
    if len(ranks) < 2:
        return None
    taken = [seconds_by_name(each.spans) | ({"late": each.late_s} if each.late_s else {}) for each in ranks]
    names = [name for name in (*work, "late") if any(name in seconds for seconds in taken)]
    if not names:
        return None
    # The lower of two: in a pair, the rank that did not have to be waited for.
    medians = {name: sorted(seconds.get(name, 0.0) for seconds in taken)[(len(ranks) - 1) // 2] for name in names}

    def excess(place: int, name: str) -> tuple[float, float]:
        seconds = taken[place].get(name, 0.0)
        return seconds - medians[name], seconds

    place, name = max(itertools.product(range(len(ranks)), names), key=lambda each: excess(*each))
    if name == "write" and "stage" in names and excess(place, "stage")[0] >= _EXPLAINED * excess(place, "write")[0] > 0:
        name = "stage"
    return Slowest(ranks[place].rank, name, taken[place].get(name, 0.0), medians[name])


@dataclass(frozen=True, kw_only=True, repr=False)
class CallReport(OneLine):
    where: str
    save_id: str
    step: int | None
    tensors: int
    """Of a save: those of the checkpoint. Of a load: those that were filled, on any rank; the same number on all ranks."""
    seconds: float
    """From the call to the commit, or until the state was filled, on this rank."""
    phases: list[Span] = field(default_factory=list, repr=False)
    """The phases of this rank, with their times."""
    ranks: list[RankPhases] = field(default_factory=list, repr=False)
    """The phases of every rank, of a save up to its last byte, with their times; on rank 0."""
    slowest: Slowest | None = None
    """Which rank the others waited for, and why; on rank 0, if there are several ranks."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SaveReport(CallReport):
    """What a save did. `print` shows it in one line."""

    bytes_written: int
    """Bytes written by this rank, headers included, before codecs."""
    bytes_stored: int = 0
    """Bytes that this rank's files take in the store: fewer if codecs compress them."""
    bytes_cached: int = 0
    """Bytes of these that are kept in this machine's page cache, for a restart; see `Options.keep_cached`."""
    bytes_total: int
    """Tensor bytes of the whole checkpoint."""
    blocked_s: float
    """How long the call took."""
    staged_s: float
    """From the call until every tensor of the state could be changed."""
    staging: str = ""
    """How an asynchronous save copied tensors on accelerators, and why; empty if there were none."""
    lost_s: float | None = None
    """
    An estimate of the training time that an asynchronous save cost on this rank: by how much the steps of the first optimizer in the
    state took longer, from the call to the commit, than as many did between saves. None if too few were seen.
    """
    written_s: float = 0.0
    """From the call until every rank had written its files."""

    @property
    def gb_per_s(self) -> float:
        """The whole checkpoint over the time it took."""
        return self.bytes_total / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        return f"saved {self.where}: {_amount(self.tensors, self.bytes_total, self.seconds)}"


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadReport(CallReport):
    """What a load did. `print` shows it in one line."""

    meta: dict[str, Any]
    """The `meta` given to `save`."""
    missing: list[str]
    """Keys of some rank's state that the checkpoint does not have; those leaves are unchanged."""
    unexpected: list[str]
    """Keys of the checkpoint that no rank's state asked for."""
    unmatched: list[str] = field(default_factory=list)
    """Arguments with a pattern that matches no name, as "include='modle'"."""
    bytes_filled: int
    """The size of the tensors that were filled, each counted once, whole, and as it is stored."""
    cast: dict[str, str] = field(default_factory=dict)
    """Keys whose dtype was converted on this rank, as "float32 -> bfloat16"."""
    bytes_read: int
    """Bytes read by this rank, headers included."""
    bytes_received: int = 0
    """Bytes received from other ranks, if `Options.share_reads` is on."""

    @property
    def gb_per_s(self) -> float:
        """What this rank read over the time it took."""
        return self.bytes_read / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        keys = {"missing": self.missing, "unexpected": self.unexpected}
        differ = "".join(f", {len(names):,} {what}" for what, names in keys.items() if names)
        return f"loaded {self.where}: {_amount(self.tensors, self.bytes_filled, self.seconds)}{differ}"


def _amount(tensors: int, nbytes: int, seconds: float) -> str:
    return f"{format_count(tensors, 'tensor')}, {format_size(nbytes)} in {format_seconds(seconds)}"


class _CallEvents:
    _began: type[Event]
    _failed: type[Event]

    def __init__(self, phases: Phases, *, rank: int, where: str, step: Any = None) -> None:
        """A step that no record can hold is left out."""
        self.phases = phases
        self._rank = rank
        self._where = _plain(where)
        self._step: int | None = None
        with contextlib.suppress(StateError):
            self._step = checked_step(step)

    def _emit(self, event: type[Event], /, **figures: Any) -> None:
        emit(event, lambda: event(**{"rank": self._rank, "where": self._where, "step": self._step, **figures}))

    @contextlib.contextmanager
    def reporting(self, **figures: Any) -> Iterator[None]:
        """Emit that the call begins, and if what is inside fails, that it failed."""
        self._emit(self._began, **figures)
        try:
            yield
        except BaseException as error:
            message = type(error).__name__
            with contextlib.suppress(Exception):  # an error without a text must still be raised
                message = _plain(str(error))
            cancelled = {"cancelled": isinstance(error, SaveCancelled)} if self._failed is events.SaveFailed else {}
            self._emit(
                self._failed,
                called_s=self.phases.called_s,
                kind=type(error).__name__,
                message=message,
                seconds=self.phases.now(),
                phases=self.phases.spans,
                **cancelled,
            )
            raise

    def _log_end(self, report: SaveReport | LoadReport, nbytes: int, took: list[str]) -> None:
        slowest = f"; slowest: {report.slowest}" if report.slowest else ""
        speed = format_rate(nbytes, report.seconds)
        log_safely(logging.INFO, "%s (%s): %s%s", _plain(str(report)), speed, ", ".join(took), slowest)

    def _emit_end(
        self, kind: type[Event], report: SaveReport | LoadReport, names: tuple[str, ...], **more: Any
    ) -> None:
        # The step in the record: that of rank 0.
        figures = {name: getattr(report, name) for name in ("step", "save_id", "seconds", "slowest", *names)}
        phases, ranks = list(report.phases), list(report.ranks)
        self._emit(kind, called_s=self.phases.called_s, phases=phases, ranks=ranks, **figures, **more)


class SaveEvents(_CallEvents):
    _began, _failed = events.SaveBegan, events.SaveFailed
    _next_progress_s = 0.0

    def staged(self, seconds: float) -> None:
        self._emit(events.SaveStaged, seconds=seconds)

    def written(self, nbytes: int) -> None:
        self._emit(events.SaveWritten, seconds=self.phases.now(), bytes_written=nbytes)

    def progressed(self, *, staged: int, written: int, total: int) -> None:
        """Emit how far the save has come, a few times a second at most."""
        if self.phases.now() < self._next_progress_s and written < total:
            return
        self._next_progress_s = self.phases.now() + _PROGRESS_INTERVAL_S
        self._emit(events.SaveProgressed, bytes_staged=staged, bytes_written=written, bytes_total=total)

    def committed(self, saved: SaveReport) -> None:
        if self._rank == 0 and log.isEnabledFor(logging.INFO):
            queued_s = seconds_by_name(saved.phases).get("queue", 0.0)
            queued = f" ({format_seconds(queued_s)} by earlier saves)" if queued_s >= _WORTH_LOGGING_S else ""
            took = [f"blocked {format_seconds(saved.blocked_s)}{queued}", f"staged {format_seconds(saved.staged_s)}"]
            took += [f"written {format_seconds(saved.written_s)}"]
            took += [] if saved.lost_s is None else [f"training lost about {format_seconds(saved.lost_s)}"]
            self._log_end(saved, saved.bytes_total, took)
        sizes, times = ("tensors", "bytes_total", "bytes_written"), ("blocked_s", "staged_s", "written_s", "gb_per_s")
        self._emit_end(events.SaveCommitted, saved, (*sizes, *times))


class LoadEvents(_CallEvents):
    _began, _failed = events.LoadBegan, events.LoadFailed

    def finished(self, loaded: LoadReport) -> None:
        read = sum(span.nbytes for each in loaded.ranks for span in each.spans if span.name == "read")
        total = read or loaded.bytes_read
        gb_per_s = total / max(loaded.seconds, 1e-9) / 1e9
        if self._rank == 0 and log.isEnabledFor(logging.INFO):
            took = [f"{name} {format_seconds(seconds)}" for name, seconds in seconds_by_name(loaded.phases).items()]
            self._log_end(loaded, total, took)
        names = ("bytes_read", "bytes_received")
        self._emit_end(events.LoadFinished, loaded, names, bytes_total=total, gb_per_s=gb_per_s)


def _plain(text: str) -> str:
    """Return text that JSON can carry: file names may contain what UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()
