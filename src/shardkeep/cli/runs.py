"""The checkpoints of a run, found by the names of its directories. Reads commit records only."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from shardkeep.cli.output import UsageError, did_you_mean
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointNotFound
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.manage.catalog import Catalog, Entry, Naming
from shardkeep.opening import Checkpoint
from shardkeep.opening import open as open_checkpoint
from shardkeep.options import Options
from shardkeep.storage.base import Store
from shardkeep.storage.local import LocalStore
from shardkeep.storage.resolve import open_root, open_store

DEFAULT_TEMPLATE = "step-{step}"
_NUMBERED = re.compile(r"(.*?)([0-9]+)")


@dataclass(frozen=True)
class Run:
    """A directory of checkpoints."""

    path: str
    """As it was written on the command line."""
    catalog: Catalog

    @cached_property
    def _entries(self) -> list[Entry]:
        return self.catalog.entries()

    def entries(self) -> list[Entry]:
        """Return all there is, the newest first."""
        return self._entries

    def path_of(self, entry: Entry) -> str:
        """Return the path of a checkpoint, as the run's was written."""
        return f"{self.path.rstrip('/')}/{entry.name}"


def open_run(path: str, template: str | None = None) -> Run:
    """Look at a directory of checkpoints; what they are called is found out unless a template is given."""
    root = open_root(path, direct=Options().direct_io)
    return Run(path, Catalog(root, template or guess_template(root.places())))


def guess_template(names: Iterable[str]) -> str:
    """
    Find the template that most names have: `step-{step}`, `checkpoint-{step}`, `iter_{step:07d}` or alike.

    The default, where a name fits it or none has a number at its end.
    """
    found = list(names)
    default = Naming(DEFAULT_TEMPLATE)
    if any(default.step(name) is not None for name in found):
        return DEFAULT_TEMPLATE
    numbered = [match for match in map(_NUMBERED.fullmatch, found) if match]
    if not numbered:
        return DEFAULT_TEMPLATE
    prefix = Counter(match[1] for match in numbered).most_common(1)[0][0]
    digits = [match[2] for match in numbered if match[1] == prefix]
    padded = any(number.startswith("0") and number != "0" for number in digits)
    return prefix + (f"{{step:0{min(map(len, digits))}d}}" if padded else "{step}")


# From what stands on a command line to a checkpoint, or to several of them.


def open_with_hints(where: str) -> Checkpoint:
    """
    Open the checkpoint at a place.

    Raises:
        CheckpointNotFound: there is none; the hint says what is there instead, or what is spelt alike.

    """
    with path_hints(where):
        return open_checkpoint(where)


@contextmanager
def path_hints(where: str) -> Iterator[None]:
    """Add to the error of a checkpoint that is not there what may have been meant."""
    try:
        yield
    except CheckpointNotFound as exc:
        exc.hint = suggest_path(where) or exc.hint
        raise


def open_checkpoint_or_run(where: str, template: str | None = None) -> Checkpoint | Run:
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
        exc.hint = suggest_path(where) or exc.hint
        raise


def open_existing_run(where: str, template: str | None = None) -> Run:
    """Open a run; one that has no checkpoint yet is a run, too."""
    require_exists(where)
    reject_checkpoint(where)
    return open_run(where, template)


def reject_checkpoint(where: str) -> None:
    """Insist that a place is no checkpoint itself, where a run is wanted."""
    store = open_store(where, direct=False)
    if any(_is_there(store, name) for name in (RECORD_NAME, METADATA_NAME)):
        above, _ = _split(where)
        raise UsageError(
            f"{where} is a checkpoint, and no run", hint=f"give the place it is in: {above}" if above else ""
        )


def require_exists(where: str) -> None:
    """Insist that something is there, and guess which place was meant where nothing is."""
    path = _path(where)
    if path is None:
        root = open_root(where, direct=False)
        if next(root.places(), None) is None and next(root.list(), None) is None:
            raise UsageError(f"{where}: nothing is there", hint=suggest_path(where))
    elif not os.path.isdir(path):
        what = "is no directory" if os.path.exists(path) else "does not exist"
        raise UsageError(f"{where}: {what}", hint=suggest_path(where))


def is_empty(where: str) -> bool:
    """Say whether a place is a directory that has nothing in it: a run that has not begun. Only disks have such."""
    path = _path(where)
    return path is not None and os.path.isdir(path) and not os.listdir(path)


def suggest_path(where: str) -> str:
    """Guess what was meant where no checkpoint is; empty where there is nothing to say."""
    try:
        run = open_run(where)
        if (entry := run.catalog.latest()) is not None:
            return f"it is a run: the latest of its checkpoints is {run.path_of(entry)}"
        return "" if _is_directory(where) else did_you_mean(_split(where)[1], _beside(where))
    except CheckpointError:
        return ""


def base_name(where: str) -> str:
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
