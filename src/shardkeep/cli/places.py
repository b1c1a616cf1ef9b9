"""From what stands on a command line to a checkpoint, or to several of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardkeep.cli.problems import NotUsable, did_you_mean
from shardkeep.cli.roots import Run, open_run
from shardkeep.errors import CheckpointNotFound
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout.torch_files import METADATA_NAME
from shardkeep.opening import Checkpoint
from shardkeep.opening import open as open_checkpoint


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
    if "://" not in where and any(os.path.isfile(os.path.join(where, name)) for name in (RECORD_NAME, METADATA_NAME)):
        above = os.path.dirname(os.path.abspath(where))
        raise NotUsable(f"{where} is a checkpoint, and no run", hint=f"give the directory it is in: {above}")


def check_exists(where: str) -> None:
    """Insist that a directory is there, and guess which one was meant where it is not."""
    if "://" not in where and not os.path.isdir(where):
        what = "is no directory" if os.path.exists(where) else "does not exist"
        raise NotUsable(f"{where}: {what}", hint=hint_for(where))


def is_empty(where: str) -> bool:
    """Say whether a place is a directory that has nothing in it: a run that has not begun."""
    return os.path.isdir(where) and not os.listdir(where)


def hint_for(where: str) -> str:
    """Guess what was meant where no checkpoint is; empty where there is nothing to say."""
    if "://" in where:
        return ""
    if os.path.isdir(where):
        entry = open_run(where).catalog.latest()
        return f"it is a run: the latest of its checkpoints is {os.path.join(where, entry.name)}" if entry else ""
    above, name = os.path.split(os.path.normpath(where))
    try:
        beside = os.listdir(above or ".")
    except OSError:
        return ""
    return did_you_mean(name, beside)
