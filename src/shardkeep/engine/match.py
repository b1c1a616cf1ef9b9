"""
Match a state with a checkpoint, on one rank and then on all. Nothing is read or changed here.

A key is missing if a rank's state has it and the checkpoint does not, and unexpected if no rank's state has it.
"""

from __future__ import annotations

import enum
import logging
import numbers
import re
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from shardkeep.display import format_count
from shardkeep.dist.world import World
from shardkeep.engine.load_session import MatchedState
from shardkeep.engine.reader import Source
from shardkeep.errors import StateError, StateMismatch
from shardkeep.format.boxes import widen
from shardkeep.format.dtypes import by_code
from shardkeep.format.index import Index
from shardkeep.format.values import EnumRef, Node, decode_tree, decode_value, leaf_keys, part_name, tree_leaves
from shardkeep.plan.load_plan import tensor_nbytes
from shardkeep.state import patterns
from shardkeep.state.describe import Description, describe
from shardkeep.state.flatten import refill
from shardkeep.state.leaves import needs_memory
from shardkeep.state.objects import Objects, check_same_objects, is_tensor_or_object
from shardkeep.state.stored import UNFILLED, StoredState, Template

log = logging.getLogger("shardkeep")

_NUMBERED_STATE = re.compile(r"(.+)\.state\.\d+\.\w+")
"""Optimizer state under the number of its parameter, as `optimizer.state_dict()` has it."""

_KINDS = (numbers.Number, np.bool_), (str,), (bytes, bytearray), (list, tuple), (AbstractSet,)
_MOST_LISTED = 50


@dataclass(frozen=True)
class NativeTarget:
    """A state that `sk.load` fills: nested containers, tensors, plain values, modules, optimizers and other objects."""

    state: MutableMapping[str, Any]
    load_filter: LoadFilter
    world: World
    where: str
    allow_pickle: bool
    strict: bool

    @cached_property
    def objects(self) -> Objects:
        return Objects(self.state, rank=self.world.rank, world_size=self.world.size)

    def begin(self) -> tuple[list[str], bool]:
        return self.objects.names, self.objects.communicates

    def check_begun(self, names: list[list[str]]) -> None:
        check_same_objects(names)

    def prepare(self, source: Source) -> PreparedLoad:
        """Check the arguments, and ask those objects for their templates that ask no other rank."""
        load_filter = self.load_filter.checked()
        if not self.objects:
            return PreparedLoad(load_filter, None, {}, [])
        rename, asked = patterns.renamer(load_filter.rename), list[str]()

        def renamed(name: str) -> str | None:
            asked.append(name)
            return rename(name)

        stored = StoredState(source.index, load_filter.names(source.index), renamed)
        templates = self.objects.templates(stored, load_filter.selects(), communicating=False)
        return PreparedLoad(load_filter, stored, templates, asked)

    def compare(self, source: Source, prepared: PreparedLoad) -> tuple[MatchedState, bytes]:
        load_filter, stored, templates, asked = prepared
        selected = load_filter.selects()
        if stored is not None:
            templates = templates | self.objects.templates(stored, selected, communicating=True)
        places = {name: template.state for name, template in templates.items()}
        description = describe(self.state, rank=self.world.rank, in_place_of=places, filling=True, selected=selected)
        match = match_state(source.index, description, load_filter, asked)
        # Values must be decoded before any tensor is changed: a value that is refused leaves the state as it was.
        values: dict[str, Any] = {}
        other_kinds: list[str] = []
        for key, row in match.values.items():
            like = description.values[key]
            data = source.index.value_data.raw(row)
            values[key] = decode_value(data, key=key, allow_pickle=self.allow_pickle, like=like)
            other_kinds += compare_kinds(key, like, values[key])
        # So does a container that cannot be changed.
        made = {key: torch.empty(0) for key in match.tensors if needs_memory(description.leaves[key])}
        self._refill(templates, values | made, dry=True)
        matched = MatchedState(source, description, match.tensors, (match, values, templates))
        return matched, msgspec.msgpack.encode(msgspec.structs.replace(match.findings, other_kinds=other_kinds))

    def decide(self, source: Source, found: list[bytes]) -> bytes:
        findings = [msgspec.msgpack.decode(payload, type=RankFindings) for payload in found]
        checked = self.load_filter.checked()
        summary = merge_findings(source.index, findings, checked, strict=self.strict, where=self.where)
        return msgspec.msgpack.encode(summary)

    def place(self, matched: MatchedState, made: dict[str, Any]) -> None:
        match, values, templates = matched.found
        self._refill(templates, values | made)
        self.objects.load(templates, {*match.tensors, *match.values})

    def _refill(self, templates: dict[str, Template], leaves: dict[str, Any], *, dry: bool = False) -> None:
        places = {name: template.state for name, template in templates.items()}
        refill(self.state, leaves, rank=self.world.rank, is_tensor=is_tensor_or_object, in_place_of=places, dry=dry)


