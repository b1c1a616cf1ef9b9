"""Buffers that are used again, within a limit."""

import random

import pytest

import shardkeep as sk
from shardkeep.engine.pools import Arenas, BufferPool, ordinary_buffer
from shardkeep.engine.workers import windows_for

SIZE = 1 << 16


def test_closing_forgets_the_limit():
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
    pool = BufferPool(ordinary_buffer, SIZE, 4 * SIZE)
    dice = random.Random(5)
    orders = []
    for _ in range(20):
        taken = [pool.take() for _ in range(4)]
        orders.append(taken)
        for buffer in dice.sample(taken, 4):
            pool.give(buffer)
    assert all(order == orders[0] for order in orders)
    assert pool.nbytes == 4 * SIZE


def test_what_nobody_uses_can_be_freed():
    """Buffers in use stay, and come back; no more is freed than has to be."""
    pool = BufferPool(ordinary_buffer, SIZE, 4 * SIZE)
    taken = [pool.take() for _ in range(4)]
    for buffer in taken[1:]:
        pool.give(buffer)
    pool.shrink(3 * SIZE)
    assert pool.nbytes == 3 * SIZE
    pool.shrink(0)
    assert pool.nbytes == SIZE
    pool.give(taken[0])
    assert pool.take() is taken[0]


TOO_MUCH = 1 << 48
"""More than any process can map: addresses have 47 bits."""


def test_memory_that_cannot_be_had():
    """A pool and a writer say what they wanted and what to do; nothing is counted that was not made."""
    pool = BufferPool(ordinary_buffer, TOO_MUCH, TOO_MUCH)
    with pytest.raises(
        sk.CheckpointError, match=r"no memory for buffer number 1 of .* MiB at most: .*(?s:.*)staging_bytes"
    ):
        pool.take()
    assert pool.nbytes == 0
    with windows_for([], TOO_MUCH, 1) as lend, pytest.raises(sk.CheckpointError, match="no memory for a window"):
        lend()


def test_an_arena_that_cannot_be_made_is_not_counted():
    arenas = Arenas()
    arenas.give(arenas.take(1000))
    with pytest.raises(OSError, match="memory"):
        arenas.take(TOO_MUCH)
    assert (arenas.nbytes, arenas.nbytes_in_use) == (0, 0)
    arena = arenas.take(500)
    assert (arenas.nbytes, arenas.nbytes_in_use) == (500, 500)
    arenas.give(arena)
    assert (arenas.nbytes, arenas.nbytes_in_use) == (500, 0)


def test_a_kept_arena_above_the_limit_is_freed():
    """Memory that is kept from a time with more room is used where it is allowed, and else given up for less."""
    arenas = Arenas()
    kept = arenas.take(8000)
    arenas.give(kept)
    assert arenas.take(1000, 8000) is kept
    arenas.give(kept)
    assert arenas.take(1000, 7999).view.nbytes == arenas.nbytes == 1000
