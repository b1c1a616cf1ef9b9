"""
Descriptions of stores that can be sent to another process, which opens the store from them.

Only shardkeep's own stores on disks, buckets and fsspec file systems can be described: the methods of a user's store may do
anything, memory cannot be shared by a URL, and an option that is an object means nothing in another process.

A description may contain keys and passwords. It must only go through a pipe: never to a file, a log or a command line.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from shardkeep.errors import CheckpointError
from shardkeep.options import set_for_children, setting
from shardkeep.storage.base import Store
from shardkeep.storage.local import LocalRoot, LocalStore

if TYPE_CHECKING:
    from shardkeep.storage.fsspec import FsspecStore
    from shardkeep.storage.object_store import ObjectStore

_USE_THREAD = 'pass writer="thread"'


class LocalStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A directory on this machine."""

    path: bytes
    """Absolute, in the encoding of the file system."""
    direct: bool
    durable: bool

    def open(self) -> LocalStore:
        """Open it in this process."""
        return LocalStore(os.fsdecode(self.path), direct=self.direct, durable=self.durable)


class BucketStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A prefix of a bucket."""

    service: str
    name: str
    prefix: str
    url: str
    options: dict[str, Any]
    """The options the bucket was opened with."""
    environment: dict[str, str | None]
    """The variables the bucket's client reads, as they were when the bucket was opened."""

    def __repr__(self) -> str:
        return f"BucketStoreSpec({self.url!r})"  # without keys

    def open(self) -> Store:
        """Open it in this process; connections to one bucket are shared."""
        from shardkeep.storage.object_client import open_bucket  # noqa: PLC0415 - most saves need no object store
        from shardkeep.storage.object_store import ObjectStore  # noqa: PLC0415

        for name, value in self.environment.items():
            if setting(name) != value:  # only if needed: threads of the client may be reading other variables
                set_for_children(name, value)
        return ObjectStore(open_bucket(self.service, self.name, self.options), self.prefix, self.url)


class FsspecStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A directory of an fsspec file system."""

    module: str
    kind: str
    """The file system's class in that module."""
    args: list[Any]
    options: dict[str, Any]
    """The options the file system was opened with."""
    path: str
    url: str
    settle_s: float

    def __repr__(self) -> str:
        return f"FsspecStoreSpec({self.url!r})"  # without passwords

    def open(self) -> Store:
        """
        Open it in this process.

        Raises:
            CheckpointError: its class cannot be imported here.
            StorageError: it cannot be opened.

        """
        from shardkeep.storage.fsspec import FsspecStore, fs_errors  # noqa: PLC0415 - most saves need no fsspec

        try:
            kind = getattr(importlib.import_module(self.module), self.kind)
        except (ImportError, AttributeError) as exc:
            raise CheckpointError(
                f'{self.url}: writer="process" cannot import {self.module}.{self.kind} in another process: {exc}',
                hint=f"that process does not run your program: put the file system in a package, or {_USE_THREAD}",
            ) from exc
        with fs_errors("cannot open", self.url):
            fs = kind(*self.args, **self.options)
        return FsspecStore(fs, self.path, self.url, settle_s=self.settle_s)


StoreSpec = LocalStoreSpec | BucketStoreSpec | FsspecStoreSpec


def store_spec(store: Store) -> StoreSpec:
    """
    Describe a store so that another process can open it.

    Raises:
        CheckpointError: it cannot be opened there.

    """
    from shardkeep.storage.fsspec import FsspecRoot, FsspecStore  # noqa: PLC0415 - the other process needs none of these
    from shardkeep.storage.memory import MemoryStore  # noqa: PLC0415
    from shardkeep.storage.object_store import ObjectRoot, ObjectStore  # noqa: PLC0415
    from shardkeep.storage.retry import RetryingRoot, RetryingStore  # noqa: PLC0415

    # Retries and the checks before a commit stay in this process: the other one writes data files and commits nothing.
    if type(store) in (RetryingStore, RetryingRoot) and isinstance(store, RetryingStore):
        store = store.inner
    # By exact class: a subclass may behave differently, and the other process would open a plain store.
    kind = type(store)
    if isinstance(store, LocalStore) and kind in (LocalStore, LocalRoot):
        return LocalStoreSpec(os.fsencode(store._path), store._direct, store._durable)
    if isinstance(store, ObjectStore) and kind in (ObjectStore, ObjectRoot):
        return _bucket_spec(store)
    if isinstance(store, FsspecStore) and kind in (FsspecStore, FsspecRoot):
        return _fsspec_spec(store)
    if isinstance(store, MemoryStore):
        raise _in_memory(store.url, kind.__name__)
    raise CheckpointError(
        f'{store.url}: writer="process" cannot open a {kind.__name__} in another process',
        hint=f"save to a path or a URL, or {_USE_THREAD}",
    )


def _bucket_spec(store: ObjectStore) -> BucketStoreSpec:
    bucket = store.bucket
    given = dict(bucket.given)
    if "client_options" in given:  # kept as pairs
        given["client_options"] = client = dict(given["client_options"])
        if "default_headers" in client:
            client["default_headers"] = dict(client["default_headers"])
    options = _sendable_options(store.url, given)
    return BucketStoreSpec(bucket.service, bucket.name, store.prefix, store.url, options, dict(bucket.environment))


def _fsspec_spec(store: FsspecStore) -> FsspecStoreSpec:
    fs = store._fs
    kind = type(fs)
    names = [kind.protocol] if isinstance(kind.protocol, str) else [*kind.protocol]
    if "memory" in (*names, fs.storage_options.get("target_protocol")):
        raise _in_memory(store.url, kind.__name__)
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise CheckpointError(
            f'{store.url}: writer="process" does not find the class {kind.__qualname__} in another process',
            hint=f"that process does not run your program: define the class at the top level of a module, or {_USE_THREAD}",
        )
    args = _sendable_options(store.url, {str(number): value for number, value in enumerate(fs.storage_args)})
    options = _sendable_options(store.url, fs.storage_options)
    return FsspecStoreSpec(
        kind.__module__, kind.__name__, [*args.values()], options, store._path, store.url, store._settle_s
    )


def _in_memory(url: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f'{url}: writer="process" cannot open a {kind} in another process, which does not share this one\'s memory',
        hint=f"save to a path or a URL of files or objects, or {_USE_THREAD}",
    )


def _sendable_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in a form that can be sent. Errors do not show the values: there may be keys among them."""
    sendable = {}
    for name, value in options.items():
        try:
            sendable[name] = _sendable(value)
        except TypeError as exc:
            raise CheckpointError(
                f'{url}: writer="process" cannot send the option {name!r} to another process: {exc}',
                hint=f"use text and numbers, a profile, or environment variables instead, or {_USE_THREAD}",
            ) from None
    return sendable


def _sendable(value: Any) -> Any:
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    if isinstance(value, timedelta):  # only the client of object stores has these, and it takes them as text, too
        return f"{value // timedelta(microseconds=1)}us"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _sendable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sendable(each) for each in value]
    raise TypeError(f"it is a {type(value).__name__}")
