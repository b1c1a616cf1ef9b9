"""From what a user writes (a path, a URL, a store of their own) to a store."""

from __future__ import annotations

import functools
import importlib
import os
import re
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardkeep.errors import CheckpointError
from shardkeep.storage.base import Root, Store
from shardkeep.storage.fsspec import FsspecRoot, fs_errors, without_user
from shardkeep.storage.local import LocalRoot, LocalStore
from shardkeep.storage.memory import MemoryRoot
from shardkeep.storage.object_client import SCHEMES, open_bucket
from shardkeep.storage.object_store import ObjectRoot

_SCHEME = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*)://")
_HINT = (
    "give a path, a URL (file://, s3://, gs://, az://, memory://, or one that fsspec knows), or an object with the verbs of"
    " shardkeep.storage.base.Store"
)


def open_store(where: str | os.PathLike[str] | Store, *, direct: bool) -> Store:
    """
    Find the store for a place. Touches no disk, makes no directory and asks no service.

    Args:
        where: a path, a URL, or an object with a store's verbs, which is returned as it is.
        direct: whether local files may bypass the page cache.

    Raises:
        CheckpointError: the place is of a kind shardkeep does not know.

    """
    if not isinstance(where, (str, os.PathLike)) and all(hasattr(where, verb) for verb in ("get", "list", "url")):
        return where
    path = _text_of(where)
    return _by_url(path, {}) or LocalStore(_local_path(path), direct=direct)


def open_root(where: str | os.PathLike[str] | Root, *, direct: bool) -> Root:
    """
    Find the root for a place that has places below it. Touches no disk, makes no directory and asks no service.

    Args:
        where: a path, a URL, or an object with a root's verbs, which is returned as it is.
        direct: whether local files may bypass the page cache.

    Raises:
        CheckpointError: the place is of a kind shardkeep does not know.

    """
    if not isinstance(where, (str, os.PathLike)) and all(hasattr(where, verb) for verb in ("places", "place", "url")):
        return where
    path = _text_of(where)
    return _by_url(path, {}) or LocalRoot(_local_path(path), direct=direct)


def open_place(where: str | os.PathLike[str], **options: Any) -> Root:
    """
    Open a place with options of its own, to be handed to whatever takes a path or a URL.

        sk.save(state, sk.open_place("s3://bucket/run/step-100", endpoint="http://10.0.0.7:9000", requests=32))

    Options of paths are `direct` and `durable`. Those of `s3://`, `gs://` and `az://`:

    - `endpoint`, and keys, which are used alone, whatever the environment says of others. S3: `region`, `access_key_id`,
      `secret_access_key`, `session_token`, `profile`. Google: `service_account`, `service_account_key`,
      `application_credentials`, `bearer_token`. Azure: `account_name`, `account_key`, `sas_key`, `token`,
      `connection_string`, `use_emulator`. And whatever else obstore knows (`skip_signature`, …);
    - `timeout_s` of a request, `retries` of one that failed in passing, `retry_s` after which none is made again;
    - `requests` under way at once, `part_bytes` of an upload;
    - `checksum_algorithm`: by which S3 checks what arrives ("sha256", which costs nothing; "crc64nvme"; "none");
    - `conditional_puts`: whether the service refuses a put whose condition does not hold (default: it is tried out), and
      `settle_s`, the wait before looking again where it does not;
    - `client_options`: of the HTTP client (`proxy_url`, `root_certificate`, `allow_http`, …).

    Those of other URLs are handed to fsspec.

    Raises:
        CheckpointError: the place is of a kind shardkeep does not know, or an option is.

    """
    path = _text_of(where)
    found = _by_url(path, options)
    if found is not None:
        return found
    if unknown := options.keys() - {"direct", "durable"}:
        raise CheckpointError(f"{path}: a path has no option {min(unknown)!r}", hint="it has direct= and durable=")
    return LocalRoot(_local_path(path), **options)


def _text_of(where: object) -> str:
    path = os.fspath(where) if isinstance(where, os.PathLike) else where
    if not isinstance(path, str):
        raise CheckpointError(f"{where!r} is not a place to keep a checkpoint", hint=_HINT)
    if not path or "\0" in path:
        raise CheckpointError(f"{path!r} is not a place to keep a checkpoint")
    return path


