"""The exit code of a process that has something to be told of at its end, for each way to end."""

import signal
import subprocess
import sys

import pytest

from shardkeep.engine.queue import ExitCode

PROGRAM = """
import sys, threading
from shardkeep.engine.queue import ExitCode
code = ExitCode()
threading._register_atexit(lambda: print(code.fail()))
code.watch()
"""
UNDER_ANOTHER = "before = sys.exit; sys.exit = lambda status: before(status); code.look_away(); sys.exit(3)"
ENDS = {
    "pass": (1, 1),
    "sys.exit()": (1, 1),
    "sys.exit(0)": (1, 1),
    "sys.exit(3)": (3, 3),
    "sys.exit(-1)": (255, 255),
    "sys.exit(256)": (1, 1),
    "sys.exit('text')": (1, 1),
    "raise SystemExit(3)": (1, 1),  # which cannot be known
    "try: sys.exit(4)\nexcept SystemExit: pass": (4, 4),
    "thread = threading.Thread(target=sys.exit, args=(5,)); thread.start(); thread.join()": (1, 1),
    UNDER_ANOTHER: (3, 3),
    "code.look_away(); sys.exit(3)": (1, 1),
    "kept = sys.exit; code.look_away(); sys.exit = lambda status: kept(status); code.watch(); sys.exit(3)": (3, 3),
    "raise ValueError": (1, None),
    "raise KeyboardInterrupt": (-signal.SIGINT, None),
    "sys.ps1 = '>>> '": (0, None),
}


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """The exit code and the output of a process for each of them; four at a time."""
    found = {}
    names = list(ENDS)
    for first in range(0, len(names), 4):
        begun = {
            name: subprocess.Popen(
                [sys.executable, "-c", PROGRAM + name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            for name in names[first : first + 4]
        }
        for name, process in begun.items():
            out, _ = process.communicate(timeout=60)
            found[name] = process.returncode, out
    return found


@pytest.mark.parametrize("end", ENDS)
def test_how_a_process_ends(ended, end):
    """
    It is never 0 unless somebody sits there; what the program gave itself stays, as far as it can be known.
    """
    code, said = ENDS[end]
    assert ended[end] == (code, f"{said}\n")


def test_looking_away_puts_sys_exit_back():
    """
    `sys.exit` is as it was when nobody watches any more.
    """
    before = sys.exit
    code = ExitCode()
    code.watch()
    assert sys.exit != before
    code.watch()
    code.look_away()
    assert sys.exit is before
