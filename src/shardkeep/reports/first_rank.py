"""Whether this process is the one that speaks for the whole job."""

from __future__ import annotations

from shardkeep.events import Event
from shardkeep.ranks.world import current_world


def is_first() -> bool:
    """Say whether this is rank 0 of the job, or a process on its own."""
    return current_world(timeout_s=0.0).rank == 0


def from_first(event: Event) -> bool:
    """Say whether an event comes from rank 0, of the job and of those that made the call."""
    return event.rank == 0 and is_first()
