import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def place() -> Iterator[str]:
    """A directory for one checkpoint, in memory where the system has that: what fails here is not the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="shardkeep-faults-", dir=base)
    yield os.path.join(folder, "ck")
    shutil.rmtree(folder)
