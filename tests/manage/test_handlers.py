"""Handlers of signals: whose they are, and what they do when they are no longer wanted."""

import signal
import subprocess
import sys
import threading

from shardkeep.manage.schedule import SignalHandlers


def test_a_forked_child_can_be_terminated() -> None:
    """As it could without handlers: they are of the process that set them, which goes on to be told."""
    # In an interpreter of its own, as pytest's may have threads, beside which nobody should fork. The child says when it
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


def test_handlers_may_be_removed_in_any_order() -> None:
    """The last one that is removed leaves what was there before the first; until then each signal reaches those left."""
    heard: list[str] = []
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


def test_a_signal_ends_a_process_whose_handlers_were_removed() -> None:
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
