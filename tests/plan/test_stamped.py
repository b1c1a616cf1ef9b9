"""Plans of many ranks that hold alike, made for one group of them and stamped for the others: those that `plan_save` makes."""

import zlib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.engine import native_save
from shardkeep.engine.native_save import index_of, make_manifest, split_by_rank
from shardkeep.errors import InvalidShards
from shardkeep.format.boxes import ints
from shardkeep.format.index import encode_index
from shardkeep.plan.save_plan import SLICE_NBYTES, SMALL_NBYTES, TensorNames, plan_save, plan_whole_shards
from shardkeep.plan.stamped_plan import StampedPlan, plan_stamped
from shardkeep.state.describe import describe
from shardkeep.state.leaves import ShardedBox
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.thread_ranks import run_thread_ranks

LARGE = 4 * SLICE_NBYTES
"""Bytes in a row of a tensor that replicas divide."""


def no_chains(keys, _):
    return [None] * len(keys)


def virtual(rows, row_nbytes):
    """A tensor of so many rows, which takes up one byte."""
    return torch.zeros(1, dtype=torch.uint8).expand(rows, row_nbytes)


def rows_of(shard, shards, tensors, row_nbytes=8, scalars=0):
    """The state of a rank: of tensors with different numbers of rows, its rows, as torch cuts them; and replicated scalars."""
    state = {f"step{n}": torch.tensor(float(n)) for n in range(scalars)}
    for n, whole in enumerate(tensors):
        each = -(-whole // shards)
        begin, end = min(shard * each, whole), min((shard + 1) * each, whole)
        if end > begin:
            state[f"w{n}"] = ShardedBox(virtual(end - begin, row_nbytes), offsets=(begin, 0), shape=(whole, row_nbytes))
    return {"model": state}


def manifests_of(states):
    described = [describe(each, rank=rank) for rank, each in enumerate(states)]
    return [make_manifest(each, allow_pickle=False, check_replicas=False) for each in described]


def keys_of(manifest):
    return msgspec.msgpack.decode(manifest.names, type=TensorNames).keys


def written(plan, manifests):
    """What each rank writes, by what it is sent: file, start, tensor and box of each chunk."""
    found = set()
    first_file = np.searchsorted(plan.ranks, np.arange(len(manifests)))
    keys = {key: row for row, key in enumerate(plan.keys)}
    for rank, (part, d) in enumerate(zip(split_by_rank(plan, len(manifests)), manifests, strict=True)):
        tensors = [keys[key] for key in keys_of(d)]
        row = ints(part.row)
        boxes = [
            ints(each).reshape(len(ints(d.row_tensor)), d.axes)
            for each in (zlib.decompress(d.row_offsets), d.row_sizes)
        ]
        sent = (
            [ints(each).reshape(len(row), part.axes) for each in (part.offsets, part.sizes)] if part.offsets else None
        )
        offsets, sizes = sent or [each[row] for each in boxes]
        for columns in zip(
            (first_file[rank] + ints(part.file)).tolist(),
            ints(part.start).tolist(),
            [tensors[at] for at in ints(d.row_tensor)[row].tolist()],
            map(tuple, offsets.tolist()),
            map(tuple, sizes.tolist()),
            strict=True,
        ):
            found.add(columns)
    return found


def in_index(plan):
    index = index_of(plan, [], b"")
    tensor = np.repeat(np.arange(len(plan.keys)), np.diff(index.chunk_ends, prepend=0)).tolist()
    chunks = index.chunks
    offsets, sizes = map(tuple, chunks.offsets.tolist()), map(tuple, chunks.sizes.tolist())
    return set(zip(chunks.file.tolist(), chunks.start.tolist(), tensor, offsets, sizes, strict=True))


worlds = st.fixed_dictionaries(
    {
        "shards": st.integers(2, 12),
        "replicas": st.integers(1, 3),
        "tensors": st.lists(st.integers(1, 30), min_size=1, max_size=5),
        "row_nbytes": st.sampled_from([8, SMALL_NBYTES + 1, LARGE]),
        "scalars": st.integers(0, 3),
        "interleaved": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_a_stamped_plan_is_that_of_all_ranks(world):
    """
    Shards of all kinds, replicas that divide them, and scalars that all ranks hold: what ranks get to write is what the index
    says, no rank writes more than by the other plan, and without large replicas both plans are equal to the byte.
    """
    shards, replicas, interleaved = world["shards"], world["replicas"], world.pop("interleaved")
    order = [rank // replicas if interleaved else rank % shards for rank in range(shards * replicas)]
    more = {name: world[name] for name in ("tensors", "row_nbytes", "scalars")}
    manifests = manifests_of([rows_of(shard, shards, **more) for shard in order])
    plan, expected = plan_stamped(manifests, no_chains, least_shards=1), plan_save(manifests)
    if plan is None:  # too many kinds for so few ranks
        return
    assert written(plan, manifests) == in_index(plan)
    assert plan.sampled is not None
    if replicas == 1 or world["row_nbytes"] == 8:
        assert encode_index(index_of(plan, [], b"")) == encode_index(index_of(expected, [], b""))
        assert split_by_rank(plan, len(manifests)) == split_by_rank(expected, len(manifests))
    most, others = (
        max(np.bincount(each.ranks, [file.data_nbytes for file in each.files], len(manifests)))
        for each in (plan, expected)
    )
    assert most <= others + SLICE_NBYTES
    for to_lowest in (True, False):
        by_rank, columns = plan_stamped(manifests, no_chains, least_shards=1, whole=True, to_lowest=to_lowest).by_rank()
        pieces = plan_whole_shards(manifests, to_lowest=to_lowest, warn=pytest.fail).pieces
        theirs = [pieces.row[pieces.rank == rank].tolist() for rank in range(len(manifests))]
        chunks = [np.column_stack(each).tolist() for each in (columns, (pieces.tensor, pieces.offsets, pieces.sizes))]
        assert sorted(chunks[0]) == sorted(chunks[1])
        if to_lowest or replicas == 1:
            assert ([each.tolist() for each in by_rank], chunks[0]) == (theirs, chunks[1])


def test_tensors_that_are_cut_unlike_on_few_ranks_keep_their_own_offsets():
    """Two tensors of 20 ranks, which differ only in what two neighbours hold: the plan is that of all ranks, for each such pair."""
    for at in range(19):
        states = [rows_of(rank, 20, [20, 20]) for rank in range(20)]
        one, other = states[at]["model"], states[at + 1]["model"]
        one["w1"], other["w1"] = other["w1"], one["w1"]
        manifests = manifests_of(states)
        plan, expected = plan_stamped(manifests, no_chains, least_shards=1), plan_save(manifests)
        assert encode_index(index_of(plan, [], b"")) == encode_index(index_of(expected, [], b""))


def test_samples_of_whole_tensors_are_compared_and_kept():
    """Ranks that hold a scalar send digests of it: kept for later saves, and left to the other plan if they differ."""
    manifests = manifests_of([rows_of(shard, 8, [8], scalars=1) for shard in range(8)])
    row = keys_of(manifests[0]).index("model.step0")
    sampled = [msgspec.structs.replace(each, samples=np.array([row, 5]).tobytes()) for each in manifests]
    plan = plan_stamped(sampled, no_chains, least_shards=1)
    assert plan.sampled.members.rank.tolist() == list(range(8))
    assert not plan.sampled.differ([each.samples for each in sampled])
    other = np.array([row, 6]).tobytes()
    assert plan.sampled.differ([other, *(each.samples for each in sampled[1:])])
    sampled[3] = msgspec.structs.replace(sampled[3], samples=other)
    assert plan_stamped(sampled, no_chains, least_shards=1) is None


def test_what_groups_share_or_lack_is_left_to_the_other_plan():
    """Fewer ranks than it pays for, large replicas in several groups, a hole: one returns no plan, the other plans or explains."""
    states = [rows_of(shard, 8, [8, 8]) for shard in range(8)]
    assert plan_stamped(manifests_of(states), no_chains) is None
    assert plan_stamped(manifests_of(states), no_chains, least_shards=17) is None
    assert plan_stamped(manifests_of(states), no_chains, least_shards=16) is not None
    large = [{**each, "whole": virtual(1, LARGE)} for each in states]
    assert plan_stamped(manifests_of(large), no_chains, least_shards=1) is None
    tied = [{**each, "tie": each["model"]["w0"]} for each in states]
    assert plan_stamped(manifests_of(tied), no_chains, least_shards=1) is None
    hole = [*states[:7], states[6]]
    assert plan_stamped(manifests_of(hole), no_chains, least_shards=1) is None
    with pytest.raises(InvalidShards):
        plan_save(manifests_of(hole))


def test_what_is_saved_by_a_stamped_plan_is_loaded(monkeypatch):
    """Two replicas of eight shards, which divide large ones, and a scalar of all: on half as many ranks, bit for bit."""
    made = []

    def stamped(*arguments):
        made.append(plan_stamped(*arguments, least_shards=1))
        return made[-1]

    monkeypatch.setattr(native_save, "plan_stamped", stamped)
    whole = torch.arange(8 * 3 * SLICE_NBYTES // 4, dtype=torch.float32).reshape(16, -1)
    store = MemoryStore()

    def part(rank, ranks):
        rows = slice(16 * rank // ranks, 16 * (rank + 1) // ranks)
        return sk.ShardedBox(whole[rows].clone(), offsets=(rows.start, 0), shape=tuple(whole.shape))

    def save(world):
        sk.save({"w": part(world.rank // 2, 8), "step": torch.tensor(7.0)}, store, group=world)

    def load(world):
        state = {"w": part(world.rank, 8), "step": torch.tensor(0.0)}
        [(mine, *_)] = state["w"].pieces
        expected = mine.clone()
        mine.fill_(-1)
        sk.load(state, store, group=world)
        return torch.equal(mine, expected) and state["step"] == 7

    run_thread_ranks(16, save)
    assert [type(each) for each in made] == [StampedPlan]
    assert any(stamp.plan.pieces.cut.any() for stamp in made[0].stamps)
    assert all(run_thread_ranks(8, load))
