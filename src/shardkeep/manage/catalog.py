"""
The checkpoints of a root, found by their commit records alone: no index, data file or torch is needed.

A `Checkpointer` manages the checkpoints whose names its template gives. `Catalog` without a template lists all others, too.
The commit records are authoritative. The `latest` file of a root is for people and scripts, and says where the search for
the newest checkpoint begins: see `Walk`.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property, lru_cache, partial
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple, TypeVar, cast

from shardkeep import errors
from shardkeep.display import format_size, html_table
from shardkeep.engine.safetensors_source import find_safetensors, single_file
from shardkeep.engine.torch_file_source import find_torch_file, find_torch_model
from shardkeep.format.record import Record
from shardkeep.layouts import orphans
from shardkeep.layouts.native import record_in, save_id_of
from shardkeep.layouts.torch import METADATA_NAME, is_data, is_metadata
from shardkeep.manage.entry import Entry, current_branch_first, merge_tiers, newest_first, require_readable, with_record
from shardkeep.options import Options
from shardkeep.storage import base
from shardkeep.storage.resolve import open_root

T = TypeVar("T")
R = TypeVar("R")

_TEMPLATE = re.compile(r"([^{}]*)\{step(?::(?:0([1-9]\d*))?d?)?\}([^{}]*)")
_TEMPLATE_HINT = (
    'a template has the step in it once, as in "step-{step}" or "step-{step:08d}", and otherwise letters, digits, ._-'
)
_MAX_STEP = (1 << 63) - 1
_STEP_IN_NAME = re.compile(
    r"(?:.*(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?)?([0-9]{1,18})(?:\.\w+)?", re.IGNORECASE
)
"""Names by which other programs give a step: checkpoint-500, iter_0000200, epoch=3-step=300.ckpt."""
_FILE_SUFFIXES = (".ckpt", ".pt", ".pth")  # of files of `torch.save` that are listed. Files named .bin hold anything
DEFAULT_TEMPLATE = "step-{step}"
_PIN_PREFIX = "pin."
LATEST_NAME = "latest"
_MAX_NBYTES = 4096  # of the file `latest`
_THREADS = 16  # how many records are read at a time: most of that time is spent waiting for the disk or the network
_AT_ONCE = 32  # items that a thread takes at a time: small files take longer to hand out one by one than to read
_MAX_STRANGERS = 3


class Naming:
    """Maps steps to names and names to steps, by a template such as "step-{step}" or "ckpt_{step:08d}"."""

    def __init__(self, template: str) -> None:
        """Raise `StateError` if the template does not contain the step once, or gives names that no store accepts."""
        self.template = template
        found = _TEMPLATE.fullmatch(template) if isinstance(template, str) else None
        if found is None or not base.is_name(template.format(step=_MAX_STEP)):
            raise errors.StateError(f"template is {template!r}", hint=_TEMPLATE_HINT)
        before, width, after = found.groups(default="1")
        digits = f"[0-9]{{{width}}}|[1-9][0-9]{{{width},}}"  # as the template writes a step, and not otherwise
        self._pattern = re.compile(f"{re.escape(before)}({digits}){re.escape(after)}")

    def name(self, step: int) -> str:
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        return _step_in(self._pattern, name)


@lru_cache(1 << 14)  # because a root is listed again and again
def _step_in(pattern: re.Pattern[str], name: str) -> int | None:
    found = pattern.fullmatch(name)
    return step if found and (step := int(found[1])) <= _MAX_STEP else None


class Listing(NamedTuple):
    """The names of what may be a checkpoint, without reading it."""

    by_step: dict[int, str]
    """Those in which the template finds a step."""
    steps: list[int]
    """In ascending order."""
    others: list[str]
    """Those without a step, where all are listed."""
    blobs: Callable[[], Sequence[str]]

    def names(self) -> list[str]:
        return [*self.by_step.values(), *self.others]

    def pins(self) -> set[str]:
        """Return the names that are pinned."""
        return {name.removeprefix(_PIN_PREFIX) for name in self.blobs() if name.startswith(_PIN_PREFIX)}


def template_of(name: str) -> str | None:
    """Guess the template of a name by its last number."""
    found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name)
    if found is None or not base.is_name(name):
        return None
    before, digits, after = found.groups()
    width = f":0{len(digits)}d" if digits.startswith("0") and len(digits) > 1 else ""
    return f"{before}{{step{width}}}{after}"


def guess_template(names: Iterable[str]) -> str:
    """Find the template that most names match; the default one if any name matches that, or if none looks like a step."""
    usual, names = Naming(DEFAULT_TEMPLATE), list(names)
    if any(usual.step(name) is not None for name in names):
        return DEFAULT_TEMPLATE
    known = [name for name in names if _STEP_IN_NAME.fullmatch(name)]  # not exp-1, or llama-7b
    templates = Counter(found for name in known if (found := template_of(name)))
    if not templates:
        return DEFAULT_TEMPLATE
    likely = [template for template, _ in templates.most_common(5)]
    return max(likely, key=lambda template: sum(Naming(template).step(name) is not None for name in known))


def is_pinned(root: base.ReadableStore, name: str) -> bool:
    return base.is_name(_PIN_PREFIX + name) and base.exists(root, _PIN_PREFIX + name)


def pin(root: base.Store, name: str) -> None:
    if not base.is_name(_PIN_PREFIX + name):
        raise errors.StateError(
            f"{name!r} cannot be pinned: it has other characters than letters, digits, ._-",
            hint="no rule deletes it: rules are for names such as step-10",
        )
    root.put(_PIN_PREFIX + name, b"", replace=True)


def unpin(root: base.Store, name: str) -> None:
    root.delete(_PIN_PREFIX + name)


def map_in_threads(work: Callable[[T], R], items: Sequence[T], threads: int, name: str) -> Iterator[R]:
    """Apply `work` to all items, on so many threads; on this one if the interpreter shuts down, and starts no more."""
    if len(items) < 2:
        yield from map(work, items)
        return
    many = min(_AT_ONCE, -(-len(items) // (4 * threads)))

    def some(at: int) -> list[R]:
        return list(map(work, items[at : at + many]))

    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        try:
            done = pool.map(some, range(0, len(items), many))
        except RuntimeError:
            done = map(some, range(0, len(items), many))
        yield from chain.from_iterable(done)


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

    def __init__(self, root: str | os.PathLike[str] | base.Root, template: str | None = None) -> None:
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
        """How a `Checkpointer` names checkpoints here; without a template, guessed from all names."""
        return Naming(guess_template(base.names_of(self.root).places))

    def __repr__(self) -> str:
        return f"Catalog({self.root.url!r}{'' if self._lists_all else f', {self.naming.template!r}'})"

    def _repr_html_(self) -> str:
        rows = [(each.name, each.status, format_size(each.nbytes), each.saved_at or "") for each in self]
        return html_table(repr(self), rows)

    def __iter__(self) -> Iterator[Entry]:
        """Read all entries, the highest step first."""
        found = self.listing()
        yield from sorted(self.read(found.names(), found.pins()), key=lambda entry: entry.step, reverse=True)

    def listing(self) -> Listing:
        """List the root, and find the steps in its names."""
        names = base.names_of(self.root, base.with_any_names(self.root).list if self._lists_all else None)
        if "naming" not in self.__dict__:
            self.naming = names.derived.get(Naming) or Naming(guess_template(names.places))
            names.derived[Naming] = self.naming
        derived_as = self.naming.template, self._lists_all
        if derived_as not in names.derived:
            names.derived[derived_as] = self._listing(names)
        return cast("Listing", names.derived[derived_as])

    def _listing(self, names: base.Names) -> Listing:
        if not self._lists_all:
            by_step = {step: name for name in names.places if (step := self.naming.step(name)) is not None}
            return Listing(by_step, sorted(by_step), [], names.blobs)
        files = [name for name in names.blobs() if name.endswith(_FILE_SUFFIXES) and not name.startswith(_PIN_PREFIX)]
        every = [*(name for name in names.places if not name.startswith(".")), *files]
        by_step = {step: name for name in every if (step := self.naming.step(name)) is not None}
        return Listing(by_step, sorted(by_step), [n for n in every if self.naming.step(n) is None], names.blobs)

    def read(self, names: Iterable[str], pins: Collection[str] | None = None) -> list[Entry]:
        """Read the entries of these names, without empty directories; `pins` are names that are pinned, if that is known."""
        found = map_in_threads(partial(self.get, pins=pins), list(names), _THREADS, "shardkeep-catalog")
        return [entry for entry in found if entry is not None]

    def entries(self) -> list[Entry]:
        """Return all entries, the newest first: by timeline, then by step; last those that a job went back from."""
        return newest_first(self)

    def latest(self) -> Entry | None:
        """Return the newest committed checkpoint; reads few others."""
        return next((entry for entry in Walk([self]).newest_first() if entry.committed), None)

    def find(self, step: int) -> Entry | None:
        found = self.get(self.naming.name(step))
        if found is None and self._lists_all:
            found = next((entry for entry in self.entries() if entry.step == step), None)
        return found

    def hinted(self) -> Entry | None:
        """Return the committed checkpoint that the file `latest` names, if the template gives its name."""
        with suppress(errors.CheckpointError, UnicodeDecodeError):
            name = self.root.get(LATEST_NAME, limit=_MAX_NBYTES).decode().strip()
            step = self.naming.step(name)
            entry = None if step is None else self.get(name)
            if entry is not None and entry.committed and entry.save_id and entry.step == step:
                return entry
        return None

    def strangers(self) -> dict[str, str]:
        """Return a few checkpoints whose names do not match the template, each with a template that would match."""
        others = [
            entry.name
            for entry in Catalog(self.root)
            if entry.committed and entry.layout != "torch.save" and self.naming.step(entry.name) is None
        ]
        found = {name: template for name in others if (template := template_of(name))}
        return dict(list(found.items())[:_MAX_STRANGERS])

    def get(self, name: str, pins: Collection[str] | None = None) -> Entry | None:
        """Read the entry of this name; None for an empty directory. `pins` are names that are pinned, if that is known."""
        store, step = self.root.place(name), self.naming.step(name)
        about = Entry(
            name=name,
            step=_guess_step(name) if step is None else step,
            status="committed",
            pinned=is_pinned(self.root, name) if pins is None else name in pins,
            managed=step is not None,
        )
        try:
            if self._lists_all and name.endswith(_FILE_SUFFIXES) and single_file(store, _FILE_SUFFIXES) is not None:
                about = replace(about, step=_guess_step(name), layout="torch.save", managed=False)
                # They are raised for anything but a dict of names, and for files from before torch 1.6.
                with suppress(errors.UnsupportedLeaf, errors.UnsupportedVersion):
                    return (file := find_torch_file(store)) and _of_another_program(file.record, about)
                return None
            try:
                record = record_in(store)
            except errors.BlobNotFound:
                return self._without_record(store, about)
            return with_record(_at_step_of(record, about) if self._lists_all else about, record)
        except errors.CheckpointError as exc:
            return replace(about, status="damaged", reason=exc.message, problem=exc)

    def _without_record(self, store: base.Store, about: Entry) -> Entry | None:
        """Describe a directory without a commit record; None for one that has nothing to do with checkpoints."""
        infos = {info.name: info for info in store.list()}
        if self._lists_all and METADATA_NAME not in infos:
            if (model := find_safetensors(store)) is not None:
                return _of_another_program(model.record, replace(about, layout="safetensors"))
            if "pytorch_model" in " ".join(infos) and (model := find_torch_model(store)) is not None:
                return _of_another_program(model.record, replace(about, layout="torch.save"))
        ours = (
            base.REMOVING_NAME in infos,
            *(save_id_of(each) or is_data(each) or is_metadata(each) for each in infos),
        )
        if not infos or (self._lists_all and not any(ours)):
            return None  # a directory of something else
        return _of_torch_or_unfinished(store, infos, about)


def _at_step_of(record: Record, about: Entry) -> Entry:
    return about if record.step is None else replace(about, step=record.step)


def _of_another_program(record: Record, about: Entry) -> Entry:
    found = with_record(_at_step_of(record, about), record)
    return replace(found, layout=about.layout, save_id="", record=None, managed=False)


def _guess_step(name: str) -> int:
    found = _STEP_IN_NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _of_torch_or_unfinished(store: base.Store, infos: Mapping[str, base.BlobInfo], entry: Entry) -> Entry:
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
        (base.REMOVING_NAME in infos, "its removal was cut short"),
        (found.dead, "its writer is gone"),
        (True, "it has no commit record"),
    )
    reason = next(text for holds, text in reasons if holds)
    return replace(entry, status="unfinished", reason=reason, nbytes=sum(info.nbytes for info in infos.values()))


class Walk:
    """
    Goes through the entries of roots, the newest first, and reads only those of the highest steps and as many as the caller takes.

    A `Checkpointer` keeps this promise for it: what is newer than the checkpoint that the file `latest` of a root names has
    a higher step. A job that is about to break it, because it goes back to a lower step, deletes the file first. Where
    `latest` names no committed checkpoint, all are read. An unreadable entry counts as of the newest timeline: otherwise it
    could silently be passed over.
    """

    def __init__(self, catalogs: Sequence[Catalog]) -> None:
        self._catalogs = catalogs
        self.roots = [each.root.url for each in catalogs]
        self._unread: list[tuple[Listing, int]] = []  # and how many of its steps, the lowest ones, are not read
        self._read: dict[int, list[Entry]] = {}  # what is not yielded yet, by step
        self._steps: list[int] = []  # a heap of those, negative
        self._done: list[Entry] = []
        for tier, each in enumerate(catalogs):
            hint, listing = each.hinted(), each.listing()
            steps = listing.steps
            above = 0 if hint is None else bisect_right(steps, hint.step)
            self._unread.append((listing, 0 if hint is None else bisect_left(steps, hint.step)))
            now = [*listing.others, *(listing.by_step[step] for step in steps[above:])]
            for entry in each.read(now) + ([] if hint is None else [hint]):
                self._add(entry, tier)
        self.looked_at = [entry for found in self._read.values() for entry in found]
        """What may be of the newest timeline: it was read at once. If one of these cannot be read, the order is not known."""
        self.newest_timeline: int = max((entry.timeline for entry in self.looked_at), default=0)

    def by_step(self) -> Iterator[Entry]:
        """Yield all entries, the highest step first; of one step the newest save, and of one save the near copy."""
        at = 0
        while at < len(self._done) or self._steps or any(left for _, left in self._unread):
            if at == len(self._done):
                self._advance()
            else:
                yield self._done[at]
                at += 1

    def newest_first(self) -> Iterator[Entry]:
        """Yield all entries: first the current branch, the highest step first; then abandoned ones."""
        return current_branch_first(self.by_step(), self.newest_timeline)

    def readable(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Leave out unfinished saves; raise `StorageError` where a record cannot be read at the moment, and may be the newest."""
        for entry in self.looked_at:
            require_readable(entry, self.roots)
        for entry in entries:
            if entry.status != "unfinished":
                yield require_readable(entry, self.roots)

    def _advance(self) -> None:
        highest = [listing.steps[left - 1] if left else -math.inf for listing, left in self._unread]
        step = max(*highest, -self._steps[0] if self._steps else -math.inf)
        for tier, (listing, left) in enumerate(self._unread):
            if highest[tier] == step:
                self._unread[tier] = listing, left - 1
                for entry in self._catalogs[tier].read([listing.by_step[listing.steps[left - 1]]]):
                    self._add(entry, tier)  # its record may say that its step is another
        newest, found = self.newest_timeline, list[Entry]()
        while self._steps and -self._steps[0] >= step:
            found += self._read.pop(-heappop(self._steps))
        self._done += merge_tiers(
            replace(each, timeline=newest) if each.problem is not None else each for each in found
        )

    def _add(self, entry: Entry, tier: int) -> None:
        if entry.step not in self._read:
            self._read[entry.step] = []
            heappush(self._steps, -entry.step)
        self._read[entry.step].append(replace(entry, tier=tier))


