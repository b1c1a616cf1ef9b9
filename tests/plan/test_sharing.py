"""Who reads what several ranks want: against a model that is kept byte by byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.plan.save_plan import SLICE_NBYTES
from shardkeep.plan.sharing import MESSAGE_NBYTES, ShareOffer, SharePlan, column, plan_sharing

MESSAGE = 64 << 10
"""The size of messages where the budget is small."""


def offer_of(wants, things, alone=0, budget=0, files=2):
    """The offer of a rank that wants these things, each (bytes, rows), as it is sent."""
    offer = ShareOffer(
        alone_nbytes=alone,
        budget_nbytes=budget,
        what=b"".join(each.to_bytes(16, "big") for each in wants),
        nbytes=column([things[each][0] for each in wants]),
        rows=column([things[each][1] for each in wants]),
        file=column([each % files for each in wants]),
        start=column([each * 100 for each in wants]),
    )
    return msgspec.msgpack.encode(offer)


def plans_of(offers):
    """What rank 0 sends, decoded; nothing where no two ranks want the same."""
    return [msgspec.msgpack.decode(each, type=SharePlan) for each in plan_sharing(offers) or []]


def rows_of(plan):
    """The rows of a rank's plan, with the ranks of the team instead of its number."""
    rows = zip(*(each.tolist() for each in plan.share.columns()), strict=True)
    return [(owner, turn, plan.teams[team], *rest) for owner, turn, team, *rest in rows]


