"""Memory for direct I/O."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkeep.storage.buffers import ALIGNMENT, ScratchPool, address_of, aligned_buffer, copy, flat


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 << 20])
def test_buffers_are_aligned_and_exact(nbytes):
    """A buffer starts on a page, has the asked length, is zero and writable."""
    buffer = aligned_buffer(nbytes)
    assert nbytes == len(buffer)
    assert address_of(buffer) % ALIGNMENT == 0
    assert bytes(nbytes) == buffer
    buffer[:] = b"\1" * nbytes
    assert b"\1" * nbytes == buffer


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, 1 << 20])
def test_copy(nbytes):
    """Small and large copies give the same bytes, from read-only memory too; lengths that differ are an error."""
    src = memoryview(bytes(i % 251 for i in range(nbytes)))
    dst = bytearray(nbytes)
    copy(memoryview(dst), src)
    assert src == dst
    with pytest.raises(ValueError, match=r"shape|structures|broadcast"):
        copy(memoryview(dst), memoryview(bytes(nbytes + 2)))


def test_flat():
    """A contiguous buffer of any item type is seen as bytes; one with gaps is refused."""
    assert len(flat(memoryview(bytearray(40)).cast("f"))) == 40
    assert len(flat(memoryview(bytearray(6)).cast("B", (2, 3)))) == 6
    with pytest.raises(TypeError):
        flat(memoryview(bytearray(10))[::2])


def test_pool_reuses_while_held():
    """A held pool lends the same memory again; the last release frees it."""
    pool = ScratchPool(8192)
    hold = pool.retained()
    with pool.lease() as first, pool.lease() as second:
        addresses = {address_of(first), address_of(second)}
    assert len(addresses) == 2
    with pool.lease() as again:
        assert address_of(again) in addresses
    hold.close()
    hold.close()
    assert pool._free == []


def test_pool_never_lends_twice_at_once():
    """Threads at the same time get different buffers."""
    pool = ScratchPool(4096)
    hold = pool.retained()

    def mark(i):
        with pool.lease() as buffer:
            buffer[:] = bytes([i % 256]) * 4096
            return buffer == bytes([i % 256]) * 4096

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(mark, range(500)))
    assert len(pool._free) <= 8
    hold.close()
