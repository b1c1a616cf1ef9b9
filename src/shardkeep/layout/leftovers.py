"""
Files of saves that will never be committed: whose they are, whether their writer lives, and how they go away.

A save puts a claim beside its files before it writes the first one: which process it is. A claim whose process is
gone, or that is older than any save takes, marks a dead save; its files are swept by the next save that commits in
the same place. Files of a save that may still be alive are never touched.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Protocol

import msgspec

from shardkeep.errors import BlobNotFound, CheckpointError
from shardkeep.layout.native import claim_name, save_id_of
from shardkeep.store.protocol import Deletes, Gets, Lists, Puts

STALE_AFTER_S = 24 * 3600.0
_MAX_CLAIM_NBYTES = 4096


class _Sweeps(Gets, Lists, Deletes, Protocol):
    """What a sweep needs of a store."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Which process is saving."""

    host: str
    """Machine, boot and process namespace: equal only where process numbers mean the same."""
    pid: int
    started: str
    """When the process began, in the kernel's words, so that a reused number is not mistaken for it."""


def make_claim(store: Puts, save_id: str) -> None:
    """Say that this process is writing this save."""
    claim = Claim(host=_host(), pid=os.getpid(), started=_started(os.getpid()))
    store.put(claim_name(save_id), msgspec.json.encode(claim))


def living_claim(store: _Sweeps) -> Claim | None:
    """Return the claim of a process that is certainly alive and saving to this place, if there is one."""
    for info in list(store.list()):
        save_id = save_id_of(info.name)
        if save_id and info.name == claim_name(save_id):
            claim = _read(store, info.name)
            if claim and _alive(claim):
                return claim
    return None


def sweep(store: _Sweeps, *, keep: set[str], before: str) -> list[str]:
    """
    Delete the files of dead and of replaced saves; return their names.

    Args:
        store: where.
        keep: names that stay: those the commit record lists.
        before: only saves whose id sorts before this one are looked at, never one that began later.

    """
    infos = list(store.list())
    names = {info.name for info in infos}
    swept = []
    for info in infos:
        save_id = save_id_of(info.name)
        if save_id is None or info.name in keep or save_id >= before:
            continue
        claimed = claim_name(save_id)
        if claimed in names and not _dead(store, claimed, info.modified_s):
            continue
        store.delete(info.name)
        swept.append(info.name)
    return swept


def _dead(store: Gets, claimed: str, modified_s: float) -> bool:
    claim = _read(store, claimed)
    if claim is None:
        return True  # gone since the listing: its save has ended
    if claim.host == _host():
        return not _alive(claim)
    return time.time() - modified_s > STALE_AFTER_S


def _read(store: Gets, name: str) -> Claim | None:
    try:
        return msgspec.json.decode(store.get(name, limit=_MAX_CLAIM_NBYTES), type=Claim)
    except BlobNotFound:
        return None
    except (CheckpointError, msgspec.MsgspecError):
        return Claim(host="unreadable", pid=0, started="")


def _alive(claim: Claim) -> bool:
    return claim.host == _host() and _started(claim.pid) == claim.started != ""


def _host() -> str:
    boot = namespace = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pass  # not Linux: the host name has to do
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def _started(pid: int) -> str:
    """Return when a process began; empty where it is not running."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _exists(pid)
    return "" if fields[0] in ("Z", "X") else fields[19]


def _exists(pid: int) -> str:
    if os.path.exists("/proc/self/stat"):
        return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "running"
