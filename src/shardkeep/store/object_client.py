"""
Which bucket, with which keys, and how patiently: the one place that opens connections to object stores.

A bucket is opened once a process and set of options, so that its connections are used again. Keys come from options, else
from the environment variables that everybody uses, else from the machine's role; for S3 also from a profile, by boto3.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from shardkeep.errors import CheckpointError
from shardkeep.options import MIB
from shardkeep.store.object_errors import is_foreign
from shardkeep.store.object_parts import Room
from shardkeep.store.object_settings import KEYS, environment_of, home, is_official, keys_alone, settled

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
"""What people write, and which service it is."""
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_KEY_OPTIONS = frozenset({
    "access_key_id", "credential_provider", "skip_signature", "web_identity_token_file",
    "container_credentials_relative_uri", "container_credentials_full_uri",
})  # fmt: skip
_OTHER_KEYS = (
    "AWS_ACCESS_KEY_ID", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
_MOST_PARTS = 10_000
"""Of one upload to S3."""
_LEAST_PART_BYTES = 5 * MIB
"""Of one to S3, but for the last part."""
_KEYS_LAST = timedelta(minutes=10)
_INSTALL = "pip install 'shardkeep[cloud]'"


@dataclass(frozen=True)
class Manners:
    """How requests are made."""

    timeout_s: float = 60.0
    """Of one request, with its body."""
    retries: int = 8
    """Of one request that failed in passing."""
    retry_s: float = 180.0
    """No request is begun again after so long."""
    requests: int = 16
    """Under way at once, at most."""
    part_bytes: int = 8 * MIB
    """Of an upload; larger where there would be too many."""
    conditional_puts: bool | None = None
    """Whether the service refuses a put whose condition does not hold; None: it is tried out."""
    settle_s: float = 1.0
    """Where it does not: how long after a put it is looked whose bytes are there."""

    def part_bytes_for(self, nbytes: int) -> int:
        """Say how large the parts of a blob are."""
        least = -(-nbytes // _MOST_PARTS)
        return max(self.part_bytes, -(-least // MIB) * MIB)


@dataclass(frozen=True)
class Bucket:
    """Connections to a bucket."""

    opened: Any
    """The library's client."""
    manners: Manners
    official: bool
    """Whether it is the service's own endpoint, whose behaviour is known."""
    service: str
    name: str
    all_slots: threading.BoundedSemaphore
    room: Room
    """For parts that are copied before they are sent, of all uploads together."""
    tried: dict[str, bool] = field(default_factory=dict)
    """What was found out about it."""
    warned: set[str] = field(default_factory=set)
    """What the user was told of."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """For what threads of this process must do one after the other."""
    given: dict[str, Any] = field(default_factory=dict)
    """The options it was opened with; there are keys among them."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """What its variables were when it was opened: whoever opens it again goes by these. There may be keys among them."""
    home: tuple[str, ...] = ()
    """Of which server and account it is, however they were named."""

    def __repr__(self) -> str:
        return f"Bucket({self.service}, {self.name!r})"  # and no keys

    @property
    def client(self) -> Any:
        """The library's client, in a process that can use it."""
        self.check_process()
        return self.opened

    @property
    def slots(self) -> threading.BoundedSemaphore:
        """One for each request that may be under way."""
        self.check_process()  # threads that hold some were not forked with it, and give none back
        return self.all_slots

    def check_process(self) -> None:
        """
        See whether the library works in this process, which becomes the one that uses it if there was none.

        Its threads are not there after a fork, also not for a new client: whoever asked them would wait for ever.
        """
        if os.getpid() != _first_user():
            raise CheckpointError(
                f"{self.service}://{self.name}: this process was forked after the store was used, and cannot use it",
                hint="start it with spawn or forkserver (DataLoader: multiprocessing_context='forkserver')",
            )


@functools.cache
def _first_user() -> int:
    """Return the process that was the first to use the library, of this one and those it was forked from."""
    return os.getpid()


def open_bucket(scheme: str, name: str, options: dict[str, Any]) -> Bucket:
    """
    Open a bucket. Asks nothing of it yet.

    Raises:
        CheckpointError: an option is unknown or makes no sense, or the library is missing.

    """
    service = SCHEMES[scheme]
    try:
        # The environment is part of what is asked for: it may change between two calls.
        return _opened(service, name, _frozen(options), tuple(environment_of(service).items()))
    except TypeError as exc:
        raise CheckpointError(f"{scheme}://{name}: an option has a value of the wrong type: {exc}") from None


def _frozen(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, _frozen(value) if isinstance(value, dict) else value)
        for key, value in sorted(options.items())
        if value is not None
    )


