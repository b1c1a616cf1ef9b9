"""
From a store of this process to the words from which the process that writes opens it.

Only what has its own words can be opened there: a store of somebody's own may do anything in its verbs, memory cannot be
shared by a URL, and an option that is an object means nothing to another process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from shardkeep.errors import CheckpointError
from shardkeep.run.writer_places import BucketPlace, FsspecPlace, LocalPlace, Place
from shardkeep.store.fsspec_root import FsspecRoot
from shardkeep.store.fsspec_store import FsspecStore
from shardkeep.store.local import LocalStore
from shardkeep.store.local_root import LocalRoot
from shardkeep.store.memory import MemoryStore
from shardkeep.store.object_root import ObjectRoot
from shardkeep.store.objects import ObjectStore
from shardkeep.store.protocol import Store
from shardkeep.store.retrying import RetryingStore
from shardkeep.store.retrying_root import RetryingRoot

_THREAD = 'pass writer="thread"'


def place_of(store: Store) -> Place:
    """
    Say how another process opens a store.

    Raises:
        CheckpointError: it cannot.

    """
    # What is tried again, or checked, before a commit is so here: that process writes data files and commits nothing.
    if type(store) in (RetryingStore, RetryingRoot) and isinstance(store, RetryingStore):
        store = store.inner
    # By their very classes: one that was derived may do other things, which a plain one there would not do.
    kind = type(store)
    if isinstance(store, LocalStore) and kind in (LocalStore, LocalRoot):
        return LocalPlace(os.fsencode(store._path), store._direct, store._durable)
    if isinstance(store, ObjectStore) and kind in (ObjectStore, ObjectRoot):
        return _of_bucket(store)
    if isinstance(store, FsspecStore) and kind in (FsspecStore, FsspecRoot):
        return _of_fsspec(store)
    if isinstance(store, MemoryStore):
        raise _in_memory(store.url, kind.__name__)
    raise CheckpointError(
        f'{store.url}: writer="process" cannot open a {kind.__name__} in another process',
        hint=f"save to a path or a URL, or {_THREAD}",
    )


def _of_bucket(store: ObjectStore) -> BucketPlace:
    bucket = store.bucket
    given = dict(bucket.given)
    if "client_options" in given:  # kept as pairs
        given["client_options"] = client = dict(given["client_options"])
        if "default_headers" in client:
            client["default_headers"] = dict(client["default_headers"])
    return BucketPlace(
        bucket.service,
        bucket.name,
        store.prefix,
        store.url,
        _told(store.url, given),
        dict(bucket.environment),
    )


def _of_fsspec(store: FsspecStore) -> FsspecPlace:
    fs = store._fs
    kind = type(fs)
    names = [kind.protocol] if isinstance(kind.protocol, str) else [*kind.protocol]
    if "memory" in (*names, fs.storage_options.get("target_protocol")):
        raise _in_memory(store.url, kind.__name__)
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise CheckpointError(
            f'{store.url}: writer="process" does not find the class {kind.__qualname__} in another process',
            hint=f"that process does not run your program: put the class at the top of a module, or {_THREAD}",
        )
    args = _told(store.url, {str(number): value for number, value in enumerate(fs.storage_args)})
    options = _told(store.url, fs.storage_options)
    return FsspecPlace(
        kind.__module__, kind.__name__, [*args.values()], options, store._path, store.url, store._settle_s
    )


def _in_memory(url: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f'{url}: writer="process" cannot open a {kind} in another process, which has no part in this one\'s memory',
        hint=f"save to a path or a URL of files or objects, or {_THREAD}",
    )


def _told(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are sent. Their values are not shown: there may be keys among them."""
    told = {}
    for name, value in options.items():
        try:
            told[name] = _plain(value)
        except TypeError as exc:
            raise CheckpointError(
                f'{url}: writer="process" cannot hand the option {name!r} to another process: {exc}',
                hint=f"give text and numbers, a profile, or variables of the environment instead, or {_THREAD}",
            ) from None
    return told


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    if isinstance(value, timedelta):  # only the client of object stores has these, which takes them as text, too
        return f"{value // timedelta(microseconds=1)}us"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    raise TypeError(f"it is a {type(value).__name__}")
