"""Handlers of signals: whose they are, and what they do when they are no longer wanted."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from shardkeep.manage.signals import Handlers
from tests.manage.scene import checkpointer


def _wait() -> None:
    while True:
        time.sleep(0.05)


def test_a_forked_child_can_be_terminated(tmp_path: Path) -> None:
    """As it could without a Checkpointer: the handler is of the process that made it."""
    with checkpointer(tmp_path, signals=("SIGTERM",)) as ckpt:
        child = multiprocessing.get_context("fork").Process(target=_wait, daemon=True)
        child.start()
        child.terminate()
        child.join(30)
        try:
            assert child.exitcode == -signal.SIGTERM
        finally:
            child.kill()
        assert not ckpt.should_stop


def test_handlers_may_be_removed_in_any_order() -> None:
    """The last one that is removed leaves what was there before the first; until then each signal reaches those left."""
    heard: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    try:
        first = Handlers([signal.SIGUSR1], lambda: heard.append("first"))
        second = Handlers([signal.SIGUSR1], lambda: heard.append("second"))
        first.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["second", "mine"]
        second.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["second", "mine", "mine"]
        third = Handlers([signal.SIGUSR1], lambda: heard.append("third"))
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
        "import signal, sys, threading; from shardkeep.manage.signals import Handlers\n"
        "a, b = (Handlers([signal.SIGTERM], print) for _ in range(2))\n"
        "a.remove(); t = threading.Thread(target=b.remove); t.start(); t.join()\n"
        "signal.raise_signal(signal.SIGTERM); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b""
