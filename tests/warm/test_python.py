"""A Python that has torch already is a Python like any other."""

import subprocess
import sys
from pathlib import Path

from tests.slow_first import SLOW
from tests.warm.python import warm_python

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


def test_slow_files_are_there() -> None:
    assert [name for name in SLOW if not (Path(__file__).parents[1] / name).exists()] == []
