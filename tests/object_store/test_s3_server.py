"""The S3 server of the tests: shared, and never left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardkeep.storage.resolve import open_place
from tests.support.s3_server import S3Server

_USER = """
import sys, time
from tests.support.s3_server import S3Server
with S3Server(sys.argv[1]) as server:
    print(server.port, flush=True)
    time.sleep(600)
"""


def test_it_outlives_the_process_that_started_it_but_not_the_last_user(tmp_path: Path) -> None:
    """The first user is killed, the second still has it; after that one nothing runs and no data stay."""
    first = subprocess.Popen([sys.executable, "-c", _USER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    with S3Server(tmp_path) as server:
        assert server.port == port
        first.send_signal(signal.SIGKILL)
        first.communicate()
        time.sleep(0.5)
        store = open_place(server.url("a"), **server.options)
        store.put("a", b"x")
        assert store.get("a", limit=1) == b"x"
        pids = _running(tmp_path)
        assert len(pids) == 2
    until = time.monotonic() + 20
    while _running(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert _running(tmp_path) == []
    assert not (tmp_path / "data").exists()


def _running(folder: Path) -> list[str]:
    """Name the server and its guard, as far as they run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(pid) != os.getpid() and any(word.startswith(os.fsencode(folder)) for word in words):
            found.append(pid)
    return found