class PreparedLoad(NamedTuple):
    """The checked arguments, and what objects that ask no other rank need."""

    load_filter: LoadFilter
    stored: StoredState | None
    templates: dict[str, Template]
    asked: list[str]
    """Names, besides those in the checkpoint, that objects have asked `rename` for."""


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a load fills, as rank 0 sums it up for all ranks; the fields are those of `LoadReport`."""

    missing: list[str]
    unexpected: list[str]
    unmatched: list[str]
    tensors: int
    bytes_filled: int


class RankFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found; sent to rank 0."""

    missing: list[str]
    missing_values: list[str] = []
    """Those of them that are no tensors."""
    mismatched: list[str]
    unused: list[tuple[str, str]]
    """Argument and pattern of patterns that match no name in this rank's state or in the checkpoint."""
    leaves: int
    """Leaves of this rank's state; of these, `selected` are to be loaded, and `tensors` of them are tensors."""
    selected: int
    tensors: int
    other_kinds: list[str] = []
    """Plain values whose kind would change."""
    consumed: bytes
    """A bit for each tensor, then each value, of the checkpoint: whether this rank loads it."""


@dataclass(frozen=True)
class Match:
    tensors: dict[str, int]
    values: dict[str, int]
    cast: dict[str, str]
    findings: RankFindings


@dataclass(frozen=True)
class LoadFilter:
    """The arguments of `load` that choose what is loaded, and how."""

    include: patterns.Patterns = None
    exclude: patterns.Patterns = None
    rename: patterns.Renames = None
    cast: bool | patterns.Patterns = False

    def checked(self) -> LoadFilter:
        """Return the filter with valid arguments, iterators turned into tuples; raise for arguments that make no sense."""
        patterns.renamer(self.rename)
        cast = self.cast if isinstance(self.cast, bool) else patterns.checked_patterns("cast", self.cast)
        include = patterns.checked_patterns("include", self.include)
        exclude = patterns.checked_patterns("exclude", self.exclude)
        return LoadFilter(include, exclude, self.rename, False if cast is None else cast)

    def unused(self, names: list[str]) -> list[tuple[str, str]]:
        """Return the patterns that match none of these names, each with the argument it was given in."""
        cast = None if isinstance(self.cast, bool) else self.cast
        given = (("include", self.include), ("exclude", self.exclude), ("cast", cast))
        return [(argument, each) for argument, several in given for each in patterns.unused_patterns(several, names)]

    def names(self, index: Index) -> tuple[dict[str, int], dict[str, int]]:
        """Return the checkpoint's tensors and values by the names they have in the state."""
        if self.rename is None:
            return index.tensor_rows, index.value_rows
        rename = patterns.renamer(self.rename)
        renamed: tuple[dict[str, int], dict[str, int]] = ({}, {})
        taken: dict[str, str] = {}
        for rows, table in zip((index.tensor_rows, index.value_rows), renamed, strict=True):
            for name, row in rows.items():
                new = rename(name)
                if new is None:
                    continue
                if not isinstance(new, str):
                    raise StateError(f"rename gives {new!r} for {name!r}, expected a name, or None to drop it")
                if new in taken:
                    raise StateMismatch(f"rename gives {taken[new]!r} and {name!r} one name: {new!r}")
                taken[new] = name
                table[new] = row
        return renamed

    def selects(self) -> Callable[[str], bool]:
        return patterns.selector(self.include, self.exclude)


