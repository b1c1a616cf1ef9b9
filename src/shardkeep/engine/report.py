"""
What a save or a load tells of itself on this rank: events while it goes on, and one line on rank 0 when it is done.

Nothing here changes how the call ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardkeep.engine.writer import WritableStore
from shardkeep.errors import SaveCancelled, StateError
from shardkeep.events import (
    Event,
    LoadBegan,
    LoadFailed,
    LoadFinished,
    RankPhases,
    SaveBegan,
    SaveCommitted,
    SaveFailed,
    SaveProgressed,
    SaveStaged,
    SaveWritten,
    Slowest,
    Span,
    emit,
    has_listeners,
    log_safely,
)
from shardkeep.format.record import checked_step
from shardkeep.storage.base import BlobWriter

# When a call did what, on this rank and, as far as rank 0 is told, on all.
#
# Each rank times its phases by a clock that never jumps, and sends them along with what it says at the end of its
# work.
# Clocks of machines differ. So a rank counts from a moment that all have in common, when rank 0's answer to a meeting
# reached them, and rank 0 puts them on its own time by when it gave that answer. Ranks are then apart by what an
# answer
# takes to arrive: milliseconds.

SAVE_WORK = ("describe", "stage", "write")
"""Phases in which a rank waits for no other."""
LOAD_WORK = ("plan", "read", "place")
_EXPLAINED = 0.5
"""A rank that stages late writes late: so much of the one makes it the reason for the other."""

SentPhases = list[tuple[str, float, float, int]]
"""Phases on their way to rank 0; the first is no phase, but the moment of the call."""
_CALL = "call"


class Phases:
    """The phases of one call."""

    def __init__(self) -> None:
        """Begin to count."""
        self.called_s = time.perf_counter()
        """When the call was made, by that clock."""
        self._met_s = 0.0
        # Added to by several threads; to append is atomic.
        self._spans: list[Span] = []
        self.ranks: list[RankPhases] = []
        """What all ranks did, in the order of ranks; known on rank 0, once it has collected it."""

    @property
    def spans(self) -> list[Span]:
        """What this rank did so far, in order."""
        return sorted(self._spans, key=lambda span: span.begin_s)

    def now(self) -> float:
        """Return how many seconds ago the call began."""
        return time.perf_counter() - self.called_s

    def add(self, name: str, begin_s: float, end_s: float, nbytes: int = 0) -> None:
        """Note a phase."""
        self._spans.append(Span(name, begin_s, max(begin_s, end_s), nbytes))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what is done inside as a phase, however it ends."""
        begin_s = self.now()
        try:
            yield
        finally:
            self.add(name, begin_s, self.now())

    def mark_meeting(self) -> float:
        """Note that an answer has come that rank 0 gave to all at once, and return when."""
        self._met_s = self.now()
        return self._met_s

    def sent(self) -> SentPhases:
        """Return what this rank did so far, as it is sent to rank 0: counted from when all met."""
        met_s = self._met_s
        did = [(span.name, span.begin_s - met_s, span.end_s - met_s, span.nbytes) for span in self.spans]
        return [(_CALL, -met_s, -met_s, 0), *did]

    def collect(self, sent: list[SentPhases]) -> None:
        """On rank 0: take what all ranks have sent, in their order."""
        met_s = self._met_s
        first_s = min(called_s for (_, called_s, _, _), *_ in sent)
        self.ranks = [
            RankPhases(
                rank,
                [Span(name, begin_s + met_s, end_s + met_s, nbytes) for name, begin_s, end_s, nbytes in did],
                called_s - first_s,
            )
            for rank, ((_, called_s, _, _), *did) in enumerate(sent)
        ]

    def all_ranks(self) -> list[RankPhases]:
        """On rank 0: what all ranks did, and this one also since."""
        return [RankPhases(0, self.spans, self.ranks[0].late_s), *self.ranks[1:]] if self.ranks else []


