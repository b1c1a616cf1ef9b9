"""The `shardkeep` command and its demo, as a user runs them: in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from shardkeep.cli.demo import Killed, checks_of


def shardkeep(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardkeep.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


def test_killed_job_resumes_on_fewer_ranks(tmp_path) -> None:
    """
    A job killed in the middle of a save resumes from the save before it, on another number of ranks, exactly.
    """
    done = shardkeep("demo", "--short", "--dir", str(tmp_path))

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
    """
    Each check of the demo fails when, and only when, what it looks at is wrong.
    """
    checks = checks_of(**(GOOD | wrong))

    assert failing == [number for number, check in enumerate(checks) if not check.ok]


def test_version_needs_no_torch() -> None:
    """
    The command answers without paying for the import of torch.
    """
    script = "import sys, shardkeep.cli.main as m; m.main(['--help'])"
    check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {script}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    assert shardkeep("--version").stdout.startswith("shardkeep ")


def test_unknown_command_is_a_usage_error() -> None:
    """
    A command that does not exist ends with 2 and names those that do.
    """
    done = shardkeep("nonsense")

    assert done.returncode == 2
    assert "demo" in done.stderr