def match_state(index: Index, description: Description, wishes: LoadFilter, asked: list[str]) -> Match:
    """Compare what was selected of one rank's state with the checkpoint; `asked`: names that objects have renamed."""
    tensor_rows, value_rows = wishes.names(index)
    missing: list[str] = []
    mismatched: list[str] = []
    tensors: dict[str, int] = {}
    values: dict[str, int] = {}
    consumed = np.zeros(len(index.keys) + len(index.value_keys), bool)
    as_tensor, as_value = "a tensor in the state, a plain value in the", "a plain value in the state, a tensor in the"
    for keys, rows, other_rows, first_other, found, what in (
        (description.keys, tensor_rows, value_rows, len(index.keys), tensors, as_tensor),
        (description.values, value_rows, tensor_rows, 0, values, as_value),
    ):
        for key in keys:
            if key in rows:
                found[key] = rows[key]
            elif key in other_rows:
                consumed[first_other + other_rows[key]] = True
                mismatched.append(f"{key}: {what} checkpoint")
            else:
                missing.append(key)
    if missing and tensors:
        tensors.update(_tied_rows(description, tensors, missing))
        missing = [key for key in missing if key not in tensors]
    may_cast = (lambda _: bool(wishes.cast)) if isinstance(wishes.cast, bool) else patterns.matcher(wishes.cast)
    cast = _compare_tensors(index, description, tensors, may_cast, mismatched)
    consumed[list(tensors.values())] = True
    consumed[[len(index.keys) + row for row in values.values()]] = True
    names = list(leaf_keys(description.tree))
    unused = wishes.unused([*names, *tensor_rows, *value_rows])
    unused += [
        ("rename", each)
        for each in patterns.unused_renames(wishes.rename, [*index.tensor_rows, *index.value_rows, *asked])
    ]
    findings = RankFindings(
        missing=missing,
        missing_values=[key for key in missing if key in description.values],
        mismatched=mismatched,
        unused=unused,
        leaves=len(names),
        selected=len(description.keys) + len(description.values),
        tensors=len(description.keys),
        consumed=np.packbits(consumed).tobytes(),
    )
    return Match(tensors, values, cast, findings)


def _tied_rows(description: Description, tensors: dict[str, int], missing: list[str]) -> dict[str, int]:
    """Return the rows of missing keys that share memory with a key that was found: writers store tied weights once."""
    # Tensors without memory, on the meta device or with an empty shard, are tied if they are one object.
    memory = {
        key: id(description.leaves[description.keys[first]])
        for key, first in zip(description.keys, description.alias.tolist(), strict=True)
    }
    found = {memory[key]: row for key, row in tensors.items()}
    return {key: found[memory[key]] for key in missing if memory.get(key) in found}


def _compare_tensors(
    index: Index,
    description: Description,
    tensors: dict[str, int],
    may_cast: Callable[[str], bool],
    mismatched: list[str],
) -> dict[str, str]:
    at = {key: row for row, key in enumerate(description.keys)}
    mine = np.array([at[key] for key in tensors], np.int64)
    rows = np.array(list(tensors.values()), np.int64)
    axes = max(description.shape.shape[1], index.tensors.shape.shape[1])
    shapes = widen(description.shape, axes, 1)[mine]
    stored = widen(np.asarray(index.tensors.shape, np.int64), axes, 1)[rows]
    keys = list(tensors)
    other_shape = np.any(shapes != stored, axis=1) | (description.ndim[mine] != index.tensors.ndim[rows])
    for i in np.flatnonzero(other_shape).tolist():
        shape = tuple(shapes[i, : int(description.ndim[mine[i]])].tolist())
        mismatched.append(f"{keys[i]}: shape {shape} in the state, {index.shape(int(rows[i]))} in the checkpoint")
    cast: dict[str, str] = {}
    for i in np.flatnonzero((description.dtype[mine] != index.tensors.dtype[rows]) & ~other_shape).tolist():
        old, new = index.dtype(int(rows[i])).name, by_code(int(description.dtype[mine[i]])).name
        if may_cast(keys[i]):
            cast[keys[i]] = f"{old} -> {new}"
        else:
            mismatched.append(f"{keys[i]}: {new} in the state, {old} in the checkpoint (cast=True converts)")
    # Keys that share memory in the state but not in the checkpoint: it cannot be filled from two tensors.
    owner = np.asarray(index.tensors.alias, np.int64)[rows]
    first: dict[int, int] = {}
    for i in np.flatnonzero(np.bincount(description.alias, minlength=1)[description.alias[mine]] > 1).tolist():
        other = first.setdefault(int(description.alias[mine[i]]), i)
        if owner[i] != owner[other]:
            mismatched.append(
                f"{keys[i]}: the same memory as {keys[other]} in the state, another tensor in the checkpoint"
                f" (exclude={keys[i]!r} takes the other)"
            )
    return cast


