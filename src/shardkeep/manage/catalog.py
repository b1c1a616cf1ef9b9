"""One checkpoint of a root, as its commit record tells of it: what policies and commands decide by."""

from __future__ import annotations

import math
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import islice
from typing import Any, Literal

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, StateError, StorageError
from shardkeep.format.record import Record
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts.native import record_in
from shardkeep.layouts.torch import METADATA_NAME, is_data, is_metadata
from shardkeep.options import Options
from shardkeep.storage.base import REMOVING_NAME, Deletes, Gets, Lists, Puts, Root, Store, is_commit_marker, is_name
from shardkeep.storage.resolve import open_root

METRICS = "metrics"
"""Where in a record's meta the metrics of its step are."""
TIMELINE = "timeline"
"""Where in a record's meta it says which attempt at its steps it belongs to; not there: the first."""
BEGAN_AFTER = "timeline_began_after"
"""Where in a record's meta it says after which timeline and step its own began; not there for the first."""

_NOT_FINITE = ("nan", "inf", "-inf")

Status = Literal["committed", "unfinished", "damaged"]
Layout = Literal["native", "torch"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint of a root, or what is left of one."""

    name: str
    """Of its place."""
    step: int
    status: Status
    """committed: it exists. unfinished: it is being written, or never was to the end. damaged: its record is unreadable."""
    reason: str = ""
    """Why it is not committed."""
    layout: Layout | None = None
    saved_at: datetime | None = None
    """By the clock of the rank that committed it, or of the store; always with its time zone."""
    nbytes: int = 0
    """Of all files that belong to it; 0 where that is not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    timeline: int = 0
    """A job that goes back to an earlier step and saves other steps from there begins a new one; higher is newer."""
    began_after: tuple[int, int] | None = None
    """Which timeline and step its own timeline began after."""
    record: Record | None = field(default=None, repr=False)
    """Of a native checkpoint."""
    problem: CheckpointError | None = field(default=None, repr=False)
    """What reading the record of a damaged one raised."""
    tier: int = 0
    """Of a Checkpointer with two roots: 0 in the near one, 1 in the one that is promoted to."""

    @property
    def committed(self) -> bool:
        """Whether it exists."""
        return self.status == "committed"

    @property
    def age(self) -> tuple[int, int]:
        """What checkpoints are ordered by, the newest last: clocks have no say in it."""
        return self.timeline, self.step


def entry_from_record(name: str, step: int, record: Record, *, pinned: bool) -> Entry:
    """Say what a commit record says."""
    return Entry(
        name=name,
        step=step,
        status="committed",
        layout="native",
        saved_at=_parse_time(record.saved_at),
        nbytes=record.stored_nbytes,
        metrics=metrics_in(record.meta),
        pinned=pinned,
        timeline=timeline_in(record.meta),
        began_after=began_after_in(record.meta),
        record=record,
    )


def build_meta(
    meta: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    timeline: int,
    began_after: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """
    Put metrics, and the timeline, to the user's own meta.

    Raises:
        StateError: the user's own has a key of ours, or a metric is no number.

    """
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
    """Return the metrics of a record's meta; what is no number is left out."""
    found = meta.get(METRICS)
    if not isinstance(found, dict):
        return {}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float) or value in _NOT_FINITE}


def timeline_in(meta: Mapping[str, Any]) -> int:
    """Return the timeline of a record's meta."""
    found = meta.get(TIMELINE)
    return found if type(found) is int and found > 0 else 0


