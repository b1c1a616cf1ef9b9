"""What a rank saw of a call, as plain data that tests compare over ranks."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import current_world
from shardkeep.errors import CheckpointError, Failure


@dataclass(frozen=True)
class Outcome:
    """An answer, or the error in its place."""

    seconds: float
    """From the start of the phase to its end."""
    answer: bytes | None = None
    kind: str = ""
    message: str = ""
    hint: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    by_rank: dict[int, Failure] = field(default_factory=dict)
    cause: str = ""


def rank():
    return dist.get_rank()


def echo(payloads):
    """Decide that each rank gets what all ranks said, and its own number."""
    return [b",".join(payloads) + b">%d" % number for number in range(len(payloads))]


def ask(meeting, phase, work, decide=echo):
    began = time.monotonic()
    try:
        answer = meeting.agree(phase, work, decide)
    except CheckpointError as error:
        cause = repr(error.__cause__) if error.__cause__ else ""
        said = (type(error).__name__, error.message, error.hint, error.details, error.by_rank, cause)
        return Outcome(time.monotonic() - began, None, *said)
    return Outcome(time.monotonic() - began, answer)


def ask_once(work, decide=echo, *, timeout_s=50.0, title="save to a", phase="write"):
    with rendezvous(current_world(timeout_s=timeout_s), title) as meeting:
        return ask(meeting, phase, work, decide)
