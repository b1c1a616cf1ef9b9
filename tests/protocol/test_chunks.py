"""Boxes of tensors against brute force, element by element, and against torch's own functions."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import planner_helpers as theirs
from torch.distributed.checkpoint import resharding
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as TheirChunk
from torch.distributed.checkpoint.metadata import TensorProperties as TheirProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TheirEntry

from shardkeep.dcp._impl.plans import create_read_items_for_chunk_list
from shardkeep.format.boxes import boxes_overlap, clashes, overlap_region, overlaps, within
from shardkeep.layouts.torch_values import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata, to_ours

# A shared machine may be slow at any moment.
without_deadline = settings(deadline=None)


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def elements(box):
    spans = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return set(itertools.product(*spans))


def boxes_of(dims, most=8, least=0):
    spans = st.lists(st.tuples(st.integers(0, 6), st.integers(least, 4)), min_size=dims, max_size=dims)
    one = spans.map(lambda each: chunk([o for o, _ in each], [n for _, n in each]))
    return st.lists(one, max_size=most)


two_lists = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes_of(dims), boxes_of(dims)))
two_full_lists = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes_of(dims, least=1), boxes_of(dims, least=1)))
one_list = st.integers(0, 3).flatmap(lambda dims: boxes_of(dims, most=10))


@without_deadline
@given(two_lists)
def test_overlapping_pairs_are_those_with_common_elements(lists):
    wanted, stored = lists
    expected = [(i, j) for i, a in enumerate(wanted) for j, b in enumerate(stored) if elements(a) & elements(b)]
    assert overlaps(wanted, stored) == expected
    for i, j in expected:
        region = overlap_region(stored[j], wanted[i])
        common = elements(wanted[i]) & elements(stored[j])
        there = chunk(
            [o + at for o, (_, at, _, _) in zip(stored[j].offsets, region, strict=True)], [r[3] for r in region]
        )
        here = chunk(
            [o + at for o, (_, _, at, _) in zip(wanted[i].offsets, region, strict=True)], [r[3] for r in region]
        )
        assert elements(there) == elements(here) == common
        assert [axis for axis, *_ in region] == list(range(len(region)))


@without_deadline
@given(two_lists)
def test_boxes_with_elements_are_judged_as_torch_does(lists):
    for a, b in itertools.product(*lists):
        if all(a.sizes) and all(b.sizes):
            assert boxes_overlap(a, b) == resharding._check_shard_metadata_pair_overlap(a, b)
            if boxes_overlap(a, b):
                assert overlap_region(a, b) == resharding._shards_get_overlap_region_wrt_saved_tensor(a, b)


def test_a_box_without_elements_overlaps_nothing():
    """An empty box inside another one is not read from, nor does it clash, as it does in torch."""
    empty, full = chunk([2], [0]), chunk([0], [5])
    assert resharding._check_shard_metadata_pair_overlap(empty, full)
    assert not boxes_overlap(empty, full)
    assert clashes([empty, full, empty]) == []
    assert boxes_overlap(chunk([], []), chunk([], []))


@without_deadline
@given(one_list)
def test_a_clash_is_found_if_there_is_one(boxes):
    found = clashes(boxes)
    assert all(elements(a) & elements(b) for a, b in found)
    assert bool(found) == any(elements(a) & elements(b) for a, b in itertools.combinations(boxes, 2))


def test_clashes_of_a_large_grid_are_found_without_comparing_all_pairs():
    """Forty thousand boxes of a grid are no work, whichever axis is cut; one too many is found among them."""
    looked_at = []

    class Counted(ChunkStorageMetadata):
        def __getattribute__(self, name):
            if name == "sizes":
                looked_at.append(1)
            return super().__getattribute__(name)

    for shape in [(40_000, 1), (1, 40_000), (200, 200)]:
        grid = [Counted(torch.Size((r, c)), torch.Size((1, 1))) for r in range(shape[0]) for c in range(shape[1])]
        looked_at.clear()
        assert clashes(grid) == []
        assert len(looked_at) < 20 * len(grid)
        assert len(clashes([*grid, grid[777]])) == 1


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        (([0, 0], [4, 5]), True),
        (([4, 5], [0, 0]), True),
        (([1, 0], [4, 5]), False),
        (([-1, 0], [1, 1]), False),
        (([0, 0], [-1, 1]), False),
        (([0], [4]), False),
    ],
)
def test_bounds(box, inside):
    assert within(torch.Size([4, 5]), chunk(*box)) is inside


@without_deadline
@given(two_full_lists)
def test_reads_are_those_torch_plans(lists):
    """The same items as torch's, hints included, in whatever order."""
    wanted, stored = lists
    size = torch.Size([10] * (len(wanted[0].sizes) if wanted else 1))
    mine = create_read_items_for_chunk_list("w", TensorStorageMetadata(TensorProperties(), size, stored), wanted)
    others = [[TheirChunk(b.offsets, b.sizes) for b in boxes] for boxes in (wanted, stored)]
    expected = to_ours(
        theirs.create_read_items_for_chunk_list("w", TheirEntry(TheirProperties(), size, others[1]), others[0])
    )

    def key(item):
        return item.dest_index.index, item.storage_index.index, item

    assert sorted(map(repr, map(key, mine))) == sorted(map(repr, map(key, expected)))
