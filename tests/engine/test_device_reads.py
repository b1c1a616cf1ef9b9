"""Reading through windows into tensors that are one run of bytes on a device, and who gives threads their windows."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.engine import fill as fetch
from shardkeep.engine import workers as windows
from shardkeep.engine.pools import BufferPool, StagingMemory, ordinary_buffer
from shardkeep.engine.tensors import TorchScattered
from shardkeep.engine.workers import run_workers
from shardkeep.format.boxes import Box, contiguous_run, slices
from tests.engine.samples import all_dtypes, bits, random_tensor, raw_view

KIB = 1 << 10


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_runs_of_bytes_are_read_and_written_where_boxes_are(data):
    """A box that is one run is filled by its bytes as by its elements, and any range of bytes is read as it lies."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
    tensor = random_tensor(shape, dtype, seed=1)
    memory = TorchScattered(tensor, dtype)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offsets, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))
    new = random_tensor(box.sizes, dtype, seed=2)
    whole = Box((0,) * len(shape), box.sizes)
    before, expected = tensor.clone(), tensor.clone()
    raw_view(expected)[slices(box)] = raw_view(new)
    source = memoryview(bytearray(bits(new)[3]))
    cut = data.draw(st.integers(0, len(source)))
    for low, high in ((0, cut), (cut, len(source))):
        filled = memory.write_chunk(box.sizes, whole, box, source[low:high], low)
        assert filled == (contiguous_run(shape, box) is not None)
    assert bits(tensor) == bits(expected if filled else before)
    if not filled:
        return

    size = tensor.element_size()
    first = data.draw(st.integers(0, tensor.numel() - 1)) * size
    last = data.draw(st.integers(first // size + 1, tensor.numel())) * size
    into = memoryview(bytearray(last - first))
    memory.read(first, last, into)
    assert bytes(into) == bits(expected)[3][first:last]


def test_memory_that_is_no_run_has_none():
    whole, data = Box((0, 0), (3, 4)), memoryview(bytearray(48))
    assert not TorchScattered(torch.zeros(4, 3).t(), torch.float32).write_chunk((3, 4), whole, whole, data, 0)
    assert not TorchScattered(torch.zeros(3, 4), torch.float16).write_chunk((3, 4), whole, whole, data, 0)


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Every load takes the way of tensors on an accelerator, though they are here."""
    ways = []

    def scattered(tensor, stored):
        ways.append(TorchScattered(tensor, stored))
        return ways[-1]

    monkeypatch.setattr(fetch, "host_address", lambda tensor: 0)
    monkeypatch.setattr(fetch, "scattered_memory", scattered)
    return ways


def test_loads_through_windows_are_bit_exact(tmp_path, as_on_a_device):
    """Every dtype, scalars, tensors over many windows and blocks, strided and cast ones come back."""
    state = {str(dtype): random_tensor((7, 5), dtype, seed=3) for dtype in all_dtypes()}
    state["scalar"] = torch.tensor(1.5)
    state["long"] = random_tensor((3, 1100, 1000), torch.float32, seed=4)
    state["many"] = [random_tensor((i,), torch.bfloat16, seed=i) for i in range(1, 200)]
    sk.save(state, tmp_path)
    target = {key: torch.zeros_like(value) for key, value in state.items() if key != "many"}
    target["many"] = [torch.zeros_like(value) for value in state["many"]]
    options = sk.Options(io_threads=3, host_budget_bytes=6 << 20)
    sk.load(target, tmp_path, options=options)
    assert bits(target) == bits({key: state[key] for key in target})
    assert len(as_on_a_device) == len(state) - 1 + len(state["many"])
    strided = {"long": torch.zeros(1000, 1100, 3).permute(2, 1, 0)}
    sk.load(strided, tmp_path, options=options, strict=False)
    assert bits(strided["long"]) == bits(state["long"])
    cast = {"scalar": torch.zeros((), dtype=torch.float64)}
    sk.load(cast, tmp_path, options=options, strict=False, cast=True)
    assert cast["scalar"].item() == 1.5


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_stored_chunks_are_read_through_windows(tmp_path, as_on_a_device, axis):
    full = random_tensor((64, 96), torch.float32, seed=5)
    sk.save({"w": full}, tmp_path)
    offsets = (9, 0) if axis == 0 else (0, 9)
    part = full.narrow(axis, 9, 17)
    rest = [full.narrow(axis, 0, 9), full.narrow(axis, 26, full.shape[axis] - 26)]
    starts = [(0, 0), (26, 0) if axis == 0 else (0, 26)]
    pieces = [(torch.zeros(part.shape), offsets)]
    pieces += [(torch.zeros(each.shape), start) for each, start in zip(rest, starts, strict=True)]
    sk.load({"w": sk.ShardedBox.of(pieces, shape=full.shape, dtype=full.dtype)}, tmp_path)
    assert [bits(piece) for piece, _ in pieces] == [bits(each) for each in (part, *rest)]


# Who gives windows


class Far(TorchScattered):
    def __init__(self, nbytes):
        super().__init__(torch.zeros(nbytes, dtype=torch.uint8), torch.uint8)
        self.accelerator = 1


@pytest.fixture
def ring(monkeypatch):
    """A ring of small buffers of ordinary memory; more than a little is worth pinning; devices are only noted."""
    memory = StagingMemory(ring=BufferPool(ordinary_buffer, 64 * KIB, 0))
    monkeypatch.setattr("shardkeep.engine.pools.staging_memory", lambda: memory)
    monkeypatch.setattr(windows, "_WORTH_PINNING_NBYTES", 1000)
    memory.ring.chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", memory.ring.chosen.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)  # there may be only one
    return memory.ring


def test_windows_for_accelerators_are_parts_of_the_ring(ring):
    """Threads get windows that do not overlap, on their device, in as few buffers as hold them; all come back."""
    with windows.windows_for([Far(2000)], 32 * KIB, 3) as lend:
        given = [lend() for _ in range(3)]
        for number, window in enumerate(given):
            window[:] = bytes([number]) * len(window)
        assert [bytes(window) for window in given] == [bytes([number]) * 32 * KIB for number in range(3)]
        assert ring.nbytes == 2 * 64 * KIB
    assert ring.chosen == [1, 1, 1]
    taken = [ring.take(lambda: False) for _ in range(3)]
    assert [buffer is None for buffer in taken] == [False, False, True]


@pytest.mark.parametrize("nbytes", [2000, 500])
def test_a_ring_in_use_is_not_waited_for_and_little_is_not_worth_pinning(ring, nbytes):
    """While others have all of the ring, and for a small copy, ordinary memory does, on the right device all the same."""
    theirs = ring.take() if nbytes == 2000 else None
    before = theirs and bytes(theirs.view)
    with windows.windows_for([Far(nbytes)], 64 * KIB, 1) as lend:
        window = lend()
        window[:] = b"m" * 64 * KIB
    assert theirs is None or bytes(theirs.view) == before
    assert ring.nbytes == (64 * KIB if theirs else 0)
    assert ring.chosen == [1]


def test_threads_ask_for_a_buffer_when_they_have_something_to_do():
    """As many buffers are lent as threads got a task, each on the thread that uses it; without tasks none is."""
    lent, used = {}, {}

    def lend():
        buffer = memoryview(bytearray(8))
        lent[threading.get_ident()] = id(buffer.obj)
        return buffer

    together = threading.Barrier(2, timeout=20)

    def work(_, buffer):
        used[threading.get_ident()] = id(buffer.obj)
        together.wait()
        return True

    run_workers(range(2), work, threads=4, buffer_nbytes=8, lend=lend)
    assert lent == used
    assert len(lent) == 2
    lent.clear()
    run_workers([], work, threads=4, buffer_nbytes=8, lend=lend)
    assert lent == {}
