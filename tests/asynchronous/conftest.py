import contextlib

import pytest

import shardkeep as sk


def _finish_saves():
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()


@pytest.fixture
def place(place):
    yield place
    _finish_saves()  # before the directory goes: a call that raised EarlierSaveFailed has begun a save all the same


@pytest.fixture(autouse=True)
def _no_save_outlives_its_test():
    yield
    _finish_saves()
