"""
The checkpoints of a root, found by their commit records alone: no index, data file or torch is needed.

A `Checkpointer` manages the checkpoints whose names its template gives. `Catalog` without a template lists all others, too.

The commit records are authoritative. The `latest` file of a root is a hint for people and scripts, and is never read here.

`Entry` describes one checkpoint. `Naming` maps steps to names and back. `newest_first` orders entries by timeline and
step. `Catalog` reads one root, and `Tiers` reads a near and a far root as one.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any, Literal

from shardkeep.display import OneLine, format_size, html_table
from shardkeep.engine.safetensors_source import find_safetensors
from shardkeep.engine.torch_file_source import find_torch_file, find_torch_model
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    MalformedFile,
    StateError,
    StorageError,
    UnsupportedLeaf,
    UnsupportedVersion,
)
from shardkeep.format.record import Record
from shardkeep.layouts import orphans
from shardkeep.layouts.native import record_in, save_id_of
from shardkeep.layouts.torch import METADATA_NAME, is_data, is_metadata
from shardkeep.options import Options
from shardkeep.storage.base import (
    REMOVING_NAME,
    BlobInfo,
    Deletes,
    ReadableStore,
    Root,
    SmallFiles,
    Store,
    is_name,
    with_any_names,
)
from shardkeep.storage.resolve import open_root

METRICS = "metrics"
"""The key of the step's metrics in the meta of a commit record."""
TIMELINE = "timeline"
"""The key of the timeline's number in the meta of a commit record; absent for the first timeline."""
BEGAN_AFTER = "timeline_began_after"
"""The key of the timeline and step after which the timeline began; absent for the first timeline."""
NEAR, FAR = 0, 1
"""The tier of the root that is saved to, and of the one that checkpoints are promoted to."""

_NOT_FINITE = ("nan", "inf", "-inf")
_TEMPLATE = re.compile(r"([^{}]*)\{step(?::(?:0[1-9]\d*)?d?)?\}([^{}]*)")
_TEMPLATE_HINT = (
    'a template has the step in it once, as in "step-{step}" or "step-{step:08d}", and otherwise letters, digits, ._-'
)
_MAX_STEP = (1 << 63) - 1
_STEP_IN_NAME = re.compile(
    r"(?:.*(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?)?([0-9]{1,18})(?:\.\w+)?", re.IGNORECASE
)
"""Names by which other programs give a step: checkpoint-500, iter_0000200, epoch=3-step=300.ckpt."""
_FILE_SUFFIXES = (".ckpt", ".pt", ".pth")
"""Of files of `torch.save` that are listed. Files named .bin hold anything."""
DEFAULT_TEMPLATE = "step-{step}"
_PIN_PREFIX = "pin."
_MAX_PIN_NBYTES = 4096
_THREADS = 16
"""How many records are read at a time: most of that time is spent waiting for the disk or the network."""
_MAX_STRANGERS = 3

Status = Literal["committed", "unfinished", "damaged"]
Layout = Literal["native", "torch", "safetensors", "torch.save"]


