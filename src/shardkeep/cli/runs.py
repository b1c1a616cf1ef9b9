"""Find what a path or URL on the command line means: a checkpoint, or a run, which is a directory of checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from shardkeep.cli.output import UsageError, did_you_mean
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointNotFound
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.manage.catalog import Catalog, Entry, Naming, template_of
from shardkeep.opening import Checkpoint
from shardkeep.opening import open as open_checkpoint
from shardkeep.options import Options
from shardkeep.storage.base import local_path
from shardkeep.storage.resolve import open_root, open_store

DEFAULT_TEMPLATE = "step-{step}"


@dataclass(frozen=True)
class Run:
    """A directory of checkpoints."""

    path: str
    """As the user wrote it."""
    catalog: Catalog

    @cached_property
    def entries(self) -> list[Entry]:
        """All checkpoints and unfinished saves, newest first. Only their commit records are read."""
        return self.catalog.entries()

    def path_of(self, entry: Entry) -> str:
        """Return the path of a checkpoint, relative if the user wrote a relative path."""
        return f"{self.path.rstrip('/')}/{entry.name}"


def open_run(path: str, template: str | None = None) -> Run:
    """Open a directory of checkpoints; without a template, guess how they are named."""
    root = open_root(path, direct=Options().direct_io)
    return Run(path, Catalog(root, template or guess_template(root.places())))


def guess_template(names: Iterable[str]) -> str:
    """Find the template that most names match; the default one if any name matches that, or if none has a number."""
    known = list(names)
    templates = Counter(template for name in known if (template := template_of(name)))
    if DEFAULT_TEMPLATE in templates or not templates:
        return DEFAULT_TEMPLATE
    likely = [template for template, _ in templates.most_common(5)]
    return max(likely, key=lambda template: sum(Naming(template).step(name) is not None for name in known))


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


def open_checkpoint_or_run(where: str, template: str | None = None) -> Checkpoint | Run:
    """Open a checkpoint, or the run whose checkpoints are below this path; raise `CheckpointNotFound` if it is neither."""
    with path_hints(where):
        try:
            return open_checkpoint(where)
        except CheckpointNotFound:
            run = open_run(where, template)
            if run.entries or is_empty_directory(where):
                return run
            raise


def open_existing_run(where: str, template: str | None = None) -> Run:
    """Open a run, which may have no checkpoint yet; a path that does not exist, or is a checkpoint, is an error."""
    path = _local_path(where)
    if path is None:
        root = open_root(where, direct=False)
        if next(root.places(), None) is None and next(root.list(), None) is None:
            raise UsageError(f"{where}: there is nothing at this URL", hint=suggest_path(where))
    elif not os.path.isdir(path):
        what = "is not a directory" if os.path.exists(path) else "does not exist"
        raise UsageError(f"{where}: {what}", hint=suggest_path(where))
    reject_checkpoint(where)
    return open_run(where, template)


def reject_checkpoint(where: str) -> None:
    """Raise a `UsageError` if a checkpoint is at this path, where the command needs a run."""
    store = open_store(where, direct=False)
    for name in (RECORD_NAME, METADATA_NAME):
        try:
            store.open(name).close()
        except BlobNotFound:
            continue
        parent, _ = split_path(where)
        hint = f"give the directory that contains it: {parent}" if parent else ""
        raise UsageError(f"{where} is a checkpoint, not a run", hint=hint)


def is_empty_directory(where: str) -> bool:
    """Return whether this is an empty directory: a run that has not started. Object stores have none."""
    path = _local_path(where)
    return path is not None and os.path.isdir(path) and not os.listdir(path)


def suggest_path(where: str) -> str:
    """Suggest what was meant by a path without a checkpoint; empty if there is no suggestion."""
    try:
        run = open_run(where)
        if (entry := run.catalog.latest()) is not None:
            return f"it is a run; its latest checkpoint is {run.path_of(entry)}"
        path = _local_path(where)
        if path is not None and os.path.isdir(path):
            return ""
        parent, name = split_path(where)
        beside = open_root(parent, direct=False).places() if path is None else os.listdir(parent)
        return did_you_mean(name, beside) if parent else ""
    except (CheckpointError, OSError):
        return ""


def split_path(where: str) -> tuple[str, str]:
    """Return parent and name of a path or URL; a bucket has no parent."""
    if "://" not in where:
        return os.path.split(os.path.abspath(where))
    scheme, _, rest = where.partition("://")
    parent, slash, name = rest.rstrip("/").rpartition("/")
    return (f"{scheme}://{parent}" if slash else ""), name


def _local_path(where: str) -> str | None:
    """Return the path on a local disk; None for other stores."""
    return local_path(open_store(where, direct=False))
