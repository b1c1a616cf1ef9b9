"""What a save copies in its call: the bytes as they were, each once, as tensors when these are asked for."""

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkeep.engine import snapshot as pieces
from shardkeep.engine.pools import Arenas, Buffer, ordinary_buffer
from shardkeep.engine.snapshot import take_snapshot
from tests.engine.samples import bits


def taken(tensors, arenas=None):
    found = take_snapshot(tensors, staging="auto", optimizers=[])
    found.copy_on_host(arenas or Arenas(), 1 << 30, 2)
    return found


def test_tensors_are_what_they_were_at_the_call():
    """A tensor that gets another shape or other memory before anybody asks is still given as it was."""
    resized, replaced, transposed = torch.arange(6.0), torch.arange(4), torch.arange(12).view(3, 4).t()
    wanted = copy.deepcopy([resized, replaced, transposed])
    found = taken([resized, replaced, transposed])
    resized.resize_(2, 1)
    replaced.data = torch.ones(2, 2, dtype=torch.int8)
    transposed.t_()
    assert all(map(torch.equal, found.tensors, wanted))


def test_what_is_the_same_memory_is_copied_once():
    """Two views that are one and the same take room once, whatever storage they are of; any others are copied alone."""
    array = np.arange(1000.0)
    one = torch.from_numpy(array)
    again, halves, bits = torch.from_numpy(array), one.view(2, 500), one.view(torch.int64)
    found = taken([one, again, one, halves, bits])
    assert found.arena.view.nbytes == 3 * 8000
    first, *others = found.tensors
    assert [each.data_ptr() == first.data_ptr() for each in others] == [True, True, False, False]
    assert torch.equal(others[2], halves)
    assert torch.equal(others[3], bits)


