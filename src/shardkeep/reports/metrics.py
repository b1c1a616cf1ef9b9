"""Whether this process is the one that speaks for the whole job."""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.dist.world import current_world
from shardkeep.events import Event, LoadFailed, LoadFinished, SaveCommitted, SaveFailed


def is_rank_zero() -> bool:
    """Say whether this is rank 0 of the job, or a process on its own."""
    return current_world(timeout_s=0.0).rank == 0


def from_rank_zero(event: Event) -> bool:
    """Say whether an event comes from rank 0, of the job and of those that made the call."""
    return event.rank == 0 and is_rank_zero()


# The numbers in events that are worth a curve, under one set of names for all sinks.
#
# In comes an event; out come its figures by name. Failures are counted by the sinks.

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""Bounds of histograms: from a small state in memory to a large one on a slow network."""


@dataclass(frozen=True)
class Metric:
    """What one number is."""

    name: str
    """As "save/blocked_s"; each sink writes it in its own way."""
    unit: str
    """"s", "By" or "GBy/s", as OpenTelemetry abbreviates them."""
    text: str


METRICS = (
    Metric("save/seconds", "s", "From the call to the commit."),
    Metric("save/blocked_s", "s", "How long the call that saves kept training waiting."),
    Metric("save/staged_s", "s", "From the call until all of the state might be changed."),
    Metric("save/written_s", "s", "From the call until every rank had written its files."),
    Metric("save/bytes", "By", "Tensor bytes of the whole checkpoint."),
    Metric("save/gb_per_s", "GBy/s", "The whole checkpoint over the time it took."),
    Metric("load/seconds", "s", "How long a load took."),
    Metric("load/bytes", "By", "What was read: on rank 0 by all ranks, on others by this one."),
    Metric("load/gb_per_s", "GBy/s", "What was read over the time it took."),
)


def metrics_of(event: Event) -> dict[str, float]:
    """Return the figures of an event, by name; none of one that only counts."""
    if isinstance(event, SaveCommitted):
        return {
            "save/seconds": event.seconds,
            "save/blocked_s": event.blocked_s,
            "save/staged_s": event.staged_s,
            "save/written_s": event.written_s,
            "save/bytes": event.bytes_total,
            "save/gb_per_s": event.gb_per_s,
        }
    if isinstance(event, LoadFinished):
        return {"load/seconds": event.seconds, "load/bytes": event.bytes_total, "load/gb_per_s": event.gb_per_s}
    return {}


def failed_call(event: Event) -> str | None:
    """Return "save" or "load" if the event says that one failed; not of a save that somebody cancelled."""
    if isinstance(event, SaveFailed) and not event.cancelled:
        return "save"
    return "load" if isinstance(event, LoadFailed) else None
