"""
Files of saves that will never be committed: whose they are, whether their writer lives, and how they go away.

A save puts a claim beside its files before it writes the first one: which process it is. A claim whose process is
gone, or that is older than any save takes, marks a dead save; its files are removed by the next save to the same
place. Files of a save that may still be alive are never touched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from shardkeep.errors import BlobNotFound, CheckpointNotFound, DamagedCheckpoint
from shardkeep.layouts.native import claim_name, is_claim, read_record, save_id_of
from shardkeep.storage.base import BlobInfo, Gets, Lists, Puts, Store
from shardkeep.storage.system import host_identity, process_start

log = logging.getLogger("shardkeep")

STALE_AFTER_S = 24 * 3600.0
_MAX_CLAIM_NBYTES = 4096


class _Looks(Gets, Lists, Protocol):
    """What looking for leftovers needs of a store."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Which process is saving."""

    host: str
    """Machine, boot and process namespace: equal only where process numbers mean the same."""
    pid: int
    started: str
    """When the process began, in the kernel's words, so that a reused number is not mistaken for it."""


@dataclass(frozen=True)
class Survey:
    """The saves whose files are in a place, and what became of them. The committed one is among the ended or dead."""

    living: Claim | None
    """Of a process that is certainly alive and saving here."""
    dead: list[str]
    """Files of saves whose process is gone, or that are older than any save takes."""
    ended: list[str]
    """Files of saves that gave up their claim: they were committed, and perhaps replaced since, or they failed."""
    elsewhere: list[str]
    """Files of saves of other machines, whose processes may be alive or not."""

    @property
    def over(self) -> bool:
        """Whether certainly nobody is saving here."""
        return self.living is None and not self.elsewhere


class _Standing:
    """Held by a save that is under way."""


# Saves of this process. A claim of ours that is not among them was left by a save that has failed since. They are gone
# with the frame that holds them: a Ctrl-C may come just before a line that would take them out.
_under_way: WeakValueDictionary[str, _Standing] = WeakValueDictionary()


@contextmanager
def holding_claim(save_id: str) -> Iterator[None]:
    """Stand by a save's claim inside; afterwards nobody does, even if it could not be removed."""
    _under_way[save_id] = standing = _Standing()
    try:
        yield
    finally:
        del standing


def make_claim(store: Puts, save_id: str) -> None:
    """Say that this process is writing this save."""
    claim = Claim(host=host_identity(), pid=os.getpid(), started=process_start(os.getpid()))
    store.put(claim_name(save_id), msgspec.json.encode(claim))


def survey(store: _Looks, gone: Collection[str] = ()) -> Survey:
    """
    Look at every save in a place; `gone` are hosts of which it is known that they write no more.

    Whoever deletes dead or ended files must read the commit record after this, and spare what it names (`unnamed`): a
    save that had ended by now and is not named then never will be.
    """
    saves: dict[str, list[BlobInfo]] = {}
    for info in store.list():
        if save_id := save_id_of(info.name):
            saves.setdefault(save_id, []).append(info)
    found = Survey(None, [], [], [])
    for save_id, infos in saves.items():
        # Asked for by name, whether listed or not: a listing may have missed a claim made while it ran.
        claim = _read(store, claim_name(save_id))
        if claim is None:
            found.ended.extend(info.name for info in infos)
        elif _alive(claim, save_id):
            found = replace(found, living=claim)
        elif (
            claim.host in (host_identity(), *gone)
            or time.time() - max(info.modified_s for info in infos) > STALE_AFTER_S
        ):
            found.dead.extend(info.name for info in infos)
        else:
            found.elsewhere.extend(info.name for info in infos)
    return found


def deletable(store: Store, found: Survey) -> list[str]:
    """
    Name the files of saves that are over, and that are of no checkpoint, after a survey: they may be deleted.

    Raises:
        DamagedCheckpoint: the commit record cannot be read; it may be mended, so nothing is to go.
        UnsupportedVersion: the same, as a newer shardkeep wrote it.

    """
    if not found.dead and not found.ended:
        return []
    try:
        kept = {*read_record(store).names}
    except CheckpointNotFound:
        # Files that nobody claims any more may be a checkpoint whose record was lost or is not visible yet.
        return found.dead
    return [name for name in found.dead + found.ended if name not in kept]


def claims_last(names: Iterable[str]) -> list[str]:
    """Put names into the order in which they are to be deleted: while a claim is there, the rest is known to be dead."""
    return sorted(names, key=is_claim)


def _read(store: Gets, name: str) -> Claim | None:
    try:
        return msgspec.json.decode(store.get(name, limit=_MAX_CLAIM_NBYTES), type=Claim)
    except BlobNotFound:
        return None
    except (DamagedCheckpoint, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Claim(host="unreadable", pid=0, started="")


def _alive(claim: Claim, save_id: str) -> bool:
    if claim.host != host_identity() or not claim.started or process_start(claim.pid) != claim.started:
        return False
    return claim.pid != os.getpid() or save_id in _under_way
