"""
The numbers in events that are worth a curve, under one set of names for all sinks.

In comes an event; out come its figures by name. Failures are counted by the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep.events import Event, LoadFailed, LoadFinished, SaveCommitted, SaveFailed

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""Bounds of histograms: from a small state in memory to a large one on a slow network."""


@dataclass(frozen=True)
class Figure:
    """What one number is."""

    name: str
    """As "save/blocked_s"; each sink writes it in its own way."""
    unit: str
    """"s", "By" or "GBy/s", as OpenTelemetry abbreviates them."""
    text: str


FIGURES = (
    Figure("save/seconds", "s", "From the call to the commit."),
    Figure("save/blocked_s", "s", "How long the call that saves kept training waiting."),
    Figure("save/staged_s", "s", "From the call until all of the state might be changed."),
    Figure("save/written_s", "s", "From the call until every rank had written its files."),
    Figure("save/bytes", "By", "Tensor bytes of the whole checkpoint."),
    Figure("save/gb_per_s", "GBy/s", "The whole checkpoint over the time it took."),
    Figure("load/seconds", "s", "How long a load took."),
    Figure("load/bytes", "By", "What was read: on rank 0 by all ranks, on others by this one."),
    Figure("load/gb_per_s", "GBy/s", "What was read over the time it took."),
)


def figures_of(event: Event) -> dict[str, float]:
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