def compare_kinds(key: str, mine: Any, stored: Any) -> list[str]:
    """Describe a plain value that would be replaced by one of another kind; None fits any kind."""
    if mine is None or mine is UNFILLED or stored is None or _kind(mine) == _kind(stored):
        return []
    if any(isinstance(value, (enum.Enum, EnumRef)) for value in (mine, stored)):
        return []  # the class of the enum decides what a member is
    return [f"{key}: {_with_article(mine)} in the state, {_with_article(stored)} in the checkpoint"]


def _kind(value: Any) -> tuple[type, ...]:
    return next((kind for kind in _KINDS if isinstance(value, kind)), ())


def _with_article(value: Any) -> str:
    name = type(value).__qualname__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def merge_findings(
    index: Index, findings: Sequence[RankFindings], wishes: LoadFilter, *, strict: bool, where: str
) -> LoadSummary:
    """Sum up what all ranks found; raise an error that lists every difference that matters."""
    count = len(index.keys) + len(index.value_keys)
    bits = np.zeros(-(-count // 8), np.uint8)
    for raw in {found.consumed for found in findings}:
        bits |= np.frombuffer(raw, np.uint8)
    consumed = np.unpackbits(bits, count=count).astype(bool)
    filled = np.flatnonzero(consumed[: len(index.keys)])
    # A tensor that was loaded under one of its names is not unexpected under the others.
    alias = np.asarray(index.tensors.alias, np.int64)
    consumed[: len(alias)] |= np.isin(alias, alias[filled])
    selected = wishes.selects()
    unexpected: list[str] = []
    unclaimed: list[list[str]] = [[], []]
    if not consumed.all():
        named = wishes.names(index)
        free = {name: row for name, row in _rows(index, *named).items() if not consumed[row]}
        unclaimed = [[name for name in rows if name in free] for rows in named]
        left = {name: row for name, row in free.items() if selected(name)}
        # Per-rank state of ranks that no longer exist is not unexpected.
        rows = _rows(index, index.tensor_rows, index.value_rows) if left else {}
        per_rank = _per_rank_leaves(decode_tree(index.tree)) if any("@" in name for name in rows) else ()
        shared = {rows[name]: over_ranks for name, over_ranks in per_rank if name in rows}
        known = {name for row, name in shared.items() if consumed[row]}
        unexpected = sorted(name for name, row in left.items() if shared.get(row) not in known)
    missing = list(dict.fromkeys(key for found in findings for key in found.missing))
    unused = [given for given in findings[0].unused if all(given in found.unused for found in findings)]
    hints = _pattern_hints(index, wishes, missing, unused)
    fills_nothing = not filled.size and _should_fill(findings, unused, values=bool(consumed.any()))
    _raise_if_wrong(
        findings, missing, unexpected, hints, unclaimed, strict=strict, fills_nothing=fills_nothing, where=where
    )
    for given, hint in hints.items():
        log.warning("load from %s: %s matches no name, in the state or in the checkpoint%s", where, given, hint)
    return LoadSummary(
        missing=missing,
        unexpected=unexpected,
        unmatched=list(hints),
        tensors=filled.size,
        bytes_filled=tensor_nbytes(index, filled),
    )


def _should_fill(findings: Sequence[RankFindings], unused: list[tuple[str, str]], *, values: bool) -> bool:
    # A load that fills no tensor is a mistake, unless it loads plain values and a state has only those, or only those
    # were selected. The states of all ranks are judged together, because one rank may hold no tensor.
    loads_nothing = any(found.leaves for found in findings) and not values
    mistyped = any(argument == "include" for argument, _ in unused)
    return loads_nothing or mistyped or any(found.tensors for found in findings)


def _pattern_hints(
    index: Index, wishes: LoadFilter, missing: list[str], unused: list[tuple[str, str]]
) -> dict[str, str]:
    """Return the patterns that match no name, as the user wrote them, each with a suggestion in parentheses, or ""."""
    stored = [*index.tensor_rows, *index.value_rows] if unused else []
    renamed = [name for rows in wishes.names(index) for name in rows] + missing if unused else []
    hints = {
        f"{argument}={pattern!r}": patterns.did_you_mean_pattern(pattern, stored if argument == "rename" else renamed)
        for argument, pattern in unused
    }
    return {given: f" ({hint})" if hint else "" for given, hint in hints.items()}


def _rows(index: Index, tensor_rows: dict[str, int], value_rows: dict[str, int]) -> dict[str, int]:
    """Number tensors and values consecutively, as `RankFindings.consumed` does."""
    return tensor_rows | {name: len(index.keys) + row for name, row in value_rows.items()}


def _per_rank_leaves(tree: Node) -> Iterator[tuple[str, str]]:
    """Yield each leaf below a `PerRank`, and the name that it has on all ranks."""
    for name, path, empty in tree_leaves(tree):
        if not empty and any(kind == "ranks" for kind, _ in path):
            yield name, ".".join("@" if kind == "ranks" else part_name(kind, part) for kind, part in path)


def _raise_if_wrong(
    findings: Sequence[RankFindings],
    missing: list[str],
    unexpected: list[str],
    unmatched: dict[str, str],
    unclaimed: Sequence[Collection[str]],
    *,
    strict: bool,
    fills_nothing: bool,
    where: str,
) -> None:
    mismatched = list(dict.fromkeys(line for found in findings for line in found.mismatched))
    forgivable = not mismatched and not fills_nothing
    if strict:
        mismatched += dict.fromkeys(line for found in findings for line in found.other_kinds)
    elif not fills_nothing:
        missing, unexpected, unmatched = [], [], {}
    if not (mismatched or missing or unexpected or unmatched or fills_nothing):
        return
    values = {key for found in findings for key in found.missing_values}
    by_kind = [key for key in missing if key not in values], [key for key in missing if key in values]
    meant, hint = patterns.suggestions(*zip(by_kind, unclaimed, strict=True))
    lines = [f"the checkpoint {where} does not fit the state" + (": it fills no tensor" if fills_nothing else ":")]
    if not any(found.selected for found in findings):
        lines += [f"  include and exclude select none of {format_count(findings[0].leaves, 'name')} in the state"]
    guessed = [f"{key} (did you mean {meant[key]!r}?)" if key in meant else key for key in missing]
    lines += _listed("missing from the checkpoint", guessed)
    lines += _listed("in the checkpoint, but nothing in the state asks for it", unexpected)
    lines += _listed("different", mismatched)
    lines += _listed(
        "arguments that match no name, here or there", [given + guess for given, guess in unmatched.items()]
    )
    if not hint and missing and any("@" in key for key in missing):
        hint = "per-rank state is stored for the ranks that saved it; exclude it to load on more ranks"
    numbered = {found[1] for key in unexpected if (found := _NUMBERED_STATE.fullmatch(key))}
    if name := next(
        (each for each in sorted(numbered) if any(key.startswith(f"{each}.state.") for key in missing)), ""
    ):
        hint = (
            f"{name!r} was stored by number, as optimizer.state_dict() returns it: load without it (exclude={name!r}), and"
            " pass what sk.open(path).to_dict() has there to optimizer.load_state_dict"
        )
    if not hint and forgivable:
        hint = (
            "strict=False loads what fits" if missing or unexpected or mismatched else "strict=False only warns of them"
        )
        hint += f"; {patterns.MAY_MATCH_NOTHING}" if any(given.startswith("rename=") for given in unmatched) else ""
    raise StateMismatch(
        "\n".join(lines),
        hint=hint,
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
    )


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"    … and {len(items) - _MOST_LISTED} more"] if len(items) > _MOST_LISTED else []
    return [f"  {title} ({len(items)}):", *(f"    {item}" for item in items[:_MOST_LISTED]), *more]