# -- one checkpoint -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Entry(OneLine):
    """A checkpoint of a root, or what is left of one."""

    name: str
    """The name of its directory in the root."""
    step: int
    """The step; -1 if neither the record nor the name says."""
    status: Status
    """committed: it exists. unfinished: it is being written, or its save never finished. damaged: its record is unreadable."""
    reason: str = ""
    """Why it is not committed."""
    layout: Layout | None = None
    saved_at: datetime | None = None
    """By the clock of the rank that committed it, or of the store; always with a time zone."""
    nbytes: int = 0
    """The size of all files that belong to it; 0 where that is not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    timeline: int = 0
    """A job that goes back to an earlier step and saves other steps from there begins a new timeline; higher is newer."""
    began_after: tuple[int, int] | None = None
    """The timeline and step after which its own timeline began."""
    record: Record | None = field(default=None, repr=False)
    """The commit record of a native checkpoint."""
    problem: CheckpointError | None = field(default=None, repr=False)
    """The error that reading the record of a damaged checkpoint raised."""
    managed: bool = True
    """Whether the template gives its name. Retention never deletes any other checkpoint."""
    tier: int = 0
    """In a Checkpointer with two roots: 0 for the near root, 1 for the root that checkpoints are promoted to."""

    def __str__(self) -> str:
        when = f", saved {self.saved_at:%Y-%m-%d %H:%M:%S %Z}" if self.saved_at else ""
        size = f", {format_size(self.nbytes)}" if self.nbytes else ""
        pinned = ", pinned" if self.pinned else ""
        return f"{self.name}, {self.status}{size}{when}{pinned}"

    @property
    def committed(self) -> bool:
        """Whether it exists as a checkpoint."""
        return self.status == "committed"

    @property
    def known_step(self) -> int | None:
        """The step; None where it is not known."""
        return self.step if self.step >= 0 else None

    @property
    def age(self) -> tuple[int, int]:
        """The key by which checkpoints are ordered, the newest last. It does not depend on any clock."""
        return self.timeline, self.step

    @property
    def save_id(self) -> str:
        """The id of the save that wrote it; empty where that is not known."""
        return "" if self.record is None else self.record.save_id

    @property
    def save_order(self) -> tuple[int, str]:
        """The key that orders several saves of one step, the newest last: save ids sort by time."""
        return self.timeline, self.save_id


def entry_from_record(name: str, step: int, record: Record, *, pinned: bool, managed: bool = True) -> Entry:
    """Describe a committed checkpoint by its record."""
    timeline, origin = record.meta.get(TIMELINE), None
    match record.meta.get(BEGAN_AFTER):
        case [int(before), int(after)] if min(before, after) >= 0:
            origin = before, after
    try:
        saved_at = datetime.fromisoformat(record.saved_at)
        saved_at = saved_at if saved_at.tzinfo else saved_at.replace(tzinfo=timezone.utc)
    except ValueError:
        saved_at = None
    return Entry(
        name=name,
        step=step,
        status="committed",
        layout="native",
        saved_at=saved_at,
        nbytes=record.stored_nbytes,
        metrics=metrics_in(record.meta),
        pinned=pinned,
        timeline=timeline if type(timeline) is int and timeline > 0 else 0,
        began_after=origin,
        record=record,
        managed=managed,
    )


def build_meta(
    meta: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    timeline: int,
    began_after: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Add metrics and the timeline to the user's meta; raise `StateError` for a reserved key, or a metric of no number."""
    if meta is not None and not isinstance(meta, Mapping):
        raise StateError(f"meta is a {type(meta).__name__}", hint="give a dict of JSON values")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise StateError(f"metrics is a {type(metrics).__name__}", hint='give a dict of numbers, as {"loss": 0.5}')
    ours: dict[str, Any] = {}
    if metrics:
        ours[METRICS] = {str(name): _stored_metric(name, value) for name, value in metrics.items()}
    if timeline:
        ours[TIMELINE] = timeline
        if began_after is not None:
            ours[BEGAN_AFTER] = list(began_after)
    for key in (METRICS, TIMELINE, BEGAN_AFTER):
        if meta and key in meta:
            raise StateError(f"meta has the key {key!r}, which a Checkpointer uses itself", hint="give it another name")
    return {**(meta or {}), **ours}


def metrics_in(meta: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record's meta, without values that are not numbers."""
    found = meta.get(METRICS)
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float) or value in _NOT_FINITE}


def _stored_metric(name: Any, value: Any) -> float | str:
    try:
        number = float(value)  # also accepts a tensor or an array of one element
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        try:
            shown = f"{value!r:.80}"
        except ValueError:  # an integer of thousands of digits
            shown = f"a {type(value).__name__}"
        raise StateError(f"metric {name!r} is {shown}, not a number", hint="give one number per metric") from exc
    return number if math.isfinite(number) else str(number)  # JSON cannot represent infinity or NaN


# -- the order of checkpoints -------------------------------------------------------------------------------------


def newest_first(entries: Iterable[Entry]) -> list[Entry]:
    """
    Order entries: first the newest timeline and the timelines it came from, each by step; then abandoned checkpoints.

    A job that goes back to step 100 while 150 and 200 exist, and then saves 110, abandons 150 and 200. If 110 cannot be
    used, 100 is wanted next, not 200. The records of a timeline say after which timeline and step it began.
    """
    known = list(entries)
    timeline: int = max((entry.timeline for entry in known), default=0)
    step = math.inf
    reach: dict[int, float] = {}
    """Up to which step each timeline is an ancestor of the newest one; other timelines are left out."""
    while timeline not in reach:
        reach[timeline] = step
        origin = began_after(known, timeline)
        if origin is not None and origin[0] < timeline:
            timeline, step = origin[0], min(step, origin[1])

    def order(entry: Entry) -> tuple[bool, int, int, float, str]:
        # Only where the step is not known does the order depend on a clock.
        saved_s = entry.saved_at.timestamp() if entry.step < 0 and entry.saved_at else 0.0
        return entry.step <= reach.get(entry.timeline, -1), entry.timeline, entry.step, saved_s, entry.name

    return sorted(known, key=order, reverse=True)


