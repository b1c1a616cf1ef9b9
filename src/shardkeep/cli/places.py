"""From what stands on a command line to a checkpoint, or to several of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardkeep.cli.problems import NotUsable, did_you_mean
from shardkeep.cli.roots import Run, open_run
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointNotFound
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout.torch_files import METADATA_NAME
from shardkeep.opening import Checkpoint
from shardkeep.opening import open as open_checkpoint
from shardkeep.store.local import LocalStore
from shardkeep.store.place import open_root, open_store
from shardkeep.store.protocol import Store


def open_one(where: str) -> Checkpoint:
    """
    Open the checkpoint at a place.

    Raises:
        CheckpointNotFound: there is none; the hint says what is there instead, or what is spelt alike.

    """
    with explained(where):
        return open_checkpoint(where)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Add to the error of a checkpoint that is not there what may have been meant."""
    try:
        yield
    except CheckpointNotFound as exc:
        exc.hint = hint_for(where) or exc.hint
        raise


def open_one_or_root(where: str, template: str | None = None) -> Checkpoint | Run:
    """
    Open the checkpoint at a place, or the run whose checkpoints are below it.

    Raises:
        CheckpointNotFound: it is neither.

    """
    try:
        return open_checkpoint(where)
    except CheckpointNotFound as exc:
        run = open_run(where, template)
        if run.entries() or is_empty(where):
            return run
        exc.hint = hint_for(where) or exc.hint
        raise


def open_root_only(where: str, template: str | None = None) -> Run:
    """Open a run; one that has no checkpoint yet is a run, too."""
    check_exists(where)
    check_no_checkpoint(where)
    return open_run(where, template)


def check_no_checkpoint(where: str) -> None:
    """Insist that a place is no checkpoint itself, where a run is wanted."""
    store = open_store(where, direct=False)
    if any(_is_there(store, name) for name in (RECORD_NAME, METADATA_NAME)):
        above, _ = _split(where)
        raise NotUsable(
            f"{where} is a checkpoint, and no run", hint=f"give the place it is in: {above}" if above else ""
        )


def check_exists(where: str) -> None:
    """Insist that something is there, and guess which place was meant where nothing is."""
    path = _path(where)
    if path is None:
        root = open_root(where, direct=False)
        if next(root.places(), None) is None and next(root.list(), None) is None:
            raise NotUsable(f"{where}: nothing is there", hint=hint_for(where))
    elif not os.path.isdir(path):
        what = "is no directory" if os.path.exists(path) else "does not exist"
        raise NotUsable(f"{where}: {what}", hint=hint_for(where))


def is_empty(where: str) -> bool:
    """Say whether a place is a directory that has nothing in it: a run that has not begun. Only disks have such."""
    path = _path(where)
    return path is not None and os.path.isdir(path) and not os.listdir(path)


def hint_for(where: str) -> str:
    """Guess what was meant where no checkpoint is; empty where there is nothing to say."""
    try:
        run = open_run(where)
        if (entry := run.catalog.latest()) is not None:
            return f"it is a run: the latest of its checkpoints is {run.path_of(entry)}"
        return "" if _is_directory(where) else did_you_mean(_split(where)[1], _beside(where))
    except CheckpointError:
        return ""


def name_of(where: str) -> str:
    """Return the last part of a place, by which it is called in few words."""
    return _split(where)[1]


def _beside(where: str) -> list[str]:
    """Name what lies beside a place, so that a misspelt one is found."""
    above, _ = _split(where)
    path = _path(where)
    if path is None:
        return list(open_root(above, direct=False).places()) if above else []
    try:
        return os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return []


def _split(where: str) -> tuple[str, str]:
    """Return the place that a place is in, and what it is called there; no place above a bucket."""
    if "://" not in where:
        return os.path.split(os.path.abspath(where))
    scheme, _, rest = where.partition("://")
    above, slash, name = rest.rstrip("/").rpartition("/")
    return (f"{scheme}://{above}" if slash else ""), name


def _path(where: str) -> str | None:
    """Return the path of a place on this machine's disks; None for all others."""
    store = open_store(where, direct=False)
    return store.url if isinstance(store, LocalStore) else None


def _is_directory(where: str) -> bool:
    path = _path(where)
    return path is not None and os.path.isdir(path)


def _is_there(store: Store, name: str) -> bool:
    try:
        store.open(name).close()
    except BlobNotFound:
        return False
    return True