class KnownEntries:
    """A cache of a root's entries: a committed checkpoint is read once, and again before something is deleted because of it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._found: dict[str, Entry] = {}
        self._uncertain: dict[str, Entry] = {}  # may be committed by now, and are read at each look
        self._pins: set[str] = set()
        self.fresh: set[str] = set()  # the names that were read since the last look began
        self.empty: list[str] = []  # directories without anything in them, at the last look

    def look(self) -> list[Entry]:
        """List the root and read what is not known to be committed; return all entries, the newest first."""
        listing = self._catalog.listing()
        names, pins = {*listing.names()}, listing.pins()
        for name in self._found.keys() - names:
            self.forget(name)
        for name in (self._pins ^ pins) & self._found.keys():
            self._found[name] = replace(self._found[name], pinned=name in pins)
        self._pins, self.fresh, self._uncertain = pins, set(), {}
        unknown = names - self._found.keys()
        entries = self.read_again(unknown)
        self.empty = sorted(unknown - self._found.keys() - self._uncertain.keys())
        return entries

    def read_again(self, names: Collection[str]) -> list[Entry]:
        self.fresh.update(names)
        for name in names:
            self.forget(name)
        # Without records: they name all files, and some roots have thousands of checkpoints of thousands of files.
        for entry in self._catalog.read(names, self._pins):
            known = self._found if entry.committed and entry.save_id else self._uncertain
            known[entry.name] = replace(entry, record=None)
        return newest_first([*self._found.values(), *self._uncertain.values()])

    def forget(self, name: str) -> None:
        self._found.pop(name, None)
        self._uncertain.pop(name, None)


class Tiers:
    """
    The roots of a Checkpointer: the near one, which it saves to, and perhaps a far one, which it promotes to.

    A promoted checkpoint is the same save in both. Of one step the newest save counts, and of one save the near copy.
    """

    def __init__(self, near: Catalog, far: Catalog | None = None) -> None:
        self.near = near
        self.all = [near] if far is None else [near, far]  # the catalogs, by tier
        self.urls = [each.root.url for each in self.all]

    def entries(self) -> list[Entry]:
        return merge_tiers(replace(entry, tier=tier) for tier, each in enumerate(self.all) for entry in each.entries())

    def find(self, step: int) -> list[Entry]:
        """Return the entries of a step: the newest save first, and of one save the near copy first."""
        found = [(tier, each.find(step)) for tier, each in enumerate(self.all)]
        return merge_tiers(replace(entry, tier=tier) for tier, entry in found if entry is not None)

    def pin(self, name: str) -> None:
        """Pin a checkpoint in all roots; one that is promoted later stays pinned."""
        for each in self.all:
            pin(each.root, name)

    def unpin(self, name: str) -> None:
        for each in self.all:
            unpin(each.root, name)
