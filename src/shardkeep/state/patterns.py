"""Patterns for names of leaves (`include`, `exclude`, `rename`), and suggestions for names not found; without torch."""

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
Pair = tuple[str | re.Pattern[str], str]
Renames = Mapping[str, str] | Mapping[re.Pattern[str], str] | Sequence[Pair] | Pair | Callable[[str], str | None] | None

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
MAY_MATCH_NOTHING = "a function may match nothing: rename=lambda name: name.removeprefix('module.')"
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


def unused_patterns(patterns: Patterns, names: Iterable[str]) -> list[str]:
    if patterns is None or callable(patterns):
        return []
    names = list(names)
    return [pattern for pattern in patterns if not any(map(matcher(pattern), names))]


def unused_renames(rename: Renames, names: Iterable[str]) -> list[str]:
    if rename is None or callable(rename):
        return []
    left, unused = list(names), list[str]()
    is_table = isinstance(rename, Mapping) and all(isinstance(old, str) for old in rename)
    for old, new in _pairs(rename):
        pattern = re.compile(rf"{re.escape(str(old))}(\.|$)" if is_table else old)
        if not any(map(pattern.match if is_table else pattern.search, left)):
            unused.append(str(old) if is_table else pattern.pattern)
        elif not is_table:  # each expression is applied to what the ones before it made of the names
            left = [pattern.sub(new, name) for name in left]
    return unused


def _pairs(rename: Any) -> list[Pair]:
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


def did_you_mean_pattern(pattern: str, names: Iterable[str]) -> str:
    """Return a hint that names what is spelt like a pattern that matches nothing: names, and their dotted prefixes."""
    word = re.sub(r"[^\w.-]|\\[a-zA-Z]", "", pattern).strip(".")  # without wildcards, and signs of regular expressions
    return did_you_mean(word, prefixes_of(names))


def closest(name: str, present: Collection[str]) -> str | None:
    return next(iter(near_names(name, present, most=1, cutoff=0.75)), None)


def optimizer_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that are optimizer state by their form, wherever it stands, each with what to call that optimizer."""
    # The form is torch's: `param_groups`, beside `state.<parameter>.<key>`, or such a key alone. What else lies beside them
    # belongs to the optimizer if that is called one.
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


def suggestions(*kinds: tuple[Sequence[str], Collection[str]]) -> tuple[dict[str, str], str]:
    """
    Guess which present names were meant by those not found; also return a hint if one rename explains most of them.

    Each of `kinds`, such as tensors and plain values, is the names not found and the present ones.
    """
    missing, present = ([name for kind in kinds for name in kind[at]] for at in (0, 1))
    by_core: dict[str, str] = {}
    for name in present:
        by_core.setdefault(unwrapped(name), name)
    alike = {name: other for name in missing if (other := by_core.get(unwrapped(name), name)) != name}
    meant, hint = (alike, _rename_hint(alike)) if alike else _moved(missing, present)
    for names, others in kinds:
        guessed = {name: closest(name, others) for name in names[:_MOST_GUESSED] if name not in meant}
        meant |= {name: other for name, other in guessed.items() if other is not None}
    return meant, hint


def _moved(missing: Sequence[str], present: Collection[str]) -> tuple[dict[str, str], str]:
    """Pair names that are the same but for one prefix, if that explains most of the missing ones; and return the hint."""
    pairs: dict[tuple[str, bool], dict[str, str]] = {}
    known = prefixes_of(present)  # what is missing may be an object, with names below its own
    for is_ours, names, others in ((False, known, set(missing)), (True, missing, known)):
        for name in names:
            at = name.find(".")
            while at > 0:
                if (rest := name[at + 1 :]) in others:
                    pairs.setdefault((name[:at], is_ours), {}).update([(name, rest) if is_ours else (rest, name)])
                at = name.find(".", at + 1)
    (prefix, is_ours), found = max(pairs.items(), key=lambda each: (len(each[1]), each[0]), default=(("", False), {}))
    if 2 * len(found) <= len(missing):
        return {}, ""
    table = dict(_differing_prefixes(other, name) for name, other in sorted(found.items()))
    rename: Renames = table
    if len(table) > 1 and not is_ours:
        rename = {prefix: ""}
    elif len(table) > _MOST_PREFIXES:
        rename = [("^", f"{prefix}.")]
    return found, f"the {'state' if is_ours else 'checkpoint'}'s keys carry `{prefix}.`: pass rename={rename!r}"


def _rename_hint(wrapped: dict[str, str]) -> str:
    theirs = sorted({part for name in wrapped.values() for part in name.split(".")} & set(WRAPPERS))
    ours = sorted({part for name in wrapped for part in name.split(".")} & set(WRAPPERS))
    carried = ", ".join(f"`{wrapper}.`" for wrapper in ours or theirs)
    if theirs and not ours:
        pairs = ", ".join(f"(r'(^|\\.){wrapper}\\.', r'\\1')" for wrapper in theirs)
        return f"the checkpoint's keys carry {carried}: pass rename=[{pairs}]"
    table = dict(_differing_prefixes(other, name) for name, other in wrapped.items())
    rename = _prefixes(table)
    if len(table) <= _MOST_PREFIXES and all(rename(other) == name for name, other in wrapped.items()):
        return f"the state's keys carry {carried}: pass rename={table!r}"
    return f"the state's keys carry {carried}: pass a callable as rename that adds them"


def _differing_prefixes(old: str, new: str) -> tuple[str, str]:
    a, b = old.split("."), new.split(".")
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return ".".join(a), ".".join(b)
