"""A Python that has torch already is a Python like any other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow_first import SLOW
from tests.warm.python import WarmPopen, warm_python

SCRIPT = """
import atexit, os, pickle, sys, threading, time

class Here:
    pass

def late():
    time.sleep(0.2)
    print("thread", flush=True)

atexit.register(print, "exit")
threading.Thread(target=late).start()
print(__name__, type(pickle.loads(pickle.dumps(Here()))) is Here, sys.argv[1:], os.getcwd(), sorted(os.environ)[:1])
print(sys.path[0], file=sys.stderr)
sys.exit(3)
"""


def test_a_script_begins_and_ends_as_it_would_by_itself(tmp_path: Path) -> None:
    """Arguments, folder, environment, `__main__`, threads that are waited for, `atexit` and exit code are the same."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words, how = [str(script), "a", "-b"], {"cwd": tmp_path, "env": {"A": "1", "PATH": ""}}
    real = subprocess.run([sys.executable, *words], **how, capture_output=True, text=True, check=False)
    warm = warm_python(*words, **how)
    assert (warm.returncode, warm.stdout, warm.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.stdout.splitlines()[-2:] == ["thread", "exit"]


def test_code_and_modules_run_too(tmp_path: Path) -> None:
    """By `-c` and by `-m`, with torch imported before; an error is a traceback and 1, a signal its number."""
    (tmp_path / "job.py").write_text("import sys; print(__name__, sys.argv[1:], 'torch' in sys.modules)")
    assert warm_python("-m", "job", "x", cwd=tmp_path).stdout == "__main__ ['x'] True\n"
    failed = warm_python("-c", "raise ValueError(5)")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ValueError: 5")
    assert warm_python("-c", "import os; os.kill(os.getpid(), 9)").returncode == -9


def test_what_takes_too_long_is_killed() -> None:
    """As by subprocess."""
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python("-c", "import time; time.sleep(100)", timeout_s=0.5)


def test_lines_go_to_and_fro() -> None:
    """A process that answers line by line ends with its standard input."""
    process = WarmPopen([sys.executable, "-c", "import sys\nfor line in sys.stdin: print(int(line) + 1, flush=True)"])
    for number in (1, 5):
        process.stdin.write(f"{number}\n")
        assert process.stdout.readline() == f"{number + 1}\n"
    process.stdin.close()
    assert process.wait(60) == 0


def test_slow_files_are_there() -> None:
    """What is sorted to the front has not been renamed."""
    assert [name for name in SLOW if not (Path(__file__).parents[1] / name).exists()] == []
