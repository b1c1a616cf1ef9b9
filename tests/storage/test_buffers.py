"""Memory for direct I/O."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkeep.storage.buffers import ALIGNMENT, PerThread, address_of, aligned_buffer


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
