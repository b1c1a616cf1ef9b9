"""Numbers that users give: of any kind that is a number (numpy has its own), of the right size, or an error."""

from __future__ import annotations

import operator
from typing import Any

from shardkeep.errors import StateError


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number; raise `StateError` for anything else, and for one that is too small."""
    try:
        number = operator.index(value)
    except TypeError as exc:
        raise StateError(f"{name}={value!r}", hint=f"give a whole number, {least} or more") from exc
    if number < least or isinstance(value, bool):
        raise StateError(f"{name}={value!r}", hint=f"give a whole number, {least} or more")
    return int(number)


def whole_or_none(name: str, value: Any, least: int) -> int | None:
    """As `whole`, or None."""
    return None if value is None else whole(name, value, least)


def positive_or_none(name: str, value: Any) -> float | None:
    """Return a number above 0, or None; raise `StateError` for anything else."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise StateError(f"{name}={value!r}", hint="give a number, more than 0, or None") from exc
    if not number > 0:
        raise StateError(f"{name}={value!r}", hint="give a number, more than 0, or None")
    return number
