"""
A plugin of pytest: files that take long come first, so that at the end no worker has one of them all to itself.

    python -m pytest -p tests.slow_first --numprocesses 3 --dist loadfile --no-loadscope-reorder

By itself, pytest-xdist begins with the files that have the most tests, and the slow ones have few.
"""

import pytest

SLOW = (
    "object_store/test_faults_network.py",
    "objects/test_wrappers.py",
    "training/test_against_torch.py",
    "dcp/test_same_scripts.py",
    "test_docs.py",
    "dcp/test_install.py",
    "faults/test_save_faults.py",
    "dcp/test_async_process.py",
    "manage/test_signals.py",
    "faults/test_kill.py",
    "asynchronous/test_process_mode.py",
    "test_bench.py",
    "faults/test_system_calls.py",
    "asynchronous/test_faults.py",
    "docs/test_demo.py",
    "soak/test_soak.py",
    "object_store/test_process_s3.py",
    "reports/test_lines.py",
    "manage/test_model.py",
    "cli/test_jobs.py",
    "exchange/test_shared.py",
    "exchange/test_torch_files.py",
    "faults/test_concurrent.py",
)
"""More than a quarter of a minute each, beside two others; the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slow files to the front; all others stay in their order."""
    places = {name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(SLOW)))
