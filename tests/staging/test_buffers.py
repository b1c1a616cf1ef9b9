"""Buffers that are used again, within a limit."""

from shardkeep.stage.buffers import BufferPool, ordinary_buffer

SIZE = 1 << 16


def test_closing_forgets_the_limit():
    """After `close` a pool holds what the next user allows, however much the one before was allowed."""
    pool = BufferPool(ordinary_buffer, SIZE, 8 * SIZE)
    pool.grow(lambda: True)
    assert pool.nbytes == 8 * SIZE
    pool.close()
    pool.most_nbytes = max(pool.most_nbytes, 2 * SIZE)
    pool.grow(lambda: True)
    assert pool.nbytes == 2 * SIZE


def test_what_is_out_when_a_pool_is_closed_is_freed_as_it_comes_back():
    """A closed pool keeps one buffer at most."""
    pool = BufferPool(ordinary_buffer, SIZE, 4 * SIZE)
    taken = [pool.take() for _ in range(4)]
    pool.close()
    for buffer in taken:
        pool.give(buffer)
    assert pool.nbytes == SIZE
