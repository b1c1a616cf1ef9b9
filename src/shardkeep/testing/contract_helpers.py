"""What the contract suites of stores share: bytes to write, whole blobs, and races."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from shardkeep.errors import StorageError
from shardkeep.store.protocol import Store


def same(expected: object, actual: object) -> None:
    """Fail the test unless both are equal; says how they differ without printing megabytes."""
    if expected != actual:
        pytest.fail(f"expected {str(expected)[:200]}, got {str(actual)[:200]}")


def sample(nbytes: int, seed: int = 0) -> bytes:
    """Make bytes in which every misplaced piece shows."""
    return random.Random(seed).randbytes(nbytes)  # noqa: S311 -- test data, no secret


def write_blob(store: Store, name: str, data: bytes) -> None:
    """Write a whole blob in one part."""
    writer = store.create(name, len(data))
    writer.write_at(0, memoryview(data))
    writer.finish()


def read_blob(store: Store, name: str) -> bytes:
    """Read a whole blob in one part."""
    with closing(store.open(name)) as reader:
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))
        return bytes(data)


def winners(attempt: Callable[[int], object], attempts: int) -> list[int]:
    """Run all attempts at once; tell which succeeded. The others must fail with EEXIST."""
    start = threading.Barrier(attempts)

    def one(i: int) -> bool:
        start.wait()
        try:
            attempt(i)
        except StorageError as exc:
            same(errno.EEXIST, exc.errno)
            return False
        return True

    with ThreadPoolExecutor(attempts) as pool:
        return [i for i, won in enumerate(pool.map(one, range(attempts))) if won]
