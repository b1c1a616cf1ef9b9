"""
Orphans: files of saves that will never be committed. Who wrote them, whether the writer is alive, and how they are deleted.

Before a save writes its first file, it writes a claim beside it, which names the process. A claim whose process is gone,
or that is older than any save takes, marks a dead save; the next save to the same place deletes its files. Files of a
save that may still be running are never touched. The claim is deleted last, so that an interrupted clean-up is found and
finished by the next one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import msgspec

from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointNotFound, DamagedCheckpoint, UnsupportedVersion
from shardkeep.layouts.native import claim_name, is_claim, read_record, save_id_of
from shardkeep.storage.base import BlobInfo, ReadableStore, Store, explaining_place
from shardkeep.storage.local import host_identity, process_start

log = logging.getLogger("shardkeep")

STALE_AFTER_S = 24 * 3600.0
_MAX_CLAIM_NBYTES = 4096


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    """Machine, boot and process namespace: equal only where process ids mean the same."""
    pid: int
    started: str
    """As the kernel says it, so that a reused process id is not mistaken for it."""


class _RunningSave:
    """Held by a save while it runs."""


# Saves that run in this process. A claim of this process that is not among them was left by a save that failed. An entry
# vanishes with the frame that holds it, because a Ctrl-C may come just before a line that would remove it.
_running: WeakValueDictionary[str, _RunningSave] = WeakValueDictionary()


@contextmanager
def holding_claim(save_id: str) -> Iterator[None]:
    """Count a save as running inside; afterwards its claim is an orphan, even if it could not be deleted."""
    _running[save_id] = running = _RunningSave()
    try:
        yield
    finally:
        del running


def make_claim(store: Store, save_id: str) -> None:
    claim = Claim(host=host_identity(), pid=os.getpid(), started=process_start(os.getpid()))
    with explaining_place(store, claim_name(save_id)):
        store.put(claim_name(save_id), msgspec.json.encode(claim))


def _read_claim(store: ReadableStore, name: str) -> Claim | None:
    try:
        return msgspec.json.decode(store.get(name, limit=_MAX_CLAIM_NBYTES), type=Claim)
    except BlobNotFound:
        return None
    except (DamagedCheckpoint, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Claim(host="unreadable", pid=0, started="")


def _is_alive(claim: Claim, save_id: str) -> bool:
    if claim.host != host_identity() or not claim.started or process_start(claim.pid) != claim.started:
        return False
    return claim.pid != os.getpid() or save_id in _running


@dataclass(frozen=True)
class Survey:
    """The saves whose files are in a place, by their state. The committed save is among the ended or dead ones."""

    living: Claim | None
    dead: list[str]
    """Files of saves whose process is gone, or that are older than any save takes."""
    ended: list[str]
    """Files of saves that have removed their claim: they were committed (and perhaps replaced since), or they failed."""
    elsewhere: list[str]
    """Files of saves of other machines, whose processes may be alive or not."""

    @property
    def over(self) -> bool:
        """Whether it is certain that no process is saving here."""
        return self.living is None and not self.elsewhere


def survey(store: Store, gone: Collection[str] = ()) -> Survey:
    """
    Look at every save in a place; `gone` are hosts that are known to write no more.

    The commit record must be read after this, not before, and the files that it names must be spared (see `deletable`): a
    save that had ended at the time of the survey and is not named afterwards will never be committed.
    """
    saves: dict[str, list[BlobInfo]] = {}
    for info in store.list():
        if save_id := save_id_of(info.name):
            saves.setdefault(save_id, []).append(info)
    found = Survey(None, [], [], [])
    for save_id, infos in saves.items():
        # Read by name, whether it was listed or not: a listing may miss a claim that is made while it runs.
        claim = _read_claim(store, claim_name(save_id))
        names = [info.name for info in infos]
        if claim is None:
            found.ended.extend(names)
        elif _is_alive(claim, save_id):
            found = replace(found, living=claim)
        elif (
            claim.host in (host_identity(), *gone)
            or time.time() - max(info.modified_s for info in infos) > STALE_AFTER_S
        ):
            found.dead.extend(names)
        else:
            found.elsewhere.extend(names)
    return found


def deletable(store: Store, found: Survey) -> list[str]:
    """Return the orphans of a survey; raises for a commit record that may be repaired: then nothing must be deleted."""
    if not found.dead and not found.ended:
        return []
    try:
        kept = {*read_record(store).names}
    except CheckpointNotFound:
        # Files without a claim may belong to a checkpoint whose record was lost or is not visible yet.
        return found.dead
    return [name for name in found.dead + found.ended if name not in kept]


def sweep(store: Store, found: Survey) -> None:
    """Delete the orphans of a survey; none if the commit record is damaged, because it may be repaired."""
    try:
        names = deletable(store, found)
    except (DamagedCheckpoint, UnsupportedVersion) as exc:
        log.warning("no files are removed from %s, as its commit record may be repaired: %s", store.url, exc)
        return
    discard(store, names)


def discard(store: Store, names: Iterable[str]) -> None:
    """Delete files, a claim last and only if all else is gone: without it, files are not known to be dead. Never raises."""
    failed = False
    for name in claims_last(names):
        if failed and is_claim(name):
            continue
        try:
            store.delete(name)
        except CheckpointError as exc:
            failed = True
            log.warning("could not remove %s from %s: %s", name, store.url, exc)


def delete_files(store: Store, names: Iterable[str]) -> None:
    """Delete files, claims last; stop and raise at the first one that cannot be deleted."""
    for name in claims_last(names):
        store.delete(name)


def claims_last(names: Iterable[str]) -> list[str]:
    """Return names in the order in which they must be deleted: while a claim is there, the rest is known to be dead."""
    return sorted(names, key=is_claim)
