"""What users give: numbers of any kind that is a number (numpy has its own) and of the right size, roots; or an error."""

from __future__ import annotations

import operator
import os
from typing import Any

from shardkeep.errors import StateError
from shardkeep.exchange.replacing import same_place
from shardkeep.store.place import open_root
from shardkeep.store.roots import Root


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


def roots_of(
    near: str | os.PathLike[str] | Root, far: str | os.PathLike[str] | Root | None, *, direct: bool
) -> list[Root]:
    """Return the root to save to, and the one to promote to, if any; raise `StateError` where they are one and the same."""
    if far is None:
        return [open_root(near, direct=direct)]
    roots = [open_root(each, direct=direct) for each in (near, far)]
    if same_place(*roots):
        raise StateError(f"promote_to={far!r} is the root itself", hint="give another place to promote to, or None")
    return roots
