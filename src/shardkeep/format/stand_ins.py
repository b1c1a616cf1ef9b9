"""
What a name in a pickle stands for, so that a pickle can make values and change nothing else.

A pickle can set attributes on whatever a name gives it: on a class of the standard library as well as on a value of its
own. So it never gets a class or a function itself, but an object that can be called and not be changed (`Call`), or a
class that cannot be changed and whose instances are of another (`New`). Both are made for one load and gone with it,
so that one which is left in a result, where the pickle meant the class, is found.

Calls also pay for what they copy. A pickle can refer a thousand times to one list, and each set made of it is as long;
together they may be as long as the pickle, as all are that programs write.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

from shardkeep.errors import MalformedFile

Names = Mapping[tuple[str, str], Any]
"""What each module and name of a pickle stands for: a `Call`, a `New`, or a value that cannot be changed."""

_ITEMS = (tuple, list, dict, set, frozenset, range, deque, np.ndarray)
_TEXTS = (str, bytes, bytearray)
_LETTERS_AN_ITEM = 32
_FREE_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """A name that pickles call."""

    make: Callable[..., Any]
    """Gives the value, from the arguments in the pickle."""
    kind: type | None = None
    """The class, where a pickle may also hand it to another call."""


@dataclass(frozen=True, slots=True)
class New:
    """A class whose instances pickles make empty, and fill then."""

    kind: type


def names_of(safe: Iterable[Any]) -> Names:
    """Return the classes and functions of `torch.serialization.get_safe_globals()` by what a pickle calls them."""
    found: dict[tuple[str, str], Any] = {}
    for entry in safe:
        if isinstance(entry, tuple):  # with the name that it is pickled by
            kind, named = entry
            module, _, name = named.rpartition(".")
            found[module, name] = kind
        elif hasattr(entry, "__qualname__"):
            found[entry.__module__, entry.__qualname__] = entry
    return found


class Given:
    """What one pickle gets for the names in it."""

    def __init__(self, names: Names, nbytes: int, others: Callable[[], Names] = dict) -> None:
        """Begin with a pickle of `nbytes`, which may name what is in `names`, or else in `others`."""
        self._names = names
        self._others = others
        self._purse = _Purse(nbytes + _FREE_ITEMS)
        self._calls: dict[tuple[str, str], _Callable] = {}
        self._classes: dict[tuple[str, str], type] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def find(self, module: str, name: str) -> Any:
        """Return what a name stands for; raise KeyError for one that is not known."""
        at = module, name
        found = self._calls.get(at)
        if found is not None:
            return found
        if at in self._classes:
            return self._classes[at]
        known = self._names[at] if at in self._names else self._others()[at]
        if isinstance(known, FunctionType):
            known = Call(known)
        if isinstance(known, Call):
            self._calls[at] = made = _Callable(known, self._purse)
            return made
        if isinstance(known, New):
            self._classes[at] = _guard(known.kind)
            self._counts[at] = sys.getrefcount(self._classes[at])
            return self._classes[at]
        return known

    def left_behind(self) -> str | None:
        """
        Return a name that a result holds instead of a value made by it; None if there is none.

        To be asked once, when the result is the only thing left of the load.
        """
        calls = {at: weakref.ref(call) for at, call in self._calls.items()}
        self._calls.clear()
        held = [at for at, call in calls.items() if call() is not None]
        if held:  # if only by garbage, it is gone after this
            gc.collect()
            held = [at for at in held if calls[at]() is not None]
        # A class is part of a cycle, so that it does not vanish; its references are counted instead.
        held += [at for at, count in self._counts.items() if sys.getrefcount(self._classes[at]) > count]
        return ".".join(held[0]) if held else None


class _Purse:
    """How many items calls may still copy."""

    __slots__ = ("left",)

    def __init__(self, items: int) -> None:
        self.left = items


class _Callable:
    """Can be called, and not be changed."""

    __slots__ = ("__weakref__", "_make", "_purse", "kind")

    kind: type | None
    _make: Callable[..., Any]
    _purse: _Purse

    def __init__(self, does: Call, purse: _Purse) -> None:
        for name, value in (("kind", does.kind), ("_make", does.make), ("_purse", purse)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any) -> Any:
        purse = self._purse
        for arg in args:
            if isinstance(arg, _ITEMS):
                purse.left -= len(arg)
            elif isinstance(arg, _TEXTS):
                purse.left -= len(arg) // _LETTERS_AN_ITEM
        if purse.left < 0:
            raise MalformedFile("the pickle asks for copies that are longer than itself")
        return self._make(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of what it may only call")

    def __delattr__(self, name: str) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of what it may only call")


def class_given(value: Any) -> type | None:
    """Return the class that a pickle meant by what it handed to a call; None if that is no class, or not known."""
    return value.kind if type(value) is _Callable else None


class _Unchangeable(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of a class")

    def __delattr__(cls, name: str) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of a class")

    def __call__(cls, *_args: Any, **_named: Any) -> Any:
        raise MalformedFile(f"the pickle calls {cls.__name__}, which no program does")


def _guard(kind: type) -> type:
    new = object.__new__

    def __new__(_cls: type) -> Any:  # noqa: N807 - it becomes one
        return new(kind)

    return _Unchangeable(kind.__name__, (), {"__slots__": (), "__new__": __new__})
