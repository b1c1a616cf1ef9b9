import contextlib
import gc
import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import preload
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server, boto_client

with contextlib.suppress(ModuleNotFoundError):  # the environment of tests/frameworks has none
    from hypothesis import settings

    # Two cores that run other tests besides: how long an example takes says nothing.
    settings.register_profile("shardkeep", deadline=None)
    settings.load_profile("shardkeep")

# A shell starts what it puts in the background with Ctrl-C ignored, and Python then never raises KeyboardInterrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Most modules of tests import them, and so do the ranks that run a function of one.
preload("pytest", "hypothesis")


def pytest_collection() -> None:
    """Modules are no garbage: not while hundreds of them are imported, ..."""
    gc.disable()


def pytest_collection_finish() -> None:
    """... and not later: what is there before the first test stays, and none has to go through it."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Real ranks, as processes that are started when first needed and kept for all tests."""
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[S3Server]:
    """A real S3 server on this machine, one for all workers, which ends with the last of them."""
    base = tmp_path_factory.getbasetemp()
    with S3Server((base if worker_id == "master" else base.parent) / "s3") as server:
        yield server


@pytest.fixture
def s3_root(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place of the server, which the environment leads to."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server.url(uuid.uuid4().hex)


@pytest.fixture
def place() -> Iterator[str]:
    """A directory for one checkpoint, in memory where the system has that: what fails here is not the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shardkeep-", dir=base) as folder:
        yield os.path.join(folder, "ck")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory that is a file system of 8 MiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"may not mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.fixture(scope="session")
def boto(s3_server: S3Server) -> Iterator[Any]:
    """Another client of the server, which sees what ours does not list."""
    with contextlib.closing(boto_client(s3_server.options)) as client:
        yield client
