"""Where checkpoints are, seen without shardkeep: directories through the file system, buckets through boto3."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import obstore.store

from tests.support.s3_server import boto_client


@dataclass
class Look:
    """All that is in a root at some moment."""

    places: dict[str, dict[str, tuple[object, ...]]] = field(default_factory=dict)
    """The places of checkpoints, and of each its files, with something that differs if they were written again."""
    files: set[str] = field(default_factory=set)
    """Of the root itself."""
    uploads: list[str] = field(default_factory=list)
    """Multipart uploads that were neither completed nor aborted; no listing shows them."""


class Folder:
    """A root on a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        return str(self._path)

    def look(self) -> Look:
        found = Look()
        for path in self._path.iterdir() if self._path.exists() else ():
            if not path.is_dir():
                found.files.add(path.name)
            elif path.name.startswith("step-"):
                found.places[path.name] = {
                    each.name: (each.stat().st_size, each.stat().st_mtime_ns) for each in path.iterdir()
                }
        return found

    def get(self, *path: str) -> bytes | None:
        """Read a file; None where there is none."""
        try:
            return self._path.joinpath(*path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


class Bucket:
    """A root in a bucket; options are those of the server itself, with no proxy between."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self._bucket, _, path = url.removeprefix("s3://").partition("/")
        self._prefix = f"{path}/"
        self._client = _client(tuple(sorted(options.items())))

    def look(self) -> Look:
        found = Look()
        for each in self._pages("list_objects_v2", "Contents"):
            place, slash, name = each["Key"].removeprefix(self._prefix).partition("/")
            if not slash:
                found.files.add(place)
            elif name:
                found.places.setdefault(place, {})[name] = (each["Size"], each["ETag"], each["LastModified"])
        found.uploads = [
            each["Key"].removeprefix(self._prefix)
            for each in self._pages("list_multipart_uploads", "Uploads")
            if each["Key"].startswith(self._prefix)
        ]
        return found

    def get(self, *path: str) -> bytes | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + "/".join(path))
        except self._client.exceptions.NoSuchKey:
            return None
        with answer["Body"] as body:
            data: bytes = body.read()
        return data

    def _pages(self, verb: str, what: str) -> Iterator[dict[str, Any]]:
        for page in self._client.get_paginator(verb).paginate(Bucket=self._bucket, Prefix=self._prefix):
            yield from page.get(what, ())


@functools.lru_cache(maxsize=4)
def _client(options: tuple[tuple[str, Any], ...]) -> Any:
    """Open a connection, once: that takes boto3 a while, and much memory."""
    from botocore.config import Config

    return boto_client(dict(options), config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 5}))


def glance(url: str, options: dict[str, Any], *path: str) -> bytes | None:
    """Read a file of a root, from a rank, for which boto3 is too slow to start; None where there is none."""
    if not url.startswith("s3://"):
        return Folder(Path(url)).get(*path)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    store = obstore.store.S3Store(bucket, client_options={"allow_http": True}, **options)
    try:
        return bytes(obstore.get(store, "/".join((prefix, *path))).bytes())
    except FileNotFoundError:
        return None


Ground = Folder | Bucket
"""A root."""


def ground_of(url: str, options: dict[str, Any]) -> Ground:
    """Find the root that a path or a URL names."""
    return Bucket(url, options) if url.startswith("s3://") else Folder(Path(url))
