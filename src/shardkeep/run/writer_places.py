"""
Stores in words, from which the process that writes opens them again.

There are keys among these words: they go through its pipes and nowhere else, so that no list of processes, no file and
no log shows them. A library that talks to a store is imported there when a save needs it, and begins afresh.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import msgspec

from shardkeep.errors import CheckpointError
from shardkeep.options import set_for_children, setting
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import Store


class LocalPlace(msgspec.Struct, frozen=True, tag=True):
    """A directory of this machine."""

    path: bytes
    """Absolute, as the system has it."""
    direct: bool
    durable: bool

    def opened(self) -> LocalStore:
        """Open it here."""
        return LocalStore(os.fsdecode(self.path), direct=self.direct, durable=self.durable)


class BucketPlace(msgspec.Struct, frozen=True, tag=True):
    """A prefix of a bucket."""

    service: str
    name: str
    prefix: str
    url: str
    options: dict[str, Any]
    """As the bucket was opened with; there may be keys among them."""
    environment: dict[str, str | None]
    """What its variables were in the training process when it was opened; there may be keys among them, too."""

    def __repr__(self) -> str:
        return f"BucketPlace({self.url!r})"  # and no keys

    def opened(self) -> Store:
        """Open it here; the connections of one bucket are used again."""
        from shardkeep.store.object_client import open_bucket  # noqa: PLC0415 - most saves need none of this
        from shardkeep.store.objects import ObjectStore  # noqa: PLC0415

        for name, value in self.environment.items():
            if setting(name) != value:  # not without need: threads of the library may be reading others
                set_for_children(name, value)
        return ObjectStore(open_bucket(self.service, self.name, self.options), self.prefix, self.url)


class FsspecPlace(msgspec.Struct, frozen=True, tag=True):
    """A directory of a file system of fsspec."""

    module: str
    kind: str
    """The file system's class in that module."""
    args: list[Any]
    options: dict[str, Any]
    """As the file system was opened with; there may be passwords among them."""
    path: str
    url: str
    settle_s: float

    def __repr__(self) -> str:
        return f"FsspecPlace({self.url!r})"  # and no passwords

    def opened(self) -> Store:
        """
        Open it here.

        Raises:
            CheckpointError: its class is not to be found here.
            StorageError: it cannot be opened.

        """
        from shardkeep.store.fsspec_files import fs_errors  # noqa: PLC0415 - most saves need none of this
        from shardkeep.store.fsspec_store import FsspecStore  # noqa: PLC0415

        try:
            kind = getattr(importlib.import_module(self.module), self.kind)
        except (ImportError, AttributeError) as exc:
            raise CheckpointError(
                f'{self.url}: writer="process" finds no {self.module}.{self.kind} in another process: {exc}',
                hint='that process does not run your program: bring the file system in a package, or pass writer="thread"',
            ) from exc
        with fs_errors("cannot open", self.url):
            fs = kind(*self.args, **self.options)
        return FsspecStore(fs, self.path, self.url, settle_s=self.settle_s)


Place = LocalPlace | BucketPlace | FsspecPlace
