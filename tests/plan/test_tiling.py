"""The tiling test, the region arithmetic and the balance against brute force."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.format.boxes import (
    Box,
    Boxes,
    contiguous_run,
    explain_tiling,
    flat_range_to_boxes,
    grid,
    intersect,
    matrix_of,
    relative,
    slices,
    tiled,
    whole,
)
from shardkeep.plan.save_plan import SLICE_NBYTES, assign_replicas

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def paint(shape, boxes):
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[slices(box)] += 1
    return counts


@st.composite
def box_in(draw, shape):
    offsets, sizes = [], []
    for n in shape:
        low = draw(st.integers(0, n - 1))
        offsets.append(low)
        sizes.append(draw(st.integers(1, n - low)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def cut_up(draw, shape):
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes[at]
        axes = [d for d, n in enumerate(box.sizes) if n > 1]
        if not axes:
            continue
        d = draw(st.sampled_from(axes))
        k = draw(st.integers(1, box.sizes[d] - 1))
        low = Box(box.offsets, (*box.sizes[:d], k, *box.sizes[d + 1 :]))
        high = Box(
            (*box.offsets[:d], box.offsets[d] + k, *box.offsets[d + 1 :]),
            (*box.sizes[:d], box.sizes[d] - k, *box.sizes[d + 1 :]),
        )
        boxes[at : at + 1] = [low, high]
    return boxes


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_tiled_says_what_painting_says(data):
    """For tilings, and those with boxes dropped, doubled, moved or replaced, the fingerprint agrees with painting."""
    rows = []
    axes = 3
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(shapes)
        boxes = data.draw(cut_up(shape))
        spoil = data.draw(st.sampled_from(["", "drop", "double", "replace", "add"]))
        at = data.draw(st.integers(0, len(boxes) - 1))
        if spoil == "drop":
            boxes = boxes[:at] + boxes[at + 1 :]
        elif spoil == "double":
            boxes = [*boxes, boxes[at]]
        elif spoil == "replace":
            boxes = [*boxes[:at], data.draw(box_in(shape)), *boxes[at + 1 :]]
        elif spoil == "add":
            boxes = [*boxes, data.draw(box_in(shape))]
        rows.append((shape, data.draw(st.permutations(boxes))))
    tensor = np.array([t for t, (_, boxes) in enumerate(rows) for _ in boxes], np.int64)
    flat = [box for _, boxes in rows for box in boxes]
    columns = Boxes(matrix_of([b.offsets for b in flat], axes, 0), matrix_of([b.sizes for b in flat], axes, 1))

    found = tiled(matrix_of([shape for shape, _ in rows], axes, 1), tensor, columns)

    expected = [bool(np.all(paint(shape, boxes) == 1)) for shape, boxes in rows]
    assert found.tolist() == expected
    for good, (shape, boxes) in zip(expected, rows, strict=True):
        if not good:
            assert explain_tiling(shape, list(boxes))


def test_empty_tensors_are_tiled_by_nothing():
    """A tensor without elements needs no box, and has room for none."""
    none = Boxes(np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))
    assert tiled(np.array([[0, 5], [3, 4]]), np.zeros(0, np.int64), none).tolist() == [True, False]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_boxes_meet_as_painted_boxes_do(data):
    shape = data.draw(shapes)
    a, b = data.draw(box_in(shape)), data.draw(box_in(shape))
    both = (paint(shape, [a]) == 1) & (paint(shape, [b]) == 1)
    common = intersect(a, b)
    assert np.array_equal(paint(shape, [common]) == 1 if common else np.zeros(shape, bool), both)
    if common:
        numbers = np.arange(math.prod(shape)).reshape(shape)
        assert np.array_equal(numbers[slices(a)][slices(relative(common, a))], numbers[slices(common)])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flat_range_is_cut_into_few_boxes_in_order(data):
    shape = data.draw(shapes)
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(shape)
    boxes = list(flat_range_to_boxes(shape, start, stop))
    laid = [numbers[slices(box)].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, int), *laid]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(contiguous_run(shape, box) is not None for box in boxes)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_contiguous_run_knows_when_a_box_is_one_run(data):
    shape = data.draw(shapes)
    box = data.draw(box_in(shape))
    flat = np.arange(math.prod(shape)).reshape(shape)[slices(box)].reshape(-1)
    consecutive = bool(np.all(np.diff(flat) == 1))
    run = contiguous_run(shape, box)
    assert (run is not None) == consecutive
    if run:
        assert run == (flat[0], len(flat))


def test_grid_is_the_product_of_runs():
    """Boxes come in row-major order."""
    cuts = [[(0, 2), (5, 1)], [(3, 3)], [(0, 1), (1, 1)]]
    assert [(b.offsets, b.sizes) for b in grid(cuts)] == [
        (tuple(o for o, _ in combo), tuple(n for _, n in combo)) for combo in itertools.product(*cuts)
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_replicated_byte_has_one_writer_that_holds_it(data):
    """Shares are disjoint, complete, given only to holders, and no rank ends far above what pouring could reach."""
    world = data.draw(st.integers(1, 8))
    load = np.array([data.draw(st.integers(0, 40)) << 20 for _ in range(world)], np.int64)
    groups = data.draw(
        st.lists(
            st.tuples(st.integers(1, 64), st.integers(1, 40), st.sets(st.integers(0, world - 1), min_size=1)),
            min_size=1,
            max_size=12,
        )
    )
    rows = np.array([r for r, _, _ in groups], np.int64)
    nbytes = np.array([r * (mib << 17) for r, mib, _ in groups], np.int64)
    holders = [sorted(h) for _, _, h in groups]
    first = np.cumsum([0] + [len(h) for h in holders[:-1]])
    count = np.array([len(h) for h in holders])
    before = load.copy()

    group, holder, begin, end = assign_replicas(
        load, nbytes, first, count, np.array([r for h in holders for r in h]), rows
    )

    written = before.copy()
    ranks = [r for h in holders for r in h]
    for g in range(len(groups)):
        parts = sorted((int(begin[i]), int(end[i]), ranks[holder[i]]) for i in np.flatnonzero(group == g))
        assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])]
        assert parts[-1][1] == rows[g]
        assert all(rank in holders[g] for _, _, rank in parts)
        for low, high, rank in parts:
            written[rank] += nbytes[g] * (high - low) // rows[g]
            assert len(parts) == 1 or nbytes[g] * (high - low) // rows[g] >= SLICE_NBYTES // 4
    assert np.all(np.abs(written - load) <= len(groups))


def test_one_large_replica_is_poured_evenly():
    load = np.array([100, 0, 50, 0], np.int64) << 20
    one = np.array([0])
    group, _, begin, end = assign_replicas(
        load, np.array([250 << 20]), one, np.array([4]), np.arange(4), np.array([250])
    )
    assert len(group) == 3  # rank 0 already has its share
    assert (end - begin).sum() == 250
    assert (load >> 20).tolist() == [100, 100, 100, 100]