@functools.lru_cache(maxsize=64)
def _opened(
    service: str, name: str, options: tuple[tuple[str, Any], ...], read: tuple[tuple[str, str | None], ...]
) -> Bucket:
    given, environment = dict(options), dict(read)
    manners = _manners(given)
    url = f"{service}://{name}"
    more = settled(service, given, url, environment)
    official, at = is_official(service, more), home(service, more)
    endpoint = str(more.get("endpoint", ""))
    if service == "gs" and endpoint:
        more["base_url"] = more.pop("endpoint")
    if service == "s3" and endpoint and environment.get("AWS_ENDPOINT_URL_S3") is not None:
        more["aws_endpoint_url_s3"] = endpoint  # or the variable would come before the option
    client: dict[str, Any] = {"timeout": timedelta(seconds=manners.timeout_s), "connect_timeout": timedelta(seconds=10)}
    client.update(more.pop("client_options", ()))
    if "default_headers" in client:
        client["default_headers"] = dict(client["default_headers"])
    if endpoint.lower().startswith("http://"):  # somebody said so
        client.setdefault("allow_http", True)
    if service == "s3":
        _add_checksums(more, environment)
        _add_certificates(client, url, environment)
    if service == "s3" and (provider := _boto3_keys(more, environment)):
        more["credential_provider"] = provider
    keys_alone(service, more, url, environment)
    retry = {"max_retries": manners.retries, "retry_timeout": timedelta(seconds=manners.retry_s)}
    store = _client(service, name, client_options=client, retry_config=retry, **more)
    slots = threading.BoundedSemaphore(manners.requests)
    room = Room(manners.requests * manners.part_bytes)
    return Bucket(
        store, manners, official, service, name, slots, room, given=dict(options), environment=environment, home=at
    )


def _add_checksums(more: dict[str, Any], environment: Mapping[str, str | None]) -> None:
    """
    Let S3 compare what arrives with a checksum, unless somebody says which one, or that there shall be none.

    SHA-256, because requests are signed with it anyway: it costs nothing.
    """
    if not environment.get("AWS_CHECKSUM_ALGORITHM"):
        more.setdefault("checksum_algorithm", "sha256")
    if str(more.get("checksum_algorithm")).lower() in {"none", "false"}:
        del more["checksum_algorithm"]


def _add_certificates(client: dict[str, Any], url: str, environment: Mapping[str, str | None]) -> None:
    """Trust, as the AWS tools do, what a variable names; the library does not read it."""
    file = environment.get("AWS_CA_BUNDLE")
    if file and "root_certificate" not in client:
        try:
            with open(file, "rb") as bundle:
                client["root_certificate"] = bundle.read()
        except OSError as exc:
            raise CheckpointError(
                f"{url}: the certificates cannot be read: {exc}", hint="correct the variable AWS_CA_BUNDLE"
            ) from None


def _manners(given: dict[str, Any]) -> Manners:
    """Take what is ours out of the options."""
    mine = {key: given.pop(key) for key in Manners.__dataclass_fields__ if key in given}
    manners = Manners(**mine)
    for key in ("timeout_s", "retry_s", "requests", "part_bytes"):
        if not getattr(manners, key) > 0:
            raise CheckpointError(f"{key}={getattr(manners, key)!r}: must be more than 0")
    if manners.retries < 0 or manners.settle_s < 0:
        raise CheckpointError("retries and settle_s cannot be negative")
    if manners.part_bytes < _LEAST_PART_BYTES:
        raise CheckpointError(f"part_bytes={manners.part_bytes}: S3 takes no parts of less than {_LEAST_PART_BYTES}")
    return manners


def obstore() -> Any:
    """Return the library, or say how to install it."""
    try:
        return importlib.import_module("obstore")
    except ModuleNotFoundError as exc:
        raise CheckpointError("object stores need the package obstore", hint=_INSTALL) from exc


def _client(service: str, name: str, **more: Any) -> Any:
    stores = importlib.import_module(f"{obstore().__name__}.store")
    try:
        return getattr(stores, _CLASSES[service])(name, **more)
    except Exception as exc:
        if not is_foreign(exc) and not isinstance(exc, ValueError):
            raise
        # Not all of what it says: there may be keys in it.
        said = str(exc).partition("\n\nDebug")[0]
        hint = "see shardkeep.open_place" if type(exc).__name__ == "UnknownConfigurationKeyError" else KEYS[service]
        raise CheckpointError(f"cannot open {service}://{name}: {said}", hint=hint) from None


def has_keys(options: dict[str, Any], environment: Mapping[str, str | None]) -> bool:
    """Tell whether keys for S3 were given, or the want of them, so that no profile counts."""
    if _KEY_OPTIONS & options.keys():
        return True
    return not options.get("profile") and any(map(environment.get, _OTHER_KEYS))


def _boto3_keys(more: dict[str, Any], environment: Mapping[str, str | None]) -> Any:
    """Return keys by a profile, where one is asked for, or where there are no others and the machine has profiles."""
    if has_keys(more, environment):
        more.pop("profile", None)
        return None
    profile = more.pop("profile", None) or environment.get("AWS_PROFILE")
    if not profile and not os.path.exists(
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    ):
        return None
    try:
        boto3 = importlib.import_module("boto3")
    except ModuleNotFoundError as exc:
        if not profile:
            return None
        raise CheckpointError(f"the profile {profile!r} needs the package boto3", hint=_INSTALL) from exc
    try:
        keys = boto3.Session(profile_name=profile).get_credentials()
    except Exception as exc:  # noqa: BLE001 - of botocore, which need not be there to name them
        raise CheckpointError(f"the profile {profile or 'default'!r} gives no keys: {exc}") from None
    return None if keys is None else _Refreshed(keys)


class _Refreshed:
    """Keys that boto3 renews."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys

    def __call__(self) -> dict[str, Any]:
        now = self._keys.get_frozen_credentials()
        until = datetime.now(timezone.utc) + _KEYS_LAST
        return {
            "access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token, "expires_at": until,
        }  # fmt: skip
