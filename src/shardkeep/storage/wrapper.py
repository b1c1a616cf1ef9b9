"""
The base of stores that wrap another store: retrying, watching, injecting faults.

A wrapper passes every verb on. A subclass overrides `call`, or the verbs it changes, and `wrap_reader` and `wrap_writer`
for the readers and writers that it returns. Optional verbs are found on `inner` (`base`), but for those whose calls would
bypass the wrapper, such as `local_path`, `any_names` and `spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shardkeep.storage import base

T = TypeVar("T")


class StoreWrapper:
    def __init__(self, inner: base.Store) -> None:
        self.inner = inner
        self.url = inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def wrap_reader(self, reader: base.BlobReader, name: str) -> base.BlobReader:  # noqa: ARG002 - for subclasses
        return reader

    def wrap_writer(self, writer: base.BlobWriter, name: str) -> base.BlobWriter:  # noqa: ARG002 - for subclasses
        return writer

    def call(self, verb: str, name: str, work: Callable[[], T]) -> T:  # noqa: ARG002 - for subclasses
        """Make a call of a verb of the inner store. Every verb goes through here; `name` is empty for a listing."""
        return work()

    def create(self, name: str, nbytes: int) -> base.BlobWriter:
        return self.wrap_writer(self.call("create", name, lambda: self.inner.create(name, nbytes)), name)

    def create_upto(self, name: str, nbytes: int) -> base.BlobWriter:
        writer = self.call("create", name, lambda: base.create_upto(self.inner, name, nbytes))
        return self.wrap_writer(writer, name)

    def open(self, name: str) -> base.BlobReader:
        return self.wrap_reader(self.call("open", name, lambda: self.inner.open(name)), name)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: base.Version | None = None) -> None:
        self.call("put", name, lambda: self.inner_put(name, data, replace=replace, over=over))

    def inner_put(self, name: str, data: bytes, *, replace: bool, over: base.Version | None) -> None:
        # A user's store may not support versions: it is not asked for one unless it is needed.
        how: dict[str, Any] = {"replace": replace} if over is None else {"replace": replace, "over": over}
        self.inner.put(name, data, **how)

    def get(self, name: str, *, limit: int) -> bytes:
        return self.call("get", name, lambda: self.inner.get(name, limit=limit))

    def version(self, name: str) -> base.Version | None:
        return self.call("version", name, lambda: self.inner.version(name))

    def list(self) -> Iterator[base.BlobInfo]:
        return iter(self.call("list", "", lambda: [*self.inner.list()]))

    def delete(self, name: str) -> None:
        self.call("delete", name, lambda: self.inner.delete(name))

    def delete_all(self, names: Sequence[str]) -> None:
        self.call("delete blobs of", "", lambda: base.delete_all(self.inner, names))


class WriterWrapper:
    def __init__(self, inner: base.BlobWriter, store: Any = None, name: str = "") -> None:
        self.inner, self.store, self.name = inner, store, name

    def write_at(self, offset: int, data: memoryview) -> None:
        self.inner.write_at(offset, data)

    def finish(self, nbytes: int | None = None) -> None:
        self.inner.finish(nbytes)

    def abandon(self) -> None:
        self.inner.abandon()


class ReaderWrapper:
    def __init__(self, inner: base.BlobReader, store: Any = None, name: str = "") -> None:
        self.inner, self.store, self.name = inner, store, name

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        self.inner.read_into(offset, into, cached=cached)

    def close(self) -> None:
        self.inner.close()
