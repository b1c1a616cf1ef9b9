"""
As much of Google Cloud Storage as the library asks for, on this machine, for tests.

    with GoogleServer() as server:
        store = open_place(server.url("tests/a"), **server.options)

This is not Google's software, and was never compared with it: it is what its authors know of Google's XML API, in which
objects are put, read, listed, deleted and uploaded in parts, and conditions are on generations. So it shows that the
library and its client agree with that reading. It runs in threads of this process, keeps all in memory, and refuses keys
that are none, ranges beyond the end and small parts.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "shardkeep-tests"
PAGE = 200
"""Names in one answer: a fifth of Google's, so that tests of several pages are quick."""
_LEAST_PART_BYTES = 5 << 20
_STATUS = {
    "NoSuchBucket": 404, "NoSuchKey": 404, "NoSuchUpload": 404, "PreconditionFailed": 412, "InvalidRange": 416,
    "AuthenticationRequired": 401, "EntityTooSmall": 400, "InvalidPart": 400, "MethodNotAllowed": 405,
}  # fmt: skip


@dataclass(frozen=True)
class _Object:
    data: bytes
    generation: int
    tag: str
    modified_s: float


@dataclass
class _Bucket:
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)


class _Refused(Exception):
    """A request that is answered with an error, by its code."""


