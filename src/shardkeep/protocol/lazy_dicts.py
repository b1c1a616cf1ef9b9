"""
Dicts whose values are made when they are asked for: metadata of a large checkpoint, of which a rank needs a little.

Whoever has one may do with it what can be done with a dict, and finds what the dict would hold. What needs all values
(`items`, `==`, `copy`) makes all of them, once. Pickled, or copied, they are plain dicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex, TypeVar

from shardkeep.format.collector import collector_paused

K = TypeVar("K")
V = TypeVar("V")


class LazyDict(dict[K, V]):
    """
    A dict of which not everything was made yet: the base of two kinds.

    Made by its own constructor it is a dict like any other.
    """

    def settle(self) -> None:
        """Make all that is not made yet."""

    # Of C code that is given a dict, some takes the values as they lie if it believes that nobody overrode how a dict
    # is walked (`dict(d)`, `d | e`, `{**d}`).
    def __iter__(self) -> Iterator[K]:
        return super().__iter__()

    def values(self) -> Any:
        self.settle()
        return super().values()

    def items(self) -> Any:
        self.settle()
        return super().items()

    def copy(self) -> dict[K, V]:
        self.settle()
        return super().copy()

    def __eq__(self, other: object) -> bool:
        self.settle()
        if isinstance(other, LazyDict):
            other.settle()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as of every dict

    def __repr__(self) -> str:
        self.settle()
        return super().__repr__()

    def __or__(self, other: Any) -> Any:
        self.settle()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self.settle()
        return super().__ror__(other)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())

    def pop(self, key: K, *default: Any) -> Any:
        self.settle()
        return super().pop(key, *default)

    def popitem(self) -> tuple[K, V]:
        self.settle()
        return super().popitem()

    def setdefault(self, key: K, default: Any = None) -> Any:
        self.settle()
        return super().setdefault(key, default)


class _Row(int):
    """Stands for a value that was not made yet."""


class LazyValues(LazyDict[K, V]):
    """A dict whose keys are known and whose values are made one by one."""

    _make: Callable[[int], V] | None = None

    @classmethod
    def of(cls, keys: Iterable[K], make: Callable[[int], V]) -> LazyValues[K, V]:
        """Return a dict of these keys; `make` gives the value of the n-th one."""
        made: LazyValues[K, V] = cls(zip(keys, map(_Row, itertools.count()), strict=False))  # type: ignore[arg-type]
        made._make = make
        return made

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        return self._made(key, value) if type(value) is _Row else value

    def _made(self, key: K, row: Any) -> V:
        if self._make is None:
            raise KeyError(key)
        value = self._make(row)
        self[key] = value
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: K, *default: Any) -> Any:
        self.get(key)
        return dict.pop(self, key, *default)

    def setdefault(self, key: K, default: Any = None) -> Any:
        self.get(key)
        return dict.setdefault(self, key, default)

    def settle(self) -> None:
        if self._make is not None:
            with collector_paused():
                for key, value in list(dict.items(self)):
                    if type(value) is _Row:
                        self._made(key, value)
            self._make = None


class LazyItems(LazyDict[K, V]):
    """A dict whose keys, too, are made only if somebody wants to see them."""

    _count: int | None = None
    """How many there are; None once they are all made, and this is a dict like any other."""

    @classmethod
    def of(cls, count: int, find: Callable[[Any], int | None], make: Callable[[int], tuple[K, V]]) -> LazyItems[K, V]:
        """Return a dict of so many items; `find` says which one a key is of, `make` gives the n-th."""
        # One item that nobody sees: C code asks a dict itself whether it is empty.
        made: LazyItems[K, V] = cls({None: None} if count else {})  # type: ignore[dict-item]
        made._count, made._find, made._make, made._held = count, find, make, {}
        return made

    _find: Callable[[Any], int | None]
    _make: Callable[[int], tuple[K, V]]
    _held: dict[int, V]

    def _row(self, key: object) -> int | None:
        hash(key)  # what cannot be a key raises, as a dict does
        return self._find(key)

    def __len__(self) -> int:
        return super().__len__() if self._count is None else self._count

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) if self._count is None else self._row(key) is not None

    def __getitem__(self, key: K) -> V:
        if self._count is None:
            return super().__getitem__(key)
        row = self._row(key)
        if row is None:
            raise KeyError(key)
        if row not in self._held:
            self._held[row] = self._make(row)[1]
        return self._held[row]

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def settle(self) -> None:
        if self._count is None:
            return
        with collector_paused():
            made = {}
            for row in range(self._count):
                key, value = self._make(row)
                made[key] = self._held.get(row, value)
            dict.clear(self)
            dict.update(self, made)
        self._count = None

    def __iter__(self) -> Iterator[K]:
        self.settle()
        return super().__iter__()

    def __reversed__(self) -> Iterator[K]:
        self.settle()
        return super().__reversed__()

    def keys(self) -> Any:
        self.settle()
        return super().keys()

    def __setitem__(self, key: K, value: V) -> None:
        self.settle()
        super().__setitem__(key, value)

    def __delitem__(self, key: K) -> None:
        self.settle()
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super().update(*args, **kwargs)

    def __ior__(self, other: Any) -> Any:
        self.settle()
        return super().__ior__(other)

    def clear(self) -> None:
        self.settle()
        super().clear()