def seconds_by_name(spans: list[Span]) -> dict[str, float]:
    """Return how long each phase took, all its parts together."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    return seconds


def find_slowest(ranks: list[RankPhases], work: tuple[str, ...]) -> Slowest | None:
    """
    Name the rank whose time for some work of its own, or to make the call, is furthest above the median of all.

    None where there is one rank. `work` has the phases in which a rank waits for no other.
    """
    if len(ranks) < 2:
        return None
    taken = [seconds_by_name(each.spans) | ({"late": each.late_s} if each.late_s else {}) for each in ranks]
    names = [name for name in (*work, "late") if any(name in seconds for seconds in taken)]
    if not names:
        return None
    # The lower of two: in a pair, the one that did not have to be waited for.
    medians = {name: sorted(seconds.get(name, 0.0) for seconds in taken)[(len(ranks) - 1) // 2] for name in names}

    def excess(place: int, name: str) -> float:
        return taken[place].get(name, 0.0) - medians[name]

    place, name = max(
        ((place, name) for place in range(len(ranks)) for name in names),
        key=lambda each: (excess(*each), taken[each[0]].get(each[1], 0.0)),
    )
    if name == "write" and "stage" in names and excess(place, "stage") >= _EXPLAINED * excess(place, "write") > 0:
        name = "stage"
    return Slowest(ranks[place].rank, name, taken[place].get(name, 0.0), medians[name])


_BETWEEN_PROGRESS_S = 0.1
_WORTH_SAYING_S = 0.01


class _CallEvents:
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
        emit(what, lambda: what(**{"rank": self._rank, "where": self._where, "step": self._step, **figures}))


class SaveEvents(_CallEvents):
    """What is said of one save."""

    _next_progress_s = 0.0

    @contextlib.contextmanager
    def reporting(self, *, background: bool) -> Iterator[None]:
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
            log_safely(
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
                _slowest_text(saved.slowest),
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


class LoadEvents(_CallEvents):
    """What is said of one load."""

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
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
            log_safely(
                logging.INFO,
                "loaded %s: %.3f GB in %.2f s (%.2f GB/s): %s%s",
                self._where,
                total / 1e9,
                loaded.seconds,
                gb_per_s,
                took,
                _slowest_text(loaded.slowest),
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


def _slowest_text(slowest: Slowest | None) -> str:
    return "" if slowest is None else f"; slowest: {slowest}"


def _text(error: BaseException) -> str:
    try:
        return _plain(str(error))
    except Exception:  # noqa: BLE001 - an error that cannot be told is still the one to raise
        return type(error).__name__


def _plain(text: str) -> str:
    """Return text that JSON can carry: names of files may hold what UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


# What saves and loads return.


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did."""

    where: str
    save_id: str
    step: int | None
    bytes_written: int
    """By this rank, headers included, before codecs."""
    bytes_stored: int = 0
    """What that takes in the store: less where codecs shrink it."""
    bytes_total: int
    """Tensor bytes of the whole checkpoint."""
    tensors: int
    seconds: float
    """From the call to the commit, on this rank."""
    blocked_s: float
    """How long the call took."""
    staged_s: float
    """From the call until every tensor of the state might be changed."""
    written_s: float = 0.0
    """From the call until every rank had written its files."""
    phases: list[Span] = field(default_factory=list)
    """What this rank did when."""
    ranks: list[RankPhases] = field(default_factory=list)
    """What every rank did when, up to its last byte; known on rank 0."""
    slowest: Slowest | None = None
    """Whom the others waited for, and why; known on rank 0, where there are several."""

    @property
    def gb_per_s(self) -> float:
        """The whole checkpoint over the time it took."""
        return self.bytes_total / max(self.seconds, 1e-9) / 1e9


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did."""

    where: str
    save_id: str
    step: int | None
    meta: dict[str, Any]
    """The user's own, from the commit record."""
    missing: list[str]
    """Keys some rank's state has and the checkpoint has not; those leaves are as they were."""
    unexpected: list[str]
    """Keys the checkpoint has and no rank's state asked for."""
    cast: dict[str, str] = field(default_factory=dict)
    """Keys whose dtype was converted on this rank, as "float32 -> bfloat16"."""
    bytes_read: int
    """By this rank, headers included."""
    bytes_received: int = 0
    """By this rank from others, where `Options.share_reads` lets them read for each other."""
    seconds: float
    phases: list[Span] = field(default_factory=list)
    """What this rank did when."""
    ranks: list[RankPhases] = field(default_factory=list)
    """What every rank did when; known on rank 0."""
    slowest: Slowest | None = None
    """Whom the others waited for, and why; known on rank 0, where there are several."""

    @property
    def gb_per_s(self) -> float:
        """What this rank read over the time it took."""
        return self.bytes_read / max(self.seconds, 1e-9) / 1e9


# A place to write to that tells how much has been written to it.


def report_progress(store: WritableStore, telling: SaveEvents, total: int) -> WritableStore:
    """Return the store, or where somebody watches, one that tells of what is written to it, of so many bytes."""
    if not has_listeners(SaveProgressed):
        return store
    lock = threading.Lock()
    so_far = 0

    def told(nbytes: int) -> None:
        nonlocal so_far
        with lock:
            so_far = min(so_far + nbytes, total)  # digests beside a file are more than was reckoned with
        telling.progressed(staged=total, written=so_far, total=total)

    return _ProgressStore(store, told)


class _ProgressStore:
    def __init__(self, store: WritableStore, told: Callable[[int], None]) -> None:
        self._store = store
        self._told = told

    def create(self, name: str, nbytes: int) -> BlobWriter:
        return _ProgressWriter(self._store.create(name, nbytes), self._told)

    def delete(self, name: str) -> None:
        self._store.delete(name)


class _ProgressWriter:
    def __init__(self, writer: BlobWriter, told: Callable[[int], None]) -> None:
        self._writer = writer
        self._told = told

    def write_at(self, offset: int, data: memoryview) -> None:
        self._writer.write_at(offset, data)
        self._told(data.nbytes)

    def finish(self, nbytes: int | None = None) -> None:
        self._writer.finish(nbytes)

    def abandon(self) -> None:
        self._writer.abandon()