def began_after_in(meta: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return which timeline and step the timeline of a record's meta began after."""
    found = meta.get(BEGAN_AFTER)
    if not isinstance(found, list) or len(found) != 2 or any(type(each) is not int or each < 0 for each in found):
        return None
    return found[0], found[1]


def _stored_metric(name: Any, value: Any) -> float | str:
    try:
        number = float(value)  # also a tensor or an array of one element
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise StateError(
            f"metric {name!r} is {_shown_metric(value)}, not a number", hint="give one number a metric"
        ) from exc
    return number if math.isfinite(number) else str(number)  # JSON has no word for the others


def _shown_metric(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # a whole number of thousands of digits
        return f"a {type(value).__name__}"


def _parse_time(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


# Which checkpoints come before which: those that led to the newest one first, then those of pasts that were given up.
#
# A job that goes back to step 100 while 150 and 200 exist, and saves 110, leaves them behind: whoever cannot have 110
# wants 100, and not 200. Each record of a timeline says which step of which timeline it began after.


def newest_first(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries: the newest timeline, then what it came from, each by step; then all that was given up."""
    known = list(entries)
    reach = _reach(known)

    def order(entry: Entry) -> tuple[bool, int, int, str]:
        return entry.step <= reach.get(entry.timeline, -1), entry.timeline, entry.step, entry.name

    return sorted(known, key=order, reverse=True)


def restore_order(entries: Iterable[Entry]) -> list[Entry]:
    """
    Order entries for a restore: one whose record cannot be read may be of any timeline, and counts as of the newest.

    To take it for an old one would be to pass over what may be the newest checkpoint without a word.
    """
    known = list(entries)
    newest = max((entry.timeline for entry in known), default=0)
    return newest_first(replace(entry, timeline=newest) if entry.problem is not None else entry for entry in known)


def require_readable(entries: Iterable[Entry], roots: Sequence[str]) -> list[Entry]:
    """
    Return entries, each of which was read or is damaged; `roots` are what their roots are called, the nearest first.

    Raises:
        StorageError: the store does not give one of the records now. It may be whole, of any timeline, and the newest: to
            pass over it would be to lose what was trained since, so that somebody has to say so, by moving it away.

    """
    known = list(entries)
    for entry in known:
        problem = entry.problem
        if isinstance(problem, StorageError) and not isinstance(problem, BlobNotFound):
            where = f"{roots[entry.tier]}/{entry.name}"
            ways = [problem.hint] if problem.hint else []
            ways.append("try again when the store answers")
            ways.append(f"to go on without this checkpoint, move {where} out of the root")
            if entry.tier:
                ways.append("to go on without the far root, leave promote_to out")
            raise StorageError(
                f"{where} cannot be looked at now, and may be the newest checkpoint: {problem.message}",
                hint="; ".join(ways),
                **problem.details,
            ) from problem
    return known


def began_after(entries: Iterable[Entry], timeline: int) -> tuple[int, int] | None:
    """Say after which timeline and step a timeline began, if one of its records tells."""
    return next((entry.began_after for entry in entries if entry.timeline == timeline and entry.began_after), None)


def _reach(entries: list[Entry]) -> dict[int, float]:
    """Up to which step each timeline led to the newest one; those that did not are not there."""
    timeline: int = max((entry.timeline for entry in entries), default=0)
    step = math.inf
    reach: dict[int, float] = {}
    while timeline not in reach:
        reach[timeline] = step
        origin = began_after(entries, timeline)
        if origin is not None and origin[0] < timeline:
            timeline, step = origin[0], min(step, origin[1])
    return reach


# What the checkpoint of a step is called, and which step a name is of.

_STEP_SPEC = re.compile(r"(0[1-9]\d*)?d?")
_TEMPLATE_HINT = (
    'a template has the step in it once, as in "step-{step}" or "step-{step:08d}", and otherwise letters, digits, ._-'
)
_LARGEST_STEP = (1 << 63) - 1


class Naming:
    """A template with the step in it, used both ways."""

    def __init__(self, template: str) -> None:
        """
        Take a template, like "step-{step}" or "ckpt_{step:08d}".

        Raises:
            StateError: it names no step, or names that no store takes.

        """
        self.template = template
        try:
            parts = list(string.Formatter().parse(template))
        except (ValueError, TypeError) as exc:
            raise StateError(f"template is {template!r}: {exc}", hint=_TEMPLATE_HINT) from exc
        fields = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
        if len(fields) != 1 or fields[0][0] != "step" or fields[0][2] or not _STEP_SPEC.fullmatch(fields[0][1] or ""):
            raise StateError(f"template is {template!r}", hint=_TEMPLATE_HINT)
        at = next(row for row, part in enumerate(parts) if part[1] is not None)
        before = "".join(text for text, *_ in parts[: at + 1])
        after = "".join(text for text, *_ in parts[at + 1 :])
        self._pattern = re.compile(f"{re.escape(before)}([0-9]{{1,251}}){re.escape(after)}")
        if not is_name(template.format(step=_LARGEST_STEP)):
            raise StateError(f"template is {template!r}", hint=_TEMPLATE_HINT)

    def __repr__(self) -> str:
        return f"Naming({self.template!r})"

    def name(self, step: int) -> str:
        """Name the checkpoint of a step."""
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        """Tell which step a name is of; None for a name that no step has."""
        found = self._pattern.fullmatch(name)
        step = int(found[1]) if found else -1
        return step if 0 <= step <= _LARGEST_STEP and self.name(step) == name else None


def template_of(name: str) -> str | None:
    """Guess the template of a name, by its last number."""
    found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name)
    if found is None:
        return None
    before, digits, after = found.groups()
    width = f":0{len(digits)}d" if digits.startswith("0") and len(digits) > 1 else ""
    return f"{before}{{step{width}}}{after}"


# Checkpoints that are kept whatever a policy says: each has a blob of its own in the root.

_PIN_PREFIX = "pin."
_MAX_PIN_NBYTES = 4096


def pinned(root: Lists) -> set[str]:
    """Name the places that are pinned."""
    return {info.name.removeprefix(_PIN_PREFIX) for info in root.list() if info.name.startswith(_PIN_PREFIX)}


def is_pinned(root: Gets, name: str) -> bool:
    """Say whether a place is pinned at this moment."""
    try:
        root.get(_PIN_PREFIX + name, limit=_MAX_PIN_NBYTES)
    except BlobNotFound:
        return False
    except MalformedFile:  # somebody has written something into it
        return True
    return True


def pin(root: Puts, name: str) -> None:
    """Keep a place."""
    root.put(_PIN_PREFIX + name, b"", replace=True)


def unpin(root: Deletes, name: str) -> None:
    """Leave a place to the policies again."""
    root.delete(_PIN_PREFIX + name)


# Which checkpoints a root has, by their commit records alone: no index, no data file and no torch is needed for that.
#
# The records are the truth. What else a root says (`latest`) is a hint that nobody here listens to.

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
            if any(is_commit_marker(info.name) for info in self.root.place(name).list()):
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
            return entry_from_record(name, step, record, pinned=name in pins)
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


# The roots of a Checkpointer: the near one, which it saves to, and perhaps a far one, which checkpoints are promoted
# to.
#
# Both are ordinary roots. A promoted checkpoint is the same save in both: of one step the newest save counts, and of
# one
# save the near copy.

NEAR, FAR = 0, 1


class Tiers:
    """One root, or two."""

    def __init__(self, near: Catalog, far: Catalog | None = None) -> None:
        """Look at the near root, and at the far one if there is one."""
        self.near = near
        self.far = far

    def __repr__(self) -> str:
        return f"Tiers({', '.join(repr(each) for each in self.all)})"

    @property
    def all(self) -> list[Catalog]:
        """The catalogues, the nearest first."""
        return [self.near] if self.far is None else [self.near, self.far]

    @property
    def urls(self) -> list[str]:
        """What the roots are called, the nearest first."""
        return [each.root.url for each in self.all]

    @property
    def where(self) -> str:
        """The roots, in messages."""
        return " and ".join(self.urls)

    def entries(self) -> list[Entry]:
        """Return what there is: of one step the newest save first, and of one save the near copy."""
        return merge_tiers(entry for tier, each in enumerate(self.all) for entry in _with_tier(tier, each.entries()))

    def find(self, step: int) -> list[Entry]:
        """Return what there is of a step, in the same order."""
        found = [(tier, each.find(step)) for tier, each in enumerate(self.all)]
        return merge_tiers(entry for tier, each in found if each is not None for entry in _with_tier(tier, [each]))

    def pin(self, name: str) -> None:
        """Pin a place in all roots: one that is promoted later is pinned, too."""
        for each in self.all:
            pin(each.root, name)

    def unpin(self, name: str) -> None:
        """Unpin a place in all roots."""
        for each in self.all:
            unpin(each.root, name)


def merge_tiers(entries: Iterable[Entry]) -> list[Entry]:
    """Order entries of several roots, the newest save first, and of one save the near copy; unreadable ones before."""
    # What cannot be read is told of before another copy is taken.
    return sorted(entries, key=lambda entry: (entry.problem is not None, save_order(entry), -entry.tier), reverse=True)


def newest_saves(entries: Iterable[Entry]) -> list[Entry]:
    """Leave out committed saves of which there is a newer one of the same step, which will take their place."""
    known = list(entries)
    newest: dict[str, tuple[int, str]] = {}
    for entry in known:
        if entry.committed:
            newest[entry.name] = max(save_order(entry), newest.get(entry.name, (-1, "")))
    return [entry for entry in known if not entry.committed or save_order(entry) == newest[entry.name]]


def one_per_step(entries: Iterable[Entry]) -> list[Entry]:
    """Return the first committed entry of each step."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.committed:
            found.setdefault(entry.name, entry)
    return list(found.values())


def save_order(entry: Entry) -> tuple[int, str]:
    """Say what tells saves of one step apart, the newest last: ids of saves sort by time."""
    return entry.timeline, "" if entry.record is None else entry.record.save_id


def same_save(one: Entry, other: Entry) -> bool:
    """Tell whether two entries are copies of one save."""
    return (
        one.record is not None
        and other.record is not None
        and (one.name, one.record.save_id) == (other.name, other.record.save_id)
    )


def _with_tier(tier: int, entries: Iterable[Entry]) -> list[Entry]:
    return [replace(entry, tier=tier) for entry in entries] if tier else list(entries)


def common_problem(entries: Iterable[Entry]) -> CheckpointError | None:
    """Return why none of these can be read, where none can."""
    known = list(entries)
    if any(entry.problem is None for entry in known):
        return None
    return next((entry.problem for entry in known), None)
