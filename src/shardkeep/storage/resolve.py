"""From what a user passes (a path, a URL, a store of their own) to a store."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World
from shardkeep.errors import CheckpointError
from shardkeep.options import set_for_children
from shardkeep.storage import fsspec, object_store
from shardkeep.storage.base import Root, Store, StoreSpec, scheme_of
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.object_client import SCHEMES, environment_of, open_bucket

_HINT = (
    "pass a path, a URL (file://, s3://, gs://, az://, memory://, or one that fsspec knows), or an object with the verbs of"
    " shardkeep.storage.base.Store"
)
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def open_store(where: str | os.PathLike[str] | Store, *, direct: bool) -> Store:
    """Return the store for a place, without I/O; a store as it is. `direct`: local files may bypass the cache."""
    return cast("Store", _open(where, ("get", "list", "url"), direct=direct))


def open_on_all_ranks(where: str | os.PathLike[str] | Store, world: World, *, direct: bool, doing: str) -> Store:
    """Open a store for a call of all ranks; if that fails on this rank, the call fails on all of them."""
    try:
        return open_store(where, direct=direct)
    except CheckpointError:
        with rendezvous(world, f"{doing} {where!r:.200}"):  # the others wait for this rank
            raise


def open_root(where: str | os.PathLike[str] | Root, *, direct: bool) -> Root:
    """Return the root for a place that has places below it; see `open_store`."""
    return cast("Root", _open(where, ("places", "place", "url"), direct=direct))


def _open(where: object, verbs: Sequence[str], *, direct: bool) -> object:
    if not isinstance(where, (str, os.PathLike)) and all(hasattr(where, verb) for verb in verbs):
        return where
    path = _text_of(where)
    return _by_url(path, {}) or LocalStore(_local_path(path), direct=direct)


def open_place(where: str | os.PathLike[str], **options: Any) -> Root:
    """
    Open a place with options of its own; the result can be passed wherever a path or a URL can.

        place = sk.open_place("s3://bucket/run/step-100", requests=32)
        sk.save(state, place)

    Options of paths are `direct` and `durable`. Those of `s3://`, `gs://` and `az://`:

    - `endpoint`, and credentials, which are then used alone, whatever the environment says. S3: `region`, `access_key_id`,
      `secret_access_key`, `session_token`, `profile`. Google: `service_account`, `service_account_key`,
      `application_credentials`, `bearer_token`. Azure: `account_name`, `account_key`, `sas_key`, `token`,
      `connection_string`, `use_emulator`. And all other options of obstore (`skip_signature`, …);
    - `timeout_s` of a request, `retries` of one that failed for a transient reason, `retry_s` after which none is retried;
    - `requests` in flight at once, `part_bytes` of an upload;
    - `checksum_algorithm`: how S3 verifies uploads ("sha256", which costs nothing; "crc64nvme"; "none");
    - `conditional_puts`: whether the service checks the conditions of puts (default: found out by a probe), and
      `settle_s`, the wait before reading back where it does not;
    - `client_options`: of the HTTP client (`proxy_url`, `root_certificate`, `allow_http`, …).

    Options of other URLs are passed to fsspec.

    Raises:
        CheckpointError: shardkeep does not support this kind of place, or an option.

    """
    path = _text_of(where)
    found = _by_url(path, options)
    if found is not None:
        return found
    if unknown := options.keys() - {"direct", "durable"}:
        raise CheckpointError(f"{path}: a path has no option {min(unknown)!r}", hint="it has direct= and durable=")
    return LocalStore(_local_path(path), **options)


def open_spec(spec: StoreSpec) -> Store:
    """Open a store that another process has described (`base.spec_of`), in the environment it had there."""
    place = os.fsdecode(spec.place)
    service = SCHEMES.get(scheme_of(place) or "")
    now = environment_of(service) if service else {}
    for variable in {*now, *spec.environment}:
        if now.get(variable) != spec.environment.get(variable):  # only if necessary: obstore's threads may be reading
            set_for_children(variable, spec.environment.get(variable))
    return open_place(place, **spec.options)


def _text_of(where: object) -> str:
    path = os.fspath(where) if isinstance(where, os.PathLike) else where
    if not isinstance(path, str):
        swapped = "pass the state first, then the place; " if isinstance(where, dict) else ""
        raise CheckpointError(f"a {type(where).__name__} is not a place to keep a checkpoint", hint=swapped + _HINT)
    if not path or "\0" in path:
        raise CheckpointError(f"{path!r} is not a place to keep a checkpoint")
    if lost := _LOST_SLASH.match(path):  # the rest is not shown: it may begin with a password
        raise CheckpointError(
            f"a place that begins with {lost[0]} is a URL that lost a slash, as in a pathlib.Path",
            hint=f"pass the URL as a str that begins with {lost[0]}/; a path may begin with ./{lost[0]}",
        )
    if path.partition("/")[0] == "~":
        hint = "pass os.path.expanduser(path); the path of a directory of this name may begin with ./~"
        raise CheckpointError(f"{path}: only a shell replaces ~ by the home directory", hint=hint)
    return path


def _by_url(url: str, options: dict[str, Any]) -> Root | None:
    scheme = scheme_of(url)
    if scheme is None or scheme == "file":
        return None
    if scheme == "memory":
        if options:
            raise CheckpointError(f"{url}: memory:// has no option {min(options)!r}")
        name, *below = _segments(url)
        return functools.reduce(MemoryStore.place, below, _memory(name))
    if scheme in SCHEMES:
        return _in_bucket(url, scheme, options)
    return _by_fsspec(url, scheme, options)


def _local_path(path: str) -> str:
    if scheme_of(path) is None:
        return path
    parts = urlsplit(path)
    if parts.netloc not in {"", "localhost"}:
        host = parts.netloc.rpartition("@")[2]
        raise CheckpointError(
            f"{fsspec.without_user(path)}: a file:// URL of another machine ({host})", hint="write file:///path"
        )
    if not parts.path:
        raise CheckpointError(f"{path!r} is not a place to keep a checkpoint")
    return url2pathname(parts.path)


def _segments(url: str) -> list[str]:
    segments = url.partition("://")[2].rstrip("/").split("/")
    if not all(segments) or {".", ".."} & {*segments}:
        raise CheckpointError(
            f"{url}: not a place to keep a checkpoint", hint="write scheme://name/path, with no empty part, '.' or '..'"
        )
    return segments


def _in_bucket(url: str, scheme: str, options: dict[str, Any]) -> object_store.ObjectStore:
    rest = url.partition("://")[2]
    name = rest.partition("/")[0]
    # A secret may contain slashes; the name of a bucket has no colon. Azure has container@account.
    if ("@" in name and SCHEMES[scheme] != "az") or (":" in name and "@" in rest):
        shown = f"{scheme}://{rest.rpartition('@')[2]}"  # without the keys
        raise CheckpointError(
            f"{shown}: a URL must not contain keys, and this one has something before the '@'",
            hint="pass access_key_id= and so on to shardkeep.open_place, or set the environment variables of the service",
        )
    name, *below = _segments(url)
    if "@" in name:  # abfss://container@account.dfs.core.windows.net/path
        name, _, host = name.partition("@")
        account, _, cloud = host.partition(".")
        options = {"account_name": account, **options}
        suffix = cloud.partition(".")[2] if cloud.startswith(("dfs.", "blob.")) else ""
        if suffix not in {"", "core.windows.net"}:  # one of the separate national clouds
            options = {"endpoint": f"https://{account}.blob.{suffix}", **options}
    prefix = "".join(f"{segment}/" for segment in below)
    return object_store.ObjectStore(open_bucket(scheme, name, options), prefix, url.rstrip("/"))


@functools.cache
def _memory(name: str) -> MemoryStore:
    return MemoryStore(f"memory://{name}")


def _by_fsspec(url: str, scheme: str, options: dict[str, Any]) -> fsspec.FsspecStore:
    shown = fsspec.without_user(url).rstrip("/")
    with fsspec.fs_errors("cannot open", shown):
        try:
            fs, path = fsspec.url_to_fs(url, **options)
        except (ImportError, ValueError, TypeError) as exc:
            message = fsspec.without_user(f"{shown}: no store for {scheme}:// URLs: {exc}")
            raise CheckpointError(message, hint=_HINT) from None
    return fsspec.FsspecStore(fs, path, url.rstrip("/"), options)
