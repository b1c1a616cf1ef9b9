import contextlib

import pytest

import shardkeep as sk


@pytest.fixture(autouse=True)
def _no_save_outlives_its_test():
    yield
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()