class GoogleServer:
    """The service, as long as the context lasts."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.accepts: Callable[[str], bool] = lambda token: token == self.token
        """Says whether a token is good; to be set where keys of another kind are tried."""
        self.buckets: dict[str, _Bucket] = {}
        self.lock = threading.Lock()
        self.generations = itertools.count(1_700_000_000_000_000)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": self}))
        self._server.daemon_threads = True  # connections that are kept open end with the process
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="google", daemon=True)
        self.port = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.options: dict[str, Any] = {"endpoint": self.endpoint, "bearer_token": self.token}
        self.environment = {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": self.token}

    def __enter__(self) -> GoogleServer:  # noqa: PYI034 - Python 3.10 has no Self
        """Start it, and make a bucket."""
        self.make_bucket(BUCKET)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def url(self, path: str = "", bucket: str = BUCKET) -> str:
        """Name a place there."""
        return f"gs://{bucket}/{path}".rstrip("/")

    def make_bucket(self, name: str) -> None:
        """Make a bucket, if there is none of that name."""
        self.buckets.setdefault(name, _Bucket())


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    service: GoogleServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in {"do_GET", "do_HEAD", "do_PUT", "do_POST", "do_DELETE"}:
            return self._serve
        raise AttributeError(name)

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        name, _, key = unquote(parts.path).lstrip("/").partition("/")
        try:
            if not self.service.accepts((self.headers.get("Authorization") or "").removeprefix("Bearer ")):
                raise _Refused("AuthenticationRequired")
            with self.service.lock:
                if name not in self.service.buckets:
                    raise _Refused("NoSuchBucket")
                status, headers, answer = self._answered(self.service.buckets[name], key, query, body)
        except _Refused as refused:
            code = str(refused)
            status, headers = _STATUS[code], {"Content-Type": "application/xml"}
            answer = _xml("Error", f"<Code>{code}</Code><Message>It was refused.</Message>")
        self.send_response(status)
        for each, value in headers.items():
            self.send_header(each, value)
        if status != 204 and "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(answer)

    def _answered(
        self, bucket: _Bucket, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query or "uploadId" in query:
            return self._upload(bucket, key, query, body)
        if not key and self.command == "GET":
            return 200, {}, _listing(bucket, query)
        if self.command == "PUT":
            self._check_generation(bucket, key)
            return 200, self._headers(self._keep(bucket, key, body)), b""
        if key not in bucket.objects:
            raise _Refused("NoSuchKey")
        if self.command == "DELETE":
            self._check_generation(bucket, key)
            del bucket.objects[key]
            return 204, {}, b""
        return self._read(bucket.objects[key])

    # -- objects -----------------------------------------------------------------------------------------------

    def _keep(self, bucket: _Bucket, key: str, data: bytes) -> _Object:
        kept = bucket.objects[key] = _Object(data, next(self.service.generations), _tag(data), time.time())
        return kept

    def _check_generation(self, bucket: _Bucket, key: str) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        there = bucket.objects[key].generation if key in bucket.objects else 0
        if wanted is not None and int(wanted) != there:
            raise _Refused("PreconditionFailed")

    def _headers(self, found: _Object) -> dict[str, str]:
        date = formatdate(found.modified_s, usegmt=True)
        return {"ETag": found.tag, "x-goog-generation": str(found.generation), "Last-Modified": date}

    def _read(self, found: _Object) -> tuple[int, dict[str, str], bytes]:
        if self.headers.get("If-Match", found.tag) != found.tag:
            raise _Refused("PreconditionFailed")
        headers, nbytes = self._headers(found), len(found.data)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return 200, {**headers, "Content-Length": str(nbytes)}, found.data
        start, stop = int(wanted[1]), min(nbytes, int(wanted[2] or nbytes) + 1)
        if start >= nbytes:
            raise _Refused("InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
        return 206, {**headers, "Content-Length": str(stop - start)}, found.data[start:stop]

    # -- uploads in parts --------------------------------------------------------------------------------------

    def _upload(
        self, bucket: _Bucket, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            made = secrets.token_hex(8)
            bucket.uploads[made] = (key, {})
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{made}</UploadId>")
        number = query["uploadId"]
        if bucket.uploads.get(number, ("",))[0] != key:
            raise _Refused("NoSuchUpload")
        parts = bucket.uploads[number][1]
        if self.command == "DELETE":
            del bucket.uploads[number]
            return 204, {}, b""
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": _tag(body)}, b""
        if self.command != "POST":
            raise _Refused("MethodNotAllowed")
        self._keep(bucket, key, _joined(parts, body.decode()))
        del bucket.uploads[number]
        kept = bucket.objects[key]
        answer = _xml("CompleteMultipartUploadResult", f"<ETag>{escape(kept.tag)}</ETag>")
        return 200, self._headers(kept), answer


def _tag(data: bytes) -> str:
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"'


def _joined(parts: dict[int, bytes], wanted: str) -> bytes:
    """Put the parts together that a list names, by number and tag."""
    numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", wanted)]
    tags = [tag.replace("&quot;", '"') for tag in re.findall(r"<ETag>([^<]*)</ETag>", wanted)]
    if not numbers or [_tag(parts.get(number, b"")) for number in numbers] != tags:
        raise _Refused("InvalidPart")
    if any(len(parts[number]) < _LEAST_PART_BYTES for number in numbers[:-1]):
        raise _Refused("EntityTooSmall")
    return b"".join(parts[number] for number in numbers)


def _listing(bucket: _Bucket, query: dict[str, str]) -> bytes:
    """Name what begins with a prefix, up to the delimiter, a page of it."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    after = query.get("continuation-token") or query.get("start-after") or ""
    found: dict[str, str] = {}
    for key in sorted(bucket.objects):
        rest = key.removeprefix(prefix)
        if not key.startswith(prefix):
            continue
        if delimiter and delimiter in rest:
            level = prefix + rest[: rest.index(delimiter) + len(delimiter)]
            found[level] = f"<CommonPrefixes><Prefix>{escape(level)}</Prefix></CommonPrefixes>"
        else:
            found[key] = _listed(key, bucket.objects[key])
    names = [name for name in sorted(found) if name > after]
    page = names[: min(PAGE, int(query.get("max-keys", PAGE)))]
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(names) > len(page) else ""
    return _xml("ListBucketResult", more + "".join(found[name] for name in page))


def _listed(key: str, found: _Object) -> str:
    date = datetime.fromtimestamp(found.modified_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"<Contents><Key>{escape(key)}</Key><Generation>{found.generation}</Generation>"
        f"<LastModified>{date}</LastModified><ETag>{escape(found.tag)}</ETag>"
        f"<Size>{len(found.data)}</Size></Contents>"
    )


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode()