@st.composite
def jobs(draw):
    """Things of all sizes, and what each of a few ranks wants of them, sometimes twice."""
    sizes = st.sampled_from([1, 7, 1000, MESSAGE, MESSAGE + 16, SLICE_NBYTES // 16, 2 * SLICE_NBYTES // 1000])
    things = draw(st.lists(st.tuples(sizes, st.sampled_from([1, 2, 16, 1000])), min_size=1, max_size=12))
    things = [(row_nbytes * rows, rows) for row_nbytes, rows in things]
    ranks = draw(st.integers(1, 5))
    wants = draw(st.lists(st.lists(st.sampled_from(range(len(things))), max_size=14), min_size=ranks, max_size=ranks))
    alone = draw(st.lists(st.sampled_from([0, 1000, 10 * SLICE_NBYTES]), min_size=ranks, max_size=ranks))
    return things, wants, alone


@given(jobs())
def test_every_byte_is_read_or_received_once(job):
    """
    Of what a rank shares, each byte is in exactly one message; those who want it agree on who owns it, who reads it
    cuts it by rows, and nothing is shared that only one rank wants.
    """
    things, wants, alone = job
    wanted_by = defaultdict(set)
    for rank, each in enumerate(wants):
        for thing in each:
            wanted_by[thing].add(rank)
    spread: dict[int, dict[int, list]] = defaultdict(dict)
    plans = plans_of([offer_of(each, things, nbytes) for each, nbytes in zip(wants, alone, strict=True)])
    assert bool(plans) == any(len(ranks) > 1 for ranks in wanted_by.values())
    for rank, plan in enumerate(plans):
        covered = defaultdict(list)
        for owner, _, team, want, start, stop in rows_of(plan):
            thing = wants[rank][want]
            assert team == sorted(wanted_by[thing])
            assert {owner, rank} <= set(team)
            assert len(team) >= 2
            covered[want].append((start, stop, owner))
        shared_things = Counter(wants[rank][want] for want in covered)
        assert set(shared_things) == {thing for thing in wants[rank] if len(wanted_by[thing]) > 1}
        assert set(shared_things.values()) <= {1}, "one of equal wants of a rank is shared"
        for want, spans in covered.items():
            nbytes, rows = things[wants[rank][want]]
            spans.sort()
            assert (spans[0][0], spans[-1][1]) == (0, nbytes)
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            spread[wants[rank][want]][rank] = spans
            for before, after in pairwise(spans):
                if before[2] != after[2]:
                    assert before[1] % (nbytes // rows) == 0, "an owner reads whole rows"
            owners = [owner for _, _, owner in spans]
            assert len(set(owners)) == sum(a != b for a, b in pairwise([-1, *owners])), "and one run of them"
    for by_rank in spread.values():
        assert len({tuple(spans) for spans in by_rank.values()}) == 1, "all who want it know the same of it"


@given(jobs())
def test_messages_are_the_same_on_all_ranks(job):
    """A message has the same parts, in the same order, at its owner and at all receivers, and is not too long."""
    things, wants, alone = job
    plans = plans_of([offer_of(each, things, nbytes) for each, nbytes in zip(wants, alone, strict=True)])
    messages: dict[tuple[int, int], dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for rank, plan in enumerate(plans):
        assert np.all(np.diff(plan.share.turn) >= 0)
        for owner, turn, team, want, start, stop in rows_of(plan):
            messages[owner, turn][rank].append((wants[rank][want], start, stop, tuple(team)))
    for by_rank in messages.values():
        assert len({tuple(parts) for parts in by_rank.values()}) == 1
        parts = next(iter(by_rank.values()))
        assert sorted(by_rank) == list(parts[0][3])
        assert 0 < sum(stop - start for _, start, stop, _ in parts) <= MESSAGE
    for owner in range(len(wants)):
        turns = sorted(turn for who, turn in messages if who == owner)
        assert turns == list(range(len(turns)))


@given(
    st.lists(st.integers(1, 3 * SLICE_NBYTES).map(lambda n: n // 16 * 16 + 16), min_size=1, max_size=30),
    st.lists(st.integers(0, 8 * SLICE_NBYTES), min_size=2, max_size=6),
)
def test_ranks_that_want_the_same_read_about_as_much(sizes, alone):
    """
    With what each reads besides, no two ranks that want the same differ by more than what cannot be cut, unless one
    had more than that before.
    """
    things = [(nbytes, 16) for nbytes in sizes]
    share = plans_of([offer_of(range(len(things)), things, nbytes, 256 << 20) for nbytes in alone])[0].share
    read = [int((share.stop - share.start)[share.owner == rank].sum()) for rank in range(len(alone))]
    assert sum(read) == sum(sizes)
    total = [before + nbytes for before, nbytes in zip(alone, read, strict=True)]
    assert all(most - min(total) <= 2 * SLICE_NBYTES for most, nbytes in zip(total, read, strict=True) if nbytes)


def test_small_things_stay_together():
    """Of many small things side by side in a file, each rank reads runs of neighbours: few blocks are read twice."""
    things = [(64 << 10, 1)] * 512
    share = plans_of([offer_of(range(512), things, budget=256 << 20, files=1)] * 4)[0].share
    owner = np.empty(512, np.int64)
    owner[share.want] = share.owner
    assert np.bincount(owner).tolist() == [128] * 4
    assert np.count_nonzero(np.diff(owner)) < 512 * (64 << 10) // SLICE_NBYTES


def test_ranks_with_the_same_state_get_the_same_letter():
    """Replicas get one and the same answer, which rank 0 then stores once."""
    things = [(1000 * n, n) for n in range(1, 20)]
    offers = [offer_of(range(19), things)] * 8
    assert len(set(plan_sharing(offers) or [])) == 1


def test_messages_fit_the_memory_that_may_be_used():
    """Messages are a small part of the smallest budget, and hold whole elements whatever it is."""

    def message_nbytes(budget):
        plan, _ = plans_of([offer_of([0], [(100, 10)], budget=each) for each in (budget, 1 << 40)])
        return plan.message_nbytes

    assert message_nbytes(256 << 20) == MESSAGE_NBYTES
    assert all(message_nbytes(budget) % 16 == 0 for budget in (0, 1, 1 << 20, (64 << 20) + 37))
    assert message_nbytes(64 << 20) * 32 == 64 << 20
