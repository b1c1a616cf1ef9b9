"""Memory that pretends to be on an accelerator: copies from it are queued on a stream, and made when it is waited for."""

import contextlib
import threading
import time
from unittest import mock

import numpy as np

from shardkeep.engine import staging
from shardkeep.engine.pools import BufferPool, ordinary_buffer
from shardkeep.engine.writer import FileJob
from shardkeep.storage.buffers import address_of

BLOCK = 16


class Stream:
    """Copies in order; `record_event` marks a place among them."""

    def __init__(self, rng):
        self._rng = rng
        self._lock = threading.Lock()
        self._queue = []
        self._done = 0

    def copy(self, into, data):
        self._queue.append((into, data))

    def reach(self, place):
        time.sleep(self._rng.random() * 0.0005)
        with self._lock:
            for into, data in self._queue[self._done : place]:
                into[:] = data
            self._done = max(self._done, place)

    def synchronize(self):
        self.reach(len(self._queue))

    def record_event(self):
        return Event(self, len(self._queue))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Event:
    """A place in a stream."""

    def __init__(self, stream, place):
        self._stream = stream
        self._place = place

    def synchronize(self):
        self._stream.reach(self._place)


class Elsewhere:
    """Bytes on the stream's device; reading fails at the n-th time, if it is to."""

    def __init__(self, data, stream, fails_at):
        self._data = data
        self._stream = stream
        self._fails_at = fails_at
        self.nbytes = len(data)
        self.accelerator = None

    def read(self, start, stop, into, *, queued=False):
        self._fails_at[0] -= 1
        if self._fails_at[0] == -1:
            raise RuntimeError("the device is gone")
        if queued and self._stream is not None:
            self._stream.copy(into, self._data[start:stop])
        else:
            into[:] = self._data[start:stop]


@contextlib.contextmanager
def pretended(stream):
    streams = {} if stream is None else {"elsewhere": stream}
    with mock.patch.object(staging, "_streams_after", return_value=streams):
        yield


def make_jobs(rng, files, stream, fails_at):
    jobs, wanted = [], {}
    for number, rows in enumerate(files):
        data = [rng.randbytes(nbytes) for nbytes, _ in rows]
        held = [bytearray(each) for each in data]
        ends = np.cumsum([len(each) for each in data])
        addresses = [0 if away else address_of(memoryview(kept)) for (_, away), kept in zip(rows, held, strict=True)]
        elsewhere = {
            row: Elsewhere(data[row], stream, fails_at) for row, address in enumerate(addresses) if not address
        }
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        name = f"file-{number}"
        total = int(ends[-1])
        jobs.append(FileJob(name, bytearray(), total, BLOCK, starts, np.array(addresses, np.int64), elsewhere, held))
        wanted[name] = b"".join(data)
    return jobs, wanted


class CountingPool(BufferPool):
    """A pool that knows how many of its buffers are out, and the most that were."""

    def __init__(self, buffer_nbytes, most):
        super().__init__(ordinary_buffer, buffer_nbytes, most * buffer_nbytes)

    @property
    def out(self):
        return self.nbytes_in_use // self.buffer_nbytes

    @property
    def most_out(self):
        return self.nbytes // self.buffer_nbytes  # one is made only if all others are out

    def give(self, buffer):
        buffer.view[:] = bytes(len(buffer.view))  # whoever still reads it reads nothing
        super().give(buffer)
