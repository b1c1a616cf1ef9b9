"""The demo, as `make demo` runs it: in a process of its own."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))
try:
    from demo import Killed, checks_of
finally:
    sys.path.remove(str(DEMO))


def test_killed_job_resumes_on_fewer_ranks(tmp_path) -> None:
    """A job killed in the middle of a save resumes from the save before it, on another number of ranks, exactly."""
    command = [sys.executable, str(DEMO / "demo.py"), "--short", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "FAIL" not in done.stdout
    assert "no commit record" in done.stdout


GOOD = {
    "reference": {1: 3.0, 2: 2.0, 3: 1.0},
    "killed": Killed(losses={1: 3.0, 2: 2.0}, last_saved=1, leftover="step-000002"),
    "restored": {"step": 1, "skipped": ["step-000002"], "compared": 7, "differing": []},
    "resumed": {2: 2.000001, 3: 1.0},
}


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        ({}, []),
        ({"killed": replace(GOOD["killed"], losses={1: 3.0, 2: 2.000001})}, [0]),
        ({"restored": GOOD["restored"] | {"skipped": []}}, [1]),
        ({"restored": GOOD["restored"] | {"step": 2}}, [2]),
        ({"restored": GOOD["restored"] | {"differing": ["model.head.weight"]}}, [3]),
        ({"resumed": {2: 2.0, 3: 1.1}}, [4]),
        ({"resumed": {2: 2.0}}, [4]),
    ],
)
def test_verdict_sees_what_is_wrong(wrong, failing) -> None:
    """Each check of the demo fails if and only if what it checks is wrong."""
    checks = checks_of(**(GOOD | wrong))
    assert failing == [number for number, check in enumerate(checks) if not check.ok]
