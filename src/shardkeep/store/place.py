"""From what a user writes (a path, a URL, a store of their own) to a store."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardkeep.errors import CheckpointError
from shardkeep.store.local import LocalStore
from shardkeep.store.local_root import LocalRoot
from shardkeep.store.protocol import Store
from shardkeep.store.roots import Root

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HINT = "give a path, a file:// URL, or an object with the verbs of shardkeep.store.protocol.Store"


def open_store(where: str | os.PathLike[str] | Store, *, direct: bool) -> Store:
    """
    Find the store for a place. Touches no disk and makes no directory.

    Args:
        where: a path, a `file://` URL, or an object with a store's verbs, which is returned as it is.
        direct: whether local files may bypass the page cache.

    Raises:
        CheckpointError: the place is of a kind shardkeep does not know.

    """
    if not isinstance(where, (str, os.PathLike)) and all(hasattr(where, verb) for verb in ("get", "list", "url")):
        return where
    return LocalStore(_local_path(where), direct=direct)


def open_root(where: str | os.PathLike[str] | Root, *, direct: bool) -> Root:
    """
    Find the root for a place that has places below it. Touches no disk and makes no directory.

    Args:
        where: a path, a `file://` URL, or an object with a root's verbs, which is returned as it is.
        direct: whether local files may bypass the page cache.

    Raises:
        CheckpointError: the place is of a kind shardkeep does not know.

    """
    if not isinstance(where, (str, os.PathLike)) and all(hasattr(where, verb) for verb in ("places", "place", "url")):
        return where
    return LocalRoot(_local_path(where), direct=direct)


def _local_path(where: object) -> str:
    path = os.fspath(where) if isinstance(where, os.PathLike) else where
    if not isinstance(path, str):
        raise CheckpointError(f"{where!r} is not a place to keep a checkpoint", hint=_HINT)
    scheme = _SCHEME.match(path)
    if scheme:
        path = _path_of_url(path, scheme[1].lower())
    if not path or "\0" in path:
        raise CheckpointError(f"{path!r} is not a place to keep a checkpoint")
    return path


def _path_of_url(url: str, scheme: str) -> str:
    if scheme != "file":
        raise CheckpointError(
            f"{url}: no store for {scheme}:// places",
            hint=_HINT,
        )
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"}:
        raise CheckpointError(f"{url}: a file:// URL of another machine ({parts.netloc})", hint="write file:///path")
    return url2pathname(parts.path)
