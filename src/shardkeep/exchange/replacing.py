"""
What a conversion takes the place of, where a checkpoint of another layout is.

What was there stays whole until the new checkpoint is committed. Then it goes: first what says that it exists, then its
files. Files that are of no checkpoint are left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardkeep.errors import CheckpointError, CheckpointExists
from shardkeep.exchange.models import model_files, names_in
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout import leftovers, native
from shardkeep.layout.safetensors_folder import NOTE, look
from shardkeep.layout.safetensors_names import INDEX_NAME
from shardkeep.layout.torch_files import is_data, is_metadata
from shardkeep.storages.places import same_place as same_place  # noqa: PLC0414 - offered here, too
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import Store

log = logging.getLogger("shardkeep")


def check_apart(origin: Store, target: Store) -> None:
    """
    Refuse to write a checkpoint into the place that it is read from.

    Raises:
        CheckpointError: both are one place.

    """
    same = same_place(origin, target)
    if isinstance(origin, LocalStore) and isinstance(target, LocalStore) and os.path.isfile(origin.url):
        same = same or os.path.dirname(os.path.realpath(origin.url)) == os.path.realpath(target.url)
    if same:
        raise CheckpointError(
            f"{target.url}: a checkpoint cannot be converted in its own place", hint="give another place"
        )


def files_of_others(store: Store, layout: str) -> list[str]:
    """Name the files of checkpoints of other layouts in a place, in the order in which they are to go."""
    names = names_in(store)
    found: list[str] = []
    if layout != "native" and RECORD_NAME in names:
        found += [RECORD_NAME, *(name for name in names if native.save_id_of(name))]
    metadata = list(filter(is_metadata, names))
    if layout != "dcp" and metadata:
        found += [*metadata, *filter(is_data, names)]
    if layout != "safetensors":
        found += [name for name in names if name in (INDEX_NAME, NOTE)]
        found += [name for name in model_files(look(store)) if native.save_id_of(name) is None] if names else []
    return found


@contextmanager
def replacing(store: Store, layout: str, *, overwrite: bool) -> Iterator[None]:
    """
    Convert into a place, inside; afterwards checkpoints of other layouts that it held are gone.

    If that fails, they are as they were, and directories that were made for it are gone.

    Raises:
        CheckpointExists: there is one, and `overwrite` was not given; or somebody is saving there.

    """
    to = store.url
    old = files_of_others(store, layout)
    if old and not overwrite:
        raise CheckpointExists(
            f"{to}: a checkpoint of another layout is already there ({old[0]})",
            hint="pass overwrite=True (--overwrite) to replace it, or give another place",
        )
    made = _missing(to) if isinstance(store, LocalStore) else []
    if old and (writer := leftovers.survey(store).living):
        raise CheckpointExists(
            f"{to}: another save is writing here (process {writer.pid})", hint="wait for it, or give another place"
        )
    try:
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):  # not empty: somebody else's
                os.rmdir(path)
        raise
    for name in old:
        try:
            store.delete(name)
        except CheckpointError as exc:
            log.warning("could not remove %s, which was replaced, from %s: %s", name, to, exc)


def _missing(to: str) -> list[str]:
    """Return the directories that will be made, the innermost first."""
    found = []
    path = os.path.abspath(to)
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found
