"""The file that asks for a save, in a root that may not answer: training does not wait for it."""

import threading
import time

from shardkeep.manage.schedule import SaveRequests, Timer
from shardkeep.storage.memory import MemoryStore


class SilentRoot(MemoryStore):
    """A bucket that answers when it is let."""

    sequential = True

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def open(self, name):
        assert self.answers.wait(30)
        return super().open(name)


def test_nobody_waits_for_a_root_that_does_not_answer():
    """
    A look that takes long is made aside, one at a time; what it finds counts when it is there, and only once.
    """
    root = SilentRoot()
    root.put("save-now", b"")
    requests = SaveRequests(root, "save-now", Timer(None, time.monotonic), clock=time.monotonic, interval_s=0.0)
    began = threading.active_count()
    assert [requests.why([]) for _ in range(5)] == [("", False)] * 5
    assert threading.active_count() <= began + 1
    root.answers.set()
    until = time.monotonic() + 30
    while not (why := requests.why([])[0]) and time.monotonic() < until:
        time.sleep(0.01)
    assert why == "the file save-now was found"
    assert not list(root.list())
    time.sleep(0.05)
    assert requests.why([]) == ("", False)
