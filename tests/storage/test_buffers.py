"""Memory for direct I/O."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.storage import buffers
from shardkeep.storage.buffers import ALIGNMENT, PerThread, address_of, aligned_buffer, copy_alike


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 << 20])
def test_buffers_are_aligned_and_exact(nbytes):
    """A buffer starts on a page, has the asked length, is zero and writable."""
    buffer = aligned_buffer(nbytes)
    assert nbytes == len(buffer)
    assert address_of(buffer) % ALIGNMENT == 0
    assert bytes(nbytes) == buffer
    buffer[:] = b"\1" * nbytes
    assert b"\1" * nbytes == buffer


def test_each_thread_has_a_buffer_of_its_own():
    """Always the same one, and never that of another thread."""
    scratch = PerThread(lambda: aligned_buffer(4096))
    assert scratch.get() is scratch.get()

    def mark(i):
        buffer = scratch.get()
        buffer[:] = bytes([i % 256]) * 4096
        return buffer == bytes([i % 256]) * 4096

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(mark, range(500)))


@given(
    st.sampled_from([1, 7, 32, 4096, 16 << 10, 20_000]), st.sampled_from([1, 31, 32, 70]), st.integers(), st.booleans()
)
def test_pieces_of_one_size_are_copied(nbytes, count, seed, few_at_once):
    """From anywhere, also from overlapping or odd addresses, to where they belong; nothing around them changes."""
    random = Random(seed)
    source = np.frombuffer(random.randbytes(nbytes * 8), np.uint8)
    target, wanted = aligned_buffer((nbytes + 3) * count), bytearray((nbytes + 3) * count)
    begins = [random.randrange(nbytes * 7 + 1) for _ in range(count)]
    places = random.sample(range(0, len(target), nbytes + 3), count)
    for begin, place in zip(begins, places, strict=True):
        wanted[place : place + nbytes] = source[begin : begin + nbytes].tobytes()
    with pytest.MonkeyPatch.context() as patch:
        if few_at_once:
            patch.setattr(buffers, "_COPIED_AT_ONCE_NBYTES", 3 * nbytes)
        copy_alike(np.array(places) + address_of(target), np.array(begins) + source.ctypes.data, nbytes)
    assert wanted == target
