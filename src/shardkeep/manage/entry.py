"""One checkpoint of a root. Its meta holds its metrics and its timeline, and the timelines give the order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from operator import attrgetter
from typing import Any, Literal

from shardkeep.display import OneLine, format_size
from shardkeep.errors import BlobNotFound, CheckpointError, StateError, StorageError
from shardkeep.format.record import Record

METRICS = "metrics"
TIMELINE = "timeline"
"""The key of the timeline's number in the meta of a commit record; absent for the first timeline."""
BEGAN_AFTER = "timeline_began_after"
"""The key of the timeline and step after which the timeline began; absent for the first timeline."""
NEAR, FAR = 0, 1
"""The tier of the root that is saved to, and of the one that checkpoints are promoted to."""

_NOT_FINITE = ("nan", "inf", "-inf")
Status = Literal["committed", "unfinished", "damaged"]
Layout = Literal["native", "torch", "safetensors", "torch.save"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Entry(OneLine):
    """A checkpoint of a root, or what is left of one."""

    name: str
    """The name of its directory in the root."""
    step: int
    """The step; -1 if neither the record nor the name says."""
    status: Status
    """committed: it exists. unfinished: it is being written, or its save never finished. damaged: its record is unreadable."""
    reason: str = ""
    """Why it is not committed."""
    layout: Layout | None = None
    saved_at: datetime | None = None
    """By the clock of the rank that committed it, or of the store; always with a time zone."""
    nbytes: int = 0
    """The size of all files that belong to it; 0 where that is not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    timeline: int = 0
    """A job that goes back to an earlier step and saves other steps from there begins a new timeline; higher is newer."""
    began_after: tuple[int, int] | None = None
    """The timeline and step after which its own timeline began."""
    save_id: str = ""
    """The id of the save that wrote it; empty where that is not known."""
    record: Record | None = field(default=None, repr=False)
    """The commit record of a native checkpoint."""
    problem: CheckpointError | None = field(default=None, repr=False)
    """The error that reading the record of a damaged checkpoint raised."""
    managed: bool = True
    """Whether the template gives its name. Retention never deletes any other checkpoint."""
    tier: int = 0
    """In a Checkpointer with two roots: 0 for the near root, 1 for the root that checkpoints are promoted to."""

    def __str__(self) -> str:
        when = f", saved {self.saved_at:%Y-%m-%d %H:%M:%S %Z}" if self.saved_at else ""
        size = f", {format_size(self.nbytes)}" if self.nbytes else ""
        pinned = ", pinned" if self.pinned else ""
        return f"{self.name}, {self.status}{size}{when}{pinned}"

    @property
    def committed(self) -> bool:
        return self.status == "committed"

    @property
    def known_step(self) -> int | None:
        return self.step if self.step >= 0 else None

    @property
    def age(self) -> tuple[int, int]:
        """The key by which checkpoints are ordered, the newest last. It does not depend on any clock."""
        return self.timeline, self.step

    @property
    def save_order(self) -> tuple[int, str]:
        """The key that orders several saves of one step, the newest last: save ids sort by time."""
        return self.timeline, self.save_id


def with_record(entry: Entry, record: Record) -> Entry:
    """Add to an entry what the record of a committed checkpoint says, except for the step."""
    timeline, origin = record.meta.get(TIMELINE), None
    match record.meta.get(BEGAN_AFTER):
        case [int(before), int(after)] if min(before, after) >= 0:
            origin = before, after
    try:
        saved_at = datetime.fromisoformat(record.saved_at)
        saved_at = saved_at if saved_at.tzinfo else saved_at.replace(tzinfo=timezone.utc)
    except ValueError:
        saved_at = None
    return replace(
        entry,
        layout="native",
        saved_at=saved_at,
        nbytes=record.stored_nbytes,
        metrics=metrics_in(record.meta),
        timeline=timeline if type(timeline) is int and timeline > 0 else 0,
        began_after=origin,
        save_id=record.save_id,
        record=record,
    )


def build_meta(
    meta: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    timeline: int,
    began_after: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Add metrics and the timeline to the user's meta; raise `StateError` for a reserved key, or a metric of no number."""
    if meta is not None and not isinstance(meta, Mapping):
        raise StateError(f"meta is a {type(meta).__name__}", hint="give a dict of JSON values")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise StateError(f"metrics is a {type(metrics).__name__}", hint='give a dict of numbers, as {"loss": 0.5}')
    ours: dict[str, Any] = {}
    if metrics:
        ours[METRICS] = {str(name): _stored_metric(name, value) for name, value in metrics.items()}
    if timeline:
        ours[TIMELINE] = timeline
        if began_after is not None:
            ours[BEGAN_AFTER] = list(began_after)
    for key in (METRICS, TIMELINE, BEGAN_AFTER):
        if meta and key in meta:
            raise StateError(f"meta has the key {key!r}, which a Checkpointer uses itself", hint="give it another name")
    return {**(meta or {}), **ours}


def metrics_in(meta: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record's meta, without values that are not numbers."""
    found = meta.get(METRICS)
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float) or value in _NOT_FINITE}


