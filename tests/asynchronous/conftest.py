import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

import shardkeep as sk


@pytest.fixture
def place() -> Iterator[str]:
    """A directory for checkpoints, in memory where the system has that: what fails here is not the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="shardkeep-asynchronous-", dir=base)
    yield os.path.join(folder, "ck")
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _no_save_outlives_its_test() -> Iterator[None]:
    yield
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()
