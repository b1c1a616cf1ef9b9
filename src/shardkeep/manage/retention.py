"""
Which checkpoints are kept: pure policies over entries, which can be combined.

    policy = KeepLast(3) | KeepEvery(10_000) | KeepBest("loss", 2)

A checkpoint is kept if any policy wants it. The newest committed checkpoint and pinned ones are always kept. Only
committed checkpoints are ever deleted: a damaged one may be repaired, and an unfinished one may still be written.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from shardkeep.errors import StateError
from shardkeep.manage.entry import Entry, newest_first

Mode = Literal["min", "max"]

_READ_AGAIN = 16  # how many of the newest are read again before an older one is deleted, at most

_LOWER = {"cer", "error", "errors", "loss", "losses", "mae", "mse", "nll", "perplexity", "ppl", "rmse", "wer"}
_HIGHER = {"acc", "accuracy", "auc", "auroc", "bleu", "f1", "iou", "precision", "psnr", "recall", "reward", "rouge"}
_NEGATED = {"inverse", "minus", "neg", "negative"}
"""Words of a metric's name after which a low error may be a high number, as in scikit-learn's neg_mean_squared_error."""


class Policy(ABC):
    """Decides which checkpoints it wants to keep."""

    @abstractmethod
    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:
        """Return the names of the checkpoints to keep; `entries` are committed, the newest first."""

    def relies_on(self, entries: Sequence[Entry]) -> set[str]:
        """Return the names because of which others are not wanted, by default all: these are read again before a deletion."""
        return {entry.name for entry in entries}

    def __or__(self, other: Policy) -> Policy:
        return AnyOf((self, other))


@dataclass(frozen=True)
class AnyOf(Policy):
    """Keeps what any of its policies wants; without a policy, nothing."""

    policies: tuple[Policy, ...]

    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:
        return set().union(*(policy.wants(entries, now) for policy in self.policies))

    def relies_on(self, entries: Sequence[Entry]) -> set[str]:
        return set().union(*(policy.relies_on(entries) for policy in self.policies))


def _on_none(self: Policy, entries: Sequence[Entry]) -> set[str]:  # noqa: ARG001 - each checkpoint is judged by itself
    return set()


@dataclass(frozen=True)
class KeepAll(Policy):
    """Keeps everything."""

    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:  # noqa: ARG002 - the time does not matter
        return {entry.name for entry in entries}

    relies_on = _on_none


@dataclass(frozen=True)
class KeepLast(Policy):
    """
    Keeps the newest `k`.

    Example:
        >>> import shardkeep as sk
        >>> policy = sk.KeepLast(3) | sk.KeepEvery(10_000) | sk.KeepBest("loss")

    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise StateError(f"KeepLast({self.k!r})", hint="the newest checkpoint is always kept: give 1 or more")

    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:  # noqa: ARG002 - the time does not matter
        return {entry.name for entry in entries[: self.k]}

    def relies_on(self, entries: Sequence[Entry]) -> set[str]:
        # So many newer ones are enough to lose none that matters.
        return {entry.name for entry in entries[: min(self.k, _READ_AGAIN)]}


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keeps checkpoints whose step is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise StateError(f"KeepEvery({self.n!r})", hint="give a number of steps, 1 or more")

    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:  # noqa: ARG002 - the time does not matter
        return {entry.name for entry in entries if entry.step % self.n == 0}

    relies_on = _on_none


