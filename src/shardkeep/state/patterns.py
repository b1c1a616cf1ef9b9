"""
Patterns for names of leaves: `include`, `exclude`, `rename`, and suggestions for names that were not found.

Pure functions of strings; this module does not import torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice
from typing import Any

from shardkeep.errors import StateError

Patterns = str | Iterable[str] | Callable[[str], bool] | None
Renames = (
    Mapping[str, str]
    | Mapping["re.Pattern[str]", str]
    | Sequence[tuple["str | re.Pattern[str]", str]]
    | tuple["str | re.Pattern[str]", str]
    | Callable[[str], "str | None"]
    | None
)

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_MOST_GUESSED = 20
_MOST_SEARCHED = 1000
"""Names that are compared by spelling, which is slow: those that share the most dotted parts with a word."""
_MOST_PREFIXES = 4
_MOMENT = re.compile(r"(max_)?exp_(avg|inf)(_sq)?(_row|_col)?|momentum_buffer|(square|grad)_avg|acc_delta").fullmatch
"""What torch's optimizers call the tensors of their state."""


def checked_patterns(argument: str, patterns: Any) -> tuple[str, ...] | Callable[[str], bool] | None:
    """Return patterns in a form that can be iterated repeatedly; raise if they are no patterns."""
    if patterns is None or (callable(patterns) and not isinstance(patterns, type)):
        return patterns
    several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    found = tuple(patterns) if several else (patterns,)
    if not all(isinstance(pattern, str) for pattern in found):
        raise StateError(
            f"{argument}={patterns!r} is not a pattern for names",
            hint="give a name, a dotted prefix, a glob, several of them, or a callable",
        )
    return found


def matcher(patterns: Patterns) -> Callable[[str], bool]:
    """Return a predicate for names: a name, a dotted prefix, a glob, or any of several; a callable is used as it is."""
    if patterns is None:
        return lambda _: True
    if callable(patterns):
        return patterns
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    prefixes = tuple(f"{glob}." for glob in globs)
    shapes = [re.compile(fnmatch.translate(glob)).match for glob in globs]
    return lambda name: name in globs or name.startswith(prefixes) or any(shape(name) for shape in shapes)


def selector(include: Patterns, exclude: Patterns) -> Callable[[str], bool]:
    """Return the predicate for `include` and `exclude` together."""
    wanted = matcher(include)
    if exclude is None:
        return wanted
    unwanted = matcher(exclude)
    return lambda name: wanted(name) and not unwanted(name)


