"""Every test of a store gets a store of its own, and must leave no file open."""

import os

import pytest

from shardkeep.storage.local import LocalStore


@pytest.fixture(autouse=True)
def _no_leaks():
    """Whatever a test here does, every file descriptor is closed at its end."""
    before = _open_fds()
    yield
    assert _open_fds() <= before  # fewer, where connections of earlier tests were closed meanwhile


def _open_fds():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")
