"""
Which checkpoints a root has, by their commit records alone: no index, no data file and no torch is needed for that.

The records are the truth. What else a root says (`latest`) is a hint that nobody here listens to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import islice

from shardkeep.errors import BlobNotFound, CheckpointError
from shardkeep.layout import leftovers
from shardkeep.layout.native import record_in
from shardkeep.layout.torch_files import METADATA_NAME, is_data, is_metadata
from shardkeep.manage.entries import Entry, entry_of
from shardkeep.manage.lineage import newest_first
from shardkeep.manage.naming import Naming, template_of
from shardkeep.manage.pins import pinned
from shardkeep.options import Options
from shardkeep.store.place import open_root
from shardkeep.store.protocol import Store
from shardkeep.store.roots import REMOVING_NAME, Root, makes_a_checkpoint

_THREADS = 16
"""That read records at a time: most of them wait for the disk or the network."""
_STRANGERS = 3
_BATCH = 64
"""Records read before the next ones are asked for."""


class Catalog:
    """
    The checkpoints of a root.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> for step in (1, 2):
        ...     _ = sk.save({"w": torch.ones(4)}, f"{root}/step-{step}", step=step)
        >>> [entry.name for entry in sk.Catalog(root).entries()]
        ['step-2', 'step-1']
        >>> sk.Catalog(root).latest().step
        2

    """

    def __init__(self, root: str | os.PathLike[str] | Root, template: str = "step-{step}") -> None:
        """
        Look at a root.

        Args:
            root: a path, a `file://` URL, or a root.
            template: what its checkpoints are called; places of other names are left alone.

        Raises:
            StateError: the template does not name one step.

        """
        self.root = open_root(root, direct=Options().direct_io)
        self.naming = Naming(template)

    def __repr__(self) -> str:
        return f"Catalog({self.root.url!r}, {self.naming.template!r})"

    def __iter__(self) -> Iterator[Entry]:
        """Read entries as they are asked for: by step, the highest first."""
        pins = pinned(self.root)
        steps = sorted(self._steps(), reverse=True)
        return _read_ahead(lambda each: self._look(*each, pins=pins), iter(steps))

    def entries(self) -> list[Entry]:
        """
        Return all entries, the newest first: by timeline, then by step, and last those that a job has gone back from.

        Places in which nothing is are left out.
        """
        return newest_first(self)

    def latest(self) -> Entry | None:
        """Return the newest committed checkpoint."""
        return next((entry for entry in self.entries() if entry.committed), None)

    def find(self, step: int) -> Entry | None:
        """Return what there is of a step."""
        name = self.naming.name(step)
        return self._look(step, name, pins=pinned(self.root))

    def strangers(self) -> dict[str, str]:
        """Name some places that hold checkpoints and are not of the template, each with a template that it is of."""
        found: dict[str, str] = {}
        for name in sorted(self.root.places(), reverse=True):
            template = template_of(name)
            if template is None or self.naming.step(name) is not None:
                continue
            if any(makes_a_checkpoint(info.name) for info in self.root.place(name).list()):
                found[name] = template
            if len(found) == _STRANGERS:
                break
        return found

    def _steps(self) -> Iterator[tuple[int, str]]:
        for name in self.root.places():
            step = self.naming.step(name)
            if step is not None:
                yield step, name

    def _look(self, step: int, name: str, *, pins: set[str]) -> Entry | None:
        store = self.root.place(name)
        try:
            try:
                record = record_in(store)
            except BlobNotFound:
                return _without_record(store, name, step, is_pinned=name in pins)
            return entry_of(name, step, record, pinned=name in pins)
        except CheckpointError as exc:
            return Entry(name=name, step=step, status="damaged", reason=exc.message, pinned=name in pins, problem=exc)


def _without_record(store: Store, name: str, step: int, *, is_pinned: bool) -> Entry | None:
    """Say what a place is that has no commit record: a checkpoint of torch's, or none."""
    infos = {info.name: info for info in store.list()}
    if not infos:
        return None
    metadata = infos.get(METADATA_NAME)
    if metadata is not None and metadata.nbytes:
        ours = [info.nbytes for info in infos.values() if is_data(info.name) or is_metadata(info.name)]
        when = datetime.fromtimestamp(metadata.modified_s, timezone.utc)
        return Entry(
            name=name, step=step, status="committed", layout="torch", saved_at=when, nbytes=sum(ours), pinned=is_pinned
        )
    if metadata is not None:
        return Entry(
            name=name, step=step, status="damaged", reason=f"{METADATA_NAME} is empty", layout="torch", pinned=is_pinned
        )
    size = sum(info.nbytes for info in infos.values())
    return Entry(
        name=name, step=step, status="unfinished", reason=_why_unfinished(store, infos), nbytes=size, pinned=is_pinned
    )


def _why_unfinished(store: Store, names: Iterable[str]) -> str:
    found = leftovers.survey(store)
    if found.living:
        return f"process {found.living.pid} is writing it"
    if found.elsewhere:
        return "a process of another machine may be writing it"
    if REMOVING_NAME in names:
        return "its removal was cut short"
    if found.dead:
        return "its writer is gone"
    return "it has no commit record"


def _read_ahead(look: Callable[[tuple[int, str]], Entry | None], steps: Iterator[tuple[int, str]]) -> Iterator[Entry]:
    """Look at places, a few at first, then many at a time."""
    yield from (entry for entry in map(look, islice(steps, 2)) if entry)
    rest = list(steps)
    if not rest:
        return
    with ThreadPoolExecutor(min(_THREADS, len(rest)), thread_name_prefix="shardkeep-catalog") as threads:
        for start in range(0, len(rest), _BATCH):
            batch = rest[start : start + _BATCH]
            try:
                looked = threads.map(look, batch)
            except RuntimeError:  # the interpreter ends, and begins no more threads
                looked = map(look, batch)
            yield from (entry for entry in looked if entry)
