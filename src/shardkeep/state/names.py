"""
Names of leaves: which are wanted, what they are called elsewhere, and what a user may have meant.

Pure functions of strings.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
_RANK_PART = re.compile(r"(?:(?<=\.)|^)@\d+(?=\.|$)")


def matcher(patterns: Patterns) -> Callable[[str], bool]:
    """
    Make a test for names.

    A pattern is a name, a dotted prefix of names, or a glob; any of several may match. A callable is taken as it is.
    """
    if patterns is None:
        return lambda _: True
    if callable(patterns):
        return patterns
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    prefixes = tuple(f"{glob}." for glob in globs)
    shapes = [re.compile(fnmatch.translate(glob)).match for glob in globs]
    return lambda name: name in globs or name.startswith(prefixes) or any(shape(name) for shape in shapes)


def selector(include: Patterns, exclude: Patterns) -> Callable[[str], bool]:
    """Make the test that `include` and `exclude` say together."""
    wanted = matcher(include)
    if exclude is None:
        return wanted
    unwanted = matcher(exclude)
    return lambda name: wanted(name) and not unwanted(name)


def renamer(rename: Renames) -> Callable[[str], str | None]:
    """
    Make the function from a name in the checkpoint to its name in the state; None drops it.

    A mapping of strings replaces whole names and dotted prefixes (the longest that fits); regular expressions (a
    mapping from compiled ones, one pair, or pairs in order) are substituted wherever they match; a callable is taken as it is.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if isinstance(rename, Mapping) and all(isinstance(old, str) for old in rename):
        return _prefixes({str(old): new for old, new in rename.items()})
    patterns = [(re.compile(old), new) for old, new in _pairs(rename)]

    def substitute(name: str) -> str:
        for pattern, new in patterns:
            name = pattern.sub(new, name)
        return name

    return substitute


def _pairs(rename: Any) -> list[tuple[str | re.Pattern[str], str]]:
    if isinstance(rename, Mapping):
        return list(rename.items())
    if len(rename) == 2 and isinstance(rename[1], str):
        return [rename]  # one pair alone
    return list(rename)


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


def any_rank(name: str) -> str:
    """Return a per-rank name with its rank number taken out, so that those of all ranks are one."""
    return _RANK_PART.sub("@", name) if "@" in name else name


def unwrapped(name: str) -> str:
    """Return a name without the parts that module wrappers put in."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts)


def suggestions(missing: Sequence[str], present: Collection[str]) -> tuple[dict[str, str], str]:
    """
    For names that were not found, guess which present ones were meant; and say what to do where it is clear.
    """
    by_core: dict[str, str] = {}
    for name in present:
        by_core.setdefault(unwrapped(name), name)
    meant: dict[str, str] = {}
    wrappers: set[str] = set()
    for name in missing[:_MOST_GUESSED]:
        other = by_core.get(unwrapped(name))
        if other is not None and other != name:
            meant[name] = other
            wrappers |= set(other.split(".")) & set(WRAPPERS)
        elif len(present) <= 20_000 and (close := difflib.get_close_matches(name, present, n=1, cutoff=0.75)):
            meant[name] = close[0]
    if wrappers:
        found = sorted(wrappers)
        pairs = ", ".join(f"(r'(^|\\.){wrapper}\\.', r'\\1')" for wrapper in found)
        return meant, f"the checkpoint's keys carry {', '.join(f'`{w}.`' for w in found)}: pass rename=[{pairs}]"
    return meant, ""
