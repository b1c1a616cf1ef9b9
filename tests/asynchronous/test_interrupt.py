"""Ctrl-C in the call of an asynchronous save."""

import contextlib
import gc
import os
from functools import partial

import shardkeep
import shardkeep as sk
from shardkeep.engine.pools import staging_memory
from tests.asynchronous.scene import full, says
from tests.faults.scene import files_of_checkpoint, names_in, no_leaks
from tests.faults.test_interrupt import interrupted, lines_of

# None with a lock: a trace may strike between the end of a `with` block and its release, where no Ctrl-C comes.
FILES = ("saving.py", "engine/save_session.py", "engine/queue.py", "engine/snapshot.py")
OPTIONS = sk.Options(io_threads=1, host_budget_bytes=2 << 20)


def save(place, k):
    return sk.async_save(full(k), place, overwrite=True, options=OPTIONS)


def finish():
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()


def test_ctrl_c_at_any_line_of_the_call(place):
    """Interrupted between any two lines: a whole checkpoint, old or new; memory comes back; the next save works."""
    folder = os.path.dirname(shardkeep.__file__)
    files = {os.path.join(folder, name) for name in FILES}
    save(place, 0)
    finish()
    count = lines_of(files, partial(save, place, 1))
    finish()
    assert count >= 100
    found = set()
    latest = 1
    for n in range(0, count, 15):
        with no_leaks():
            # How often the call checks a handle varies a little, so only the last lines may not be reached.
            hit = interrupted(partial(lines_of, files, partial(save, place, 2 * n + 3), stop_at=n))
            assert hit or n > 0.8 * count, n
            gc.collect(1)  # what was made meanwhile
            finish()
        assert staging_memory().arenas.nbytes == 0, n
        [k] = says(place)
        assert k in {2 * n + 3, latest}, n
        found.add(k == latest)
        latest = 2 * n + 4
        save(place, latest)
        finish()
        assert says(place) == {latest}
        assert names_in(place) == files_of_checkpoint(place), n
    assert True in found
    assert staging_memory().windows.nbytes == 0
