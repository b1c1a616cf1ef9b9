"""Chunks that are filled into host memory by strided copies, against the box-by-box way and against numpy's own."""

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.engine.reader import Copies
from shardkeep.engine.tensors import HostScattered, TorchScattered
from shardkeep.format.boxes import Box, Stripes, cut_stripes, slices, strides_of, stripes, whole
from shardkeep.plan.load_plan import FileReads, Intervals, Read, Scatter
from tests.engine.samples import bits, random_tensor, raw_view

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
BLANK = 0xEE


@st.composite
def boxes_in(draw, shape, sizes=None):
    sizes = sizes or tuple(draw(st.one_of(st.just(n), st.integers(1, n))) for n in shape)
    return Box(tuple(draw(st.integers(0, full - n)) for full, n in zip(shape, sizes, strict=True)), sizes)


@st.composite
def targets(draw, sizes, dtype):
    """Blank memory that has room for a box of these sizes: in order, or with its axes in any order and with gaps."""
    shape = tuple(n + draw(st.integers(0, 2)) for n in sizes)
    order = draw(st.one_of(st.just(tuple(range(len(shape)))), st.permutations(range(len(shape)))))
    gaps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    made = torch.full([shape[axis] * gap for axis, gap in zip(order, gaps, strict=True)], 0, dtype=dtype)
    raw_view(made).view(-1).view(torch.uint8).fill_(BLANK)
    cut = made[tuple(slice(None, None, gap) for gap in gaps)]
    return made, cut.permute([order.index(axis) for axis in range(len(shape))])


