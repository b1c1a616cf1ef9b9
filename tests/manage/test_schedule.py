"""When saves are due."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.manage.schedule import Clock, SaveRequests, SignalHandlers, StepSchedule
from shardkeep.storage.memory import MemoryStore


def due(schedule, steps):
    return [step for step in steps if schedule.reached(step)]


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        (StepSchedule(every=4), range(13), [4, 8, 12]),  # never step 0
        (StepSchedule(every=1), range(3), [1, 2]),
        (StepSchedule(every=10), range(15, 31), [20, 30]),  # a job that begins in the middle does not save at once
        (StepSchedule(every=10), [1, 9, 12, 13, 29, 31, 55], [12, 29, 31, 55]),  # multiples that were passed
        (StepSchedule(at=[5, 6, 20]), [1, 4, 8, 9, 20, 21], [8, 20]),
        (StepSchedule(every=2), [2, 2, 1, 2, 3, 4], [2, 4]),  # the same step, or an earlier one, is not due again
    ],
)
def test_steps_that_are_due(schedule, steps, expected):
    assert due(schedule, steps) == expected


@given(st.integers(1, 7), st.lists(st.integers(0, 30), max_size=3), st.lists(st.integers(0, 40), unique=True))
def test_due_once_for_each_point_that_is_passed(every, at, steps):
    steps.sort()
    points = {step for step in range(1, 41) if step % every == 0} | set(at)
    expected = []
    last = steps[0] - 1 if steps else 0
    for step in steps:
        if points & set(range(last + 1, step + 1)):
            expected.append(step)
        last = step
    assert due(StepSchedule(every=every, at=at), steps) == expected


# The file that asks for a save, in a root that may not answer: training does not wait for it.


class SilentRoot(MemoryStore):
    """A bucket that answers when it is let."""

    sequential = True

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()

    def open(self, name):
        assert self.answers.wait(30)
        return super().open(name)


def test_training_does_not_wait_for_a_root_that_does_not_answer():
    """A look that takes long is made aside, one at a time; what it finds counts when it is there, and only once."""
    root = SilentRoot()
    root.put("save-now", b"")
    requests = SaveRequests(root, "save-now", Clock(interval_s=0.0))
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


# Handlers of signals: whose they are, and what they do when they are no longer wanted.


def test_a_forked_child_can_be_terminated():
    """As it could without handlers: they act only in the process that installed them."""
    # In an interpreter of its own, because pytest's may have threads, and forking beside them is unsafe. The child says when it
    # runs: Python forgets signals that come to any handler of its own in the very moment of a fork. And it sleeps little
    # at a time: of one that comes just before a sleep Python takes notice after it.
    script = (
        "import multiprocessing, os, signal, time; from shardkeep.manage.schedule import SignalHandlers as Handlers\n"
        "told = []; handlers = Handlers([signal.SIGTERM], lambda: told.append(1)); read, write = os.pipe()\n"
        "def run(): os.write(write, b'x'); [time.sleep(0.1) for _ in range(600)]\n"
        "child = multiprocessing.get_context('fork').Process(target=run, daemon=True); child.start()\n"
        "os.read(read, 1); child.terminate(); child.join(30); print(child.exitcode, told)\n"
        "child.kill(); signal.raise_signal(signal.SIGTERM); print(told)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["-15 []", "[1]", ""]


def test_handlers_may_be_removed_in_any_order():
    """The last one that is removed leaves what was there before the first; until then each signal reaches those left."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    try:
        first = SignalHandlers([signal.SIGUSR1], lambda: heard.append("first"))
        second = SignalHandlers([signal.SIGUSR1], lambda: heard.append("second"))
        first.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["second", "mine"]
        second.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["second", "mine", "mine"]
        third = SignalHandlers([signal.SIGUSR1], lambda: heard.append("third"))
        thread = threading.Thread(target=third.remove)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["second", "mine", "mine", "mine"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_ends_a_process_whose_handlers_were_removed():
    """In whichever order or thread."""
    script = (
        "import signal, sys, threading; from shardkeep.manage.schedule import SignalHandlers as Handlers\n"
        "a, b = (Handlers([signal.SIGTERM], print) for _ in range(2))\n"
        "a.remove(); t = threading.Thread(target=b.remove); t.start(); t.join()\n"
        "signal.raise_signal(signal.SIGTERM); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b""