def _stored_metric(name: Any, value: Any) -> float | str:
    try:
        number = float(value)  # also accepts a tensor or an array of one element
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        try:
            shown = f"{value!r:.80}"
        except ValueError:  # an integer of thousands of digits
            shown = f"a {type(value).__name__}"
        raise StateError(f"metric {name!r} is {shown}, not a number", hint="give one number per metric") from exc
    return number if math.isfinite(number) else str(number)  # JSON cannot represent infinity or NaN


def current_branch_first(entries: Iterable[Entry], newest: int) -> Iterator[Entry]:
    """
    Yield entries that come by step, the highest first: those of the current branch in this order, then abandoned ones.

    The current branch is the newest timeline, and what it came from. A job that goes back to step 100 while 150 and 200
    exist, and then saves 110, abandons 150 and 200. If 110 cannot be used, 100 is wanted next, not 200. The records of a
    timeline say after which timeline and step it began: all of its own steps are higher.
    """
    origins: dict[int, tuple[int, int]] = {}
    abandoned = []
    for entry in entries:
        if entry.began_after is not None and entry.began_after[0] < entry.timeline:
            origins.setdefault(entry.timeline, entry.began_after)
        timeline, last_step = newest, math.inf
        while timeline > entry.timeline and timeline in origins:
            last_step = min(last_step, origins[timeline][1])
            timeline = origins[timeline][0]
        if timeline == entry.timeline and entry.step <= last_step:
            yield entry
        else:
            abandoned.append(entry)
    yield from sorted(abandoned, key=lambda entry: entry.age, reverse=True)


def newest_first(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries: first the current branch, the highest step first; then abandoned ones."""
    by_step = sorted(entries, key=attrgetter("step"), reverse=True)
    if by_step and (by_step[-1].step < 0 or len({entry.step for entry in by_step}) < len(by_step)):

        def order(entry: Entry) -> tuple[int, int, float, str]:
            # Only where the step is not known does the order depend on a clock.
            saved_s = entry.saved_at.timestamp() if entry.step < 0 and entry.saved_at else 0.0
            return entry.step, entry.timeline, saved_s, entry.name

        by_step.sort(key=order, reverse=True)
    timelines = {entry.timeline for entry in by_step}
    return by_step if len(timelines) < 2 else list(current_branch_first(by_step, max(timelines)))


def require_readable(entry: Entry, roots: Sequence[str]) -> Entry:
    """Return an entry if its record was read, or is known to be damaged, else raise `StorageError`; `roots` are URLs, by tier."""
    # A checkpoint whose record the store fails to give at the moment may be whole, and the newest. To go on without it would
    # lose work, so the user has to decide that, by moving it away.
    problem = entry.problem
    if isinstance(problem, StorageError) and not isinstance(problem, BlobNotFound):
        where = f"{roots[entry.tier]}/{entry.name}"
        ways = [
            problem.hint,
            "try again when the store answers",
            f"to go on without this checkpoint, move {where} out of the root",
            "to go on without the far root, leave promote_to out" if entry.tier else "",
        ]
        raise StorageError(
            f"{where} cannot be read at the moment, and may be the newest checkpoint: {problem.message}",
            hint="; ".join(filter(None, ways)),
            **problem.details,
        ) from problem
    return entry


def merge_tiers(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries of several roots: unreadable ones, then the newest save first, and of one save the near copy."""
    # An unreadable entry comes first, so that it is reported before another copy is taken.
    return sorted(entries, key=lambda entry: (entry.problem is not None, entry.save_order, -entry.tier), reverse=True)


def newest_saves(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out committed saves that a newer committed save of the same step supersedes."""
    known = list(entries)
    newest: dict[str, tuple[int, str]] = {}
    for entry in known:
        if entry.committed:
            newest[entry.name] = max(entry.save_order, newest.get(entry.name, (-1, "")))
    return [entry for entry in known if not entry.committed or entry.save_order == newest[entry.name]]
