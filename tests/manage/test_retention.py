"""Retention against a simple model of it."""

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import StateError
from shardkeep.manage.entry import Entry
from shardkeep.manage.retention import AnyOf, KeepAll, KeepBest, KeepEvery, KeepLast, KeepYounger, plan

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
METRIC = st.one_of(st.just(math.nan), st.sampled_from([-1.0, 0.0, 0.5, 2.0, math.inf]))


def entry(step, **more):
    return Entry(**{"name": f"step-{step}", "step": step, "status": "committed", "saved_at": NOW, **more})


@st.composite
def entries(draw):
    steps = draw(st.lists(st.integers(0, 40), unique=True, max_size=12))
    return [
        entry(
            step,
            status=draw(st.sampled_from(["committed"] * 4 + ["unfinished", "damaged"])),
            saved_at=draw(st.one_of(st.none(), st.integers(-5, 50).map(lambda s: NOW - timedelta(seconds=s)))),
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "acc"]), METRIC)),
            pinned=draw(st.integers(0, 5)) == 0,
            timeline=draw(st.sampled_from([0, 0, 0, 1])),
        )
        for step in steps
    ]


POLICIES = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 5)),
        st.builds(KeepEvery, st.integers(1, 10)),
        st.builds(
            KeepBest,
            st.sampled_from(["loss", "acc"]),
            st.integers(1, 3),
            st.sampled_from(["min", "max", None]),
            keep_missing=st.booleans(),
        ),
        st.builds(KeepYounger, st.integers(1, 40)),
    ),
    max_size=3,
)


def kept_by(policy, mine, committed):
    """Say by looking at one checkpoint alone whether a policy wants it."""
    newer = [each for each in committed if (each.timeline, each.step) > (mine.timeline, mine.step)]
    if isinstance(policy, KeepLast):
        return len(newer) < policy.k
    if isinstance(policy, KeepEvery):
        return mine.step % policy.n == 0
    if isinstance(policy, KeepYounger):
        return mine.saved_at is None or mine.saved_at > NOW - timedelta(seconds=policy.seconds)
    assert isinstance(policy, KeepBest)
    own = mine.metrics.get(policy.metric)
    if all(math.isnan(each.metrics.get(policy.metric, math.nan)) for each in committed):
        return True
    if own is None:
        return policy.keep_missing
    if math.isnan(own):
        return False
    better = 0
    for each in committed:
        other = each.metrics.get(policy.metric)
        if other is None or math.isnan(other):
            continue
        lowest = policy.mode == "min" if policy.mode else policy.metric == "loss"
        better += (other < own if lowest else other > own) or (other == own and each in newer)
    return better < policy.k


@given(entries(), POLICIES, st.lists(st.integers(0, 40), max_size=2))
def test_what_is_deleted_is_what_no_policy_wants(every, policies, spare):
    """A checkpoint goes if and only if it is committed and neither wanted, pinned, in use nor the newest."""
    spared = {f"step-{step}" for step in spare}
    committed = [each for each in every if each.status == "committed"]
    newest = max(committed, key=lambda each: (each.timeline, each.step), default=None)
    expected = {
        each.name
        for each in committed
        if not any(kept_by(policy, each, committed) for policy in policies)
        and not (each.pinned or each.name in spared or each is newest)
    }
    kept, to_delete, _ = plan(every, AnyOf(tuple(policies)), NOW, spared=spared)
    assert {each.name for each in to_delete} == expected
    assert {each.name for each in kept} == {each.name for each in every} - expected
    assert [each.age for each in to_delete] == sorted(each.age for each in to_delete)


def test_policies_combine():
    every = [entry(step) for step in range(1, 11)]
    kept, *_ = plan(every, KeepLast(2) | KeepEvery(4), NOW)
    assert [each.step for each in kept] == [4, 8, 9, 10]
    assert plan(every, KeepAll(), NOW).to_delete == []


@pytest.mark.parametrize(
    "make",
    [lambda: KeepLast(0), lambda: KeepEvery(0), lambda: KeepBest("loss", 0), lambda: KeepBest("loss", mode="low"),
     lambda: KeepYounger(0), lambda: KeepYounger(math.nan)],
)  # fmt: skip
def test_policies_that_make_no_sense_are_refused(make):
    with pytest.raises(StateError):
        make()
