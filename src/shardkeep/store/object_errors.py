"""
What goes wrong with an object store, in our words: which object, what the service said, and what to do about it.

The library's own exceptions are not kept, not even as a cause: their text has whole URLs, and those may have keys in them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardkeep.errors import BlobNotFound, StorageError

_STATUS = re.compile(r"status code: (\d{3}) ?([^:<\n]*)")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,500})</Message>")
_RETRIES = re.compile(r"after (\d+) retries")
_QUERY = re.compile(r"\?[^\s\"',]*")
_REASONS = (
    ("Connection refused", errno.ECONNREFUSED, "the connection was refused"),
    ("dns error", errno.EHOSTUNREACH, "the host's name was not found"),
    ("failed to lookup address", errno.EHOSTUNREACH, "the host's name was not found"),
    ("TimedOut", errno.ETIMEDOUT, "no answer in time"),
    ("kind: Timeout", errno.ETIMEDOUT, "no answer in time"),
    ("timed out", errno.ETIMEDOUT, "no answer in time"),
    ("BadScheme", errno.EINVAL, "plain http is not allowed"),
    ("certificate", errno.EACCES, "the server's certificate was not accepted"),
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
    "/metadata/identity",
    "MissingAccessKeyId",
)
"""Where it is looked for keys when there are none anywhere else."""
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (GOOGLE_*, AZURE_* elsewhere), or pass them to shardkeep.open_place"
_HINTS_BY_CODE = {
    "NoSuchBucket": "make the bucket, or correct its name; nothing was written",
    "InvalidAccessKeyId": "the access key is unknown there: " + _KEYS,
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: " + _KEYS,
    "AccessDenied": "these keys may not do this there; the bucket's policy must allow it",
    "ExpiredToken": "the session's token has expired: get a new one",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "BadDigest": "something on the way there changes bytes; nothing of it was kept",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
}
_HINTS_BY_ERRNO = {
    errno.ECONNREFUSED: "nothing answers there: correct the endpoint (AWS_ENDPOINT_URL), or start the service",
    errno.EHOSTUNREACH: "correct the endpoint (AWS_ENDPOINT_URL) or the region",
    errno.EACCES: "check keys and rights: " + _KEYS,
    errno.EBUSY: "the service is overloaded or asks to be asked less: lower requests=, or try later",
    errno.ETIMEDOUT: "raise timeout_s=, or see whether the service is well",
}


@contextmanager
def object_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn whatever the library raises inside into an error of ours."""
    try:
        yield
    except StorageError:
        raise
    except Exception as exc:
        if not is_foreign(exc):
            raise
        raise translated(exc, action, url, name, offset) from None


def is_foreign(exc: BaseException) -> bool:
    """Tell whether an exception is of the library: its own, or a built-in one that it raises for a missing object."""
    return isinstance(exc, FileNotFoundError) or (type(exc).__module__ or "").startswith("obstore")


def translated(exc: BaseException, action: str, url: str, name: str = "", offset: int | None = None) -> StorageError:
    """Say what went wrong, in our words."""
    text = str(exc)
    code = _found(_CODE, text)
    number, summary = _judged(type(exc).__name__, text, code)
    where = f"{url}/{name}" if name else url
    at = "" if offset is None else f" at offset {offset}"
    message = f"{where}: {action}{at}: {summary} (errno {errno.errorcode.get(number, number)})"
    hint = _HINTS_BY_CODE.get(code, "")
    if any(mark in text for mark in _NO_KEYS):
        hint, message = "no keys were found here: " + _KEYS, f"{where}: {action}{at}: no keys to sign requests with"
    if "BadScheme" in text:
        hint = "use an https:// endpoint, or set AWS_ALLOW_HTTP=true"
    if code not in _DAMAGED and "x-amz-checksum" in text.lower():
        hint = "this service takes no checksums of uploads: pass checksum_algorithm='none' to shardkeep.open_place"
    hint = hint or _HINTS_BY_ERRNO.get(number, "")
    details: dict[str, Any] = {"name": name, "offset": offset, "errno": number, "retried": _retried(text), "code": code}
    missing = number == errno.ENOENT and code not in {"NoSuchBucket", "NoSuchUpload"}
    return (BlobNotFound if missing else StorageError)(message, hint=hint, **details)


def _judged(kind: str, text: str, code: str) -> tuple[int, str]:
    """Return an errno and one line."""
    found = _STATUS.search(text)
    if found is None and kind == "FileNotFoundError":
        return errno.ENOENT, "no such object"
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