@dataclass(frozen=True)
class KeepBest(Policy):
    """
    Keeps the `k` best by a metric; of equals the newest. NaN is never the best.

    A checkpoint that was saved without the metric cannot be compared, and is kept. If no checkpoint has a number for the
    metric, all are kept.

    Args:
        metric: the name of a metric that is passed to `step` or `save`.
        k: how many to keep.
        mode: whether the lowest ("min") or the highest ("max") is the best. Needed unless the name says it, as "val_loss",
            "error", "perplexity", "accuracy", "f1", "bleu" and "reward" do.
        keep_missing: False leaves checkpoints without the metric to the other policies, once one has the metric. For runs
            that save more often than they evaluate.

    """

    metric: str
    k: int = 1
    mode: Mode | None = None
    keep_missing: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.k < 1 or self.mode not in ("min", "max", None):
            raise StateError(
                f"KeepBest({self.metric!r}, {self.k!r}, mode={self.mode!r})", hint='k is 1 or more, mode "min" or "max"'
            )
        object.__setattr__(self, "mode", self.mode or _mode_of(self.metric))

    def ranked(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        known = [entry for entry in entries if not math.isnan(entry.metrics.get(self.metric, math.nan))]
        by_age = sorted(known, key=lambda entry: entry.age, reverse=True)
        return sorted(by_age, key=lambda entry: sign * entry.metrics[self.metric])

    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:  # noqa: ARG002 - the time does not matter
        best = {entry.name for entry in self.ranked(entries)[: self.k]}
        if not best:  # the metric is probably misspelt, or its computation broken: nothing may be deleted because of it
            return {entry.name for entry in entries}
        return best | {entry.name for entry in entries if self.keep_missing and self.metric not in entry.metrics}

    def relies_on(self, entries: Sequence[Entry]) -> set[str]:
        return {entry.name for entry in self.ranked(entries)[: self.k]}


def compared_metrics(policy: Policy | None) -> set[str]:
    parts = policy.policies if isinstance(policy, AnyOf) else ()
    return {policy.metric} if isinstance(policy, KeepBest) else set().union(*map(compared_metrics, parts))


def _mode_of(metric: str) -> Mode:
    """Tell from a metric's name whether low or high numbers are better; raise `StateError` if it does not say."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(metric)).lower()
    words = {word if word == "f1" else word.rstrip("0123456789") for word in re.findall(r"[a-z]+\d*", spaced)}
    lower, higher = not words.isdisjoint(_LOWER), not words.isdisjoint(_HIGHER)
    if lower == higher or words & _NEGATED:
        raise StateError(
            f"is the best {metric!r} the lowest or the highest? Its name does not say",
            hint=f'give the mode, as in keep_best=({metric!r}, 3, "max") or KeepBest({metric!r}, mode="min")',
        )
    return "min" if lower else "max"


@dataclass(frozen=True)
class KeepYounger(Policy):
    """
    Keeps checkpoints that were saved less than `seconds` ago, and those whose time is not known.

    It relies on the clocks of the machines that saved. If a clock jumps, all may look old: combine it with `KeepLast`.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise StateError(f"KeepYounger({self.seconds!r})", hint="give a time in seconds, more than 0")

    def wants(self, entries: Sequence[Entry], now: datetime) -> set[str]:
        ages_s = {each.name: (now - each.saved_at).total_seconds() if each.saved_at else 0.0 for each in entries}
        return {name for name, age_s in ages_s.items() if age_s < self.seconds}

    relies_on = _on_none


class Retained(NamedTuple):
    kept: list[Entry]
    to_delete: list[Entry]
    """The oldest first, so that deleting can be interrupted at any time without losing newer ones."""
    committed: list[Entry]
    """The newest first."""


def plan(entries: Iterable[Entry], policy: Policy, now: datetime, *, spared: Collection[str] = ()) -> Retained:
    """Decide which committed checkpoints are deleted; `spared` must stay, and the policy sees them like any other."""
    every = list(entries)
    committed = newest_first(entry for entry in every if entry.committed)
    wanted = policy.wants(committed, now) | set(spared) | {entry.name for entry in committed[:1]}
    to_delete = [entry for entry in reversed(committed) if entry.name not in wanted and not entry.pinned]
    deleted = {entry.name for entry in to_delete}
    return Retained([entry for entry in every if entry.name not in deleted], to_delete, committed)


Best = str | tuple[str, int] | tuple[str, int, Mode] | KeepBest


def parse_best(best: Best | None) -> KeepBest | None:
    if best is None or isinstance(best, KeepBest):
        return best
    try:
        return KeepBest(best) if isinstance(best, str) else KeepBest(*best)
    except TypeError as exc:
        raise StateError(
            f"keep_best={best!r}", hint='as in keep_best="loss" or keep_best=("accuracy", 3, "max")'
        ) from exc


def build_policy(
    *, last: int | None, every: int | None, best: KeepBest | None, hours: float | None, more: Policy | None
) -> Policy:
    policies = [
        None if last is None else KeepLast(last),
        None if every is None else KeepEvery(every),
        best,
        None if hours is None else KeepYounger(3600 * hours),
        more,
    ]
    given = tuple(policy for policy in policies if policy is not None)
    return AnyOf(given) if given else KeepAll()
