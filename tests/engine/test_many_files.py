"""Several files of one rank: written at the same time, few of them open, each from its beginning to its end."""

import threading

import numpy as np

from shardkeep.engine.writer import MOST_FILES, FileJob, write_files
from shardkeep.storage.memory import MemoryStore

WINDOW = 4096
DATA = np.random.default_rng(0).integers(0, 256, 64 * WINDOW, np.uint8)


def job(name, nbytes, start=0):
    """A file without a header that is filled from `DATA`."""
    address = np.array([DATA.ctypes.data + start])
    return FileJob(name, bytearray(), nbytes, 4096, np.zeros(1, np.int64), address, {}, owners=(DATA,))


class Watched(MemoryStore):
    """Keeps account of what is written, in which order, and of how many files are open at a time."""

    def __init__(self, on_write=lambda name, offset: None):
        super().__init__()
        self.on_write = on_write
        self.lock = threading.Lock()
        self.being_written = set()
        self.most_open = 0
        self.offsets = {}

    def create(self, name, nbytes):
        blob = super().create(name, nbytes)
        with self.lock:
            self.being_written.add(name)
            self.most_open = max(self.most_open, len(self.being_written))
        write_at, finish = blob.write_at, blob.finish

        def watched_write(offset, data):
            with self.lock:
                self.offsets.setdefault(name, []).append(offset)
            self.on_write(name, offset)
            write_at(offset, data)

        def watched_finish():
            finish()
            with self.lock:
                self.being_written.remove(name)

        blob.write_at, blob.finish = watched_write, watched_finish
        return blob


def test_files_are_written_at_the_same_time():
    begun = []
    together = threading.Barrier(4, timeout=20)

    def at_first(name, offset):
        begun.append((name, offset))
        if len(begun) <= 4:  # the first four writes wait for each other
            together.wait()

    store = Watched(at_first)
    write_files(store, [job(name, 8 * WINDOW) for name in "abcd"], threads=4, window_nbytes=WINDOW)
    assert sorted(begun[:4]) == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    assert {name: sorted(offsets) for name, offsets in store.offsets.items()} == {
        name: list(range(0, 8 * WINDOW, WINDOW)) for name in "abcd"
    }


def test_one_thread_writes_one_file_after_another():
    store = Watched()
    write_files(store, [job(name, 3 * WINDOW) for name in "abc"], threads=1, window_nbytes=WINDOW)
    assert store.most_open == 1
    assert all(offsets == [0, WINDOW, 2 * WINDOW] for offsets in store.offsets.values())


def test_few_files_are_open_at_a_time():
    """However many files there are, those open are the ones whose turn it is or that threads are about to finish."""
    threads = 3
    jobs = [job(f"f{i}", (i % 4 + 1) * WINDOW, start=i) for i in range(60)]
    store = Watched()
    write_files(store, jobs, threads=threads, window_nbytes=WINDOW)
    assert store.most_open <= min(threads, MOST_FILES) + threads
    for i, each in enumerate(jobs):
        assert store.get(each.name, limit=1 << 20) == DATA[i : i + each.data_nbytes].tobytes()