def restore_order(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries for a restore. An unreadable one counts as the newest: otherwise it could silently be passed over."""
    known = list(entries)
    newest = max((entry.timeline for entry in known), default=0)
    return newest_first(replace(entry, timeline=newest) if entry.problem is not None else entry for entry in known)


def require_readable(entries: Iterable[Entry], roots: Sequence[str]) -> list[Entry]:
    """
    Return the entries if the store gave the record of each, or the record is known to be damaged.

    Otherwise, raise `StorageError`: a checkpoint whose record the store fails to give at the moment may be whole, and the
    newest. To go on without it would lose work, so the user has to decide that, by moving it away. `roots` are URLs, by tier.
    """
    known = list(entries)
    for entry in known:
        problem = entry.problem
        if isinstance(problem, StorageError) and not isinstance(problem, BlobNotFound):
            where = f"{roots[entry.tier]}/{entry.name}"
            ways = [
                problem.hint,
                "try again when the store answers",
                f"to go on without this checkpoint, move {where} out of the root",
                "to go on without the far root, leave promote_to out" if entry.tier else "",
            ]
            raise StorageError(
                f"{where} cannot be read at the moment, and may be the newest checkpoint: {problem.message}",
                hint="; ".join(filter(None, ways)),
                **problem.details,
            ) from problem
    return known


def began_after(entries: Iterable[Entry], timeline: int) -> tuple[int, int] | None:
    """Return the timeline and step after which a timeline began, if one of its records says so."""
    return next((entry.began_after for entry in entries if entry.timeline == timeline and entry.began_after), None)


# -- names and pins -----------------------------------------------------------------------------------------------


class Naming:
    """Maps steps to names and names to steps, by a template such as "step-{step}" or "ckpt_{step:08d}"."""

    def __init__(self, template: str) -> None:
        """Raise `StateError` if the template does not contain the step once, or gives names that no store accepts."""
        self.template = template
        found = _TEMPLATE.fullmatch(template) if isinstance(template, str) else None
        if found is None or not is_name(template.format(step=_MAX_STEP)):
            raise StateError(f"template is {template!r}", hint=_TEMPLATE_HINT)
        before, after = map(re.escape, found.groups())
        self._pattern = re.compile(f"{before}([0-9]{{1,251}}){after}")

    def name(self, step: int) -> str:
        """Return the name of a step's checkpoint."""
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        """Return the step of a name; None for a name that no step has."""
        found = self._pattern.fullmatch(name)
        step = int(found[1]) if found else -1
        return step if 0 <= step <= _MAX_STEP and self.name(step) == name else None


def template_of(name: str) -> str | None:
    """Guess the template of a name by its last number."""
    found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name)
    if found is None or not is_name(name):
        return None
    before, digits, after = found.groups()
    width = f":0{len(digits)}d" if digits.startswith("0") and len(digits) > 1 else ""
    return f"{before}{{step{width}}}{after}"


def guess_template(names: Iterable[str]) -> str:
    """Find the template that most names match; the default one if any name matches that, or if none looks like a step."""
    known = [name for name in names if _STEP_IN_NAME.fullmatch(name)]  # not exp-1, or llama-7b
    templates = Counter(found for name in known if (found := template_of(name)))
    if DEFAULT_TEMPLATE in templates or not templates:
        return DEFAULT_TEMPLATE
    likely = [template for template, _ in templates.most_common(5)]
    return max(likely, key=lambda template: sum(Naming(template).step(name) is not None for name in known))


def pinned(root: SmallFiles) -> set[str]:
    """Return the names of pinned checkpoints, which are kept whatever the policies say."""
    return {info.name.removeprefix(_PIN_PREFIX) for info in root.list() if info.name.startswith(_PIN_PREFIX)}


def is_pinned(root: ReadableStore, name: str) -> bool:
    """Return whether a checkpoint is pinned right now."""
    try:
        root.get(_PIN_PREFIX + name, limit=_MAX_PIN_NBYTES)
    except BlobNotFound:
        return False
    except MalformedFile:  # the pin file was edited
        return True
    return True


def pin(root: SmallFiles, name: str) -> None:
    """Pin a checkpoint, by a file of its own in the root."""
    root.put(_PIN_PREFIX + name, b"", replace=True)


def unpin(root: Deletes, name: str) -> None:
    """Leave a checkpoint to the policies again."""
    root.delete(_PIN_PREFIX + name)


