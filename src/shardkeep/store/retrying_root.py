"""A root that tries again what failed in passing, on itself and on all places below it."""

from __future__ import annotations

from collections.abc import Iterator

from shardkeep.store.retrying import Patience, RetryingStore
from shardkeep.store.roots import Root


class RetryingRoot(RetryingStore):
    """Pass everything on to `inner`, and try it again where it fails in passing."""

    def __init__(self, inner: Root, patience: Patience) -> None:
        """Wrap a root."""
        super().__init__(inner, patience)
        self._root = inner

    def __repr__(self) -> str:
        return f"RetryingRoot({self._root!r})"

    def places(self) -> Iterator[str]:
        return iter(self._again("list the places of", "", lambda: list(self._root.places())))

    def place(self, name: str) -> RetryingStore:
        return RetryingStore(self._root.place(name), self._patience)

    def remove(self, name: str) -> None:
        self._again("remove", name, lambda: self._root.remove(name))

    def drop_empty(self, name: str) -> None:
        self._again("remove", name, lambda: self._root.drop_empty(name))
