"""Plans of loads and of reads against a count of every single byte."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import ITEMSIZES, Box, distinct, grid, intersect, matrix_of, slices
from shardkeep.format.dtypes import DTYPES, by_code
from shardkeep.format.index import build_index, decode_index, encode_index
from shardkeep.plan.load_plan import ReadRequests, Runs, Scatter, check_tensors, every_block, plan_load, plan_reads

CODES = [next(row.code for row in DTYPES if row.itemsize == size) for size in (1, 2, 4, 8, 16)]
FAR = 1 << 20
"""Distance between the memories of two destinations, so that an address tells which it is."""


@given(st.lists(st.integers(0, 9)), st.sampled_from(["u1", "<u4", "<i8"]))
def test_distinct_numbers_are_those_of_numpy(numbers, code):
    column = np.array(numbers, code)
    assert np.array_equal(distinct(column), np.unique(column))
    assert distinct(column).dtype == column.dtype


def cells(box):
    return itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))


def flat(shape, cell):
    return int(np.ravel_multi_index(cell, shape)) if shape else 0


def bytes_of(scatter):
    for cell in cells(scatter.source):
        at = scatter.start + flat(scatter.shape, cell) * scatter.itemsize
        yield from range(at, at + scatter.itemsize)


@st.composite
def boxes_in(draw, shape):
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))


@st.composite
def wanted(draw, *, apart):
    """A file, and runs and scatters of it; `apart`: no two have a byte in common."""
    block = draw(st.sampled_from([16, 32, 64]))
    window = block * draw(st.integers(1, 4))
    runs, scatters, end = [], [], 0
    for number in range(draw(st.integers(1, 6))):
        base = end if apart else draw(st.integers(0, end))
        if draw(st.booleans()):
            start, nbytes = base + draw(st.integers(0, 40)), draw(st.integers(1, 300))
            runs.append((0, start, nbytes, (number + 1) * FAR))
            end = max(end, start + nbytes)
        else:
            size = draw(st.sampled_from([1, 2, 4, 8, 16]))
            start = -(-base // size) * size + size * draw(st.integers(0, 4))
            shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
            scatters.append(Scatter(0, start, shape, size, draw(boxes_in(shape)), number, Box((), ())))
            end = max(end, start + int(np.prod(shape, dtype=int)) * size)
    columns = np.array(runs, np.int64).reshape(-1, 4).T
    return Runs(*columns), scatters, end + draw(st.integers(0, 40)), block, window


def carry_out(plan, data_nbytes, block, window):
    """Do a plan byte by byte; return how often each byte was read, was put at an address, was given to a scatter."""
    read_count, placed, given_to = Counter(), Counter(), Counter()
    for read in plan.reads:
        stop = read.start + read.nbytes
        assert read.start % block == 0
        assert stop % block == 0 or stop == data_nbytes
        assert 0 < read.nbytes <= window
        assert stop <= data_nbytes
        read_count.update(range(read.start, stop))
        if read.address:
            placed.update((at, read.address + at - read.start) for at in range(read.start, stop))
            continue
        for start, nbytes, address in plan.edges.touching(read.start, stop):
            part = range(max(start, read.start), min(start + nbytes, stop))
            placed.update((at, address + at - start) for at in part)
        for scatter in plan.scatters.touching(read.start, stop):
            part = [at for at in bytes_of(scatter) if read.start <= at < stop]
            assert (max(read.start, scatter.start) - scatter.start) % scatter.itemsize == 0
            given_to.update((scatter.want, at) for at in part)
    return read_count, placed, given_to


def expected(runs, scatters):
    columns = (runs.start.tolist(), runs.nbytes.tolist(), runs.address.tolist())
    placed = {(at, address + at - start) for start, n, address in zip(*columns, strict=True) for at in range(start, start + n)}  # fmt: skip
    return placed, {(s.want, at) for s in scatters for at in bytes_of(s)}


@settings(max_examples=200, deadline=None)
@given(st.booleans().flatmap(lambda apart: st.tuples(st.just(apart), wanted(apart=apart))))
def test_every_wanted_byte_is_read_once_and_no_block_twice(case):
    """
    Reads are whole blocks within a window, none twice; each wanted byte reaches its place exactly once, nothing else.
    Where wants overlap in the file, each still gets all of its bytes and only those.
    """
    apart, (runs, scatters, data_nbytes, block, window) = case
    plan = plan_reads(0, runs, scatters, data_nbytes=data_nbytes, block_nbytes=block, window_nbytes=window)
    read_count, placed, given_to = carry_out(plan, data_nbytes, block, window)
    places, wants = expected(runs, scatters)
    assert (placed.keys(), given_to.keys()) == (places, wants)
    if apart:
        assert {*read_count.values(), *placed.values(), *given_to.values()} <= {1}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_every_block_is_every_byte_once(data_nbytes, blocks):
    plan = every_block(0, data_nbytes, window_nbytes=16 * blocks)
    read_count, placed, given_to = carry_out(plan, data_nbytes, 16, 16 * blocks)
    assert read_count == Counter(range(data_nbytes))
    assert not placed
    assert not given_to


@st.composite
def stored(draw):
    """An index of a few tensors cut into grids of boxes over two files, and its columns as plain Python."""
    shapes, codes, chunks, ends = [], [], [], []
    sizes = [0, 0]
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        code = draw(st.sampled_from(CODES))
        cuts = []
        for n in shape:
            edges = sorted({0, n, *draw(st.sets(st.integers(0, n)))})
            cuts.append([(a, b - a) for a, b in itertools.pairwise(edges)])
        size = int(ITEMSIZES[code])
        for box in draw(st.permutations(list(grid(cuts)))):
            file = draw(st.integers(0, 1))
            start = -(-sizes[file] // size) * size
            chunks.append((box, file, start))
            sizes[file] = start + box.volume * size
        shapes.append(shape)
        codes.append(code)
        ends.append(len(chunks))
    alias = list(range(len(shapes)))
    if draw(st.booleans()):  # and one that is tied to the first
        shapes.append(shapes[0])
        codes.append(codes[0])
        ends.append(len(chunks))
        alias.append(0)
    index = build_index(
        keys=[f"t{i}" for i in range(len(shapes))],
        dtypes=list(map(by_code, codes)),
        shapes=shapes,
        chunks=[chunks[start:end] for start, end in zip([0, *ends], ends, strict=False)],
        alias=alias,
        where="test",
    )
    index = decode_index(encode_index(index), where="test")
    return index, shapes, alias, chunks, ends, np.array(sizes, np.int64)


@settings(max_examples=150, deadline=None)
@given(stored(), st.data())
def test_every_wanted_element_has_one_source(case, data):
    """Runs and scatters give each wanted element its own bytes, once; wants without an address get no runs."""
    index, shapes, alias, chunks, ends, sizes = case
    tensors = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=4))
    boxes = [data.draw(boxes_in(shapes[t])) for t in tensors]
    address = [(i + 1) * FAR * data.draw(st.integers(0, 1)) for i in range(len(tensors))]
    axes = index.tensors.shape.shape[1]
    wants = ReadRequests(
        matrix_of([box.offsets for box in boxes], axes, 0),
        matrix_of([box.sizes for box in boxes], axes, 1),
        np.array(tensors, np.int64),
        np.array(address, np.int64),
    )

    runs, scatters = plan_load(index, wants, sizes)

    found = Counter()
    for file, start, nbytes, at in zip(
        *(c.tolist() for c in (runs.file, runs.start, runs.nbytes, runs.address)), strict=True
    ):
        want, low = divmod(at, FAR)
        assert address[want - 1] == want * FAR
        found.update((want - 1, low + i, file, start + i) for i in range(nbytes))
    for s in scatters:
        assert s.source.sizes == s.target.sizes
        for inside, outside in zip(cells(s.source), cells(s.target), strict=True):
            low = flat(boxes[s.want].sizes, outside) * s.itemsize
            start = s.start + flat(s.shape, inside) * s.itemsize
            found.update((s.want, low + i, s.file, start + i) for i in range(s.itemsize))
    assert found == Counter(
        (want, flat(box.sizes, [c - o for c, o in zip(cell, box.offsets, strict=True)]) * size + i, file, at + i)
        for want, (tensor, box) in enumerate(zip(tensors, boxes, strict=True))
        for size in [int(ITEMSIZES[index.tensors.dtype[tensor]])]
        for cell in cells(box)
        for file, at in [place(chunks[ends[alias[tensor] - 1] if alias[tensor] else 0 : ends[alias[tensor]]], cell, size)]
        for i in range(size)
    )  # fmt: skip


@st.composite
def spoilt(draw):
    """Tensors whose boxes may overlap or leave holes, and whose chunks may begin beyond their file."""
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3))
    chunks = []
    for shape in shapes:
        cuts = [
            [(a, b - a) for a, b in itertools.pairwise(sorted({0, n, *draw(st.sets(st.integers(0, n)))}))]
            for n in shape
        ]
        boxes = list(grid(cuts))
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(boxes)))
            boxes[at : at + draw(st.integers(0, 1))] = [draw(boxes_in(shape))] * draw(st.integers(0, 1))
        chunks.append([(box, 0, draw(st.sampled_from([0] * 9 + [10**6]))) for box in boxes])
    keys = [f"t{number}" for number in range(len(shapes))]
    return build_index(keys=keys, dtypes=[by_code(CODES[0])] * len(shapes), shapes=shapes, chunks=chunks, where="test"), shapes, chunks  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(spoilt(), st.data())
def test_only_what_is_wanted_must_be_stored_exactly_once(case, data):
    """
    A plan is refused exactly if an element of a wanted box is in no chunk or in two, or a chunk that the box touches lies
    outside its file; the error names the first such tensor. Of what is not wanted, only the check of whole tensors speaks.
    """
    index, shapes, chunks = case
    tensors = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=3))
    boxes = [data.draw(boxes_in(shapes[t])) for t in tensors]
    sizes, axes = np.array([1000], np.int64), index.tensors.shape.shape[1]
    columns = (
        matrix_of([getattr(box, name) for box in boxes], axes, fill) for name, fill in (("offsets", 0), ("sizes", 1))
    )
    wants = ReadRequests(*columns, np.array(tensors, np.int64), np.zeros(len(tensors), np.int64))

    def is_sound(tensor, box):
        count = np.zeros(shapes[tensor], int)
        for stored, _, _ in chunks[tensor]:
            count[slices(stored)] += 1
        touched = [start for stored, _, start in chunks[tensor] if intersect(stored, box)]
        return bool(np.all(count[slices(box)] == 1)) and all(start < 1000 for start in touched)

    def refused(work):
        try:
            work()
        except MalformedFile as error:
            return error.details["key"]
        return None

    for wanted, check in (
        (list(zip(tensors, boxes, strict=True)), lambda: plan_load(index, wants, sizes)),
        ([(t, Box((0,) * len(shape), shape)) for t, shape in enumerate(shapes)],
         lambda: check_tensors(index, np.arange(len(shapes)), sizes)),
    ):  # fmt: skip
        bad = [tensor for tensor, box in wanted if not is_sound(tensor, box)]
        assert refused(check) == (f"t{min(bad)}" if bad else None)


def place(chunks, cell, size):
    for box, file, start in chunks:
        inside = [c - o for c, o in zip(cell, box.offsets, strict=True)]
        if all(0 <= c < n for c, n in zip(inside, box.sizes, strict=True)):
            return file, start + flat(box.sizes, inside) * size
    raise AssertionError(f"no chunk holds {cell}")
