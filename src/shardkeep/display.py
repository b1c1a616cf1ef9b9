"""
How values are shown: sizes, times and counts in units that fit, and objects as one line at a prompt, a table in a notebook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Sized
from typing import Any

_MOST_SHOWN = 4
"""A list of more items is shown by their number."""


def format_size(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit: 1.23 GB."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    for unit in units:
        if nbytes < 999.5 or unit == units[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{_three_digits(nbytes)} {unit}"


def format_seconds(seconds: float) -> str:
    """As in: 40 µs, 70 ms, 1.23 s, 12.5 min."""
    for unit, length in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * length:
            return f"{seconds / length:.0f} {unit}"
    for unit, length in (("s", 1), ("min", 60)):
        if seconds < 120 * length:
            return f"{_three_digits(seconds / length)} {unit}"
    return f"{_three_digits(seconds / 3600)} h"


def format_age(seconds: float) -> str:
    """Return a time span in whole numbers of its largest unit: 3 h."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit != "d"):
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_rate(nbytes: float, seconds: float) -> str:
    """Return bytes per second: 1.23 GB/s."""
    return f"{format_size(nbytes / max(seconds, 1e-9))}/s"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun: 1 file, 2 files."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def some_of(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


class OneLine:
    """A dataclass that is shown as one line, which its `__str__` returns; notebooks show the fields below it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def _repr_html_(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are
        found = {each.name: getattr(self, each.name) for each in fields if each.repr}
        given = {name: value for name, value in found.items() if value not in (None, "", [], {}, ())}
        return html_table(str(self), [(name, format_field(name, value)) for name, value in given.items()])


def format_field(name: str, value: Any) -> object:
    """Return a value in the unit that the name of its field says; a long list as the number of its items."""
    if isinstance(value, (int, float)) and "bytes" in name:
        return format_size(value)
    if name == "seconds" or name.endswith("_s"):
        return format_seconds(value)
    is_long = isinstance(value, Sized) and not isinstance(value, str) and len(value) > _MOST_SHOWN
    return format_count(len(value), "item") if is_long else value


def html_table(title: str, rows: Iterable[tuple[object, ...]]) -> str:
    from html import escape  # noqa: PLC0415 - only notebooks need it

    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<p>{escape(title)}</p><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
