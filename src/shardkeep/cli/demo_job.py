"""
A training job of the demo as the outside sees it: what it is told, the ranks as processes, and the events it reports.

Knows nothing of torch, so that the command starts at once. Every process started here is ended here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import shardkeep as sk
from shardkeep.errors import CheckpointNotFound

if TYPE_CHECKING:
    from typing_extensions import Self

DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a rank needs to know; travels as JSON."""

    mesh: tuple[int, ...]
    """(shards) for FSDP2, (replicas, shards) for its hybrid form; their product is the number of ranks."""
    steps: int
    save_every: int = 0
    """Save after every so many steps; 0: never."""
    checkpoints: str = ""
    """Directory of all checkpoints of the run."""
    digests: str = ""
    """Directory where ranks note what they are about to save."""
    resume: bool = False
    vocab: int = 2053
    width: int = 256
    blocks: int = 3
    context: int = 32
    batch: int = 8
    """Rows in a global batch, whatever the number of ranks."""

    @property
    def ranks(self) -> int:
        ranks = 1
        for size in self.mesh:
            ranks *= size
        return ranks


class DemoFailed(Exception):
    """A rank ended with an error, or the job took too long."""


class Ranks:
    """The running processes of one job. Leaving the `with` kills whatever is left of them."""

    def __init__(self, job: Job, out: Path) -> None:
        out.mkdir(parents=True)
        self._out = out
        self._events = out / "events.jsonl"
        self._deadline = time.monotonic() + DEADLINE_S
        (out / "job.json").write_text(json.dumps(asdict(job)))
        # Listening from here on, so that no one else takes the port before rank 0 is up.
        with socket.create_server(("127.0.0.1", 0)) as meeting_point:
            fd = meeting_point.fileno()
            self._processes = [self._start(rank, job.ranks, fd) for rank in range(job.ranks)]

    def _start(self, rank: int, ranks: int, meeting_point_fd: int) -> subprocess.Popen[bytes]:
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",  # the same sums in the same order, and no crowding of the cores
        }
        with (self._out / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own module, our own arguments
                [sys.executable, "-m", "shardkeep.cli.demo_train", str(self._out), str(meeting_point_fd)],
                env=os.environ | own,
                pass_fds=[meeting_point_fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Read what rank 0 has reported so far."""
        text = self._events.read_text() if self._events.exists() else ""
        lines = text.split("\n")[:-1]  # whole ones only
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def wait(self) -> None:
        """Wait for every rank to end well."""
        self.wait_until(lambda: all(process.poll() == 0 for process in self._processes), pause_s=0.02)

    def wait_until(self, condition: Callable[[], object], *, pause_s: float) -> None:
        """Look again and again, and give up when a rank fails or the deadline passes."""
        while not condition():
            for rank, process in enumerate(self._processes):
                if process.poll():
                    raise DemoFailed(f"rank {rank} ended with {process.returncode}:\n{self._log_tail(rank)}")
            if time.monotonic() > self._deadline:
                raise DemoFailed(f"not done after {DEADLINE_S:.0f} s; logs in {self._out}")
            time.sleep(pause_s)

    def freeze(self, rank: int) -> None:
        """Stop one rank where it is (SIGSTOP)."""
        self._processes[rank].send_signal(signal.SIGSTOP)

    def thaw(self, rank: int) -> None:
        """Let a stopped rank run on."""
        self._processes[rank].send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End every rank at once (SIGKILL)."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _log_tail(self, rank: int) -> str:
        text = (self._out / f"rank-{rank}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-25:])


def is_checkpoint(path: Path) -> bool:
    """Tell whether something is committed there."""
    try:
        sk.open(str(path))
    except CheckpointNotFound:
        return False
    return True
