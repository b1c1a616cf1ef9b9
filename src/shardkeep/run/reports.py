"""
What saves and loads return.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardkeep.events import RankPhases, Slowest, Span


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
