"""
Which checkpoint is restored: rank 0 chooses by the commit records, and all ranks load the same one.

A checkpoint that turns out to be damaged is skipped with its reason, and the next one is tried. A state that does not fit, a
store that fails, or a format that is too new is raised and skips nothing, because an older checkpoint would not be what the
user wants. It is also an error if there are checkpoints and none can be loaded: to start afresh would lose them. With two
roots, the far copy of the very same save is taken where the near one is damaged, missing, or on a disk that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardkeep.display import OneLine, format_count
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.team import Team
from shardkeep.dist.world import World
from shardkeep.engine.report import LoadReport
from shardkeep.errors import BlobNotFound, CheckpointNotFound, DamagedCheckpoint, StorageError, UnsupportedVersion
from shardkeep.events import StepSkipped, emit
from shardkeep.loading import load
from shardkeep.manage.entry import Entry
from shardkeep.storage.base import Store

log = logging.getLogger("shardkeep")

_GONE = (BlobNotFound, CheckpointNotFound)
_DAMAGE = (DamagedCheckpoint, *_GONE)
"""Errors for which a checkpoint is skipped: it is not what was saved, or not complete."""
_FEW = 4  # how many candidates are read before all are: nearly always, the first one is whole
_MAX_CHOICES = 5  # how often to choose again while another job deletes checkpoints


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A checkpoint that was skipped."""

    name: str
    step: int
    reason: str
    where: str = ""
    """Its root."""
    tier: int = 0
    """With two roots: 0 for the near root, 1 for the root that checkpoints are promoted to."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Restored(OneLine):
    """The result of a restore."""

    name: str
    step: int
    timeline: int
    skipped: tuple[Skipped, ...]
    """Checkpoints that would have been preferred, and why they were not taken."""
    report: LoadReport
    where: str = ""
    """The root that it came from."""
    why: str = ""
    """Why it was not taken from the near root, if there are two roots."""

    def __str__(self) -> str:
        skipped = f"; skipped {', '.join(each.name for each in self.skipped)}" if self.skipped else ""
        return f"step {self.step}: {self.report}{skipped}"


def _candidates(entries: Sequence[Entry]) -> list[Entry]:
    """Return what may be restored, in order, damaged ones too; raise the error of the first if it cannot be examined."""
    found: list[Entry] = []
    for entry in entries:
        if entry.status == "unfinished":
            continue
        if isinstance(entry.problem, (UnsupportedVersion, StorageError)) and not any(not each.reason for each in found):
            raise entry.problem
        found.append(replace(entry, record=None, problem=None))  # rank 0 sends the rest to all ranks
    return found


def restore(
    state: MutableMapping[str, Any],
    *,
    world: World,
    what: str,
    roots: Sequence[str],
    choose: Callable[[int | None], list[Entry]],
    open_store: Callable[[Entry], Store],
    may_skip: bool = True,
    **load_options: Any,
) -> Restored | None:
    """
    Restore the first candidate that can be loaded; called by all ranks. Return None if there is no candidate.

    `what` names in messages what is wanted, and `roots` are the URLs of the roots, by tier. `choose` returns the candidates
    in order, on rank 0: so many of them, or all. With `may_skip`, damaged candidates are skipped, and it is a
    `DamagedCheckpoint` if all are; without it, the error of the last one is raised.
    """
    where = " and ".join(roots)

    def chosen(most: int | None) -> list[Entry]:
        with rendezvous(world, f"restore {what} of {where}") as meeting:
            return Team(world, meeting).on_rank_0("choose", lambda: _candidates(choose(most)), list[Entry])

    most: int | None = _FEW
    found, choices = chosen(most), 1
    skipped: list[Skipped] = []
    cause: Exception | None = None
    while left := _untried(found, skipped):
        if most is not None and len(found) >= most and len(left) == 1:  # another copy of the last one may follow it
            most = None
            found = chosen(most)
            continue
        each, *others = left
        reason = each.reason
        if not reason:
            try:
                report = load(state, open_store(each), **load_options)
            except (*_DAMAGE, StorageError) as error:  # the same error on all ranks
                # A copy of the very same save can be tried where the disk of this one fails.
                copies = [copy for copy in others if copy.save_id == each.save_id != "" and not copy.reason]
                if (not isinstance(error, _DAMAGE) and not copies) or not (others or may_skip):
                    raise
                if isinstance(error, _GONE) and choices < _MAX_CHOICES:
                    # Perhaps the job that saves here deleted it after it had saved a newer one.
                    found, choices = chosen(most), choices + 1
                    if each not in _untried(found, skipped):
                        continue
                cause, reason = error, f"{type(error).__name__}: {error}"
            else:
                return Restored(
                    name=each.name,
                    step=each.step,
                    timeline=each.timeline,
                    skipped=tuple(skipped),
                    report=report,
                    where=roots[each.tier],
                    why=_why_not_near(each, skipped, roots),
                )
        skipped.append(Skipped(name=each.name, step=each.step, reason=reason, where=roots[each.tier], tier=each.tier))
        url = _url(skipped[-1])
        if world.rank == 0:
            log.warning("%s cannot be restored, and is skipped: %s", url, reason)
        emit(StepSkipped, partial(StepSkipped, rank=world.rank, where=url, step=each.step, reason=reason))
    if not found:
        return None
    reasons = "".join(f"\n  {each.name if len(roots) == 1 else _url(each)}: {each.reason}" for each in skipped)
    raise DamagedCheckpoint(
        f"{where}: none of {format_count(len(found), 'checkpoint')} can be restored:{reasons}",
        hint="training does not start afresh by itself: repair one of them, or choose another root",
    ) from cause


def _untried(found: Sequence[Entry], skipped: Sequence[Skipped]) -> list[Entry]:
    tried = {(each.tier, each.name) for each in skipped}
    return [each for each in found if (each.tier, each.name) not in tried]


def _url(skipped: Skipped) -> str:
    return f"{skipped.where}/{skipped.name}"


def _why_not_near(taken: Entry, skipped: Sequence[Skipped], roots: Sequence[str]) -> str:
    if not taken.tier:
        return ""
    passed = [each for each in skipped if each.name == taken.name and each.tier < taken.tier]
    return f"{_url(passed[-1])}: {passed[-1].reason}" if passed else f"{roots[0]} has no whole copy of it"
