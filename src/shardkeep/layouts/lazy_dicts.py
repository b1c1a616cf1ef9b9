"""
Dicts whose values are made when they are asked for: metadata of a large checkpoint, of which a rank needs a little.

Whoever has one may do with it what can be done with a dict, and finds what the dict would hold. What needs all values
(`items`, `==`, `copy`) makes all of them, once. Pickled, or copied, they are plain dicts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, SupportsIndex, TypeVar

from torch.utils import _pytree

from shardkeep.format.pickles import collector_paused

K = TypeVar("K")
V = TypeVar("V")
Made_co = TypeVar("Made_co", covariant=True)


class LazyDict(dict[K, V]):
    """
    A dict of which not everything was made yet: the base of two kinds.

    Made_co by its own constructor it is a dict like any other.
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


class Maker(Protocol[K, Made_co]):
    """Makes the items of a dict."""

    def count(self) -> int | None:
        """Return how many there are; None where that is not known before they are made."""

    def has(self, key: Any) -> bool:
        """Say whether there is such a key."""

    def one(self, key: K) -> Made_co:
        """Return the value of a key that is there."""

    def every(self) -> Iterable[tuple[K, Made_co]]:
        """Return all keys and values, in their order."""


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
        make = self._make
        if make is None:  # another thread has made all since the row was seen
            return super().__getitem__(key)
        value = make(row)
        current: Any = super().get(key, value)
        if current is row:
            self[key] = current = value
        return current  # type: ignore[no-any-return]  # made by another thread, or put there, meanwhile

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
            self._make = None  # last: until then, others make what they need themselves


class LazyItems(LazyDict[K, V]):
    """A dict whose keys, too, are made only if somebody wants to see them."""

    _maker: Maker[K, V] | None = None
    """None once they are all made, and this is a dict like any other."""
    _held: dict[K, V]
    _lock: threading.RLock

    @classmethod
    def of(cls, maker: Maker[K, V]) -> LazyItems[K, V]:
        """Return a dict of what a maker makes."""
        # One item that nobody sees: C code asks a dict itself whether it is empty.
        made: LazyItems[K, V] = cls({None: None})  # type: ignore[dict-item]
        made._maker, made._held, made._lock = maker, {}, threading.RLock()
        return made

    # The maker is read once in each method: another thread may make all at any moment.

    def __len__(self) -> int:
        maker = self._maker
        count = None if maker is None else maker.count()
        if count is None:
            self.settle()
            return super().__len__()
        return count

    def __contains__(self, key: object) -> bool:
        maker = self._maker
        if maker is None:
            return super().__contains__(key)
        hash(key)  # what cannot be a key raises, as a dict does
        return maker.has(key)

    def __getitem__(self, key: K) -> V:
        maker = self._maker
        if maker is None:
            return super().__getitem__(key)
        if key not in self._held:
            if not maker.has(key):
                raise KeyError(key)
            self._held.setdefault(key, maker.one(key))
        # By now, what all threads see may be another object.
        return self._held[key] if self._maker is not None else super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def settle(self) -> None:
        if self._maker is not None:
            with self._lock, collector_paused():
                self._settle()

    def _settle(self) -> None:
        if self._maker is None:  # another thread was first
            return
        made = {key: self._held.get(key, value) for key, value in self._maker.every()}
        dict.clear(self)
        dict.update(self, made)
        self._maker = None  # last: until then, others make what they need themselves

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


def _flatten(lazy: Any) -> tuple[list[Any], list[Any]]:
    return list(lazy.values()), list(lazy)


def _flatten_with_keys(lazy: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    return [(_pytree.MappingKey(key), value) for key, value in lazy.items()], list(lazy)


def _unflatten(values: Iterable[Any], keys: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


# Torch goes by the exact class, and would take them for leaves.
for _kind in (LazyValues, LazyItems):
    _pytree.register_pytree_node(_kind, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
