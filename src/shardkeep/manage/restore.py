"""
Which checkpoint is restored: rank 0 chooses by the commit records, all ranks load the same one, and one that turns out
to be damaged is passed over for the next, with its reason.

A state that does not fit, a store that fails, or a format that is too new is raised, and passes over nothing: an older
checkpoint would not be what is wanted then. So is the case that there are checkpoints and none can be loaded: to begin
anew would be to lose them.

Where there are two roots, a checkpoint may have a copy in each. The far copy of the very same save is taken where the
near one is damaged, gone, or on a disk that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.report import LoadReport
from shardkeep.errors import (
    BlobNotFound,
    CheckpointNotFound,
    DamagedCheckpoint,
    StorageError,
    UnsupportedVersion,
)
from shardkeep.events import StepSkipped, emit
from shardkeep.loading import load
from shardkeep.manage.catalog import Entry
from shardkeep.storage.base import Store

log = logging.getLogger("shardkeep")

_DAMAGE = (DamagedCheckpoint, BlobNotFound, CheckpointNotFound)
"""What makes a checkpoint one to pass over: it is not what was saved, or not all there."""

_GONE = (BlobNotFound, CheckpointNotFound)
_LOOKS = 5
"""How often to choose anew among what is there, beside a job that deletes."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says of a checkpoint that may be restored."""

    name: str
    step: int
    timeline: int
    torch: bool
    """Whether it is of torch's layout."""
    tier: int = 0
    """Which root it is in."""
    save_id: str = ""
    """By which it is known to be a copy of another one."""
    reason: str = ""
    """Why it is not to be tried."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over."""

    name: str
    step: int
    reason: str
    where: str = ""
    """The root it is in."""
    tier: int = 0
    """Of two roots: 0 for the near one, 1 for the one that is promoted to."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a restore did."""

    name: str
    step: int
    timeline: int
    skipped: tuple[Skipped, ...]
    """Those that were wanted more, and why they were not taken."""
    report: LoadReport
    where: str = ""
    """The root it came from."""
    why: str = ""
    """Why it was not taken from a nearer root, where there is one."""


def candidates(entries: Sequence[Entry]) -> list[Candidate]:
    """
    Name what may be restored, in order, with what is damaged already by its record among it.

    Raises:
        UnsupportedVersion, StorageError: the first of them cannot even be looked at.

    """
    found: list[Candidate] = []
    for entry in entries:
        if entry.status == "unfinished":
            continue
        if isinstance(entry.problem, (UnsupportedVersion, StorageError)) and not any(not each.reason for each in found):
            raise entry.problem
        found.append(
            Candidate(
                name=entry.name,
                step=entry.step,
                timeline=entry.timeline,
                torch=entry.layout == "torch",
                tier=entry.tier,
                save_id="" if entry.record is None else entry.record.save_id,
                reason="" if entry.committed else entry.reason,
            )
        )
    return found


def restore(
    state: MutableMapping[str, Any],
    *,
    world: World,
    what: str,
    roots: Sequence[str],
    choose: Callable[[], list[Candidate]],
    open_place: Callable[[Candidate], Store],
    walk: bool = True,
    **load_options: Any,
) -> Restored | None:
    """
    Restore the first candidate that can be; called by all ranks. None where there is no candidate.

    Args:
        state: what to fill.
        world: the ranks, which meet here to choose.
        what: what is wanted, in messages.
        roots: what the roots are called, the nearest first.
        choose: on rank 0: names the candidates, in order.
        open_place: gives the store of one.
        walk: pass over those that are damaged; else the last one's damage is raised as it is.
        **load_options: as for `load`.

    Raises:
        DamagedCheckpoint: there are candidates, and none can be loaded.

    """
    where = " and ".join(roots)

    def agreed() -> list[Candidate]:
        with rendezvous(world, f"restore {what} of {where}") as meeting:
            told = meeting.agree("choose", bytes, lambda payloads: [msgspec.msgpack.encode(choose())] * len(payloads))
        return msgspec.msgpack.decode(told, type=list[Candidate])

    found, looks = agreed(), 1
    skipped: list[Skipped] = []
    cause: Exception | None = None
    while each := _next(found, skipped):
        reason = each.reason
        if not reason:
            try:
                report = load(state, open_place(each), **load_options)
            except (*_DAMAGE, StorageError) as error:  # the same on all ranks
                last = _next(found, [*skipped, _skipped(each, "", roots)]) is None
                if not isinstance(error, _DAMAGE) and not _has_copy(each, found, skipped):
                    raise
                if last and not walk:
                    raise
                if isinstance(error, _GONE) and looks < _LOOKS:
                    # Perhaps deleted by the job that saves here, once it had a newer one.
                    found, looks = agreed(), looks + 1
                    if _key(each) not in set(map(_key, found)):
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
                    why=_why(each, skipped, roots),
                )
        skipped.append(_skipped(each, reason, roots))
        _tell(skipped[-1], rank=world.rank)
    if not found:
        return None
    reasons = "".join(f"\n  {each.name if len(roots) == 1 else _place(each)}: {each.reason}" for each in skipped)
    raise DamagedCheckpoint(
        f"{where}: none of {len(found)} checkpoints can be restored:{reasons}",
        hint="nothing is begun anew by itself: mend one of them, or choose another root",
    ) from cause


def _next(found: Sequence[Candidate], skipped: Sequence[Skipped]) -> Candidate | None:
    tried = set(map(_key, skipped))
    return next((each for each in found if _key(each) not in tried), None)


def _key(each: Candidate | Skipped) -> tuple[int, str]:
    return each.tier, each.name


def _has_copy(each: Candidate, found: Sequence[Candidate], skipped: Sequence[Skipped]) -> bool:
    """Tell whether there is another copy of the very same save to try."""
    tried = {_key(each), *map(_key, skipped)}
    return any(other.save_id == each.save_id != "" and _key(other) not in tried for other in found if not other.reason)


def _skipped(each: Candidate, reason: str, roots: Sequence[str]) -> Skipped:
    return Skipped(name=each.name, step=each.step, reason=reason, where=roots[each.tier], tier=each.tier)


def _place(skipped: Skipped) -> str:
    return f"{skipped.where}/{skipped.name}"


def _why(taken: Candidate, skipped: Sequence[Skipped], roots: Sequence[str]) -> str:
    """Say why a checkpoint was not taken from a nearer root."""
    if not taken.tier:
        return ""
    passed = [each for each in skipped if each.name == taken.name and each.tier < taken.tier]
    return f"{_place(passed[-1])}: {passed[-1].reason}" if passed else f"{roots[0]} has no whole copy of it"


def _tell(skipped: Skipped, *, rank: int) -> None:
    where = _place(skipped)
    if rank == 0:
        log.warning("%s cannot be restored, and is passed over: %s", where, skipped.reason)
    emit(StepSkipped, lambda: StepSkipped(rank=rank, where=where, step=skipped.step, reason=skipped.reason))
