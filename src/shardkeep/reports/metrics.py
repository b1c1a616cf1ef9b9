"""The numbers of saves and loads that sinks report, under one set of names; and whose they are."""

from __future__ import annotations

from typing import NamedTuple

from shardkeep.dist.world import current_world
from shardkeep.events import Event, LoadFailed, LoadFinished, SaveCommitted, SaveFailed


def is_rank_zero() -> bool:
    """Return whether this is rank 0 of the job, or a process without a process group."""
    return current_world(timeout_s=0.0).rank == 0


def from_rank_zero(event: Event) -> bool:
    """Return whether an event comes from rank 0 of its call, and this is rank 0 of the job."""
    return event.rank == 0 and is_rank_zero()


BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""Bounds of histograms, from a small state in memory to a large one on a slow network."""


class Metric(NamedTuple):
    name: str
    """For example "save/blocked_s"; each sink adapts it to its own conventions."""
    unit: str
    """"s", "By" or "GBy/s", as OpenTelemetry abbreviates them."""
    text: str


METRICS = (
    Metric("save/seconds", "s", "From the call to the commit."),
    Metric("save/blocked_s", "s", "How long the call blocked training."),
    Metric("save/staged_s", "s", "From the call until the state may be changed."),
    Metric("save/written_s", "s", "From the call until every rank had written its files."),
    Metric("save/bytes", "By", "Tensor bytes of the whole checkpoint."),
    Metric("save/gb_per_s", "GBy/s", "Tensor bytes of the checkpoint per second."),
    Metric("load/seconds", "s", "How long a load took."),
    Metric("load/bytes", "By", "Bytes read: on rank 0 by all ranks, on other ranks by this rank."),
    Metric("load/gb_per_s", "GBy/s", "Bytes read per second."),
)


def metrics_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event by name; empty for events without numbers."""
    calls = {SaveCommitted: "save", LoadFinished: "load"}
    found = (each.name.split("/") for each in METRICS)
    return {
        f"{call}/{what}": getattr(event, "bytes_total" if what == "bytes" else what)
        for call, what in found
        if call == calls.get(type(event))
    }


def failed_call(event: Event) -> str | None:
    """Return "save" or "load" if the event is its failure; a cancelled save is not a failure."""
    if isinstance(event, SaveFailed) and not event.cancelled:
        return "save"
    return "load" if isinstance(event, LoadFailed) else None