def test_memory_that_begins_inside_a_buffer():
    """An arena whose tensor begins inside its storage, or ends at an odd byte, holds the copies all the same."""

    def make(nbytes):
        whole = ordinary_buffer(nbytes + 192)
        return Buffer(whole.view[128 : 128 + nbytes + 3], whole.tensor[128 : 128 + nbytes + 3])

    source = torch.arange(33, dtype=torch.int16)
    found = taken([source, source[1:]], Arenas(make))
    assert torch.equal(found.tensors[0], source)
    assert torch.equal(found.tensors[1], source[1:])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    room=st.integers(0, 4000),
    guarded=st.sets(st.integers(0, 11)),
    again=st.lists(st.integers(0, 11), max_size=3),
)
def test_what_finds_no_room_is_lent(sizes, room, guarded, again):
    """Each tensor is copied, within the room there is, or lent: first what an optimizer guards, else the call waits."""
    sources = [torch.randint(0, 255, (size,), dtype=torch.uint8).float() for size in sizes]
    behind = [nn.Parameter(source) for at, source in enumerate(sources) if at in guarded]
    optimizers = [torch.optim.SGD(behind)] if behind else []
    sources += [sources[at] for at in again if at < len(sizes)]
    before = [bits(source) for source in sources]
    found, arenas = take_snapshot(sources, staging="overlap", optimizers=optimizers), Arenas()

    found.copy_on_host(arenas, room, 2)

    assert arenas.nbytes == (found.layout.nbytes if found.layout else 0) <= room
    lent = {tensor.data_ptr() for tensor in found.lent}
    kept = {tensor.data_ptr() for tensor in behind}
    loose = [each for each in sources if each.data_ptr() not in kept]
    assert found.live_nbytes == sum(tensor.nbytes for tensor in found.lent)
    assert found.guarded == lent.isdisjoint(each.data_ptr() for each in loose)
    if not found.guarded:  # the smallest that was left is larger than what was free before guarded ones came
        smallest = min(each.nbytes for each in loose if each.data_ptr() in lent)
        copied = {each.data_ptr(): -(-each.nbytes // 64) * 64 for each in loose if each.data_ptr() not in lent}
        assert sum(copied.values()) + smallest > room - 64
    for source in sources:
        if source.data_ptr() not in lent:
            source.fill_(-1)
    assert [bits(each) for each in found.tensors] == before


@pytest.mark.parametrize(
    ("free", "staging", "copied", "guarded"),
    [(2000, "auto", [0, 1], True), (1999, "auto", [], False), (0, "device", [0, 1], True), (2000, "host", [], False)],
)
def test_auto_copies_on_a_device_only_where_half_of_what_is_free_is_enough(free, staging, copied, guarded):
    """With less room, and no optimizer that guards the state, nothing is copied there and the call has to wait."""
    elsewhere = [torch.empty(500, dtype=torch.uint8, device="meta") for _ in range(2)]
    places, free = pieces._Places.of(elsewhere), {torch.device("meta"): free}
    assert pieces._chosen_for_copy(elsewhere, places, staging, [], free) == (copied, guarded)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    owned=st.sets(st.integers(0, 11)),
    free=st.integers(0, 2000),
    order=st.permutations(range(12)),
)
def test_auto_copies_what_is_written_last_where_there_is_room_for_a_part(sizes, owned, free, order):
    """First what no optimizer guards; then, of what is left, as much of the end as fits; the rest waits for the host."""
    tensors = [torch.zeros(size, dtype=torch.uint8).float() for size in sizes]
    order = [row for row in order if row < len(sizes)]
    optimizers = [torch.optim.SGD([nn.Parameter(tensors[row]) for row in order if row in owned] or [torch.zeros(1)])]
    rows = list(range(len(sizes)))
    places = pieces._Places([], rows, Counter({torch.device("cpu"): sum(each.nbytes for each in tensors)}))
    found = pieces._chosen_for_copy(tensors, places, "auto", optimizers, {torch.device("cpu"): free}, order)

    room = free // 2
    fits = lambda some: sum(tensors[row].nbytes for row in some) <= room  # noqa: E731
    loose = [row for row in rows if row not in owned]
    guards = [row for row in order if row in owned]
    longest = next((guards[at:] for at in range(len(guards) + 1) if fits([*loose, *guards[at:]])), None)
    expected = ([], False) if longest is None else (sorted([*loose, *longest]), True)
    assert found == (expected if not fits(rows) else (rows, True))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]),
    strided=st.booleans(),
)
def test_copies_on_a_device_are_packed(shapes, dtype, strided):
    """Copies have the shapes and bits of their sources, overlap nowhere, begin where they would in a file, and share few allocations."""
    full = [[*shape[:-1], 2 * shape[-1]] if shape and strided else shape for shape in shapes]
    sources = [
        torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1) for shape in full
    ]
    sources = [each[..., ::2] if each.ndim and strided else each for each in sources]
    packed = list(sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_SEGMENT_NBYTES", 2048)
        for each in map(pieces.PackedCopies.of, pieces._lay_out_segments(sources, list(range(len(sources))))):
            each.fill(sources)
            each.put_into(packed)
    assert [bits(each) for each in packed] == [bits(each) for each in sources]
    assert [tuple(each.shape) for each in packed] == [tuple(shape) for shape in shapes]
    ends: dict[int, int] = {}
    for each in filter(torch.Tensor.numel, packed):
        start, memory = each.storage_offset() * each.itemsize, each.untyped_storage().data_ptr()
        assert start % max(1, min(each.nbytes & -each.nbytes, 64)) == 0
        assert 0 <= start - ends.get(memory, 0) < 64
        ends[memory] = start + each.nbytes
    kinds = len({each.is_contiguous() for each in sources})
    assert len(ends) <= kinds + sum(each.nbytes + 64 for each in sources) // 1024


class Copying:
    """Copies on a device that is host memory, with so much free there; the first allocations may fail."""

    def __init__(self, monkeypatch, free, *, failing=0):
        self.failing, self.asked, self.derived = failing, [], {}
        made = pieces.PackedCopies.of

        def of(layout):
            self.failing -= 1
            if self.failing >= 0:
                raise torch.OutOfMemoryError("the device is full")
            return made(layout)

        def queue(device, tensors, packed):
            for each in packed:
                each.fill(tensors)
            return f"event of {device}"

        def free_nbytes(device, wanted, left):
            self.asked.append(left)
            return free

        monkeypatch.setattr(pieces.PackedCopies, "of", of)
        monkeypatch.setattr(pieces, "_queue_copies", queue)
        monkeypatch.setattr(pieces, "_free_nbytes", free_nbytes)

    def take(self, tensors, staging, optimizers=()):
        nbytes = Counter({torch.device("cpu"): sum(each.nbytes for each in tensors)})
        places = pieces._Places([], list(range(len(tensors))), nbytes)
        taken = pieces.DeviceSnapshot(list(tensors), derived=self.derived)
        pieces._copy_on_device(taken, places, staging, optimizers, ())
        return taken


def test_without_memory_for_copies_auto_copies_to_the_host_and_device_fails(monkeypatch):
    """What a device says is free may not be there for one large allocation."""
    tensors = [torch.arange(1000.0), torch.arange(10.0)]
    copying = Copying(monkeypatch, 1 << 20, failing=1)
    taken = copying.take(tensors, "auto")
    assert (taken.guarded, taken.live_nbytes, taken.packed) == (False, 4040, [])
    assert taken.choice == "host: 0 B copied on the device, of 0 B free there, 4.04 kB to the host"
    assert taken.events == {torch.device("cpu"): "event of cpu"}
    copying.failing = 1
    with pytest.raises(torch.OutOfMemoryError):
        copying.take(tensors, "device")


def test_what_copies_leave_in_the_cache_counts_for_one_save(monkeypatch):
    """When the save that made them has ended; a save that begins before another has ended counts nothing."""
    tensors = [torch.arange(1000.0)]
    copying = Copying(monkeypatch, 1 << 20)
    first, second = copying.take(tensors, "auto"), copying.take(tensors, "auto")
    first.note_left_in_cache()
    second.note_left_in_cache()
    third, _ = copying.take(tensors, "auto"), copying.take(tensors, "auto")
    assert copying.asked == [0, 0, 4000, 0]
    assert torch.equal(third.tensors[0], tensors[0])


@pytest.mark.parametrize(
    ("known", "free"),
    [
        ({}, 0),
        ({"mem_get_info": 100}, 100),
        ({"mem_get_info": 100, "memory_reserved": 70, "memory_allocated": 20}, 130),
        ({"mem_get_info": 100, "memory_reserved": 30, "memory_allocated": 20}, 110),
        ({"mem_get_info": 800, "memory_reserved": 70, "memory_allocated": 20}, 800),
    ],
)
def test_free_memory_of_accelerators_that_say_less_than_cuda(monkeypatch, known, free):
    """200 bytes are wanted, and the last copies left 30; where there is much room, that is enough."""
    module = SimpleNamespace(**{name: _telling(name, value) for name, value in known.items()})
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert pieces._free_nbytes(torch.device("cpu"), 200, 30) == free


def _telling(name, value):
    return lambda _: (value, 1 << 40) if name == "mem_get_info" else value
