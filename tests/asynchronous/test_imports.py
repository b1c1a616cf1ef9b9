"""Nothing is imported behind the caller's back: a process that forks meanwhile, as data loaders do, has half a module."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, tempfile, torch
import shardkeep as sk

handle = sk.async_save({{"w": torch.ones(4), "step": 1}}, tempfile.mkdtemp() + "/a", writer={writer!r})
before = set(sys.modules)
handle.result()
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_the_background_imports_nothing(writer):
    """From the return of the first call to its end no module is loaded."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(writer=writer)], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"
