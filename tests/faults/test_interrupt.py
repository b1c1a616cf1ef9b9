"""Ctrl-C in the main thread during a save."""

import gc
import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from torch.distributed import HashStore

import shardkeep
import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.faults.scene import (
    IN_ORDER,
    assert_saved,
    checkpoint_at,
    files_of_checkpoint,
    names_in,
    no_leaks,
    save_all,
    state_of,
)
from tests.support.stores import BeforeStore

COMMIT = f"put {RECORD_NAME}"


class CtrlCStore(FaultyStore):
    """At operation `at`, wherever it runs, Ctrl-C reaches the main thread; the operation goes on a little later."""

    def begin(self, verb, name):
        turn = len(self.operations) == self._at
        self.operations.append(f"{verb} {name}".rstrip())
        if turn:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            time.sleep(0.1)


@contextmanager
def alarm_is_ctrl_c():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def save_here(place, k, store=None):
    return sk.save(state_of(k), store or place, step=k, overwrite=True, group=World(0, 1), options=IN_ORDER)


def test_ctrl_c_during_any_operation(place):
    """The interrupt goes through at once, wherever the main thread is; no thread or file stays, and a checkpoint is intact."""
    save_here(place, 0)
    latest = 0
    for n in itertools.count():
        before = names_in(place)
        store = CtrlCStore(LocalStore(place), at=n)
        began = time.monotonic()
        with alarm_is_ctrl_c(), no_leaks():
            hit = interrupted(partial(save_here, place, n + 1, store))
        assert hit == (len(store.operations) > n)
        if not hit:
            break
        assert time.monotonic() - began < 5
        struck = store.operations[n]
        if COMMIT in store.operations[:n]:
            latest = n + 1
            assert checkpoint_at(place) == latest, struck
            latest = 1000 + n
            save_here(place, latest)
        else:
            assert names_in(place) == before, struck
        assert checkpoint_at(place) == latest, struck
        assert names_in(place) == files_of_checkpoint(place), struck
    assert n >= 15


def interrupted(work):
    try:
        work()
    except KeyboardInterrupt:
        return True
    return False


@pytest.fixture
def _old_objects_aside():
    """Whoever collects garbage looks at what is made from here on, and not at all of torch each time."""
    gc.collect()
    gc.freeze()  # for good, as conftest has done with what was there before


@pytest.mark.usefixtures("_old_objects_aside")
def test_ctrl_c_at_any_line(place):
    """Between any two lines: the earlier checkpoint or the new one is whole, and the next save removes what is left."""
    folder = os.path.dirname(shardkeep.__file__)
    files = {os.path.join(folder, name) for name in ("saving.py", "layouts/native.py", "layouts/orphans.py")}
    save_here(place, 0)
    count = lines_of(files, partial(save_here, place, 1))
    assert count >= 150
    torn = set()
    for n in range(0, count, 9):
        with no_leaks():
            assert interrupted(partial(lines_of, files, partial(save_here, place, 2 * n + 3), stop_at=n))
        found = checkpoint_at(place)
        torn.add(found == 2 * n + 3)
        save_here(place, 2 * n + 4)
        assert checkpoint_at(place) == 2 * n + 4
        assert names_in(place) == files_of_checkpoint(place), n
    assert torn == {True, False}


def lines_of(files, work, stop_at=None):
    """Count the lines of these files that the work goes through on this thread; raise Ctrl-C at one of them."""
    passed = 0

    def trace(frame, event, arg):
        nonlocal passed
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            passed += 1
            if passed - 1 == stop_at:
                raise KeyboardInterrupt
        return trace

    # What the collector finalises in between would count as lines of this save, and swallow a Ctrl-C raised there.
    gc.collect()
    gc.disable()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return passed


def test_ctrl_c_on_a_rank_that_waits_for_the_commit(place):
    """Interrupted while rank 0 commits, a rank leaves its files alone: they are part of the checkpoint by then."""
    assert_saved(save_all(3, place, 0))
    mail = HashStore()

    def press(verb, name):
        if f"{verb} {name}" == COMMIT:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)  # to do harm

    def save(rank, where):
        world = World(rank, 3, mail, timeout_s=6)
        return sk.save(state_of(1, world), where, step=1, overwrite=True, group=world, options=IN_ORDER)

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(save, 0, BeforeStore(LocalStore(place), press)), pool.submit(save, 2, place)]
        # Ctrl-C reaches the main thread only, so that is where the rank to be interrupted has to be.
        with pytest.raises(KeyboardInterrupt):
            save(1, place)
        assert [other.result().step for other in others] == [1, 1]
    assert checkpoint_at(place) == 1
    assert names_in(place) == files_of_checkpoint(place)