def pieces_of(data, nbytes, before, size):
    """Ranges of a file that hold all its bytes, cut anywhere between two elements of the chunk."""
    total = before + nbytes
    places = st.integers(0, total // size).map(lambda n: n * size)
    cuts = sorted({0, total, *data.draw(st.lists(places, max_size=6))})
    return list(itertools.pairwise(cuts))


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_strided_copies_fill_what_boxes_fill(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    chunk = random_tensor(shape, dtype, seed=data.draw(st.integers(0, 9)))
    size = chunk.element_size()
    source = data.draw(boxes_in(shape))
    made, tensor = data.draw(targets(source.sizes, dtype))
    target = data.draw(boxes_in(tuple(tensor.shape), source.sizes))
    other = raw_view(made).clone().view(dtype)
    boxed = other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    before, after = (data.draw(st.integers(0, 5)) * size for _ in range(2))
    file = bytes(before) + bits(chunk)[3] + bytes(after)
    scatter = Scatter(0, before, shape, size, source, 0, target)

    striped, plain = HostScattered(tensor), HostScattered(boxed)
    copies = Copies({0: plain})
    done = set()
    for low, high in pieces_of(data, chunk.nbytes + after, before, size):
        window, part = memoryview(file)[low:high], Read(low, high - low, 0)
        done.add(striped.write_chunk(shape, source, target, window, low - before))
        copies.copy_boxes(scatter, part, window, plain)
    assert len(done) == 1
    if done == {False}:
        assert stripes(source.sizes, strides_of(shape), tuple(tensor.stride())) is None
        copies.copy_boxes(scatter, Read(0, len(file), 0), memoryview(file), striped)
    expected = raw_view(chunk)[slices(source)]
    assert bits(raw_view(tensor)[slices(target)]) == bits(expected)
    assert bits(made) == bits(other)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_elements_that_windows_cut_are_put_together(data):
    """A chunk that begins anywhere, in windows that end anywhere and come in any order, is copied bit for bit."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    chunk = random_tensor(shape, dtype, seed=1)
    source = data.draw(boxes_in(shape))
    _, tensor = data.draw(targets(source.sizes, dtype))
    target = data.draw(boxes_in(tuple(tensor.shape), source.sizes))
    before, after = (data.draw(st.integers(0, 9)) for _ in range(2))
    file = bytes(before) + bits(chunk)[3] + bytes(after)
    into = data.draw(st.sampled_from([HostScattered(tensor), TorchScattered(tensor, dtype)]))
    scatter = Scatter(0, before, shape, chunk.element_size(), source, 0, target)
    copies = Copies({0: into})
    reads = FileReads(0, [], Intervals([], [], []), Intervals([0], [len(file)], [scatter]))
    for low, high in data.draw(st.permutations(pieces_of(data, chunk.nbytes + after, before, 1))):
        copies.copy(reads, Read(low, high - low, 0), memoryview(bytearray(file[low:high])))
    assert bits(raw_view(tensor)[slices(target)]) == bits(raw_view(chunk)[slices(source)])
    assert not copies._cut


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stripes_are_where_the_elements_are(data):
    shape, into = (tuple(data.draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))) for _ in range(2))
    sizes = tuple(data.draw(st.integers(1, min(a, b))) for a, b in zip(shape, into, strict=True))
    found = stripes(sizes, strides_of(shape), strides_of(into))
    where = [np.arange(math.prod(s)).reshape(s)[slices(whole(sizes))].reshape(-1).tolist() for s in (shape, into)]
    joined = [axis for axis in range(1, 3) if all(s[axis] == sizes[axis] for s in (shape, into))]
    if found is None:
        assert not joined
    else:
        for places, step in zip(where, found.steps, strict=True):
            assert places == [row * step + at for row in range(found.number) for at in range(found.width)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4), st.integers(-5, 60), st.integers(0, 60))
def test_a_range_of_stripes_is_cut_into_at_most_three(number, width, gap, low, length):
    """The parts of a range are exactly the wanted elements in it, in order, the cut ones at its ends."""
    step = width + gap
    every = Stripes(number, width, (step, width))
    parts = list(cut_stripes(every, low, low + length))
    found = [(row, at) for a, b, head, tail in parts for row in range(a, b) for at in range(head, tail)]
    places = [(row, at) for row in range(number) for at in range(width)]
    assert found == [(row, at) for row, at in places if low <= row * step + at < low + length]
    assert len(parts) <= 3


def test_a_matrix_of_whole_columns_is_found_in_any_number_of_axes():
    """Columns, heads of attention and whole blocks of channels are stripes; a box cut along three axes is not."""
    row_major = strides_of
    assert stripes((8, 3), row_major((8, 6)), row_major((8, 3))) == Stripes(8, 3, (6, 3))
    assert stripes((2, 4, 3, 5), row_major((2, 4, 6, 5)), row_major((2, 4, 3, 5))) == Stripes(8, 15, (30, 15))
    assert stripes((4, 1), row_major((4, 6)), row_major((4, 1))) == Stripes(4, 1, (6, 1))
    assert stripes((2, 2, 2), row_major((3, 3, 3)), row_major((2, 2, 2))) is None
    assert stripes((), (), ()) == Stripes(1, 1, (1, 1))


def test_a_single_element_is_a_run_whatever_its_stride():
    """One element of a column is one run of bytes, though its stride says that the next would be far away."""
    column = torch.zeros(4, 3)[:1, 1]
    memory = TorchScattered(column, torch.float32)
    one = Box((0,), (1,))
    assert memory.write_chunk((1,), one, one, memoryview(bytearray(bits(torch.ones(1))[3])), 0)
    assert column.tolist() == [1]


def test_pieces_that_cut_elements_and_boxes_that_do_not_fit_are_left_alone():
    """Where strided copies would be wrong nothing is written, and the caller is told so."""
    tensor = torch.zeros(4, 6)[:, :3]
    memory = HostScattered(tensor)
    box = Box((0, 0), (4, 3))
    data = memoryview(bytes([1]) * 64)
    assert not memory.write_chunk((4, 6), box, box, data, 2)
    assert not memory.write_chunk((4, 6), box, box, data[:62], 0)
    assert not memory.write_chunk((4, 6), box, Box((2, 0), (4, 3)), data, 0)
    assert not tensor.any()