def _by_url(url: str, options: dict[str, Any]) -> Root | None:
    """Open what is no path of this machine; None for what is one."""
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else "file"
    if scheme == "file":
        return None
    if scheme == "memory":
        if options:
            raise CheckpointError(f"{url}: memory:// has no option {min(options)!r}")
        return _in_memory(url)
    if scheme in SCHEMES:
        _refuse_keys(url, scheme)
        return _in_bucket(url, scheme, options)
    return _by_fsspec(url, scheme, options)


def _refuse_keys(url: str, scheme: str) -> None:
    """See that there are no keys in the URL of a bucket; where there are, they are not shown."""
    rest = url.partition("://")[2]
    name = rest.partition("/")[0]
    # A secret may have slashes in it, a bucket's name no colon. Of Azure there is container@account.
    if ("@" in name and SCHEMES[scheme] != "az") or (":" in name and "@" in rest):
        shown = f"{scheme}://{rest.rpartition('@')[2]}"
        raise CheckpointError(
            f"{shown}: keys do not belong into URLs, and there is something before the '@' of this one",
            hint="pass access_key_id= and the like to shardkeep.open_place, or set the service's variables",
        )


def _local_path(path: str) -> str:
    if not _SCHEME.match(path):
        return path
    parts = urlsplit(path)
    if parts.netloc not in {"", "localhost"}:
        host = parts.netloc.rpartition("@")[2]
        raise CheckpointError(
            f"{without_user(path)}: a file:// URL of another machine ({host})", hint="write file:///path"
        )
    if not parts.path:
        raise CheckpointError(f"{path!r} is not a place to keep a checkpoint")
    return url2pathname(parts.path)


def _segments(url: str) -> list[str]:
    """Cut what comes after the scheme at its slashes."""
    segments = url.partition("://")[2].rstrip("/").split("/")
    if not all(segments) or {".", ".."} & {*segments}:
        raise CheckpointError(
            f"{url}: not a place to keep a checkpoint", hint="write scheme://name/path, with no empty part, '.' or '..'"
        )
    return segments


def _in_bucket(url: str, scheme: str, options: dict[str, Any]) -> ObjectRoot:
    name, *below = _segments(url)
    if "@" in name:  # abfss://container@account.dfs.core.windows.net/path
        name, _, host = name.partition("@")
        options = {**_account_at(host), **options}
    prefix = "".join(f"{segment}/" for segment in below)
    return ObjectRoot(open_bucket(scheme, name, options), prefix, url.rstrip("/"))


def _account_at(host: str) -> dict[str, str]:
    """Say which account of Azure a host is of; its clouds that are apart have endpoints of their own."""
    account, _, cloud = host.partition(".")
    suffix = cloud.partition(".")[2] if cloud.startswith(("dfs.", "blob.")) else ""
    if suffix in {"", "core.windows.net"}:
        return {"account_name": account}
    return {"account_name": account, "endpoint": f"https://{account}.blob.{suffix}"}


def _in_memory(url: str) -> MemoryRoot:
    name, *below = _segments(url)
    place = _memory(name)
    for segment in below:
        place = place.place(segment)
    return place


@functools.cache
def _memory(name: str) -> MemoryRoot:
    """Return what this process keeps in its memory under a name."""
    return MemoryRoot(f"memory://{name}")


def _by_fsspec(url: str, scheme: str, options: dict[str, Any]) -> FsspecRoot:
    shown = without_user(url).rstrip("/")
    try:
        fsspec = importlib.import_module("fsspec")
    except ModuleNotFoundError as exc:
        raise CheckpointError(
            f"{shown}: no store for {scheme}:// places; fsspec, which may have one, is not installed",
            hint="pip install 'shardkeep[fsspec]', or " + _HINT,
        ) from exc
    with fs_errors("cannot open", shown):
        try:
            fs, path = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, TypeError) as exc:
            message = without_user(f"{shown}: no store for {scheme}:// places: {exc}")
            raise CheckpointError(message, hint=_HINT) from None
    return FsspecRoot(fs, path, shown)
