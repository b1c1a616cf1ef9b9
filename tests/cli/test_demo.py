"""The `shardkeep` command and its demo, as a user runs them: in a process of their own."""

from __future__ import annotations

import subprocess
import sys


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
