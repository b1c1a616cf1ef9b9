"""From the arguments of a Checkpointer to one policy."""

from __future__ import annotations

from shardkeep.errors import StateError
from shardkeep.manage.retention import AnyOf, KeepAll, KeepBest, KeepEvery, KeepLast, KeepYounger, Mode, Policy

Best = str | tuple[str, int] | tuple[str, int, Mode] | KeepBest


def best_of(best: Best | None) -> KeepBest | None:
    """Read "loss", ("loss", 3) or ("accuracy", 3, "max")."""
    if best is None or isinstance(best, KeepBest):
        return best
    try:
        return KeepBest(best) if isinstance(best, str) else KeepBest(*best)
    except TypeError as exc:
        raise StateError(
            f"keep_best={best!r}", hint='as in keep_best="loss" or keep_best=("accuracy", 3, "max")'
        ) from exc


def policy_of(
    *,
    last: int | None,
    every: int | None,
    best: KeepBest | None,
    hours: float | None,
    more: Policy | None,
) -> Policy:
    """Combine what was asked for; where nothing was, all is kept."""
    policies = [
        *([] if last is None else [KeepLast(last)]),
        *([] if every is None else [KeepEvery(every)]),
        *([] if best is None else [best]),
        *([] if hours is None else [KeepYounger(3600 * hours)]),
        *([] if more is None else [more]),
    ]
    return AnyOf(tuple(policies)) if policies else KeepAll()
