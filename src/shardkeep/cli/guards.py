"""What speaks against deleting a checkpoint that no rule keeps: somebody saves there, or other things lie in its place."""

from __future__ import annotations

import os
import time

import msgspec

from shardkeep.cli.roots import Run
from shardkeep.errors import BlobNotFound, CheckpointError
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout import leftovers, native
from shardkeep.layout.torch_files import DATA_SUFFIX, is_data, is_metadata
from shardkeep.manage.entries import Entry
from shardkeep.manage.lease import LEASE_NAME, LEASE_S, Holder
from shardkeep.store.files import storage_errors
from shardkeep.store.local import LocalStore
from shardkeep.store.process import host, started
from shardkeep.store.roots import REMOVING_NAME

_MAX_LEASE_NBYTES = 4096
_NAMED = 3
"""Foreign things that are named; of others there is only the number."""


def being_written(run: Run, entry: Entry) -> str:
    """Say who saves to a place, or may do so; empty where certainly nobody does."""
    found = leftovers.survey(run.catalog.root.place(entry.name))
    if found.living is not None:
        return f"being written by process {found.living.pid}"
    return "perhaps being written on another machine" if found.elsewhere else ""


def foreign_things(run: Run, entry: Entry) -> list[str]:
    """Name what lies in a place and is of no checkpoint: files and folders that somebody else has put there."""
    place = run.catalog.root.place(entry.name)
    if not isinstance(place, LocalStore):
        return sorted(info.name for info in place.list() if not _is_ours(info.name, entry))
    if os.path.islink(place.url):
        return []  # only the link goes
    # Not what the store lists: folders, and files that no blob is called, would go as well.
    with storage_errors("cannot list", place.url), os.scandir(place.url) as there:
        return sorted(
            f"{each.name}/" if each.is_dir(follow_symlinks=False) else each.name
            for each in there
            if each.is_dir(follow_symlinks=False) or not _is_ours(each.name, entry)
        )


def foreign_text(names: list[str]) -> str:
    """Say in a few words what else lies in a place."""
    others = len(names) - _NAMED
    return f"it also holds {', '.join(names[:_NAMED])}" + (f" and {others:,} more" if others > 0 else "")


def _is_ours(name: str, entry: Entry) -> bool:
    named = [] if entry.record is None else entry.record.names
    return (
        name in (RECORD_NAME, REMOVING_NAME, *named)
        or name.startswith(".tmp-")
        or native.save_id_of(name) is not None
        or is_metadata(name)
        or is_data(name)
        or (entry.layout == "torch" and name.endswith(DATA_SUFFIX))
    )


def job_of(run: Run) -> str:
    """Say which living job holds the lease of a run; empty where there is none."""
    root = run.catalog.root
    try:
        holder = msgspec.json.decode(root.get(LEASE_NAME, limit=_MAX_LEASE_NBYTES), type=Holder)
        if holder.released:
            return ""
        if holder.host == host():
            return str(holder) if started(holder.pid) == holder.started else ""
        written_s = max((info.modified_s for info in root.list() if info.name == LEASE_NAME), default=0.0)
    except BlobNotFound:
        return ""
    except (CheckpointError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "a lease that cannot be read"
    return str(holder) if time.time() - written_s < LEASE_S else ""
