"""What an attack costs: memory, time, and which files of this machine are opened meanwhile."""

import sys
import time
import tracemalloc
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
MIB = 1 << 20
_EVENTS = frozenset({"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.link", "os.symlink"})


def bounded(attack, *, mib=64, seconds=20.0, traced=True):
    """
    Run an attack, insist that it takes no more memory and time of processors than this, and return what it returns.

    It runs twice: memory is what the process really held, and then what Python and numpy asked for, touched or not.
    `traced=False` leaves out the second, which is slow for millions of small objects.
    """
    before = _reset_peak()
    began = time.process_time()
    answer = attack()
    took = time.process_time() - began
    held = _peak() - before
    assert held < mib, f"held {held:.0f} MiB more than before"
    assert took < seconds, f"took {took:.1f} s"
    if not traced:
        return answer
    tracemalloc.start()
    try:
        attack()
        asked = tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()
    assert asked < mib, f"asked for {asked:.0f} MiB"
    return answer


def _reset_peak():
    """Begin a new high-water mark of resident memory, and return where it begins."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return float("inf")  # not Linux, or not allowed: only what is asked for is known
    return _peak()


def _peak():
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return 0.0


class _Watch:
    paths = None
    hooked = False


def _hook(event, args):
    if _Watch.paths is not None and event in _EVENTS:
        _Watch.paths.append(str(args[0]))


@contextmanager
def watched():
    """List every path that is opened, listed, renamed or removed meanwhile, by Python's own audit events."""
    if not _Watch.hooked:  # a hook can never be removed
        sys.addaudithook(_hook)
        _Watch.hooked = True
    _Watch.paths = []
    try:
        yield _Watch.paths
    finally:
        _Watch.paths = None
