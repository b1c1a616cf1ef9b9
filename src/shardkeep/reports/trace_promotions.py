"""A promotion as traces show it: who did what when, on all ranks."""

from __future__ import annotations

import msgspec

from shardkeep.events import PromotionFinished, RankPhases


class PromotionTimed(PromotionFinished, frozen=True, kw_only=True):
    """A `PromotionFinished` that also says when each rank did what; told in its place, so that one kind hears both."""

    called_s: float
    """When rank 0 began to choose it, by `time.perf_counter()` of this process."""
    files_total: int
    files_copied: int
    """By all ranks together."""
    ranks: list[RankPhases] = msgspec.field(default_factory=list)
    """Phases "choose", "copy", "wait" (for the other ranks to have copied) and "commit"; only rank 0 knows."""
