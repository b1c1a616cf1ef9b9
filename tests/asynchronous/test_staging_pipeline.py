"""Windows that are filled ahead, with memory that pretends to be elsewhere and next to no room: right, or ended."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.engine.staging import Staging
from shardkeep.engine.writer import windows_in_turn, write_files
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.elsewhere import BLOCK, CountingPool, Stream, make_jobs, pretended

NEVER = 1 << 30
files = st.lists(
    st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=4
)


@dataclass
class Run:
    error: BaseException | None
    found: dict[str, bytes]
    wanted: dict[str, bytes]
    pool: CountingPool
    ring: CountingPool
    staging: Staging


def run(
    files,
    *,
    seed=0,
    threads=2,
    blocks=2,
    windows=2,
    pinned=1,
    queued=True,
    all_ahead=False,
    read_fails=NEVER,
    write_fails=None,
    cancelled_at=NEVER,
):
    rng = random.Random(seed)
    stream = Stream(rng) if queued else None
    window = blocks * BLOCK
    jobs, wanted = make_jobs(rng, files, stream, [read_fails])
    ring, pool = CountingPool(window, pinned), CountingPool(window, windows)
    store = FaultyStore(sk.MemoryStore(), at=write_fails, verbs=["write_at"])
    asked = [0]

    def still_wanted():
        asked[0] += 1
        return asked[0] <= cancelled_at

    staging = Staging(
        windows_in_turn(jobs, window, threads),
        ring=ring,
        pool=pool,
        after={},
        wanted=still_wanted,
        ahead=(lambda _: True) if all_ahead else None,
    )
    error = None
    try:
        with pretended(stream), staging.running():
            write_files(store, jobs, threads=threads, window_nbytes=window, take=staging.take)
    except (sk.CheckpointError, RuntimeError) as raised:
        error = raised
    found = {info.name: store.inner.get(info.name, limit=1 << 20) for info in store.inner.list()}
    return Run(error, found, wanted, pool, ring, staging)


SCENES = {"seed": st.integers(0, 99), "windows": st.integers(1, 5), "queued": st.booleans()}
MORE = {
    "threads": st.integers(1, 4),
    "blocks": st.integers(1, 5),
    "pinned": st.integers(1, 3),
    "all_ahead": st.booleans(),
}
FAULTS = {"read_fails": st.integers(0, 30), "write_fails": st.integers(0, 30), "cancelled_at": st.integers(0, 60)}


@settings(max_examples=60, deadline=None)
@given(files, st.fixed_dictionaries(SCENES | MORE))
def test_what_is_staged_is_what_was_there(files, scene):
    """Whatever lies where, with however little room, files hold the rows; buffers come back, and no source is kept."""
    ran = run(files, **scene)
    assert ran.error is None
    assert ran.found == ran.wanted
    assert (ran.pool.out, ran.ring.out) == (0, 0)
    assert ran.pool.most_out <= scene["windows"]
    assert ran.ring.most_out <= (scene["pinned"] if scene["queued"] else 0)
    assert ran.staging.copied.result(0) is None
    assert set(ran.staging.queued.result(0)) <= {"elsewhere"}
    assert not any(job.scattered for window in ran.staging._queue for job in [window.job])


@settings(max_examples=60, deadline=None)
@given(files, st.fixed_dictionaries(SCENES), st.fixed_dictionaries({}, optional=FAULTS))
def test_a_failure_ends_it(files, scene, faults):
    """A failing device or disk, or a cancel, at any moment: buffers come back, and no file or whole ones are left."""
    ran = run(files, **scene, **faults)
    assert ran.found == ({} if ran.error else ran.wanted)
    assert (ran.error is None) or str(ran.error)
    assert (ran.pool.out, ran.ring.out) == (0, 0)  # else the next save would wait for ever
    assert ran.staging.copied.done()
    assert ran.staging.queued.done()


def test_saves_that_share_memory_do_not_wait_for_each_other():
    """Two saves at a time share windows that are enough for either and not for both: each goes through."""
    rng = random.Random(0)
    deadline = time.monotonic() + 20
    for seed in range(40):
        stream = Stream(rng)
        pool, ring = CountingPool(BLOCK, 12), CountingPool(BLOCK, 2)

        def save(seed, stream=stream, pool=pool, ring=ring):
            store = sk.MemoryStore()
            jobs, wanted = make_jobs(random.Random(seed), [[(48, True)]] * 4, stream, [NEVER])
            staging = Staging(
                windows_in_turn(jobs, BLOCK, 8),
                ring=ring,
                pool=pool,
                after={},
                wanted=lambda: time.monotonic() < deadline,
                urgent=True,
            )
            with staging.running():
                write_files(store, jobs, threads=8, window_nbytes=BLOCK, take=staging.take)
            return all(store.get(name, limit=1 << 20) == data for name, data in wanted.items())

        with pretended(stream), ThreadPoolExecutor(2) as threads:
            assert list(threads.map(save, [seed, 100 + seed])) == [True, True]
        assert pool.out == ring.out == 0


@pytest.mark.parametrize("late", [0, 1, 3, 4])
def test_the_state_is_released_when_what_is_the_callers_has_been_copied(late):
    """Windows that hold copies come after those of the caller's memory, and nothing waits until they find room."""
    stream = Stream(random.Random(0))
    jobs, wanted = make_jobs(random.Random(late), [[(BLOCK, True)] * 9], stream, [NEVER])
    pool, ring, store = CountingPool(BLOCK, late + 1), CountingPool(BLOCK, 2), sk.MemoryStore()
    staging = Staging(
        windows_in_turn(jobs, BLOCK, 1),
        ring=ring,
        pool=pool,
        after={},
        wanted=lambda: True,
        live=lambda window: window.start < late * BLOCK,
    )
    assert staging.nbytes == late * BLOCK
    with pretended(stream), staging.running():
        staging.copied.result(20)  # although no window has been written, and the others find no room
        assert set(staging.queued.result(0)) == {"elsewhere"}
        assert staging.nbytes_copied == late * BLOCK
        write_files(store, jobs, threads=1, window_nbytes=BLOCK, take=staging.take)
    assert {name: store.get(name, limit=1 << 20) for name in wanted} == wanted
    assert pool.out == ring.out == 0