def renamer(rename: Renames) -> Callable[[str], str | None]:
    """
    Return the function from a name in the checkpoint to its name in the state; None drops the name.

    A mapping of strings replaces whole names and dotted prefixes (the longest that fits); regular expressions (a mapping
    from compiled ones, one pair, or pairs in order) are substituted wherever they match; a callable is used as it is.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    pairs = _pairs(rename)
    if isinstance(rename, Mapping) and all(isinstance(old, str) for old in rename):
        return _prefixes({str(old): new for old, new in pairs})
    try:
        patterns = [(re.compile(old), new) for old, new in pairs]
    except re.error as exc:
        raise StateError(f"rename={rename!r}: {exc.pattern!r} is no regular expression: {exc}") from exc

    def substitute(name: str) -> str:
        for pattern, new in patterns:
            try:
                name = pattern.sub(new, name)
            except (re.error, IndexError) as exc:
                raise StateError(f"rename: {new!r} cannot replace {pattern.pattern!r}: {exc}") from exc
        return name

    return substitute


def _pairs(rename: Any) -> list[tuple[str | re.Pattern[str], str]]:
    pairs: list[Any] = [rename]  # one pair alone
    if isinstance(rename, Mapping):
        pairs = list(rename.items())
    elif isinstance(rename, Sequence) and not (len(rename) == 2 and isinstance(rename[1], str)):
        pairs = list(rename)
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], (str, re.Pattern))
        if not is_pair or not (isinstance(pair[1], str) or callable(pair[1])):
            raise StateError(
                f"rename={rename!r} is no renaming",
                hint="give a mapping of names, pairs of regular expression and replacement, or a callable",
            )
    return pairs


def _prefixes(table: dict[str, str]) -> Callable[[str], str]:
    longest_first = sorted(table, key=len, reverse=True)

    def replace(name: str) -> str:
        for old in longest_first:
            if name == old:
                return table[old]
            if name.startswith(f"{old}."):
                return f"{table[old]}{name[len(old) :]}" if table[old] else name[len(old) + 1 :]
        return name

    return replace


def unwrapped(name: str) -> str:
    """Return a name without the parts that module wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def near_names(word: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return known names with as many dotted parts that are spelt like `word`, or that are the same but for a prefix."""
    names = list(known)
    level = [name for name in names if name.count(".") == word.count(".")]
    if len(level) > _MOST_SEARCHED:
        parts = set(word.split("."))
        level = nlargest(_MOST_SEARCHED, level, key=lambda name: len(parts.intersection(name.split("."))))
    longer = (name for name in names if name.endswith(f".{word}") or word.endswith(f".{name}"))
    return get_close_matches(word, level, most, cutoff) or list(islice(longer, most))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known words that are spelt like `word`; empty if there is none."""
    *others, last = near_names(word, known) or [""]
    return f"did you mean {', '.join(others) + ' or ' if others else ''}{last}?" if last else ""


def closest(name: str, present: Collection[str]) -> str | None:
    """Return the present name most similar to `name`, if any is similar."""
    return next(iter(near_names(name, present, most=1, cutoff=0.75)), None)


def optimizer_names(names: Iterable[str]) -> dict[str, str]:
    """
    Return the names that are optimizer state by their form, wherever it stands, each with what to call that optimizer.

    The form is torch's: `param_groups`, beside `state.<parameter>.<key>`, or such a key alone. What else lies beside them
    belongs to the optimizer if that is called one.
    """
    split = {name: name.split(".") for name in names}
    roots: set[tuple[str, ...]] = set()
    for parts in split.values():
        for at, part in enumerate(parts):
            if part == "param_groups" or (part == "state" and at + 2 < len(parts) and _MOMENT(parts[-1])):
                roots.add(tuple(parts[:at]))
                break
    found: dict[str, str] = {}
    for name, parts in split.items() if roots else ():
        for at, part in enumerate(parts):
            is_named = at > 0 and "optim" in parts[at - 1].lower()
            if (is_named or part in ("state", "param_groups")) and tuple(parts[:at]) in roots:
                found[name] = ".".join(parts[:at]) or part
                break
    return found


def prefixes_of(names: Iterable[str]) -> set[str]:
    """Return names and all their dotted prefixes, which are what a pattern without wildcards can match."""
    found: set[str] = set()
    for name in names:
        prefix = name
        while prefix and prefix not in found:
            found.add(prefix)
            prefix = prefix.rpartition(".")[0]
    return found


def suggestions(missing: Sequence[str], present: Collection[str]) -> tuple[dict[str, str], str]:
    """Guess which present names were meant by those not found; also return a hint if one rename explains them."""
    by_core: dict[str, str] = {}
    for name in present:
        by_core.setdefault(unwrapped(name), name)
    wrapped = {name: other for name in missing if (other := by_core.get(unwrapped(name), name)) != name}
    guessed = {name: closest(name, present) for name in missing[:_MOST_GUESSED] if name not in wrapped}
    meant = wrapped | {name: other for name, other in guessed.items() if other is not None}
    return meant, _rename_hint(wrapped)


def _rename_hint(wrapped: dict[str, str]) -> str:
    """Return a hint with the rename between names that differ by wrappers only."""
    theirs = sorted({part for name in wrapped.values() for part in name.split(".")} & set(WRAPPERS))
    ours = sorted({part for name in wrapped for part in name.split(".")} & set(WRAPPERS))
    carried = ", ".join(f"`{wrapper}.`" for wrapper in ours or theirs)
    if theirs and not ours:
        pairs = ", ".join(f"(r'(^|\\.){wrapper}\\.', r'\\1')" for wrapper in theirs)
        return f"the checkpoint's keys carry {carried}: pass rename=[{pairs}]"
    if not ours:
        return ""
    table = dict(_differing_prefixes(other, name) for name, other in wrapped.items())
    rename = _prefixes(table)
    if len(table) <= _MOST_PREFIXES and all(rename(other) == name for name, other in wrapped.items()):
        return f"the state's keys carry {carried}: pass rename={table!r}"
    return f"the state's keys carry {carried}: pass a callable as rename that adds them"


def _differing_prefixes(old: str, new: str) -> tuple[str, str]:
    """Return two names without the parts in which both end; at least one part of each."""
    a, b = old.split("."), new.split(".")
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return ".".join(a), ".".join(b)
