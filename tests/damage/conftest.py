"""A sound checkpoint, and the same taken apart, to be changed."""

import pytest

from tests.damage.forge import Forgery, take_apart
from tests.damage.subjects import Subject, one_rank


@pytest.fixture
def subject() -> Subject:
    return one_rank()


@pytest.fixture
def forgery(subject: Subject) -> Forgery:
    return take_apart(subject)
