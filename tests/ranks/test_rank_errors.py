"""What the failures of many ranks become."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.dist.rank_errors import (
    MOST_CHARS,
    MOST_GROUPS,
    GroupError,
    describe_error,
    format_ranks,
    merge_disagreement,
    merge_failures,
)
from shardkeep.errors import CheckpointError, Failure, RanksDisagree, StorageFull


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_named_so_that_they_can_be_read_back(ranks):
    named = set()
    for span in re.fullmatch(r"ranks? (.+)", format_ranks(list(ranks)))[1].split(", "):
        first, _, last = span.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "rank 3"), ([2, 0, 1, 5], "ranks 0-2, 5"), ([4, 5], "ranks 4-5")]
)
def test_ranks_are_named_briefly(ranks, expected):
    assert format_ranks(ranks) == expected


def test_the_message_starts_with_the_cause_and_ends_with_the_place():
    full = Failure("StorageFull", "disk full", "trace", "free some", {"errno": 28})
    verdict = merge_failures({2: full, 1: full, 3: Failure("KeyError", "'x'")}, phase="write", title="save to a")
    error = verdict.error()
    assert error.message == "ranks 1-2: disk full\nrank 3: KeyError: 'x'\n(during 'write' of save to a)"
    assert type(error) is StorageFull
    assert (error.errno, error.hint) == (28, "free some")
    assert error.by_rank == {1: full, 2: full, 3: Failure("KeyError", "'x'")}


def test_a_foreign_failure_in_front_makes_a_plain_error():
    failures = {0: Failure("ZeroDivisionError", "oops"), 1: Failure("StorageFull", "full")}
    assert type(merge_failures(failures, phase="p", title="t").error()) is CheckpointError


def test_a_thousand_different_failures_stay_readable_and_light():
    failures = {rank: Failure("OSError", f"file {rank}", "t" * MOST_CHARS) for rank in range(1000)}
    verdict = merge_failures(failures, phase="write", title="save to a")
    lines = verdict.message.splitlines()
    assert len(lines) == MOST_GROUPS + 2
    assert lines[-2] == f"and {1000 - MOST_GROUPS} more ranks"
    assert len(msgspec.msgpack.encode(verdict)) < 300_000
    assert {rank: failure.message for rank, failure in verdict.error().by_rank.items()} == {
        rank: f"file {rank}" for rank in range(1000)
    }


def test_a_disagreement_says_who_called_what():
    verdict = merge_disagreement({0: "'save'", 2: "'save'", 1: "'load'"}, {1: Failure("OSError", "no")}, title="save")
    error = verdict.error()
    assert type(error) is RanksDisagree
    assert error.message.startswith("ranks 0, 2: called 'save'\nrank 1: called 'load'\n")
    assert error.by_rank[1].message == "no"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


def raised(error):
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("bad", whole=1, part=object(), deep={"a": [1, (2, 3)]}, huge=1 << 80),
        OSError("file \udcff\udcfe"),
        Unprintable(),
        ValueError("x" * (3 * MOST_CHARS)),
    ],
    ids=["details", "surrogates", "unprintable", "long"],
)
def test_whatever_an_error_holds_it_can_travel(error):
    failure = describe_error(raised(error))
    wire = msgspec.msgpack.encode(merge_failures({1: failure}, phase="p", title="t"))
    assert msgspec.msgpack.decode(wire, type=GroupError).error().by_rank == {1: failure}
    assert len(failure.message) < MOST_CHARS + 100
    assert "raised" in failure.trace
    assert failure.details == ({"whole": 1, "deep": {"a": [1, [2, 3]]}} if "bad" in failure.message else {})