# -- roots --------------------------------------------------------------------------------------------------------


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

    def __init__(self, root: str | os.PathLike[str] | Root, template: str | None = None) -> None:
        """
        Open a root for reading.

        Args:
            root: a path, a URL, or a root.
            template: list only the checkpoints of these names, as `Checkpointer` does: "step-{step}". By default every
                checkpoint is listed, whatever its name and layout; of single files, those of `torch.save`.

        Raises:
            StateError: the template does not contain the step once.

        """
        self.root = open_root(root, direct=Options().direct_io)
        self._lists_all = template is None
        if template is not None:
            self.naming = Naming(template)

    @cached_property
    def naming(self) -> Naming:
        """How the checkpoints of a `Checkpointer` are named here; without a template, guessed from all names."""
        return Naming(guess_template(self.root.places()))

    def __repr__(self) -> str:
        return f"Catalog({self.root.url!r}{'' if self._lists_all else f', {self.naming.template!r}'})"

    def _repr_html_(self) -> str:
        rows = [(each.name, each.status, format_size(each.nbytes), each.saved_at or "") for each in self]
        return html_table(repr(self), rows)

    def __iter__(self) -> Iterator[Entry]:
        """Read all entries, the highest step first."""
        pins = pinned(self.root)
        names = [
            name
            for name in self.root.places()
            if self.naming.step(name) is not None or (self._lists_all and not name.startswith("."))
        ]
        looks: list[Callable[[], Entry | None]] = [partial(self._look, name, pins=pins) for name in names]
        if self._lists_all:
            files = (info.name for info in with_any_names(self.root).list() if info.name.endswith(_FILE_SUFFIXES))
            names = [name for name in files if not name.startswith(_PIN_PREFIX)]
            looks += [partial(self._look_at_file, name, pins=pins) for name in names]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardkeep-catalog") as threads:
            try:
                entries = threads.map(lambda look: look(), looks)
            except RuntimeError:  # the interpreter is shutting down, and starts no more threads
                entries = (look() for look in looks)
            yield from sorted(filter(None, entries), key=lambda entry: entry.step, reverse=True)

    def entries(self) -> list[Entry]:
        """
        Return all entries, the newest first: by timeline, then by step, and last those that a job has gone back from.

        Empty directories are left out.
        """
        return newest_first(self)

    def latest(self) -> Entry | None:
        """Return the newest committed checkpoint."""
        return next((entry for entry in self.entries() if entry.committed), None)

    def find(self, step: int) -> Entry | None:
        """Return the entry of a step."""
        found = self.get(self.naming.name(step))
        if found is None and self._lists_all:
            found = next((entry for entry in self.entries() if entry.step == step), None)
        return found

    def get(self, name: str) -> Entry | None:
        """Return the entry of a name."""
        pins = pinned(self.root)
        if self._lists_all and name.endswith(_FILE_SUFFIXES) and (file := self._look_at_file(name, pins=pins)):
            return file
        return self._look(name, pins=pins)

    def strangers(self) -> dict[str, str]:
        """Return a few checkpoints whose names do not match the template, each with a template that would match."""
        others = [
            entry.name
            for entry in Catalog(self.root)
            if entry.committed and entry.layout != "torch.save" and self.naming.step(entry.name) is None
        ]
        found = {name: template for name in others if (template := template_of(name))}
        return dict(list(found.items())[:_MAX_STRANGERS])

    def _look(self, name: str, *, pins: set[str]) -> Entry | None:
        store, step = self.root.place(name), self.naming.step(name)
        managed = step is not None
        step = _guess_step(name) if step is None else step
        about = Entry(name=name, step=step, status="committed", pinned=name in pins, managed=managed)
        try:
            try:
                record = record_in(store)
            except BlobNotFound:
                return self._without_record(store, about)
            step = record.step if self._lists_all and record.step is not None else step
            return entry_from_record(name, step, record, pinned=about.pinned, managed=managed)
        except CheckpointError as exc:
            return replace(about, status="damaged", reason=exc.message, problem=exc)

    def _look_at_file(self, name: str, *, pins: set[str]) -> Entry | None:
        """Describe a file of `torch.save`; None for a file of something else, and for a directory."""
        about = Entry(
            name=name,
            step=_guess_step(name),
            status="committed",
            layout="torch.save",
            pinned=name in pins,
            managed=False,
        )
        try:
            file = find_torch_file(self.root.place(name))
        except (UnsupportedLeaf, UnsupportedVersion):  # no dict of names, or from before torch 1.6
            return None
        except CheckpointError as exc:
            return replace(about, status="damaged", reason=exc.message, problem=exc)
        return None if file is None else _of_another_program(file.record, about)

    def _without_record(self, store: Store, about: Entry) -> Entry | None:
        """Describe a directory without a commit record; None for one that has nothing to do with checkpoints."""
        infos = {info.name: info for info in store.list()}
        if self._lists_all and METADATA_NAME not in infos:
            if (model := find_safetensors(store)) is not None:
                return _of_another_program(model.record, replace(about, layout="safetensors"))
            if "pytorch_model" in " ".join(infos) and (model := find_torch_model(store)) is not None:
                return _of_another_program(model.record, replace(about, layout="torch.save"))
        if not infos or (self._lists_all and not any(map(_is_of_save, infos))):
            return None  # a directory of something else
        return _of_torch_or_unfinished(store, infos, about)


