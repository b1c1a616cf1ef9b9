"""
Errors of object stores: which object, what the service answered, and what to do about it.

obstore's own exceptions are dropped, even as a cause: their text contains whole URLs, which may contain keys.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.object_config import CREDENTIAL_HINTS

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
    ("lacked valid authentication", errno.EACCES, "the credentials are not valid"),
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
"""What to look for in the text of obstore's exceptions, the most specific first."""
_BUSY = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy"})
_TAKEN = "BlobAlreadyExists"
"""Azure answers 409 with this code where a put may only create; the others answer 412."""
_SAME = {
    "ContainerNotFound": "NoSuchBucket",
    "ResourceNotFound": "NoSuchBucket",  # or the account does not exist; a missing blob has another code
    "InvalidBlockList": "NoSuchUpload",  # the answer to committing an upload twice
    "Md5Mismatch": "BadDigest",
}
"""Azure's error codes, as the other services name them."""
_NO_CONTAINER = "container does not exist"
"""In the text of a failed bulk deletion, which has no code."""
_DAMAGED = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
"""The service received other bytes than were sent."""
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
"""Traces of a search for credentials that were given nowhere."""
_HINTS_BY_CODE = {
    "NoSuchBucket": "create the bucket, or correct its name{account}; nothing was written",
    "InvalidAccessKeyId": "the access key is unknown there: {keys}",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: {keys}",
    "AuthenticationFailed": "the key does not belong to the account: {keys}",
    "AccessDenied": "these credentials do not allow this; the bucket's policy must grant it",
    "AuthorizationPermissionMismatch": "these credentials do not allow this; they need permission to read, write and delete",
    "ExpiredToken": "the session's token has expired: get a new one",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "BadDigest": "the network changed bytes on the way; the service kept none of them",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
}
_HINTS_BY_ERRNO = {
    errno.ECONNREFUSED: "nothing answers there: correct the endpoint ({endpoint}), or start the service",
    errno.EHOSTUNREACH: "correct the endpoint ({endpoint}), the region or the account",
    errno.EACCES: "check credentials and permissions: {keys}",
    errno.EBUSY: "the service is overloaded or throttles requests: lower requests=, or try later",
    errno.ETIMEDOUT: "raise timeout_s=, or check the service",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


@contextmanager
def object_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn an exception that obstore raises inside into one of our errors."""
    try:
        yield
    except StorageError:
        raise
    except Exception as exc:
        if not is_obstore_error(exc):
            raise
        raise translate(exc, action, url, name, offset) from None


def is_obstore_error(exc: BaseException) -> bool:
    """Return whether obstore raised an exception: its own, or the built-in one for a missing object."""
    return isinstance(exc, FileNotFoundError) or (type(exc).__module__ or "").startswith("obstore")


def translate(exc: BaseException, action: str, url: str, name: str = "", offset: int | None = None) -> StorageError:
    """Return our error for an exception of obstore."""
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
    """Return what to do, with placeholders for the names of variables."""
    if summary.startswith(_UNTRUSTED):
        return "set SSL_CERT_FILE to a file of the certificates to trust, or pass client_options=dict(root_certificate=...)"
    if code not in _DAMAGED and "x-amz-checksum" in text.lower():
        return (
            "this service does not accept checksums of uploads: pass checksum_algorithm='none' to shardkeep.open_place"
        )
    if "BadScheme" in text:
        return "use an https:// endpoint, or {allow_http}"
    if any(mark in text for mark in _NO_KEYS):
        return "no keys were found here: {keys}"
    return _HINTS_BY_CODE.get(code) or _HINTS_BY_ERRNO.get(number, "")


def _names(url: str) -> dict[str, str]:
    """Return the values of the placeholders in hints, for the service of a URL."""
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
    """Return an errno and a summary in one line."""
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
        return errno.EIO, f"the service received other bytes than were sent: {summary}"
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
