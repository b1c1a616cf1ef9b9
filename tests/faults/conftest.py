import os
import shutil
import tempfile

import pytest


@pytest.fixture
def place():
    """A directory for one checkpoint, in memory where the system has that: what fails here is not the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="shardkeep-faults-", dir=base)
    yield os.path.join(folder, "ck")
    shutil.rmtree(folder)
