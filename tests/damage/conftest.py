"""A sound checkpoint, and the same taken apart, to be changed."""

import pytest

from tests.damage.forge import take_apart
from tests.damage.subjects import one_rank


@pytest.fixture
def subject():
    return one_rank()


@pytest.fixture
def forgery(subject):
    return take_apart(subject)
