"""Buffers that are used again, within a limit."""

import random

from shardkeep.stage.buffers import BufferPool, ordinary_buffer
from shardkeep.stage.pinned import staging_memory

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


def test_windows_are_taken_in_the_same_order_whatever_order_they_came_back_in():
    """The buffer that a save fills most is the same one each time: memory that was not touched stays untouched."""
    assert staging_memory().windows._oldest_first
    pool = BufferPool(ordinary_buffer, SIZE, 4 * SIZE, oldest_first=True)
    dice = random.Random(5)
    orders = []
    for _ in range(20):
        taken = [pool.take() for _ in range(4)]
        orders.append(taken)
        for buffer in dice.sample(taken, 4):
            pool.give(buffer)
    assert all(order == orders[0] for order in orders)
    assert pool.nbytes == 4 * SIZE


def test_other_buffers_come_back_last_first_and_closed_pools_forget_theirs():
    """Without an order asked for, what came back last is taken next; a closed pool knows no buffer any more."""
    pool = BufferPool(ordinary_buffer, SIZE, 3 * SIZE)
    first, second, third = (pool.take() for _ in range(3))
    for buffer in (second, third, first):
        pool.give(buffer)
    assert [pool.take() for _ in range(3)] == [first, third, second]
    pool.give(third)
    pool.close()
    pool.give(first)
    pool.give(second)
    assert len(pool._ages) == len(pool._free) == pool.nbytes // SIZE == 1
