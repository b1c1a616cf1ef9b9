"""What a path or URL on the command line means: a checkpoint, a run (a directory of checkpoints), or a folder of runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from shardkeep.cli.output import UsageError, did_you_mean, format_count, natural_order
from shardkeep.errors import CheckpointError, CheckpointNotFound
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.manage.catalog import Catalog, Walk
from shardkeep.manage.entry import Entry
from shardkeep.opening import Checkpoint
from shardkeep.opening import open as open_checkpoint
from shardkeep.storage.base import broken_path, exists, is_single_file, local_path
from shardkeep.storage.resolve import open_root, open_store

_LEVELS = 3
"""How deep below a folder runs are found: runs/a and lightning_logs/version_0/checkpoints."""


@dataclass(frozen=True)
class Run:
    """A directory of checkpoints, or of runs."""

    path: str
    """As the user wrote it."""
    template: str | None = None
    """Lists only checkpoints of these names; None: all."""
    levels: int = _LEVELS
    last: int = 0
    """How many of the newest entries are read; 0: all."""

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.path, self.template)

    @cached_property
    def entries(self) -> list[Entry]:
        """All checkpoints and unfinished saves, or the last ones, newest first. Only their commit records are read."""
        return list(islice(self.newest(), self.last)) if self.last else self.catalog.entries()

    def newest(self) -> Iterator[Entry]:
        """Yield the same entries, and read few others."""
        return Walk([self.catalog]).newest_first()

    @cached_property
    def runs(self) -> list[Run]:
        """Directories that contain checkpoints and are not checkpoints themselves."""
        if self.last and self.entries:  # of the others it is not known what they are
            return []
        taken = {entry.name for entry in self.entries}
        names = [name for name in self.catalog.root.places() if name not in taken and not name.startswith(".")]
        below = [
            replace(self, path=self.path_to(name), levels=self.levels - 1, last=0)
            for name in sorted(names, key=natural_order)
        ]
        return [found for run in below if self.levels for found in ([run] if run.entries else run.runs)]

    @property
    def latest(self) -> Entry | None:
        """The newest checkpoint, whether or not it is damaged."""
        return next((entry for entry in self.entries if entry.committed), None)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def name_of(self, run: Run) -> str:
        return run.path.removeprefix(self.path_to(""))

    def path_to(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"


@contextmanager
def path_hints(where: str) -> Iterator[None]:
    """Add a suggestion to a `CheckpointNotFound` that is raised inside."""
    try:
        yield
    except CheckpointNotFound as exc:
        exc.hint = suggest_path(where) or exc.hint
        raise


def open_with_hints(where: str) -> Checkpoint:
    """Open a checkpoint; if there is none, the hint says what is there instead, or what is spelt alike."""
    with path_hints(where):
        return open_checkpoint(where)


def open_checkpoint_or_run(where: str, template: str | None = None, last: int = 0) -> Checkpoint | Run:
    """Open a checkpoint, or the run whose checkpoints are below this path; raise `CheckpointNotFound` if it is neither."""
    with path_hints(where):
        try:
            return open_checkpoint(where)
        except CheckpointNotFound:
            store = open_store(where, direct=False)
            if is_single_file(store) or broken_path(store):
                raise
            run, path = Run(where, template, last=last), local_path(store)
            is_directory = path is not None and os.path.isdir(path)
            # An empty directory is a run that has not started. Object stores have none.
            if run.entries or run.runs or (is_directory and not os.listdir(path)):
                return run
            if not is_directory or broken_path(run.catalog.root, inside=True):
                raise
            parent, name = split_path(where)
            if (entry := Catalog(parent).get(name)) is not None:
                raise CheckpointNotFound(f"{where}: {entry.status}: {entry.reason}") from None
            only = f" named {template}" if template else ""
            raise CheckpointNotFound(
                f"{where}: no checkpoint{only}, here or up to {_LEVELS + 1} levels below"
            ) from None


def open_run(where: str, template: str | None = None, *, must_exist: bool) -> Run:
    """Open a run, which may have no checkpoint yet; raise a `UsageError` for a checkpoint, or for a folder of runs."""
    store, root = open_store(where, direct=False), open_root(where, direct=False)
    path = local_path(root)
    if must_exist and not (any(root.places()) or any(root.list()) if path is None else os.path.isdir(path)):
        raise UsageError(f"{where}: there is no run here", hint=suggest_path(where))
    for name in (RECORD_NAME, METADATA_NAME):
        if exists(store, name):
            parent, _ = split_path(where)
            hint = f"give the directory that contains it: {parent}" if parent else ""
            raise UsageError(f"{where} is a checkpoint, not a run", hint=hint)
    run = Run(where, template)
    if next(run.newest(), None) is None and run.runs:
        names = ", ".join(each.path for each in run.runs[:3]) + (", …" if len(run.runs) > 3 else "")
        raise UsageError(
            f"{where} is a folder of {format_count(len(run.runs), 'run')}, not a run", hint=f"give one of them: {names}"
        )
    return run


def suggest_path(where: str) -> str:
    """Suggest what was meant by a path without a checkpoint; empty if there is no suggestion."""
    try:
        run = Run(where)
        if run.latest is not None:
            return f"it is a run; its latest checkpoint is {run.path_to(run.latest.name)}"
        if run.runs:
            return f"it is a folder of runs, such as {run.runs[0].path}"
        path = local_path(run.catalog.root)
        if path is not None and os.path.isdir(path):
            return ""
        parent, name = split_path(where)
        beside = open_root(parent, direct=False).places() if path is None else os.listdir(parent)
        return did_you_mean(name, [each for each in beside if each != name]) if parent else ""
    except (CheckpointError, OSError):
        return ""


def split_path(where: str) -> tuple[str, str]:
    """A bucket has no parent."""
    if "://" not in where:
        return os.path.split(os.path.abspath(where))
    scheme, _, rest = where.partition("://")
    parent, slash, name = rest.rstrip("/").rpartition("/")
    return (f"{scheme}://{parent}" if slash else ""), name
