"""
Which bucket, with which keys, and how patiently: the one place that opens connections to object stores.

A bucket is opened once a process and set of options, so that its connections are used again. Keys come from options, else
from the environment variables that everybody uses, else from the machine's role; for S3 also from a profile, by boto3.
"""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from shardkeep.errors import BlobNotFound, CheckpointError, StorageError
from shardkeep.options import MIB
from shardkeep.storage.buffers import MemoryBudget
from shardkeep.storage.object_config import (
    CREDENTIAL_HINTS,
    environment_of,
    is_official,
    isolate_credentials,
    resolve_options,
    server_identity,
)
from shardkeep.storage.retry import TRANSIENT

# What goes wrong with an object store, in our words: which object, what the service said, and what to do about it.
#
# The library's own exceptions are not kept, not even as a cause: their text has whole URLs, and those may have keys
# in them.

_STATUS = re.compile(r"status code: (\d{3}) ?([^:<\n]*)")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,500})")  # Azure has a number and a time below it
_RETRIES = re.compile(r"after (\d+) retries")
_QUERY = re.compile(r"\?[^\s\"',]*")
_UNTRUSTED = "the server's certificate was not accepted"
_REASONS = (
    ("Connection refused", errno.ECONNREFUSED, "the connection was refused"),
    ("dns error", errno.EHOSTUNREACH, "the host's name was not found"),
    ("failed to lookup address", errno.EHOSTUNREACH, "the host's name was not found"),
    ("TimedOut", errno.ETIMEDOUT, "no answer in time"),
    ("kind: Timeout", errno.ETIMEDOUT, "no answer in time"),
    ("timed out", errno.ETIMEDOUT, "no answer in time"),
    ("lacked valid authentication", errno.EACCES, "the keys are none"),
    ("BadScheme", errno.EINVAL, "plain http is not allowed"),
    ("InvalidCertificate", errno.EACCES, _UNTRUSTED),
    ("certificate", errno.EACCES, _UNTRUSTED),
    ("Network is unreachable", errno.ENETUNREACH, "the network cannot be reached"),
    ("ConnectionReset", errno.ECONNRESET, "the connection was reset"),
    ("connection closed", errno.ECONNRESET, "the connection was closed"),
    ("IncompleteMessage", errno.ECONNRESET, "the connection was closed"),
    ("error decoding response body", errno.ECONNRESET, "the answer broke off"),
    ("kind: Connect", errno.ECONNREFUSED, "no connection could be made"),
    ("kind: Interrupted", errno.ECONNRESET, "the connection broke off"),
)
"""What to look for in the library's words, most telling first."""
_BUSY = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy"})
_TAKEN = "BlobAlreadyExists"
"""What Azure says, with a 409, of a put that is to create only; elsewhere it is a 412."""
_SAME = {
    "ContainerNotFound": "NoSuchBucket",
    "ResourceNotFound": "NoSuchBucket",  # nor such an account; of a blob it is another code
    "InvalidBlockList": "NoSuchUpload",  # who commits an upload again finds its parts gone
    "Md5Mismatch": "BadDigest",
}
"""What Azure says, in the words of the others."""
_NO_CONTAINER = "container does not exist"
"""Of a deletion of many there is no code."""
_DAMAGED = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
"""What is said of bytes that arrived otherwise than they were sent."""
_BY_STATUS = {
    400: errno.EINVAL, 401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 408: errno.ETIMEDOUT,
    409: errno.EBUSY, 412: errno.EEXIST, 416: errno.EINVAL, 429: errno.EBUSY, 503: errno.EBUSY, 504: errno.ETIMEDOUT,
}  # fmt: skip
_NO_KEYS = (
    "/latest/api/token",
    "/latest/meta-data",
    "metadata.google.internal",
    "/computeMetadata/",
    "/metadata/identity",
    "MissingAccessKeyId",
)
"""Where it is looked for keys when there are none anywhere else."""
_HINTS_BY_CODE = {
    "NoSuchBucket": "make the bucket, or correct its name{account}; nothing was written",
    "InvalidAccessKeyId": "the access key is unknown there: {keys}",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: {keys}",
    "AuthenticationFailed": "the key does not belong to the account: {keys}",
    "AccessDenied": "these keys may not do this there; the bucket's policy must allow it",
    "AuthorizationPermissionMismatch": "these keys may not do this there; they need the rights to read, write and delete",
    "ExpiredToken": "the session's token has expired: get a new one",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "BadDigest": "something on the way there changes bytes; nothing of it was kept",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
}
_HINTS_BY_ERRNO = {
    errno.ECONNREFUSED: "nothing answers there: correct the endpoint ({endpoint}), or start the service",
    errno.EHOSTUNREACH: "correct the endpoint ({endpoint}), the region or the account",
    errno.EACCES: "check keys and rights: {keys}",
    errno.EBUSY: "the service is overloaded or asks to be asked less: lower requests=, or try later",
    errno.ETIMEDOUT: "raise timeout_s=, or see whether the service is well",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


@contextmanager
def object_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn whatever the library raises inside into an error of ours."""
    try:
        yield
    except StorageError:
        raise
    except Exception as exc:
        if not is_obstore_error(exc):
            raise
        raise translate(exc, action, url, name, offset) from None


def is_obstore_error(exc: BaseException) -> bool:
    """Tell whether an exception is of the library: its own, or a built-in one that it raises for a missing object."""
    return isinstance(exc, FileNotFoundError) or (type(exc).__module__ or "").startswith("obstore")


def translate(exc: BaseException, action: str, url: str, name: str = "", offset: int | None = None) -> StorageError:
    """Say what went wrong, in our words."""
    text = str(exc)
    code = _code_in(text)
    number, summary = _judged(type(exc).__name__, text, code)
    where = f"{url}/{name}" if name else url
    at = "" if offset is None else f" at offset {offset}"
    message = f"{where}: {action}{at}: {summary} (errno {errno.errorcode.get(number, number)})"
    if any(mark in text for mark in _NO_KEYS):
        message = f"{where}: {action}{at}: no keys to sign requests with"
    hint = _hint(text, code, number, summary).format(**_names(url))
    details: dict[str, Any] = {"name": name, "offset": offset, "errno": number, "retried": _retried(text), "code": code}
    missing = number == errno.ENOENT and code not in {"NoSuchBucket", "NoSuchUpload"}
    return (BlobNotFound if missing else StorageError)(message, hint=hint, **details)


def _hint(text: str, code: str, number: int, summary: str) -> str:
    """Say what to do; names of variables are left open."""
    if summary.startswith(_UNTRUSTED):
        return "set SSL_CERT_FILE to a file of the certificates to trust, or pass client_options=dict(root_certificate=...)"
    if code not in _DAMAGED and "x-amz-checksum" in text.lower():
        return "this service takes no checksums of uploads: pass checksum_algorithm='none' to shardkeep.open_place"
    if "BadScheme" in text:
        return "use an https:// endpoint, or {allow_http}"
    if any(mark in text for mark in _NO_KEYS):
        return "no keys were found here: {keys}"
    return _HINTS_BY_CODE.get(code) or _HINTS_BY_ERRNO.get(number, "")


def _names(url: str) -> dict[str, str]:
    """Return what hints speak of, as it is called where the place is."""
    service = {"g": "gs", "a": "az"}.get(url[:1].lower(), "s3")  # gs, gcs; az, azure, abfs, abfss; s3, s3a
    return {
        "keys": CREDENTIAL_HINTS[service],
        "endpoint": _ENDPOINTS[service],
        "account": " or the account's" if service == "az" else "",
        "allow_http": "set AWS_ALLOW_HTTP=true" if service == "s3" else "pass client_options=dict(allow_http=True)",
    }


def _code_in(text: str) -> str:
    code = _found(_CODE, text)
    return _SAME.get(code, code) or ("NoSuchBucket" if _NO_CONTAINER in text else "")


def _judged(kind: str, text: str, code: str) -> tuple[int, str]:
    """Return an errno and one line."""
    found = _STATUS.search(text)
    if found is None and kind == "FileNotFoundError":
        return errno.ENOENT, code or "no such object"
    if found is None:
        for word, number, reason in _REASONS:
            if word in text:
                return number, reason + _after(text)
        return errno.EIO, _QUERY.sub("", text.partition("\n\nDebug source")[0])[:500]
    status = int(found[1])
    said = _found(_MESSAGE, text)
    summary = f"{status} {code or found[2].strip()}{': ' + said if said else ''}{_after(text)}"
    if code in _BUSY:
        return errno.EBUSY, summary
    if code == _TAKEN:
        return errno.EEXIST, summary
    if code in _DAMAGED:
        return errno.EIO, f"what arrived there is not what was sent: {summary}"
    if code == "RequestTimeout":
        return errno.ETIMEDOUT, summary
    return _BY_STATUS.get(status, errno.EIO if status >= 500 else errno.EINVAL), summary


def _retried(text: str) -> bool:
    return bool(int(_found(_RETRIES, text) or 0))


def _after(text: str) -> str:
    times = _found(_RETRIES, text)
    return f", after {times} retries" if times else ""


def _found(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


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
class RequestPolicy:
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
    manners: RequestPolicy
    official: bool
    """Whether it is the service's own endpoint, whose behaviour is known."""
    service: str
    name: str
    all_slots: threading.BoundedSemaphore
    room: MemoryBudget
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
    more = resolve_options(service, given, url, environment)
    official, at = is_official(service, more), server_identity(service, more)
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
    isolate_credentials(service, more, url, environment)
    retry = {"max_retries": manners.retries, "retry_timeout": timedelta(seconds=manners.retry_s)}
    store = _client(service, name, client_options=client, retry_config=retry, **more)
    slots = threading.BoundedSemaphore(manners.requests)
    room = MemoryBudget(manners.requests * manners.part_bytes)
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


def _manners(given: dict[str, Any]) -> RequestPolicy:
    """Take what is ours out of the options."""
    mine = {key: given.pop(key) for key in RequestPolicy.__dataclass_fields__ if key in given}
    manners = RequestPolicy(**mine)
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
        if not is_obstore_error(exc) and not isinstance(exc, ValueError):
            raise
        # Not all of what it says: there may be keys in it.
        said = str(exc).partition("\n\nDebug")[0]
        hint = (
            "see shardkeep.open_place"
            if type(exc).__name__ == "UnknownConfigurationKeyError"
            else CREDENTIAL_HINTS[service]
        )
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


# Asking an object store again where the library does not: an answer that broke off after it had begun.

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


def backoff_s(failed: int) -> float:
    """Say how long to wait after so many failures: longer each time, and not as long as others do."""
    spread = 0.5 + random.random()  # noqa: S311 - no secret
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (failed - 1) * spread))


def retry_request(
    manners: RequestPolicy, what: str, work: Callable[[], T], *, can: Callable[[], bool] = lambda: True
) -> T:
    """
    Do what can be done twice, until it succeeds or is to be given up; `can` tells whether it still can be.

    What the library has tried again itself has had its time, and is not tried here once more.
    """
    until = time.monotonic() + manners.retry_s
    failed = 0
    while True:
        try:
            return work()
        except StorageError as error:
            failed += 1
            mine = error.errno in TRANSIENT and not error.details.get("retried")
            if not mine or not can() or failed > manners.retries or time.monotonic() > until:
                raise
            log.info("%s is tried again: %s", what, error)
            time.sleep(backoff_s(failed))
