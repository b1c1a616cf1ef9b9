"""What goes wrong between jobs that share a root, and events of a root that engines know nothing of."""

from __future__ import annotations

from shardkeep.errors import CheckpointError, DamagedCheckpoint, EarlierSaveFailed
from shardkeep.events import Event


class RootInUse(CheckpointError, RuntimeError):
    """Another job saves to this root; says which."""


class LeaseLost(CheckpointError, RuntimeError):
    """Another job has taken this root over: this one saves and deletes no more."""


class NotPromoted(EarlierSaveFailed):
    """
    A checkpoint could not be copied to the far root. It is as safe as before in the near one, and is tried again.

    What went wrong is the cause.
    """


class NearCopyDamaged(DamagedCheckpoint):
    """A checkpoint that was to be promoted is not what was saved: it is left alone, and not promoted."""


class PruneFailed(Event, frozen=True, kw_only=True):
    """A checkpoint, or what is left of one, could not be removed; it is tried again after the next save."""

    kind: str
    message: str
