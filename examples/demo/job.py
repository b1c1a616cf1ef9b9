"""
A training job of the demo, seen from outside: its parameters, its ranks as processes, and the events it reports.

Does not import torch. Every process that is started here is also ended here.
"""
# ruff: noqa: INP001 - beside a script to read and run

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
    """The parameters of a job, passed to its ranks as JSON."""

    mesh: tuple[int, ...]
    """(shards) for FSDP2, (replicas, shards) for its hybrid form; their product is the number of ranks."""
    steps: int
    save_every: int = 0
    """Steps between saves; 0: never save."""
    checkpoints: str = ""
    """Directory of all checkpoints of the run."""
    digests: str = ""
    """Directory where ranks write digests of what they are about to save."""
    resume: bool = False
    vocab: int = 2053
    width: int = 256
    blocks: int = 3
    context: int = 32
    batch: int = 8
    """Rows in a global batch, for any number of ranks."""

    @property
    def ranks(self) -> int:
        ranks = 1
        for size in self.mesh:
            ranks *= size
        return ranks


class DemoFailed(Exception):
    """A rank ended with an error, or the job took too long."""


class Ranks:
    """The running processes of one job. Leaving the `with` block kills those that still run."""

    def __init__(self, job: Job, out: Path) -> None:
        out.mkdir(parents=True)
        self._out = out
        self._events = out / "events.jsonl"
        self._deadline = time.monotonic() + DEADLINE_S
        (out / "job.json").write_text(json.dumps(asdict(job)))
        # Listen before rank 0 starts, so that no other process takes the port.
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
            return subprocess.Popen(  # noqa: S603 - our own script, our own arguments
                [sys.executable, str(Path(__file__).with_name("train.py")), str(self._out), str(meeting_point_fd)],
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
        """Poll a condition; raise if a rank fails or the deadline passes."""
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
    """Return whether a committed checkpoint is at this path."""
    try:
        sk.open(str(path))
    except CheckpointNotFound:
        return False
    return True
