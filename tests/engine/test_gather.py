"""Windows of many small sources hold the bytes that a loop over the sources would put there."""

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.engine.workers import Scattered
from shardkeep.engine.writer import FileJob, gather, windows_in_turn
from shardkeep.storage.buffers import aligned_buffer

DATA = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
SIZES = st.one_of(st.integers(1, 64), st.sampled_from([8, 736, 4095, 4096, 4097]))


class Apart(Scattered):
    """Bytes that have no address."""

    def __init__(self, data):
        self.data = data

    def read(self, start, stop, into, *, queued=False):
        into[:] = self.data[start:stop]


@given(
    runs=st.lists(
        st.tuples(SIZES, st.integers(1, 80), st.sampled_from(["same", "next", "backwards", "apart"])), max_size=8
    ),
    window=st.sampled_from([512, 4096, 1 << 16]),
)
def test_windows_hold_all_bytes_in_order(runs, window):
    """Runs of equal sizes, from one address, from neighbours in either order or from no address, cut by windows anywhere."""
    sources = []
    for size, count, how in runs:
        for number in range(count):
            at = {"same": 7, "next": number * size, "backwards": (count - number) * size}.get(how, 11 * number) % (
                1 << 15
            )
            sources.append((size, 0 if how == "apart" else DATA.ctypes.data + at, DATA[at : at + size].tobytes()))
    expected = b"".join(data for *_, data in sources)
    scattered = {row: Apart(data) for row, (_, address, data) in enumerate(sources) if not address}
    start = np.array(list(accumulate((size for size, *_ in sources), initial=0))[:-1], np.int64)
    address = np.array([address for _, address, _ in sources], np.int64)
    job = FileJob("file", bytearray(), len(expected), 512, start, address, scattered, owners=(DATA,))
    found = []
    for each in windows_in_turn([job], window, 1):
        memory = aligned_buffer(window)
        gather(each, memory[: each.nbytes])
        found.append(memory[: each.nbytes].tobytes())
        assert not any(memory[each.nbytes :])
    assert expected == b"".join(found)
