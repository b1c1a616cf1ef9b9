"""One checkpoint of a root, as its commit record tells of it: what policies and commands decide by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from shardkeep.errors import CheckpointError, StateError
from shardkeep.format.record import Record

METRICS = "metrics"
"""Where in a record's meta the metrics of its step are."""
TIMELINE = "timeline"
"""Where in a record's meta it says which attempt at its steps it belongs to; not there: the first."""
BEGAN_AFTER = "timeline_began_after"
"""Where in a record's meta it says after which timeline and step its own began; not there for the first."""

_NOT_FINITE = ("nan", "inf", "-inf")

Status = Literal["committed", "unfinished", "damaged"]
Layout = Literal["native", "torch"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint of a root, or what is left of one."""

    name: str
    """Of its place."""
    step: int
    status: Status
    """committed: it exists. unfinished: it is being written, or never was to the end. damaged: its record is unreadable."""
    reason: str = ""
    """Why it is not committed."""
    layout: Layout | None = None
    saved_at: datetime | None = None
    """By the clock of the rank that committed it, or of the store; always with its time zone."""
    nbytes: int = 0
    """Of all files that belong to it; 0 where that is not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    timeline: int = 0
    """A job that goes back to an earlier step and saves other steps from there begins a new one; higher is newer."""
    began_after: tuple[int, int] | None = None
    """Which timeline and step its own timeline began after."""
    record: Record | None = field(default=None, repr=False)
    """Of a native checkpoint."""
    problem: CheckpointError | None = field(default=None, repr=False)
    """What reading the record of a damaged one raised."""
    tier: int = 0
    """Of a Checkpointer with two roots: 0 in the near one, 1 in the one that is promoted to."""

    @property
    def committed(self) -> bool:
        """Whether it exists."""
        return self.status == "committed"

    @property
    def age(self) -> tuple[int, int]:
        """What checkpoints are ordered by, the newest last: clocks have no say in it."""
        return self.timeline, self.step


def entry_of(name: str, step: int, record: Record, *, pinned: bool) -> Entry:
    """Say what a commit record says."""
    return Entry(
        name=name,
        step=step,
        status="committed",
        layout="native",
        saved_at=_time(record.saved_at),
        nbytes=record.stored_nbytes,
        metrics=metrics_in(record.meta),
        pinned=pinned,
        timeline=timeline_in(record.meta),
        began_after=began_after_in(record.meta),
        record=record,
    )


def meta_with(
    meta: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    timeline: int,
    began_after: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """
    Put metrics, and the timeline, to the user's own meta.

    Raises:
        StateError: the user's own has a key of ours, or a metric is no number.

    """
    if meta is not None and not isinstance(meta, Mapping):
        raise StateError(f"meta is a {type(meta).__name__}", hint="give a dict of JSON values")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise StateError(f"metrics is a {type(metrics).__name__}", hint='give a dict of numbers, as {"loss": 0.5}')
    ours: dict[str, Any] = {}
    if metrics:
        ours[METRICS] = {str(name): _stored(name, value) for name, value in metrics.items()}
    if timeline:
        ours[TIMELINE] = timeline
        if began_after is not None:
            ours[BEGAN_AFTER] = list(began_after)
    for key in (METRICS, TIMELINE, BEGAN_AFTER):
        if meta and key in meta:
            raise StateError(f"meta has the key {key!r}, which a Checkpointer uses itself", hint="give it another name")
    return {**(meta or {}), **ours}


def metrics_in(meta: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record's meta; what is no number is left out."""
    found = meta.get(METRICS)
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float) or value in _NOT_FINITE}


def timeline_in(meta: Mapping[str, Any]) -> int:
    """Return the timeline of a record's meta."""
    found = meta.get(TIMELINE)
    return found if type(found) is int and found > 0 else 0


def began_after_in(meta: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return which timeline and step the timeline of a record's meta began after."""
    found = meta.get(BEGAN_AFTER)
    if not isinstance(found, list) or len(found) != 2 or any(type(each) is not int or each < 0 for each in found):
        return None
    return found[0], found[1]


def _stored(name: Any, value: Any) -> float | str:
    try:
        number = float(value)  # also a tensor or an array of one element
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise StateError(f"metric {name!r} is {_shown(value)}, not a number", hint="give one number a metric") from exc
    return number if math.isfinite(number) else str(number)  # JSON has no word for the others


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # a whole number of thousands of digits
        return f"a {type(value).__name__}"


def _time(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)