def _of_another_program(record: Record, about: Entry) -> Entry:
    step = about.step if record.step is None else record.step
    found = entry_from_record(about.name, step, record, pinned=about.pinned, managed=False)
    return replace(found, layout=about.layout, record=None)


def _guess_step(name: str) -> int:
    """Return the step in a name that another program chose; -1 if there is none."""
    found = _STEP_IN_NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _is_of_save(name: str) -> bool:
    """Return whether a file is written by saves of a checkpoint, and by little else."""
    return name == REMOVING_NAME or save_id_of(name) is not None or is_data(name) or is_metadata(name)


def _of_torch_or_unfinished(store: Store, infos: Mapping[str, BlobInfo], entry: Entry) -> Entry:
    metadata = infos.get(METADATA_NAME)
    if metadata is not None and metadata.nbytes:
        ours = [info.nbytes for info in infos.values() if is_data(info.name) or is_metadata(info.name)]
        when = datetime.fromtimestamp(metadata.modified_s, timezone.utc)
        return replace(entry, layout="torch", saved_at=when, nbytes=sum(ours))
    if metadata is not None:
        return replace(entry, status="damaged", reason=f"{METADATA_NAME} is empty", layout="torch")
    found = orphans.survey(store)
    reasons = (
        (found.living, f"process {found.living.pid if found.living else 0} is writing it"),
        (found.elsewhere, "a process of another machine may be writing it"),
        (REMOVING_NAME in infos, "its removal was cut short"),
        (found.dead, "its writer is gone"),
        (True, "it has no commit record"),
    )
    reason = next(text for holds, text in reasons if holds)
    return replace(entry, status="unfinished", reason=reason, nbytes=sum(info.nbytes for info in infos.values()))


class Tiers:
    """
    The roots of a Checkpointer: the near one, which it saves to, and perhaps a far one, which it promotes to.

    A promoted checkpoint is the same save in both. Of one step the newest save counts, and of one save the near copy.
    """

    def __init__(self, near: Catalog, far: Catalog | None = None) -> None:
        self.near = near
        self.all = [near] if far is None else [near, far]
        """The catalogs, by tier."""
        self.urls = [each.root.url for each in self.all]

    def entries(self) -> list[Entry]:
        """Return the entries of all roots: of one step the newest save first, and of one save the near copy first."""
        return merge_tiers(replace(entry, tier=tier) for tier, each in enumerate(self.all) for entry in each.entries())

    def find(self, step: int) -> list[Entry]:
        """Return the entries of a step, in the same order."""
        found = [(tier, each.find(step)) for tier, each in enumerate(self.all)]
        return merge_tiers(replace(entry, tier=tier) for tier, entry in found if entry is not None)

    def pin(self, name: str) -> None:
        """Pin a checkpoint in all roots; one that is promoted later stays pinned."""
        for each in self.all:
            pin(each.root, name)

    def unpin(self, name: str) -> None:
        """Unpin a checkpoint in all roots."""
        for each in self.all:
            unpin(each.root, name)


def merge_tiers(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries of several roots: unreadable ones, then the newest save first, and of one save the near copy."""
    # An unreadable entry comes first, so that it is reported before another copy is taken.
    return sorted(entries, key=lambda entry: (entry.problem is not None, entry.save_order, -entry.tier), reverse=True)


def newest_saves(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out committed saves that a newer committed save of the same step supersedes."""
    known = list(entries)
    newest: dict[str, tuple[int, str]] = {}
    for entry in known:
        if entry.committed:
            newest[entry.name] = max(entry.save_order, newest.get(entry.name, (-1, "")))
    return [entry for entry in known if not entry.committed or entry.save_order == newest[entry.name]]
