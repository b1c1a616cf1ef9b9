"""
A process that keeps an S3 server running while any process holds the lock of its folder, then kills it.

The server is killed because a graceful stop takes half a minute. It also dies with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> None:
    """Run the command in the folder's guard.json until no process uses the folder."""
    command = json.loads((folder / "guard.json").read_text())
    # The few megabytes of a test need no gigabytes of caches; and its sockets belong below the folder, too.
    limits = {"GOMEMLIMIT": "400MiB", "GOGC": "50", "HOME": str(folder), "TMPDIR": str(folder)}
    libc = ctypes.CDLL(None, use_errno=True)
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env={"PATH": os.environ.get("PATH") or os.defpath, **limits},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - one thread only
        )  # fmt: skip
    # Held until everything is cleaned up, so that the next user waits and starts a new server.
    with (folder / "users").open("a") as users:
        while server.poll() is None and not _alone(users.fileno()):
            time.sleep(_LOOK_S)
        server.kill()
        server.wait()
        shutil.rmtree(folder / "data", ignore_errors=True)
        ports = [after for before, after in itertools.pairwise(command) if before.endswith(".port.grpc")]
        for port in ports:
            for kind in ("master", "volume", "filer", "s3"):
                with contextlib.suppress(OSError):
                    os.unlink(f"/tmp/seaweedfs-{kind}-grpc-{port}.sock")
        with contextlib.suppress(OSError):
            (folder / "state.json").unlink()


def _alone(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
