import contextlib
import os
import shutil
import tempfile

import pytest

import shardkeep as sk


def _finish_saves():
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()


@pytest.fixture
def place():
    """A directory for checkpoints, in memory where the system has that: what fails here is not the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="shardkeep-asynchronous-", dir=base)
    yield os.path.join(folder, "ck")
    _finish_saves()  # before the directory goes: a call that raised EarlierSaveFailed has begun a save all the same
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _no_save_outlives_its_test():
    yield
    _finish_saves()
